"""rotary against a float64 reference, two other formulations, its own laws, and the conventions of others."""

import math

import pytest
import torch
from conftest import assert_error_within_budget, value_and_gradient

from rawgrad import probes, rotary, rotary_tables, runtime
from rawgrad.ops.rotary import rotary_into, rotary_reference

BATCH, SEQ, HEADS, DIM, POSITIONS = 2, 3, 3, 8, 11
# [batch, seq, heads, head_dim] in the layouts in which tensors and gradients arrive
LAYOUTS = {
    "contiguous": lambda b, s, h, d, **kw: torch.randn(b, s, h, d, **kw),
    "heads_first": lambda b, s, h, d, **kw: torch.randn(b, h, s, d, **kw).transpose(1, 2),
    "reversed_axes": lambda b, s, h, d, **kw: torch.randn(d, h, s, b, **kw).permute(3, 2, 1, 0),
    "slice_of_a_projection": lambda b, s, h, d, **kw: torch.randn(b, s, h + 2, d + 3, **kw)[:, :, 1 : 1 + h, 2 : 2 + d],
    "every_other_dim": lambda b, s, h, d, **kw: torch.randn(b, s, h, 2 * d, **kw)[..., ::2],
    "expanded_scalar": lambda b, s, h, d, **kw: torch.randn((), **kw).expand(b, s, h, d),
    "expanded_heads": lambda b, s, h, d, **kw: torch.randn(b, s, 1, d, **kw).expand(b, s, h, d),
}
FORMS = {
    "half_split": {},
    "interleaved": {"interleaved": True},
    "partial": {"rotary_dim": 4},
    "partial_interleaved": {"rotary_dim": 6, "interleaved": True},
    "packed": {"heads": (1, 2)},
    "nothing_turns": {"rotary_dim": 0},
}
WHERE = {
    "in_order": lambda **kw: None,
    "per_row_int64": lambda **kw: torch.randint(0, POSITIONS, (BATCH, SEQ), **kw),
    "per_row_int32": lambda **kw: torch.randint(0, POSITIONS, (BATCH, SEQ), dtype=torch.int32, **kw),
    "shared_int32": lambda **kw: torch.randint(0, POSITIONS, (SEQ,), dtype=torch.int32, **kw),
    "strided_int64": lambda **kw: torch.randint(0, POSITIONS, (SEQ, BATCH), **kw).t(),
    "stepped_int64": lambda **kw: torch.randint(0, POSITIONS, (BATCH, 2 * SEQ), **kw)[:, 1::2],
    "expanded_int64": lambda **kw: torch.randint(0, POSITIONS, (1, SEQ), **kw).expand(BATCH, SEQ),
}
KINDS = [  # x and its tables
    pytest.param(torch.float64, torch.float64, id="float64"),
    pytest.param(torch.float32, torch.float32, id="float32"),
    pytest.param(torch.float16, torch.float16, id="float16"),
    pytest.param(torch.float16, torch.float32, id="float16-float32"),
    pytest.param(torch.bfloat16, torch.bfloat16, id="bfloat16"),
    pytest.param(torch.bfloat16, torch.float32, id="bfloat16-float32"),
]


@pytest.fixture(params=["triton", "cuda", "torch"])
def backend(request):
    return request.param


def skip_what_is_wrong_there(backend, *dtypes):
    if backend == "triton" and runtime.INTERPRETED and torch.bfloat16 in dtypes:
        pytest.skip("needs a GPU: Triton's interpreter rounds bfloat16 wrongly")


def agrees(call, reference, x, dy, dtype):
    """`call` in its dtype against `reference` in float64; torch's error is the reference's own, in that dtype."""
    y, dx = value_and_gradient(call, x, dy)
    torch_y, torch_dx = value_and_gradient(lambda x: reference(x).to(dtype), x, dy)
    true_y, true_dx = value_and_gradient(reference, x.double(), dy.double())
    for what, ours, torchs, truth in (("y", y, torch_y, true_y), ("dx", dx, torch_dx, true_dx)):
        assert_error_within_budget(what, ours, torchs, truth)


