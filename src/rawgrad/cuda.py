"""Compiles a `.cu` and launches its kernels: by NVRTC on a GPU, by the host's C++ compiler elsewhere, with one call.

A kernel is a plain `extern "C" __global__` function in a file without includes. Where it says `T` or `U`, the file is
compiled once for each type that it is launched on. `float16` and `bfloat16`, `value(x)` and `rounded<T>(x)` come from
`cuda_numbers.h`. Multiplication and addition are not fused, so that a GPU and the host give the same bits.
"""

import contextlib
import ctypes
import functools
import hashlib
import math
import os
import platform
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rawgrad import runtime

_HERE = Path(__file__).parent
_NUMBERS = _HERE / "cuda_numbers.h"
_ON_HOST = _HERE / "cuda_on_host.h"

# What a declared type takes. Scalars go over at exactly this width: a launch reads as many bytes as the kernel declares.
_SCALARS = {
    "bool": np.bool_, "int": np.int32, "unsigned": np.uint32, "long long": np.int64, "unsigned long long": np.uint64,
    "float": np.float32, "double": np.float64,
}  # fmt: skip
_ELEMENTS = {
    "bool": torch.bool, "signed char": torch.int8, "unsigned char": torch.uint8, "short": torch.int16,
    "int": torch.int32, "long long": torch.int64, "float": torch.float32, "double": torch.float64,
    "float16": torch.float16, "bfloat16": torch.bfloat16,
}  # fmt: skip
_ELEMENT_NAMES = {dtype: name for name, dtype in _ELEMENTS.items()}
_OPEN = ("T", "U")  # types that the tensors of a launch decide
FLOATING = tuple(dtype for dtype in _ELEMENT_NAMES if dtype.is_floating_point)
_GRID_LIMIT, _BLOCK_LIMIT, _THREADS_LIMIT = (2**31 - 1, 65_535, 65_535), (1024, 1024, 64), 1024  # CUDA's, on the host too


class CompileError(RuntimeError):
    """A `.cu` does not compile. The message has the first error and its line; `log` is all that the compiler said."""

    def __init__(self, message: str, log: str):
        super().__init__(message)
        self.log = log


@dataclass(frozen=True)
class _Parameter:
    name: str
    type: str  # "T" stays "T", "U" stays "U"
    is_pointer: bool


def launch(source: Path | str, kernel: str, grid: Sequence[int], block: Sequence[int], *arguments: Tensor | float) -> None:
    """Launch `kernel` of `source` on the device of the tensors among `arguments`, in torch's current stream there.

    Args:
        source: a `.cu` file, or (str) the text of one.
        kernel: name of an `extern "C" __global__` function in it.
        grid, block: up to three sizes each, x first, within CUDA's limits.
        arguments: in the kernel's order. A tensor passes its data pointer, with no strides: its dtype must be the declared
            one, its device the others'. A number passes at the declared width and must fit it.

    Raises:
        TypeError, ValueError: an argument does not fit the declaration. Nothing was launched.
        CompileError: with the line of the `.cu`.
        RuntimeError: nothing here compiles for that device.

    Cost: the first launch of a source and its types compiles: 0.1 s by NVRTC (H200, 2026-11), 0.5 s by g++ 12, which a later
    process finds in the cache. A launch neither copies nor waits; on the host it is finished when it returns.
    """
    text, label = (_text(source), source.name) if isinstance(source, Path) else (source, "kernel.cu")
    parameters = _declaration(text, label, kernel)
    grid, block = _sizes("grid", grid, _GRID_LIMIT), _sizes("block", block, _BLOCK_LIMIT)
    if np.prod(block) > _THREADS_LIMIT:
        raise ValueError(f"a block has at most {_THREADS_LIMIT} threads, got {block}")
    types, device, values = _bind(kernel, parameters, arguments)
    reason = runtime.problem("cuda", device.type)
    if reason:
        raise RuntimeError(reason)
    run = _on_gpu if device.type == "cuda" else _on_host
    run(text, label, types, kernel, device, grid, block, values)


