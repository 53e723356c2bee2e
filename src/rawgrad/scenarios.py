"""A lesson's live experiments: knobs in, plain records out. Every record comes from a run that happens in the call."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rawgrad import cuda, probes, raw, runtime, specimens
from rawgrad.ops.rotary import rotary_reference

# Names are the code that a learner would type. X is [8, 8], but where the name says otherwise.
BEFORE = {
    "nothing": lambda X: X,
    "view(64)": lambda X: X.view(64),
    "view(2, 4, 8).view(8, 8)": lambda X: X.view(2, 4, 8).view(8, 8),
    "view_as(X)": lambda X: X.view_as(X),
    "reshape(64)": lambda X: X.reshape(64),
    "flatten()": lambda X: X.flatten(),
    "flatten(1)": lambda X: X.flatten(1),
    "t()": lambda X: X.t(),
    "permute(1, 0)": lambda X: X.permute(1, 0),
    "unsqueeze(0)": lambda X: X.unsqueeze(0),
    "squeeze(1) of [8, 1, 8]": lambda X: X.squeeze(1),
    "squeeze()": lambda X: X.squeeze(),
    "contiguous()": lambda X: X.contiguous(),
    "expand(8, 8)": lambda X: X.expand(8, 8),
    "X[...]": lambda X: X[...],
    "X[:]": lambda X: X[:],
    "narrow(0, 0, 8)": lambda X: X.narrow(0, 0, 8),
    "select(0, 0)": lambda X: X.select(0, 0),
    "clone()": lambda X: X.clone(),
    "X * 1": lambda X: X * 1,
}
REPAIRS = {
    "none": specimens.GradientInSaved,
    "increment_version": specimens.GradientInSavedAnnounced,
    "clone the result": specimens.GradientInSavedCloned,
    "return detach()": specimens.GradientInSavedDetached,
    "declare with custom_op": specimens.GradientInSavedDeclared,
    "new memory": specimens.GradientInNewMemory,
}
# "a kernel" is the Triton kernel, or the CUDA kernel where Triton does not run: a lesson's outputs are the same with both.
WRITERS = {"a kernel": None, "torch in place": "torch", "the Triton kernel": "triton", "the CUDA kernel": "cuda"}
HOOKS = ("none", "prints the gradient", "keeps the gradient")
MOST_BACKWARDS = 3


@dataclass(frozen=True)
class Backward:
    """One backward: what autograd compared, what was written, what arrived. Numbers are of element 0, whose X0 is 1."""

    version_at_save: int
    version_found: int  # of the saved tensor, when backward asks for it
    raised: bool  # autograd refused, because the two differ
    write: str  # to the saved tensor: "counted", "not counted", "none"
    arrival: str  # what became of the memory that the Function returned: "taken over" as X.grad, "copied", "added", "nothing"
    x: float  # afterwards
    saved: float
    grad: float
    right_grad: float
    version_written: int  # of the saved tensor, when the Function returned
    version_left: int  # of the saved tensor, when the backward was over
    x_version: int
    grad_is_x: bool  # X.grad and X share memory


@dataclass(frozen=True)
class Timeline:
    """Some backwards of one graph, y = f(before(X)), with the gradient 1 for every element of y."""

    before: str
    writer: str
    repair: str
    hook: str
    backwards: tuple[Backward, ...]  # a raise ends them
    x_intact: bool  # no byte of X changed

    @property
    def verdict(self) -> str:
        if not self.backwards:
            return "nothing has run yet"
        if self.backwards[-1].raised:
            return f"raises at backward {len(self.backwards)}"
        if any(b.grad != b.right_grad for b in self.backwards):
            return "silent and wrong"
        return "silent and right" if self.x_intact else "silent: the gradient is right, and X is overwritten"


def version_timeline(
    before: str = "nothing", writer: str = "a kernel", repair: str = "none", hook: str = "none", backwards: int = MOST_BACKWARDS
) -> Timeline:
    """Run `backwards` backwards with retain_graph through a Function that stores its gradient in what it saved.

    Args:
        before: what stands between X and the Function, a key of BEFORE.
        writer: who writes, a key of WRITERS.
        repair: which would-be repair the Function has, a key of REPAIRS.
        hook: what a hook on X does with the gradient, one of HOOKS.
        backwards: 0 to MOST_BACKWARDS.

    Raises:
        RuntimeError: this machine cannot run the writer; the sentence says what to do.
    """
    known("backwards", backwards, range(MOST_BACKWARDS + 1))
    run = _Run(before, writer, repair, hook)
    done = []
    while len(done) < backwards and not (done and done[-1].raised):
        done.append(run.backward())
    return Timeline(before, writer, repair, hook, tuple(done), x_intact=not run.x_changed())


def known(knob: str, value, values) -> None:
    """Refuse a value that the knob does not have."""
    if value not in values:
        raise ValueError(f"{knob} is one of {', '.join(map(repr, values))}, got {value!r}")


def _kernel(writer: str, writers: dict) -> str:
    known("writer", writer, writers)
    backend = runtime.choose(WRITERS[writer])
    if writer == "a kernel" and backend == "torch":
        raise RuntimeError(f"no kernel runs here: {runtime.problem('triton')}; {runtime.problem('cuda')}")
    return backend


class _Run:
    """One graph, and what it looks like from outside between two backwards."""

    def __init__(self, before: str, writer: str, repair: str, hook: str):
        known("before", before, BEFORE)
        known("repair", repair, REPAIRS)
        known("hook", hook, HOOKS)
        backend = _kernel(writer, WRITERS)
        shape = (8, 1, 8) if before.endswith("of [8, 1, 8]") else (8, 8)
        self.x = torch.arange(1.0, 65.0).view(shape).to(runtime.DEVICE).requires_grad_()
        self.kept = []  # what the hook keeps
        if hook == "prints the gradient":
            self.x.register_hook(self._print)
        if hook == "keeps the gradient":
            self.x.register_hook(self.kept.append)
        self.saved = BEFORE[before](self.x)
        self.x_first, self.version_at_save = probes.look(self.x), self.saved._version
        self.y = REPAIRS[repair].apply(self.saved, backend)
        self.count = 0
        # Hooks on the node itself hold nobody's gradient, so they change nothing: a test compares runs with and without.
        self.y.grad_fn.register_prehook(self._before_node)
        self.y.grad_fn.register_hook(self._after_node)

    def _print(self, gradient: Tensor) -> None:
        self.printed = str(gradient)  # what print shows; a lesson's output has room for the picture only

    def _before_node(self, _gradients) -> None:
        self.found = probes.look(self.saved)

    def _after_node(self, returned, _gradients) -> None:
        # The storage is held, so that its address cannot come back; the tensor is not, so that it can be taken over.
        self.left, self.returned = probes.look(self.saved), returned[0].untyped_storage()

    def x_changed(self) -> bool:
        return probes.look(self.x).digest != self.x_first.digest

    def backward(self) -> Backward:
        self.count += 1
        had_gradient, self.left = self.x.grad is not None, None
        raised = False
        try:
            self.y.backward(torch.ones_like(self.y), retain_graph=True)
        except RuntimeError as refusal:
            if "modified by an inplace operation" not in str(refusal):
                raise
            raised = True
        return Backward(
            version_at_save=self.version_at_save,
            version_found=self.found.version,
            raised=raised,
            write=self._write(),
            arrival=self._arrival(had_gradient),
            x=_first(self.x),
            saved=_first(self.saved),
            grad=_first(self.x.grad),
            right_grad=2.0 * self.count,
            version_written=(self.left or self.found).version,
            version_left=self.saved._version,
            x_version=self.x._version,
            grad_is_x=self.x.grad is not None and probes.overlap(self.x.grad, self.x),
        )

    def _write(self) -> str:
        if self.left is None or self.left.digest == self.found.digest:
            return "none"
        return "not counted" if probes.written_unseen(self.found, self.left) else "counted"

    def _arrival(self, had_gradient: bool) -> str:
        if self.left is None:
            return "nothing"
        if had_gradient:
            return "added"
        return "taken over" if self.x.grad.untyped_storage().data_ptr() == self.returned.data_ptr() else "copied"


def _first(tensor: Tensor | None) -> float:
    return float("nan") if tensor is None else tensor.detach().flatten()[0].item()


@dataclass(frozen=True)
class Stop:
    """A gradient on its way back, as it leaves a node."""

    node: str
    storage: str  # letter; A is X's
    tensor: str  # which tensor object: "X itself", "saved x" (the one that the Function saved), "a new tensor"


@dataclass(frozen=True)
class GradientPath:
    """Where the first backward's gradient lies at every step from y to X.grad."""

    before: str
    repair: str
    saved: Stop  # what the Function keeps for its backward
    stops: tuple[Stop, ...]  # dy first, then what every node returns
    grad: Stop  # X.grad

    @property
    def taken_over(self) -> bool:
        """AccumulateGrad kept the memory that arrived, instead of copying it."""
        return self.grad.storage == self.stops[-1].storage


