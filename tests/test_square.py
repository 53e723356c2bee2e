"""square against its reference: values, gradients, second derivatives, layouts, edges, errors."""

import threading

import pytest
import torch
from conftest import LAYOUTS, assert_error_within_budget, value_and_gradient

from rawgrad import probes, runtime, square
from rawgrad.ops import square as op
from rawgrad.ops.square import square_reference

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WITH_BFLOAT16 = [b for b in ("triton", "cuda", "torch") if not (b == "triton" and runtime.INTERPRETED)]
BACKENDS_AND_DTYPES = [
    pytest.param(backend, dtype, id=f"{backend}-{str(dtype).removeprefix('torch.')}")
    for backend in ("triton", "cuda", "torch")
    for dtype in DTYPES
    if dtype != torch.bfloat16 or backend in WITH_BFLOAT16
]


@pytest.fixture(params=["triton", "cuda", "torch"])
def backend(request):
    return request.param


@pytest.mark.parametrize("dy_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_every_layout_of_x_and_of_dy_gives_the_reference(backend, dtype, x_layout, dy_layout, device):
    for shape in ((5, 7), (3, 130)):
        x = LAYOUTS[x_layout](*shape, dtype=dtype, device=device)
        dy = LAYOUTS[dy_layout](*shape, dtype=dtype, device=device)
        before = probes.look(x), probes.look(dy)
        y, dx = value_and_gradient(lambda x: square(x, backend), x, dy)
        assert before == (probes.look(x), probes.look(dy)), "square wrote to what it was given"
        torch_y, torch_dx = value_and_gradient(square_reference, x, dy)
        true_y, true_dx = value_and_gradient(square_reference, x.double(), dy.double())
        assert_error_within_budget("y", y, torch_y, true_y)
        assert_error_within_budget("dx", dx, torch_dx, true_dx)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda **kw: torch.randn((), **kw), id="0-d"),
        pytest.param(lambda **kw: torch.empty(0, 3, **kw), id="empty"),
        pytest.param(lambda **kw: torch.empty(3, 0, **kw).t(), id="empty_transposed"),
        pytest.param(lambda **kw: torch.randn(7, **kw), id="1-d"),
        pytest.param(lambda **kw: torch.randn(1, 5, 1, **kw), id="axes_of_1"),
        pytest.param(lambda **kw: torch.randn(2, 3, 4, 5, **kw).permute(0, 2, 1, 3), id="4-d_permuted"),
        pytest.param(lambda **kw: torch.randn(2, 2, 3, 2, 3, 2, **kw).permute(5, 3, 1, 0, 2, 4)[:, ::2], id="6-d_permuted"),
        pytest.param(lambda **kw: torch.randn(2, op.BLOCK + 3, **kw), id="rows_longer_than_a_block"),
        pytest.param(lambda **kw: torch.randn(30, 3, 3, 3, 3, **kw)[:, :2, :2, :2, :2], id="5-d_with_gaps"),
    ],
)
def test_every_shape_gives_the_reference(make, backend, device):
    x = make(dtype=torch.float64, device=device)
    dy = torch.randn(x.shape[::-1], dtype=torch.float64, device=device).permute(*range(x.ndim - 1, -1, -1)) if x.ndim else x
    y, dx = value_and_gradient(lambda x: square(x, backend), x, dy)
    assert torch.equal(y, x * x)
    assert torch.equal(dx, 2 * x * dy)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_contiguous_or_transposed_tensor_needs_one_launch(backend, monkeypatch, device):
    walked = []
    monkeypatch.setattr(op, "_merged", lambda axes, merge=op._merged: walked.append(merge(axes)) or walked[-1])
    square(torch.randn(2, 3, 4, 5, device=device), backend)
    square(torch.randn(2, 3, 4, 5, device=device).transpose(1, 3), backend)
    assert [[size for size, _ in axes] for axes in walked] == [[120], [120]]


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_nothing_is_allocated_beyond_the_results(backend, device):
    x = torch.randn(16, 32, device=device).t().requires_grad_()
    dy = torch.randn(32, 1, device=device).expand(32, 16)
    with probes.Allocations(x, dy) as made:
        y = square(x, backend)
        y.backward(dy)
    assert made.sizes == [x.nbytes, x.nbytes], "more than y and dx"