def _text(source: Path) -> str:
    """Read again where the file has changed."""
    now = source.stat()
    return _read(source, now.st_mtime_ns, now.st_size)


@functools.lru_cache(maxsize=64)
def _read(source: Path, changed: int, size: int) -> str:
    return source.read_text()


# What the kernel declares, and whether the arguments fit


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)


@functools.cache
def _kernels(text: str) -> dict[str, str]:
    """Name -> parameter list, of every `extern "C" __global__` function in `text`."""
    pattern = r'extern\s+"C"\s+((?:__global__\s+|void\s+|__launch_bounds__\s*\([^)]*\)\s*)+)(\w+)\s*\(([^)]*)\)'
    found = re.findall(pattern, _without_comments(text))
    return {name: parameters for words, name, parameters in found if "__global__" in words}


@functools.cache
def _declaration(text: str, label: str, kernel: str) -> tuple[_Parameter, ...]:
    kernels = _kernels(text)
    if kernel not in kernels:
        have = ", ".join(map(repr, kernels)) or "none"
        raise ValueError(f'{label} has no kernel {kernel!r}; its extern "C" __global__ functions are {have}')
    parameters = []
    for declared in filter(None, (part.strip() for part in kernels[kernel].split(","))):
        words = re.sub(r"\b(const|__restrict__)\b", " ", declared.replace("*", " * ")).split()
        type_, is_pointer = " ".join(word for word in words[:-1] if word != "*"), "*" in words
        type_ = {"unsigned int": "unsigned"}.get(type_, type_)
        if type_ not in ({*_OPEN, *_ELEMENTS} if is_pointer else {*_OPEN, *_SCALARS}):
            known = ", ".join([*_OPEN, *(_ELEMENTS if is_pointer else _SCALARS)])
            kind = "pointers to" if is_pointer else "numbers of type"
            raise TypeError(f"{label}: {kernel} declares {declared!r}; a launch can pass {kind} {known}")
        parameters.append(_Parameter(words[-1], type_, is_pointer))
    return tuple(parameters)


def _sizes(what: str, sizes: Sequence[int], limits: tuple[int, ...]) -> tuple[int, int, int]:
    whole = isinstance(sizes, Sequence) and len(sizes) <= 3 and all(isinstance(size, int | np.integer) for size in sizes)
    padded = (*map(int, sizes), 1, 1, 1)[:3] if whole else ()
    if not whole or not all(1 <= size <= limit for size, limit in zip(padded, limits, strict=True)):
        raise ValueError(f"a {what} has up to three whole sizes, from 1 to {limits}, got {sizes!r}")
    return padded


def _bind(kernel: str, parameters: tuple[_Parameter, ...], arguments: tuple) -> tuple[tuple[str, ...], torch.device, list]:
    """What T and U stand for (float where no tensor decides), the device, and every argument as an address or a number
    of its exact width."""
    if len(arguments) != len(parameters):
        raise TypeError(
            f"{kernel} takes {len(parameters)} arguments ({', '.join(p.name for p in parameters)}), got {len(arguments)}"
        )
    types, device, values = {}, None, []
    for parameter, argument in zip(parameters, arguments, strict=True):
        if parameter.is_pointer != isinstance(argument, Tensor):
            needed = "a tensor" if parameter.is_pointer else "a number"
            raise TypeError(f"{kernel} takes {needed} for {parameter.name}, got {type(argument).__name__}")
        if not parameter.is_pointer:
            continue
        name = _ELEMENT_NAMES.get(argument.dtype)
        needed = types.get(parameter.type, name) if parameter.type in _OPEN else parameter.type
        if name is None or name != needed:
            raise TypeError(f"{kernel} takes {needed or 'another type'} for {parameter.name}, got a tensor of {argument.dtype}")
        if parameter.type in _OPEN:
            types[parameter.type] = name
        if device not in (None, argument.device):
            raise ValueError(f"{kernel} takes tensors of one device, got {parameter.name} on {argument.device} beside {device}")
        device = argument.device
        if argument.numel() and not argument.is_meta and argument.data_ptr() == 0:
            raise ValueError(f"{kernel} takes a tensor with memory for {parameter.name}, got one without, such as a FakeTensor")
    if device is None:
        device = torch.device(runtime.DEVICE)
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"{kernel} runs on cpu and cuda tensors, got {device}")
    types = {letter: types.get(letter, "float") for letter in _OPEN}
    for parameter, argument in zip(parameters, arguments, strict=True):
        values.append(argument.data_ptr() if parameter.is_pointer else _number(kernel, parameter, argument, types))
    return tuple(types.values()), device, values


