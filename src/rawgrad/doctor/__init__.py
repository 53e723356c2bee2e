"""The doctor: which part of the contract between autograd and a raw kernel a Function breaks, with numbers.

It imports probes, raw and runtime only, and works on anybody's code.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from rawgrad.doctor.checks import CHECKS
from rawgrad.doctor.report import Broken, Finding, Report
from rawgrad.doctor.subject import Crashed, Filled, Refused, Subject

# isort: off
from rawgrad.doctor import rounding, layouts, memory, upstream, graph, lifetime, derivatives, sizes, streams  # noqa: F401

# isort: on  (the checks run in this order: values first, what is rare last)

__all__ = ["CHECKS", "Broken", "Finding", "Report", "examination", "examine"]


def examine(
    func: Callable,
    inputs,
    reference: Callable | None = None,
    *,
    seed: int = 0,
    checks: Sequence[str] | None = None,
    allow: Mapping[str, str] | None = None,
    tolerance: float | None = None,
    progress: Callable[[str], None] | None = None,
    isolate: str | None = None,
    timeout: float = 60.0,
) -> Report:
    """Examine a Function for faults that gradcheck and opcheck cannot see.

    Args:
        func: a Function's apply, a function, an nn.Module or an operator of torch.library; it takes `inputs`.
        inputs: a tensor or a tuple as for gradcheck: those that require grad are differentiated. Or a callable that makes
            such a tuple from a number, so that other sizes can be tried; a common first dimension is tried by itself.
        reference: the same in PyTorch's own operators. With it the verdict on values is absolute; without it func is compared
            with itself and with differences.
        seed: of every call, inside fork_rng, and of every tensor that is made. The same seed gives the same report.
        checks: names of doctor.CHECKS; None: all.
        allow: check -> reason: what is meant so becomes a note.
        tolerance: relative to the largest number; None: a multiple of the dtype's rounding.
        progress: is told each check's name before it runs.
        isolate: "module:function", which a fresh process imports in place of func, so that hangs, segfaults and exhausted
            memory are survived and reported; reference is then a name like it. Without it, only exceptions are survived.
        timeout: seconds without a word from that process.

    Returns:
        A Report: `.ok` where nothing is broken, `.findings`, text and HTML, `raise_if_broken()`.

    Raises:
        ValueError: no input requires grad, or a name is not a check's.

    Cost: some hundreds of forwards and backwards of small inputs: give small ones. The tensors that are given are copied and
    not changed. Exceptions of func become findings; a crash of the process does not: see isolate.
    """
    if isolate is not None:
        from rawgrad.doctor.isolated import examine_isolated  # which imports this module

        options = {"seed": seed, "checks": checks, "allow": allow, "tolerance": tolerance, "progress": progress}
        return examine_isolated(isolate, inputs, reference, timeout=timeout, **options)
    found = tuple(
        examination(func, inputs, reference, seed=seed, checks=checks, allow=allow, tolerance=tolerance, progress=progress)
    )
    return Report(_named(func), found)


def examination(
    func: Callable, inputs, reference: Callable | None = None, *, seed: int = 0, checks: Sequence[str] | None = None,
    allow: Mapping[str, str] | None = None, tolerance: float | None = None, progress: Callable[[str], None] | None = None,
    alone: bool = False,
) -> Iterator[Finding]:  # fmt: skip
    """`examine`, a finding at a time. `alone`: in a process of its own, where a crash harms nobody."""
    if isinstance(func, type) and issubclass(func, torch.autograd.Function):
        raise ValueError(f"a Function is called by its apply: give {func.__name__}.apply")
    if isinstance(checks, str):
        raise ValueError(f"checks is a list of names, got one string: [{checks!r}]")
    if not isinstance(allow, Mapping | None):
        raise ValueError(f"allow is a dict of check and reason, got a {type(allow).__name__}")
    for name in [*(checks or ()), *(allow or {})]:
        if name not in CHECKS:
            alike = difflib.get_close_matches(name, CHECKS, 1)
            meant = f"did you mean {alike[0]!r}?" if alike else f"there are {', '.join(CHECKS)}"
            raise ValueError(f"there is no check {name!r}; {meant}")
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    rebuild = inputs if callable(inputs) else None
    inputs = tuple(inputs(8)) if callable(inputs) else tuple(inputs)
    rebuild = rebuild or sizes.by_first_dimension(inputs)
    if isinstance(func, torch.nn.Module):
        func, inputs, rebuild = _of_module(func, inputs, rebuild)
    subject = Subject(func, inputs, reference, seed, tolerance, rebuild)
    subject.alone = alone
    for finding in _found(subject, checks, progress):
        reason = (allow or {}).get(finding.check)
        if reason is not None and finding.told:
            finding = replace(
                finding, verdict="note", silent=False, evidence=f"allowed, {reason}: {finding.evidence}", remedy=""
            )
        yield finding


def _found(subject: Subject, checks: Sequence[str] | None, progress) -> Iterator[Finding]:
    try:
        with Filled(subject):
            subject.learn()
    except Refused as refusal:
        yield Finding("runs", "refused", False, f"on plain contiguous inputs: {refusal}", "", "00")
        return
    except Crashed as crash:
        yield Finding("runs", "broken", False, f"on plain contiguous inputs it {crash}", "see what it raises", "00")
        return
    yield Finding("runs", "healthy", False, "", "", "00")
    for name in checks or CHECKS:
        if progress:
            progress(name)
        if not subject.outputs and name != "joins_the_graph":
            yield Finding(name, "skipped", False, "no output requires grad", "", CHECKS[name].lesson)
        else:
            yield from CHECKS[name].findings(subject)


def _of_module(module: torch.nn.Module, inputs: tuple, rebuild):
    """The module as a function of its parameters and its inputs."""
    names, parameters = zip(*module.named_parameters(), strict=True) if any(True for _ in module.parameters()) else ((), ())

    def func(*given):
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}  # a batch norm counts in its own
        return torch.func.functional_call(module, {**buffers, **dict(zip(names, given, strict=False))}, given[len(names) :])

    again = None if rebuild is None else (lambda size: (*parameters, *rebuild(size)))
    return func, (*parameters, *inputs), again


def _named(func: Callable) -> str:
    owner = getattr(func, "__self__", None)
    name = getattr(owner, "__name__", None) or getattr(func, "__name__", None) or type(func).__name__
    return name
