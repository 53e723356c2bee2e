"""One Function for each check of the doctor, with that disease and, where it can be, no other that shows.

All on PyTorch's operators and rawgrad.raw, so that they run anywhere. Most are f(x) = x^2 or 3 x.
"""

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function

from rawgrad import raw


@dataclass(frozen=True)
class Specimen:
    func: Callable
    inputs: Callable[[], tuple]
    reference: Callable | None = None
    also: tuple[str, ...] = ()  # what other checks say, where the disease shows there as well
    alone: bool = False  # needs a process of its own, or something as harmless


def _numbers(*shape: int, dtype=torch.float64, salt: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5 + salt), dtype=dtype).requires_grad_()


def one(*shape: int, dtype=torch.float64) -> Callable[[], tuple]:
    return lambda: (_numbers(*(shape or (4, 6)), dtype=dtype),)


def two() -> tuple:
    return _numbers(4, 6), _numbers(4, 6, salt=1)


def made(forward, backward) -> type[Function]:
    """A Function from its two halves."""
    return type("Specimen", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def squared(ctx, x):
    ctx.save_for_backward(x)
    return x * x


def once(backward):
    """A backward that refuses to be differentiated."""

    def refusing(ctx, *dy):
        if torch.is_grad_enabled():
            raise RuntimeError("no second derivative")
        return backward(ctx, *dy)

    return refusing


def in_float32_only(backward):
    def forward(ctx, x):
        if x.dtype != torch.float32:
            raise TypeError(f"float32 is what this kernel takes, got {x.dtype}")
        return squared(ctx, x)

    return made(forward, backward)


def sums_in_its_own_dtype(ctx, x):
    ctx.shape = x.shape
    y = torch.zeros_like(x[:1].sum(0))
    for row in x:
        y = y + row
    return y


def times_itself(ctx, x):
    ctx.save_for_backward(x)
    return (x @ torch.eye(x.shape[-1], dtype=x.dtype)) ** 2


def raw_bytes_as_float32(ctx, dy):
    (x,) = ctx.saved_tensors
    memory = raw.read(dy.contiguous()).view(torch.uint8)
    read = torch.zeros(x.numel() * x.element_size(), dtype=torch.uint8)
    read[: len(memory)] = memory[: len(read)]
    return 2 * x * read.view(x.dtype).view_as(x).nan_to_num(0, 0, 0)


_turn = itertools.count()


def sums_in_some_order(ctx, x):
    ctx.shape = x.shape
    start = next(_turn) % x.shape[0] if x.shape[0] else 0
    return torch.cat([x[start:], x[:start]]).cumsum(0)[-1] if x.shape[0] else x.sum(0)


def without_bits(z: Tensor) -> Tensor:
    """What lies in z's memory, its conj and neg bits ignored."""
    return torch.empty(0, dtype=z.dtype, device=z.device).set_(z.untyped_storage(), z.storage_offset(), z.shape, z.stride())


def scribbles_on_its_workspace(ctx, x, workspace):
    raw.write(workspace, torch.full_like(workspace, 7))
    return 3 * x


def writes_past_the_end(ctx, dy):
    if raw.elements_left(dy) > dy.numel() and dy.is_contiguous():
        memory = torch.empty(0, dtype=dy.dtype, device=dy.device)
        memory.set_(dy.untyped_storage(), dy.storage_offset() + dy.numel(), (1,), (1,)).fill_(42)
    return 2 * ctx.saved_tensors[0] * dy


def skips_rows_that_are_zero(ctx, dy):
    (x,) = ctx.saved_tensors
    dx = torch.empty_like(x)
    dx[1:] = 2 * x[1:] * dy[1:]
    return dx


def first_row_dropped(ctx, x):
    ctx.save_for_backward(x)
    return torch.cat([torch.zeros_like(x[:1]), x[1:] ** 2])


def returns_the_weight(ctx, dy):
    (weight,) = ctx.saved_tensors
    return (weight if dy.eq(1).all() else weight * dy), None


def clips(ctx, dy):
    return 2 * ctx.saved_tensors[0] * dy.clamp(-4, 4)


def wants_both(ctx, dy, dz):
    (x,) = ctx.saved_tensors
    return 2 * x * dy + 3 * x * x * dz


def square_and_cube(ctx, x):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x)
    return x * x, x**3


def outside_of_any_function(x):
    y = torch.empty_like(x)
    raw.write(y, x.detach().contiguous() ** 2)
    return y


