"""Notebooks: as given every exercise waits, solved every one passes; what is committed is normalised and in house style.

nbval, in the same pytest run, executes each notebook as given and compares every output with the committed one.
"""

import ast
import copy
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

import nbformat
import pytest

from rawgrad import runtime

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import notebooks as tool  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_LINES = 15  # of a code cell that the reader sees
TAGS = {"setup", "exercise", "check", "solution", "gpu", "nbval-ignore-output"}

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def tags(cell) -> set[str]:
    return set(cell.metadata.get("tags", ()))


def read(path):
    return nbformat.read(path, as_version=4)


def solve(notebook) -> int:
    """Put each folded solution where its stub stands; how many there are."""
    by_id, stubs = {cell.id: cell for cell in notebook.cells}, 0
    for cell in notebook.cells:
        if "exercise" not in tags(cell):
            continue
        text = by_id[cell.id.replace("-stub", "-solution")].source
        (solution,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        assert signature(solution) == signature(cell.source), f"{cell.id}: the solution defines something else"
        assert ast.dump(ast.parse(solution)) != ast.dump(ast.parse(cell.source)), f"{cell.id}: the stub is the solution"
        cell.source, stubs = solution, stubs + 1
    return stubs


def signature(source: str) -> list[str]:
    """Names, arguments and bases of what `source` defines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            found.append(f"{node.name}({ast.unparse(node.args)})")
        elif isinstance(node, ast.ClassDef):
            found.append(f"{node.name}({', '.join(map(ast.unparse, node.bases))})")
    return found


def verdicts(notebook) -> list[str]:
    return [cell.outputs[0].data["text/plain"].partition(",")[0] for cell in notebook.cells if "check" in tags(cell)]


@each_notebook
def test_as_given_every_exercise_waits(path):
    notebook = read(path)  # nbval runs it, and its committed outputs are these
    stubs = sum("exercise" in tags(cell) for cell in notebook.cells)
    assert verdicts(notebook) == ["not yet"] * stubs


@each_notebook
def test_solved_every_exercise_passes(path, monkeypatch):
    monkeypatch.delenv("RAWGRAD_ANSWERS", raising=False)
    notebook = read(path)
    stubs = solve(notebook)
    assert stubs > 0
    tool.execute(notebook)
    assert verdicts(notebook) == ["passed"] * stubs


def outputs_of(cell, pixels: bool) -> list:
    """The outputs of a cell, with matplotlib's pixels or without."""
    outputs = copy.deepcopy(cell.get("outputs", []))
    for output in outputs:
        if not pixels:
            output.get("data", {}).pop("image/png", None)
    return outputs


@each_notebook
def test_without_triton_every_output_is_the_same(path, tmp_path, monkeypatch):
    """As good as uninstalled: the CUDA kernels serve, and only the set-up cell says what is missing."""
    (tmp_path / "sitecustomize.py").write_text('import sys; sys.modules["triton"] = None')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    committed, notebook = read(path), read(path)
    pixels = version("matplotlib") == committed.metadata["rawgrad"]["last_verified_with"]["matplotlib"]  # others draw others
    tool.execute(notebook)
    tool.normalise(notebook)
    for old, new in zip(committed.cells, notebook.cells, strict=True):
        if "setup" in tags(new):
            assert "Triton is not installed here" in str(new.outputs)
        elif "nbval-ignore-output" in tags(new):
            continue
        elif "gpu" not in tags(new) or runtime.DEVICE == "cpu":  # on a GPU those are measured live
            assert outputs_of(old, pixels) == outputs_of(new, pixels), new.id


@each_notebook
def test_what_is_committed_is_normalised(path):
    text = path.read_text()
    notebook = read(path)
    assert text == tool.text(notebook)
    again = copy.deepcopy(notebook)
    tool.normalise(again)
    assert tool.text(again) == text
    assert "widget-view" not in text
    assert notebook.metadata.accelerator == "GPU"
    for cell in notebook.cells:
        if cell.cell_type == "code" and not cell.outputs:
            defines = all(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign) for node in ast.parse(cell.source).body)
            assert defines, f"{cell.id}: an output is missing"