@pytest.mark.parametrize("dy_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
def test_every_layout_of_x_and_of_dy_gives_the_reference(x_layout, dy_layout, backend, device):
    cos, sin = rotary_tables(POSITIONS, DIM, device=device)
    x, dy = (LAYOUTS[layout](BATCH, SEQ, HEADS, DIM, device=device) for layout in (x_layout, dy_layout))
    before = probes.look(x), probes.look(dy)
    agrees(
        lambda x: rotary(x, cos, sin, backend=backend),
        lambda x: rotary_reference(x, cos.to(x.dtype), sin.to(x.dtype)),
        x,
        dy,
        torch.float32,
    )
    assert before == (probes.look(x), probes.look(dy)), "rotary wrote to what it was given"


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "table_dtype"), KINDS)
def test_every_form_and_dtype_gives_the_reference(dtype, table_dtype, form, where, backend, device):
    skip_what_is_wrong_there(backend, dtype, table_dtype)
    how = FORMS[form]
    cos, sin = rotary_tables(POSITIONS, how.get("rotary_dim", DIM), device=device, dtype=table_dtype)
    places = WHERE[where](device=device)
    x = LAYOUTS["heads_first"](BATCH, SEQ, HEADS, DIM, device=device, dtype=dtype)
    dy = LAYOUTS["every_other_dim"](BATCH, SEQ, HEADS, DIM, device=device, dtype=dtype)
    agrees(
        lambda x: rotary(x, cos, sin, places, backend=backend, **how),
        lambda x: rotary_reference(x, cos.to(x.dtype), sin.to(x.dtype), places, **how),
        x,
        dy,
        dtype,
    )


@pytest.mark.parametrize("dy_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", ["contiguous", "heads_first", "slice_of_a_projection"])
def test_a_pair_is_turned_like_its_parts(x_layout, dy_layout, backend, device):
    cos, sin = rotary_tables(POSITIONS, DIM, device=device, dtype=torch.float64)
    where = WHERE["per_row_int32"](device=device)
    make = {"device": device, "dtype": torch.float64}
    q = LAYOUTS[x_layout](BATCH, SEQ, 4, DIM, **make).detach().requires_grad_()
    k = LAYOUTS[x_layout](BATCH, SEQ, 2, DIM, **make).detach().requires_grad_()
    dq, dk = LAYOUTS[dy_layout](BATCH, SEQ, 4, DIM, **make), LAYOUTS[dy_layout](BATCH, SEQ, 2, DIM, **make)
    both = rotary((q, k), cos, sin, where, backend=backend)
    got = (*both, *torch.autograd.grad(both, (q, k), (dq, dk)))
    want = []
    for t, dt in ((q, dq), (k, dk)):
        y = rotary_reference(t, cos, sin, where)
        want.append((y, torch.autograd.grad(y, t, dt)[0]))
    for ours, truth in zip(got, (want[0][0], want[1][0], want[0][1], want[1][1]), strict=True):
        assert (ours - truth).abs().max() <= 1e-14


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_pair_is_one_launch_forward_and_one_backward(backend, monkeypatch, device):
    from rawgrad.ops import rotary as op

    launches = []
    monkeypatch.setattr(op, "_launch", lambda *given, real=op._launch: launches.append(given) or real(*given))
    cos, sin = rotary_tables(POSITIONS, DIM, device=device)
    q = torch.randn(1, 2, 4, DIM, device=device, requires_grad=True)
    k = torch.randn(1, 2, 2, DIM, device=device, requires_grad=True)
    a, b = op.rotary((q, k), cos, sin, backend=backend)
    (a.sum() + b.sum()).backward()
    assert len(launches) == 2


@pytest.mark.parametrize("counts", [(3, 1), (1, 3)], ids=["more_of_q", "more_of_k"])
@pytest.mark.parametrize("used", [0, 1])
def test_one_of_a_pair_may_go_unused(used, counts, backend, device):
    cos, sin = rotary_tables(POSITIONS, DIM, device=device, dtype=torch.float64)
    pair = [torch.randn(1, 2, n, DIM, device=device, dtype=torch.float64, requires_grad=True) for n in counts]
    rotary(tuple(pair), cos, sin, backend=backend)[used].sum().backward()
    (right,) = torch.autograd.grad(rotary_reference(pair[used], cos, sin).sum(), pair[used])
    assert (pair[used].grad - right).abs().max() <= 1e-14
    other = pair[1 - used].grad
    assert other is None or not other.any()


