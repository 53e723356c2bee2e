"""Ten Functions, each ill in one way that was reported in public, with their cured twins: for lesson 05, and to test the doctor.

A case knows its symptom as somebody first told it, a run that shows it, and a near miss: a run in which the same illness does
not show. Kernels are played by PyTorch over bare memory, so that no case needs Triton or a compiler.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rawgrad import raw, runtime


@dataclass(frozen=True)
class Case:
    """One illness."""

    number: str  # "T1"
    name: str  # of the symptom
    symptom: str  # as it is first told: no mechanism
    mechanisms: tuple[str, ...]  # to choose from
    mechanism: str  # which of them it is
    ill: type[torch.autograd.Function]
    well: type[torch.autograd.Function]
    reference: Callable
    inputs: Callable[[], tuple]  # small ones, for the doctor
    shows: Callable[[Callable], dict[str, object]]  # runs the callable where it goes wrong: label -> numbers
    hides: Callable[[Callable], dict[str, object]]  # and where it does not
    check: str  # the doctor's check that names it
    lesson: str
    remedy: str

    @property
    def sick(self) -> Callable:
        return self.ill.apply

    @property
    def healthy(self) -> Callable:
        return self.well.apply

    def told(self) -> dict[str, tuple]:
        """label -> (what the sick one gives, what is right), where it shows."""
        return _beside(self.shows(self.sick), self.shows(self.reference))

    def hidden(self) -> dict[str, tuple]:
        """The same in the near miss: equal, although nothing was cured."""
        return _beside(self.hides(self.sick), self.hides(self.reference))


def _beside(got: dict, right: dict) -> dict[str, tuple]:
    return {label: (got[label], right[label]) for label in got}


# What the kernels do


class _AsRead(torch.autograd.Function):
    """dy as a kernel reads it that was given a pointer and no strides. Past the storage's end it reads 0."""

    @staticmethod
    def forward(dy: Tensor) -> Tensor:
        read = raw.read(dy, min(dy.numel(), raw.elements_left(dy)))
        return torch.cat([read, read.new_zeros(dy.numel() - len(read))]).view(dy.shape)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy  # so that a second derivative goes through


as_read = _AsRead.apply


def _cells(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The memory from `tensor`'s pointer to its last element, and the place in it of every element."""
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    reach = reach if tensor.numel() else 0
    places = torch.arange(reach, device=tensor.device).as_strided(tensor.shape, tensor.stride())
    return raw.read(tensor, reach), places.reshape(-1)


def double_in_place(tensor: Tensor, together: bool = True) -> None:
    """Double every element where it lies, by its strides, and tell autograd nothing.

    Args:
        together: one program loads all elements and stores them; False: a program for each element, one after the other.
    """
    cells, places = _cells(tensor)
    if together:
        cells[places] = 2 * cells[places]
    else:
        cells *= 2.0 ** torch.bincount(places, minlength=len(cells))
    raw.write(tensor, cells)


def _store(tensor: Tensor, values: Tensor) -> None:
    """Write `values` over `tensor`, by its strides, and tell autograd nothing."""
    cells, places = _cells(tensor)
    cells[places] = values.detach().reshape(-1)
    raw.write(tensor, cells)


# T1: halves turned by 90 degrees


class Rotates(torch.autograd.Function):
    """[a|b] -> [-b|a]."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([-b, a], -1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dy: Tensor):
        left, right = dy.chunk(2, -1)
        return torch.cat([right, -left], -1)


class RotatesUnguarded(Rotates):
    """Asks the method, which is always true, instead of calling it."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        if not dy.is_contiguous:
            dy = dy.contiguous()
        left, right = as_read(dy).chunk(2, -1)
        return torch.cat([right, -left], -1)


# T2: y = 3 x


class Triples(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dy: Tensor):
        return 3 * dy


class TriplesWhatFollows(Triples):
    """Has dy's pointer, offset and all, and takes the rows for neighbours."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        return 3 * as_read(dy)


# T3: y = x^2


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        return 2 * x * dy


class SquaresIntoInput(Squares):
    """Writes the gradient over the saved x, and returns that x."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        _store(x, 2 * x * dy)
        return x


# T4 and T5: y = 2 x


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dy: Tensor):
        return 2 * dy


class DoublesUpstream(Doubles):
    """Doubles the gradient that it was given, where it lies, and returns it."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        double_in_place(dy)
        return dy


class DoublesOneByOne(Doubles):
    """As that, with a program for each element, though several elements may be one cell."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        double_in_place(dy, together=False)
        return dy


# T6: y = w x, differentiated by w


