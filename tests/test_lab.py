"""A learner's copies: never overwritten, without outputs, archived on reset."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import lab  # noqa: E402


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(lab, "WORK", tmp_path / "work")
    monkeypatch.setattr(lab, "ANSWERS", tmp_path / "work" / "answers.json")
    monkeypatch.setattr(lab, "ROOT", tmp_path)


def test_copies_have_no_outputs():
    copies = lab.copy_missing()
    assert [path.name for path in copies] == [path.name for path in sorted(lab.NOTEBOOKS.glob("*.ipynb"))]
    for path in copies:
        cells = json.loads(path.read_text())["cells"]
        assert len(cells) == len(json.loads((lab.NOTEBOOKS / path.name).read_text())["cells"])
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def test_a_copy_is_never_overwritten():
    first = lab.copy_missing()[0]
    first.write_text("mine")
    lab.copy_missing()
    assert first.read_text() == "mine"


def test_reset_archives_the_copy_and_takes_a_fresh_one():
    copied = next(path for path in lab.copy_missing() if path.name.startswith("02"))
    copied.write_text("mine")
    lab.ANSWERS.write_text('{"02-P1": ["A", "B"], "01-P1": ["C", "C"]}')
    said = lab.reset("02")
    answers, archived = sorted((lab.WORK / "archive").iterdir())
    assert archived.read_text() == "mine"
    assert json.loads(answers.read_text()) == {"02-P1": ["A", "B"]}
    assert json.loads(lab.ANSWERS.read_text()) == {"01-P1": ["C", "C"]}
    assert f"yours is kept as {archived.relative_to(lab.ROOT)}. In a tab that is still open, choose Revert" in said
    assert json.loads(copied.read_text())["cells"]


def test_two_resets_at_once_keep_both():
    copied = next(path for path in lab.copy_missing() if path.name.startswith("02"))
    for text in ("mine", "mine, too"):
        copied.write_text(text)
        lab.reset("02")
    assert sorted(path.read_text() for path in (lab.WORK / "archive").iterdir()) == ["mine", "mine, too"]


def test_a_copy_that_is_cut_short_is_made_again(monkeypatch):
    monkeypatch.setattr(lab.os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        lab.copy_missing()
    monkeypatch.undo()
    assert not list((ROOT / "work").glob("*.part"))


@pytest.mark.parametrize("number", ["", "9", "0x"])
def test_reset_of_no_notebook_says_which_there_are(number):
    with pytest.raises(SystemExit, match="say which notebook: make reset NB=..., one of .*02"):
        lab.reset(number)


def test_a_saved_copy_keeps_its_pictures_and_drops_its_views():
    output = {"data": {lab.VIEW: {"model_id": "x"}, "text/html": "<img>", "text/plain": "t"}}
    model = {"type": "notebook", "content": {"cells": [{"cell_type": "code", "outputs": [output]}, {"cell_type": "markdown"}]}}
    lab.drop_views(model, path="x", contents_manager=None)
    assert output["data"] == {"text/html": "<img>", "text/plain": "t"}
    lab.drop_views({"type": "file", "content": "text"})


def test_a_port_that_is_taken_is_passed_over():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert lab.free_port(port) > port


def test_no_kernel_is_offered_but_the_one_with_rawgrad(tmp_path, monkeypatch):
    """Others that the machine has, one of them by the same name, are not in the list."""
    from jupyterlab.labapp import LabApp

    asked = []
    monkeypatch.setattr(LabApp, "launch_instance", asked.extend)
    monkeypatch.setattr(lab, "say_when_up", lambda port, address: None)
    monkeypatch.setattr(lab, "quiet_settings", lambda: None)
    for name in ("RAWGRAD_ANSWERS", "JUPYTERLAB_WORKSPACES_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(sys, "argv", ["lab.py"])
    lab.main()
    assert lab.OWN_KERNEL in asked

    for name in ("python3", "other"):
        folder = tmp_path / "data" / "kernels" / name
        folder.mkdir(parents=True)
        (folder / "kernel.json").write_text('{"argv": ["/elsewhere/python"], "display_name": "Mine", "language": "python"}')
    code = (
        "import sys; from jupyter_server.serverapp import ServerApp; app = ServerApp(); "
        "app.initialize(sys.argv[1:], new_httpserver=False); "
        "print({name: spec['resource_dir'] for name, spec in app.kernel_spec_manager.get_all_specs().items()})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--allow-root", "--no-browser", lab.OWN_KERNEL],
        capture_output=True, text=True, check=True, env={**os.environ, "JUPYTER_DATA_DIR": str(tmp_path / "data")},
    )  # fmt: skip
    assert done.stdout.strip() == str({"python3": str(Path(sys.prefix) / "share/jupyter/kernels/python3")})
