"""What lacks is said in one sentence, and everything else goes on working."""

import os
import subprocess
import sys

import pytest
import torch

import rawgrad
from rawgrad import runtime

NO_TRITON = 'import sys; sys.modules["triton"] = None\n'  # as good as uninstalled, for import and for find_spec


def run(code: str, **environment: str) -> str:
    """Output of `code` in a fresh Python; its environment is this one's, less the interpreter switch."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**inherited, **environment},
    )
    return done.stdout + done.stderr


USE = """
import torch, rawgrad
from rawgrad import runtime
for backend in ("triton", "cuda", "torch"):
    try:
        print(backend, rawgrad.square(torch.tensor([3.0], device=runtime.DEVICE), backend).item())
    except RuntimeError as problem:
        print(backend, "RuntimeError:", problem)
"""


def test_without_triton_the_package_imports_and_cuda_serves():
    said = run(NO_TRITON + USE + "print(runtime.backends()); print(rawgrad.preflight())")
    assert "triton RuntimeError: Triton is not installed here" in said
    assert "cuda 9.0\ntorch 9.0\n('cuda', 'torch')" in said
    assert "\nTriton   Triton is not installed here (it has Linux wheels only): `pip install triton`" in said


@pytest.mark.skipif(runtime.DEVICE == "cuda", reason="needs a machine without a GPU")
@pytest.mark.triton
class TestInterpreterSwitch:
    def test_is_set_before_triton_loads(self):
        said = run(
            "import os, rawgrad; from rawgrad import runtime; print(os.environ['TRITON_INTERPRET'], runtime.INTERPRETED)"
        )
        assert said == "1 True\n"

    def test_an_explicit_value_wins(self):
        said = run(USE, TRITON_INTERPRET="0")
        assert "triton RuntimeError: TRITON_INTERPRET=0 asks for compiled Triton kernels and there is no GPU here" in said
        assert "cuda 9.0" in said

    def test_triton_imported_too_early_is_said(self):
        said = run("import triton" + USE)
        assert "triton RuntimeError: Triton was imported before rawgrad and without TRITON_INTERPRET=1" in said
        assert "restart Python and import rawgrad first" in said
        assert "cuda 9.0" in said

    def test_triton_imported_early_with_the_switch_is_fine(self):
        assert "triton 9.0" in run("import triton" + USE, TRITON_INTERPRET="1")


@pytest.mark.triton
def test_numpy_too_new_for_this_triton_is_said(monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETED", True)
    monkeypatch.setattr(runtime.tl, "sum", None)  # its library interpreted, too
    monkeypatch.setattr(runtime.np, "__version__", "2.4.1")
    monkeypatch.setattr(runtime.triton, "__version__", "3.6.0")
    assert "the interpreter of Triton 3.6.0 does not work with numpy 2.4.1: install numpy<2.4, or triton>=3.7" in str(
        runtime.problem("triton", "cpu")
    )
    monkeypatch.setattr(runtime.np, "__version__", "2.3.5")
    assert "numpy" not in str(runtime.problem("triton", "cpu"))


def test_no_compiler_is_said(monkeypatch):
    monkeypatch.setattr(runtime, "compiler", lambda: None)
    with pytest.raises(RuntimeError, match=r"there is no C\+\+ compiler .* apt install g\+\+"):
        rawgrad.square(torch.ones(3), "cuda")
    assert "cuda" not in runtime.backends("cpu")


def test_the_compiler_that_is_named_is_taken():
    said = run(
        "from rawgrad import runtime; print(runtime.compiler(), runtime.problem('cuda', 'cpu'))", CXX="no-such-compiler -O3"
    )
    assert said.startswith("None there is no C++ compiler")
    assert run("from rawgrad import runtime; print(runtime.compiler())", CXX="g++ -g") == "('g++', '-g')\n"


def test_windows_is_said(monkeypatch):
    monkeypatch.setattr(runtime.sys, "platform", "win32")
    assert "use WSL" in runtime.problem("cuda", "cpu")


def test_a_gpu_without_cuda_core_is_said(monkeypatch):
    monkeypatch.setattr(runtime, "cuda_core", lambda: None)
    with pytest.raises(RuntimeError, match="cuda.core, which compiles and launches .cu files on a GPU, is not installed"):
        runtime.choose("cuda", "cuda")


def test_every_line_of_preflight_says_one_thing():
    lines = str(rawgrad.preflight()).splitlines()
    assert [line.split()[0] for line in lines] == ["Python", "device", "Triton", "CUDA", "lessons"]
    assert f"torch {torch.__version__}" in lines[0]


def test_python_m_rawgrad_prints_preflight():
    done = subprocess.run([sys.executable, "-m", "rawgrad"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == str(rawgrad.preflight()).splitlines()[0]


def test_a_read_only_home_gets_a_folder_of_its_own(tmp_path):
    (tmp_path / "file").touch()
    said = run("from rawgrad import runtime; print(runtime.cache_folder())", XDG_CACHE_HOME=str(tmp_path / "file"))
    assert "rawgrad-" in said
    said = run("from rawgrad import runtime; print(runtime.cache_folder())", XDG_CACHE_HOME=str(tmp_path))
    assert said.strip() == str(tmp_path / "rawgrad")