class Weights(torch.autograd.Function):
    @staticmethod
    def forward(w: Tensor, x: Tensor) -> Tensor:
        return w * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy * ctx.saved_tensors[0], None


class WeightsOneBuffer(Weights):
    """Has one buffer for all its gradients, and returns another tensor over it."""

    buffers: dict[tuple, Tensor] = {}

    @classmethod
    def fill(cls, dw: Tensor) -> Tensor:
        key = (tuple(dw.shape), dw.dtype, dw.device)
        return cls.buffers.setdefault(key, torch.zeros_like(dw)).copy_(dw.detach())

    @staticmethod
    def backward(ctx, dy: Tensor):
        return WeightsOneBuffer.fill(dy * ctx.saved_tensors[0]).detach(), None


class WeightsBufferItself(WeightsOneBuffer):
    """Returns the buffer itself. The class still holds it, so autograd copies: right in `.grad`, by luck."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        return WeightsOneBuffer.fill(dy * ctx.saved_tensors[0]), None


# T7: the sum of squares


class SumsSquares(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (x * x).sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return 2 * ctx.saved_tensors[0] * dy


class SumsSquaresUnweighted(SumsSquares):
    """Makes the gradient in forward, and hands it out whatever dy is."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(2 * inputs[0])

    @staticmethod
    def backward(ctx, dy: Tensor):
        return ctx.saved_tensors[0].clone()


class SumsSquaresWrongWeight(SumsSquaresUnweighted):
    """Is right for a dy of 1, which is not multiplied at all. Otherwise the factor is read behind the wrong pointer."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        (gradient,) = ctx.saved_tensors
        return gradient.clone() if bool(dy == 1) else gradient * gradient.reshape(-1)[0]


# T8: rows of several segments, packed to [segments, longest, ...]; what is longer is cut off


class Packs(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, lengths: Sequence[int], longest: int) -> Tensor:
        rows, places = _kept(x, lengths, longest)
        return x.new_zeros(len(lengths) * longest, *x.shape[1:]).index_copy(0, places, x[rows]).unflatten(0, (-1, longest))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.shape = inputs[0].shape
        ctx.rows, ctx.places = _kept(*inputs)

    @staticmethod
    def backward(ctx, dy: Tensor):
        dx = torch.zeros(ctx.shape, dtype=dy.dtype, device=dy.device)
        return dx.index_copy(0, ctx.rows, dy.flatten(0, 1)[ctx.places]), None, None


class PacksIntoEmpty(Packs):
    """Allocates its gradient by `empty`, and writes the rows that forward kept."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        dx = torch.empty(ctx.shape, dtype=dy.dtype, device=dy.device)
        return dx.index_copy(0, ctx.rows, dy.flatten(0, 1)[ctx.places]), None, None


def _kept(x: Tensor, lengths: Sequence[int], longest: int) -> tuple[Tensor, Tensor]:
    """Rows of x that are kept, and their places in the packed rows."""
    if sum(lengths) != len(x):
        raise ValueError(f"the lengths {list(lengths)} make {sum(lengths)} rows, and x has {len(x)}")
    starts = [sum(lengths[:segment]) for segment in range(len(lengths))]
    kept = [(segment, row) for segment, length in enumerate(lengths) for row in range(min(length, longest))]
    rows = [starts[segment] + row for segment, row in kept]
    places = [segment * longest + row for segment, row in kept]
    return torch.tensor(rows, device=x.device), torch.tensor(places, device=x.device)


def _packed(x: Tensor, lengths: Sequence[int], longest: int) -> Tensor:
    cut = [segment[:longest] for segment in x.split(list(lengths))]
    return torch.nn.utils.rnn.pad_sequence([*cut, x.new_zeros(longest, *x.shape[1:])], batch_first=True)[:-1]


# T9: layer norm without weights, eps 0


class Norms(torch.autograd.Function):
    """A row lies in a block of lanes, a power of two; the lanes that are too many hold 0."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _norm(x, masked=True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        centred = x - x.mean(-1, keepdim=True)
        scale = centred.square().mean(-1, keepdim=True).rsqrt()
        y = centred * scale
        return scale * (dy - dy.mean(-1, keepdim=True) - y * (dy * y).mean(-1, keepdim=True))


class NormsAllLanes(Norms):
    """Divides by the right number. The lanes that are too many add (0 - mean)^2 to the variance."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _norm(x, masked=False)


