"""JupyterLab as `make lab` starts it, in a real Chromium: run all, every knob by keyboard, what is kept."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from conftest import CHROMIUM

from rawgrad import figures, scenarios, widgets

if CHROMIUM is None:
    # Under CI the browser tests fail without a browser; elsewhere they say what to install.
    if "CI" in os.environ:
        pytest.fail("no Chromium here: apt install chromium", pytrace=False)
    pytest.skip("no Chromium here: apt install chromium", allow_module_level=True)

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parent.parent
ARTEFACTS = ROOT / "tests" / "artefacts"
NOTEBOOK = "02_version_bumps_from_views.ipynb"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PROVOKED = """
from rawgrad.widgets import Knobs

def draw(n):
    if n == 2:
        raise ValueError("two is <not> drawn")
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"><title>state {n}</title></svg>', str(n)

Knobs(draw, {"n": [1, 2, 3]})
"""


class Lab:
    """A server over a copy of the tree's tools and notebooks, started as `make lab` does, without a browser."""

    def __init__(self, root: Path):
        self.work = root / "work"
        for folder in ("tools", "notebooks"):
            shutil.copytree(ROOT / folder, root / folder)
        environment = {
            **os.environ,
            "CI": "true",
            "JUPYTER_CONFIG_DIR": str(root / "config"),
            "JUPYTER_DATA_DIR": str(root / "data"),
        }
        environment["JUPYTERLAB_WORKSPACES_DIR"] = str(root / "workspaces")
        self.log = (root / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(root / "tools" / "lab.py"), "--expose-app-in-browser"],
            stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment,
        )  # fmt: skip
        self.first_line = self.process.stdout.readline()
        self.address = re.search(r"http://127.0.0.1:\d+/lab/tree/([\w.]+)\?token=\w+", self.first_line)[0]

    def url(self, notebook: str) -> str:
        """A fresh workspace with one notebook in it."""
        return re.sub(r"/lab/tree/[\w.]+\?", f"/lab/workspaces/auto-{time.time_ns()}/tree/{notebook}?reset&", self.address)

    def stop(self) -> float:
        """One Ctrl-C; how long it takes."""
        start = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)
        return time.monotonic() - start


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    if lab.process.poll() is None:
        lab.process.kill()
        lab.process.wait()
    lab.process.stdout.close()
    lab.log.close()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


def of_ours(message) -> bool:
    """A console error that is not JupyterLab's own (it asks for files that need not be there)."""
    return message.type == "error" and "Failed to load resource" not in message.text


