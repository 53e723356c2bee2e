"""Healthy Functions are right, and the doctor finds nothing broken and nothing unsafe in any of them."""

import gc

import pytest
import torch
from healthy import HEALTHY, NARROW

import rawgrad
from rawgrad import runtime


@pytest.fixture(autouse=True, scope="module")
def _collects_fast():
    """Two checks collect garbage again and again: what torch and Triton made is left out."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", HEALTHY)
def test_its_gradients_are_right_and_again_or_refused(name, device):
    healthy = HEALTHY[name]
    inputs = healthy.inputs(torch.float64, device)

    def func(*given):
        """The outputs that can be differentiated, of the same dropout each time."""
        if healthy.in_place:
            given = (given[0].clone(), *given[1:])
        with torch.random.fork_rng():
            torch.manual_seed(0)
            outputs = healthy.func(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(y for y in outputs if y.requires_grad)

    if healthy.once:  # gradcheck runs one graph again and again
        (dx,) = torch.autograd.grad(func(*inputs)[0].sum(), inputs[0])
        torch.testing.assert_close(
            dx, torch.autograd.grad(healthy.reference(*inputs).sum(), inputs[0])[0], rtol=1e-12, atol=1e-12
        )
        return
    assert torch.autograd.gradcheck(func, inputs)
    if healthy.raw:
        return
    if healthy.twice:
        assert torch.autograd.gradgradcheck(func, inputs)
    else:
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(func(*inputs)[0].sum(), inputs[0], create_graph=True)


CASES = [(name, dtype) for name, healthy in HEALTHY.items() for dtype in healthy.dtypes]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=[f"{name}-{str(dtype)[6:]}" for name, dtype in CASES])
def test_the_doctor_finds_nothing(name, dtype, device):
    torch.use_deterministic_algorithms(False)  # as in a user's process
    healthy = HEALTHY[name]
    report = rawgrad.examine(healthy.func, healthy.inputs(dtype, device), healthy.reference)
    told = {finding.check for finding in report.findings if finding.told}
    assert told <= ({"second_derivative_is_right_or_refused"} if healthy.raw else set()), report
    assert report.verdict("leaves_inputs_alone") == ("note" if healthy.in_place else "healthy")


def test_the_zoo_is_large_enough():
    assert len(HEALTHY) >= 24
    assert sum(healthy.dtypes == NARROW for healthy in HEALTHY.values()) >= 5
    assert runtime.DEVICE in ("cpu", "cuda")
