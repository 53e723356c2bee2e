"""`make kit`: all that a room without a network needs, in kit/, which git ignores.

The wheels are those of this machine's system, processor and Python, with torch's CPU build.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KIT = ROOT / "kit"
TORCH_INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
README = """\
rawgrad, without a network

For {system} on {processor}, Python {python}, and a C++ compiler. Copy this folder to the machine, and in it say

    python{python} -m venv venv && venv/bin/python -m pip install --no-index --find-links wheels 'rawgrad[lab]'
    venv/bin/python rawgrad/tools/lab.py

The first unpacks {megabytes} MB of wheels to four times as much. The second copies the notebooks to rawgrad/work/ and opens
JupyterLab; say it again whenever you come back.

{site}rawgrad/ is the source of version {version}.
"""
SITE = "site/index.html, in any browser: the lessons as pages, with nothing to install.\n\n"


def wheels(folder: Path, constraints: Path) -> None:
    """Download or build every wheel for rawgrad[lab] into `folder`."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-qq", "--wheel-dir", str(folder)]
    pip += ["--constraint", str(constraints)]
    # Alone and first, as in the set-up. Where that index does not answer, the usual one decides.
    subprocess.run([*pip, "--no-deps", "--retries", "0", "--timeout", "10", "--index-url", TORCH_INDEX, "torch"], check=False)
    with tempfile.TemporaryDirectory() as copy:  # a build/ of the tree would bring files that are no more
        source(Path(copy) / "rawgrad")
        if subprocess.run([*pip, "--find-links", str(folder), f"{copy}/rawgrad[lab]"], check=False).returncode:
            sys.exit("pip could not bring every wheel, and the kit is not whole: connect this machine, and say make kit again")


def source(folder: Path) -> None:
    """The files that git knows, as they lie in the tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def pages(folder: Path) -> bool:
    """The lessons as pages; False in a tree that has no make html."""
    script = ROOT / "tools" / "pages.py"
    if script.exists():
        subprocess.run([sys.executable, script, folder], check=True)
    return script.exists()


def readme(folder: Path, version: str, site: bool) -> str:
    size = sum(path.stat().st_size for path in (folder / "wheels").glob("*.whl")) // 10**6
    return README.format(
        system=platform.system(),
        processor=platform.machine(),
        python=".".join(platform.python_version_tuple()[:2]),
        megabytes=size,
        site=SITE if site else "",
        version=version,
    )


def main(constraints: Path) -> None:
    from colab import place

    shutil.rmtree(KIT, ignore_errors=True)
    source(KIT / "rawgrad")
    wheels(KIT / "wheels", constraints)
    site = pages(KIT / "site")
    (KIT / "README.txt").write_text(readme(KIT, place()[1].removeprefix("v"), site))
    print(f"kit/ is for {platform.system()} on {platform.machine()}; what to do with it stands in kit/README.txt")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