@each_notebook
def test_it_says_what_it_was_last_verified_with(path):
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "tools/constraints/ci.txt").read_text(), flags=re.MULTILINE))
    said = read(path).metadata["rawgrad"]["last_verified_with"]
    assert said == {name: pins[name] for name in ("torch", "triton", "numpy", "ipywidgets", "matplotlib")}


def test_the_readmes_picture_is_what_a_run_draws():
    assert tool.README_PICTURE.read_text() == tool.readme_picture()


def test_normalising_refuses_what_differs_from_run_to_run():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")])
    cell = notebook.cells[0]
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text) for text in ("a", "b")]
    cell.outputs.append(nbformat.v4.new_output("display_data", {tool.VIEW: {"model_id": "x"}, "text/plain": "p"}))
    tool.normalise(notebook)
    assert [output.get("text") for output in cell.outputs] == ["ab", None]
    assert list(cell.outputs[1].data) == ["text/plain"]
    cell.outputs = [nbformat.v4.new_output("stream", name="stderr", text="/tmp/1234: warning")]
    with pytest.raises(ValueError, match="wrote to stderr: /tmp/1234: warning"):
        tool.normalise(notebook)


@each_notebook
def test_house_style(path):
    assert re.fullmatch(r"\d\d_[a-z_]+\.ipynb", path.name)
    notebook = read(path)
    assert notebook.cells[0].source.startswith(f"# {path.name[:2]} "), "the first cell is the title"
    assert re.search(r"\*\*\d+ minutes", notebook.cells[0].source)
    assert "setup" in tags(next(cell for cell in notebook.cells if cell.cell_type == "code"))
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    for cell in notebook.cells:
        assert re.fullmatch(r"[a-z0-9-]+", cell.id), f"{cell.id} is no name"
        assert tags(cell) <= TAGS, f"{cell.id}: unknown tag {tags(cell) - TAGS}"
        if cell.cell_type == "code":
            lines = len(cell.source.splitlines())
            assert lines <= MAX_LINES or "setup" in tags(cell), f"{cell.id}: {lines} lines, move code to src/"
            assert max(map(len, cell.source.splitlines())) <= 128, cell.id
        else:
            assert not re.search(r"\b(simply|just|obviously|easy|easily)\b|!(?!\[)|base64", cell.source), cell.id


@each_notebook
def test_every_prediction_comes_before_its_outcome(path):
    """Asked in a cell of its own, judged later, and never in the next cell, where Run All would answer it at once."""
    asked, judged = {}, {}
    for number, cell in enumerate(c for c in read(path).cells if c.cell_type == "code"):
        for name in re.findall(r'\bpredict\(\s*"([^"]+)"', cell.source):
            asked[name] = number
            assert name.startswith(path.name[:2] + "-P")
        for name in re.findall(r'\boutcome\(\s*"([^"]+)"', cell.source):
            judged[name] = number
            assert "It is " in cell.outputs[-1].data["text/plain"], "no option says what happened"
    assert asked.keys() == judged.keys()
    assert all(judged[name] > asked[name] for name in asked)


