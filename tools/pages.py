"""`make html`: the lessons as pages in site/, which need no kernel and no network.

Each notebook is run once, with every state of every widget drawn ahead. A page has all that it needs in its one file.
"""

import base64
import gzip
import json
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from html import escape
from pathlib import Path

import mistune
import nbformat
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from notebooks import NOTEBOOKS, README_PICTURE, ROOT, execute, normalise

SITE = ROOT / "site"
PAGE = "application/vnd.rawgrad.page+json"
STYLE, SCRIPT = (Path(__file__).with_suffix(end) for end in (".css", ".js"))
AHEAD = "from rawgrad.widgets import Shown\n\nShown.ahead = True"
WIDE = '<div class="wide" role="group" aria-label="{}">{}</div>'  # scrolls by itself, so that the page does not


def code(source: str, language: str = "python") -> str:
    inner = highlight(source, PythonLexer(), HtmlFormatter(nowrap=True)) if language == "python" else escape(source)
    return WIDE.format("code", f'<pre class="code"><code>{inner}</code></pre>')


class Markdown(mistune.HTMLRenderer):
    """As JupyterLab shows it, with code and tables in boxes that scroll by themselves."""

    def block_code(self, code_: str, info: str | None = None) -> str:
        return code(code_, info or "text")

    def image(self, text: str, url: str, title: str | None = None) -> str:
        """A page asks for nothing outside: of Colab's badge the words stay."""
        return escape(text) if url.startswith("http") else super().image(text, url, title)

    def table(self, text: str) -> str:
        return WIDE.format("table", f"<table>{text}</table>")


markdown = mistune.create_markdown(renderer=Markdown(escape=False), plugins=["table", "strikethrough", "url"])


def title(notebook) -> str:
    return notebook.cells[0].source.partition("\n")[0].removeprefix("# ")


def run(path: Path):
    """The notebook with its outputs, and with the data of every widget in them."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(AHEAD))
    execute(notebook)
    del notebook.cells[0]
    normalise(notebook)
    return notebook


def knobs(data: dict, number: str) -> str:
    """Controls, the first state, and all others packed. Without script the first state is what there is."""
    controls = []
    for index, knob in enumerate(data["knobs"]):
        id_, name = f"knob-{number}-{index}", escape(knob["name"])
        if knob["buttons"]:
            options = "".join(
                f'<button type="button" value="{place}" aria-pressed="{str(not place).lower()}">{escape(option)}</button>'
                for place, option in enumerate(knob["options"])
            )
            controls.append(
                f'<div class="knob" role="group" aria-labelledby="{id_}"><span id="{id_}">{name}</span>{options}</div>'
            )
        else:
            options = "".join(f'<option value="{place}">{escape(o)}</option>' for place, o in enumerate(knob["options"]))
            controls.append(f'<div class="knob"><label for="{id_}">{name}</label><select id="{id_}">{options}</select></div>')
    svg, table = ("".join(data["pieces"][piece] for piece in part) for part in data["shown"][data["states"][0]])
    said = svg.partition("<title>")[2].partition("</title>")[0]
    packed = base64.b64encode(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 9, mtime=0)).decode()
    return (
        f'<div class="knobs"><div class="controls" hidden>{"".join(controls)}'
        '<button type="button" class="reset">Reset</button></div>'
        f'<figure class="wide" role="group" aria-label="picture">{svg}</figure><p class="said" role="status">{said}</p>'
        f'<div class="wide" role="group" aria-label="picture in words"><pre class="words">{escape(table)}</pre></div>'
        f'<script type="application/octet-stream">{packed}</script></div>'
    )


def prediction(data: dict) -> str:
    buttons = "".join(
        f'<button type="button" value="{letter}" aria-pressed="false"><b>{letter}</b> {escape(text)}</button>'
        for letter, text in data["options"].items()
    )
    return (
        f'<fieldset class="prediction" data-name="{data["prediction"]}">'
        f"<legend><small>Prediction {data['prediction']}</small> {escape(data['question'])}</legend>{buttons}"
        '<p role="status"></p></fieldset>'
    )


def outcome(data: dict) -> str:
    says = escape(json.dumps(data["says"]))
    return f'<p class="outcome" data-name="{data["outcome"]}" data-says="{says}">{escape(data["says"][""])}</p>'


def replay(data: dict) -> str:
    right = escape(json.dumps(data["right"]))
    lines = escape("\n".join(f"{name}  it is: {letter}" for name, letter in data["right"].items()))
    return WIDE.format("your answers", f'<pre class="replay" data-right="{right}">{lines}</pre>')


def shown(output, source: str, number: str) -> str:
    """One output of a cell."""
    if output.output_type == "stream":
        return WIDE.format("output", f"<pre>{escape(output.text)}</pre>")
    data = output.data
    if PAGE in data:
        what = data[PAGE]
        kinds = {"prediction": prediction, "outcome": outcome, "replay": replay}
        return next((make(what) for kind, make in kinds.items() if kind in what), None) or knobs(what, number)
    if "image/png" in data:
        image = f'<img alt="Chart, drawn by {escape(source)}" src="data:image/png;base64,{data["image/png"].strip()}">'
        return f'<figure class="wide" role="group" aria-label="picture">{image}</figure>'
    return WIDE.format("output", f"<pre>{escape(data['text/plain'])}</pre>")


def cells(notebook) -> str:
    """The lesson. What is shown between a prediction and its outcome is folded.

    Where one question stands open inside another, an output belongs to the one that was asked last.
    """
    parts, asked = [], []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(markdown(cell.source))
            continue
        tags = cell.metadata.get("tags", ())
        if "exercise" in tags:
            parts.append('<p class="note">This page runs no code. Write yours in the notebook, or here in your head.</p>')
        if not cell.source.startswith(("predict(", "exercises.replay(")):  # the question itself stands below
            parts.append(code(cell.source))
        outputs = "".join(shown(output, cell.source, f"{number}-{n}") for n, output in enumerate(cell.outputs))
        told = [output.data[PAGE] for output in cell.outputs if PAGE in output.get("data", {})]
        asks = [data["prediction"] for data in told if "prediction" in data]
        if asked and outputs and not asks:
            outputs = (
                f'<details class="fold" data-name="{asked[-1]}"><summary>Output, folded until you answer {asked[-1]}</summary>'
                f"{outputs}</details>"
            )
        if outputs:
            parts.append(f'<div class="output" data-cell="{cell.id}">{outputs}</div>')
        judged = [data["outcome"] for data in told if "outcome" in data]
        asked = [name for name in [*asked, *asks] if name not in judged]
    assert not asked, f"{asked} are never judged"
    return "\n".join(parts)


def page(heading: str, body: str, links: list[tuple[str, str]], here: str) -> str:
    """A whole page. `links`: file and title of each, in their order."""
    items = "".join(
        f'<li><a href="{file}"{" aria-current=page" if file == here else ""}>{escape(name)}</a></li>' for file, name in links
    )
    place = [file for file, _ in links].index(here)
    ways = [("Next", links[place + 1])] if place + 1 < len(links) else []
    onward = "".join(f'<a href="{file}">{word}: {escape(name)}</a>' for word, (file, name) in ways)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(heading)} · rawgrad</title>
<style>
{STYLE.read_text()}</style>
</head>
<body>
<a class="skip" href="#lesson">Skip to the text</a>
<header><nav aria-label="Lessons"><ul>{items}</ul></nav></header>
<main id="lesson" tabindex="-1">
<noscript><p class="note">Without script the text, the outputs and the first picture of each widget are all here.
Knobs and predictions need it: choose an answer for yourself, then unfold the outputs.</p></noscript>
{body}
</main>
<footer>{onward}<button type="button" id="forget" hidden>Forget all my answers</button></footer>
<script>
{SCRIPT.read_text()}</script>
</body>
</html>
"""


