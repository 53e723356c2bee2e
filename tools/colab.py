"""Where Colab finds the notebooks and the package. pyproject.toml alone says it, and every notebook is written from there.

    python tools/colab.py FOLDER [OWNER/NAME [REF]]

fills FOLDER with what the branch `learner` holds: the notebooks without outputs, which install the package as of REF.
"""

import re
import shutil
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlparse

import lab
import nbformat

ROOT = Path(__file__).resolve().parent.parent
BRANCH = "learner"
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({})\n\n"
# %pip installs for the Python of the kernel. It upgrades nothing: every dependency is loose, and a test holds them to Colab's.
INSTALL = """\
try:
    import rawgrad
except ModuleNotFoundError:
    assert "google.colab" in str(get_ipython()), "{}"
    %pip install -q {}
"""
WRONG_KERNEL = "This kernel has no rawgrad: choose the one in .venv, or start with make lab"
OLD_BADGE = re.compile(re.escape(BADGE).replace(r"\{\}", "[^)]*"))
OLD_INSTALL = re.compile(r"\Atry:\n    import rawgrad\nexcept ModuleNotFoundError:\n(    .*\n)+\n*")
README = """\
# rawgrad, for learners

The notebooks of [rawgrad](https://github.com/{repository}) without outputs: a prediction comes before its answer. On Colab:

{lessons}

This branch is written anew when the lessons change. Corrections go to `main`, where
[rooms.md](https://github.com/{repository}/blob/main/docs/rooms.md) says what a room or a hub needs.
"""


def place() -> tuple[str, str]:
    """The repository as "owner/name", and the tag of this version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return urlparse(project["urls"]["Repository"]).path.strip("/"), f"v{project['version']}"


def package(repository: str, ref: str) -> str:
    """What pip installs."""
    return f"git+https://github.com/{repository}@{ref}"


def address(repository: str, name: str) -> str:
    """Where Colab opens the notebook of that file name: on the branch without outputs."""
    return f"https://colab.research.google.com/github/{repository}/blob/{BRANCH}/{name}"


def dress(notebook, name: str, repository: str, ref: str) -> None:
    """Write the badge under the title and the install line into the set-up cell, in the place of older ones.

    Args:
        notebook: as nbformat reads it.
        name: its file.
    """
    title = notebook.cells[0]
    heading, _, text = title.source.partition("\n\n")
    title.source = f"{heading}\n\n{BADGE.format(address(repository, name))}{OLD_BADGE.sub('', text)}"
    (setup,) = (cell for cell in notebook.cells if "setup" in cell.metadata.get("tags", ()))
    setup.source = INSTALL.format(WRONG_KERNEL, package(repository, ref)) + OLD_INSTALL.sub("", setup.source)


def environment(repository: str, ref: str) -> str:
    """environment.yml for the branch: as the tree's, with the package from its repository, and no more than lessons need.

    nbgitpuller is for hubs: it brings the branch into everybody's folder.
    """
    text = (ROOT / "environment.yml").read_text()
    for old, new in (
        ("--editable .[dev]", f"rawgrad[lab] @ {package(repository, ref)}\n      - nbgitpuller"),
        ("--constraint tools/constraints/ci.txt", "--constraint constraints.txt"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    return text


def build(folder: Path, repository: str, ref: str) -> None:
    """Fill `folder` with what the branch holds."""
    folder.mkdir(parents=True, exist_ok=True)
    lessons = []
    for source in sorted(lab.NOTEBOOKS.glob("*.ipynb")):
        target = folder / source.name
        lab.copy(source, target)
        notebook = nbformat.read(target, as_version=4)
        dress(notebook, source.name, repository, ref)
        target.write_text(nbformat.writes(notebook) + "\n")
        heading = notebook.cells[0].source.splitlines()[0].removeprefix("# ")
        lessons.append(f"- [{heading}]({address(repository, source.name)})")
    (folder / "README.md").write_text(README.format(repository=repository, lessons="\n".join(lessons)))
    (folder / "environment.yml").write_text(environment(repository, ref))
    shutil.copy(ROOT / "tools" / "constraints" / "ci.txt", folder / "constraints.txt")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 4:
        sys.exit("say where to: python tools/colab.py FOLDER [OWNER/NAME [REF]]")
    given, here = sys.argv[2:], place()
    build(Path(sys.argv[1]), *given, *here[len(given) :])
