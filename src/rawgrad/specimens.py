"""Functions with one disease each, and the same Functions cured.

y = x^2 stores its gradient where it should not, by the healthy kernels of ops.square. y = 3 x misreads the
gradient that it is given, by two kernels of its own: one with strides and one without. The rotary embedding does both, by the
healthy kernels of ops.rotary. y = 2 x writes over the gradient that it is given, keeps the memory that it hands out, or keeps a
pointer and not the tensor. `writer` is "triton", "cuda", None for the first of them that runs here, or, in the first
family, "torch" for PyTorch's own in-place operator.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rawgrad import cuda, raw, runtime
from rawgrad.ops.rotary import Rotary, rotary_into
from rawgrad.ops.square import TwiceTheProduct, square_backward
from rawgrad.runtime import tl, triton

CUDA_SOURCE = Path(__file__).with_suffix(".cu")

# Where a backward writes: y = x^2


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


class GradientInSavedTriton(GradientInSaved):
    """Writes through a triton_op that declares the write; needs Triton."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        _multiply_by_triton_op()(x, dy)
        return x, None


@functools.cache
def _multiply_by_triton_op():
    """The operator, made at its first use: torch.library.triton_op is there with Triton only."""

    @torch.library.triton_op("rawgrad::multiply_into_saved_by_triton", mutates_args=("x",))
    def multiply_into_saved_by_triton(x: Tensor, dy: Tensor) -> None:
        multiply_into_saved(x, dy, "triton")

    return multiply_into_saved_by_triton


class GradientInNewMemory(GradientInSaved):
    """The cure: the same kernel, given new memory to write to, as a Function of its own that can be differentiated again."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        return TwiceTheProduct.apply(x, dy, ctx.writer), None


class DoublesUpstream(GradientInSaved):
    """Another disease: backward doubles the gradient that it was given, in place, and multiplies x by it in new memory."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        multiply_into_saved(dy, torch.ones_like(dy), ctx.writer)
        return x * dy, None


# How a backward reads dy: y = 3 x, so dx / 3 is what the kernel read


@triton.jit
def _triple_flat_kernel(dy_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + i, mask=i < n)
    tl.store(dx_ptr + i, 3 * dy, mask=i < n)


