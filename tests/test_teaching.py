"""The teacher's page says what the notebooks say: questions, letters, minutes, headings, verdicts, cases."""

import contextlib
import io
import re
import sys
from pathlib import Path

import nbformat
import pytest
import test_cases as cases
import test_exercises as known
import torch
from torch.autograd.function import once_differentiable

from rawgrad import exercises, widgets

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import colab  # noqa: E402

PAGE = (ROOT / "docs" / "teaching.md").read_text()
NOTEBOOKS = {path.name[:2]: nbformat.read(path, as_version=4) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}


def rows(*header: str, within: str = PAGE) -> list[list[str]]:
    """The rows of every table with that header."""
    found = []
    for table in re.findall(r"(?:^\|.*\|\n)+", within, flags=re.MULTILINE):
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        if cells[0] == list(header):
            assert all(len(row) == len(header) for row in cells), cells[0]
            found += cells[2:]
    return found


def sections(level: str) -> dict[str, str]:
    """The page's parts under headings of that level, by their titles, each to the next heading of its level or above."""
    above = "^" + "#?" * (len(level) - 1) + "# "
    parts = re.split(rf"^{level} (.+)\n", PAGE, flags=re.MULTILINE)
    texts = (re.split(above, text, maxsplit=1, flags=re.MULTILINE)[0] for text in parts[2::2])
    return dict(zip(parts[1::2], texts, strict=True))


def headings(number: str) -> dict[str, int | None]:
    """A notebook's headings, without the minutes that they state, and those minutes."""
    text = "\n".join(cell.source for cell in NOTEBOOKS[number].cells if cell.cell_type == "markdown")
    found = re.findall(r"^## (.+?)(?: \((\d+) minutes\b[^)]*\))?$", text, flags=re.MULTILINE)
    return {title: int(minutes) if minutes else None for title, minutes in found}


def asked() -> dict[str, tuple[str, ...]]:
    """The options of every prediction, as the notebooks' committed outputs letter them."""
    found = {}
    for notebook in NOTEBOOKS.values():
        for cell in notebook.cells:
            for name in re.findall(r'^predict\(\s*"([^"]+)"', cell.source):
                found[name] = tuple(re.findall(r"^  [A-H]  (.+)$", cell.outputs[-1].data["text/plain"], flags=re.MULTILINE))
    return found


def judged() -> dict[str, str]:
    """The right letter of every prediction, from the committed outcomes."""
    found = {}
    for notebook in NOTEBOOKS.values():
        for cell in notebook.cells:
            for name in re.findall(r'\boutcome\(\s*"([^"]+)"', cell.source):
                found[name] = re.match(r"It is ([A-H]): ", cell.outputs[-1].data["text/plain"])[1]
    return found


PREDICTIONS = rows("prediction", "option", "behind it", "say")


def test_there_are_predictions_to_compare():
    assert len(asked()) >= 29
    assert asked().keys() == judged().keys()


def test_every_option_of_every_prediction_has_its_row():
    there = [(name, *re.fullmatch(r"\**([A-H])\** `(.+)`", option).groups()) for name, option, _, _ in PREDICTIONS]
    want = [
        (name, letter, text) for name, options in asked().items() for letter, text in zip("ABCDEFGH", options, strict=False)
    ]
    assert there == want


def test_the_letter_in_bold_is_the_one_that_happened():
    bold = {name: option[2] for name, option, _, _ in PREDICTIONS if option.startswith("**")}
    assert bold == judged()
    assert sum(option.startswith("**") for _, option, _, _ in PREDICTIONS) == len(bold)


def test_every_wrong_letter_has_a_belief_and_every_letter_something_to_say():
    for name, option, belief, say in PREDICTIONS:
        assert bool(belief) != option.startswith("**"), (name, option)
        assert 10 < len(say) < 160, (name, option)


def test_a_prediction_stands_under_its_notebook():
    for number in NOTEBOOKS:
        (text,) = [text for title, text in sections("##").items() if title.startswith(f"{number} ")]
        names = {row[0][:2] for row in rows("prediction", "option", "behind it", "say", within=text)}
        assert names == {number}


def test_no_other_prediction_is_named():
    assert set(re.findall(r"\b0\d-P\d+\b", PAGE)) == asked().keys()


@pytest.mark.parametrize("number", NOTEBOOKS)
def test_minutes_are_those_of_the_notebook(number):
    title = NOTEBOOKS[number].cells[0].source.partition("\n")[0].removeprefix("# ")
    text = sections("##")[title]
    stated = re.search(r"\*\*(\d+) minutes", NOTEBOOKS[number].cells[0].source)[1]
    assert re.search(r"\*\*Minutes\.\*\* The notebook says (\d+)", text)[1] == stated
    timed = {title: minutes for title, minutes in headings(number).items() if minutes and title[0].isdigit()}
    assert {title: int(minutes) for title, minutes in rows("section", "minutes", within=text)} == timed


@pytest.mark.parametrize("number", NOTEBOOKS)
def test_every_notebook_has_its_parts(number):
    (text,) = [text for title, text in sections("##").items() if title.startswith(f"{number} ")]
    for part in ("**Minutes.**", "**Aim.**", "**Where groups stall**\n\n1. *", "\n2. *", "**Cut.**"):
        assert part in text, part
    assert "\n3. " not in text


PLAN = ("minutes", "notebook", "sections", "what you do")
LENGTHS = {"60 minutes": 60, "Two hours": 120, "Half a day": 240, "Home": 175}


@pytest.mark.parametrize("plan", LENGTHS)
def test_a_plan_adds_up_and_names_sections_that_exist(plan):
    steps = rows(*PLAN, within=sections("###")[plan])
    assert sum(int(minutes) for minutes, *_ in steps) == LENGTHS[plan]
    for _, number, named, _ in steps:
        assert bool(number) == bool(named)
        for section in filter(None, named.split("; ")):
            assert section in headings(number), (number, section)


