"""The pages of `make html`, opened from a folder with the network cut: every knob and every prediction, by keyboard."""

import base64
import gzip
import itertools
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import nbformat
import pytest
from test_browser import Axe, browser  # noqa: F401 (a fixture)

from rawgrad import widgets

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parent.parent
ARTEFACTS = ROOT / "tests" / "artefacts"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WIDTHS = (1024, 390)
NO_STORE = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no store', 'SecurityError'); }})"

each_lesson = pytest.mark.parametrize("lesson", [path.stem for path in NOTEBOOKS])
each_page = pytest.mark.parametrize("name", ["index", *(path.stem for path in NOTEBOOKS)])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The whole set, made as `make html` makes it."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, ROOT / "tools" / "pages.py", folder], check=True, timeout=600, capture_output=True)
    return folder


@pytest.fixture
def opened(site, browser):  # noqa: F811
    """Open a page with the network cut. At the end it has asked for nothing outside and complained of nothing."""
    contexts, seen = [], []

    def open_(name: str, script: str = "", **options):
        context = browser.new_context(**{"viewport": {"width": 1024, "height": 900}, **options})
        contexts.append(context)
        context.set_offline(True)
        context.add_init_script(script)
        page = context.new_page()
        page.on("request", lambda request: seen.append(request.url) if not re.match("(file|data):", request.url) else None)
        page.on("pageerror", lambda error: seen.append(str(error)))
        page.on("console", lambda message: seen.append(message.text))
        page.goto((site / f"{name}.html").as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()
    assert seen == []


def code_cells(lesson: str) -> list:
    notebook = nbformat.read(ROOT / "notebooks" / f"{lesson}.ipynb", as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def knob_cells(lesson: str) -> list:
    return [cell for cell in code_cells(lesson) if re.match(r"widgets\.\w+\(", cell.source)]


def words(svg: str) -> str:
    return "".join(ET.fromstring(svg).itertext())


def unfold(page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")


def turn(knob, place: int) -> None:
    """Take the option at `place`, by keyboard."""
    if knob.locator("select").count():
        knob.locator("select").focus()
        knob.page.keyboard.press("Home")
        for _ in range(place):
            knob.page.keyboard.press("ArrowDown")
    else:
        knob.locator("button").nth(place).focus()
        knob.page.keyboard.press("Enter")


def shows(widget, live) -> None:
    """Wait until the page shows what the live widget does: the words in its picture, and its table."""
    widget.page.wait_for_function(
        """([widget, table, picture]) => widget.querySelector('.words').textContent === table
                                        && widget.querySelector('svg').textContent === picture""",
        arg=[widget.element_handle(), live._table, words(live._svg)],
        timeout=15_000,
    )


def serious(page) -> list:
    """What axe-core finds on the whole page."""
    found = Axe().run(page).response
    assert found["passes"], "axe looked at nothing"
    bad = [violation for violation in found["violations"] if violation["impact"] in ("serious", "critical")]
    return [(violation["id"], [node["html"][:200] for node in violation["nodes"]]) for violation in bad]


@pytest.mark.parametrize("width", WIDTHS)
@each_page
def test_a_page_opens_from_a_folder_and_fits(opened, name, width):
    page = opened(name, viewport={"width": width, "height": 900})
    ARTEFACTS.mkdir(exist_ok=True)
    for state in ("folded", "unfolded"):
        assert page.evaluate("document.documentElement.scrollWidth") <= width, state
        page.screenshot(path=ARTEFACTS / f"{name}-{width}-{state}.png", full_page=True)
        unfold(page)
    assert serious(page) == []
    assert page.locator("main h1").count() == 1
    assert page.title().endswith(" · rawgrad")


@each_page
def test_a_dark_page_is_as_legible(opened, name):
    page = opened(name, color_scheme="dark")
    unfold(page)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 20, 22)"
    assert serious(page) == []


def test_every_lesson_is_reached_from_the_map(opened):
    page = opened("index")
    hrefs = page.locator("main .lessons a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert hrefs == [f"{path.stem}.html" for path in NOTEBOOKS]
    page.locator("main .lessons a").first.click()
    for path in NOTEBOOKS[1:]:
        page.locator("footer a", has_text="Next").click()
        assert page.locator("h1").text_content().startswith(path.name[:2])
    assert page.locator("footer a").count() == 0


@pytest.mark.parametrize("lesson", [path.stem for path in NOTEBOOKS if knob_cells(path.stem)])
def test_every_knob_answers_with_what_the_live_widget_shows(opened, lesson):
    """Every value of every knob of every widget, by keyboard on a phone; in free play also the corners of all knobs."""
    page = opened(lesson, viewport={"width": 390, "height": 844})
    unfold(page)
    cells = knob_cells(lesson)
    assert page.locator(".knobs").count() == len(cells) > 0
    for cell in cells:
        live = eval(cell.source, {"widgets": widgets})
        widget = page.locator(f"[data-cell='{cell.id}'] .knobs")
        controls, knobs = list(live.controls.values()), widget.locator(".knob").all()
        assert len(knobs) == len(controls)
        shows(widget, live)
        for knob, control in zip(knobs, controls, strict=True):
            assert knob.locator("option, button").all_text_contents() == [label for label, _ in control.options]
            for place, (_, value) in [*enumerate(control.options), (0, control.options[0])]:
                turn(knob, place)
                control.value = value
                shows(widget, live)
        for corner in itertools.product((0, -1), repeat=len(controls)) if len(controls) > 2 else ():
            for knob, control, end in zip(knobs, controls, corner, strict=True):
                turn(knob, end % len(control.options))
                control.value = control.options[end][1]
            shows(widget, live)
        widget.locator(".reset").focus()
        page.keyboard.press("Enter")
        live.reset()
        shows(widget, live)


@each_lesson
def test_all_states_of_a_knob_are_on_the_page(site, lesson):
    text = (site / f"{lesson}.html").read_text()
    packed = re.findall('<script type="application/octet-stream">(.*?)</script>', text)
    for cell, one in zip(knob_cells(lesson), packed, strict=True):
        data = json.loads(gzip.decompress(base64.b64decode(one)))
        live, count = eval(cell.source, {"widgets": widgets}), 1
        for control in live.controls.values():
            count *= len(control.options)
        assert len(data["states"]) == count


@each_lesson
@pytest.mark.parametrize("store", ["kept", "no store"])
def test_outputs_stay_folded_until_their_prediction_is_answered(opened, lesson, store):
    page = opened(lesson, NO_STORE if store == "no store" else "", viewport={"width": 390, "height": 844})
    cells = code_cells(lesson)
    asked = {re.search('"(.*?)"', cell.source)[1]: cell for cell in cells if cell.source.startswith("predict(")}
    assert page.locator(".prediction").count() == len(asked) > 0
    letters = {}
    for name, cell in asked.items():
        options = dict(re.findall(r"^  ([A-H])  (.*)$", cell.outputs[0].data["text/plain"], flags=re.MULTILINE))
        judging = next(c for c in cells if re.search(rf'outcome\(\s*"{name}"', c.source))
        what, _, _ = judging.outputs[-1].data["text/plain"].partition(" You have not predicted")
        folds = page.locator(f".fold[data-name='{name}']")
        outcome = page.locator(f"[data-cell='{judging.id}'] .fold[data-name='{name}'] .outcome")
        assert not outcome.is_visible()
        assert folds.evaluate_all("folds => folds.every(fold => !fold.open)")
        for letter, text in options.items():
            page.locator(f".prediction[data-name='{name}'] button[value={letter}]").focus()
            page.keyboard.press("Enter")
            tail = ", too." if what.startswith(f"It is {letter}: ") else f": {text}."
            assert outcome.text_content() == f"{what} You predicted {letter}{tail}"
            assert outcome.is_visible()
            assert folds.evaluate_all("folds => folds.every(fold => fold.open)")
            pressed = page.locator(f".prediction[data-name='{name}'] [aria-pressed=true]")
            assert pressed.evaluate_all("buttons => buttons.map(button => button.value)") == [letter]
        letters[name] = letter
    replay = page.locator(".replay").text_content().splitlines()
    assert [line.split()[0] for line in replay] == [*asked]
    assert all(re.search(r"you: A, then [B-H]  it is: [A-H]  you changed your mind$", line) for line in replay)
    page.screenshot(path=ARTEFACTS / f"{lesson}-390-answered.png", full_page=True)
    if store == "kept":
        page.reload()
        pressed = page.locator(".prediction [aria-pressed=true]")
        assert pressed.evaluate_all("buttons => buttons.map(button => button.value)") == list(letters.values())
        assert page.evaluate("[...document.querySelectorAll('.fold')].every(fold => fold.open)")
    page.locator("#forget").click()
    assert page.locator(".prediction [aria-pressed=true]").count() == 0
    assert page.locator(".replay").text_content().splitlines() == [f"{name}  you: no answer" for name in asked]
    assert page.evaluate("[...document.querySelectorAll('.fold')].every(fold => !fold.open)")


@each_lesson
def test_what_lies_between_a_prediction_and_its_outcome_is_folded(opened, lesson):
    """Counted in the notebook: an output belongs to the question that was asked last and is still open."""
    page = opened(lesson)
    expected, open_ = {}, []
    for cell in code_cells(lesson):
        if cell.source.startswith("predict("):
            open_.append(re.search('"(.*?)"', cell.source)[1])
        elif cell.outputs and open_:
            expected[cell.id] = open_[-1]
        judged = re.search(r'\boutcome\(\s*"([^"]+)"', cell.source)
        if judged:
            open_.remove(judged[1])
    folded = page.locator("[data-cell]:has(> .fold)")
    assert expected
    assert dict(folded.evaluate_all("outputs => outputs.map(o => [o.dataset.cell, o.firstChild.dataset.name])")) == expected


@each_lesson
def test_without_script_everything_can_be_read(opened, lesson):
    page = opened(lesson, java_script_enabled=False)
    assert page.locator("noscript p").is_visible()
    fold = page.locator(".fold").first
    assert not fold.locator("> :nth-child(2)").is_visible()
    fold.locator("summary").click()
    assert fold.locator("> :nth-child(2)").is_visible()
    for widget in page.locator(".knobs").all():
        assert not widget.locator(".controls").is_visible()
        assert widget.locator("svg").count() == 1
        assert widget.locator(".words").text_content()


def test_the_solutions_are_folded(opened):
    page = opened("00_start_here")
    solution = page.locator("details:has(> summary:text-is('Solution 00.1'))")
    assert not solution.locator("pre").is_visible()
    solution.locator("summary").click()
    assert "offset + row" in solution.locator("pre").text_content()
    assert solution.locator("pre").is_visible()


def test_a_browser_that_cannot_unpack_says_so(opened):
    page = opened("00_start_here", "delete window.DecompressionStream")
    widget = page.locator(".knobs").last
    turn(widget.locator(".knob"), 1)
    widget.locator(".words", has_text="This browser cannot unpack the pictures").wait_for(timeout=5_000)