def _number(kernel: str, parameter: _Parameter, argument: float, types: dict[str, str]) -> np.generic:
    meant = types.get(parameter.type, parameter.type)
    width = _SCALARS.get(meant)
    if width is None:
        raise TypeError(
            f"{kernel} declares {parameter.name} as {parameter.type} = {meant}, which a number cannot be: declare it float"
        )
    whole = not issubclass(width, np.floating)
    if whole and not isinstance(argument, int | np.integer | np.bool_):
        raise TypeError(f"{kernel} takes a whole number for {parameter.name} ({parameter.type}), got {argument!r}")
    if not whole and not isinstance(argument, int | float | np.integer | np.floating):
        raise TypeError(f"{kernel} takes a number for {parameter.name} ({parameter.type}), got {argument!r}")
    low, high = _limits(width)
    if not low <= argument <= high and abs(argument) != math.inf and argument == argument:
        raise ValueError(f"{kernel} takes {low} to {high} for {parameter.name} ({parameter.type}), got {argument}")
    return width(argument)


@functools.cache
def _limits(width: type[np.generic]) -> tuple[float, float]:
    if width is np.bool_:
        return 0, 1
    if issubclass(width, np.floating):
        return float(np.finfo(width).min), float(np.finfo(width).max)
    return np.iinfo(width).min, np.iinfo(width).max


def _unit(text: str, label: str, types: tuple[str, ...], before: str = "", after: str = "") -> str:
    """What a compiler gets: the `.cu` between what it needs, with the lines of the `.cu` counted as in the file."""
    open_types = "".join(f"using {letter} = {name};\n" for letter, name in zip(_OPEN, types, strict=True))
    numbers = f'#line 1 "{_NUMBERS.name}"\n{_NUMBERS.read_text()}{open_types}'
    return f'{before}{numbers}#line 1 "{label}"\n{text}\n{after}'


def _compile_error(label: str, text: str, log: str) -> CompileError:
    """The first error in one line, with the line of the `.cu`: where it is, or where the template that fails was asked for."""
    # g++ and clang++ say file:line:column: error: what; NVRTC says file(line): error: what, or "at line 3 of file"
    here, said = re.escape(label), "\n".join(line for line in log.splitlines() if not re.search(r"\bwarning\b", line))
    error = re.search(r"\berror\b[^:\n]*:\s*([^\n]*)", said)
    what = error[1].strip() if error else " ".join(log.split())[:300]
    at = re.search(rf"{here}[:(](\d+)[^\n]*?\berror\b[^:\n]*:\s*([^\n]*)", said)
    if at:
        what = at[2].strip()
    at = at or re.search(rf"{here}[:(](\d+)", said) or re.search(rf"line (\d+) of {here}", said)
    if not at:
        return CompileError(f"{label} does not compile: {what}", log)
    line = (text.splitlines()[int(at[1]) - 1 : int(at[1])] or [""])[0].strip()
    return CompileError(f"{label}, line {at[1]}: {what}: {line}", log)


# On a GPU


