"""Gradients against differences, and the gradients of gradients."""

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from rawgrad.doctor.checks import Seen, check
from rawgrad.doctor.subject import Crashed, Refused, Subject

_FAST_FROM = 1000  # elements: from here on gradcheck projects instead of trying every element


def _takes_float64(subject: Subject) -> bool:
    inputs = subject.inputs(dtype=torch.float64)
    try:
        outputs = subject.differentiable(subject.attempt(lambda: subject.call(inputs)))
        subject.attempt(lambda: subject.gradients(outputs, inputs, subject.upstream(outputs)))
    except (Refused, Crashed):
        return False
    return all(y.dtype in (torch.float64, torch.complex128) for y in outputs)


@check("derive backward anew, and test it by gradcheck in float64", "01")
def matches_differences(subject: Subject) -> Seen:
    """torch.autograd.gradcheck in float64, contiguous; where func takes float32 only, one direction with a coarse step."""
    if not _takes_float64(subject):
        yield from _by_one_direction(subject)
        return
    try:
        wrong = _gradcheck(subject)
        if wrong and not _gradcheck(subject.nudged()):
            yield "note", f"at these numbers only, which lie at a kink, {wrong}"
        elif wrong:
            yield "broken", wrong
    except Exception as problem:  # it asks for a second backward of one graph, which may be refused
        raise Refused(f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}"[:200]) from problem


def _gradcheck(subject: Subject) -> str | None:
    """What gradcheck says against it."""
    try:
        with subject.seeded():
            torch.autograd.gradcheck(
                lambda *given: tuple(subject.differentiable(subject.call([_copied(value) for value in given]))),
                subject.inputs(dtype=torch.float64),
                fast_mode=sum(subject.given[n].numel() for n in subject.wanted) > _FAST_FROM,
                nondet_tol=1e-12,
            )
    except GradcheckError as problem:
        lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
        return f"gradcheck: {' '.join(lines[:3])}"[:300]
    return None


def _copied(value):
    """gradcheck moves its inputs in place, so what func writes over them would move what is compared."""
    return value.clone() if isinstance(value, Tensor) else value


def _by_one_direction(subject: Subject) -> Seen:
    real = [n for n in subject.wanted if subject.given[n].dtype == torch.float32]
    if not real or any(y.dtype != torch.float32 for y in subject.outputs):
        yield "skipped", "func does not take float64, and float32 is too coarse here"
        return
    directions = dict(zip(real, subject.upstream([subject.given[n].detach() for n in real], salt=7), strict=True))

    difference = subject.difference(directions, subject.upstreams, 1e-2)
    right = sum(
        (subject.grads[subject.wanted.index(n)].double() * direction.double()).sum().item()
        for n, direction in directions.items()
        if subject.grads[subject.wanted.index(n)] is not None
    )
    size = max(abs(difference), abs(right), sum(y.abs().sum().item() for y in subject.outputs) * 1e-3, 1e-6)
    if not abs(difference - right) <= 0.05 * size:
        yield "broken", f"along one direction the difference is {difference:.4g}, and the gradient says {right:.4g}"


ALONE, BESIDE, JOINED = "alone", "beside another way to the input", "where dy depends on the input"
_ASKED = ((ALONE, "grad"), (ALONE, "backward"), (BESIDE, "grad"), (BESIDE, "backward"), (JOINED, "grad"))


@check("make backward of Functions that can be differentiated, or raise in it where torch.is_grad_enabled()", "04")
def second_derivative_is_right_or_refused(subject: Subject) -> Seen:
    """By .backward() and by torch.autograd.grad; alone, beside another way to the input, and behind a loss that makes dy depend
    on the input, as every loss but a sum does."""
    in_float64 = _takes_float64(subject)
    reference = None if in_float64 else subject.reference
    if not in_float64 and reference is None:
        yield "skipped", "func does not take float64, and there is no reference"
        return
    dtype = torch.float64 if in_float64 else None
    n = subject.wanted[0]
    right = {joined: _second_by_differences(subject, n, reference, joined) for joined in (False, True)}
    if right[False] is None and right[True] is None:
        yield "skipped", "the differences of the gradient do not settle here"
        return
    silent = []
    for where, by in _ASKED:
        if right[where == JOINED] is None:
            continue
        good, direction, budget = right[where == JOINED]
        inputs = subject.inputs(dtype=dtype)
        x = inputs[n]
        total = subject.attempt(lambda i=inputs, w=where: _summed_gradient(subject, i, joined=w == JOINED, create_graph=True))
        if where == BESIDE:
            total = total + torch.real(x * x).sum() * 3
            good = good + torch.real(6 * x.detach() * direction).sum().item()
        if not total.requires_grad:
            continue  # asking raises: loud
        try:
            if by == "grad":
                (second,) = torch.autograd.grad(total, x, allow_unused=True)
            else:
                total.backward()
                second = x.grad
        except Exception:  # refused, which is loud
            continue
        got = 0.0 if second is None else torch.real(second.conj() * direction).sum().item()
        if not abs(got - good) <= budget:
            silent.append(f"{where}, by {by}, {got:.5g} where {good:.5g} is right")
    if silent:
        yield "broken", f"a second derivative of input {n}, along one direction: {'; '.join(silent)}"
        return
    if right[False] is not None and abs(right[False][0]) > right[False][2]:
        total = subject.attempt(lambda: _summed_gradient(subject, subject.inputs(dtype=dtype), create_graph=True))
        if not total.requires_grad:
            yield "refused", "the gradient does not require grad under create_graph"


def _summed_gradient(subject: Subject, inputs: list, func=None, *, joined: bool = False, **how) -> Tensor:
    """The gradients by all that is wanted, each times numbers of its own, in one sum. `joined`: of a dy to which y is added."""
    outputs = subject.differentiable(subject.call(inputs, func))
    given = [dy.to(y.dtype, copy=True) + (y if joined else 0) for dy, y in zip(subject.upstreams, outputs, strict=True)]
    grads = subject.gradients(outputs, inputs, given, **how)
    weights = subject.upstream([_wide(subject.given[m]) for m in subject.wanted], salt=3)
    terms = [torch.real(g * w.to(g.dtype)).sum() for g, w in zip(grads, weights, strict=True) if g is not None]
    return sum(terms, torch.zeros((), dtype=torch.float64, device=subject.device))


def _second_by_differences(subject: Subject, n: int, reference, joined: bool):
    """d/dx of the summed gradient along one direction, by central differences in float64, that direction, and how far off it
    may be; None where the differences do not settle."""
    wide = subject.inputs(dtype=torch.float64)[n].detach()
    (direction,) = subject.upstream([wide], salt=5)
    direction = direction / direction.norm()
    found = []
    for step in (1e-4, 2e-4):
        ends = []
        for sign in (1, -1):
            inputs = subject.inputs({n: (wide + sign * step * direction).requires_grad_()}, torch.float64)
            ends.append(_summed_gradient(subject, inputs, reference, joined=joined).item())
        found.append((ends[0] - ends[1]) / (2 * step))
    size = max(1e-6, abs(found[0]), *(g.abs().max().item() for g in subject.grads if g is not None and g.numel()))
    if not abs(found[0] - found[1]) <= 1e-3 * size:
        return None
    return found[0], direction, 1e-3 * size


def _wide(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, dtype=torch.complex128 if tensor.is_complex() else torch.float64)