# Two formulations that know nothing of ours


@pytest.mark.parametrize("interleaved", [False, True])
def test_it_is_multiplication_by_a_complex_number(interleaved, backend, device):
    x = torch.randn(BATCH, SEQ, HEADS, DIM, dtype=torch.float64, device=device)
    where = WHERE["per_row_int64"](device=device)
    cos, sin = rotary_tables(POSITIONS, DIM, device=device, dtype=torch.float64)
    frequency = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64, device=device) / DIM)
    turn = torch.polar(torch.ones(()).double().to(device), where[..., None, None] * frequency)
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    want = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    got = rotary(x, cos, sin, where, interleaved=interleaved, backend=backend)
    assert (got - want).abs().max() <= 1e-13


@pytest.mark.parametrize("interleaved", [False, True])
def test_it_is_a_rotation_matrix(interleaved, backend, device):
    x = torch.randn(1, SEQ, 1, DIM, dtype=torch.float64, device=device)
    cos, sin = rotary_tables(SEQ, DIM, device=device, dtype=torch.float64)
    got = rotary(x, cos, sin, interleaved=interleaved, backend=backend)
    for position in range(SEQ):
        matrix = torch.zeros(DIM, DIM, dtype=torch.float64)
        for pair in range(DIM // 2):
            angle = position * 10000.0 ** (-2 * pair / DIM)
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + DIM // 2)
            matrix[a, a] = matrix[b, b] = math.cos(angle)
            matrix[b, a], matrix[a, b] = math.sin(angle), -math.sin(angle)
        assert (got[0, position, 0].cpu() - matrix @ x[0, position, 0].cpu()).abs().max() <= 1e-13


# Its laws


def test_turning_back_undoes_it_norms_are_kept_and_it_is_linear(backend, device):
    make = {"device": device, "dtype": torch.float64}
    cos, sin = rotary_tables(POSITIONS, DIM, **make)
    x, z = (torch.randn(BATCH, SEQ, HEADS, DIM, **make) for _ in range(2))
    where = WHERE["per_row_int64"](device=device)
    turn = lambda t, sin=sin: rotary(t, cos, sin, where, backend=backend)  # noqa: E731
    assert (turn(turn(x), -sin) - x).abs().max() <= 1e-13
    assert (turn(x).norm(dim=-1) - x.norm(dim=-1)).abs().max() <= 1e-13
    assert (turn(2 * x - 3 * z) - (2 * turn(x) - 3 * turn(z))).abs().max() <= 1e-13


def test_products_depend_on_the_distance_of_positions_only(backend, device):
    make = {"device": device, "dtype": torch.float64}
    cos, sin = rotary_tables(POSITIONS, DIM, **make)
    q, k = (torch.randn(1, 1, 1, DIM, **make) for _ in range(2))
    at = lambda t, position: rotary(t, cos, sin, torch.tensor([position], device=device), backend=backend)  # noqa: E731
    near, far = ((at(q, p + 3) * at(k, p)).sum().item() for p in (0, 5))
    assert abs(near - far) <= 1e-12


FOLLOWED = {
    "plain": lambda y: y,
    "sum": lambda y: y.sum(),
    "sum(0)": lambda y: y.sum(0),
    "t": lambda y: y.transpose(1, 3) * 2,
    "cat": lambda y: torch.cat([y, torch.ones_like(y)], 3),
    "stack": lambda y: torch.stack([y, torch.ones_like(y)], -1)[..., 0],
    "slice": lambda y: y[:, 1:, :, 1:],
}


@pytest.mark.parametrize("follow", FOLLOWED)
@pytest.mark.parametrize("form", ["half_split", "partial_interleaved"])
def test_gradcheck_and_gradgradcheck(form, follow, backend, device):
    how = {**FORMS[form], "rotary_dim": 2}
    cos, sin = rotary_tables(9, 2, device=device, dtype=torch.float64)
    where = torch.tensor([[7, 3]], device=device)
    x = torch.randn(1, 2, 1, 3, dtype=torch.float64, device=device, requires_grad=True)
    f = lambda x: FOLLOWED[follow](rotary(x, cos, sin, where, backend=backend, **how))  # noqa: E731
    assert torch.autograd.gradcheck(f, x)
    assert torch.autograd.gradgradcheck(f, x, gen_non_contig_grad_outputs=True)


def test_gradgradcheck_of_a_pair(backend, device):
    cos, sin = rotary_tables(2, 2, device=device, dtype=torch.float64)
    pair = [torch.randn(1, 2, n, 2, dtype=torch.float64, device=device, requires_grad=True) for n in (2, 1)]
    f = lambda q, k: rotary((q, k), cos, sin, backend=backend)  # noqa: E731
    assert torch.autograd.gradcheck(f, pair)
    assert torch.autograd.gradgradcheck(f, pair, gen_non_contig_grad_outputs=True)


# Its costs and edges


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("dy_layout", LAYOUTS)
@pytest.mark.parametrize("where", WHERE)
def test_nothing_is_allocated_beyond_the_results(where, dy_layout, backend, device):
    cos, sin = rotary_tables(POSITIONS, DIM, device=device)
    x = LAYOUTS["heads_first"](BATCH, SEQ, HEADS, DIM, device=device).requires_grad_()
    dy, places = LAYOUTS[dy_layout](BATCH, SEQ, HEADS, DIM, device=device), WHERE[where](device=device)
    with probes.Allocations(x, dy, cos, sin, *([] if places is None else [places])) as made:
        torch.autograd.grad(rotary(x, cos, sin, places, backend=backend), x, dy)
    assert made.sizes == [x.nbytes, x.nbytes], "more than y and dx"


def test_x_is_not_kept(device):
    cos, sin = rotary_tables(POSITIONS, DIM, device=device)
    x = torch.randn(BATCH, SEQ, HEADS, DIM, device=device, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        rotary(x, cos, sin, backend=runtime.backends()[0])
    assert set(kept) == {cos.data_ptr(), sin.data_ptr()}


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8), (2, 3, 2, 0)])
def test_empty_tensors(shape, backend, device):
    cos, sin = rotary_tables(POSITIONS, shape[-1], device=device)
    x = torch.empty(shape, device=device, requires_grad=True)
    y = rotary(x, cos, sin, backend=backend)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("bad", [POSITIONS, -1, 2**31 - 1, 2**32, 2**32 + 1])
