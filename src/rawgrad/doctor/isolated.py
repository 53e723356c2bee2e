"""An examination in a process of its own, so that a hang, a crash or exhausted memory is survived and told.

The parent writes a request and the inputs to a folder. The child writes what it does and what it found to a file there, a line
at a time, so that whatever was found before its end is kept, and the check during which it ended has a name.
"""

import contextlib
import faulthandler
import importlib
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from rawgrad import doctor, runtime
from rawgrad.doctor.report import Finding, Report

_START = 60.0  # seconds for Python and torch to load: nobody's code runs until then
_GRACE = 5.0  # seconds to leave by itself, once everything is said
_TAIL = 1 << 16  # bytes of stderr that are kept
_NAMED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_EXHAUSTED = re.compile(r"\bMemoryError\b|bad_alloc|can't allocate memory|out of memory|OutOfMemoryError")
_REMEDIES = {
    "hung": "look for a loop without an end, and for a wait for a lock or a stream that nobody answers",
    "died": "a pointer left its memory: compare what the kernel is told, sizes and strides, with the tensors",
    "exited": "see what it says, and raise an exception instead of ending the process",
    "memory": "see what is allocated, and by what size",
}


def examine_isolated(
    target: str,
    inputs: tuple | str,
    reference: str | None = None,
    *,
    seed: int = 0,
    checks: Sequence[str] | None = None,
    allow: Mapping[str, str] | None = None,
    tolerance: float | None = None,
    timeout: float = 60.0,
    memory_limit_mb: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """`examine` in a fresh process. If that ends early, the last finding says how, and in which check.

    Args:
        target: "module:function", which the child imports; "module:Square.apply" finds an attribute's attribute. The current
            folder and this process's sys.path are searched.
        inputs: tensors, numbers, strings, and tuples, lists and dicts of them, which are saved for the child; or
            "module:make_inputs", called in the child, by a number where it takes one, as `examine` does; or the path of a
            tuple that torch.save wrote, ending in .pt.
        reference: "module:function", or None.
        timeout: seconds without a word from the child, which speaks before each check, until it is killed.
        memory_limit_mb: address space that the child may add to what it has when the first check begins; None: all there is.

    Raises:
        ValueError: what examine raises; and a target that cannot be imported, in one sentence.
    """
    for what, name in {"isolate": target, "reference": reference}.items():
        if name is not None and not (isinstance(name, str) and _NAMED.fullmatch(name)):
            raise ValueError(f"{what} needs 'module:function' by name, so that a fresh process can import it, got {name!r}")
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout needs seconds, more than 0, got {timeout}")
    with tempfile.TemporaryDirectory(prefix="rawgrad-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if not isinstance(inputs, str):
            torch.save(_sendable(inputs, "inputs"), folder / "inputs.pt")
            inputs = str(folder / "inputs.pt")
        request = {
            "target": target, "inputs": inputs, "reference": reference, "path": [entry or os.getcwd() for entry in sys.path],
            "memory_limit_mb": memory_limit_mb,
            "how": {"seed": seed, "checks": checks and list(checks), "allow": allow and dict(allow), "tolerance": tolerance},
        }  # fmt: skip
        (folder / "request.json").write_text(json.dumps(request))
        said = _Said(folder / "said.jsonl", progress)
        end = _run(folder, said, timeout)
    if said.mistake:
        raise ValueError(said.mistake)
    if end:
        kind, how = end
        said.findings.append(_ended(said.check, kind, f"{said.doing}{how}", len(_after(said.check, checks))))
    return Report(target, tuple(said.findings))


def _sendable(value, where: str):
    """A copy that torch.load(weights_only=True) reads.

    Raises:
        ValueError: it holds something else.
    """
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return value.detach().requires_grad_(value.requires_grad)
        made = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return made.requires_grad_(value.requires_grad)
    if isinstance(value, tuple | list):
        made = [_sendable(one, f"{where}[{n}]") for n, one in enumerate(value)]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict):
        return {key: _sendable(one, f"{where}[{key!r}]") for key, one in value.items()}
    if value is None or type(value) in (bool, int, float, complex, str, torch.dtype, torch.device):
        return value
    raise ValueError(
        f"{where} is of {type(value).__name__}, which isolate sends to no other process: give 'module:make_inputs' by name"
    )


def _ended(check: str, kind: str, how: str, left: int) -> Finding:
    """The last finding; `left` checks were not run."""
    lesson = doctor.CHECKS[check].lesson if check in doctor.CHECKS else "00"
    return Finding(check, "broken", False, f"{how}{f' (checks not run: {left})' if left else ''}", _REMEDIES[kind], lesson)


def _after(check: str, checks: Sequence[str] | None) -> list[str]:
    """What would have been run next; `check` may be "runs", which comes before them all."""
    names = list(checks or doctor.CHECKS)
    return names[names.index(check) + 1 :] if check in names else names


# The parent


class _Said:
    """What the child has said so far."""

    def __init__(self, path: Path, progress: Callable[[str], None] | None):
        self.path, self.progress = path, progress
        self.read = 0  # bytes
        self.findings: list[Finding] = []
        self.check, self.doing = "runs", "while Python starts, "
        self.started = self.done = False
        self.mistake = ""

    def listen(self) -> bool:
        """Whether anything new was said. A line that was not finished is nothing."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.read)
            whole = file.read().rpartition(b"\n")
            self.read += len(whole[0]) + len(whole[1])
            for line in whole[0].splitlines():
                self._take(json.loads(line))
            return bool(whole[0])
        return False

    def _take(self, word: dict) -> None:
        self.started = True
        self.mistake = word.get("mistake", "")
        self.done |= word.get("done", False)
        if "finding" in word:
            self.findings.append(Finding(**word["finding"]))
        if "check" in word:
            self.check, self.doing = word["check"], word["doing"]
            if self.progress and not self.doing:
                self.progress(self.check)


class _Tail:
    """The last of what comes out of a pipe; a thread reads it, so that who writes never waits."""

    def __init__(self, pipe):
        self.kept = b""
        self.thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self.thread.start()

    def _read(self, pipe) -> None:
        with pipe, contextlib.suppress(OSError):
            while some := pipe.read1(_TAIL):
                self.kept = (self.kept + some)[-_TAIL:]

    def text(self) -> str:
        self.thread.join(1)  # a grandchild may hold the pipe
        return self.kept.decode(errors="replace")


def _run(folder: Path, said: _Said, timeout: float) -> tuple[str, str] | None:
    """Start the child and listen. How it ended; None where it said everything."""
    environment = runtime.environment(TMPDIR=str(folder))
    home = str(Path(runtime.__file__).parent.parent)  # an editable copy of the package, or one that sys.path found
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), home]))
    child = subprocess.Popen(
        [sys.executable, "-m", "rawgrad", "examine", "--request", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    stderr = _Tail(child.stderr)
    heard, hung = time.monotonic(), False
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.05)
            gone = child.returncode is not None  # before listening: its last words count
            if said.listen():
                heard = time.monotonic()
            if gone:
                break
            limit = _GRACE if said.done or said.mistake else timeout if said.started else max(timeout, _START)
            if time.monotonic() - heard > limit:
                hung = True
                break
        if hung and not said.done:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                child.send_signal(signal.SIGABRT)  # faulthandler says where it is
                child.wait(1)
    finally:
        _kill(child)
    if said.done or said.mistake:
        return None
    text = stderr.text()
    return ("hung", f"hung: no answer within {limit:g} s{_place(text)}") if hung else _end(child.returncode, text)


def _kill(child: subprocess.Popen) -> None:
    """The child, and what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    child.wait()


def _end(code: int, stderr: str) -> tuple[str, str]:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if code == -signal.SIGKILL:
        return "memory", "the process was killed by SIGKILL, as a machine does that runs out of memory"
    if code >= 0:
        return "exited", f"the process exited with code {code}{f': {lines[-1][:200]}' if lines else ''}"
    if "bad_alloc" in stderr:
        return "memory", f"out of memory: std::bad_alloc{_place(stderr)}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return "died", f"the process died with signal {name}{_place(stderr)}"


def _place(dump: str) -> str:
    """Where in the caller's code it was, by faulthandler's traceback, which begins with the innermost call."""
    theirs = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    for file, line, name in re.findall(r'^  File "(.+)", line (\d+) in (.+)$', dump, flags=re.MULTILINE):
        if not file.startswith((*theirs, "<", str(Path(__file__).parent))) and "site-packages" not in file:
            return f", in {name} at {Path(file).name}:{line}"
    return ""


# The child


def serve(folder: Path) -> None:
    """What the child does: import, examine, and say each step before it is taken."""
    request = json.loads((folder / "request.json").read_text())
    with (folder / "said.jsonl").open("ab", buffering=0) as file:

        def say(**word) -> None:
            file.write(json.dumps(word).encode() + b"\n")

        _protect()
        sys.path += [entry for entry in request["path"] if entry not in sys.path]
        try:
            say(check="runs", doing=f"while {request['target']} was imported, ")
            func = _imported(request["target"])
            reference = None if request["reference"] is None else _imported(request["reference"])
            say(check="runs", doing="while inputs were made, ")
            inputs = _made(request["inputs"])
            limit = request["memory_limit_mb"]
            if limit is not None:
                _limit(limit)
            say(check="runs", doing="")
            found = doctor.examination(
                func,
                inputs,
                reference,
                progress=lambda check: say(check=check, doing=""),
                alone=limit is None,  # what is mapped there from a file counts as address space
                **request["how"],
            )
            first = next(found, None)  # the caller's mistakes are raised until here
        except ValueError as problem:
            say(mistake=str(problem))
            return
        _tell(first, found, request["how"]["checks"], say)


def _tell(first: Finding | None, rest: Iterator[Finding], checks: Sequence[str] | None, say: Callable) -> None:
    """Say every finding, up to one after which no other can be trusted."""
    finding = first
    while finding is not None:
        if _EXHAUSTED.search(finding.evidence):
            left = len(_after(finding.check, checks))
            say(finding=asdict(_ended(finding.check, "memory", f"out of memory: {finding.evidence}", left)))
            break
        gone = _lost_context()
        if gone:
            say(finding=asdict(_ended(finding.check, "died", f"the CUDA context is gone: {gone}", 0)))
            for name in _after(finding.check, checks):
                lesson = doctor.CHECKS[name].lesson
                say(finding=asdict(Finding(name, "skipped", False, "the CUDA context is gone", "", lesson)))
            break
        say(finding=asdict(finding))
        finding = next(rest, None)
    say(done=True)


def _lost_context() -> str:
    """What CUDA says when it answers no more; empty where it does, or was not asked for anything."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as problem:
        return str(problem).partition("\n")[0]
    return ""


def _protect() -> None:
    faulthandler.enable()
    with contextlib.suppress(ImportError):
        import resource  # POSIX only

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit(megabytes: int) -> None:
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        raise ValueError("a memory limit needs Linux: leave memory_limit_mb out") from None
    total = pages * resource.getpagesize() + megabytes * (1 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (total, total))


def _imported(name: str):
    """What "module:attribute" names.

    Raises:
        ValueError: in one sentence, why not.
    """
    module, _, path = name.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as problem:
        raise ValueError(f"{name!r} cannot be imported: {_sentence(problem)}") from problem
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise ValueError(f"{name!r} is not there: {getattr(found, '__name__', found)} has no attribute {attribute!r}")
        found = getattr(found, attribute)
    if not callable(found):
        raise ValueError(f"{name!r} needs to be callable, got {type(found).__name__}")
    return found


def _made(inputs: str):
    """A tuple, or what makes one from a number."""
    if inputs.endswith(".pt"):
        try:
            return torch.load(inputs, weights_only=True)
        except Exception as problem:
            raise ValueError(f"{inputs!r} cannot be read as inputs: {_sentence(problem)}") from problem
    if not _NAMED.fullmatch(inputs):
        raise ValueError(f"inputs need 'module:make_inputs', or a file that ends in .pt, got {inputs!r}")
    make = _imported(inputs)
    try:
        sized = any(one.default is one.empty for one in inspect.signature(make).parameters.values())
        return make if sized else tuple(make())
    except Exception as problem:
        raise ValueError(f"{inputs!r} made no inputs: {_sentence(problem)}") from problem


def _sentence(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"[:200]
