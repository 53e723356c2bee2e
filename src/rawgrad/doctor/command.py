"""`python -m rawgrad examine module:function --inputs module:make_inputs`: the doctor at a prompt and in CI."""

import argparse
import sys
from pathlib import Path

from rawgrad.doctor import isolated


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """A mistake gets one sentence."""
        self.exit(2, f"{self.prog}: {message}; --help lists the options\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m rawgrad examine",
        description="Examine a Function in a process of its own. Exits with 0 where nothing is broken, 1 where something is, "
        "2 for a mistake in this command.",
    )
    parser.add_argument("target", help="what to examine, such as mine.ops:Square.apply; imported from the current folder")
    parser.add_argument(
        "--inputs", required=True, help="module:make_inputs, which returns the tuple, or a .pt file that holds it"
    )
    parser.add_argument("--reference", help="module:function, the same in PyTorch's own operators")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checks", type=lambda text: text.split(","), help="names with commas between; all where left out")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="CHECK=REASON", help="what is meant so; may be repeated"
    )
    parser.add_argument("--tolerance", type=float, help="relative to the largest number; by dtype where left out")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each check (default 60)")
    parser.add_argument("--memory-limit-mb", type=int, help="address space that it may add while it is examined")
    return parser


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--request"]:  # the child of examine_isolated
        isolated.serve(Path(arguments[1]))
        return 0
    parser = _parser()
    given = parser.parse_args(arguments)
    if any("=" not in one for one in given.allow):
        parser.error("--allow needs CHECK=REASON")
    try:
        report = isolated.examine_isolated(
            given.target,
            given.inputs,
            given.reference,
            seed=given.seed,
            checks=given.checks,
            allow=dict(one.split("=", 1) for one in given.allow),
            tolerance=given.tolerance,
            timeout=given.timeout,
            memory_limit_mb=given.memory_limit_mb,
            progress=(lambda check: print(check, file=sys.stderr)) if sys.stderr.isatty() else None,
        )
    except ValueError as problem:
        parser.exit(2, f"{problem}\n")
    print(report)
    return 0 if report.ok else 1
