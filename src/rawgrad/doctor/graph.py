"""The graph around a Function: again, beside, behind and under others."""

from itertools import combinations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rawgrad.doctor.checks import Seen, check
from rawgrad.doctor.subject import Refused, Subject


@check("make the output by a Function's apply: what a kernel fills outside of one has no backward", "00")
def joins_the_graph(subject: Subject) -> Seen:
    """Where an input requires grad, so does the output."""
    if not subject.outputs:
        yield "broken", f"no output has a grad_fn, though {len(subject.wanted)} inputs require grad: nothing will be trained"
    elif len(subject.outputs) < len(subject.all_outputs):
        yield "note", f"{len(subject.all_outputs) - len(subject.outputs)} of {len(subject.all_outputs)} outputs have no grad_fn"


@check("do not write over what is saved; or refuse a second backward by a flag on ctx", "02")
def repeats(subject: Subject) -> Seen:
    """A second backward of the same graph gives the same gradients, or is refused."""
    inputs = subject.inputs()
    outputs = subject.differentiable(subject.call(inputs))
    first = subject.attempt(lambda: subject.gradients(outputs, inputs, subject.upstream(outputs), retain_graph=True))
    first = [None if g is None else g.clone() for g in first]
    watched = _values(subject, inputs)
    second = subject.attempt(lambda: subject.gradients(outputs, inputs, subject.upstream(outputs)), *watched)
    wrong = subject.all_off(second, first)
    if wrong:
        yield "broken", f"the second backward, with retain_graph: {wrong}"


def _others(subject: Subject) -> dict[int, Tensor]:
    """The same numbers in another order, so that they stay in the domain."""
    return {
        n: subject.inputs()[n].detach().flip(tuple(range(subject.given[n].ndim))).contiguous()
        for n in subject.wanted
        if subject.given[n].numel() > 1
    }


@check("keep on ctx what belongs to one call; a buffer of the class or the module belongs to all", "03")
def keeps_calls_apart(subject: Subject) -> Seen:
    """Two forwards, then two backwards, in both orders."""
    changed = _others(subject)
    right = {"the first": subject.truth()[1], "the second": subject.truth(change=changed)[1]}
    for order in (("the first", "the second"), ("the second", "the first")):
        calls = {}
        for name in ("the first", "the second"):
            change = {n: t.clone().requires_grad_() for n, t in changed.items()} if name == "the second" else None
            inputs = subject.inputs(change)
            calls[name] = inputs, subject.differentiable(subject.call(inputs))
        for name in order:
            inputs, outputs = calls[name]
            got = subject.attempt(lambda o=outputs, i=inputs: subject.gradients(o, i, subject.upstream(o)))
            wrong = subject.all_off(got, right[name])
            if wrong:
                yield "broken", f"of two calls, {name}'s backward, run {order.index(name) + 1} of 2: {wrong}"
                return


@check("return new memory for every gradient: a view of a kept buffer is taken over as .grad", "03")
def accumulates(subject: Subject) -> Seen:
    """Two micro-batches add up in .grad, and another parameter's backward leaves it alone. By .backward(), which takes over."""
    leaves, other = subject.inputs(), subject.inputs()
    second = [2 * dy for dy in subject.upstreams]
    for given in ([dy.clone() for dy in subject.upstreams], [dy.clone() for dy in second]):
        _backward(subject, leaves, given)
    parts = zip(subject.truth()[1], subject.truth(upstream=second)[1], strict=True)
    right = [b if a is None else a if b is None else a + b for a, b in parts]
    wrong = subject.all_off([leaves[n].grad for n in subject.wanted], right)
    if wrong:
        yield "broken", f"two micro-batches, with dy and 2 dy, in .grad: {wrong}"
        return
    one = subject.inputs()
    _backward(subject, one, [dy.clone() for dy in subject.upstreams])
    _backward(subject, other, [dy.clone() for dy in second])
    wrong = subject.all_off([one[n].grad for n in subject.wanted], subject.truth()[1])
    if wrong:
        yield "broken", f"another parameter's backward changes the .grad of this one: {wrong}"


def _backward(subject: Subject, inputs: list, given: list[Tensor]) -> None:
    outputs = subject.differentiable(subject.call(inputs))
    subject.attempt(lambda: torch.autograd.backward(outputs, given))