def gradient_path(before: str = "nothing", writer: str = "a kernel", repair: str = "none") -> GradientPath:
    """Follow the gradient of one backward through the graph that `version_timeline` runs; its knobs, its errors."""
    run = _Run(before, writer, repair, "none")
    letters = {run.x.untyped_storage().data_ptr(): "A"}
    held = []  # every storage on the way, so that no address comes back

    def stop(node: str, gradient: Tensor) -> Stop:
        held.append(gradient.untyped_storage())
        letter = letters.setdefault(gradient.untyped_storage().data_ptr(), "ABCDEFGH"[len(letters)])
        tensor = "X itself" if gradient is run.x else "saved x" if gradient is run.saved else "a new tensor"
        return Stop(node, letter, tensor)

    saved, dy = stop("saved x", run.saved), torch.ones_like(run.y)
    stops, node = [stop("dy", dy)], run.y.grad_fn
    while node.next_functions:  # all but AccumulateGrad
        name = "f" if node is run.y.grad_fn else re.sub(r"Backward\d*$", "", node.name())
        node.register_hook(lambda returned, _, name=name: stops.append(stop(name, returned[0])))
        node = node.next_functions[0][0]
    run.y.backward(dy)
    return GradientPath(before, repair, saved, tuple(stops), stop("X.grad", run.x.grad))


# The memory strip: what Python reads of a storage, and what a kernel reads

