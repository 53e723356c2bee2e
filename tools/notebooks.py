"""`make notebooks`: execute the notebooks and write them back normalised, so that two runs are equal byte for byte.

It also writes Colab's badge and install line into them, and draws the README's picture.
"""

import os
import sys
from importlib import metadata
from pathlib import Path

import colab
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS, README_PICTURE = ROOT / "notebooks", ROOT / "docs" / "timeline.svg"
VIEW = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "accelerator": "GPU",  # what Colab gives
    "colab": {"gpuType": "T4", "provenance": []},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def normalise(notebook) -> None:
    """Take out of an executed notebook what differs from run to run.

    Raises:
        ValueError: a cell wrote to stderr, which holds paths and process ids.
    """
    for count, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), 1):
        cell.execution_count = count
        cell.metadata.pop("execution", None)
        cell.outputs = _joined(cell.outputs)
        for output in cell.outputs:
            if output.get("name") == "stderr":
                raise ValueError(f"cell {cell.id} wrote to stderr: {output.text.strip()[-300:]}")
            if "data" in output:
                output.data.pop(VIEW, None)
                output.metadata.clear()
            if output.output_type == "execute_result":
                output.execution_count = count
    kept = {key: notebook.metadata[key] for key in ("rawgrad",) if key in notebook.metadata}  # what it was verified with
    notebook.metadata = nbformat.from_dict({**METADATA, **kept})


def _joined(outputs: list) -> list:
    """Neighbouring pieces of one stream as one: where a stream is cut depends on the moment."""
    joined = []
    for output in outputs:
        if joined and output.output_type == "stream" and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def execute(notebook) -> None:
    """Run `notebook` from top to bottom in a fresh kernel of this Python, in place."""
    os.environ.pop("RAWGRAD_ANSWERS", None)  # nobody's answers
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()


def verified_with() -> dict[str, str]:
    """The versions that a notebook was last verified with."""
    return {name: metadata.version(name).partition("+")[0] for name in ("torch", "triton", "numpy", "ipywidgets", "matplotlib")}


def text(notebook) -> str:
    """`notebook` as it is committed."""
    return nbformat.writes(notebook, version=4) + "\n"


def readme_picture() -> str:
    """The timeline of the README, from a run."""
    from rawgrad import figures, scenarios

    return figures.version_timeline(scenarios.version_timeline("view(64)"))[0] + "\n"


if __name__ == "__main__":
    README_PICTURE.write_text(readme_picture())
    for path in sorted(NOTEBOOKS.glob(f"{''.join(sys.argv[1:])}*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        colab.dress(notebook, path.name, *colab.place())
        execute(notebook)
        normalise(notebook)
        notebook.metadata["rawgrad"] = {"last_verified_with": verified_with()}
        path.write_text(text(notebook))
        print(f"{path.name}: {sum(c.cell_type == 'code' for c in notebook.cells)} code cells")