def as_given(exercise: str):
    """The stub of a notebook, run after the imports."""
    notebook = NOTEBOOKS[exercise[:2]]
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    at = next(n for n, cell in enumerate(cells) if f'check("{exercise}"' in cell.source)
    names: dict = {}
    for line in cells[0].source.splitlines():
        if line.startswith(("import", "from")):
            exec(line, names)
    exec(cells[at - 1].source, names)
    return names[re.search(r'check\("[^"]+", (\w+)\)', cells[at].source)[1]]


FORMULA = "lambda row, col, strides, offset: "
BROUGHT = {
    ("00.1 place", "without the offset"): eval(FORMULA + "row * strides[0] + col * strides[1]"),
    ("00.1 place", "the two strides exchanged"): eval(FORMULA + "offset + row * strides[1] + col * strides[0]"),
    ("01.1 two strides", "the row stride alone"): known.two_strides("row * row_stride + col"),
    ("01.1 two strides", "a hidden `contiguous()`"): known.two_strides("i", torch.Tensor.contiguous),
    ("01.1 two strides", "`3 * dy` in PyTorch"): lambda dy: 3 * dy,
    ("01.2 two slips", "one slip repaired"): known.SLIPS["one_slip_left"][0],
    ("01.2 two slips", "the minus lost"): known.SLIPS["turned_on"][0],
    ("01.3 turn back", "`clone()` first"): known.TURN_BACK["clone"][0],
    ("01.3 turn back", "the stride of the dimension forgotten"): known.TURN_BACK["dim_stride_forgotten"][0],
    ("01.3 turn back", "`empty_like(dy)` for dx"): known.TURN_BACK["dx_like_dy"][0],
    ("02.1 loud", "raises always"): known.always_raises,
    ("02.1 loud", "a clone of the result"): lambda ctx, dy: known.over_saved(ctx, dy).clone(),
    ("02.2 right", "`increment_version` kept from 02.1"): known.function(known.saves_x, known.announced),
    ("02.2 right", "saves a clone and writes over it"): known.function(known.saves_a_clone, known.over_saved),
    ("02.2 right", "doubles dy in place"): known.function(known.saves_x, known.doubles_dy),
    ("02.2 right", "one workspace for all backwards"): known.function(known.saves_x, known.keeps_a_workspace),
    ("03.1 beside", "announced by `increment_version(dy)`"): known.BESIDE["announced"][0],
    ("03.1 beside", "a clone of the result"): known.BESIDE["clone_handed_out"][0],
    ("03.1 beside", "writes to new memory, returns dy"): known.BESIDE["hands_out_dy"][0],
    ("04.1 one shot", "the flag alone"): known.one_shot(announced=False, graph=False),
    ("04.1 one shot", "announced alone"): known.one_shot(flag=False, graph=False),
    ("04.1 one shot", "`@once_differentiable`"): once_differentiable(known.one_shot(graph=False)),
    ("04.1 one shot", "new memory"): known.one_shot(write=False),
    ("05.1 guard", "`dy.clone()`"): cases.clones,
    ("05.1 guard", "raises for what is not contiguous"): cases.refuses,
    ("05.2 rows", "`ones` for `empty`"): cases.ones,
}
ANSWERS = rows("exercise", "answer that people bring", "verdict")


@pytest.mark.parametrize(("exercise", "answer", "verdict"), ANSWERS, ids=[f"{row[0]}, {row[1]}" for row in ANSWERS])
def test_an_answer_gets_the_verdict_that_the_page_says(exercise, answer, verdict):
    said = exercises.check(exercise, as_given(exercise) if answer == "as given" else BROUGHT[exercise, answer])
    assert not said.passed
    assert re.fullmatch(".+".join(map(re.escape, verdict.strip("`").split("..."))), said.evidence), said.evidence


def test_every_exercise_has_its_wrong_answers():
    assert {row[0] for row in ANSWERS} == exercises.EXERCISES.keys()
    assert BROUGHT.keys() == {tuple(row[:2]) for row in ANSWERS if row[1] != "as given"}


CASES = re.findall(r"^### (Case \w+)\n.*?```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("code", "said"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_case_prints_its_symptom(code, said):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    assert out.getvalue() == said


def test_there_are_three_cases():
    assert [case[0] for case in CASES] == ["Case one", "Case two", "Case three"]


def test_links_lead_somewhere_and_commands_exist():
    links = {link for link in re.findall(r"\]\(([^)]+)\)", PAGE)}
    assert links >= {"handout.pdf", "handout.html", "rooms.md"}
    for link in links:
        assert (ROOT / "docs" / link).exists(), link
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([a-z]+)\b", PAGE)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_a_widget_says_its_table_as_the_page_says():
    (line,) = re.findall(r"`(print\(widgets\.[^`]+)`", PAGE)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(line, {"widgets": widgets})
    assert "step  Python reads  value  kernel reads  value" in out.getvalue()


def test_no_cell_needs_the_network():
    """So that the page may say so. The first cell does on Colab, and nowhere else: test_colab."""
    for notebook in NOTEBOOKS.values():
        for cell in notebook.cells:
            if cell.cell_type == "code":
                source = colab.OLD_INSTALL.sub("", cell.source)
                assert not re.search(r"https?:|urllib|requests|download|pip install", source), cell.id


def test_house_style():
    prose = re.sub(r"```.*?```|`[^`]*`", "", PAGE, flags=re.DOTALL)
    assert not re.search(r"\b(simply|just|obviously|easy|easily)\b|!", prose)