def _norm(x: Tensor, masked: bool) -> Tensor:
    width = x.shape[-1]
    lanes = torch.nn.functional.pad(x, (0, (1 << (width - 1).bit_length()) - width))
    centred = lanes - lanes.sum(-1, keepdim=True) / width
    if masked:
        centred = centred.masked_fill(torch.arange(lanes.shape[-1], device=x.device) >= width, 0)
    variance = centred.square().sum(-1, keepdim=True) / width
    return (centred * variance.rsqrt())[..., :width].contiguous()


def _norm_reference(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * centred.square().mean(-1, keepdim=True).rsqrt()


# T10: rows of h by a matrix


class Projects(torch.autograd.Function):
    @staticmethod
    def forward(h: Tensor, w: Tensor) -> Tensor:
        return h.reshape(-1, h.shape[-1]) @ w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy: Tensor):
        h, w = ctx.saved_tensors
        dh = (dy @ w.t()).view(h.shape) if ctx.needs_input_grad[0] else None
        dw = h.reshape(-1, h.shape[-1]).t() @ dy if ctx.needs_input_grad[1] else None
        return dh, dw


class ProjectsAsSaved(Projects):
    """Saves the rows, which are a view of h or a copy, and asks *them* whether a gradient is wanted."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        h, w = inputs
        ctx.shape = h.shape
        ctx.save_for_backward(h.reshape(-1, h.shape[-1]), w)

    @staticmethod
    def backward(ctx, dy: Tensor):
        rows, w = ctx.saved_tensors
        dh = (dy @ w.t()).view(ctx.shape) if rows.requires_grad else None
        return dh, rows.t() @ dy


# Runs that show it, and runs that hide it


def _of(values, grad: bool = True) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=runtime.DEVICE, requires_grad=grad)


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64, device=runtime.DEVICE, requires_grad=True)


def _numbers(tensor: Tensor | None):
    return None if tensor is None else (tensor.detach().round(decimals=4) + 0.0).tolist()  # + 0.0: no -0


def _gradient(x: Tensor, loss: Tensor):
    (dx,) = torch.autograd.grad(loss, x, allow_unused=True)
    return _numbers(dx)


def _eight() -> Tensor:
    return _of([[0, 1, 2, 3], [4, 5, 6, 7]])


def _rotates_shows(f) -> dict:
    return {"y.sum(), x.grad": _gradient(x := _eight(), f(x).sum())}


def _rotates_hides(f) -> dict:
    return {
        "(y * 1).sum(), x.grad": _gradient(x := _eight(), (f(x) * 1).sum()),
        "y.mean() * 8, x.grad": _gradient(x := _eight(), f(x).mean() * 8),
    }


def _in_cat(f, first: bool):
    x, other = _ones(2, 2), _ones(2, 2)
    weights = _of([[1, 2, 3, 4], [5, 6, 7, 8]], grad=False)
    return _gradient(x, (torch.cat([f(x), other] if first else [other, f(x)], 1) * weights).sum())


def _triples_shows(f) -> dict:
    transposed = _gradient(x := _ones(2, 2), (f(x).t() * _of([[1, 2], [3, 4]], grad=False)).sum())
    return {"cat([y, c], 1)": _in_cat(f, True), "cat([c, y], 1)": _in_cat(f, False), "y.t()": transposed}


def _triples_hides(f) -> dict:
    x, other = _ones(1, 2), _ones(1, 2)
    weights = _of([[1, 2, 3, 4]], grad=False)
    return {"cat([y, c], 1), one row": _gradient(x, (torch.cat([f(x), other], 1) * weights).sum())}


def _squares_shows(f) -> dict:
    u = _of([0, 0, 0])
    behind_exp = _gradient(u, f(torch.exp(u)).sum())
    x = _of([3, 5])
    loss = f(x).sum()
    twice = [_numbers(torch.autograd.grad(loss, x, retain_graph=True)[0]) for _ in range(2)]
    parameter = _of([3, 5])
    f(parameter).sum().backward()
    torch.optim.SGD([parameter], lr=0.1).step()
    return {"behind exp(u), u's gradient": behind_exp, "one graph, twice": twice, "after a step": _numbers(parameter)}


def _squares_hides(f) -> dict:
    return {"behind x + 0, once": _gradient(x := _of([3, 5]), f(x + 0).sum())}


def _siblings(f, sibling_first: bool):
    a, c = _ones(3), _ones(3)
    if sibling_first:
        fives = 5 * c
        z = f(a) + fives
    else:
        y = f(a)
        z = y + 5 * c
    (z * _of([1, 2, 3], grad=False)).sum().backward()
    return _numbers(c.grad)


def _doubles_shows(f) -> dict:
    a, w = _ones(3), _of([1, 2, 3], grad=False)
    h = 5 * a
    residual = _gradient(a, ((f(h) + h) * w).sum())
    mine = _of([1, 2, 3], grad=False)
    torch.autograd.grad(f(x := _ones(3)), x, mine)
    return {"f(a) + 5c, c.grad": _siblings(f, True), "h + f(h), h = 5a": residual, "the caller's dy": _numbers(mine)}


def _doubles_hides(f) -> dict:
    a, c, w = _ones(3), _ones(3), _of([1, 2, 3], grad=False)
    ((f(a) + c) * w).sum().backward()
    return {"5c made after f(a), c.grad": _siblings(f, False), "f(a) + c, c.grad": _numbers(c.grad)}


def _one_by_one_shows(f) -> dict:
    return {"y.sum(), x.grad": _gradient(x := _ones(4), f(x).sum())}


def _one_by_one_hides(f) -> dict:
    return {"(y * 1).sum(), x.grad": _gradient(x := _ones(4), (f(x) * 1).sum())}


def _batches() -> tuple[Tensor, Tensor]:
    return _of([1, 2], grad=False), _of([10, 20], grad=False)


def _weights_shows(f) -> dict:
    w, one, two = _ones(2), _ones(2), _ones(2)
    for x in _batches():
        f(w, x).sum().backward()
    for parameter, x in zip((one, two), _batches(), strict=True):
        f(parameter, x).sum().backward()
    return {"two micro-batches, w.grad": _numbers(w.grad), "two parameters, the first's": _numbers(one.grad)}


def _weights_hides(f) -> dict:
    w, seen = _ones(2), []
    for x in _batches():
        w.grad = None
        f(w, x).sum().backward()
        seen.append(_numbers(w.grad))
    return {"a step after each batch": seen}


def _weight_of_loss_shows(f) -> dict:
    return {f"({weight} * f)": _gradient(x := _of([1, 2]), weight * f(x)) for weight in (0.1, 0)}


def _weight_of_loss_hides(f) -> dict:
    return {"(1 * f)": _gradient(x := _of([1, 2]), f(x))}


def _packs_shows(f) -> dict:
    x = _ones(7, 1)
    with nan_in_empty_memory():
        dx = _gradient(x, f(x, (2, 5), 3).sum())
    return {"lengths 2 and 5, longest 3": [row[0] for row in dx]}


def _packs_hides(f) -> dict:
    x = _ones(5, 1)
    with nan_in_empty_memory():
        dx = _gradient(x, f(x, (2, 3), 3).sum())
    return {"lengths 2 and 3, longest 3": [row[0] for row in dx]}


def _norms_shows(f) -> dict:
    return {"[1, 2, 3]": _numbers(f(_of([[1, 2, 3]])))}


def _norms_hides(f) -> dict:
    return {str(row): _numbers(f(_of([row]))) for row in ([-1, 0, 1], [1, 2, 3, 4])}


def _trunk(f, transposed: bool) -> dict:
    leaf, w = _ones(2, 3, 2), _ones(2, 2)
    h = leaf * 2
    f(h.transpose(0, 1) if transposed else h, w).sum().backward()
    return {"w.grad": _numbers(w.grad), "the trunk's": None if leaf.grad is None else leaf.grad.unique().tolist()}


@contextlib.contextmanager
def nan_in_empty_memory() -> Iterator[None]:
    """PyTorch's own switch: what `empty` returns is filled with NaN."""
    mode, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn)
        torch.utils.deterministic.fill_uninitialized_memory = filled


