"""One place says where Colab finds the notebooks and the package, and everything agrees with it."""

import copy
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import colab  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
REPOSITORY, TAG = colab.place()
HERE = {"PYTHON": sys.executable, "GITHUB_REPOSITORY": "somebody/fork"}

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def setup_cell(notebook):
    return next(cell for cell in notebook.cells if "setup" in cell.metadata.get("tags", ()))


@each_notebook
def test_every_notebook_agrees_with_pyproject(path):
    notebook = read(path)
    dressed = copy.deepcopy(notebook)
    colab.dress(dressed, path.name, REPOSITORY, TAG)
    assert notebook == dressed, "say make notebooks"


@each_notebook
def test_another_place_is_written_over_the_old_one(path):
    notebook = read(path)
    colab.dress(notebook, path.name, "somebody/fork", "v9")
    text = nbformat.writes(notebook)
    assert text.count(f"https://colab.research.google.com/github/somebody/fork/blob/learner/{path.name})") == 1
    assert text.count("git+https://github.com/somebody/fork@v9") == text.count("%pip install") == 1
    assert f"{REPOSITORY}@" not in text
    assert f"github/{REPOSITORY}/" not in text
    again = copy.deepcopy(notebook)
    colab.dress(again, path.name, "somebody/fork", "v9")
    assert again == notebook


def test_the_pages_agree_with_pyproject():
    """Every repository that the README, docs/ and the forms name is this one."""
    named = re.compile(r"(?:github(?:\.com)?|mybinder.org/v2/gh)/([\w.-]+/[\w.-]+)")
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    found = {page.name: set(named.findall(unquote(page.read_text()))) for page in pages}
    assert set().union(*found.values()) == {REPOSITORY}, found


SHELL = """
import sys
from IPython.core.interactiveshell import InteractiveShell

class Shell(InteractiveShell):
    def run_line_magic(self, name, line, **_):
        print("magic", name, line)

shell = Shell()
if {colab}:
    Shell.__module__ = "google.colab._shell"
if {hidden}:
    sys.modules["rawgrad"] = None
done = shell.run_cell({source!r})
print(type(done.error_in_exec or done.error_before_exec).__name__, done.error_in_exec)
"""


@pytest.mark.parametrize(
    ("on_colab", "hidden", "said"),
    [
        (True, True, f"magic pip install -q git+https://github.com/{REPOSITORY}@{TAG}\n"),
        (True, False, ""),
        (False, False, ""),
        (False, True, "AssertionError " + colab.WRONG_KERNEL),
    ],
    ids=["on Colab, first", "on Colab, again", "elsewhere", "elsewhere, in the wrong kernel"],
)
def test_the_install_runs_on_colab_and_only_where_the_package_lacks(on_colab, hidden, said, tmp_path):
    source = colab.INSTALL.format(colab.WRONG_KERNEL, colab.package(REPOSITORY, TAG))
    assert setup_cell(read(NOTEBOOKS[0])).source.startswith(source)
    code = SHELL.format(colab=on_colab, hidden=hidden, source=source)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, env={**os.environ, "IPYTHONDIR": str(tmp_path)},
    )  # fmt: skip
    *output, last = done.stdout.splitlines()
    if said.startswith("Assertion"):
        assert last == said
    else:
        assert last == "NoneType None"
        assert "".join(f"{line}\n" for line in output) == said