def index(states: int, names: dict[str, str]) -> str:
    """What the lessons are, from the README."""
    readme = (ROOT / "README.md").read_text()
    intro = markdown(readme.partition("## Two commands")[0])
    alt = re.search('<img src="[^"]*" alt="[^"]*" />', intro)[0]
    intro = intro.replace(
        f"<p>{alt}</p>", f'<figure class="wide" role="group" aria-label="picture">{README_PICTURE.read_text()}</figure>'
    )
    lessons = "".join(
        f'<li><a href="{stem}.html">{escape(names[f"{stem}.html"])}</a><br>Minutes: {minutes}. Afterwards you can {able}.</li>'
        for stem, minutes, able in re.findall(r"^\| `(\d\d_\w+)` \| (.*?) \| (.*?) \|$", readme, flags=re.MULTILINE)
    )
    about = (
        f"These pages need no kernel and no network. All {states:,} states of their widgets were drawn ahead by the same code "
        "that draws them live, so every knob answers. The outputs behind a prediction stay folded until you answer. Answers "
        "stay in this browser. To run code, and to have your exercises judged, take the notebooks: `make lab`."
    )
    return f'{intro}<h2>The lessons</h2><ul class="lessons">{lessons}</ul>{markdown(about)}'


def main(folder: Path) -> None:
    paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        ran = dict(zip(paths, pool.map(run, paths), strict=True))
    links = [("index.html", "Start"), *((f"{path.stem}.html", title(notebook)) for path, notebook in ran.items())]
    folder.mkdir(parents=True, exist_ok=True)
    states = 0
    for path, notebook in ran.items():
        file = folder / f"{path.stem}.html"
        file.write_text(page(title(notebook), cells(notebook), links, file.name))
        drawn = [
            len(output.data[PAGE]["states"])
            for cell in notebook.cells
            for output in cell.get("outputs", ())
            if "states" in output.get("data", {}).get(PAGE, ())
        ]
        states += sum(drawn)
        print(f"{file.name}: {len(drawn)} widgets, {sum(drawn)} states, {file.stat().st_size // 1000} kB", flush=True)
    (folder / "index.html").write_text(page("Start", index(states, dict(links)), links, "index.html"))
    print(f"open {folder / 'index.html'}")


if __name__ == "__main__":
    main(Path(*sys.argv[1:2]).resolve() if sys.argv[1:] else SITE)
