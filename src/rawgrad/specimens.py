"""Functions with one disease each, and the same Functions cured.

All compute y = x^2 by the healthy kernels of ops.square. What differs is where a backward lets them write and what it
says about it. `writer` is "triton", "cuda", None for the first of them that runs here, or "torch" for PyTorch's own in-place
operator.
"""

import torch
from torch import Tensor

from rawgrad.ops.square import square_backward


def multiply_into_saved(x: Tensor, dy: Tensor, writer: str | None) -> None:
    """x becomes 2 x dy, in x's own memory."""
    if writer == "torch":
        x.mul_(2 * dy)
    else:
        square_backward(x, dy, x, writer)


class GradientInSaved(torch.autograd.Function):
    """The disease: backward stores the gradient in the saved x and returns x, to save the memory of a result."""

    @staticmethod
    def forward(x: Tensor, writer: str | None) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.writer = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        multiply_into_saved(x, dy, ctx.writer)
        return x, None


class GradientInSavedAnnounced(GradientInSaved):
    """Tells autograd of the write, after it."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        multiply_into_saved(x, dy, ctx.writer)
        torch.autograd.graph.increment_version(x)
        return x, None


class GradientInSavedCloned(GradientInSaved):
    """Returns a copy of what it wrote over the saved x."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        multiply_into_saved(x, dy, ctx.writer)
        return x.clone(), None


class GradientInSavedDetached(GradientInSaved):
    """Returns another tensor over the same memory."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        multiply_into_saved(x, dy, ctx.writer)
        return x.detach(), None


@torch.library.custom_op("rawgrad::multiply_into_saved", mutates_args=("x",))
def multiply_into_saved_declared(x: Tensor, dy: Tensor, writer: str | None) -> None:
    """multiply_into_saved as an operator that declares its write, so that PyTorch moves the version by itself."""
    multiply_into_saved(x, dy, writer)


class GradientInSavedDeclared(GradientInSaved):
    """Writes through an operator that declares the write."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        multiply_into_saved_declared(x, dy, ctx.writer)
        return x, None


class GradientInNewMemory(GradientInSaved):
    """The cure: the same kernel, given new memory to write to."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        square_backward(x, dy, dx, ctx.writer)
        return dx, None


class DoublesUpstream(GradientInSaved):
    """Another disease: backward doubles the gradient that it was given, in place, and multiplies x by it in new memory."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        multiply_into_saved(dy, torch.ones_like(dy), ctx.writer)
        return x * dy, None