@triton.jit
def _triple_kernel(dy_ptr, dy_row_stride, dy_col_stride, dx_ptr, cols, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + i // cols * dy_row_stride + i % cols * dy_col_stride, mask=i < n)
    tl.store(dx_ptr + i, 3 * dy, mask=i < n)


def triple(dy: Tensor, strides: Sequence[int] | None, writer: str | None = None) -> Tensor:
    """3 dy by a kernel that is told `strides`, for every axis of a dy [rows, cols], or none.

    Raises:
        ValueError: with these strides the kernel would leave dy's storage. A kernel in the wild reads on.
    """
    writer = runtime.choose(writer, dy.device.type)
    if strides is not None and dy.ndim != 2:
        raise ValueError(f"the kernel with strides needs a dy of shape [rows, cols], got {tuple(dy.shape)}")
    n = dy.numel()
    steps = (1,) if strides is None else strides
    sizes = (n,) if strides is None else dy.shape
    last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    if n and last >= raw.elements_left(dy):
        raise ValueError(
            f"the kernel would read element {last} of a storage that has {raw.elements_left(dy)} from dy on; "
            "lay dy in a larger one first: scenarios.staged(y)"
        )
    dx = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    told = () if strides is None else (*strides,)
    sized = (n,) if strides is None else (dy.shape[-1], n)
    if n and writer == "triton":
        kernel = _triple_flat_kernel if strides is None else _triple_kernel
        with runtime.triton_launch(dy):
            kernel[(triton.cdiv(n, 1024),)](dy, *told, dx, *sized, BLOCK=1024)
    elif n:
        kernel = "triple_flat" if strides is None else "triple"
        cuda.launch(CUDA_SOURCE, kernel, (-(-n // 128),), (128,), dy, *told, dx, *sized)
    return dx


class ReadsFlat(torch.autograd.Function):
    """The disease: the kernel gets dy's pointer and no strides."""

    @staticmethod
    def forward(x: Tensor, writer: str | None) -> Tensor:
        return 3 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.writer = inputs
        ctx.x_stride = x.stride()

    @staticmethod
    def backward(ctx, dy: Tensor):
        return triple(dy, None, ctx.writer), None


class ReadsWithStridesOfX(ReadsFlat):
    """Tells the kernel the strides of x."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        return triple(dy, ctx.x_stride, ctx.writer), None


class ReadsWithRowStride(ReadsFlat):
    """Tells the kernel how far rows are apart, and takes the columns for neighbours."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        return triple(dy, (dy.stride(0), 1), ctx.writer), None


class GuardsWithoutBrackets(ReadsFlat):
    """Asks the method, which is always true, instead of calling it."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        if not dy.is_contiguous:
            dy = dy.contiguous()
        return triple(dy, None, ctx.writer), None


class GuardsLastStride(ReadsFlat):
    """Looks at the last stride only."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        if dy.stride(-1) != 1:
            dy = dy.contiguous()
        return triple(dy, None, ctx.writer), None


class DropsTheCopy(ReadsFlat):
    """Makes the copy and does not use it."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        dy.contiguous()
        return triple(dy, None, ctx.writer), None


class ReadsClone(ReadsFlat):
    """Clones dy first. A clone of a dense tensor keeps its strides."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        return triple(dy.clone(), None, ctx.writer), None


class ReadsSum(ReadsFlat):
    """Adds 0 first. The sum of a dense tensor keeps its strides, too."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        return triple(dy + 0, None, ctx.writer), None


class ReadsContiguous(ReadsFlat):
    """The cure by a copy, which is made only where it is needed. Its backward is itself, so it can be differentiated again."""

    @staticmethod
    def forward(x: Tensor, writer: str | None) -> Tensor:
        return triple(x.contiguous(), None, writer)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return ReadsContiguous.apply(dy, ctx.writer), None


class ReadsStrides(ReadsFlat):
    """The cure without a copy: the kernel is told the tensor's own strides. Its backward is itself, too."""

    @staticmethod
    def forward(x: Tensor, writer: str | None) -> Tensor:
        return triple(x, x.stride(), writer)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return ReadsStrides.apply(dy, ctx.writer), None


# The rotary embedding of the public question: `rotary_size` dimensions are turned, in the heads from `base` on


class RotaryReadsFlat(torch.autograd.Function):
    """The disease: the kernel gets dy's pointer, and takes dy for contiguous."""

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, rotary_size: int, base: int, writer: str | None):
        y = torch.empty_like(x)
        heads = (base, x.shape[2])
        rotary_into(x, y, cos, sin, position_ids, rotary_dim=rotary_size, heads=heads, backend=writer)
        return y

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, cos, sin, position_ids, ctx.rotary_size, ctx.base, ctx.writer = inputs
        ctx.save_for_backward(cos, sin, position_ids)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _turned_back(ctx, raw.flat(dy.resolve_neg())), *_NO_GRADIENTS


_NO_GRADIENTS = (None,) * 6  # for all but x


def _turned_back(ctx, dy: Tensor, into: Tensor | None = None) -> Tensor:
    """dx by the kernel, in `into` or in new memory."""
    cos, sin, position_ids = ctx.saved_tensors
    dx = torch.empty_like(dy) if into is None else into
    heads = (ctx.base, dy.shape[2])
    rotary_into(dy, dx, cos, sin, position_ids, sign=-1, rotary_dim=ctx.rotary_size, heads=heads, backend=ctx.writer)
    return dx


def _rotary(ctx, dy: Tensor, sign: float) -> Tensor:
    """dy turned by the op itself: in new memory, by its own strides, and again differentiable."""
    cos, sin, position_ids = ctx.saved_tensors
    options = (runtime.choose(ctx.writer, dy.device.type), ctx.rotary_size // 2, (ctx.base, dy.shape[2]), False)
    return Rotary.apply(dy, None, cos, sin, position_ids, options, sign)[0]


class RotaryWithSlips(RotaryReadsFlat):
    """The backward as the question quotes it: two names that exist on ctx only."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        cos, sin, position_ids = ctx.saved_tensors
        options = (runtime.choose(ctx.writer, dy.device.type), rotary_size // 2, (base, dy.shape[2]), False)  # noqa: F821
        return Rotary.apply(dy, None, cos, sin, position_ids, options, -1.0)[0], *_NO_GRADIENTS


class RotaryTurnsOn(RotaryReadsFlat):
    """Turns the gradient on instead of back. At position 0 both are the identity."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _rotary(ctx, dy, 1.0), *_NO_GRADIENTS


class RotaryIntoUpstream(RotaryReadsFlat):
    """Writes its gradient into dy, and returns dy."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _turned_back(ctx, dy, into=dy), *_NO_GRADIENTS


class RotaryIntoInput(RotaryReadsFlat):
    """Turns x itself in forward, and says so to nobody. Its backward is healthy."""

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, rotary_size: int, base: int, writer: str | None):
        rotary_into(x, x, cos, sin, position_ids, rotary_dim=rotary_size, heads=(base, x.shape[2]), backend=writer)
        return x

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _rotary(ctx, dy, -1.0), *_NO_GRADIENTS


class RotaryReadsClone(RotaryReadsFlat):
    """Clones dy first. A clone of a dense tensor keeps its strides."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _turned_back(ctx, raw.flat(dy.clone().resolve_neg())), *_NO_GRADIENTS


class RotaryReadsContiguous(RotaryReadsFlat):
    """The cure of the layout by a copy, which is made only where it is needed."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _rotary(ctx, dy.contiguous(), -1.0), *_NO_GRADIENTS


class RotaryCured(RotaryReadsFlat):
    """The cure of all of them: ctx is asked, the kernel is told dy's own strides and the way back, and writes to new memory, by
    a Function that can be differentiated again."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _rotary(ctx, dy, -1.0), *_NO_GRADIENTS


# Who else uses this memory: y = factor x


def scale(dy: Tensor, factor: float, dx: Tensor, writer: str | None) -> None:
    """dx becomes factor * dy by a kernel; dx may be dy itself."""
    square_backward(torch.full_like(dy, factor / 2), dy, dx, writer)


class DoublesInPlace(torch.autograd.Function):
    """The disease: backward doubles the gradient that it was given where it lies, and returns it."""

    @staticmethod
    def forward(x: Tensor, writer: str | None) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.writer = inputs[1]

    @staticmethod
    def backward(ctx, dy: Tensor):
        scale(dy, 2, dy, ctx.writer)
        return dy, None


class DoublesInPlaceAnnounced(DoublesInPlace):
    """Tells autograd of the write, after it."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        scale(dy, 2, dy, ctx.writer)
        torch.autograd.graph.increment_version(dy)
        return dy, None


class DoublesItsClone(DoublesInPlace):
    """Healthy: it writes in place, over a clone of its own."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        dx = dy.clone()
        scale(dx, 2, dx, ctx.writer)
        return dx, None


class DoublesInNewMemory(DoublesInPlace):
    """The cure: the kernel writes to new memory. Its backward is itself, so it can be differentiated again."""

    @staticmethod
    def forward(x: Tensor, writer: str | None) -> Tensor:
        y = torch.empty_like(x)
        scale(x, 2, y, writer)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        return DoublesInNewMemory.apply(dy, ctx.writer), None


class KeepsWorkspace(torch.autograd.Function):
    """The disease: backward writes to a workspace that is kept for the next one, and returns a slice of it."""

    @staticmethod
    def forward(x: Tensor, factor: float, workspace: Tensor, writer: str | None) -> Tensor:
        return factor * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.factor, ctx.workspace, ctx.writer = inputs

    @staticmethod
    def backward(ctx, dy: Tensor):
        scale(dy, ctx.factor, ctx.workspace, ctx.writer)
        return ctx.workspace[:], None, None, None


class KeepsWorkspaceDetached(KeepsWorkspace):
    """Returns the workspace detached, which is a new tensor over the same memory, too."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        scale(dy, ctx.factor, ctx.workspace, ctx.writer)
        return ctx.workspace.detach(), None, None, None


class KeepsWorkspaceItself(KeepsWorkspace):
    """Returns the workspace itself. Whoever holds it, holds it still, so autograd copies: right, by luck."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        scale(dy, ctx.factor, ctx.workspace, ctx.writer)
        return ctx.workspace, None, None, None


class KeepsNoWorkspace(KeepsWorkspace):
    """The cure: new memory for every gradient."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        dx = torch.empty_like(dy)
        scale(dy, ctx.factor, dx, ctx.writer)
        return dx, None, None, None


_TIMES_WHAT_LIES_AT = """
extern "C" __global__ void times_what_lies_at(long long address, const T* dy, T* dx, long long n) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) dx[i] = rounded<T>(value(reinterpret_cast<const T*>(address)[i]) * value(dy[i]));
}
"""


class KeepsPointer(torch.autograd.Function):
    """y = x^2. The disease: it keeps the address of 2 x, and not the tensor. `allocate` makes its memory."""

    @staticmethod
    def forward(ctx, x: Tensor, allocate) -> Tensor:
        twice = _twice(x, allocate)
        ctx.address = twice.data_ptr()
        return x * x

    @staticmethod
    def backward(ctx, dy: Tensor):
        dy = dy.contiguous()
        dx = torch.empty_like(dy)
        grid = (-(-dy.numel() // 128),)
        address = ctx.saved_tensors[0].data_ptr() if ctx.saved_tensors else ctx.address
        cuda.launch(_TIMES_WHAT_LIES_AT, "times_what_lies_at", grid, (128,), address, dy, dx, dy.numel())
        return dx, None


def _twice(x: Tensor, allocate) -> Tensor:
    twice = allocate(x.shape)
    if twice.dtype != x.dtype:
        raise ValueError(f"allocate makes {twice.dtype}, and x is {x.dtype}: the kernel would misread it")
    return twice.copy_(2 * x)


class KeepsTensor(KeepsPointer):
    """The cure: what backward needs is saved, so its memory is nobody else's."""

    @staticmethod
    def forward(ctx, x: Tensor, allocate) -> Tensor:
        twice = _twice(x, allocate)
        ctx.save_for_backward(twice)
        ctx.address = twice.data_ptr()
        return x * x


class WritesHalf(DoublesInPlace):
    """The disease: the kernel covers the first half of the rows, and the rest of `empty` is handed out as it is."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        dx, half = torch.empty_like(dy), dy.shape[0] // 2
        scale(dy[:half], 2, dx[:half], ctx.writer)
        return dx, None


class ProductInOneStorage(torch.autograd.Function):
    """a * b. Healthy: both gradients lie in one storage, and do not meet."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, writer: str | None) -> Tensor:
        return a * b

    @staticmethod
    def setup_context(ctx, inputs, output):
        a, b, ctx.writer = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx, dy: Tensor):
        a, b = ctx.saved_tensors
        da, db = dy.new_empty(2, *dy.shape)
        square_backward(b / 2, dy, da, ctx.writer)
        square_backward(a / 2, dy, db, ctx.writer)
        return da, db, None


# Ways to save memory: y = x^2


class OneShot(GradientInSaved):
    """In place, and safe: it writes over what it saved once, says so, and refuses whatever else would ask for it.

    Needs an x that is alone in its storage and no leaf, and whose values nobody reads afterwards outside autograd: through
    x.data or a detached x, in a hook, or as dy. Saves one N of memory. A sibling that saved x as well, and comes later, raises.

    Raises:
        ValueError: x is a leaf, where nothing is saved, or shares its storage, where somebody else's values would change.
        RuntimeError: saved-tensor hooks are on, such as checkpoint's: what they keep, autograd does not check.
        RuntimeError: in backward, before anything is written: a second backward, or create_graph.
    """

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.writer = inputs
        alone = not x._is_view() and x.untyped_storage().nbytes() == x.nbytes
        if x.requires_grad and (x.is_leaf or not alone):
            raise ValueError(
                "OneShot writes its gradient over x: give it an x that is neither a leaf nor a view, such as x + 0"
            )
        if x.requires_grad and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise RuntimeError("OneShot relies on autograd's version check, which saved-tensor hooks replace. Use square")
        ctx.used = False
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, dy: Tensor):
        if torch.is_grad_enabled():
            raise RuntimeError("OneShot has no second derivative: its backward writes over x. Use square")
        if ctx.used:
            raise RuntimeError("OneShot has written its gradient over x: one backward is all there is. Use square")
        (x,) = ctx.saved_tensors
        ctx.used = True
        multiply_into_saved(x, dy, ctx.writer)
        torch.autograd.graph.increment_version(x)
        return x, None