def test_a_position_outside_the_tables_gives_nan_in_its_row_alone(bad, backend, device):
    cos, sin = rotary_tables(POSITIONS, 4, device=device)
    x = torch.ones(1, 3, 2, 8, device=device)
    y = rotary(x, cos, sin, torch.tensor([0, bad, 2], device=device), rotary_dim=4, backend=backend)
    assert y[0, 1, :, :4].isnan().all()
    assert (y[0, 1, :, 4:] == 1).all(), "what passes through stays"
    assert y[0, ::2].isfinite().all()


def test_the_debug_mode_names_the_first_bad_position(monkeypatch, device):
    monkeypatch.setenv("RAWGRAD_DEBUG", "1")
    cos, sin = rotary_tables(POSITIONS, DIM, device=device)
    x = torch.ones(2, 2, 1, DIM, device=device)
    with pytest.raises(IndexError, match=r"position_ids\[1, 0\] is 70, and the tables have positions 0 to 10"):
        rotary(x, cos, sin, torch.tensor([[0, 1], [70, 80]], device=device))
    rotary(x, cos, sin, torch.tensor([0, 1], device=device))


def test_offsets_are_64_bits_wide(backend, device, tmp_path):
    far = 2**31 + 8
    if device == "cpu":
        storage = torch.from_file(str(tmp_path / "sparse"), shared=True, size=far + 8, dtype=torch.float16)
    else:
        storage = torch.empty(far + 8, dtype=torch.float16, device=device)
    x = storage.as_strided((1, 2, 1, 4), (far, far, 4, 1))
    x[0, 0], x[0, 1] = 1, 2
    quarter = torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float16, device=device)
    y = rotary(x, quarter, quarter.flip(0), backend=backend)
    assert y.flatten().tolist() == [1, 1, 1, 1, -2, -2, 2, 2]