def compile_for(source: Path, architecture: str, dtype: torch.dtype = torch.float32) -> bytes:
    """The cubin of `source` for an `architecture` such as "sm_90", with T and U for `dtype`. NVRTC needs no GPU for it.

    Raises:
        CompileError: with the line of the `.cu`.
        RuntimeError: cuda.core is not installed.
    """
    return bytes(_cubin(source.read_text(), source.name, (_ELEMENT_NAMES[dtype],) * len(_OPEN), architecture).code)


@functools.cache
def _cubin(text: str, label: str, types: tuple[str, ...], architecture: str):
    core = runtime.cuda_core()
    if core is None:
        raise RuntimeError(runtime.problem("cuda", "cuda"))
    options = core.ProgramOptions(std="c++17", arch=architecture, fma=False)
    try:
        return core.Program(_unit(text, label, types), "c++", options).compile("cubin")
    except Exception as problem:
        if "log:" not in str(problem):  # not the compiler's word: no NVRTC here, say
            raise
        raise _compile_error(label, text, str(problem)) from None


_gpu_build = threading.Lock()


def _on_gpu(text, label, types, kernel, device, grid, block, values) -> None:
    core = runtime.cuda_core()
    with torch.cuda.device(device):
        core.Device(device.index).set_current()  # a thread that torch has not touched yet has no context
        with _gpu_build:
            function = _gpu_function(text, label, types, kernel, device.index)
        stream = core.Stream.from_handle(torch.cuda.current_stream(device).cuda_stream)
        core.launch(stream, core.LaunchConfig(grid=grid, block=block), function, *values)


@functools.cache
def _gpu_function(text: str, label: str, types: tuple[str, ...], kernel: str, index: int):
    major, minor = torch.cuda.get_device_capability(index)
    return _cubin(text, label, types, f"sm_{major}{minor}").get_kernel(kernel)


# On the host

_host = threading.Lock()  # ctypes lets other threads run during a launch, and a build has one block's worth of state


def _unlock() -> None:
    global _host
    _host = threading.Lock()


if hasattr(os, "register_at_fork"):  # a child that was forked during a launch would wait for ever
    os.register_at_fork(after_in_child=_unlock)


def _on_host(text, label, types, kernel, device, grid, block, values) -> None:
    boxes = [ctypes.c_void_p(v) if isinstance(v, int) else np.array(v) for v in values]
    addresses = [ctypes.addressof(b) if isinstance(b, ctypes.c_void_p) else b.ctypes.data for b in boxes]
    triple = ctypes.c_uint * 3
    with _host:
        function = _host_function(text, label, types, kernel)
        function(triple(*grid), triple(*block), (ctypes.c_void_p * len(boxes))(*addresses))


@functools.cache
def _host_function(text: str, label: str, types: tuple[str, ...], kernel: str) -> Callable:
    return ctypes.CDLL(str(_shared_object(text, label, types)))[f"launch_{kernel}"]


def _shared_object(text: str, label: str, types: tuple[str, ...]) -> Path:
    """The build of `text` for the host: made once for each content, compiler and machine, and found again after that.

    Two processes that build the same write each its own file and put it in place in one step: the last one wins.
    """
    entries = "".join(
        f'extern "C" void launch_{name}(const unsigned* grid, const unsigned* block, void** arguments) '
        f"{{ cuda_on_host::launch({name}, grid, block, arguments); }}\n"
        for name in _kernels(text)
    )
    before = f'#line 1 "{_ON_HOST.name}"\n{_ON_HOST.read_text()}'
    unit = _unit(text, label, types, before, f'#line 1 "launch.cpp"\n{entries}')
    command = [*runtime.compiler(), "-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-w"]
    key = "\n".join([*command, runtime.compiler_version(), platform.machine(), platform.system(), unit])
    target = runtime.cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    if target.exists():
        return target
    handle, built = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        compiled = subprocess.run(
            [*command, "-x", "c++", "-", "-o", built],
            input=unit, capture_output=True, text=True, check=False, env=runtime.environment(LC_ALL="C"),
        )  # fmt: skip
        if compiled.returncode:
            raise _compile_error(label, text, compiled.stderr)
        os.replace(built, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(built)
    return target