def open_notebook(browser, lab: Lab, name: str) -> Page:
    """Open a notebook and wait until its kernel is idle. The page collects its own errors."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda message: page.errors.append(message.text) if of_ours(message) else None)
    page.goto(lab.url(name))
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    page.wait_for_function(
        "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'", timeout=60_000
    )
    return page


def run_all(page: Page) -> None:
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
    page.wait_for_function(
        """() => { const cells = window.jupyterapp.shell.currentWidget.content.widgets.filter(c => c.model.type === 'code');
                   return cells.every(c => c.model.executionCount !== null); }""",
        timeout=120_000,
    )


def cell(page: Page, id_: str):
    """The cell of that id, scrolled into view (JupyterLab renders only what is near)."""
    index = page.evaluate(
        """async id => { const notebook = window.jupyterapp.shell.currentWidget.content;
                   const index = notebook.widgets.findIndex(c => c.model.sharedModel.id === id);
                   notebook.activeCellIndex = index; await notebook.scrollToItem(index, 'start'); return index; }""",
        id_,
    )
    assert index >= 0, id_
    found = page.locator(f".jp-Cell[data-windowed-list-index='{index}']")
    found.scroll_into_view_if_needed()
    return found


def marked(where) -> list[str]:
    """The words in the hatched cells of a strip."""
    return where.locator("svg path.hatch + text").all_text_contents()


def shows(page: Page, where, svg: str) -> None:
    """Wait until the live picture in `where` is this one, element by element."""
    page.wait_for_function(
        """([root, svg]) => { const wanted = document.createElement('template'); wanted.innerHTML = svg;
                              const live = root.querySelector('svg:has(title)');
                              return live?.isEqualNode(wanted.content.firstElementChild) === true; }""",
        arg=[where.element_handle(), svg], timeout=15_000,
    )  # fmt: skip


def ran(browser, lab: Lab, notebook: str):
    page = open_notebook(browser, lab, notebook)
    run_all(page)
    yield page
    page.close()


@pytest.fixture(scope="module")
def start(browser, lab):
    yield from ran(browser, lab, "00_start_here.ipynb")


@pytest.fixture(scope="module")
def prints(browser, lab):
    yield from ran(browser, lab, "01_stale_prints.ipynb")


@pytest.fixture(scope="module")
def reuse(browser, lab):
    yield from ran(browser, lab, "03_memory_reuse.ipynb")


@pytest.fixture(scope="module")
def saving(browser, lab):
    yield from ran(browser, lab, "04_saving_memory_safely.ipynb")


@pytest.fixture(scope="module")
def page(browser, lab):
    yield from ran(browser, lab, NOTEBOOK)


def test_lab_prints_its_address_and_opens_a_copy_without_outputs(lab, browser):
    assert lab.first_line.startswith("rawgrad: http://127.0.0.1:")
    assert "stop with Ctrl-C" in lab.first_line
    page = open_notebook(browser, lab, NOTEBOOK)
    assert page.locator(".jp-OutputArea-output").count() == 0
    assert page.locator("text=Would you like to get notified").count() == 0
    page.close()


OPENED = ["start", "prints", "page", "reuse", "saving"]  # 00 to 04


@pytest.mark.parametrize("notebook", OPENED)
def test_run_all_shows_every_output_and_no_error(notebook, request):
    page = request.getfixturevalue(notebook)
    outputs = page.evaluate(
        """() => window.jupyterapp.shell.currentWidget.content.widgets.filter(c => c.model.type === 'code').map(c => [
                 c.model.sharedModel.id, c.model.outputs.toJSON().map(o => o.output_type + ':' + (o.name ?? ''))])"""
    )
    assert len(outputs) >= 18
    for id_, kinds in outputs:
        assert not any("error" in kind or "stderr" in kind for kind in kinds), id_
    assert page.errors == []


def next_option(page: Page) -> None:
    """Take the next option of the dropdown that has the focus. (JupyterLab takes a bare arrow key for itself.)"""
    choose(page, page.evaluate("document.activeElement.selectedIndex") + 1, "Space", "ArrowDown", "Enter")


def first_option(page: Page) -> None:
    choose(page, 0, "Home")


def choose(page: Page, place: int, *keys: str) -> None:
    """By these keys; once more where the list was slower to open than they came, as on a busy machine."""
    for _ in range(3):
        for key in keys:
            page.keyboard.press(key)
        page.wait_for_timeout(20)
        if page.evaluate("document.activeElement.selectedIndex") == place:
            return
        page.wait_for_timeout(1000)
        if page.evaluate("document.activeElement.selectedIndex") == place:
            return
    raise AssertionError(f"the keys {keys} do not reach option {place}")


def test_every_knob_of_free_play_answers_the_keyboard(page):
    """Tab from knob to knob; every option of every knob, one key at a time; the picture says what the record says."""
    play = cell(page, "free-play")
    state = {"before": "nothing", "writer": "a kernel", "repair": "none", "hook": "none", "backwards": 0}
    options = {"before": scenarios.BEFORE, "writer": scenarios.WRITERS, "repair": scenarios.REPAIRS, "hook": scenarios.HOOKS}

    def picture() -> str:
        return figures.version_timeline(scenarios.version_timeline(**state))[0]

    shows(page, play, picture())
    seen = [picture()]
    play.locator("select").first.focus()
    next_option(page)
    state["before"] = "view(64)"
    shows(page, play, picture())
    for _ in options:
        page.keyboard.press("Tab")  # writer, repair, hook, the first of the buttons
    for number in (1, 2, 3):
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        state["backwards"] = number
        shows(page, play, picture())
        seen.append(picture())
    assert "raises at backward 3.</title>" in seen[-1]
    assert len(set(seen)) == 4
    for index, (name, values) in enumerate(options.items()):
        play.locator("select").nth(index).focus()
        first_option(page)
        for value in values:
            state[name] = value
            shows(page, play, picture())
            if value != list(values)[-1]:
                next_option(page)
        first_option(page)
        state[name] = next(iter(values))
        shows(page, play, picture())
    # Reset is the next stop behind the buttons
    play.locator("button", has_text="3").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    state["backwards"] = 0
    shows(page, play, picture())
    assert page.errors == []


def test_guided_widgets_answer_the_keyboard(page):
    timeline = cell(page, "timeline-view")
    buttons = timeline.locator("button")
    buttons.first.focus()
    for number in (1, 2, 3):
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        record = scenarios.version_timeline("view(64)", backwards=number)
        shows(page, timeline, figures.version_timeline(record, ["versions", "values"])[0])
    path = cell(page, "path")
    path.locator("button").first.focus()
    for before in ("view(64)", "X[:]", "clone()"):
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        shows(page, path, figures.gradient_path(scenarios.gradient_path(before))[0])
    assert page.errors == []


@pytest.mark.parametrize(
    ("id_", "record", "consumers", "repairs"),
    [
        ("free-play", scenarios.memory_strip, scenarios.CONSUMERS, scenarios.READINGS),
        ("rotary-free-play", scenarios.rotary_strip, scenarios.ROTARY_CONSUMERS, scenarios.ROTARY_READINGS),
    ],
    ids=["triple", "rotary"],
)
def test_every_consumer_with_every_repair_by_keyboard(prints, id_, record, consumers, repairs):
    """Lesson 01's free play: the picture is the record's, and the hatched cells are those that it calls wrong."""
    play = cell(prints, id_)
    consumer, repair = play.locator("select").nth(0), play.locator("select").nth(1)
    for number, what in enumerate(consumers):
        consumer.focus()
        if number:
            next_option(prints)
        for index, how in enumerate(repairs):
            repair.focus()
            if index:
                next_option(prints)
            else:
                first_option(prints)
            strip = record(what, how)
            shows(prints, play, figures.memory_strip(strip)[0])
            steps = figures._steps(strip.kernel, 32)
            wrong = {place for place, bad in zip(strip.kernel, strip.wrong, strict=True) if bad and place < 32}
            assert sorted(marked(play)) == sorted(steps[place] for place in wrong), (what, how)
    kernels = play.locator("select").nth(2)
    for kernel in list(scenarios.KERNELS)[1:]:
        kernels.focus()
        next_option(prints)
        shows(prints, play, figures.memory_strip(record(what, how, kernel))[0])
    assert prints.errors == []


@pytest.mark.parametrize(
    ("notebook", "scenario", "figure", "knobs"),
    [
        ("reuse", scenarios.siblings, figures.siblings,
         {"beside": [*scenarios.BESIDE, scenarios.RESIDUAL], "first": scenarios.ORDERS, "repair": list(scenarios.BACKWARDS)}),
        ("saving", scenarios.saving, figures.memory_meter,
         {"way": list(scenarios.WAYS), "situation": scenarios.SITUATIONS}),
    ],
    ids=["who_holds", "meter"],
)  # fmt: skip
def test_every_knob_of_the_memory_widgets_by_keyboard(notebook, scenario, figure, knobs, request):
    """Every option of each knob, from knob to knob by Tab; the picture is the record's, and it hatches what is wrong."""
    page = request.getfixturevalue(notebook)
    play = cell(page, "free-play")
    state = {name: values[0] for name, values in knobs.items()}
    shows(page, play, figure(scenario(**state))[0])
    dropdowns = play.locator("select")
    place = 0
    for name, values in knobs.items():
        if name == "first":  # two short options are buttons
            buttons = play.locator("button")
            buttons.first.focus()
            for value, key in ((values[1], "Tab"), (values[0], "Shift+Tab")):
                page.keyboard.press(key)
                page.keyboard.press("Enter")
                state[name] = value
                shows(page, play, figure(scenario(**state))[0])
            continue
        dropdowns.nth(place).focus()
        first_option(page)
        for value in values:
            state[name] = value
            svg = figure(scenario(**state))[0]
            shows(page, play, svg)
            assert len(marked(play)) == svg.count('class="hatch"'), state
            if value != values[-1]:
                next_option(page)
        place += 1
    assert page.errors == []


