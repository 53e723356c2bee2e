"""The Functions of the ten cases: each ill in one way that was reported in public, behind the same Function cured.

Kernels are played by PyTorch over bare memory, so that none needs Triton or a compiler: what they read and write is what a
kernel would, autograd is told nothing, and nothing leaves the storage.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from rawgrad import raw

# What the kernels do


class _SavesNothing(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


class _AsRead(_SavesNothing):
    """dy as a kernel reads it that was given a pointer and no strides. Past the storage's end it reads 0."""

    @staticmethod
    def forward(dy: Tensor) -> Tensor:
        read = raw.read(dy, min(dy.numel(), raw.elements_left(dy)))
        return torch.cat([read, read.new_zeros(dy.numel() - len(read))]).view(dy.shape)

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


class Rotates(_SavesNothing):
    """[a|b] -> [-b|a]."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([-b, a], -1)

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


class Triples(_SavesNothing):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 3 * x

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


class Doubles(_SavesNothing):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

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

    buffers: ClassVar[dict[tuple, Tensor]] = {}

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


def packed(x: Tensor, lengths: Sequence[int], longest: int) -> Tensor:
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


def norm_reference(x: Tensor) -> Tensor:
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
