"""y = x^2, elementwise.

Read from the top: what it means (reference), how it runs (Triton kernels here, CUDA kernels in square.cu, launch), how
autograd sees it (Function), what you call (square).
"""

from pathlib import Path

import torch
from torch import Tensor

from rawgrad import cuda, runtime
from rawgrad.runtime import tl, triton  # stand-ins where Triton is not installed

CUDA_SOURCE = Path(__file__).with_suffix(".cu")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
BLOCK = 65_536 if runtime.INTERPRETED else 1_024  # elements a program; the interpreter needs half a millisecond for each


# Reference


def square_reference(x: Tensor) -> Tensor:
    """x^2 in plain PyTorch; in float64 it is the tests' truth."""
    return x * x


# Kernels, on [planes, rows, cols].  Every tensor brings its own strides, in elements.


@triton.jit
def _tile(rows, cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """plane, row [BLOCK_ROWS, 1] and col [1, BLOCK_COLS] of this program, 64 bits wide: offsets outgrow 2^31."""
    program = tl.program_id(0).to(tl.int64)
    row_tiles, col_tiles = tl.cdiv(rows, BLOCK_ROWS), tl.cdiv(cols, BLOCK_COLS)
    plane, tile = program // (row_tiles * col_tiles), program % (row_tiles * col_tiles)
    row = (tile // col_tiles) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = (tile % col_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    return plane, row, col


@triton.jit
def _square_forward_kernel(
    x_ptr, x_plane_stride, x_row_stride, x_col_stride,
    y_ptr, y_plane_stride, y_row_stride, y_col_stride,
    rows, cols,
    BLOCK_ROWS: tl.constexpr,  # powers of two
    BLOCK_COLS: tl.constexpr,
    ACC: tl.constexpr,  # dtype of the arithmetic
):  # fmt: skip
    plane, row, col = _tile(rows, cols, BLOCK_ROWS, BLOCK_COLS)
    inside = (row < rows) & (col < cols)
    x = tl.load(x_ptr + plane * x_plane_stride + row * x_row_stride + col * x_col_stride, mask=inside).to(ACC)

    y = x * x

    tl.store(
        y_ptr + plane * y_plane_stride + row * y_row_stride + col * y_col_stride,
        y.to(y_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def _square_backward_kernel(
    x_ptr, x_plane_stride, x_row_stride, x_col_stride,
    dy_ptr, dy_plane_stride, dy_row_stride, dy_col_stride,
    dx_ptr, dx_plane_stride, dx_row_stride, dx_col_stride,
    rows, cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    plane, row, col = _tile(rows, cols, BLOCK_ROWS, BLOCK_COLS)
    inside = (row < rows) & (col < cols)
    x = tl.load(x_ptr + plane * x_plane_stride + row * x_row_stride + col * x_col_stride, mask=inside).to(ACC)
    dy = tl.load(dy_ptr + plane * dy_plane_stride + row * dy_row_stride + col * dy_col_stride, mask=inside).to(ACC)

    dx = 2 * x * dy

    tl.store(
        dx_ptr + plane * dx_plane_stride + row * dx_row_stride + col * dx_col_stride,
        dx.to(dx_ptr.dtype.element_ty),
        mask=inside,
    )


# Launch


def square_forward(x: Tensor, y: Tensor, backend: str) -> None:
    """Write x^2 into `y` by a kernel; arguments and errors as for square_backward. No version counter moves."""
    _check(backend, x, y)
    _launch(backend, _square_forward_kernel, "square_forward", x, y)


def square_backward(x: Tensor, dy: Tensor, dx: Tensor, backend: str | None = None) -> None:
    """Write 2 x dy into `dx` by a kernel, whatever `dx` is: it may be x itself. No version counter moves.

    Args:
        x, dy, dx: of one shape, dtype and device, each with its own strides. A lazily negated x or dy is resolved by a copy.
        backend: "triton", "cuda", or None for the first that runs here. "torch" is the plain twin, whose write is counted.
    """
    backend = runtime.choose(backend, x.device.type)
    _check(backend, x, dy, dx)
    if backend == "torch":
        dx.copy_(2 * x * dy)
    else:
        _launch(backend, _square_backward_kernel, "square_backward", x.resolve_neg(), dy.resolve_neg(), dx)


def _check(backend: str, *tensors: Tensor) -> None:
    """A kernel believes what it is told, so this is the last place for a sentence. The last tensor is written."""
    first, *others = tensors
    for tensor in others:
        if (tensor.shape, tensor.dtype, tensor.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"square's kernels need tensors of one shape, dtype and device, got {tuple(tensor.shape)} {tensor.dtype} "
                f"{tensor.device} beside {tuple(first.shape)} {first.dtype} {first.device}"
            )
    if tensors[-1].is_neg():
        raise ValueError("square's kernels cannot write to a lazily negated tensor: give them tensor.resolve_neg()")
    if first.dtype not in DTYPES:
        raise TypeError(f"square needs float64, float32, float16 or bfloat16, got {first.dtype}")
    runtime.refuse_bfloat16(backend, first.dtype)


def _launch(backend: str, triton_kernel, cuda_kernel: str, *tensors: Tensor) -> None:
    """Run a kernel over `tensors`, all of one shape and with strides of their own: one launch, or one for each index of
    the shortest axis for as long as more than three axes do not merge."""
    order = sorted(range(tensors[-1].ndim), key=tensors[-1].stride, reverse=True)  # outermost first in the result's memory
    axes = _merged([(tensors[-1].shape[axis], [t.stride(axis) for t in tensors]) for axis in order])
    if any(size == 0 for size, _ in axes):
        return
    if len(axes) > 3:
        _, axis = min((size, axis) for axis, size in enumerate(tensors[-1].shape) if size > 1)
        for index in range(tensors[-1].shape[axis]):
            _launch(backend, triton_kernel, cuda_kernel, *(t.select(axis, index) for t in tensors))
        return
    axes = [(1, [0] * len(tensors))] * (3 - len(axes)) + axes
    (planes, rows, cols), strides = zip(*axes, strict=True)
    flat = [argument for tensor, *steps in zip(tensors, *strides, strict=True) for argument in (tensor, *steps)]
    if backend == "triton":
        block_cols = min(triton.next_power_of_2(cols), BLOCK)
        block_rows = min(triton.next_power_of_2(rows), BLOCK // block_cols)
        acc = tl.float64 if tensors[0].dtype == torch.float64 else tl.float32  # so that gradcheck can examine the kernel
        programs = planes * triton.cdiv(rows, block_rows) * triton.cdiv(cols, block_cols)
        with runtime.triton_launch(tensors[0]):
            triton_kernel[(programs,)](
                *flat, rows, cols, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, ACC=acc, enable_fp_fusion=False
            )  # fmt: skip
    else:
        runs = -(-cols * tensors[0].element_size() // 16)  # a thread has 16 bytes of a row
        across = min(256 if rows == 1 else 16, 1 << (runs - 1).bit_length())
        down = min(256 // across, 1 << (rows - 1).bit_length())
        grid = (-(-runs // across), min(-(-rows // down), 65_535), min(planes, 65_535))
        cuda.launch(CUDA_SOURCE, cuda_kernel, grid, (across, down, 1), *flat, planes, rows, cols)


def _merged(axes: list[tuple[int, list[int]]]) -> list[tuple[int, list[int]]]:
    """The same walk in fewer axes. An axis is its size and every tensor's stride along it, outermost first: those of size 1
    go, and one that every tensor steps through as a run of the next is merged with it."""
    merged = []
    for size, strides in axes:
        if size == 1:
            continue
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1], strides, strict=True)):
            size *= merged.pop()[0]
        merged.append((size, strides))
    return merged


# Functions


class Square(torch.autograd.Function):
    """Saves x and nothing else; writes to no tensor that it is given."""

    @staticmethod
    def forward(x: Tensor, backend: str) -> Tensor:
        y = torch.empty_like(x)
        square_forward(x, y, backend)
        return y

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.backend = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        return TwiceTheProduct.apply(x, dy, ctx.backend), None


class TwiceTheProduct(torch.autograd.Function):
    """2 x dy as a Function of both, which is square's backward: autograd sees into it, so every derivative is right.

    Its own derivatives are 2 dy g and 2 x g, the same Function again. Saves x and dy, and only under create_graph.
    """

    @staticmethod
    def forward(x: Tensor, dy: Tensor, backend: str) -> Tensor:
        dx = torch.empty_like(x)
        square_backward(x, dy, dx, backend)
        return dx

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, dy, ctx.backend = inputs
        ctx.save_for_backward(x, dy)

    @staticmethod
    def backward(ctx, g: Tensor):
        x, dy = ctx.saved_tensors
        to_x = TwiceTheProduct.apply(dy, g, ctx.backend) if ctx.needs_input_grad[0] else None
        to_dy = TwiceTheProduct.apply(x, g, ctx.backend) if ctx.needs_input_grad[1] else None
        return to_x, to_dy, None


# What you call


def square(x: Tensor, backend: str | None = None) -> Tensor:
    """x^2, by a Triton kernel, a CUDA kernel or PyTorch.

    Args:
        x: any shape and strides; float64, float32, float16 or bfloat16, on the CPU or a GPU. float16 and bfloat16 are
            computed in float32 and rounded once. A lazily negated x (`x.is_neg()`) is resolved first, by a copy.
        backend: "triton", "cuda", "torch", or None for the first of them that runs here.

    Returns:
        New memory, shape, dtype and device of x, laid out as torch lays out x * x.

    Raises:
        TypeError: x has another dtype, or is bfloat16 for Triton's interpreter, which rounds it wrongly.
        ValueError: x is on another kind of device or is not strided, or there is no backend of that name.
        RuntimeError: the backend cannot run here; the sentence says what to do.

    Cost: reads x once and writes y once, without a copy, and keeps x until backward; backward reads x and dy (in any layout)
    once and writes dx once. One launch each, unless more than three axes are left when those that every tensor walks as one
    are merged: then one for each index of the shortest.
    Differentiable any number of times.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"square needs float64, float32, float16 or bfloat16, got {x.dtype}")
    if x.device.type not in ("cpu", "cuda") or x.layout != torch.strided:
        raise ValueError(f"square needs a strided tensor on a CPU or a CUDA GPU, got {x.layout} on {x.device}")
    backend = runtime.choose(backend, x.device.type)
    return square_reference(x) if backend == "torch" else Square.apply(x.resolve_neg(), backend)
