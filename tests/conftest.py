"""Shared by all tests: seeds, layouts, the one comparison, and a count of what ran."""

import shutil

import pytest
import torch

from rawgrad import runtime

CHROMIUM = next((path for name in ("chromium", "google-chrome", "chromium-browser") if (path := shutil.which(name))), None)

# The same [rows, cols] laid out in memory in the ways in which autograd really delivers it
LAYOUTS = {
    "contiguous": lambda rows, cols, **kw: torch.randn(rows, cols, **kw),
    "transposed": lambda rows, cols, **kw: torch.randn(cols, rows, **kw).t(),
    "every_other_column": lambda rows, cols, **kw: torch.randn(rows, 2 * cols, **kw)[:, ::2],
    "slice_with_offset": lambda rows, cols, **kw: torch.randn(rows + 1, cols + 3, **kw)[1:, 2 : 2 + cols],
    "expanded_scalar": lambda rows, cols, **kw: torch.randn((), **kw).expand(rows, cols),
    "expanded_row": lambda rows, cols, **kw: torch.randn(cols, **kw).expand(rows, cols),
}


def assert_error_within_budget(what, ours, torchs, truth):
    """Err at most twice what PyTorch errs in the same dtype, plus one rounding of the largest number.

    Both errors are against float64. Written `assert error <= budget`, so that a NaN fails.
    """
    assert ours.shape == truth.shape, f"{what}: shape {tuple(ours.shape)}, want {tuple(truth.shape)}"
    assert ours.dtype == torchs.dtype, f"{what}: {ours.dtype}, want {torchs.dtype}"
    if truth.numel() == 0:
        return
    error = (ours.double() - truth).abs().max().item()
    rounding = torch.finfo(ours.dtype).eps * truth.abs().max().item()
    budget = 2 * (torchs.double() - truth).abs().max().item() + rounding
    assert error <= budget, f"{what}: error {error:.3g}, budget {budget:.3g}"


def value_and_gradient(function, x, dy):
    """function(x), and the gradient by x for dy."""
    x = x.detach().requires_grad_()
    y = function(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    return y.detach(), dx


@pytest.fixture(autouse=True)
def _seeded_and_poisoned():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device():
    return runtime.DEVICE


def pytest_collection_modifyitems(items):
    for item in items:
        cell = getattr(item, "cell", None)  # of a notebook
        if cell and "gpu" in cell.metadata.get("tags", ()) and runtime.DEVICE == "cuda":
            item.options["check"] = False  # measured live there, and recorded where there is no GPU
        parameters = item.name.partition("[")[2].lower()
        if not runtime.HAS_TRITON and ("triton" in parameters or item.get_closest_marker("triton")):
            item.add_marker(pytest.mark.skip(reason="needs Triton"))
        if item.get_closest_marker("gpu") and runtime.DEVICE == "cpu":
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_terminal_summary(terminalreporter):
    """Say what ran. nbval counts cells, so the notebooks are counted by their files."""
    ran = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, []) if r.when == "call"]
    cells = [r for r in ran if ".ipynb" in r.nodeid]
    browser = [r for r in ran if "browser" in r.keywords]
    notebooks = sorted({r.nodeid.partition("::")[0] for r in cells})
    skipped = len(terminalreporter.stats.get("skipped", []))
    terminalreporter.write_line(
        f"ran: {len(ran) - len(cells) - len(browser)} tests, {len(notebooks)} notebooks ({len(cells)} cells), "
        f"{len(browser)} browser tests; skipped: {skipped}"
    )
