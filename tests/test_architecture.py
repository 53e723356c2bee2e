"""Who may import whom, who may look at the environment, and how small it all stays."""

import ast
import re
from pathlib import Path

import rawgrad

SRC = Path(rawgrad.__file__).parent
ROOT = SRC.parent.parent
# Arrows point down: notebooks -> widgets, exercises -> figures, scenarios -> specimens, ops, raw, probes -> cuda -> runtime.
# An edge that is not here needs a reason in the pull request.
ALLOWED = {
    "runtime": set(),
    "cuda": {"runtime"},
    "ops": set(),
    "ops.square": {"cuda", "runtime"},
    "ops.rotary": {"cuda", "runtime"},
    "raw": set(),
    "probes": set(),
    "specimens": {"cuda", "ops.rotary", "ops.square", "raw", "runtime"},
    "scenarios": {"cuda", "ops.rotary", "probes", "raw", "runtime", "specimens"},
    "figures": {"scenarios"},
    **{
        f"doctor.{family}": {"doctor.checks", "doctor.subject"}
        for family in ("derivatives", "graph", "layouts", "rounding", "sizes", "streams", "upstream")
    },
    "doctor.report": set(),
    "doctor.subject": {"probes"},
    "doctor.checks": {"doctor.report", "doctor.subject"},
    "doctor.lifetime": {"doctor.checks", "doctor.subject", "probes"},
    "doctor.memory": {"doctor.checks", "doctor.subject", "probes"},
    "doctor.ill": {"raw"},
    "doctor.cases": {"doctor", "doctor.report", "runtime"},
    "doctor.shipped": {"doctor", "doctor.report"},
    "doctor": {
        "doctor",
        "doctor.checks",
        "doctor.isolated",
        "doctor.report",
        "doctor.subject",
    },  # its families by name, so that they register
    "doctor.isolated": {"doctor", "doctor.report", "runtime"},
    "doctor.command": {"doctor"},
    "widgets": {"figures", "scenarios"},
    "exercises": {"doctor.cases", "ops.rotary", "probes", "runtime", "scenarios", "widgets"},
    "__init__": {"doctor", "runtime", "ops.rotary", "ops.square", "probes"},
    "__main__": {"doctor", "preflight"},
}
MODULES = {".".join(p.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): p for p in SRC.rglob("*.py")}


def imports_of(path: Path) -> set[str]:
    """The modules of this package that `path` imports, by their name inside it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "rawgrad":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rawgrad."):
            found.add(node.module.removeprefix("rawgrad."))
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("rawgrad.") for alias in node.names if alias.name.startswith("rawgrad")}
    return found


def test_imports_are_allowed():
    assert MODULES.keys() == ALLOWED.keys(), "a module is missing from the table"
    for name, path in MODULES.items():
        extra = imports_of(path) - ALLOWED[name]
        assert not extra, f"{name} imports {sorted(extra)}"


def test_only_runtime_reads_the_environment():
    readers = {name for name, path in MODULES.items() if re.search(r"environ\b|getenv", path.read_text())}
    assert readers == {"runtime"}


def test_the_package_stays_small():
    """Lines that are not blank, of all but the doctor."""
    texts = [path.read_text() for name, path in MODULES.items() if not name.startswith("doctor")]
    assert sum(bool(line.strip()) for text in texts for line in text.splitlines()) <= 3750


def test_the_top_level_gains_no_folder():
    import subprocess

    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    folders = {line.partition("/")[0] for line in listed if "/" in line}
    assert folders <= {".ci", ".github", "notebooks", "src", "tests", "tools", "benchmarks", "docs"}


def test_the_readmes_map_matches_the_tree():
    """Every path that the README names in code exists, and every notebook and module of the tree stands on its map."""
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`((?:notebooks|src|tests|tools|benchmarks|docs)/[\w./]*)`", text))
    assert named
    for path in named:
        assert (ROOT / path).exists(), path
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert notebook.stem in text
    for name in MODULES:
        if not name.startswith(("_", "ops", "doctor.")) and name != "doctor":
            assert f"{name}.py" in text, name


def test_links_inside_the_repository_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    checked = 0
    for page in pages:
        for link in re.findall(r"\]\(([\w./-]+\.(?:md|html|pdf|svg))\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
            checked += 1
    assert checked > 5


def test_make_commands_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)\b", (ROOT / "README.md").read_text())):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
