"""Values: against the reference, in the caller's own dtype, under autocast, and from run to run."""

import torch

from rawgrad.doctor.checks import Seen, check
from rawgrad.doctor.subject import Subject

_WIDEST = (torch.float64, torch.complex128)


@check("compare forward and backward with the reference, step by step, on the numbers named here", "01")
def agrees_with_reference(subject: Subject) -> Seen:
    """Outputs and gradients on plain contiguous inputs, against the reference in float64; then on numbers without a pattern,
    since zeros, ones and rows with mean 0 hide much."""
    if subject.reference is None:
        yield "skipped", "no reference was given: func is compared with itself, and with differences"
        return
    wrong = _disagreement(subject)
    if wrong:
        yield "broken", wrong
        return
    other = subject.scaled()
    try:
        other.learn()
        wrong = _disagreement(other)
    except Exception:  # such numbers may be none that func is for
        return
    if wrong:
        yield "broken", f"with each number of the inputs times one of its own, {wrong}"


def _disagreement(subject: Subject) -> str | None:
    outputs, grads = subject.plain
    if len(outputs) != len(subject.outputs):
        return f"{len(subject.outputs)} differentiable outputs where the reference has {len(outputs)}"
    errors = _errors_of_torch(subject)
    named = [(f"output {n}", y, good) for n, (y, good) in enumerate(zip(subject.outputs, outputs, strict=True))]
    named += [(f"the gradient of input {n}", g, good) for n, g, good in zip(subject.wanted, subject.grads, grads, strict=True)]
    for (what, got, right), torchs in zip(named, errors, strict=True):
        if got is None or right is None or got.shape != right.shape:
            wrong = subject.off(got, right, what)
        else:
            wide = right.to(torch.complex128 if got.is_complex() else torch.float64)
            error = (got.to(wide.dtype) - wide).abs().nan_to_num(torch.inf).max().item() if got.numel() else 0.0
            wrong = subject.off(got, right, what) if not error <= 4 * torchs else None
        if wrong:
            return wrong
    return None


def _errors_of_torch(subject: Subject) -> list[float]:
    """How far the reference itself is from float64 when it runs in the caller's dtype."""
    outputs, grads = subject.run(subject.inputs(), lambda _: [dy.clone() for dy in subject.upstreams], subject.reference)
    right_outputs, right = subject.plain
    errors = []
    for got, good in zip([*outputs, *grads], [*right_outputs, *right], strict=True):
        if got is None or good is None or not got.numel():
            errors.append(0.0)
        else:
            errors.append((got.to(good.dtype) - good).abs().nan_to_num(0).max().item())
    return errors


@check("accumulate in float32 or wider, and round once at the end", "04")
def is_accurate(subject: Subject) -> Seen:
    """Long reductions in the caller's own dtype, against the reference in float64: at most four times torch's own error."""
    if subject.reference is None or subject.rebuild is None or not subject.agrees:
        yield "skipped", "needs a reference with which func agrees, and inputs that can be rebuilt"
        return
    if all(tensor.dtype in _WIDEST for tensor in [*subject.outputs, *subject.grads] if tensor is not None):
        yield "skipped", "the reference in float64 is no more accurate than func in float64"
        return
    rows = min(4096, subject.most_rows())
    long = subject.at(rows)
    subject.attempt(long.learn)
    outputs, grads = long.plain
    names = [f"output {n}" for n in range(len(outputs))] + [f"the gradient of input {n}" for n in long.wanted]
    for what, got, right, torchs in zip(
        names, [*long.outputs, *long.grads], [*outputs, *grads], _errors_of_torch(long), strict=True
    ):
        if got is None or right is None or not got.numel() or got.dtype in _WIDEST:
            continue
        error = (got.to(right.dtype) - right).abs().nan_to_num(torch.inf).max().item()
        size = right.abs().nan_to_num(0, 0, 0).max().item()
        if not error <= 4 * torchs + 2 * torch.finfo(got.dtype).eps * size:
            yield "broken", f"at {rows} rows, {what} is off by {error:.3g} where torch errs by {torchs:.3g} in {got.dtype}"
            return


@check("cast inputs and dy to one dtype at the entry, as torch.amp.custom_fwd and custom_bwd do", "04")
def works_under_autocast(subject: Subject) -> Seen:
    """Under autocast to bfloat16 the gradients keep the inputs' dtypes, and are right within bfloat16's rounding."""
    if not any(subject.given[n].dtype == torch.float32 for n in subject.wanted):
        yield "skipped", "no float32 input"
        return
    inputs = subject.inputs()
    with torch.autocast(subject.device.type, dtype=torch.bfloat16):
        outputs = subject.differentiable(subject.attempt(lambda: subject.call(inputs)))
    given = [dy.to(y.dtype, copy=True) for dy, y in zip(subject.upstreams, outputs, strict=True)]
    got = subject.attempt(lambda: subject.gradients(outputs, inputs, given))
    for n, g, right in zip(subject.wanted, got, subject.truth()[1], strict=True):
        if g is None or right is None or not g.numel():
            continue
        error, size = (g.double() - right.double()).abs().nan_to_num(torch.inf).max().item(), right.abs().max().item()
        if not error <= 0.1 * max(size, 1e-6):
            yield "broken", f"under autocast the gradient of input {n} is off by {error:.3g}, of {size:.3g} at most"
            return


@check("", "01")
def is_deterministic(subject: Subject) -> Seen:
    """Three runs, bit by bit. Sums in another order are healthy, and worth knowing."""
    runs = [subject.run(subject.inputs()) for _ in range(3)]
    for outputs, grads in runs[1:]:
        for one, other in zip([*outputs, *grads], [*runs[0][0], *runs[0][1]], strict=True):
            if one is not None and not torch.equal(one.nan_to_num(), other.nan_to_num()):
                yield "note", f"runs differ in their last bits, by up to {(one - other).abs().max().item():.3g}"
                return