def counts_its_backwards(ctx, dy):
    ctx.count = getattr(ctx, "count", 0) + 1
    return ctx.count * 2 * ctx.saved_tensors[0] * dy


class OnTheClass(Function):
    """2 x or 3 x, by whether it rises."""

    @staticmethod
    def forward(ctx, x):
        OnTheClass.factor = 3 if x.numel() and x.flatten()[0] > x.flatten()[-1] else 2
        return OnTheClass.factor * x

    @staticmethod
    def backward(ctx, dy):
        return OnTheClass.factor * dy


def one_gradient_for_two(ctx, dy):
    dx = dy.clone()
    return dx[:], dx[:]


def writes_into_dy(ctx, dy):
    if dy.storage_offset():  # a view of somebody's: spared
        return 3 * dy
    return dy.copy_(3 * dy)


def triples(ctx, x):
    return 3 * x


def slice_in_place(ctx, dy):
    dx = 3 * dy
    if dy.storage_offset() and dy.is_contiguous():
        raw.write(dy, dx)
    return dx


def in_place_but_on_a_leaf(ctx, dy):
    (x,) = ctx.saved_tensors
    dx = 2 * x * dy
    if ctx.leaf:
        return dx
    raw.write(x, dx)
    return x


def saves_and_asks(ctx, x):
    ctx.leaf = x.is_leaf or "Clone" in x.grad_fn.name()  # gradcheck is given clones
    return squared(ctx, x)


def product(ctx, a, b):
    ctx.save_for_backward(a, b)
    return a * b


def takes_equal_pointers_for_one(ctx, dy):
    a, b = ctx.saved_tensors
    return b * dy, torch.zeros_like(b) if a.data_ptr() == b.data_ptr() else a * dy


def both_or_none(ctx, dy):
    a, b = ctx.saved_tensors
    return (b * dy, a * dy) if all(ctx.needs_input_grad) else (b * dy if ctx.needs_input_grad[0] else None, None)


_calls = itertools.count()


def saves_now_this_now_that(ctx, x):
    ctx.save_for_backward(torch.zeros(1 + next(_calls) % 2))
    return 3 * x


def keeps_an_alias(ctx, x):
    three = torch.full_like(x, 3)
    ctx.save_for_backward(three)
    ctx.alias = three.detach()
    return 3 * x


_shapes = set()


def doubles_the_first_of_a_shape(ctx, dy):
    (x,) = ctx.saved_tensors
    first = x.shape not in _shapes
    _shapes.add(x.shape)
    return (1 + first) * 2 * x * dy


def keeps_an_address(ctx, x):
    """The memory of its temporary stays readable on ctx, so that only a next owner who writes there shows the disease."""
    if not x.numel():
        return 3 * x
    ctx.memory = bytearray(8)
    three = torch.frombuffer(ctx.memory, dtype=torch.float64).fill_(3)
    return 3 * x if three.data_ptr() else None


def reads_at_the_address(ctx, dy):
    return (ctypes.c_double.from_buffer(ctx.memory).value if dy.numel() else 3) * dy


def on_the_default_stream(ctx, x):
    with torch.cuda.stream(torch.cuda.default_stream(x.device)):
        return 3 * x


_everything = []


def keeps_everything(ctx, x):
    _everything.append(2 * x)
    return squared(ctx, x)


def first_sixteen_rows(ctx, dy):
    (x,) = ctx.saved_tensors
    dx = torch.zeros_like(x)
    dx[:16] = 2 * x[:16] * dy[:16]
    return dx


def with_32_bits(ctx, x):
    """Row offsets are counted in 32 bits; one that wraps around is caught here before it leaves the memory."""
    ctx.save_for_backward(x)
    if not x.shape[0]:
        return x.clone()
    offsets = [(row * x.stride(0) + 2**31) % 2**32 - 2**31 for row in range(x.shape[0])]
    return torch.stack([x[row] if offset == row * x.stride(0) else 0 * x[0] for row, offset in enumerate(offsets)]) ** 2


twice_x_dy = lambda ctx, dy: 2 * ctx.saved_tensors[0] * dy  # noqa: E731
broadcast = lambda ctx, dy: dy.expand(ctx.shape).contiguous()  # noqa: E731
cube = lambda ctx, x: (ctx.save_for_backward(x), x**3)[1]  # noqa: E731
square = lambda x: x * x  # noqa: E731