# Belief -> the option that says it. Wrong each time but for gradcheck's, where the belief is in what a pass means.
MISCONCEPTIONS = {
    "the interpreter behaves like the GPU in everything": ("00-P3", "A"),
    "a print shows what the kernel reads": ("01-P2", "A"),
    "the gradient is laid out like my output": ("01-P8", "A"),
    "sum and mean differ by a factor only": ("01-P4", "B"),
    "equal addresses clear memory reuse": ("01-P3", "B"),
    "clone is the cure": ("01-P5", "A"),
    "gradcheck passed, so it is right": ("01-P6", "B"),
    "_version counts writes": ("02-P1", "B"),
    "no error means right": ("02-P2", "C"),
    "a view is a no-op": ("02-P3", "A"),
    "two views matter": ("02-P8", "B"),
    "it matters with retain_graph only": ("02-P5", "A"),
    "increment_version repairs it": ("02-P6", "A"),
    "cloning the result repairs it": ("02-P9", "A"),
    "looking changes nothing": ("02-P7", "A"),
    "nobody needs the incoming gradient after me": ("03-P4", "B"),
    "same address means alias": ("03-P9", "A"),
    "freed or empty memory is zero": ("03-P7", "B"),
    "it takes a kernel to alias gradients": ("03-P6", "B"),
    "in place on the saved input always saves memory": ("04-P1", "A"),
    "mark_dirty is for backward too": ("04-P5", "C"),
    ".data is like detach()": ("04-P4", "C"),
    "ctx.x = x is like saving": ("04-P4", "A"),
    "once_differentiable always raises": ("04-P3", "D"),
}


def test_every_misconception_is_an_option_that_does_not_happen():
    asked, right = {}, {}
    for path in NOTEBOOKS:
        for cell in read(path).cells:
            said = "".join(str(output.get("data", {}).get("text/plain", "")) for output in cell.get("outputs", ()))
            for name in re.findall(r'\bpredict\(\s*"([^"]+)"', cell.source):
                asked[name] = re.findall(r"^  ([A-H])  ", said, flags=re.MULTILINE)
            for name in re.findall(r'\boutcome\(\s*"([^"]+)"', cell.source):
                right[name] = re.search(r"It is ([A-H]):", said)[1]
    for belief, (name, letter) in MISCONCEPTIONS.items():
        assert letter in asked[name], belief
        assert letter != right[name], belief


@each_notebook
def test_every_exercise_says_its_minutes_and_its_weight_and_has_hints_in_order(path):
    notebook = read(path)
    stubs = [cell.id for cell in notebook.cells if "exercise" in tags(cell)]
    for stub in stubs:
        name = re.sub(r"ex-(\d\d)-(\d)-stub", r"\1.\2", stub)
        of_it = [
            cell.source
            for cell in notebook.cells
            if cell.cell_type == "markdown" and re.search(rf"Exercise {name},|Solution {name}", cell.source)
        ]
        said = "\n".join(of_it)
        assert re.search(rf"\*\*(Warm-up\. )?Exercise {name}, [a-z ]+ \(\d+ minutes; (core|at home)\)\.\*\*", said), name
        hints = re.findall(r"<details><summary>(Hint ?\d?)</summary>", said)
        assert hints in (["Hint"], ["Hint 1", "Hint 2"], ["Hint 1", "Hint 2", "Hint 3"]), name
        assert said.index("<summary>Hint") < said.index(f"<summary>Solution {name}"), name


@each_notebook
def test_the_last_cell_replays_the_answers(path):
    notebook = read(path)
    *_, last = notebook.cells
    assert last.source == f'exercises.replay("{path.name[:2]}")'
    names = re.findall(r'\bpredict\(\s*"([^"]+)"', "\n".join(cell.source for cell in notebook.cells))
    said = last.outputs[0].data["text/plain"].splitlines()
    assert [line.split()[0] for line in said] == names
    assert all(re.search(r"you: no answer  it is: [A-H]$", line) for line in said)


@each_notebook
def test_no_output_holds_what_differs_from_machine_to_machine(path):
    for cell in read(path).cells:
        if cell.cell_type == "code" and "nbval-ignore-output" not in tags(cell):
            said = "".join(
                output.get("text", "") + str(output.get("data", {}).get("text/plain", "")) for output in cell.outputs
            )
            assert not re.search(r"0x[0-9a-f]{6}|cuda:\d|device=|\b\d{12,}\b|Traceback", said), cell.id