@check("write to new memory, not into dy: a sum hands the same dy to all its addends", "03")
def shares_with_siblings(subject: Subject) -> Seen:
    """Beside another addend, made before and after, through a view, and in a residual."""
    for n, y in enumerate(subject.outputs):
        for first in ("it", "this"):
            for name, beside in {"5 * c": lambda c: 5 * c, "c.view": lambda c: c.view(c.shape)}.items():
                c = torch.zeros_like(y).requires_grad_()
                inputs = subject.inputs()
                other = beside(c) if first == "it" else None
                outputs = subject.differentiable(subject.call(inputs))
                outputs[n] = outputs[n] + (beside(c) if other is None else other)
                given = [dy.clone() for dy in subject.upstreams]
                subject.attempt(lambda o=outputs, g=given: torch.autograd.backward(o, g), *_values(subject, inputs))
                wrong = subject.off(c.grad, (5 if name == "5 * c" else 1) * subject.upstreams[n], "the gradient of c")
                if wrong:
                    yield "broken", f"in f(x) + {name}, {name} made {'first' if first == 'it' else 'last'}: {wrong}"
                    return
        for m in subject.wanted:
            if subject.leaves and subject.given[m].shape == y.shape and subject.given[m].dtype == y.dtype:
                inputs = subject.inputs()
                leaf = inputs[m]
                inputs[m] = h = 1 * leaf
                outputs = subject.differentiable(subject.call(inputs))
                outputs[n] = h + outputs[n]
                given = [dy.clone() for dy in subject.upstreams]
                (got,) = subject.attempt(lambda o=outputs, leaf=leaf, g=given: torch.autograd.grad(o, leaf, g))
                right = subject.truth()[1][subject.wanted.index(m)]
                right = subject.upstreams[n] + (0 if right is None else right.to(y.dtype))
                wrong = subject.off(got, right, f"the gradient of h, input {m}")
                if wrong:
                    yield "broken", f"in a residual, h + f(h): {wrong}"
                    return


def _values(subject: Subject, inputs: list) -> list[Tensor]:
    return [inputs[n] for n in subject.tensors]


