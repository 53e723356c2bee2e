"""What backward does with the gradient that it is given."""

import torch
from torch import Tensor

from rawgrad.doctor.checks import Seen, check
from rawgrad.doctor.subject import Refused, Subject


def _gradients(subject: Subject, upstream: list[Tensor]) -> list[Tensor | None]:
    """Copies: the next backward may write over what this one returned, which returns_its_own_memory tells."""
    inputs = subject.inputs()
    grads = subject.attempt(lambda: subject.run(inputs, lambda _: [dy.clone() for dy in upstream])[1])
    return [None if g is None else g.clone() for g in grads]


def _combined(subject: Subject, *parts: tuple[float, list[Tensor | None]]) -> list[Tensor | None]:
    made = []
    for gradients in zip(*(grads for _, grads in parts), strict=True):
        terms = [scale * g for (scale, _), g in zip(parts, gradients, strict=True) if g is not None]
        made.append(sum(terms) if terms else None)
    return made


@check("multiply by all of dy, in backward; no shortcut for a dy that is 1, and nothing scaled in forward", "04")
def is_linear_in_upstream(subject: Subject) -> Seen:
    """0 for a dy of zeros, in proportion to dy, and the gradient of a sum of dys is the sum of their gradients."""
    dy = subject.upstreams
    ones = [torch.ones_like(y) for y in dy]
    zeros = [torch.zeros_like(y) for y in dy]
    first = [_one_hot(y) for y in dy]
    rest = [y - one * y for y, one in zip(dy, first, strict=True)]
    plain = _gradients(subject, dy)
    of_ones = _gradients(subject, ones)
    cases = {
        "for a dy of zeros": (zeros, [None if g is None else torch.zeros_like(g) for g in plain]),
        "for -2.5 dy": ([-2.5 * y for y in dy], _combined(subject, (-2.5, plain))),
        "for a dy of 0.1, ten times less than for ones": ([0.1 * y for y in ones], _combined(subject, (0.1, of_ones))),
        "for dy without its first element": (rest, _combined(subject, (1, plain), (-1, _gradients(subject, [
            one * y for y, one in zip(dy, first, strict=True)
        ])))),
    }  # fmt: skip
    for name, (given, right) in cases.items():
        got = _gradients(subject, given)
        for n, one, good, whole in zip(subject.wanted, got, right, plain, strict=True):
            if one is None or whole is None:
                continue
            budget = subject.allowed(one, whole)
            error = (one - good).abs().max().item() if one.numel() else 0.0
            if not error <= 4 * budget:
                wrong = (
                    subject.off(one, good, f"the gradient of input {n}") or f"the gradient of input {n} is off by {error:.3g}"
                )
                yield "broken", f"{name}, {wrong}"
                return


def _one_hot(like: Tensor) -> Tensor:
    made = torch.zeros_like(like)
    made.view(-1)[:1] = 1
    return made


@check("take None, or zeros, for an output that nobody used", "04")
def takes_unused_outputs(subject: Subject) -> Seen:
    """Of several outputs, one is used at a time."""
    if len(subject.outputs) < 2:
        yield "skipped", "one output"
        return
    for used in range(len(subject.outputs)):
        inputs = subject.inputs()
        outputs = subject.differentiable(subject.call(inputs))
        given = [subject.upstreams[used].clone()]
        try:
            got = subject.attempt(lambda: subject.gradients([outputs[used]], inputs, given))  # noqa: B023
        except Refused as refusal:
            yield "broken", f"where output {used} alone is used, it raises {refusal}", False
            return
        alone = [dy if n == used else torch.zeros_like(dy) for n, dy in enumerate(subject.upstreams)]
        wrong = subject.all_off(got, subject.truth(upstream=alone)[1])
        if wrong:
            yield "broken", f"where output {used} alone is used, {wrong}"
            return
