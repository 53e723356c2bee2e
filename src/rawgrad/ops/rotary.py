"""Rotary position embedding: pairs of dimensions are turned by an angle that grows with the position (Su et al. 2021,
arXiv:2104.09864, equation 34).

Read from the top: what it means (tables, reference), how it runs (Triton kernel here, CUDA kernel in rotary.cu, launch), how
autograd sees it (Function), what you call (rotary).
"""

from pathlib import Path

import torch
from torch import Tensor

from rawgrad import cuda, runtime
from rawgrad.runtime import tl, triton  # stand-ins where Triton is not installed

CUDA_SOURCE = Path(__file__).with_suffix(".cu")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


# What it means


def rotary_tables(
    positions: int,
    rotary_dim: int,
    *,
    base: float = 10000.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles position / base^(2 i / rotary_dim), for positions 0, 1, ... and pairs i.

    Args:
        positions: how many.
        rotary_dim: dimensions that are turned, even.
        dtype: of the tables; torch's default for None. The angles are computed in float64.

    Returns:
        cos, sin: [positions, rotary_dim / 2], one entry a pair. (Libraries that keep doubled tables, [positions,
        rotary_dim], repeat them: take the first half of the columns where pairs are half-split, every other one where
        they are interleaved.)
    """
    if rotary_dim < 0 or rotary_dim % 2:
        raise ValueError(f"rotary_tables needs an even rotary_dim, got {rotary_dim}")
    if positions < 0:
        raise ValueError(f"rotary_tables needs 0 positions or more, got {positions}")
    pair = torch.arange(rotary_dim // 2, dtype=torch.float64, device=device)
    angle = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * base ** (-2 * pair / max(rotary_dim, 1))
    dtype = dtype or torch.get_default_dtype()
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotary_reference(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    heads: tuple[int, int] | None = None,
) -> Tensor:
    """rotary of one tensor in plain PyTorch; in float64 it is the tests' truth. Positions must be in the tables."""
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    first, end = heads or (0, x.shape[2])
    position_ids = torch.arange(x.shape[1], device=x.device) if position_ids is None else position_ids
    c, s = (table[position_ids.long()].unsqueeze(-2) for table in (cos, sin))  # [batch or nothing, seq, 1, rotary_dim / 2]
    turned = x[:, :, first:end, :rotary_dim]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (a * c - b * s, b * c + a * s)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    turned = torch.cat([turned, x[:, :, first:end, rotary_dim:]], -1)
    return torch.cat([x[:, :, :first], turned, x[:, :, end:]], 2)


# Kernels: one program a token and BLOCK_HEADS heads of x and of k.  Every tensor brings its own strides, in elements.


@triton.jit
def _load_pairs(
    x_ptr, head_stride, dim_stride, head, heads, half,
    INTERLEAVED: tl.constexpr, EXPANDED: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """a and b of each pair, [heads, BLOCK_HALF], of the token at x_ptr; [heads, 1] where all dimensions are one cell."""
    x_ptr += head * head_stride
    pair = tl.arange(0, BLOCK_HALF)[None, :].to(tl.int64)
    if EXPANDED:
        a = tl.load(x_ptr, mask=head < heads)
        b = a
    elif INTERLEAVED:
        dim = tl.arange(0, 2 * BLOCK_HALF)[None, :].to(tl.int64)
        both = tl.load(x_ptr + dim * dim_stride, mask=(head < heads) & (dim < 2 * half))
        a, b = tl.split(tl.reshape(both, [both.shape[0], BLOCK_HALF, 2]))
    else:
        a = tl.load(x_ptr + pair * dim_stride, mask=(head < heads) & (pair < half))
        b = tl.load(x_ptr + (pair + half) * dim_stride, mask=(head < heads) & (pair < half))
    return a, b


@triton.jit
def _turn_pairs(
    a, b, cos, sin, first_head, end_head, y_ptr, head_stride, dim_stride, head, heads, half,
    INTERLEAVED: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Store the turned pairs of heads first_head to end_head, and the others as they are."""
    y_ptr += head * head_stride
    element = y_ptr.dtype.element_ty
    a, b = a.to(cos.dtype), b.to(cos.dtype)
    turns = (head >= first_head) & (head < end_head)
    y_a = tl.where(turns, a * cos - b * sin, a).to(element)
    y_b = tl.where(turns, b * cos + a * sin, b).to(element)
    pair = tl.arange(0, BLOCK_HALF)[None, :].to(tl.int64)
    if INTERLEAVED:
        dim = tl.arange(0, 2 * BLOCK_HALF)[None, :].to(tl.int64)
        both = tl.reshape(tl.join(y_a, y_b), [y_a.shape[0], 2 * BLOCK_HALF])
        tl.store(y_ptr + dim * dim_stride, both, mask=(head < heads) & (dim < 2 * half))
    else:
        tl.store(y_ptr + pair * dim_stride, y_a, mask=(head < heads) & (pair < half))
        tl.store(y_ptr + (pair + half) * dim_stride, y_b, mask=(head < heads) & (pair < half))


@triton.jit
def _copy_rest(
    x_ptr, x_head_stride, x_dim_stride, y_ptr, y_head_stride, y_dim_stride, head, heads, half, head_dim,
    BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Dimensions that pass through."""
    if BLOCK_REST > 0:
        dim = 2 * half + tl.arange(0, BLOCK_REST)[None, :].to(tl.int64)
        inside = (head < heads) & (dim < head_dim)
        rest = tl.load(x_ptr + head * x_head_stride + dim * x_dim_stride, mask=inside)
        tl.store(y_ptr + head * y_head_stride + dim * y_dim_stride, rest, mask=inside)


@triton.jit
def _rotary_kernel(
    x_ptr, x_batch_stride, x_seq_stride, x_head_stride, x_dim_stride,
    y_ptr, y_batch_stride, y_seq_stride, y_head_stride, y_dim_stride,
    k_ptr, k_batch_stride, k_seq_stride, k_head_stride, k_dim_stride,
    l_ptr, l_batch_stride, l_seq_stride, l_head_stride, l_dim_stride,
    cos_ptr, cos_position_stride, cos_dim_stride,
    sin_ptr, sin_position_stride, sin_dim_stride,
    positions_ptr, position_batch_stride, position_seq_stride,
    seq_len, table_len, heads, k_heads, head_dim, half, first_head, end_head, sign,
    HAS_POSITIONS: tl.constexpr, HAS_K: tl.constexpr, INTERLEAVED: tl.constexpr, EXPANDED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_K_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, seq = token // seq_len, token % seq_len
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None].to(tl.int64)
    k_head = (tl.program_id(1) * BLOCK_K_HEADS + tl.arange(0, BLOCK_K_HEADS))[:, None].to(tl.int64)
    x_ptr += batch * x_batch_stride + seq * x_seq_stride
    y_ptr += batch * y_batch_stride + seq * y_seq_stride
    k_ptr += batch * k_batch_stride + seq * k_seq_stride
    l_ptr += batch * l_batch_stride + seq * l_seq_stride
    # All that does not wait for the position is under way before the first store.
    a, b = _load_pairs(x_ptr, x_head_stride, x_dim_stride, head, heads, half, INTERLEAVED, EXPANDED, BLOCK_HALF)
    if HAS_K:
        k_a, k_b = _load_pairs(k_ptr, k_head_stride, k_dim_stride, k_head, k_heads, half, INTERLEAVED, EXPANDED, BLOCK_HALF)
    position = seq
    if HAS_POSITIONS:
        position = tl.load(positions_ptr + batch * position_batch_stride + seq * position_seq_stride).to(tl.int64)
    known = (position >= 0) & (position < table_len)
    pair = tl.arange(0, BLOCK_HALF)[None, :].to(tl.int64)
    # A position that the tables do not have gives NaN. Not `known &`: Triton 3.9's interpreter takes that for no mask.
    here = pair < tl.where(known, half, 0)
    cos = tl.load(cos_ptr + position * cos_position_stride + pair * cos_dim_stride, mask=here, other=float("nan")).to(ACC)
    sin = tl.load(sin_ptr + position * sin_position_stride + pair * sin_dim_stride, mask=here, other=float("nan")).to(ACC)
    sin = sin * sign
    _turn_pairs(
        a, b, cos, sin, first_head, end_head, y_ptr, y_head_stride, y_dim_stride, head, heads, half, INTERLEAVED, BLOCK_HALF
    )  # fmt: skip
    _copy_rest(
        x_ptr, x_head_stride, x_dim_stride, y_ptr, y_head_stride, y_dim_stride, head, heads, half, head_dim, BLOCK_REST
    )  # fmt: skip
    if HAS_K:
        _turn_pairs(
            k_a, k_b, cos, sin, 0, k_heads, l_ptr, l_head_stride, l_dim_stride, k_head, k_heads, half, INTERLEAVED, BLOCK_HALF
        )  # fmt: skip
        _copy_rest(
            k_ptr, k_head_stride, k_dim_stride, l_ptr, l_head_stride, l_dim_stride, k_head, k_heads, half, head_dim, BLOCK_REST
        )  # fmt: skip


# Launch


def _launch(backend, x, y, k, l, cos, sin, position_ids, half, turned, interleaved, sign) -> None:  # noqa: E741
    """Turn x into y, and k into l where k is not None, in one launch; `turned` is which heads of x, None for all."""
    batch, seq, heads, head_dim = x.shape
    first_head, end_head = turned or (0, heads)
    k_heads = 0 if k is None else k.shape[2]
    if batch * seq * (heads + k_heads) * head_dim == 0:
        return
    cos, sin = cos.resolve_neg(), sin.resolve_neg()
    tensors = [argument for t in (x, y, x if k is None else k, y if k is None else l) for argument in (t, *t.stride())]
    tensors += [argument for table in (cos, sin) for argument in (table, *table.stride())]
    steps = (0, 0) if position_ids is None else (0, *position_ids.stride())[-2:]  # [seq] is one row for the whole batch
    sizes = (seq, cos.shape[0], heads, k_heads, head_dim, half, first_head, end_head)
    if backend == "triton":
        rest = head_dim - 2 * half
        block_half = triton.next_power_of_2(max(half, 1))
        most = max(1, (1 << 20 if runtime.INTERPRETED else 2048) // block_half)  # heads a program
        block_heads, block_k_heads = (min(triton.next_power_of_2(max(count, 1)), most) for count in (heads, k_heads))
        rounds = max(triton.cdiv(heads, block_heads), triton.cdiv(k_heads, block_k_heads))
        with runtime.triton_launch(x):
            _rotary_kernel[(batch * seq, rounds)](
                *tensors, x if position_ids is None else position_ids, *steps, *sizes, sign,
                HAS_POSITIONS=position_ids is not None, HAS_K=k is not None, INTERLEAVED=interleaved,
                EXPANDED=x.stride(3) == 0 and (k is None or k.stride(3) == 0),
                BLOCK_HEADS=block_heads, BLOCK_K_HEADS=block_k_heads,
                BLOCK_HALF=block_half, BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
                ACC=tl.float64 if x.dtype == torch.float64 else tl.float32, enable_fp_fusion=False,
            )  # fmt: skip
        return
    if position_ids is None:
        words, places = 0, torch.empty(0, dtype=torch.int32, device=x.device)
    else:  # as 32-bit words, so that one kernel reads both integer types
        words = position_ids.element_size() // 4
        places = _words(position_ids)
    runs = -(-max(half, head_dim - 2 * half) * x.element_size() // 16)  # threads that share a head, 16 bytes each
    across = min(32, 1 << (runs - 1).bit_length())
    down = min(128 // across, 1 << (heads + k_heads - 1).bit_length())
    cuda.launch(
        CUDA_SOURCE, "rotary", (batch * seq,), (across, down), *tensors, places, words, *(step * words for step in steps),
        *sizes, interleaved, sign,
    )  # fmt: skip


def rotary_into(
    x: Tensor,
    y: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    sign: float = 1.0,
    rotary_dim: int | None = None,
    heads: tuple[int, int] | None = None,
    backend: str | None = None,
) -> None:
    """Write x, turned, into `y` by a kernel: x itself, or memory that x does not touch. No version counter moves.

    Args:
        x, y: [batch, seq, heads, head_dim], of one dtype and device, each with its own strides. No two elements of y share
            memory.
        sign: of the angles; -1 turns back.
        backend: "triton", "cuda", or None for the first that runs here. The others are as for `rotary`, and so are the errors.
    """
    half = _checked(x, None, cos, sin, position_ids, rotary_dim, heads) // 2
    if (y.shape, y.dtype, y.device) != (x.shape, x.dtype, x.device) or y.is_neg():
        raise ValueError(
            f"rotary_into writes to a tensor like x, {tuple(x.shape)} {x.dtype} on {x.device}, got {tuple(y.shape)} {y.dtype} "
            f"on {y.device}{', lazily negated' if y.is_neg() else ''}"
        )
    backend = runtime.choose(backend, x.device.type)
    if backend == "torch":
        raise ValueError("rotary_into writes as a kernel does: its backend is 'triton' or 'cuda'")
    runtime.refuse_bfloat16(backend, x.dtype, cos.dtype)
    _launch(backend, x.resolve_neg(), y, None, None, cos, sin, position_ids, half, heads, False, sign)


def _words(position_ids: Tensor) -> Tensor:
    """The memory of `position_ids` as int32, from its first element on, whatever its strides are."""
    storage = position_ids.untyped_storage()
    words = position_ids.element_size() // 4
    offset = position_ids.storage_offset() * words
    alias = torch.empty(0, dtype=torch.int32, device=position_ids.device)
    return alias.set_(storage, offset, (storage.nbytes() // 4 - offset,), (1,))


# Function


class Rotary(torch.autograd.Function):
    """Saves the tables and the positions, and neither x nor k. Its backward is itself with -sin, so it can be
    differentiated any number of times. Writes to no tensor that it is given."""

    @staticmethod
    def forward(x, k, cos, sin, position_ids, options, sign):
        results = [None if t is None else torch.empty_like(t) for t in (x, k)]
        backend, *rest = options
        first, second = ((x, results[0]), (k, results[1])) if x is not None else ((k, results[1]), (None, None))
        _launch(
            backend, _plain(first[0]), first[1], _plain(second[0]), second[1], cos, sin, position_ids, *rest, sign
        )  # fmt: skip
        return tuple(results)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, _, cos, sin, position_ids, ctx.options, ctx.sign = inputs
        ctx.save_for_backward(cos, sin, position_ids)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dy, dl):
        cos, sin, position_ids = ctx.saved_tensors
        if dy is None and dl is None:
            return (None,) * 7
        return *Rotary.apply(dy, dl, cos, sin, position_ids, ctx.options, -ctx.sign), *(None,) * 5


def _plain(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.resolve_neg()


# What you call


def rotary(
    x: Tensor | tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    heads: tuple[int, int] | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Turn the first `rotary_dim` dimensions of every head by its position's angles, by one launch.

    Args:
        x: [batch, seq, heads, head_dim], any strides, float64, float32, float16 or bfloat16; or a pair (q, k) that differs in
            heads only, which is turned together.
        cos, sin: [positions, rotary_dim / 2], of x's dtype, or float32 for float16 and bfloat16; see rotary_tables. They do
            not get gradients.
        position_ids: [batch, seq] or [seq], int32 or int64; None means 0, 1, ... along seq. A position that the tables do not
            have gives NaN in its rows: to look before the launch would wait for the GPU. RAWGRAD_DEBUG=1 looks, and names it.
        rotary_dim: how many of head_dim are turned; the rest passes through. All for None.
        interleaved: pair i is dimensions (2 i, 2 i + 1); else (i, i + rotary_dim / 2), half-split.
        heads: (start, stop): turn only these heads of x, such as q's and k's of a packed projection. Not for a pair.
        backend: "triton", "cuda", "torch", or None for the first of them that runs here.

    Returns:
        New memory, or a pair, laid out as torch lays out x * x: a layout like the input's is read and written alike.

    Raises:
        TypeError, ValueError: something does not fit, in one sentence, before anything is launched.
        RuntimeError: the backend cannot run here; the sentence says what to do.

    Cost: reads x and writes the result once, without a copy in either direction, whatever the layout of x or of dy, and keeps
    only the tables and positions until backward, which is the same launch.
    Differentiable any number of times in x.
    """
    pair = isinstance(x, tuple | list)
    if pair and (len(x) != 2 or heads is not None):
        raise ValueError("rotary takes one tensor, with heads=(start, stop) if you like, or a pair (q, k) without heads")
    q, k = x if pair else (x, None)
    rotary_dim = _checked(q, k, cos, sin, position_ids, rotary_dim, heads)
    backend = runtime.choose(backend, q.device.type)
    runtime.refuse_bfloat16(backend, q.dtype, cos.dtype)
    if backend == "torch":
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        kinds = {"rotary_dim": rotary_dim, "interleaved": interleaved}
        results = [rotary_reference(t.to(wide), cos.to(wide), sin.to(wide), position_ids, heads=heads, **kinds).to(t.dtype)
                   for t in (q, k) if t is not None]  # fmt: skip
        return tuple(results) if pair else results[0]
    results = Rotary.apply(q, k, cos, sin, position_ids, (backend, rotary_dim // 2, heads, interleaved), 1.0)
    return results if pair else results[0]


def _checked(q, k, cos, sin, position_ids, rotary_dim, heads) -> int:
    """Refuse what does not fit; rotary_dim, if it was left open."""
    for t in (q,) if k is None else (q, k):
        if t.dtype not in DTYPES:
            raise TypeError(f"rotary needs float64, float32, float16 or bfloat16, got {t.dtype}")
        if t.device.type not in ("cpu", "cuda") or t.layout != torch.strided:
            raise ValueError(f"rotary needs a strided tensor on a CPU or a CUDA GPU, got {t.layout} on {t.device}")
        if t.ndim != 4:
            raise ValueError(f"rotary needs x of shape [batch, seq, heads, head_dim], got {tuple(t.shape)}")
    batch, seq, count, head_dim = q.shape
    if k is not None and (k.shape[:2] != q.shape[:2] or k.shape[3] != head_dim or (k.dtype, k.device) != (q.dtype, q.device)):
        raise ValueError(
            f"rotary needs q and k that differ in heads only, got {tuple(q.shape)} {q.dtype} {q.device} "
            f"and {tuple(k.shape)} {k.dtype} {k.device}"
        )
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or not 0 <= rotary_dim <= head_dim:
        raise ValueError(f"rotary needs an even rotary_dim from 0 to head_dim = {head_dim}, got {rotary_dim}")
    if heads is not None and not 0 <= heads[0] <= heads[1] <= count:
        raise ValueError(f"rotary needs heads=(start, stop) within 0 to {count}, got {heads}")
    for table in (cos, sin):
        if table.ndim != 2 or table.shape[1] != rotary_dim // 2 or table.shape != cos.shape:
            raise ValueError(
                f"rotary needs cos and sin of shape [positions, rotary_dim / 2 = {rotary_dim // 2}], got {tuple(cos.shape)} "
                f"and {tuple(sin.shape)}; of tables that are doubled, take one half (see rotary_tables)"
            )
        narrow = q.dtype in (torch.float16, torch.bfloat16)
        if table.dtype != cos.dtype or table.dtype not in ((q.dtype, torch.float32) if narrow else (q.dtype,)):
            raise TypeError(
                f"rotary needs tables of {q.dtype}{' or float32' if narrow else ''}, got {cos.dtype} and {sin.dtype}"
            )
        if table.device != q.device:
            raise ValueError(f"rotary needs tables on {q.device}, where x is, got {table.device}")
        if table.requires_grad:
            raise ValueError("rotary gives cos and sin no gradient: pass cos.detach() and sin.detach()")
    if position_ids is None:
        if cos.shape[0] < seq:
            raise ValueError(f"rotary needs a table row for each of {seq} positions, got {cos.shape[0]}")
    elif position_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"rotary needs position_ids of int32 or int64, got {position_ids.dtype}")
    elif tuple(position_ids.shape) not in ((seq,), (batch, seq)) or position_ids.device != q.device:
        raise ValueError(
            f"rotary needs position_ids of shape [{batch}, {seq}] or [{seq}] on {q.device}, got {tuple(position_ids.shape)} "
            f"on {position_ids.device}"
        )
    if runtime.debug() and position_ids is not None:
        _positions_are_known(position_ids, cos.shape[0])
    return rotary_dim


def _positions_are_known(position_ids: Tensor, count: int) -> None:
    bad = ((position_ids < 0) | (position_ids >= count)).nonzero()
    if len(bad):
        index = bad[0].tolist()
        raise IndexError(
            f"position_ids{index} is {position_ids[tuple(index)].item()}, and the tables have positions 0 to {count - 1}"
        )
