"""A newcomer's mistakes: each is answered by one sentence that says what to do.

A port that is taken: test_lab. No compiler: test_runtime. The wrong kernel: test_colab.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def script(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def said(*command, **environment) -> list[str]:
    """What a command that fails says, line by line."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode != 0
    return (done.stdout + done.stderr).splitlines()


def made(tmp_path, python) -> list[str]:
    """What `make setup` says with that Python, less make's own last line."""
    *lines, last = said("make", "--no-print-directory", "setup", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}")
    assert "Error 1" in last
    assert not (tmp_path / "venv").exists(), "nothing was made"
    return lines


def test_an_old_python_is_said(tmp_path):
    old = f"exec {sys.executable} -c \"import sys; sys.version_info, sys.version = (3, 9, 18), '3.9.18 (main)'; $2\""
    assert made(tmp_path, script(tmp_path / "python", old)) == [
        "rawgrad needs Python 3.11 or newer, got 3.9.18: say make PYTHON=python3.11"
    ]


def test_no_python_is_said(tmp_path):
    assert made(tmp_path, "no-such-python") == [
        "there is no no-such-python here: install Python 3.11 or newer, or say make PYTHON=..."
    ]


def test_a_python_without_venv_is_said(tmp_path):
    bare = f'case "$2" in *ensurepip*) exit 1;; esac; exec {sys.executable} "$@"'
    assert made(tmp_path, script(tmp_path / "python", bare)) == ["this Python cannot make a venv: apt install python3-venv"]


def installed(tmp_path, *what, **environment) -> list[str]:
    """What tools/install.sh says, with a pip that knows one index: a port that nobody listens on."""
    python = script(tmp_path / "bin" / "python", f'exec {sys.executable} "$@"')
    alone = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    unset = {"PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "TORCH_INDEX": ""}
    return said(
        "tools/install.sh", python, "--constraint", "tools/constraints/newest.txt", *what, **alone, **unset, **environment
    )


def test_no_network_is_said(tmp_path):
    (line,) = installed(tmp_path, "a-package-that-is-nowhere")
    assert line.startswith("pip reaches no package index, so nothing was installed: connect this machine and say it again")
    log = Path(line.rpartition(" ")[2])
    assert "after connection broken by" in log.read_text()


def test_anything_else_that_pip_says_stands(tmp_path):
    lines = installed(tmp_path, "not a requirement")
    assert any("Invalid requirement" in line for line in lines)
    assert not any("reaches no package index" in line for line in lines)


def test_torchs_own_index_may_be_silent(tmp_path):
    """Where it does not answer, the usual index decides, and what is said is that one's word."""
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("with a driver torch comes from the usual index")
    python = script(tmp_path / "bin" / "python", f'echo "$@" >> {tmp_path}/asked; case "$*" in *silent*) exit 1;; esac')
    subprocess.run(
        [ROOT / "tools" / "install.sh", python, "--constraint", "some.txt", "--editable", "."],
        check=True, env={**os.environ, "TORCH_INDEX": "http://silent"},
    )  # fmt: skip
    first, second = (tmp_path / "asked").read_text().splitlines()
    assert first.endswith("--index-url http://silent --constraint some.txt torch")
    assert second == "-m pip --disable-pip-version-check install --quiet --constraint some.txt --editable ."


def test_make_help_names_every_target():
    done = subprocess.run(["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    named = {line.split()[0] for line in done.stdout.splitlines() if line}
    phony = (ROOT / "Makefile").read_text().splitlines()[0].removeprefix(".PHONY: ").split()
    assert named == set(phony)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_kits_cheap_parts(tmp_path, monkeypatch):
    sys.path.insert(0, str(ROOT / "tools"))
    import kit

    kit.source(tmp_path / "rawgrad")
    assert (tmp_path / "rawgrad" / "tools" / "lab.py").exists()
    assert not (tmp_path / "rawgrad" / ".git").exists()
    assert not list((tmp_path / "rawgrad").glob(".venv*"))
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "one.whl").write_bytes(bytes(3_000_000))
    text = kit.readme(tmp_path, "1.2", site=True)
    commands = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert len(commands) == 2
    assert "--no-index --find-links wheels 'rawgrad[lab]'" in commands[0]
    assert commands[1] == "venv/bin/python rawgrad/tools/lab.py"
    assert "unpacks 3 MB of wheels" in text
    assert "site/index.html" in text
    assert "site/" not in kit.readme(tmp_path, "1.2", site=False)
    monkeypatch.setattr(kit.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1))
    monkeypatch.setattr(kit, "source", lambda folder: None)
    with pytest.raises(SystemExit, match="the kit is not whole: connect this machine, and say make kit again"):
        kit.wheels(tmp_path, tmp_path)
    monkeypatch.setattr(kit, "ROOT", tmp_path)  # a tree from before make html
    assert kit.pages(tmp_path / "site") is False