CONSUMERS = {  # of y [2, 3]; z is another tensor like y, w and c are constants
    "y.sum()": lambda y: y.sum(),
    "(y + 0).sum()": lambda y: (y + 0).sum(),
    "y.sum() / 2": lambda y: y.sum() / 2,
    "cat([y, z], 1).sum()": lambda y: torch.cat([y, torch.ones_like(y)], 1).sum(),
    "y.sum(0).mean()": lambda y: y.sum(0).mean(),
    "(y.t() * w).sum()": lambda y: (y.t() * _counting(1, 3, 2, like=y)).sum(),
    "(cat([y, z], 1) * w).sum()": lambda y: (torch.cat([y, torch.ones_like(y)], 1) * _counting(1, 2, 6, like=y)).sum(),
    "stack([y, z, ...], -1)[..., 0].sum()": lambda y: torch.stack([y] + [torch.ones_like(y)] * 7, -1)[..., 0].sum(),
    "y.mean()": lambda y: y.mean(),
    "(y * 1).sum()": lambda y: (y * 1).sum(),
    "(y @ w).sum()": lambda y: (y @ _counting(1, 3, 2, like=y)).sum(),
    "mse_loss(y, z)": lambda y: torch.nn.functional.mse_loss(y, y.detach() - 3),
    "cross_entropy(y, c)": lambda y: torch.nn.functional.cross_entropy(y, torch.tensor([0, 2], device=y.device)),
    "y.max()": lambda y: y.max(),
    "y[:, ::2].sum()": lambda y: y[:, ::2].sum(),
}
READINGS = {
    "none": specimens.ReadsFlat,
    "dy.clone()": specimens.ReadsClone,
    "dy + 0": specimens.ReadsSum,
    "dy.contiguous()": specimens.ReadsContiguous,
    "strides to the kernel": specimens.ReadsStrides,
}
GUARDS = {  # that do not guard
    "a guard without brackets": specimens.GuardsWithoutBrackets,
    "a guard that looks at the last stride": specimens.GuardsLastStride,
    "the copy is dropped": specimens.DropsTheCopy,
    "the row stride alone": specimens.ReadsWithRowStride,
    "the strides of x": specimens.ReadsWithStridesOfX,
}
# Of y [1, 2, 2, 2], which is batch, seq, heads, head_dim
ROTARY_CONSUMERS = {
    "(y.transpose(1, 2) * w).sum()": lambda y: (y.transpose(1, 2) * _counting(1, 1, 2, 2, 2, like=y)).sum(),
    "y.sum()": lambda y: y.sum(),
    "(y.sum(2) * w).sum()": lambda y: (y.sum(2) * _counting(1, 1, 2, 2, like=y)).sum(),
    "(cat([y, z], 3) * w).sum()": lambda y: (torch.cat([y, torch.ones_like(y)], 3) * _counting(1, 1, 2, 2, 4, like=y)).sum(),
    "stack([y, z, ...], -1)[..., 0].sum()": lambda y: torch.stack([y] + [torch.ones_like(y)] * 7, -1)[..., 0].sum(),
    "(y * w).sum()": lambda y: (y * _counting(1, 1, 2, 2, 2, like=y)).sum(),
    "y.mean()": lambda y: y.mean(),
}
ROTARY_READINGS = {
    "none": specimens.RotaryReadsFlat,
    "dy.clone()": specimens.RotaryReadsClone,
    "dy.contiguous()": specimens.RotaryReadsContiguous,
    "strides to the kernel": specimens.RotaryCured,
}
KERNELS = {name: backend for name, backend in WRITERS.items() if backend != "torch"}
VIEWS = {  # of m, a [3, 4] that counts
    "m": lambda m: m,
    "m.t()": lambda m: m.t(),
    "m[:, ::2]": lambda m: m[:, ::2],
    "m[1:, 1:]": lambda m: m[1:, 1:],
    "m[0].expand(3, 4)": lambda m: m[0].expand(3, 4),
    "m[0, 0].expand(3, 4)": lambda m: m[0, 0].expand(3, 4),
    "m.t().contiguous()": lambda m: m.t().contiguous(),
}
_ROOM = 64  # elements that a gradient is staged in


def _counting(first: int, *shape: int, like: Tensor) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(first, first + count, dtype=like.dtype, device=like.device).view(shape)


def staged(y: Tensor, first: int = 10, keep: bool = True) -> Tensor:
    """Have y's gradient laid out anew before it goes on: same shape, strides and values, in 64 elements that count.

    A kernel that reads past a small gradient then reads numbers that say where it is, and leaves no storage.

    Args:
        y: not a leaf; it is given a hook.
        first: where the count begins.
        keep: False leaves the count where the gradient's own values would be, so that a value is its own place.

    Raises:
        ValueError: in backward, where the gradient spans more than 64 elements.
    """

    def lay_out(dy: Tensor | None) -> Tensor | None:
        if dy is None:  # gradcheck tries that, too
            return None
        room = _counting(first, _ROOM, like=dy)
        reach = dy.storage_offset() + sum((n - 1) * s for n, s in zip(dy.shape, dy.stride(), strict=True))
        if reach >= _ROOM:
            raise ValueError(f"staged has room for {_ROOM} elements, and this gradient reaches element {reach}")
        anew = room.as_strided(dy.shape, dy.stride(), dy.storage_offset())
        if keep:
            distinct = tuple(slice(0, 1) if step == 0 else slice(None) for step in dy.stride())
            anew[distinct].copy_(dy[distinct])
        return anew

    y.register_hook(lay_out)
    return y