# The conventions of others


def test_doubled_tables_half_split_as_transformers_has_them(backend, device):
    x = torch.randn(BATCH, SEQ, HEADS, DIM, dtype=torch.float64, device=device)
    cos, sin = rotary_tables(SEQ, DIM, device=device, dtype=torch.float64)
    doubled_cos, doubled_sin = (torch.cat([t, t], -1)[None, :, None] for t in (cos, sin))  # [1, seq, 1, rotary_dim]
    half = torch.cat([-x[..., DIM // 2 :], x[..., : DIM // 2]], -1)  # "rotate_half"
    assert (rotary(x, cos, sin, backend=backend) - (x * doubled_cos + half * doubled_sin)).abs().max() <= 1e-14


def test_interleaved_pairs_as_flash_attention_has_them(backend, device):
    x = torch.randn(BATCH, SEQ, HEADS, DIM, dtype=torch.float64, device=device)
    cos, sin = rotary_tables(SEQ, DIM, device=device, dtype=torch.float64)
    repeated_cos, repeated_sin = (t.repeat_interleave(2, -1)[None, :, None] for t in (cos, sin))
    other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    got = rotary(x, cos, sin, interleaved=True, backend=backend)
    assert (got - (x * repeated_cos + other * repeated_sin)).abs().max() <= 1e-14


def test_tables_are_those_of_the_paper(device):
    cos, sin = rotary_tables(3, 4, base=100.0, device=device, dtype=torch.float64)
    assert (cos.acos() - torch.tensor([[0, 0], [1, 0.1], [2, 0.2]], device=device, dtype=torch.float64)).abs().max() <= 1e-12
    assert (cos**2 + sin**2 - 1).abs().max() <= 1e-15
    assert rotary_tables(3, 4)[0].dtype == torch.get_default_dtype()


# What is refused

X = torch.ones(2, 3, 4, 8)
C, S = rotary_tables(5, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rotary(X[0], C, S), ValueError, r"shape \[batch, seq, heads, head_dim\], got \(3, 4, 8\)"),
        (lambda: rotary(X.int(), C, S), TypeError, "needs float64, .* got torch.int32"),
        (lambda: rotary(X.to("meta"), C, S), ValueError, "a CPU or a CUDA GPU, got torch.strided on meta"),
        (lambda: rotary(X, C, S, rotary_dim=3), ValueError, "an even rotary_dim from 0 to head_dim = 8, got 3"),
        (lambda: rotary(X, C, S, rotary_dim=10), ValueError, "an even rotary_dim from 0 to head_dim = 8, got 10"),
        (
            lambda: rotary(X, torch.cat([C, C], 1), torch.cat([S, S], 1)),
            ValueError,
            r"rotary_dim / 2 = 4\], got \(5, 8\) .* doubled",
        ),
        (lambda: rotary(X, C, S[:4]), ValueError, r"got \(5, 4\) and \(4, 4\)"),
        (lambda: rotary(X, C.double(), S.double()), TypeError, "tables of torch.float32, got torch.float64"),
        (lambda: rotary(X.half(), C.double(), S.double()), TypeError, "tables of torch.float16 or float32, got torch.float64"),
        (lambda: rotary(X, C.to("meta"), S.to("meta")), ValueError, "tables on cpu, where x is, got meta"),
        (lambda: rotary(X, C.clone().requires_grad_(), S), ValueError, "gives cos and sin no gradient"),
        (lambda: rotary(X, C[:2], S[:2]), ValueError, "a table row for each of 3 positions, got 2"),
        (lambda: rotary(X, C, S, torch.ones(3)), TypeError, "int32 or int64, got torch.float32"),
        (lambda: rotary(X, C, S, torch.ones(2, dtype=torch.int64)), ValueError, r"shape \[2, 3\] or \[3\] on cpu, got \(2,\)"),
        (lambda: rotary(X, C, S, heads=(2, 5)), ValueError, r"heads=\(start, stop\) within 0 to 4, got \(2, 5\)"),
        (lambda: rotary((X, X), C, S, heads=(0, 1)), ValueError, "or a pair .* without heads"),
        (lambda: rotary((X, X, X), C, S), ValueError, "or a pair"),
        (lambda: rotary((X, X[:, :2]), C, S), ValueError, "q and k that differ in heads only"),
        (lambda: rotary((X, X.half()), C, S), ValueError, "q and k that differ in heads only"),
        (lambda: rotary(X, C, S, backend="cupy"), ValueError, "backend must be one of"),
        (lambda: rotary_tables(4, 3), ValueError, "an even rotary_dim, got 3"),
        (lambda: rotary_tables(-1, 4), ValueError, "0 positions or more, got -1"),
    ],
)
def test_says_what_is_wrong_before_anything_is_launched(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(not runtime.INTERPRETED, reason="needs Triton's interpreter")
def test_the_interpreter_refuses_bfloat16():
    with pytest.raises(TypeError, match="interpreter rounds bfloat16 wrongly"):
        rotary(X.bfloat16(), C, S, backend="triton")


def test_rotary_into_writes_where_it_is_told_and_may_write_over_x(device):
    cos, sin = rotary_tables(5, 4, device=device)
    x = torch.randn(2, 3, 2, 4, device=device)
    right = rotary(x, cos, sin)
    for backend in ("cuda", "triton") if runtime.HAS_TRITON else ("cuda",):
        y = torch.empty(2, 2, 3, 4, device=device).transpose(1, 2)
        rotary_into(x, y, cos, sin, backend=backend)
        assert torch.equal(y, right)
        over = x.clone()
        rotary_into(over, over, cos, sin, backend=backend)
        assert torch.equal(over, right)
        assert over._version == 0
        rotary_into(over, over, cos, sin, sign=-1, backend=backend)
        assert (over - x).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("y", "backend", "message"),
    [
        (lambda x: x.to("meta"), None, "got .* on meta"),
        (lambda x: x[:1], None, r"rotary_into writes to a tensor like x, \(2, 3, 2, 4\) .* got \(1, 3, 2, 4\)"),
        (lambda x: x.double(), None, "got .* torch.float64"),
        (lambda x: x._neg_view(), None, "lazily negated"),
        (lambda x: x, "torch", "its backend is 'triton' or 'cuda'"),
    ],
    ids=["device", "shape", "dtype", "negated", "torch"],
)
def test_rotary_into_refuses_what_does_not_fit(y, backend, message, device):
    x = torch.randn(2, 3, 2, 4, device=device)
    with pytest.raises(ValueError, match=message):
        rotary_into(x, y(x), *rotary_tables(5, 4, device=device), backend=backend)


def test_rotary_into_checks_as_rotary_does(device, monkeypatch):
    x, (cos, sin) = torch.randn(2, 3, 2, 4, device=device), rotary_tables(5, 4, device=device)
    y = torch.empty_like(x)
    with pytest.raises(ValueError, match="rotary needs cos and sin of shape"):
        rotary_into(x, y, cos[:, :1], sin)
    if runtime.INTERPRETED:
        half, tables = x.bfloat16(), [table.bfloat16() for table in (cos, sin)]
        with pytest.raises(TypeError, match="bfloat16"):
            rotary_into(half, torch.empty_like(half), *tables, backend="triton")
    positions = torch.tensor([0, 9, 0], device=device)
    monkeypatch.setenv("RAWGRAD_DEBUG", "1")
    with pytest.raises(IndexError, match=r"position_ids\[1\] is 9"):
        rotary_into(x, y, cos, sin, positions)
    rotary_into(x._neg_view(), y, cos, sin)
    assert torch.equal(y, rotary(-x, cos, sin))


@pytest.mark.parametrize("backend", ["torch", "triton", "cuda"])
def test_tables_that_are_lazily_negated_turn_as_they_read(backend, device):
    x, angle = torch.randn(2, 3, 2, 4, device=device), torch.rand(3, 2, device=device)
    turns = torch.polar(torch.ones_like(angle), angle)
    sin = turns.conj().imag
    assert sin.is_neg()
    back = rotary(rotary(x, turns.real, turns.imag, backend=backend), turns.real, sin, backend=backend)
    assert (back - x).abs().max() < 1e-6
