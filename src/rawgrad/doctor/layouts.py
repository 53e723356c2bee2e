"""How a tensor may lie in memory: the gradient that backward is given, and every input."""

from collections.abc import Callable, Iterator
from itertools import combinations

import torch
from torch import Tensor

from rawgrad.doctor.checks import Seen, check
from rawgrad.doctor.subject import Crashed, Refused, Subject, contiguous_strides, guarded

Laid = tuple[Tensor, Tensor]  # the same values: contiguous, and laid out


def layouts(shape: tuple[int, ...]) -> dict[str, Callable[[Tensor], Laid]]:
    """The ways in which autograd and its callers lay a tensor of `shape` in memory, each in a storage filled with NaN."""
    found: dict[str, Callable[[Tensor], Laid]] = {}
    if not shape or 0 in shape:
        return found
    plain = contiguous_strides(shape)
    long = [axis for axis, size in enumerate(shape) if size > 1]
    found["one number, expanded"] = lambda t: _expanded(t, range(t.ndim))
    if len(long) > 1:
        for axis in long:
            found[f"expanded along axis {axis}"] = lambda t, axis=axis: _expanded(t, [axis])
    for a, b in combinations(long, 2):
        order = list(range(len(shape)))
        order[a], order[b] = order[b], order[a]
        memory = contiguous_strides([shape[axis] for axis in order])
        strides = tuple(memory[order.index(axis)] for axis in range(len(shape)))
        found[f"axes {a} and {b} exchanged in memory"] = lambda t, strides=strides: (t, guarded(t, strides=strides))
    if long:
        strides = tuple(2 * step for step in plain)
        found["every other element of a longer one"] = lambda t: (t, guarded(t, strides=strides))
    for axis in range(1, len(shape)):
        wider = [size + 3 if at == axis else size for at, size in enumerate(shape)]
        found[f"a slice of one that is wider along axis {axis}"] = lambda t, wider=wider, axis=axis: (
            t,
            guarded(t, strides=contiguous_strides(wider), offset=2 * contiguous_strides(wider)[axis]),
        )
    found["behind an offset of one element"] = lambda t: (t, guarded(t, offset=1))
    return found


def _expanded(tensor: Tensor, axes) -> Laid:
    axes = [axis for axis in axes if tensor.shape[axis] > 1]
    one = tensor.detach()[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(tensor.ndim))]
    values = one.expand(tensor.shape).clone(memory_format=torch.contiguous_format)
    strides = list(contiguous_strides(one.shape))
    for axis in axes:
        strides[axis] = 0
    return values, guarded(values, strides=strides)


def _judged(cases: Iterator[tuple[str, Callable[[], str | None]]]) -> Seen:
    """One finding for all layouts that are wrong, and one for all that are refused."""
    wrong, refused, crashed = [], [], []
    for name, run in cases:
        try:
            off = run()
        except Refused as refusal:
            refused.append((name, str(refusal)))
        except Crashed as crash:
            crashed.append((name, str(crash)))
        else:
            if off:
                wrong.append((name, off))
    for kind, found in (("broken", wrong), ("broken", crashed), ("refused", refused)):
        if found:
            name, said = found[0]
            more = f"; and {len(found) - 1} more: {', '.join(other for other, _ in found[1:])}" if len(found) > 1 else ""
            yield kind, f"{name}: {said}{more}", found is wrong


@check("give the kernel dy's own strides, or call dy.contiguous() and use what it returns", "01")
def respects_upstream_strides(subject: Subject) -> Seen:
    """The same numbers in dy, laid out in another way, give the same gradients."""
    names = dict.fromkeys(name for y in subject.outputs for name in layouts(tuple(y.shape)))

    def case(name: str) -> str | None:
        plain, laid = [], []
        for dy in subject.upstreams:
            values, anew = layouts(tuple(dy.shape)).get(name, lambda t: (t, t.clone()))(dy)
            plain.append(values)
            laid.append(anew)
        right = subject.truth(upstream=plain)[1]
        inputs = subject.inputs()
        got = subject.attempt(lambda: subject.run(inputs, lambda _: laid)[1], *laid)
        wrong = subject.all_off(got, right)
        return f"dy has strides {laid[0].stride()}, and {wrong}" if wrong else None

    yield from _judged((f"dy is {name}", lambda name=name: case(name)) for name in names)


@check("give the kernel each tensor's own strides; save and index nothing by another tensor's; ask ctx.needs_input_grad", "01")
def respects_input_strides(subject: Subject) -> Seen:
    """The same numbers in an input, laid out in another way before the call, give the same outputs and gradients."""
    if subject.random:
        yield "skipped", "func draws random numbers, and draws others for another layout"
        return

    def case(which: list[int], name: str) -> str | None:
        plain, laid = {}, {}
        for n in which:
            given = subject.inputs()[n].detach()
            ways = layouts(tuple(given.shape))
            if name not in ways or (name.startswith(("one number", "expanded")) and not given.is_floating_point()):
                continue
            values, anew = ways[name](given)
            plain[n], laid[n] = values, anew.requires_grad_(n in subject.wanted)
        if not laid:
            return None
        right = subject.truth(change=plain)
        inputs = subject.inputs(laid)
        got = subject.attempt(lambda: subject.run(inputs), *laid.values())
        strides = ", ".join(str(tensor.stride()) for tensor in laid.values())
        wrong = subject.results_off(got, right, shaken=plain)
        return f"strides {strides}: {wrong}" if wrong else None

    def cases():
        names = {n: layouts(tuple(subject.given[n].shape)) for n in subject.tensors}
        for n in subject.tensors:
            for name in names[n]:
                yield f"input {n} is {name}", lambda n=n, name=name: case([n], name)
        if len(subject.tensors) > 1:
            for name in dict.fromkeys(name for n in subject.tensors for name in names[n]):
                yield f"all inputs are {name}", lambda name=name: case(subject.tensors, name)

    yield from _judged(cases())


@check("call resolve_conj() and resolve_neg() on what the kernel is given: contiguous() does not", "01")
def resolves_conj_and_neg(subject: Subject) -> Seen:
    """Lazily conjugated and lazily negated tensors, of which the memory holds other numbers than they print."""
    lazily = {
        "conjugated": lambda t: t.conj().resolve_conj().conj(),
        "negated": lambda t: torch._neg_view(-t),
    }
    if not any(subject.given[n].is_complex() for n in subject.wanted) and not any(y.is_complex() for y in subject.outputs):
        yield "skipped", "no complex tensor"
        return

    def of_upstream(lazy: Callable) -> str | None:
        inputs = subject.inputs()
        return subject.all_off(
            subject.attempt(lambda: subject.run(inputs, lambda ys: [lazy(dy) for dy in subject.upstream(ys)])[1])
        )

    def of_input(n: int, lazy: Callable) -> str | None:
        inputs = subject.inputs({n: lazy(subject.inputs()[n].detach()).requires_grad_(n in subject.wanted)})
        return subject.results_off(subject.attempt(lambda: subject.run(inputs)), (subject.truth()[0], subject.grads))

    def cases():
        for name, lazy in lazily.items():
            yield f"dy is lazily {name}", lambda lazy=lazy: of_upstream(lazy)
            for n in subject.tensors:
                if subject.given[n].is_complex():
                    yield f"input {n} is lazily {name}", lambda n=n, lazy=lazy: of_input(n, lazy)

    yield from _judged(cases())