@dataclass(frozen=True)
class Strip:
    """A storage, and in which order it is read. Places are element numbers in the storage."""

    what: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    values: tuple[float, ...]  # of the whole storage
    own: int  # how many of them are dy's own; the rest stands for what lies behind it in memory
    python: tuple[int, ...]  # the place that Python reads for each element, in order
    kernel: tuple[int, ...] = ()  # the place that the kernel read for each element; empty: no kernel
    reads: tuple[float, ...] = ()  # what the kernel read
    copied: bool = False  # the kernel read a copy, and `kernel` says which element of dy each step got
    repair: str = "none"
    writer: str = ""

    @property
    def prints(self) -> tuple[float, ...]:
        return tuple(self.values[place] for place in self.python)

    @property
    def wrong(self) -> tuple[bool, ...]:
        """For each element, whether the kernel read another place than Python."""
        return tuple(k != p for k, p in zip(self.kernel, self.python, strict=False))

    @property
    def verdict(self) -> str:
        if not self.kernel:
            return ""
        if not any(self.wrong):
            return "right"
        return "wrong order" if sorted(self.kernel) == sorted(self.python) else "other cells"


@dataclass(frozen=True)
class _Misread:
    """An experiment whose backward may read other cells than Python, and how to tell from its dx what it read."""

    shape: tuple[int, ...]  # of x and y
    consumers: dict
    functions: dict
    apply: Callable  # (Function, x, backend) -> y
    read: Callable  # dx -> what the kernel read


def _turned(function, x: Tensor, backend: str) -> Tensor:
    return function.apply(x, *quarter_turns(2, like=x), _POSITIONS.to(x.device), 2, 0, backend)


def _read_before_the_turn(dx: Tensor) -> Tensor:
    return rotary_reference(dx, *quarter_turns(2, like=dx), _POSITIONS.to(dx.device)) + 0.0  # no -0


_POSITIONS = torch.tensor([1, 2])
_TRIPLE = _Misread((2, 3), CONSUMERS, READINGS | GUARDS, lambda f, x, backend: f.apply(x, backend), lambda dx: dx / 3)
_ROTARY = _Misread((1, 2, 2, 2), ROTARY_CONSUMERS, ROTARY_READINGS, _turned, _read_before_the_turn)


