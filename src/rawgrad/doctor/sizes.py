"""Other sizes than the one that was given: none, one, around a block, and beyond what 32 bits count."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from rawgrad.doctor.checks import Seen, check
from rawgrad.doctor.subject import Crashed, Refused, Subject

SIZES = (0, 1, 2, 3, 7, 31, 32, 33, 127, 128, 129, 257, 1025)


def by_first_dimension(inputs: tuple):
    """Makes inputs of another size along the first dimension of all tensors that have the same one; None where none has."""
    sizes = [value.shape[0] for value in inputs if isinstance(value, Tensor) and value.requires_grad and value.ndim]
    indices = any(
        isinstance(v, Tensor) and not (v.is_floating_point() or v.is_complex() or v.dtype == torch.bool) for v in inputs
    )
    if not sizes or sizes[0] == 0 or indices:  # an index may point beyond the fewer rows
        return None

    def rebuild(size: int) -> tuple:
        made = []
        for value in inputs:
            if isinstance(value, Tensor) and value.ndim and value.shape[0] == sizes[0]:
                places = torch.arange(size, device=value.device) % sizes[0]
                made.append(value.detach().index_select(0, places).requires_grad_(value.requires_grad))
            else:
                made.append(value)
        return tuple(made)

    return rebuild


@check("mask by the number of elements, count blocks upwards, and answer for no elements at all", "01")
def handles_any_size(subject: Subject) -> Seen:
    """0, 1, primes, and sizes around a block: against the reference, or against the same rows in a call of the given size."""
    if subject.rebuild is None:
        yield "skipped", "inputs cannot be rebuilt at other sizes; give a callable that makes them from a number"
        return
    refused, most = [], subject.most_rows()
    for size in SIZES:
        if size > most:
            break
        try:
            wrong = _at(subject, size)
        except Refused as refusal:
            refused.append(f"{size}: {refusal}")
            continue
        except Crashed as crash:
            yield "broken", f"at size {size} it {crash}", False
            return
        if wrong:
            yield "broken", f"at size {size}, {wrong}"
            return
    if len(refused) == len(SIZES):
        yield "skipped", f"no other size is taken, such as {refused[0]}"
    elif refused:
        yield "refused", f"at size {refused[0]}{f'; and {len(refused) - 1} more' if len(refused) > 1 else ''}"


def _at(subject: Subject, size: int) -> str | None:
    other = subject.at(size)
    other.learn()
    if subject.reference and subject.agrees:
        given = {n: other.given[n] for n in other.tensors}
        return other.results_off((other.outputs, other.grads), other.plain, shaken=given)
    return _against_differences(other) and _against_differences(other.nudged())  # at a kink the first may be wrong by itself


def _against_differences(other: Subject) -> str | None:
    """Without a reference: the gradient along one direction against a difference, where float64 is taken."""
    if not sum(other.given[n].numel() for n in other.wanted) or any(other.given[n].is_complex() for n in other.wanted):
        return None
    try:
        inputs = other.inputs(dtype=torch.float64)
        outputs, grads = other.attempt(lambda: other.run(inputs))
    except (Refused, Crashed):
        return None
    if any(y.dtype != torch.float64 for y in outputs):
        return None
    given = other.upstream(outputs)
    directions = dict(zip(other.wanted, other.upstream([inputs[n].detach() for n in other.wanted], salt=7), strict=True))
    difference = other.difference(directions, given, 1e-6, torch.float64)
    said = sum((g * directions[n]).sum().item() for n, g in zip(other.wanted, grads, strict=True) if g is not None)
    size = sum((g.abs() * directions[n].abs()).sum().item() for n, g in zip(other.wanted, grads, strict=True) if g is not None)
    if abs(difference - said) <= 1e-3 * max(size, abs(difference), 1e-6):
        return None
    return f"along one direction the difference is {difference:.6g}, and the gradient says {said:.6g}"


@check("multiply strides and indices in 64 bits: long long in CUDA, .to(tl.int64) in Triton", "01")
def reaches_beyond_2_31(subject: Subject) -> Seen:
    """A row that begins 2^31 elements behind the first, in a sparse file. An offset that wraps around leaves the memory, so
    this runs in a process of its own only."""
    n = subject.wanted[0]
    given = subject.given[n]
    if not subject.alone:
        yield "skipped", "an offset that wraps around would end this process: use isolate="
        return
    if subject.device.type != "cpu" or given.ndim < 2 or given.shape[0] < 2:
        yield "skipped", "needs a CPU, and a first input of two rows or more"
        return
    far = (1 << 31) // (given.shape[0] - 1) + 64
    with tempfile.TemporaryDirectory() as folder:
        count = far * (given.shape[0] - 1) + given[0].numel() + 64
        file = Path(folder) / "sparse"
        room = torch.from_file(str(file), shared=True, size=count, dtype=given.dtype)
        x = room.as_strided(given.shape, (far, *given[0].contiguous().stride()), 0)
        x.copy_(given.detach())
        inputs = subject.inputs({n: x.requires_grad_()})
        wrong = subject.results_off(subject.attempt(lambda: subject.run(inputs)), subject.truth())
        if wrong:
            yield "broken", f"with a row stride of {far}: {wrong}"
