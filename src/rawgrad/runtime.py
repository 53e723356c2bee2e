"""What this machine can run: the device, Triton compiled or interpreted, and a compiler for `.cu` files.

The only module that reads the environment, and the first that loads: Triton looks at its interpreter switch when
it is imported, so the switch must be set before.
"""

import atexit
import contextlib
import functools
import importlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # setdefault: an explicit value of the user's wins

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    INTERPRETED = bool(triton.knobs.runtime.interpret)
except ImportError:
    HAS_TRITON = INTERPRETED = False
    # Files with kernels still import: their bodies are never run.
    triton = SimpleNamespace(jit=lambda kernel: kernel, __version__="")
    tl = SimpleNamespace(constexpr=None)

BACKENDS = ("triton", "cuda", "torch")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


def _triton_problem(device: str) -> str | None:
    if not HAS_TRITON:
        return (
            "Triton is not installed here (it has Linux wheels only): `pip install triton`, "
            'or use backend="cuda" or "torch", which do not need it'
        )
    if device == "cpu" and not INTERPRETED:
        if DEVICE == "cuda":
            return (
                "compiled Triton kernels need tensors on the GPU, got cpu: move them there, "
                "or set TRITON_INTERPRET=1 before Python starts"
            )
        return (
            f"TRITON_INTERPRET={os.environ['TRITON_INTERPRET']} asks for compiled Triton kernels and there is no GPU "
            "here to run them: unset it and restart Python"
        )
    if INTERPRETED and isinstance(tl.sum, triton.JITFunction):
        return (
            "Triton was imported before rawgrad and without TRITON_INTERPRET=1, so it cannot interpret kernels: "
            "restart Python and import rawgrad first"
        )
    if INTERPRETED and _version(np.__version__) >= (2, 4) and _version(triton.__version__) < (3, 7):
        return (
            f"the interpreter of Triton {triton.__version__} does not work with numpy {np.__version__}: "
            "install numpy<2.4, or triton>=3.7"
        )
    return None


def _cuda_problem(device: str) -> str | None:
    if device == "cuda":
        if cuda_core() is None:
            return "cuda.core, which compiles and launches .cu files on a GPU, is not installed: `pip install cuda-core`"
    elif sys.platform == "win32":
        return ".cu files run on the host by ucontext, which Windows lacks: use WSL"
    elif compiler() is None:
        return (
            "there is no C++ compiler (c++, g++ or clang++) to run .cu files on the host: "
            "apt install g++, or xcode-select --install, or conda install cxx-compiler"
        )
    return None


def problem(backend: str, device: str = DEVICE) -> str | None:
    """Why `backend` cannot run on tensors of `device` here, in one sentence with what to do; None where it can."""
    if backend not in BACKENDS:
        return f"backend must be one of {', '.join(map(repr, BACKENDS))}, or None for the first that runs here, got {backend!r}"
    return {"triton": _triton_problem, "cuda": _cuda_problem, "torch": lambda device: None}[backend](device)


def backends(device: str = DEVICE) -> tuple[str, ...]:
    """The backends that run on tensors of `device` here, the preferred one first."""
    return tuple(backend for backend in BACKENDS if problem(backend, device) is None)


def choose(backend: str | None, device: str = DEVICE) -> str:
    """`backend`, or the preferred one for None.

    Raises:
        ValueError: there is no backend of that name.
        RuntimeError: it cannot run here; the sentence says what to install or to set.
    """
    if backend is None:
        return backends(device)[0]
    reason = problem(backend, device)
    if reason is not None:
        raise (RuntimeError if backend in BACKENDS else ValueError)(reason)
    return backend


def refuse_bfloat16(backend: str, *dtypes: torch.dtype) -> None:
    """Raise TypeError where `backend` would round one of `dtypes` wrongly."""
    if backend == "triton" and INTERPRETED and torch.bfloat16 in dtypes:
        raise TypeError('Triton\'s interpreter rounds bfloat16 wrongly: use backend="cuda" or "torch", or float32')


_interpreter = threading.Lock()  # it patches triton.language for as long as a kernel runs


@contextlib.contextmanager
def triton_launch(tensor: torch.Tensor):
    """Around every launch of a Triton kernel: on the device of `tensor`, and one at a time where it is interpreted."""
    with torch.cuda.device_of(tensor), _interpreter if INTERPRETED else contextlib.nullcontext():
        yield


@functools.cache
def cuda_core() -> ModuleType | None:
    """`cuda.core`, or `cuda.core.experimental` where an older version has it there, or None."""
    for name in ("cuda.core", "cuda.core.experimental"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "ProgramOptions"):
            return module
    return None


@functools.cache
def compiler() -> tuple[str, ...] | None:
    """The host C++ compiler's command: $CXX, else the first of c++, g++ and clang++ on the path, else None."""
    chosen = os.environ.get("CXX", "").split()
    for command in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return tuple(command)
    return None


@functools.cache
def compiler_version() -> str:
    """First line of the compiler's --version; empty without a compiler."""
    if compiler() is None:
        return ""
    answer = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=False)
    return (answer.stdout or answer.stderr).partition("\n")[0]


@functools.cache
def cache_folder() -> Path:
    """Where builds are kept: rawgrad/ in $XDG_CACHE_HOME or ~/.cache; a folder of this process where that is read-only."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rawgrad"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # a container's user may have no home at all
        folder = Path(tempfile.mkdtemp(prefix="rawgrad-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder


def debug() -> bool:
    """Whether RAWGRAD_DEBUG asks for checks that wait for the GPU."""
    return os.environ.get("RAWGRAD_DEBUG", "0") not in ("", "0")


def environment(**added: str) -> dict[str, str]:
    """This process's environment, with something added, for a process that it starts."""
    return {**os.environ, **added}


def answers_file() -> Path | None:
    """Where predictions are kept between sessions; `make lab` names it, and without a name they last as long as Python."""
    name = os.environ.get("RAWGRAD_ANSWERS")
    return Path(name) if name else None


_LESSONS = {  # by the first backend that runs
    "triton": "run on Triton's kernels, and on CUDA's where you choose them",
    "cuda": "run on the CUDA kernels, with the same results; only what asks for Triton by name shows the line above",
    "torch": "no kernel runs here: prose, views, versions, graphs and PyTorch's own operators do, and each kernel says this",
}


@dataclass(frozen=True)
class Preflight:
    """What runs here and on what: one line each, with what to do where something lacks."""

    lines: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n".join(f"{what:8} {state}" for what, state in self.lines)

    __repr__ = __str__


def preflight() -> Preflight:
    """Look at this machine: device, versions, and how Triton and CUDA kernels run on it."""
    if DEVICE == "cuda":
        device = f"GPU, {torch.cuda.get_device_name()}"
        compiled = "compiled for the GPU by NVRTC"
    else:
        device = "CPU: no GPU was found, so kernels run on the processor, slower and with the same results"
        compiled = f"the same .cu files compiled for the processor by {compiler_version()}"
    lines = [
        ("Python", f"{platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"),
        ("device", device),
        (
            "Triton",
            _triton_problem(DEVICE) or f"{triton.__version__}, {'interpreted' if INTERPRETED else 'compiled for the GPU'}",
        ),
        ("CUDA", _cuda_problem(DEVICE) or compiled),
        ("lessons", _LESSONS[backends()[0]]),
    ]
    return Preflight(tuple(lines))