class _SavesItsOutput(torch.autograd.Function):
    """x, whose backward multiplies by the output that it saved, as exp's does."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = x.clone()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy * ctx.saved_tensors[0].conj()


@check("do not write over an input: an operator before you, or beside you, may have saved it", "02")
def spares_saved_outputs(subject: Subject) -> Seen:
    """Behind an operator that saved its output, as exp does, and beside one that saved the input, as x * x does."""
    for m in subject.wanted:
        right = subject.truth()[1][subject.wanted.index(m)]
        if right is None:
            continue
        values = subject.given[m].detach()
        for name in ("behind", "beside"):
            inputs = subject.inputs()
            leaf = inputs[m]
            inputs[m] = h = _SavesItsOutput.apply(leaf) if name == "behind" else 1 * leaf
            other = (h * h).sum() if name == "beside" else None
            outputs = subject.differentiable(subject.call(inputs))
            given = [dy.clone() for dy in subject.upstreams]
            over = [*outputs, *([] if other is None else [other])]
            given += [] if other is None else [torch.ones_like(other)]
            (got,) = subject.attempt(lambda o=over, leaf=leaf, g=given: torch.autograd.grad(o, leaf, g))
            good = right.to(values.dtype) * values.conj() if name == "behind" else right.to(values.dtype) + 2 * values.conj()
            wrong = subject.off(got, good, f"the gradient of input {m}")
            if wrong:
                what = "behind an operator that saved its output" if name == "behind" else "beside x * x, which saved x"
                yield "broken", f"{what}, {wrong}"
                return


@check("read one argument after the other is done with, and write to neither", "03")
def takes_one_tensor_twice(subject: Subject) -> Seen:
    """The same tensor in two places."""
    pairs = [
        (a, b)
        for a, b in combinations(subject.wanted, 2)
        if (subject.given[a].shape, subject.given[a].dtype) == (subject.given[b].shape, subject.given[b].dtype)
    ]
    if not pairs:
        yield "skipped", "no two inputs of one shape and dtype"
        return
    for a, b in pairs:
        values = subject.inputs()[a].detach()
        outputs, grads = subject.truth(change={a: values, b: values})
        inputs = subject.inputs()
        inputs[b] = inputs[a]
        ys, got = subject.attempt(lambda i=inputs: subject.run(i))
        good = [g for n, g in zip(subject.wanted, grads, strict=True) if n in (a, b) and g is not None]
        wrong = next(filter(None, (subject.off(y, right, "the output") for y, right in zip(ys, outputs, strict=True))), None)
        wrong = wrong or (subject.off(got[subject.wanted.index(a)], sum(good), "its gradient", *good) if good else None)
        if wrong:
            yield "broken", f"one tensor as inputs {a} and {b}: {wrong}"
            return


@check("ask ctx.needs_input_grad, and return a gradient or None for each input by itself", "04")
def serves_any_subset(subject: Subject) -> Seen:
    """Any of the inputs may require grad, and the others not."""
    if len(subject.wanted) < 2:
        yield "skipped", "one input that requires grad"
        return
    subsets = [[n] for n in subject.wanted] + [[m for m in subject.wanted if m != n] for n in subject.wanted]
    for subset in {tuple(s): s for s in subsets}.values():
        inputs = subject.inputs()
        for n in subject.wanted:
            inputs[n].requires_grad_(n in subset)
        outputs = subject.differentiable(subject.call(inputs))
        if not outputs:
            yield "broken", f"where input {subset} alone requires grad, no output does"
            return
        if len(outputs) != len(subject.upstreams):
            continue
        leaves = [inputs[n] for n in subset]
        given = [dy.clone() for dy in subject.upstreams]
        got = subject.attempt(lambda o=outputs, i=leaves, g=given: torch.autograd.grad(o, i, g, allow_unused=True))
        for n, one in zip(subset, got, strict=True):
            wrong = subject.off(one, subject.truth()[1][subject.wanted.index(n)], f"the gradient of input {n}")
            if wrong:
                yield "broken", f"where inputs {subset} alone require grad: {wrong}"
                return


@check("save by save_for_backward what backward reads, and make it anew in each forward", "04")
def survives_checkpoint(subject: Subject) -> Seen:
    """The same gradients under torch.utils.checkpoint, which runs forward again in backward."""
    inputs = subject.inputs()

    def run():
        with subject.seeded():
            outputs = checkpoint(lambda *given: tuple(subject.call(given)), *inputs, use_reentrant=False)
            outputs = subject.differentiable(outputs)
            return subject.gradients(outputs, inputs, subject.upstream(outputs))

    try:
        wrong = subject.all_off(subject.attempt(run), subject.truth()[1])
    except Refused as refusal:
        if not str(refusal).startswith("CheckpointError"):
            raise
        yield "broken", f"under checkpoint, {refusal}", False
        return
    if wrong:
        yield "broken", f"under checkpoint, {wrong}"


@check("read saved tensors from ctx.saved_tensors, and keep no pointer to them", "04")
def survives_saved_tensor_hooks(subject: Subject) -> Seen:
    """What is saved is kept elsewhere, as offloading does, and the memory that it lay in is written over."""
    originals = []

    def pack(tensor: Tensor) -> Tensor:
        originals.append(tensor.detach())
        return tensor.detach().clone()

    inputs = subject.inputs()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.clone()):
        outputs = subject.differentiable(subject.attempt(lambda: subject.call(inputs)))
    mine = {t.untyped_storage().data_ptr() for t in [*_values(subject, inputs), *outputs]}
    for tensor in originals:
        if tensor.untyped_storage().data_ptr() not in mine and tensor.is_floating_point():
            with torch.no_grad():
                tensor.fill_(torch.nan)
    got = subject.attempt(lambda: subject.gradients(outputs, inputs, subject.upstream(outputs)))
    wrong = subject.all_off(got, subject.truth()[1])
    if wrong:
        yield "broken", f"with saved tensors kept elsewhere, {wrong}"


@check("tune on copies, and reset what a kernel adds to before each of its trials", "03")
def first_call_is_like_later_ones(subject: Subject) -> Seen:
    """The first call at a shape, where a kernel is tuned or a buffer is made, and the second."""
    _, again = subject.run(subject.inputs())
    wrong = subject.all_off(subject.first_grads, again)
    if wrong:
        yield "broken", f"in the first call, {wrong}, which is what the second gives"
        return
    if subject.rebuild:
        for n in (3, 5):
            other = subject.at(n)
            first = subject.attempt(lambda other=other: other.run(other.inputs()))
            second = other.run(other.inputs())
            wrong = other.all_off(first[1], second[1])
            if wrong:
                yield "broken", f"in the first call at size {n}, {wrong}, which is what the second gives"
                return
