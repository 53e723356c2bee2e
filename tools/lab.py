"""`make lab`: a learner's own copies of the notebooks, in JupyterLab. `make reset NB=02`: a fresh copy of one.

Learners never work in notebooks/, whose outputs are compared and would give every answer away: what they open are copies in
work/, which git ignores, without outputs. An existing copy is never overwritten.
"""

import itertools
import json
import os
import secrets
import shutil
import socket
import sys
import threading
import time
from pathlib import Path

import nbformat
from nbformat.sign import NotebookNotary

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS, WORK = ROOT / "notebooks", ROOT / "work"
ANSWERS = WORK / "answers.json"
VIEW = "application/vnd.jupyter.widget-view+json"
# The one of this virtual environment: another that the machine offers would have no rawgrad.
OWN_KERNEL = "--KernelSpecManager.allowed_kernelspecs=python3"


def copy(source: Path, target: Path) -> None:
    """Copy a notebook without its outputs."""
    notebook = json.loads(source.read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    whole = target.with_suffix(".part")  # put in place in one step: a copy that is cut short would never be overwritten
    whole.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    os.replace(whole, target)
    NotebookNotary().sign(nbformat.read(target, as_version=4))  # ours, and without outputs: trusted


def copy_missing() -> list[Path]:
    """Give the learner every notebook that is not in work/ yet; all that lie there now."""
    WORK.mkdir(exist_ok=True)
    for source in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not (WORK / source.name).exists():
            copy(source, WORK / source.name)
    return sorted(WORK.glob("*.ipynb"))


def reset(number: str) -> str:
    """Archive the copy whose name begins with `number`, and the answers given in it, and take a fresh one."""
    found = sorted(NOTEBOOKS.glob(f"{number}*.ipynb")) if number else []
    if len(found) != 1:
        names = ", ".join(path.name[:2] for path in sorted(NOTEBOOKS.glob("*.ipynb")))
        sys.exit(f"say which notebook: make reset NB=..., one of {names}")
    copied = WORK / found[0].name
    stem = WORK / "archive" / f"{copied.stem}_{time.strftime('%Y%m%d-%H%M%S')}"
    archive = next(path for n in itertools.count() if not (path := Path(f"{stem}{f'-{n}' if n else ''}.ipynb")).exists())
    archive.parent.mkdir(parents=True, exist_ok=True)
    kept = ""
    if copied.exists():
        shutil.move(copied, archive)
        kept = f"; yours is kept as {archive.relative_to(ROOT)}. In a tab that is still open, choose Revert"
    if ANSWERS.exists():
        answers = json.loads(ANSWERS.read_text())
        given = {name: answers.pop(name) for name in list(answers) if name.startswith(f"{copied.name[:2]}-")}
        if given:
            archive.with_suffix(".answers.json").write_text(json.dumps(given, indent=1) + "\n")
            ANSWERS.write_text(json.dumps(answers, indent=1) + "\n")
    copy(found[0], copied)
    return f"{copied.relative_to(ROOT)} is fresh{kept}"


def drop_views(model, **_) -> None:
    """Before a save: take out the widget views, which tomorrow's reader could only see as 'model not found'.

    The picture and the text beside each view stay.
    """
    if model["type"] == "notebook" and model["content"]:
        for cell in model["content"]["cells"]:
            for output in cell.get("outputs", ()):
                output.get("data", {}).pop(VIEW, None)


def answers(port: int) -> bool:
    """Whether somebody listens on that port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port(first: int = 8888) -> int:
    """The first port from `first` on that nobody listens on."""
    for port in range(first, first + 200):
        if not answers(port):
            return port
    sys.exit(f"no free port from {first} to {first + 199}: stop a server that you no longer need")


def say_when_up(port: int, address: str) -> None:
    """Print the address as soon as the server answers there."""
    while not answers(port):
        time.sleep(0.1)
    print(f"rawgrad: {address}  (stop with Ctrl-C)", flush=True)


def quiet_settings() -> None:
    """Keep JupyterLab from asking whether it may fetch news."""
    file = Path(sys.prefix) / "share/jupyter/lab/settings/overrides.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    settings = json.loads(file.read_text()) if file.exists() else {}
    settings["@jupyterlab/apputils-extension:notification"] = {"fetchNews": "false", "checkForUpdates": False}
    file.write_text(json.dumps(settings, indent=1))


def main() -> None:
    first = copy_missing()[0]
    presenting = sys.argv[1:2] == ["present"]
    del sys.argv[1 : 1 + presenting]
    quiet_settings()
    os.environ["RAWGRAD_ANSWERS"] = str(ANSWERS)
    os.environ.setdefault("JUPYTERLAB_WORKSPACES_DIR", str(WORK / ".workspaces"))  # no tabs from elsewhere
    port, token = free_port(), secrets.token_hex(16)
    page = f"{'doc' if presenting else 'lab'}/tree/{first.name}"  # doc: one notebook, and nothing beside it
    address = f"http://127.0.0.1:{port}/{page}?token={token}"
    threading.Thread(target=say_when_up, args=(port, address), daemon=True).start()
    from jupyterlab.labapp import LabApp

    options = [
        "-y",  # stop on the first Ctrl-C
        "--ServerApp.log_level=WARN",
        "--LabApp.log_level=WARN",
        f"--ServerApp.root_dir={WORK}",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={token}",
        f"--LabApp.default_url=/{page}",
        "--ContentsManager.pre_save_hook=lab.drop_views",
        OWN_KERNEL,
        *(["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
        *(["--no-browser"] if "CI" in os.environ else []),
        *sys.argv[1:],
    ]
    LabApp.launch_instance(options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["reset"]:
        print(reset("".join(sys.argv[2:])))
    else:
        main()