class GradientInForward(GradientInSaved):
    """Computes 2 x in forward and keeps that; backward scales it, in new memory. Autograd cannot see that it depends on x."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(2 * inputs[0])

    @staticmethod
    def backward(ctx, dy: Tensor):
        (gradient,) = ctx.saved_tensors
        return gradient * dy, None


class InSteps(GradientInSaved):
    """Needs x and dy for the first of three steps only, and keeps them to the end."""

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        product = x * dy
        triple = 3 * product
        return triple - product, None


class InStepsCleared(InSteps):
    """Lets go of x after the first step: autograd does, too, where PyTorch knows clear_saved_tensors_on_access."""

    clear_saved_tensors_on_access = True

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        product = x * dy
        del x
        triple = 3 * product
        return triple - product, None


class InStepsBoxed(InStepsCleared):
    """Lets go of dy as well, where PyTorch knows boxed_grads_call: the gradients come in a list that backward may empty."""

    boxed_grads_call = True

    @staticmethod
    def backward(ctx, gradients: list):
        (x,) = ctx.saved_tensors
        product = x * gradients.pop()
        del x
        triple = 3 * product
        return triple - product, None


class SquareAndCube(GradientInSaved):
    """x^2 and x^3. Of an output that nobody used, backward is given zeros."""

    @staticmethod
    def forward(x: Tensor, writer: str | None):
        return x * x, x * x * x

    @staticmethod
    def backward(ctx, dy: Tensor, dz: Tensor | None):
        (x,) = ctx.saved_tensors
        dx = torch.zeros_like(x) if dy is None else TwiceTheProduct.apply(x, dy, ctx.writer)
        return dx if dz is None else dx + 3 * x * x * dz, None


class SquareAndCubeUnmaterialized(SquareAndCube):
    """Of an output that nobody used, backward is given None."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        GradientInSaved.setup_context(ctx, inputs, output)
        ctx.set_materialize_grads(False)