def quarter_turns(rotary_dim: int, like: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Tables [4, rotary_dim / 2] for rotary, in which position p turns every pair by p quarters: exact in every dtype."""
    like = torch.empty(0, device=runtime.DEVICE) if like is None else like
    cos, sin = like.new_tensor([1.0, 0, -1, 0]), like.new_tensor([0.0, 1, 0, -1])
    return tuple(table[:, None].expand(4, rotary_dim // 2) for table in (cos, sin))


def memory_strip(consumer: str = "y.sum()", repair: str = "none", writer: str = "a kernel") -> Strip:
    """Run a backward whose kernel reads dy, behind a consumer that decides how dy lies in memory.

    All but `stack` are staged. A second run, with a dy whose every value is its own place, tells which places the kernel read.

    Args:
        consumer: what follows y = f(x), a key of CONSUMERS.
        repair: what the backward does about layout, a key of READINGS or GUARDS.
        writer: which kernel, a key of KERNELS.
    """
    return _strip(_TRIPLE, consumer, repair, writer)


def rotary_strip(consumer: str = "(y.transpose(1, 2) * w).sum()", repair: str = "none", writer: str = "a kernel") -> Strip:
    """The same for the rotary embedding of two tokens, at positions 1 and 2, in two heads of two dimensions.

    Args:
        consumer: a key of ROTARY_CONSUMERS.
        repair: a key of ROTARY_READINGS.
        writer: a key of KERNELS.
    """
    return _strip(_ROTARY, consumer, repair, writer)


def _strip(misread: _Misread, consumer: str, repair: str, writer: str) -> Strip:
    known("consumer", consumer, misread.consumers)
    known("repair", repair, misread.functions)
    backend = _kernel(writer, KERNELS)
    staging = None if consumer.startswith("stack") else {}
    dy, dx, own, made = _backward(misread, consumer, repair, backend, staging)
    *_, needed = _backward(misread, consumer, "strides to the kernel", backend, staging)
    places, of_places, *_ = _backward(misread, consumer, repair, backend, {"first": 0, "keep": False})
    return Strip(
        what=consumer,
        shape=tuple(dy.shape),
        stride=tuple(dy.stride()),
        offset=dy.storage_offset(),
        values=tuple(raw.read(dy.as_strided((1,), (1,), 0), dy.untyped_storage().nbytes() // dy.element_size()).tolist()),
        own=own,
        python=tuple(places.flatten().int().tolist()),
        kernel=tuple(misread.read(of_places).flatten().int().tolist()),
        reads=tuple(misread.read(dx).flatten().tolist()),
        copied=made > needed,
        repair=repair,
        writer=writer,
    )


def _backward(
    misread: _Misread, consumer: str, repair: str, backend: str, staging: dict | None
) -> tuple[Tensor, Tensor, int, int]:
    """dy as backward got it, dx, how many elements the storage had that autograd had made for dy, and how many tensors of
    dx's size or more were made on the way."""
    x = _counting(1, *misread.shape, like=torch.empty(0, device=runtime.DEVICE)).requires_grad_()
    y = misread.apply(misread.functions[repair], x, backend)
    got, made = [], []
    y.register_hook(lambda dy: made.append(dy.untyped_storage().nbytes() // dy.element_size()))
    if staging is not None:
        staged(y, **staging)
    y.register_hook(got.append)
    loss = misread.consumers[consumer](y)
    with probes.Allocations() as allocations:
        (dx,) = torch.autograd.grad(loss, x)  # .backward() would copy a dx into the leaf's layout
    return got[0], dx, made[0], sum(size >= x.nbytes for size in allocations.sizes)


def view_strip(view: str = "m") -> Strip:
    """How Python reads a view of a [3, 4] that counts from 0; `view` is a key of VIEWS."""
    known("view", view, VIEWS)
    seen = VIEWS[view](_counting(0, 3, 4, like=torch.empty(0)))
    count = seen.untyped_storage().nbytes() // seen.element_size()
    places = torch.arange(count).as_strided(seen.shape, seen.stride(), seen.storage_offset())
    return Strip(
        what=view,
        shape=tuple(seen.shape),
        stride=tuple(seen.stride()),
        offset=seen.storage_offset(),
        values=tuple(raw.read(seen.as_strided((1,), (1,), 0), count).tolist()),
        own=count,
        python=tuple(places.flatten().tolist()),
    )


# The graph of three nodes


@dataclass(frozen=True)
class Graph:
    """The graph of loss = (X * X).sum(), X = 3, after some backwards."""

    retain_graph: bool
    backwards: int  # that were asked for
    done: int
    raised: bool
    saved: str  # what mul saved: "kept", "freed"
    grad: float | None


def graph(retain_graph: bool = False, backwards: int = 0) -> Graph:
    """Run `backwards` backwards of one graph, up to the first that raises."""
    x = torch.full((1,), 3.0, device=runtime.DEVICE, requires_grad=True)
    product = x * x
    loss, done, raised = product.sum(), 0, False
    while done < backwards and not raised:
        try:
            loss.backward(retain_graph=retain_graph)
            done += 1
        except RuntimeError as refusal:
            if "second time" not in str(refusal):
                raise
            raised = True
    try:
        saved = "kept" if product.grad_fn._saved_self is not None else "freed"
    except RuntimeError:
        saved = "freed"
    return Graph(retain_graph, backwards, done, raised, saved, None if x.grad is None else x.grad.item())


# Who holds this gradient: two branches get one dy

BESIDE = {  # P: what stands beside f(a) in z = f(a) + P
    "5 * c": lambda c: 5 * c,
    "c": lambda c: c,
    "c.view(3)": lambda c: c.view(3),
}
RESIDUAL = "h, where h = 5 * a and f(h)"
ORDERS = ("f(a)", "P")
BACKWARDS = {
    "none": specimens.DoublesInPlace,
    "increment_version": specimens.DoublesInPlaceAnnounced,
    "over its own clone": specimens.DoublesItsClone,
    "new memory": specimens.DoublesInNewMemory,
}


@dataclass(frozen=True)
class Branch:
    """One of the two branches behind the sum, when its turn came in backward."""

    name: str  # "f" or "P"
    found: tuple[float, ...]  # dy, when it came
    left: tuple[float, ...]  # dy, when it had run


@dataclass(frozen=True)
class Siblings:
    """z = f(a) + P, z.backward(w) with w = 1, 2, 3. f is 2 a; what its backward does to dy is the knob `repair`."""

    beside: str
    first: str
    repair: str
    branches: tuple[Branch, ...]  # in the order in which backward ran them
    holders: tuple[str, ...]  # who else used dy's memory when f's turn came
    w: tuple[float, ...]  # the caller's gradient, afterwards
    grads: dict[str, tuple[tuple[float, ...], tuple[float, ...]]]  # leaf -> what it got, what is right
    in_dy: tuple[str, ...]  # leaves whose gradient lies in dy's memory

    @property
    def wrong(self) -> tuple[str, ...]:
        return tuple(leaf for leaf, (got, right) in self.grads.items() if got != right)

    @property
    def verdict(self) -> str:
        changed = "; the caller's w is changed" if self.w != (1, 2, 3) else ""
        if not self.wrong:
            return f"right{changed}"
        leaf = self.wrong[0]
        got, right = (" ".join(f"{value:g}" for value in values) for values in self.grads[leaf])
        return f"silent and wrong: {leaf}.grad is {got}, right is {right}{changed}"


def siblings(beside: str = "5 * c", first: str = "f(a)", repair: str = "none", writer: str = "a kernel") -> Siblings:
    """Run one backward through f and a sibling that is given the same dy.

    Args:
        beside: P, a key of BESIDE, or RESIDUAL.
        first: which branch is created first, one of ORDERS; backward runs the later one first. A residual has one order.
        repair: what f's backward does, a key of BACKWARDS.
        writer: whose kernel doubles, a key of KERNELS.
    """
    known("repair", repair, BACKWARDS)
    backend = _kernel(writer, KERNELS)
    return branched(beside, first, lambda x, repair: BACKWARDS[repair].apply(x, backend), repair)


def branched(beside: str, first: str, f: Callable[[Tensor, str], Tensor], repair: str = "") -> Siblings:
    """`siblings` of any f(x, repair) that is 2 x, such as a learner's."""
    known("beside", beside, (*BESIDE, RESIDUAL))
    known("first", first, ORDERS)
    a, c = (torch.zeros(3, device=runtime.DEVICE, requires_grad=True) for _ in range(2))
    w = _counting(1, 3, like=a)
    if beside == RESIDUAL:
        z = (h := 5 * a) + f(h, repair)
        leaves, nodes = {"a": (a, 15)}, {"f": z.grad_fn.next_functions[1][0]}
    else:
        branches = {"f(a)": lambda: f(a, repair), "P": lambda: BESIDE[beside](c)}
        made = {name: branches[name]() for name in sorted(branches, key=lambda name: name != first)}
        z = made["f(a)"] + made["P"]
        leaves = {"a": (a, 2), "c": (c, 5 if beside == "5 * c" else 1)}
        nodes = dict(zip(("f", "P"), (node for node, _ in z.grad_fn.next_functions), strict=True))
    ran, holders, storage = [], [], w.untyped_storage().data_ptr()

    def comes(name: str) -> None:
        ran.append([name, tuple(w.tolist()), ()])
        if name == "f":
            holders.append("you, as w")
            if beside == RESIDUAL:
                holders.append("h's own gradient, which waits for f's")
            elif len(ran) == 1:
                holders.append("P, whose turn comes later")
            elif c.grad is not None and c.grad.untyped_storage().data_ptr() == storage:
                holders.append("c.grad")

    def goes() -> None:
        ran[-1][2] = tuple(w.tolist())

    for name, node in nodes.items():  # hooks that keep no gradient, which would change who may take it over
        node.register_prehook(lambda _gradients, name=name: comes(name))
        node.register_hook(lambda _returned, _gradients: goes())
    z.backward(w)
    right = w.new_tensor([1.0, 2, 3])
    return Siblings(
        beside=beside,
        first=first,
        repair=repair,
        branches=tuple(Branch(*branch) for branch in ran),
        holders=tuple(holders),
        w=tuple(w.tolist()),
        grads={name: (tuple(leaf.grad.tolist()), tuple((factor * right).tolist())) for name, (leaf, factor) in leaves.items()},
        in_dy=tuple(name for name, (leaf, _) in leaves.items() if probes.overlap(leaf.grad, w)),
    )


# A pointer that outlives its tensor


class Slots:
    """A staged allocator: tensors of up to 8 elements in one storage, where a slot that was freed is handed out again."""

    def __init__(self):
        self._room, self._free = torch.zeros(4, 8), list(range(4))

    def __call__(self, shape: Sequence[int]) -> Tensor:
        if torch.Size(shape).numel() > 8 or not self._free:
            raise ValueError(f"Slots holds four tensors of up to 8 elements, got {tuple(shape)} with {len(self._free)} free")
        slot = self._free.pop(0)
        tensor = torch.empty(0).set_(self._room.untyped_storage(), 8 * slot, tuple(shape))  # with a version of its own
        weakref.finalize(tensor, self._free.insert, 0, slot)
        return tensor


@dataclass(frozen=True)
class Reuse:
    """y = x^2 at x = 1, 2, 3, and a newcomer between forward and backward that is filled with nines."""

    keeps: str
    came_back: bool  # the newcomer got the memory that forward had used
    gradient: tuple[float, ...]
    right: tuple[float, ...] = (2.0, 4.0, 6.0)


KEEPS = {"the pointer": specimens.KeepsPointer, "the tensor": specimens.KeepsTensor}


def reuse(keeps: str = "the pointer") -> Reuse:
    """Free memory, and have it handed out again: by Slots on the CPU, by torch's own allocator on a GPU."""
    known("keeps", keeps, KEEPS)
    allocate = Slots() if runtime.DEVICE == "cpu" else lambda shape: torch.empty(shape, device="cuda")
    x = _counting(1, 3, like=torch.empty(0, device=runtime.DEVICE)).requires_grad_()
    y = KEEPS[keeps].apply(x, allocate)
    address, newcomers = y.grad_fn.address, []
    while len(newcomers) < (3 if runtime.DEVICE == "cpu" else 200):  # a GPU's allocator may have other free blocks
        newcomers.append(allocate(x.shape).fill_(9))
        if newcomers[-1].data_ptr() == address:
            break
    y.backward(torch.ones_like(y))
    return Reuse(keeps, newcomers[-1].data_ptr() == address, tuple(x.grad.tolist()))


# The ways to save memory: y = x^2, peak in sizes N of x, and what becomes of it


@dataclass(frozen=True)
class Way:
    """How y is made of X [N]. `straight`: it is given X, a leaf; else X + 0, which is not one. `weighted`: the loss is
    (y * w).sum(), so that dy is a tensor of its own; else y.sum(), whose dy is one number, expanded."""

    apply: Callable[[Tensor, str], Tensor]
    straight: bool = False
    weighted: bool = False
    around: Callable = contextlib.nullcontext  # a context over forward and backward


def _offloaded(x: Tensor, backend: str) -> Tensor:
    """Saved tensors wait in memory that is not counted: numpy's."""
    pack = lambda saved: saved.detach().cpu().numpy().copy()  # noqa: E731
    unpack = lambda packed: torch.from_numpy(packed).to(runtime.DEVICE, copy=True)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return specimens.GradientInNewMemory.apply(x, backend)


def _recomputed(x: Tensor, backend: str) -> Tensor:
    return checkpoint(lambda x: specimens.GradientInNewMemory.apply(x + 0, backend), x, use_reentrant=False)


WAYS = {
    "new memory": Way(specimens.GradientInNewMemory.apply),
    "new memory, X a leaf": Way(specimens.GradientInNewMemory.apply, straight=True),
    "in place, X a leaf": Way(specimens.GradientInSaved.apply, straight=True),
    "in place": Way(specimens.GradientInSaved.apply),
    "in place, increment_version": Way(specimens.GradientInSavedAnnounced.apply),
    "in place, custom_op": Way(specimens.GradientInSavedDeclared.apply),
    "in place, one shot": Way(specimens.OneShot.apply),
    "in place, allow_mutation": Way(
        specimens.GradientInSaved.apply, around=torch.autograd.graph.allow_mutation_on_saved_tensors
    ),
    "torch in place, allow_mutation": Way(
        lambda x, _: specimens.GradientInSaved.apply(x, "torch"), around=torch.autograd.graph.allow_mutation_on_saved_tensors
    ),
    "gradient in forward": Way(specimens.GradientInForward.apply),
    "recomputed": Way(_recomputed, straight=True),
    "offloaded": Way(_offloaded),
    "an unused output": Way(lambda x, backend: specimens.SquareAndCube.apply(x, backend)[0]),
    "an unused output, no zeros": Way(lambda x, backend: specimens.SquareAndCubeUnmaterialized.apply(x, backend)[0]),
    "in steps": Way(specimens.InSteps.apply, weighted=True),
}
SITUATIONS = ("one backward", "a second backward", "a sibling", "a second derivative")
_N = 4096  # elements


@dataclass(frozen=True)
class Saving:
    """One way in one situation. Memory is in N, the size of X; X and w are not counted, and y is kept to the end.

    For a second derivative they are those of one backward.
    """

    way: str
    situation: str
    forward: int  # most at once in forward
    kept: int  # between forward and backward
    backward: int  # most at once in backward
    verdict: str  # "right", "loud", "silent"
    because: str  # in a few words

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward)


def saving(way: str = "new memory", situation: str = "one backward", writer: str = "a kernel") -> Saving:
    """Meter one way to save memory, and judge what becomes of the gradient.

    Args:
        way: a key of WAYS, or of newer_ways().
        situation: one of SITUATIONS. The sibling is (x * x).sum(), made before y, so that backward comes to it last.
        writer: whose kernel, a key of KERNELS.
    """
    ways = WAYS | newer_ways()
    known("way", way, ways)
    known("situation", situation, SITUATIONS)
    return judge(way, ways[way], situation, _kernel(writer, KERNELS))


def judge(name: str, way: Way, situation: str, backend: str) -> Saving:
    """`saving` of any way, such as a learner's: the second of two runs, since the first call of an operator may set things up
    that hold its tensors for a while. Whether dy is written to is not looked at."""
    _metered(way, SITUATIONS[0], backend)
    if situation == "a second derivative":
        sizes, judged = _metered(way, SITUATIONS[0], backend)[0], _second_derivative(way, backend)
    else:
        sizes, judged = _metered(way, situation, backend)
    return Saving(name, situation, *sizes, *judged)


NEWER = {  # ways that not every PyTorch has, or that need Triton, and what brings them
    "in steps, cleared on access": "Function.clear_saved_tensors_on_access, which PyTorch 2.11 has",
    "in steps, cleared and boxed": "Function.boxed_grads_call, which PyTorch 2.13 has and 2.11 has not",
    "in place, triton_op": "Triton",
}


def newer_ways() -> dict[str, Way]:
    """Those of NEWER that run here."""
    ways = {}
    if runtime.HAS_TRITON:
        ways["in place, triton_op"] = Way(lambda x, _: specimens.GradientInSavedTriton.apply(x, "triton"))
    if hasattr(torch.autograd.Function, "clear_saved_tensors_on_access"):
        ways["in steps, cleared on access"] = Way(specimens.InStepsCleared.apply, weighted=True)
    if hasattr(torch.autograd.Function, "boxed_grads_call"):
        ways["in steps, cleared and boxed"] = Way(specimens.InStepsBoxed.apply, weighted=True)
    return ways


def _leaf() -> Tensor:
    return _counting(1, 4, like=torch.empty(0, device=runtime.DEVICE)).repeat(_N // 4).requires_grad_()


def _metered(way: Way, situation: str, backend: str) -> tuple[tuple[int, int, int], tuple[str, str]]:
    """Most in forward, kept, most in backward; verdict and reason."""
    X, w = _leaf(), _leaf().detach() + 1 if way.weighted else 1
    first, right, raised = X.detach().clone(), 2 * X.detach() * w, None
    if situation == "a second backward":
        right = 2 * right
    elif situation == "a sibling":
        right = right + 2 * X.detach()
    with probes.Peak(runtime.DEVICE) as peak, way.around():
        x = X if way.straight else X + 0
        loss = (x * x).sum() if situation == "a sibling" else 0
        y = way.apply(x, backend)
        del x
        loss = loss + (y * w if way.weighted else y).sum()
        forward, kept = peak.nbytes, peak.now()
        peak.mark()
        try:
            loss.backward(retain_graph=situation == "a second backward")
            if situation == "a second backward":
                loss.backward()
        except NotImplementedError:  # a learner's stub
            raise
        except Exception as refusal:  # any error is loud
            raised = refusal
        backward = peak.nbytes
    sizes = tuple(round(nbytes / X.nbytes) for nbytes in (forward, kept, backward))
    if raised is not None:
        return sizes, ("loud", _refusal(raised))
    because = _off("a gradient", X.grad, right) or _off("y", y.detach(), first * first)
    if because is None and not torch.equal(X.detach(), first):
        because = f"the gradient is right, and X is overwritten: {X[0].item():g} where 1 was"
    return sizes, ("silent", because) if because else ("right", "")


def _off(what: str, got: Tensor | None, right: Tensor) -> str | None:
    """What is wrong with `got` [n], in one clause; None where nothing is."""
    if got is None:
        return f"{what} is missing"
    off = (got != right).nonzero()
    return f"{what} is {got[off[0]].item():g} where {right[off[0]].item():g} is right" if len(off) else None


def _refusal(raised: Exception) -> str:
    said = str(raised)
    if "modified by an inplace operation" in said:
        return "raises: autograd's version check"
    if "only be accessed once" in said:
        return "raises: what was saved is gone"
    if "OneShot" in said:
        return "raises before it writes"
    if "does not require grad" in said:
        return "raises: the gradient has no graph"
    return f"raises {type(raised).__name__}"


def _second_derivative(way: Way, backend: str) -> tuple[str, str]:
    """Of y alone and beside X^3, by grad and by backward: the worst of the four."""
    found = []
    for beside in (False, True):
        for by_grad in (True, False):
            X = _leaf()
            w = X.detach() + 1 if way.weighted else torch.ones_like(X)
            right = 2 * w + (6 * X.detach() if beside else 0)
            try:
                with way.around():
                    loss = (way.apply(X if way.straight else X + 0, backend) * w).sum()
                    (g,) = torch.autograd.grad(loss + (X**3).sum() if beside else loss, X, create_graph=True)
                    if by_grad:
                        (second,) = torch.autograd.grad(g.sum(), X)
                    else:
                        g.sum().backward()
                        second = X.grad
            except NotImplementedError:
                raise
            except Exception as refusal:
                found.append(("loud", _refusal(refusal)))
                continue
            because = _off(f"{'beside X**3' if beside else 'alone'}, a second derivative", second, right)
            found.append(("silent", because) if because else ("right", ""))
    return next(entry for verdict in ("silent", "loud", "right") for entry in found if entry[0] == verdict)


# What only a GPU can show: live on one, elsewhere as it was recorded on one


@dataclass(frozen=True)
class Recording:
    """Lines that a GPU made, and where."""

    where: str
    lines: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join((self.where, *self.lines))


def recording(name: str) -> Recording:
    """Make the lines of `name`, a key of GPU_ONLY, on this machine's GPU; without one, read those that are shipped."""
    known("name", name, GPU_ONLY)
    if runtime.DEVICE == "cuda":
        return Recording(f"measured here, on {torch.cuda.get_device_name()}", tuple(GPU_ONLY[name]()))
    record = json.loads((Path(__file__).parent / "recorded" / f"{name}.json").read_text())
    return Recording(f"recorded on {record['card']}, {record['date']}", tuple(record["lines"]))


def _stale_print() -> list[str]:
    """A copy to the host that is printed before it has happened: stale in truth."""
    host, device = torch.zeros(4, pin_memory=True), torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # cycles: the GPU is busy for some tenths of a second
    host.copy_(device, non_blocking=True)
    at_once = host.tolist()
    torch.cuda.synchronize()
    return [f"printed at once            {at_once}", f"printed after synchronize  {host.tolist()}"]


# The gradient that y.sum() hands to backward: one element, expanded. The kernel reads eight.
_UNSTAGED = """
import torch
from rawgrad import cuda, specimens
one, dx = torch.ones(1, device="cuda"), torch.zeros(8, device="cuda")
cuda.launch(specimens.CUDA_SOURCE, "triple_flat", (1,), (128,), one, dx, 8)
print((dx / 3).tolist())
"""


def _unstaged_read() -> list[str]:
    """The kernel leaves the gradient's storage and reads what lies behind it in the allocator's block of 512 bytes."""
    old = torch.arange(50.0, 178.0, device="cuda")  # somebody's numbers, freed before the gradient is made
    torch.cuda.synchronize()
    del old
    one, dx = torch.ones(1, device="cuda"), torch.zeros(8, device="cuda")
    cuda.launch(specimens.CUDA_SOURCE, "triple_flat", (1,), (128,), one, dx, 8)
    reads = " ".join(f"{value:g}" for value in (dx / 3).tolist())
    return ["Python prints  1 1 1 1 1 1 1 1", f"kernel reads   {reads}"]


def _sanitizer() -> list[str]:
    """How many reads outside compute-sanitizer reports, with torch's caching allocator and without."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    lines = []
    for name, caching in (
        ("with the caching allocator   ", {}),
        ("without the caching allocator", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    ):
        try:
            done = subprocess.run(
                [tool, "--report-api-errors", "no", sys.executable, "-c", _UNSTAGED],
                capture_output=True, text=True, check=False, env=runtime.environment(**caching),
            )  # fmt: skip
        except OSError:
            return ["compute-sanitizer is not installed here"]
        said = done.stdout + done.stderr
        if "ERROR SUMMARY" not in said:
            return [f"compute-sanitizer could not run: {said.strip().splitlines()[-1] if said.strip() else 'it said nothing'}"]
        lines.append(f"{name}  {said.count('Invalid __global__ read')} reads outside")
    return lines


def _shipped() -> list[str]:
    """What the doctor says of three Functions of liger-kernel that write in place by design."""
    ran = subprocess.run([sys.executable, "-m", "rawgrad.doctor.shipped"], capture_output=True, text=True, check=False)
    if "No module named 'liger_kernel'" in ran.stderr:
        return ["liger-kernel is not here: pip install liger-kernel==0.8.5"]
    return ran.stdout.splitlines() or [ran.stderr.strip().splitlines()[-1]]


GPU_ONLY = {"stale_print": _stale_print, "unstaged_read": _unstaged_read, "sanitizer": _sanitizer, "shipped": _shipped}