# The cases

LAYOUT = "the kernel reads dy's memory without dy's strides"
IN_SAVED = "backward writes over the input that it saved"
IN_UPSTREAM = "backward writes over the dy that it was given"
BUFFER = "all backwards share one buffer"
IGNORED = "backward does not multiply by dy"
EMPTY = "backward leaves part of its new memory as it was"
LANES = "lanes beyond the row take part in a sum"
ASKED = "backward asks a copy whether a gradient is wanted"
RACE = "two programs meet in one cell, without atomics"

CASES: dict[str, Case] = {
    case.number: case
    for case in (
        Case(
            "T1", "prints as ones",
            "My dy prints as eight ones, and one single -1 comes out. As soon as I multiply y by 1 before the sum, all is right.",
            (IN_UPSTREAM, LAYOUT, EMPTY, IGNORED), LAYOUT, RotatesUnguarded, Rotates, Rotates.forward, lambda: (_eight(),),
            _rotates_shows, _rotates_hides, "respects_upstream_strides", "01",
            "call the guard, dy.is_contiguous(), or give the kernel dy's own strides",
        ),
        Case(
            "T2", "right in the first row",
            "Alone it passes every test. Put beside another tensor by cat, the first row is right, and the second is not.",
            (RACE, EMPTY, IN_SAVED, LAYOUT), LAYOUT, TriplesWhatFollows, Triples, Triples.forward,
            lambda: (_of([[1, 2], [3, 4]]),), _triples_shows, _triples_hides, "respects_upstream_strides", "01",
            "give the kernel dy's own strides, or dy.contiguous()",
        ),
        Case(
            "T5", "two to the number of elements",
            "y = 2x of four numbers, and y.sum() gives me a gradient of 16. Of five numbers it is 32.",
            (BUFFER, LAYOUT, IN_UPSTREAM, IGNORED), IN_UPSTREAM, DoublesOneByOne, Doubles, Doubles.forward,
            lambda: (_ones(4),), _one_by_one_shows, _one_by_one_hides, "leaves_upstream_alone", "03",
            "write to new memory: dy may be one cell that stands for all elements",
        ),
        Case(
            "T4", "the neighbour's gradient",
            "My layer's own gradient is right. The branch beside it gets twice of what it should, unless I swap two lines.",
            (IN_UPSTREAM, BUFFER, RACE, IN_SAVED), IN_UPSTREAM, DoublesUpstream, Doubles, Doubles.forward,
            lambda: (_ones(3),), _doubles_shows, _doubles_hides, "leaves_upstream_alone", "03",
            "write to new memory: a sum hands one dy to all its addends",
        ),
        Case(
            "T3", "the layer before it is wrong",
            "My square is right, but exp before it gets twice its gradient. After a step my parameter is 5.4 instead of 2.4.",
            (BUFFER, IGNORED, IN_SAVED, IN_UPSTREAM), IN_SAVED, SquaresIntoInput, Squares, Squares.forward,
            lambda: (_of([3, 5]),), _squares_shows, _squares_hides, "leaves_inputs_alone", "02",
            "write to new memory; announcing the write makes it loud, not right",
        ),
        Case(
            "T6", "only the last micro-batch counts",
            "With gradient accumulation I get twice the last micro-batch instead of the sum. With one batch a step all is right.",
            (IGNORED, RACE, IN_UPSTREAM, BUFFER), BUFFER, WeightsOneBuffer, Weights, Weights.forward,
            lambda: (_ones(2), _of([1, 2], grad=False)), _weights_shows, _weights_hides, "accumulates", "03",
            "return new memory for every gradient: autograd keeps what it is given as .grad",
        ),
        Case(
            "T7", "the loss weight that does nothing",
            "I weight my loss with 0.1, and it trains as before. With 0 it still trains.",
            (EMPTY, IGNORED, BUFFER, ASKED), IGNORED, SumsSquaresUnweighted, SumsSquares, SumsSquares.forward,
            lambda: (_of([1, 2]),), _weight_of_loss_shows, _weight_of_loss_hides, "is_linear_in_upstream", "04",
            "multiply what forward made by dy, whatever dy is",
        ),
        Case(
            "T8", "NaN after some hundred steps",
            "It trains well, and then NaN is everywhere. It begins with a batch in which one text was longer than the limit.",
            (LANES, LAYOUT, RACE, EMPTY), EMPTY, PacksIntoEmpty, Packs, _packed,
            lambda: (_of([[1], [2], [3], [4], [5], [6], [7]]), (2, 5), 3), _packs_shows, _packs_hides, "fills_its_results", "03",
            "allocate by zeros, or write the rows that were cut off, too",
        ),
        Case(
            "T9", "wrong at width 3, right at width 4",
            "My layer norm agrees with PyTorch's at width 4, and at width 3 on rows like -1, 0, 1. On 1, 2, 3 it does not.",
            (LAYOUT, LANES, EMPTY, RACE), LANES, NormsAllLanes, Norms, _norm_reference,
            lambda: (_of([[1, 2, 3], [2, 4, 9]]),), _norms_shows, _norms_hides, "agrees_with_reference", "01",
            "mask the lanes beyond the row once more, after the mean is subtracted",
        ),
        Case(
            "T10", "the trunk that stopped training",
            "Loss goes down, no warning, but only the head changes. It began when a transpose came before the head.",
            (ASKED, IGNORED, LAYOUT, BUFFER), ASKED, ProjectsAsSaved, Projects, lambda h, w: h.flatten(0, 1) @ w,
            lambda: (_ones(2, 3, 2), _ones(2, 2)), functools.partial(_trunk, transposed=True),
            functools.partial(_trunk, transposed=False), "respects_input_strides", "04",
            "ask ctx.needs_input_grad",
        ),
    )
}  # fmt: skip