def test_one_tensor_is_saved(backend, device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        square(x, backend)
    assert set(saved) == {x.data_ptr()}
    assert len(saved) == (1 if backend != "torch" else 2)  # x * x saves x twice


def test_offsets_are_64_bits_wide(backend, device, tmp_path):
    """An element 2^31 elements behind the first, on the CPU in a sparse file: only the two ends are touched."""
    far = 2**31 + 5
    if device == "cpu":
        storage = torch.from_file(str(tmp_path / "sparse"), shared=True, size=far + 1, dtype=torch.float16)
    else:
        storage = torch.empty(far + 1, dtype=torch.float16, device=device)
    x = storage.as_strided((2, 1), (far, 1))
    x[0], x[1] = 3, -4
    y, dx = value_and_gradient(lambda x: square(x, backend), x, torch.ones(2, 1, dtype=torch.float16, device=device))
    assert y.flatten().tolist() == [9, 16]
    assert dx.flatten().tolist() == [6, -8]


def test_offsets_from_a_position_are_64_bits_wide_too(backend, device, tmp_path):
    """The stride fits 32 bits and the place does not."""
    step = 2**30
    if device == "cpu":
        storage = torch.from_file(str(tmp_path / "sparse"), shared=True, size=3 * step + 1, dtype=torch.float16)
    else:
        storage = torch.empty(3 * step + 1, dtype=torch.float16, device=device)
    x = storage.as_strided((4, 1), (step, 1))
    x.copy_(torch.tensor([[1.0], [2], [3], [4]]))
    y, dx = value_and_gradient(lambda x: square(x, backend), x, torch.ones(4, 1, dtype=torch.float16, device=device))
    assert y.flatten().tolist() == [1, 4, 9, 16]
    assert dx.flatten().tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_many_rows_and_planes_are_walked_by_a_small_grid(backend, monkeypatch, device):
    """A grid's y and z end at 65,535; here they end at 2, so that every thread has to walk."""
    launched = []
    real = op.cuda.launch
    small = lambda source, kernel, grid, *rest: launched.append(grid) or real(source, kernel, (grid[0], 1, 1), *rest)  # noqa: E731
    monkeypatch.setattr(op.cuda, "launch", small)
    x = torch.randn(5, 1201, 3, device=device)[:, ::2, :2]
    y, dx = value_and_gradient(lambda x: square(x, backend), x, x)
    assert torch.equal(y, x * x)
    assert torch.equal(dx, 2 * x * x)
    if backend == "cuda":
        assert [(down > 1, deep > 1) for _, down, deep in launched] == [(True, True)] * 2


def test_more_planes_than_a_grid_has(device):
    x = torch.randn(70_000, 3, 3, device=device)[:, :2, :2]
    assert torch.equal(square(x, "cuda"), x * x)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize(
    ("x", "dy", "dx", "error", "message"),
    [
        pytest.param(
            torch.ones(1), torch.ones(1), torch.empty(99), ValueError, r"one shape, .* got \(99,\) .* beside \(1,\)", id="shape"
        ),
        pytest.param(
            torch.ones(1), torch.ones(1).half(), torch.ones(1), ValueError, "got .* torch.float16 cpu beside", id="dtype"
        ),
        pytest.param(
            torch.ones(1), torch.ones(1), torch.ones(1).long(), ValueError, "got .* torch.int64 cpu beside", id="result"
        ),
        pytest.param(
            torch.ones(1).int(), torch.ones(1).int(), torch.ones(1).int(), TypeError, "got torch.int32", id="integers"
        ),
        pytest.param(
            torch.ones(1),
            torch.ones(1),
            torch.ones(1)._neg_view(),
            ValueError,
            "cannot write to a lazily negated",
            id="negated",
        ),
    ],
)
def test_the_bare_launch_says_what_is_wrong_before_it_launches(backend, x, dy, dx, error, message):
    if runtime.problem(backend, "cpu"):
        pytest.skip("needs Triton's interpreter for CPU tensors")
    with pytest.raises(error, match=message):
        op.square_backward(x, dy, dx, backend)


def test_the_interpreter_can_be_used_by_several_threads(device):
    x, wrong = torch.arange(6.0, device=device), []

    def work():
        for _ in range(20):
            try:
                if not torch.equal(square(x, "triton"), x * x):
                    wrong.append("value")
            except Exception as problem:
                wrong.append(problem)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_gradcheck_and_gradgradcheck_through_the_kernel(backend, device):
    x = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    compositions = {
        "plain": lambda x: square(x, backend),
        "sum": lambda x: square(x, backend).sum(),
        "sum(0)": lambda x: square(x, backend).sum(0),
        "t": lambda x: square(x, backend).t() * torch.arange(15.0, dtype=torch.float64, device=device).view(5, 3),
        "cat": lambda x: torch.cat([square(x, backend), x], 1),
    }
    for composition in compositions.values():
        assert torch.autograd.gradcheck(composition, x)
        assert torch.autograd.gradgradcheck(composition, x, gen_non_contig_grad_outputs=True)


def test_second_derivatives_are_right_through_every_path(backend, device):
    """x^3 + x^2 at 2: the second derivative is 6 x + 2 = 14, by .backward() and by grad (F16)."""
    x = torch.tensor(2.0, dtype=torch.float64, device=device, requires_grad=True)
    (g,) = torch.autograd.grad(x**3 + square(x, backend), x, create_graph=True)
    assert torch.autograd.grad(g, x, retain_graph=True)[0].item() == 14
    g.backward()
    assert x.grad.item() == 14
    (g,) = torch.autograd.grad(square(square(x, backend), backend), x, create_graph=True)
    (g,) = torch.autograd.grad(g, x, create_graph=True)
    assert torch.autograd.grad(g, x)[0].item() == 48  # x^4


def test_the_derivative_by_dy_is_right(backend, device):
    x = torch.tensor(3.0, dtype=torch.float64, device=device, requires_grad=True)
    dy = torch.tensor(5.0, dtype=torch.float64, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(square(x, backend), x, dy, create_graph=True)
    assert [g.item() for g in torch.autograd.grad(dx, (x, dy))] == [10, 6]


def test_a_lazily_negated_tensor_is_read_with_its_sign(backend, device):
    z = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128, device=device)
    negated = z.conj().imag
    assert negated.is_neg()
    y, dx = value_and_gradient(lambda x: square(x, backend), negated, negated)
    assert y.tolist() == [4, 16]
    assert dx.tolist() == [8, 32]
    x = torch.ones(2, dtype=torch.float64, device=device)
    assert value_and_gradient(lambda x: square(x, backend), x, negated)[1].tolist() == [-4, 8]
    x = torch.ones(2, dtype=torch.float64, device=device, requires_grad=True)
    dy = torch.ones(2, dtype=torch.float64, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(square(x, backend), x, dy, create_graph=True)
    assert [g.tolist() for g in torch.autograd.grad(dx, (x, dy), negated)] == [[-4, 8], [-4, 8]]


def test_none_takes_the_first_backend_that_runs(device):
    x = torch.randn(3, device=device)
    assert torch.equal(square(x), x * x)
    assert runtime.choose(None, device) == runtime.backends(device)[0]


@pytest.mark.parametrize(
    ("make", "backend", "error", "message"),
    [
        pytest.param(lambda: torch.arange(3), None, TypeError, r"needs float64, .* got torch.int64", id="integer"),
        pytest.param(lambda: torch.ones(3, dtype=torch.complex64), None, TypeError, "got torch.complex64", id="complex"),
        pytest.param(lambda: torch.ones(3, device="meta"), None, ValueError, "CPU or a CUDA GPU, got .* on meta", id="device"),
        pytest.param(
            lambda: torch.ones(3).to_sparse(), None, ValueError, "strided tensor .* got torch.sparse_coo", id="sparse"
        ),
        pytest.param(lambda: torch.ones(3), "cupy", ValueError, "backend must be one of .* got 'cupy'", id="backend"),
    ],
)
def test_says_what_is_wrong(make, backend, error, message):
    with pytest.raises(error, match=message):
        square(make(), backend)


@pytest.mark.skipif(not runtime.INTERPRETED, reason="compiled Triton rounds bfloat16 right")
def test_the_interpreter_refuses_bfloat16_in_one_sentence():
    with pytest.raises(TypeError, match="interpreter rounds bfloat16 wrongly: use backend="):
        square(torch.ones(3, dtype=torch.bfloat16, device=runtime.DEVICE), "triton")
