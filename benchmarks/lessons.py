"""How fast the lessons answer: `make bench`. Figures for a note, not for a test; each is a median with its spread.

redraw          knob event to new SVG, in Python
key             key press to changed picture, in Chromium under JupyterLab
first widget    a fresh Python until the first timeline is built, over the time of the imports alone
nbval           one notebook under nbval, start of pytest included
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from rawgrad import scenarios, widgets  # noqa: E402


def report(name: str, seconds: list[float], unit: float = 1000, suffix: str = "ms") -> None:
    low, middle, high = (f(seconds) * unit for f in (min, statistics.median, max))
    print(f"{name:44} median {middle:8.1f} {suffix}   {low:.1f} to {high:.1f}   n = {len(seconds)}", flush=True)


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def turn(control, value) -> None:
    control.value = value


def redraws() -> None:
    """Every option of each widget's first knob, by both kernels, at the most backwards."""
    for name, knob, kernels in (
        ("version_timeline", "before the Function", "who writes"),
        ("gradient_path", "before the Function", "who writes"),
        ("memory_strip", "what follows y", "kernel"),
        ("rotary_strip", "what follows y", "kernel"),
        ("siblings", "P, beside f", "kernel"),
        ("memory_meter", "way to save", "kernel"),
    ):
        widget, seconds = getattr(widgets, name)(), []
        if "backwards" in widget.controls:
            turn(widget.controls["backwards"], scenarios.MOST_BACKWARDS)
        for kernel in ("the Triton kernel", "the CUDA kernel"):
            turn(widget.controls[kernels], kernel)
            options = [value for _, value in widget.controls[knob].options]
            seconds += [timed(partial(turn, widget.controls[knob], value)) for value in options[1:] + options[:1]]
        report(f"redraw, {name}", seconds)


def keys() -> None:
    import test_browser
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        lab = test_browser.Lab(Path(folder))
        try:
            chromium = playwright.chromium.launch(executable_path=test_browser.CHROMIUM, args=test_browser.FLAGS)
            page = test_browser.open_notebook(chromium, lab, test_browser.NOTEBOOK)
            test_browser.run_all(page)
            play = test_browser.cell(page, "free-play")
            page.wait_for_timeout(1000)
            # The clock runs in the page: from the key's own event to the changed title.
            page.evaluate(
                """() => { window.times = []; let pressed = null;
                     document.addEventListener('keydown', () => { pressed = performance.now(); }, true);
                     const root = document.querySelector('.jp-Cell.jp-mod-active');
                     let title = root.querySelector('svg title').textContent;
                     new MutationObserver(() => { const now = root.querySelector('svg title')?.textContent;
                       if (now && now !== title) { title = now; window.times.push(performance.now() - pressed); } })
                       .observe(root, {childList: true, subtree: true, characterData: true}); }"""
            )
            buttons = play.locator("button")
            for number in [1, 2, 3, 0] * 8:
                buttons.nth(number).focus()
                page.keyboard.press("Enter")
                page.wait_for_timeout(250)
            report("key to changed picture, free play", [t / 1000 for t in page.evaluate("() => window.times")])
            chromium.close()
        finally:
            lab.stop()


def first_widget() -> None:
    imports = "import rawgrad; from rawgrad import exercises, look, scenarios, widgets"
    build = f"{imports}; widgets.version_timeline(backwards=3)._repr_mimebundle_()"
    run = {name: [] for name in (imports, build)}
    for _ in range(5):
        for code, seconds in run.items():
            seconds.append(timed(partial(subprocess.run, [sys.executable, "-c", code], check=True)))
    report("imports, in a fresh Python", run[imports], 1, "s ")
    report("first widget, in a fresh Python", run[build], 1, "s ")
    print(f"first widget over imports                    {statistics.median(run[build]) / statistics.median(run[imports]):.2f}")


def notebooks() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAWGRAD_ANSWERS"}
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        command = [sys.executable, "-m", "pytest", "-q", str(notebook)]
        run = partial(subprocess.run, command, cwd=ROOT, env=environment, check=True, capture_output=True)
        report(f"nbval, {notebook.stem}", [timed(run) for _ in range(3)], 1, "s ")


def doctor() -> None:
    """The whole examination of square, by each backend at [8, 8], and how it grows."""
    import torch

    import rawgrad

    for backend, size in (("triton", 8), ("cuda", 8), ("torch", 8), ("cuda", 16), ("cuda", 32)):
        x = torch.linspace(-1, 1, size * size).view(size, size).requires_grad_()
        square = partial(rawgrad.square, backend=backend)
        rawgrad.examine(square, (x,), torch.square)
        run = partial(rawgrad.examine, square, (x,), torch.square)
        report(f"examine square, {backend}, [{size}, {size}]", [timed(run) for _ in range(3)], 1, "s ")


if __name__ == "__main__":
    redraws()
    doctor()
    keys()
    first_widget()
    notebooks()
