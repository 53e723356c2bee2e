"""`python -m rawgrad`: what this machine can run. `python -m rawgrad examine module:function`: the doctor."""

import sys

from rawgrad import preflight
from rawgrad.doctor import command

if sys.argv[1:2] == ["examine"]:
    sys.exit(command.main(sys.argv[2:]))
if len(sys.argv) > 1:
    print(f"python -m rawgrad takes nothing, or examine module:function, got {sys.argv[1]!r}", file=sys.stderr)
    sys.exit(2)
print(preflight())
