"""`python -m rawgrad`: what this machine can run."""

from rawgrad import preflight

print(preflight())
