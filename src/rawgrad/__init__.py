"""See and repair what goes wrong when the backward of an autograd Function hands raw pointers to a kernel."""

from rawgrad.runtime import preflight  # first: Triton's interpreter switch has to be set before Triton loads

from rawgrad.doctor import Finding, Report, examine  # isort: skip
from rawgrad.ops.rotary import rotary, rotary_tables  # isort: skip
from rawgrad.ops.square import square  # isort: skip
from rawgrad.probes import Snapshot, look, shared_memory  # isort: skip

__all__ = [
    "Finding",
    "Report",
    "Snapshot",
    "examine",
    "look",
    "preflight",
    "rotary",
    "rotary_tables",
    "shared_memory",
    "square",
]