def test_every_view_and_the_graph_by_keyboard(start):
    strip = cell(start, "strip")
    strip.locator("select").focus()
    for number, view in enumerate(scenarios.VIEWS):
        if number:
            next_option(start)
        shows(start, strip, figures.memory_strip(scenarios.view_strip(view))[0])
    for id_, retain in (("graph", False), ("graph-retained", True)):
        graph = cell(start, id_)
        graph.locator("button").first.focus()
        for backwards in (1, 2):
            start.keyboard.press("Tab")
            start.keyboard.press("Enter")
            shows(start, graph, figures.graph(scenarios.graph(retain, backwards))[0])
    assert start.errors == []


def test_an_answer_is_taken_by_keyboard_and_its_outcome_follows(page, lab):
    asked = cell(page, "p1")
    asked.locator("button").first.focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    cell(page, "p1-outcome").locator("text=It is A: 0. You predicted B: 1.").wait_for(timeout=15_000)
    assert json.loads((lab.work / "answers.json").read_text())["02-P1"] == ["B", "B"]


@pytest.mark.parametrize("notebook", OPENED)
def test_every_widget_turns_at_1024_pixels_and_no_output_shuts_anybody_out(notebook, request):
    """Each value of each knob of each widget, and Reset, with the picture that the same widget has here; axe-core on every
    widget and on one output of every other kind; a screenshot of each widget is kept."""
    page = request.getfixturevalue(notebook)
    page.set_viewport_size({"width": 1024, "height": 900})
    cells = page.evaluate(
        """() => window.jupyterapp.shell.currentWidget.content.widgets.filter(c => c.model.type === 'code')
                 .map(c => [c.model.sharedModel.id, c.model.sharedModel.source, c.model.outputs.length])"""
    )
    turned, seen = 0, set()
    for id_, source, outputs in cells:
        kind = source.partition("(")[0]
        if not outputs or (kind in seen and not kind.startswith("widgets.")):
            continue
        seen.add(kind)
        where = cell(page, id_)
        output = where.locator(".jp-OutputArea-output").first
        output.wait_for(timeout=15_000)
        if source.startswith("widgets."):
            here = eval(source, {"widgets": widgets})
            knobs = list(zip(where.locator("select, .widget-toggle-buttons").all(), here.controls.values(), strict=True))
            turns = [(knob, control, index) for knob, control in knobs for index in range(len(control.options))]
            where.locator("button", has_text="Reset").click()
            shows(page, where, here._svg)
            # The front end holds a change back until the one before is answered, but sends a click at once: before Reset, a
            # turn that shows.
            for knob, control, index in [*turns, (*knobs[0], 0)]:
                control.index = index
                if hasattr(control, "button_style"):
                    knob.locator("button").nth(index).click()
                else:
                    knob.select_option(index=index)
                shows(page, where, here._svg)
            turned += len(turns)
            picture = output.locator("svg:has(title)").first
            picture.screenshot(path=ARTEFACTS / f"lab-{notebook}-{id_}.png")
            where.locator("button", has_text="Reset").click()
            here.reset()
            shows(page, where, here._svg)
            box, room = picture.bounding_box(), where.bounding_box()
            assert box["x"] + box["width"] <= room["x"] + room["width"] + 1, f"{id_} is clipped at 1024 pixels"
        found = Axe().run(page, context=".jp-Cell.jp-mod-active .jp-OutputArea")
        serious = [v for v in found.response["violations"] if v["impact"] in ("serious", "critical")]
        if id_ == "plot":  # JupyterLab gives matplotlib's image no alternative; the table above it says the same
            serious = [v for v in serious if v["id"] != "image-alt"]
        assert serious == [], (id_, [(v["id"], [n["html"][:200] for n in v["nodes"]]) for v in serious])
    assert turned > 5
    assert page.errors == []


