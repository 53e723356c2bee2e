"""What ends a process is survived, named and placed; what was found before it is kept."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from rawgrad import doctor, runtime
from rawgrad.doctor import isolated
from rawgrad.doctor.isolated import examine_isolated
from rawgrad.doctor.report import Finding

SLEEPS = "sleeps = on_strides(lambda dy: threading.Event().wait())"
SEGFAULTS = "segfaults = on_strides(lambda dy: ctypes.string_at(0))"
HOSTILE = '''
import ctypes, os, signal, subprocess, sys, threading, time
import torch

def made(backward):
    class Hostile(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, dy):
            return 2 * backward(dy)

    return Hostile.apply

def on_strides(harm):
    """Healthy as long as dy is contiguous, so that some checks have passed before."""
    return made(lambda dy: dy if dy.is_contiguous() else harm(dy))

def raise_(dy):
    raise IndexError("beyond the end")

def hang(dy):
    while True: pass

def chat(dy):
    for _ in range(20000):
        print("x" * 100)
        print("y" * 100, file=sys.stderr)
    return dy

def leave_others(dy):
    subprocess.Popen(["sleep", "1234.5"])
    os._exit(4)

raises = on_strides(raise_)
hangs = on_strides(hang)
SLEEPS
SEGFAULTS
grows = on_strides(lambda dy: [bytearray(1 << 26) for _ in iter(int, 1)])
grows_in_torch = on_strides(lambda dy: [torch.zeros(1 << 24) for _ in iter(int, 1)])
leaves_others = on_strides(leave_others)
exits = on_strides(lambda dy: os._exit(3))
leaves = on_strides(lambda dy: sys.exit("I am leaving"))
is_killed = on_strides(lambda dy: os.kill(os.getpid(), signal.SIGKILL))
chats = made(chat)
healthy = made(lambda dy: dy)
triples = made(lambda dy: 1.5 * dy)
not_callable = 3

class Nested:
    apply = triples

def twice(x):
    return 2 * x

def make_inputs():
    return (torch.ones(3, 4, requires_grad=True),)

def make_sized(size):
    return (torch.ones(3, size, requires_grad=True),)

def make_nothing():
    raise OSError("no such data")
'''.replace("SLEEPS", SLEEPS).replace("SEGFAULTS", SEGFAULTS)

BEFORE = ["repeats", "is_deterministic", "respects_upstream_strides", "lets_go"]  # the third meets the harm
X = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    (tmp_path / "breaks.py").write_text("import not_there\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ended(name: str, **how):
    """What an examination of it found, and its last finding."""
    report = examine_isolated(f"hostile:{name}", (X,), checks=BEFORE, **how)
    assert [finding.check for finding in report.findings[:3]] == ["runs", "repeats", "is_deterministic"]
    assert {finding.verdict for finding in report.findings[:3]} == {"healthy"}, "what was found before is kept"
    last = report.findings[-1]
    assert not report.ok
    assert (last.verdict, last.silent, last.lesson) == ("broken", False, "01")
    assert last.remedy
    return report, last


def line(of: str) -> int:
    return HOSTILE.splitlines().index(of) + 1


@pytest.mark.parametrize(
    ("name", "evidence"),
    [
        ("segfaults", f"the process died with signal SIGSEGV, in <lambda> at hostile.py:{line(SEGFAULTS)}"),
        ("exits", "the process exited with code 3"),
        ("leaves", "the process exited with code 1: I am leaving"),
        ("is_killed", "the process was killed by SIGKILL, as a machine does that runs out of memory"),
    ],
)
def test_the_end_of_the_process_is_survived_and_named(name, evidence):
    report, last = ended(name)
    assert (last.check, last.evidence) == ("respects_upstream_strides", f"{evidence} (checks not run: 1)")
    assert len(report.findings) == 4


@pytest.mark.parametrize(
    ("name", "place"),
    [("hangs", f"hang at hostile.py:{line('    while True: pass')}"), ("sleeps", f"<lambda> at hostile.py:{line(SLEEPS)}")],
)
def test_a_hang_is_ended_in_time_and_placed(name, place):
    began = {}
    _, last = ended(name, timeout=3, progress=lambda check: began.setdefault(check, time.monotonic()))
    assert last.evidence == f"hung: no answer within 3 s, in {place} (checks not run: 1)"
    assert 3 <= time.monotonic() - began[last.check] <= 3 + 5


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize(("name", "said"), [("grows", "MemoryError"), ("grows_in_torch", "can't allocate memory")])
def test_exhausted_memory_is_survived_and_named(name, said):
    _, last = ended(name, memory_limit_mb=500)
    assert last.check == "respects_upstream_strides"
    assert last.evidence.startswith("out of memory: ")
    assert said in last.evidence
    assert last.evidence.endswith(" (checks not run: 1)")


def test_an_exception_is_a_finding_and_the_rest_is_run():
    report = examine_isolated("hostile:raises", (X,), checks=BEFORE)
    assert [finding.check for finding in report.findings] == ["runs", *BEFORE]
    assert [finding.verdict for finding in report.findings] == ["healthy", "healthy", "healthy", "broken", "healthy"]
    assert "IndexError: beyond the end" in report.of("respects_upstream_strides")[0].evidence


def test_who_prints_a_lot_does_not_wait_for_a_reader():
    assert examine_isolated("hostile:chats", (X,), checks=["repeats"], timeout=20).ok


def test_what_the_process_started_ends_with_it():
    ended("leaves_others")
    assert subprocess.run(["pgrep", "-f", "sleep 1234.5"], capture_output=True, check=False).stdout == b""


def test_inputs_go_over_as_they_are_and_stay_as_they_are(folder):
    (folder / "looks.py").write_text(
        "import torch\n"
        "def look(x, z, pair, n, name):\n"
        "    assert x.requires_grad and not pair[0].requires_grad\n"
        "    assert pair[0].tolist() == [0, 2] and (n, name, pair[1]) == (3, 'a', None), (pair, n, name)\n"
        "    assert z.tolist() == [1 - 2j]\n"
        "    return x * n\n"
    )
    x = torch.arange(12.0).view(3, 4).t().requires_grad_()
    x.grad = torch.ones(4, 3)
    given = (x, torch.tensor([1 + 2j]).conj(), (torch.tensor([0, 2]), None), 3, "a")
    assert examine_isolated("looks:look", given, checks=["repeats"]).ok
    assert (x.stride(), x._version, x.grad.sum().item()) == ((1, 4), 0, 12)
    assert torch.equal(x, torch.arange(12.0).view(3, 4).t())
    assert given[1].is_conj()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("nowhere:f", (X,)), "'nowhere:f' cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        (("breaks:f", (X,)), "'breaks:f' cannot be imported: ModuleNotFoundError: No module named 'not_there'"),
        (("hostile:nothing.apply", (X,)), "'hostile:nothing.apply' is not there: hostile has no attribute 'nothing'"),
        (("hostile:healthy", "hostile:make_nothing"), "'hostile:make_nothing' made no inputs: OSError: no such data"),
        (("hostile:healthy", (torch.ones(2),)), "examine differentiates inputs that require grad, and none of these does"),
        (("hostile:healthy", "gone.pt"), "'gone.pt' cannot be read as inputs: FileNotFoundError"),
    ],
)  # fmt: skip
def test_a_mistake_that_the_child_sees_gets_one_sentence(call, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        examine_isolated(*call)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: examine_isolated("hostile", (X,)), "isolate needs 'module:function' by name, .* got 'hostile'"),
        (lambda: examine_isolated(torch.square, (X,)), "isolate needs 'module:function' by name"),
        (lambda: examine_isolated("hostile:f", (X,), torch.square), "reference needs 'module:function' by name"),
        (lambda: examine_isolated("hostile:f", (X,), timeout=0), "timeout needs seconds, more than 0, got 0"),
        (
            lambda: examine_isolated("hostile:f", (X, [torch.square])),
            r"inputs\[1\]\[0\] is of builtin_function_or_method, which isolate sends to no other",
        ),
        (lambda: isolated._made("hostile"), "inputs need 'module:make_inputs', or a file that ends in .pt, got 'hostile'"),
        (lambda: isolated._imported("math:pi"), "'math:pi' needs to be callable, got float"),
    ],
)
def test_a_mistake_that_the_parent_sees_starts_nothing(call, message, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ValueError, match=message):
        call()


def test_where_the_cuda_context_is_gone_the_rest_is_skipped(monkeypatch):
    seen = [Finding("repeats", "healthy", False, "", "", "02"), Finding("accumulates", "refused", False, "oh", "", "03")]
    answers = iter(["", "CUDA error: an illegal memory access was encountered"])
    monkeypatch.setattr(isolated, "_lost_context", lambda: next(answers))
    said = []
    names = ["repeats", "accumulates", "lets_go", "survives_checkpoint"]
    isolated._tell(seen[0], iter(seen[1:]), names, lambda **word: said.append(word))
    found = [Finding(**word["finding"]) for word in said[:-1]]
    assert said[-1] == {"done": True}
    assert [(f.check, f.verdict) for f in found] == [
        ("repeats", "healthy"), ("accumulates", "broken"), ("lets_go", "skipped"), ("survives_checkpoint", "skipped"),
    ]  # fmt: skip
    assert found[1].evidence == "the CUDA context is gone: CUDA error: an illegal memory access was encountered"
    assert found[2].evidence == "the CUDA context is gone"


def test_a_line_that_was_not_finished_is_nothing(tmp_path):
    (tmp_path / "said").write_bytes(b'{"check": "repeats", "doing": ""}\n{"finding": {"che')
    said = isolated._Said(tmp_path / "said", None)
    assert said.listen()
    assert not said.listen()
    assert (said.check, said.findings) == ("repeats", [])


def prompt(*arguments: str):
    done = subprocess.run(
        [sys.executable, "-m", "rawgrad", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=runtime.environment(PYTHONPATH=os.pathsep.join(sys.path)),
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command_says_the_report_and_its_verdict():
    code, out, err = prompt(
        "examine", "hostile:Nested.apply", "--inputs", "hostile:make_sized", "--reference", "hostile:twice",
        "--checks", "repeats,agrees_with_reference,handles_any_size",
    )  # fmt: skip
    assert (code, err) == (1, ""), "it triples: twice 2"
    assert out.startswith("hostile:Nested.apply: BROKEN (")
    assert "  broken   agrees_with_reference" in out
    code, out, err = prompt(
        "examine", "hostile:twice", "--inputs", "hostile:make_inputs", "--checks", "repeats", "--allow", "repeats=so meant"
    )
    assert (code, err) == (0, "")
    assert out.splitlines() == ["hostile:twice: nothing is broken (2 healthy)", "  healthy  runs", "  healthy  repeats"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("examine", "hostile:twice"), "python -m rawgrad examine: the following arguments are required: --inputs; --help"),
        (("examine", "hostile", "--inputs", "a:b"), "isolate needs 'module:function' by name"),
        (("examine", "hostile:twice", "--inputs", "a:b", "--allow", "x"), "python -m rawgrad examine: --allow needs CHECK="),
        (("examin",), "python -m rawgrad takes nothing, or examine module:function, got 'examin'"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_command_gets_one_sentence_and_exits_with_2(arguments, message):
    code, out, err = prompt(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_checks_are_told_as_they_begin():
    told = []
    examine_isolated("hostile:healthy", (X,), checks=["repeats", "lets_go"], progress=told.append)
    assert [name for name in told if name != "runs"] == ["repeats", "lets_go"]
    assert set(told) <= {"runs", *doctor.CHECKS}


def test_signals_have_names():
    assert isolated._end(-signal.SIGBUS, "")[1] == "the process died with signal SIGBUS"
    assert isolated._end(-signal.SIGABRT, "terminate called after 'std::bad_alloc'")[0] == "memory"