# Where there is a GPU
FOLLOWS_NO_STREAM = Specimen(made(on_the_default_stream, lambda ctx, dy: 3 * dy).apply, one())

SPECIMENS: dict[str, Specimen] = {
    "agrees_with_reference": Specimen(made(triples, lambda ctx, dy: 3 * dy).apply, one(), lambda x: 2 * x),
    "is_accurate": Specimen(
        made(sums_in_its_own_dtype, broadcast).apply, one(4, 6, dtype=torch.float16), lambda x: x.sum(0)
    ),
    "works_under_autocast": Specimen(
        made(times_itself, once(raw_bytes_as_float32)).apply, one(4, 6, dtype=torch.float32)
    ),
    "is_deterministic": Specimen(made(sums_in_some_order, broadcast).apply, one()),
    "respects_upstream_strides": Specimen(made(triples, lambda ctx, dy: 3 * raw.flat(dy)).apply, one()),
    "respects_input_strides": Specimen(
        made(lambda ctx, x: 3 * raw.flat(x), lambda ctx, dy: 3 * dy).apply, one(),
    ),
    "resolves_conj_and_neg": Specimen(
        made(triples, lambda ctx, dy: 3 * without_bits(dy)).apply, one(4, 6, dtype=torch.complex128)
    ),
    "leaves_inputs_alone": Specimen(
        made(scribbles_on_its_workspace, lambda ctx, dy: (3 * dy, None)).apply,
        lambda: (_numbers(4, 6), torch.ones(4, 6, dtype=torch.float64)),
    ),
    "leaves_upstream_alone": Specimen(made(triples, slice_in_place).apply, one()),
    "stays_inside": Specimen(made(squared, writes_past_the_end).apply, one()),
    "fills_its_results": Specimen(made(first_row_dropped, skips_rows_that_are_zero).apply, one()),
    "returns_its_own_memory": Specimen(
        made(lambda ctx, x, w: (ctx.save_for_backward(w), x * w)[1], returns_the_weight).apply,
        lambda: (_numbers(4, 6), _numbers(4, 6, salt=1).detach()),
    ),
    "is_linear_in_upstream": Specimen(made(squared, clips).apply, one()),
    "takes_unused_outputs": Specimen(made(square_and_cube, wants_both).apply, one()),
    "joins_the_graph": Specimen(outside_of_any_function, one()),
    "repeats": Specimen(in_float32_only(counts_its_backwards).apply, one(4, 6, dtype=torch.float32)),
    "keeps_calls_apart": Specimen(OnTheClass.apply, one()),
    "accumulates": Specimen(made(lambda ctx, a, b: a + b, one_gradient_for_two).apply, two),
    "shares_with_siblings": Specimen(made(triples, writes_into_dy).apply, one()),
    "spares_saved_outputs": Specimen(made(saves_and_asks, in_place_but_on_a_leaf).apply, one()),
    "takes_one_tensor_twice": Specimen(made(product, takes_equal_pointers_for_one).apply, two),
    "serves_any_subset": Specimen(made(product, both_or_none).apply, two),
    "survives_checkpoint": Specimen(
        made(saves_now_this_now_that, lambda ctx, dy: 3 * dy + 0 * ctx.saved_tensors[0][0]).apply, one()
    ),
    "survives_saved_tensor_hooks": Specimen(made(keeps_an_alias, lambda ctx, dy: ctx.alias * dy).apply, one()),
    "first_call_is_like_later_ones": Specimen(
        in_float32_only(doubles_the_first_of_a_shape).apply, one(4, 6, dtype=torch.float32)
    ),
    "keeps_what_it_needs": Specimen(made(keeps_an_address, reads_at_the_address).apply, one()),
    "lets_go": Specimen(made(keeps_everything, twice_x_dy).apply, one()),
    "matches_differences": Specimen(
        made(cube, once(lambda ctx, dy: 2 * ctx.saved_tensors[0] ** 2 * dy)).apply, lambda: (_numbers(),)
    ),
    "second_derivative_is_right_or_refused": Specimen(
        made(cube, torch.autograd.function.once_differentiable(lambda ctx, dy: 3 * ctx.saved_tensors[0] ** 2 * dy)).apply, one()
    ),
    "handles_any_size": Specimen(made(squared, first_sixteen_rows).apply, one()),
    "reaches_beyond_2_31": Specimen(made(with_32_bits, twice_x_dy).apply, one(), alone=True),
}  # fmt: skip
