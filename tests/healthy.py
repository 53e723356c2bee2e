"""Functions without a fault, for the matrix: what the doctor must leave alone.

PyTorch's own operators with a backward written by hand, designs that look like a disease and are none, the package's own
operators, and the cured specimens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

import rawgrad
from rawgrad import specimens

REAL = (torch.float32, torch.float64)
NARROW = (*REAL, torch.bfloat16)


@dataclass(frozen=True)
class Healthy:
    func: Callable
    inputs: Callable[[torch.dtype, str], tuple]
    reference: Callable | None = None
    dtypes: tuple[torch.dtype, ...] = REAL
    twice: bool = True  # it can be differentiated again; else it refuses
    raw: bool = False  # its backward is a raw kernel without a graph: right once, and healthy in all but the second derivative
    once: bool = False  # it lets go of what it saved, so that a second backward of one graph is refused
    in_place: bool = False  # writes over its first input, and declares it


def numbers(*shape: int, salt: int = 0, low: float | None = None, wanted: bool = True, complex_: bool = False):
    """A maker of normal numbers, or of uniform ones from `low` to `low` + 2."""

    def make(dtype: torch.dtype, device: str) -> Tensor:
        generator = torch.Generator().manual_seed(11 + salt)
        if complex_:
            dtype = dtype.to_complex()
            made = torch.randn(shape, generator=generator, dtype=torch.complex128)
        elif low is None:
            made = torch.randn(shape, generator=generator, dtype=torch.float64)
        else:
            made = low + 2 * torch.rand(shape, generator=generator, dtype=torch.float64)
        return made.to(device=device, dtype=dtype).requires_grad_(wanted)

    return make


def just(value):
    """A maker of what has no dtype of its own."""
    return lambda dtype, device: value.to(device) if isinstance(value, Tensor) else value


def inputs(*makers) -> Callable[[torch.dtype, str], tuple]:
    return lambda dtype, device: tuple(make(dtype, device) for make in makers)


def made(forward: Callable, backward: Callable) -> Callable:
    """The apply of a Function from its two halves."""
    return type("Healthy", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}).apply


def saving(result: Callable) -> Callable:
    """A forward that saves all its inputs."""

    def forward(ctx, *given):
        ctx.save_for_backward(*given)
        return result(*given)

    return forward


def saving_output(result: Callable) -> Callable:
    def forward(ctx, *given):
        y = result(*given)
        ctx.save_for_backward(y)
        return y

    return forward


def of_saved(gradient: Callable) -> Callable:
    return lambda ctx, *dy: gradient(*ctx.saved_tensors, *dy)


# Over one element at a time

_X = numbers(4, 6)
_A, _B = numbers(4, 6, salt=1), numbers(4, 6, salt=2)
_ELEMENTWISE = {
    "relu": (saving(torch.relu), of_saved(lambda x, dy: dy * (x > 0)), torch.relu, inputs(_X), NARROW),
    "sigmoid": (saving_output(torch.sigmoid), of_saved(lambda y, dy: dy * y * (1 - y)), torch.sigmoid, inputs(_X), REAL),
    "tanh": (saving_output(torch.tanh), of_saved(lambda y, dy: dy * (1 - y * y)), torch.tanh, inputs(_X), REAL),
    "exp": (saving_output(torch.exp), of_saved(lambda y, dy: dy * y), torch.exp, inputs(_X), NARROW),
    "log": (saving(torch.log), of_saved(lambda x, dy: dy / x), torch.log, inputs(numbers(4, 6, low=0.5)), NARROW),
    "gelu": (
        saving(F.gelu),
        of_saved(lambda x, dy: dy * ((1 + torch.erf(x / 2**0.5)) / 2 + x * torch.exp(-x * x / 2) / (2 * math.pi) ** 0.5)),
        F.gelu,
        inputs(_X),
        REAL,
    ),
    "silu": (
        saving(F.silu),
        of_saved(lambda x, dy: dy * torch.sigmoid(x) * (1 + x * (1 - torch.sigmoid(x)))),
        F.silu,
        inputs(_X),
        REAL,
    ),
    "mul": (saving(torch.mul), of_saved(lambda a, b, dy: (b * dy, a * dy)), torch.mul, inputs(_A, _B), NARROW),
    "div": (
        saving(torch.div),
        of_saved(lambda a, b, dy: (dy / b, -dy * a / (b * b))),
        torch.div,
        inputs(_A, numbers(4, 6, salt=2, low=0.5)),
        REAL,
    ),
    "where": (
        lambda ctx, cond, a, b: (ctx.save_for_backward(cond), torch.where(cond, a, b))[1],
        of_saved(lambda cond, dy: (None, dy * cond, dy * ~cond)),
        torch.where,
        inputs(just(torch.arange(24).view(4, 6) % 3 == 0), _A, _B),
        NARROW,
    ),
    "mse": (
        saving(F.mse_loss),
        of_saved(lambda x, t, dy: (2 * (x - t) * (dy / x.numel()), 2 * (t - x) * (dy / x.numel()))),
        F.mse_loss,
        inputs(_A, _B),
        REAL,
    ),
    "complex_mul": (
        saving(torch.mul),
        of_saved(lambda a, b, dy: (dy * b.conj(), dy * a.conj())),
        torch.mul,
        inputs(numbers(4, 6, salt=1, complex_=True), numbers(4, 6, salt=2, complex_=True)),
        REAL,
    ),
    "conj_product": (
        saving(lambda a, b: a * b.conj()),
        of_saved(lambda a, b, dy: (dy * b, dy.conj() * a)),
        lambda a, b: a * b.conj(),
        inputs(numbers(4, 6, salt=1, complex_=True), numbers(4, 6, salt=2, complex_=True)),
        REAL,
    ),
    "complex_abs": (
        saving(torch.abs), of_saved(lambda z, dy: dy * z / z.abs()), torch.abs, inputs(numbers(4, 6, complex_=True)), REAL,
    ),
    "angle": (
        saving(torch.angle),
        of_saved(lambda z, dy: dy * 1j * z / (z * z.conj()).real),
        torch.angle,
        inputs(numbers(4, 6, complex_=True)),
        REAL,
    ),
}  # fmt: skip


# Over rows


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def _layer_norm_backward(ctx, dy):
    x, weight, _ = ctx.saved_tensors
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    normal, g = centred * scale, dy * weight
    dx = scale * (g - g.mean(-1, keepdim=True) - normal * (g * normal).mean(-1, keepdim=True))
    return dx, (dy * normal).flatten(0, -2).sum(0), dy.flatten(0, -2).sum(0)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _rms_norm_backward(ctx, dy):
    x, weight = ctx.saved_tensors
    scale = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    normal, g = x * scale, dy * weight
    return scale * (g - normal * (g * normal).mean(-1, keepdim=True)), (dy * normal).flatten(0, -2).sum(0)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _softmax_backward(ctx, dy):
    (y,) = ctx.saved_tensors
    return y * (dy - (y * dy).sum(-1, keepdim=True))


def _logsumexp_backward(ctx, dy):
    (x,) = ctx.saved_tensors
    return torch.softmax(x, -1) * dy[..., None]


def _cross_entropy_backward(ctx, dy):
    x, target = ctx.saved_tensors
    hit = F.one_hot(target, x.shape[-1]).to(x.dtype)
    return (torch.softmax(x, -1) - hit) * (dy / len(target)), None


def _max(ctx, x):
    values, index = x.max(-1)
    ctx.shape = x.shape
    ctx.save_for_backward(index)
    ctx.mark_non_differentiable(index)
    return values, index


def _max_backward(ctx, dy, _):
    (index,) = ctx.saved_tensors
    return dy.new_zeros(ctx.shape).scatter(-1, index[..., None], dy[..., None])


def _topk(ctx, x):
    values, index = x.topk(2)
    ctx.shape = x.shape
    ctx.save_for_backward(index)
    return values


def _topk_backward(ctx, dy):
    return dy.new_zeros(ctx.shape).scatter(-1, ctx.saved_tensors[0], dy)


def _gather(ctx, x, index):
    ctx.shape = x.shape
    ctx.save_for_backward(index)
    return x.gather(1, index)


def _gather_backward(ctx, dy):
    return dy.new_zeros(ctx.shape).scatter_add(1, ctx.saved_tensors[0], dy), None


def _index_add(ctx, x, index, source):
    ctx.save_for_backward(index)
    return x.index_add(0, index, source)


def embedding_sum(weight: Tensor, ids: Tensor) -> Tensor:
    return weight[ids].sum(1)


def _embedding_sum(ctx, weight, ids):
    ctx.shape = weight.shape
    ctx.save_for_backward(ids)
    return embedding_sum(weight, ids)


def _embedding_sum_backward(ctx, dy):
    (ids,) = ctx.saved_tensors
    rows = dy[:, None].expand(*ids.shape, dy.shape[-1]).flatten(0, 1)
    return dy.new_zeros(ctx.shape).index_add(0, ids.flatten(), rows), None


def _shape_kept(result: Callable) -> Callable:
    def forward(ctx, x):
        ctx.shape = x.shape
        return result(x)

    return forward


def mask_of(x: Tensor) -> Tensor:
    return torch.rand(x.shape, device=x.device) > 0.5  # one draw for every dtype


def dropout(x: Tensor) -> Tensor:
    return 2 * x * mask_of(x)


def _dropout(ctx, x):
    mask = mask_of(x)
    ctx.save_for_backward(mask)
    return 2 * x * mask


_IDS = just(torch.tensor([[0, 2], [4, 4], [1, 0]]))
_ROWS = {
    "softmax": (saving_output(softmax), _softmax_backward, softmax, inputs(_X)),
    "layer_norm": (
        saving(layer_norm), _layer_norm_backward, layer_norm, inputs(_X, numbers(6, salt=3), numbers(6, salt=4)),
    ),
    "layer_norm_in_three_dimensions": (
        saving(layer_norm), _layer_norm_backward, layer_norm, inputs(numbers(2, 3, 5), numbers(5, salt=3), numbers(5, salt=4)),
    ),
    "rms_norm": (saving(rms_norm), _rms_norm_backward, rms_norm, inputs(_X, numbers(6, salt=3))),
    "logsumexp": (saving(lambda x: x.logsumexp(-1)), _logsumexp_backward, lambda x: x.logsumexp(-1), inputs(_X)),
    "cross_entropy": (
        saving(F.cross_entropy), _cross_entropy_backward, F.cross_entropy, inputs(_X, just(torch.tensor([0, 5, 2, 2]))),
    ),
    "norm": (saving(torch.linalg.vector_norm), of_saved(lambda x, dy: dy * x / x.norm()), torch.linalg.vector_norm, inputs(_X)),
    "max": (_max, _max_backward, lambda x: x.max(-1), inputs(_X)),
    "topk": (_topk, _topk_backward, lambda x: x.topk(2).values, inputs(_X)),
    "gather": (
        _gather, _gather_backward, lambda x, i: x.gather(1, i), inputs(_X, just(torch.arange(12).view(4, 3) * 5 % 6)),
    ),
    "index_add": (
        _index_add,
        lambda ctx, dy: (dy, None, dy[ctx.saved_tensors[0]]),
        lambda x, i, s: x.index_add(0, i, s),
        inputs(_X, just(torch.tensor([3, 0, 3])), numbers(3, 6, salt=3)),
    ),
    "embedding_sum": (_embedding_sum, _embedding_sum_backward, embedding_sum, inputs(numbers(5, 4), _IDS)),
    "sum": (
        _shape_kept(lambda x: x.sum()), lambda ctx, dy: dy.expand(ctx.shape), torch.sum, inputs(_X),
    ),
    "mean_of_columns": (
        _shape_kept(lambda x: x.mean(0)), lambda ctx, dy: (dy / ctx.shape[0]).expand(ctx.shape), lambda x: x.mean(0),
        inputs(_X),
    ),
    "cumsum": (
        lambda ctx, x: x.cumsum(0), lambda ctx, dy: dy.flip(0).cumsum(0).flip(0), lambda x: x.cumsum(0), inputs(_X),
    ),
    "dropout": (_dropout, lambda ctx, dy: 2 * dy * ctx.saved_tensors[0], dropout, inputs(_X)),
}  # fmt: skip


# Over matrices


def _matmul_backward(ctx, dy):
    a, b = ctx.saved_tensors
    wants_a, wants_b = ctx.needs_input_grad
    return dy @ b.mT if wants_a else None, a.mT @ dy if wants_b else None


def _linear_backward(ctx, dy):
    x, weight, _ = ctx.saved_tensors
    return dy @ weight, dy.flatten(0, -2).mT @ x.flatten(0, -2), dy.flatten(0, -2).sum(0)


_MATRICES = {
    "matmul": (saving(torch.matmul), _matmul_backward, torch.matmul, inputs(numbers(4, 6), numbers(6, 3, salt=1))),
    "bmm": (saving(torch.bmm), _matmul_backward, torch.bmm, inputs(numbers(2, 3, 4), numbers(2, 4, 3, salt=1))),
    "linear": (
        saving(F.linear), _linear_backward, F.linear, inputs(_X, numbers(3, 6, salt=1), numbers(3, salt=2)),
    ),
    "linear_of_a_batch": (
        saving(F.linear), _linear_backward, F.linear, inputs(numbers(2, 3, 4), numbers(5, 4, salt=1), numbers(5, salt=2)),
    ),
    "bias_add": (
        lambda ctx, x, b: x + b, lambda ctx, dy: (dy, dy.sum(0)), torch.add, inputs(_X, numbers(6, salt=3)),
    ),
}  # fmt: skip


# Designs that look like a disease


def _clamp(ctx, x, low, high):
    ctx.save_for_backward(x, low, high)
    return torch.clamp(x, low, high)


def _clamp_backward(ctx, dy):
    x, low, high = ctx.saved_tensors
    above = (x > high) | (low > high)
    below = (x < low) & ~above
    grads = (dy * ~(below | above), dy * below, dy * above)
    return tuple(g if wanted else None for g, wanted in zip(grads, ctx.needs_input_grad, strict=True))


def _sin_cos(ctx, x):
    ctx.save_for_backward(x)
    return x.sin(), x.cos()


def _sin_cos_unmaterialized(ctx, x):
    ctx.set_materialize_grads(False)
    return _sin_cos(ctx, x)


def _sin_cos_of_none(ctx, ds, dc):
    (x,) = ctx.saved_tensors
    dx = None if ds is None else ds * x.cos()
    if dc is not None:
        dx = -dc * x.sin() if dx is None else dx - dc * x.sin()
    return dx


def _triple_in_place(ctx, x):
    ctx.mark_dirty(x)
    return x.mul_(3)


def _triple_its_clone(ctx, dy):
    return dy.clone().mul_(3)


def _negates_in_place_what_it_made(ctx, dy):
    (x,) = ctx.saved_tensors
    return (x.sin() * dy).neg_()


def _gradients_in_one_storage(ctx, dy):
    a, b = ctx.saved_tensors
    return torch.stack((b * dy, a * dy)).unbind(0)


def _recomputed(x: Tensor) -> Tensor:
    return torch.sin(x) * torch.exp(-x * x)


def _recomputing_backward(ctx, dy):
    """Forward runs again. What it gives cannot be differentiated again, so that is refused."""
    if torch.is_grad_enabled():
        raise RuntimeError("Recomputes has no second derivative")
    x = ctx.saved_tensors[0].detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(_recomputed(x), x, dy)[0]


def _saves_an_intermediate(ctx, x):
    """As kernels do: what backward needs is computed in forward, saved, and refused for a second derivative."""
    scale = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    ctx.save_for_backward(x, scale)
    return x * scale


def _reads_an_intermediate(ctx, dy):
    if torch.is_grad_enabled():
        raise RuntimeError("this backward reads what forward computed, and has no second derivative")
    x, scale = ctx.saved_tensors
    return scale * dy - x * scale**3 * (x * dy).mean(-1, keepdim=True)


def _scaled(ctx, x, factor, name):
    ctx.factor = factor
    return factor * x


_DESIGNS = {
    "clamp": (
        _clamp, _clamp_backward, lambda x, low, high: torch.minimum(torch.maximum(x, low), high),
        inputs(_X, numbers(4, 6, salt=1, low=-2), numbers(4, 6, salt=2, low=0.5)),
    ),
    "sin_cos": (
        _sin_cos, of_saved(lambda x, ds, dc: ds * x.cos() - dc * x.sin()),
        lambda x: (x.sin(), x.cos()), inputs(_X),
    ),
    "sin_cos_unmaterialized": (_sin_cos_unmaterialized, _sin_cos_of_none, lambda x: (x.sin(), x.cos()), inputs(_X)),
    "transposed_view": (lambda ctx, x: x.t(), lambda ctx, dy: dy.t(), torch.t, inputs(_X)),
    "permuted_view": (
        lambda ctx, x: x.permute(2, 0, 1), lambda ctx, dy: dy.permute(1, 2, 0), lambda x: x.permute(2, 0, 1),
        inputs(numbers(2, 3, 4)),
    ),
    "permuted_copy": (
        lambda ctx, x: x.permute(2, 0, 1).contiguous(), lambda ctx, dy: dy.permute(1, 2, 0).contiguous(),
        lambda x: x.permute(2, 0, 1), inputs(numbers(2, 3, 4)),
    ),
    "identity_view": (lambda ctx, x: x.view_as(x), lambda ctx, dy: dy, lambda x: x.clone(), inputs(_X)),
    "add_returns_dy_twice": (lambda ctx, a, b: a + b, lambda ctx, dy: (dy, dy), torch.add, inputs(_A, _B)),
    "sub": (lambda ctx, a, b: a - b, lambda ctx, dy: (dy, -dy), torch.sub, inputs(_A, _B)),
    "concatenation_gives_views_of_dy": (
        lambda ctx, a, b: torch.cat((a, b), 1), lambda ctx, dy: dy.tensor_split(2, 1), lambda a, b: torch.cat((a, b), 1),
        inputs(_A, _B),
    ),
    "gradients_in_one_storage": (saving(torch.mul), _gradients_in_one_storage, torch.mul, inputs(_A, _B)),
    "in_place_on_its_clone": (lambda ctx, x: 3 * x, _triple_its_clone, lambda x: 3 * x, inputs(_X)),
    "in_place_on_what_it_made": (saving(torch.cos), _negates_in_place_what_it_made, torch.cos, inputs(_X)),
    "options_that_are_no_tensors": (
        _scaled, lambda ctx, dy: (ctx.factor * dy, None, None), lambda x, factor, name: factor * x,
        inputs(_X, just(2.5), just("name")),
    ),
}  # fmt: skip

# The package's own


def _rotary_inputs(*others) -> Callable[[torch.dtype, str], tuple]:
    def make(dtype, device):
        cos, sin = rawgrad.rotary_tables(5, 2, device=device, dtype=dtype)
        x = numbers(2, 2, 2, 4)(dtype, device)
        return (x, cos, sin, torch.tensor([[0, 1], [4, 2]], device=device), *others)

    return make


def _rotary(x, cos, sin, ids):
    return rawgrad.rotary(x, cos, sin, ids, rotary_dim=2)


def _rotary_reference(x, cos, sin, ids):
    return rawgrad.rotary(x, cos, sin, ids, rotary_dim=2, backend="torch")


def _rotary_of_heads(x, cos, sin, ids, size, base, writer):
    return rawgrad.rotary(x, cos, sin, ids, rotary_dim=size, heads=(base, x.shape[2]), backend="torch")


def _rotary_pair(x, k, cos, sin, ids):
    return rawgrad.rotary((x, k), cos, sin, ids, rotary_dim=2, backend="cuda")


def _rotary_pair_reference(x, k, cos, sin, ids):
    return rawgrad.rotary((x, k), cos, sin, ids, rotary_dim=2, backend="torch")


def _pair_inputs(dtype, device):
    x, *rest = _rotary_inputs()(dtype, device)
    return x, numbers(2, 2, 1, 4, salt=1)(dtype, device), *rest


def _square_and_cube(x, writer):
    return x**2, x**3


def _cured(specimen: type[Function], reference: Callable, *others, **how) -> Healthy:
    """The specimen with the writer that runs first here."""
    return Healthy(specimen.apply, inputs(_X, *map(just, others), just(None)), lambda x, *_: reference(x), **how)


_PACKAGE = {
    "square": Healthy(rawgrad.square, inputs(_X), torch.square),
    "square_by_cuda": Healthy(lambda x: rawgrad.square(x, "cuda"), inputs(_X), torch.square),
    "rotary": Healthy(_rotary, _rotary_inputs(), _rotary_reference),
    "rotary_of_a_pair": Healthy(_rotary_pair, _pair_inputs, _rotary_pair_reference),
    "GradientInNewMemory": _cured(specimens.GradientInNewMemory, torch.square),
    "ReadsContiguous": _cured(specimens.ReadsContiguous, lambda x: 3 * x),
    "ReadsStrides": _cured(specimens.ReadsStrides, lambda x: 3 * x),
    "DoublesItsClone": _cured(specimens.DoublesItsClone, lambda x: 2 * x, raw=True),
    "DoublesInNewMemory": _cured(specimens.DoublesInNewMemory, lambda x: 2 * x),
    "KeepsNoWorkspace": Healthy(
        specimens.KeepsNoWorkspace.apply,
        inputs(_X, just(2.0), numbers(4, 6, wanted=False), just(None)),
        lambda x, factor, workspace, writer: factor * x,
        raw=True,
    ),
    "ProductInOneStorage": Healthy(
        specimens.ProductInOneStorage.apply, inputs(_A, _B, just(None)), lambda a, b, writer: a * b, raw=True
    ),
    "RotaryCured": Healthy(specimens.RotaryCured.apply, _rotary_inputs(2, 1, "cuda"), _rotary_of_heads),
    "RotaryReadsContiguous": Healthy(specimens.RotaryReadsContiguous.apply, _rotary_inputs(2, 1, "cuda"), _rotary_of_heads),
    "InSteps": _cured(specimens.InSteps, torch.square),
    "InStepsCleared": _cured(specimens.InStepsCleared, torch.square, once=True),
    "SquareAndCube": Healthy(specimens.SquareAndCube.apply, inputs(_X, just(None)), _square_and_cube),
}
if hasattr(Function, "boxed_grads_call"):  # since PyTorch 2.13
    _PACKAGE["InStepsBoxed"] = _cured(specimens.InStepsBoxed, torch.square, once=True)

HEALTHY: dict[str, Healthy] = {
    **{
        name: Healthy(made(forward, backward), given, reference, *dtypes)
        for group in (_ELEMENTWISE, _ROWS, _MATRICES, _DESIGNS)
        for name, (forward, backward, reference, given, *dtypes) in group.items()
    },
    "recomputes": Healthy(made(saving(_recomputed), _recomputing_backward), inputs(_X), _recomputed, twice=False),
    "saves_an_intermediate": Healthy(
        made(_saves_an_intermediate, _reads_an_intermediate),
        inputs(_X),
        lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(),
        twice=False,
    ),
    "in_place_and_declared": Healthy(
        made(_triple_in_place, lambda ctx, dy: 3 * dy), inputs(_X), lambda x: 3 * x, in_place=True
    ),
    **_PACKAGE,
}