def test_an_error_in_a_redraw_shows_its_sentence(browser, lab):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(PROVOKED, id="provoked")])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, lab.work / "provoked.ipynb")
    page = open_notebook(browser, lab, "provoked.ipynb")
    run_all(page)
    where = cell(page, "provoked")
    where.locator("button").first.focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    where.locator("[role=alert]", has_text="ValueError: two is <not> drawn").wait_for(timeout=15_000)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    shows(page, where, '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"><title>state 3</title></svg>')
    assert page.errors == []
    page.close()
    (lab.work / "provoked.ipynb").unlink()


def test_tomorrow_the_copy_shows_pictures_and_the_kept_answer(page, browser, lab):
    """Save, stop the kernel, open again in another window: pictures in place of widgets, and the answer at the next run."""
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    saved = lab.work / NOTEBOOK
    for _ in range(100):
        if "data:image/svg+xml" in saved.read_text():
            break
        time.sleep(0.1)
    text = saved.read_text()
    assert "widget-view" not in text
    assert text.count("data:image/svg+xml") >= 8
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    tomorrow = open_notebook(browser, lab, NOTEBOOK)
    image = cell(tomorrow, "free-play").locator("img[src^='data:image/svg']")
    image.wait_for(timeout=15_000)
    assert image.evaluate("i => i.naturalWidth") > 500
    assert tomorrow.locator("text=model not found").count() == 0
    run_all(tomorrow)
    cell(tomorrow, "p1-outcome").locator("text=You predicted B: 1.").wait_for(timeout=15_000)
    assert tomorrow.errors == []
    tomorrow.close()


def test_the_presenters_page_has_nothing_beside_the_notebook(browser, lab):
    """At 1280 pixels and a zoom of 125 %, a picture has its own size: 18 pixels of type become 22."""
    page = browser.new_page(viewport={"width": 1024, "height": 640}, device_scale_factor=1.25)
    page.goto(lab.address.replace("/lab/tree/", "/doc/tree/"))
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    assert page.locator(".jp-DirListing").count() == 0 or not page.locator(".jp-DirListing").first.is_visible()
    assert page.locator(".jp-Notebook").bounding_box()["width"] > 900
    page.close()


def test_one_ctrl_c_stops_it(lab):
    assert lab.stop() < 15
    assert lab.process.returncode == 0
