"""What is read and written: bytes, not versions."""

import math

import torch
from torch import Tensor

from rawgrad import probes
from rawgrad.doctor.checks import Seen, check
from rawgrad.doctor.subject import Crashed, Refused, Subject, guarded


@check("write to new memory; where the write is meant, declare it: mark_dirty in forward, increment_version in backward", "02")
def leaves_inputs_alone(subject: Subject) -> Seen:
    """Bytes and versions of every input, before and after forward, and after backward."""
    if not subject.leaves:
        yield "note", "forward writes over its inputs, and declares it: whoever saved one will raise"
    inputs = subject.inputs()
    tensors = {n: inputs[n] for n in subject.tensors}
    before = {n: (probes.look(t).digest, t._version, t.detach().clone()) for n, t in tensors.items()}
    outputs = subject.differentiable(subject.attempt(lambda: subject.call(inputs)))
    yield from _changed("forward", tensors, before)
    between = {n: (probes.look(t).digest, t._version, t.detach().clone()) for n, t in tensors.items()}
    subject.attempt(lambda: subject.gradients(outputs, inputs, subject.upstream(outputs)))
    yield from _changed("backward", tensors, between)


def _changed(when: str, tensors: dict[int, Tensor], before: dict) -> Seen:
    for n, tensor in tensors.items():
        bytes_, counted, values = before[n]
        if probes.look(tensor).digest == bytes_:
            continue
        count = int((tensor.detach() != values).sum())
        said = f"{when} writes over {count} of {tensor.numel()} elements of input {n}"
        if tensor._version != counted:
            yield "note", f"{said}, and declares it: whoever saved it will raise"
        else:
            yield (
                "unsafe",
                f"{said}, and its version does not move: wrong as soon as anybody reads or saved it, and nobody is told",
            )


@check("write to new memory: a sum hands the same dy to all its addends, and declaring does not reach them", "03")
def leaves_upstream_alone(subject: Subject) -> Seen:
    """Bytes of dy, before and after backward."""
    given = [guarded(dy) for dy in subject.upstreams]
    before = [(dy._version, dy.clone()) for dy in given]
    inputs = subject.inputs()
    subject.attempt(lambda: subject.run(inputs, lambda _: given), *given)
    for n, (dy, (counted, values)) in enumerate(zip(given, before, strict=True)):
        if count := int((dy != values).sum()):
            declared = "declared, which reaches only whoever saved it" if dy._version != counted else "and nobody is told"
            what = f"of dy of output {n}" if len(given) > 1 else "of dy"
            yield "unsafe", f"backward writes over {count} of {dy.numel()} elements {what}, {declared}: wrong beside a residual"


@check("mask loads and stores by the number of elements, and count in 64 bits", "01")
def stays_inside(subject: Subject) -> Seen:
    """Every tensor that is handed in lies between guards of 512 bytes or more. Two fills of the guards show what is read
    outside, and a guard that changed what is written there."""
    results = []
    for fill in (3.0, -7.0):
        inputs = subject.inputs(
            {n: guarded(subject.inputs()[n], fill).requires_grad_(n in subject.wanted) for n in subject.tensors}
        )
        given = [guarded(dy, fill) for dy in subject.upstreams]
        watched = {**{f"input {n}": inputs[n] for n in subject.tensors}, **{f"dy {n}": dy for n, dy in enumerate(given)}}
        before = {name: _outside(tensor) for name, tensor in watched.items()}
        results.append(subject.attempt(lambda inputs=inputs, given=given: subject.run(inputs, lambda _: given)))
        for name, tensor in watched.items():
            changed = int((_outside(tensor) != before[name]).sum())
            if changed:
                yield "broken", f"{changed} elements in the guards around {name} were written"
                return
    wrong = subject.results_off(results[1], results[0], "output {}")
    if wrong:
        yield "broken", f"what lies outside is read: with other numbers there, {wrong}"


def _outside(tensor: Tensor) -> Tensor:
    """The guards of a contiguous tensor that `guarded` made."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    room = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage(), 0, (count,), (1,))
    start = tensor.storage_offset()
    return torch.cat([room[:start], room[start + tensor.numel() :]])


@check("write every element of what you return, or allocate it by zeros", "03")
def fills_its_results(subject: Subject) -> Seen:
    """torch.empty is filled with NaN, with 7 and with 0 in turn, at the given size and at others. What differs was never
    written."""
    wrong = _unwritten(subject, subject)
    if wrong:
        yield "broken", wrong
        return
    for size in (1, 33) if subject.rebuild else ():
        other = subject.at(size)
        try:
            subject.attempt(other.learn)
        except (Refused, Crashed):  # handles_any_size tells
            continue
        wrong = _unwritten(subject, other)
        if wrong:
            yield "broken", f"at size {size}, {wrong}"
            return


def _unwritten(filling: Subject, subject: Subject) -> str | None:
    results = []
    for filling.fill in (math.nan, 7.0, 0.0):
        inputs, upstream = subject.inputs(), [dy.clone() for dy in subject.upstreams]
        results.append(subject.attempt(lambda inputs=inputs, upstream=upstream: subject.run(inputs, lambda _: upstream)))
    for filled in results[:2]:
        wrong = subject.results_off(filled, results[2], "output {}")
        if wrong:
            said = f"elements that nobody wrote; with other numbers in empty memory, {wrong}"
            return said.replace("is right", "comes of zeros")
    return None


def overlap(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and probes.overlap(a, b)


@check("return new memory for every gradient", "03")
def returns_its_own_memory(subject: Subject) -> Seen:
    """Gradients against inputs, dy, each other, and those of the call before, by address range."""
    inputs = subject.inputs()  # a dy of ones invites a shortcut
    of_ones = subject.attempt(lambda: subject.run(inputs, lambda ys: [torch.ones_like(y) for y in ys])[1])
    for n, g in zip(subject.wanted, of_ones, strict=True):
        for m in subject.tensors:
            if overlap(g, inputs[m]):
                yield "unsafe", f"the gradient of input {n} lies in input {m}: what is added to one is added to the other"
                return
    inputs, upstream = subject.inputs(), [dy.clone() for dy in subject.upstreams]
    grads = subject.attempt(lambda: subject.run(inputs, lambda _: upstream)[1])
    kept = [None if g is None else g.clone() for g in grads]
    of_dy = [any(overlap(g, dy) for dy in upstream) for g in grads]
    for i, n in enumerate(subject.wanted):
        for j in range(i + 1, len(grads)):
            if overlap(grads[i], grads[j]) and not (of_dy[i] and of_dy[j]):
                pair = f"the gradients of inputs {n} and {subject.wanted[j]}"
                yield (
                    "note",
                    f"{pair} share memory: autograd copies one where it is the same tensor, and not where it is a view",
                )
    again = subject.inputs()
    others = subject.attempt(lambda: subject.run(again, lambda _: [3 * dy for dy in upstream])[1])
    for n, g, was, other in zip(subject.wanted, grads, kept, others, strict=True):
        if g is not None and not torch.equal(torch.nan_to_num(g), torch.nan_to_num(was)):
            by = (g - was).abs().max().item()
            yield "broken", f"the next backward changes the gradient of input {n} that this one gave, by up to {by:.3g}"
        elif overlap(g, other):
            yield "unsafe", f"two backwards hand out the same memory for input {n}"