def pinned(name: str) -> dict[str, str]:
    lines = (ROOT / "tools" / "constraints" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("file", ["colab.txt", "ci.txt", "oldest.txt"])
def test_nothing_that_is_there_is_upgraded(file):
    """The versions that Colab ships, those of CI and the oldest lane's satisfy what the package asks for."""
    has, asked = pinned(file), []
    for requirement in map(Requirement, importlib.metadata.requires("rawgrad")):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            asked.append(requirement.name)
            assert requirement.specifier.contains(has[requirement.name]), f"{requirement} upgrades {has[requirement.name]}"
    assert {"torch", "triton", "numpy", "ipywidgets", "matplotlib"} <= set(asked)


@pytest.mark.parametrize("package", ["torch", "triton", "matplotlib"])
def test_the_oldest_lane_is_the_oldest_that_is_allowed(package):
    (floor,) = [
        next(iter(requirement.specifier)).version
        for requirement in map(Requirement, importlib.metadata.requires("rawgrad"))
        if requirement.name == package
    ]
    assert pinned("oldest.txt")[package].startswith(f"{floor}.")


def test_the_branch_for_learners_has_no_outputs_and_installs_its_own_commit(tmp_path):
    colab.build(tmp_path / "tree", "somebody/fork", "0123abc")
    built = {path.name: path for path in (tmp_path / "tree").iterdir()}
    assert built.keys() == {path.name for path in NOTEBOOKS} | {"README.md", "environment.yml", "constraints.txt"}
    for path in NOTEBOOKS:
        notebook = read(built[path.name])
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
        assert "git+https://github.com/somebody/fork@0123abc" in setup_cell(notebook).source
        assert notebook.metadata.accelerator == "GPU", "Colab is asked for one"
        assert f"fork/blob/learner/{path.name})" in built["README.md"].read_text()
    for path in built.values():
        assert REPOSITORY not in path.read_text(), path.name


def pip_lines(text: str) -> list[str]:
    return yaml.safe_load(text)["dependencies"][-1]["pip"]


def test_binder_gets_torchs_cpu_build_the_constraints_and_what_a_learner_needs(tmp_path):
    colab.build(tmp_path, "somebody/fork", "0123abc")
    index, constraint, package, puller = pip_lines((tmp_path / "environment.yml").read_text())
    assert index == "--extra-index-url https://download.pytorch.org/whl/cpu"
    assert (tmp_path / constraint.removeprefix("--constraint ")).exists()
    assert package == "rawgrad[lab] @ git+https://github.com/somebody/fork@0123abc"
    assert puller == "nbgitpuller"  # for hubs
    index, constraint, package = pip_lines((ROOT / "environment.yml").read_text())
    assert (ROOT / constraint.removeprefix("--constraint ")).exists()
    assert package == "--editable .[dev]"
    assert {"lab", "dev"} <= set(importlib.metadata.metadata("rawgrad").get_all("Provides-Extra"))


def test_the_workflow_puts_each_change_on_top_of_the_branch(tmp_path):
    """The script of the workflow, against a repository of its own."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "learner.yml").read_text())
    assert "tools/learner.sh" in workflow["jobs"]["learner"]["steps"][-1]["run"]
    for pattern in workflow[True]["push"]["paths"]:  # YAML reads `on` as true
        assert list(ROOT.glob(pattern)), pattern

    tree = tmp_path / "tree"
    for name in ("notebooks", "tools"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    for name in ("pyproject.toml", "environment.yml"):
        shutil.copy(ROOT / name, tree / name)
    who = {f"GIT_{kind}_{what}": "a@b" for kind in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=tree, capture_output=True, text=True, check=True, env={**os.environ, **who})
        return done.stdout

    def publish() -> None:
        environment = {**os.environ, **who, **HERE}
        subprocess.run([tree / "tools" / "learner.sh"], capture_output=True, check=True, env=environment)

    git("init", "--quiet", "--initial-branch=main")
    git("init", "--quiet", "--bare", str(tmp_path / "origin"))
    git("remote", "add", "origin", str(tmp_path / "origin"))
    git("add", "--all")
    git("commit", "--quiet", "-m", "one")
    publish()
    first = git("ls-remote", "origin", "refs/heads/learner").split()[0]
    git("commit", "--quiet", "--allow-empty", "-m", "two")
    publish()
    second = git("ls-remote", "origin", "refs/heads/learner").split()[0]
    git("fetch", "--quiet", "origin", "learner")
    assert git("rev-list", second).split() == [second, first]
    assert set(git("ls-tree", "--name-only", second).split()) >= {path.name for path in NOTEBOOKS}
    assert f"somebody/fork@{git('rev-parse', 'HEAD').strip()}" in git("show", f"{second}:{NOTEBOOKS[0].name}")
    assert git("status", "--porcelain") == ""
