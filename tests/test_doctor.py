"""The doctor: each check catches its specimen, nothing else catches it, and what is healthy is left alone."""

import copy
import functools
import re

import diseased
import pytest
import torch
from diseased import SPECIMENS

import rawgrad
from rawgrad import doctor, specimens
from rawgrad.doctor import CHECKS
from rawgrad.doctor.report import VERDICTS, Broken, Finding, Report


@pytest.fixture(autouse=True)
def _as_in_a_users_process():
    torch.use_deterministic_algorithms(False)
    diseased._shapes.clear()
    diseased._everything.clear()


@functools.cache
def examined(name: str) -> Report:
    specimen = SPECIMENS[name]
    found = doctor.examination(specimen.func, specimen.inputs(), specimen.reference, alone=specimen.alone)
    return Report(name, tuple(found))


def test_every_check_has_a_specimen():
    assert SPECIMENS.keys() == CHECKS.keys() - {"follows_the_stream"}, "that one needs a GPU: test_streams.py"


@pytest.mark.parametrize("name", SPECIMENS)
def test_each_check_catches_its_specimen_and_no_other_check_does(name):
    report = examined(name)
    caught = {finding.check for finding in report.findings if finding.told}
    if name == "is_deterministic":  # differences in the last bits are healthy, and worth knowing
        assert caught == set()
        assert report.verdict(name) == "note"
        return
    assert caught == {name, *SPECIMENS[name].also}
    (finding, *_) = report.of(name)
    assert finding.told
    assert finding.remedy
    assert finding.lesson in {"00", "01", "02", "03", "04", "06"}
    assert re.search(r"\d", finding.evidence) or "CheckpointError" in finding.evidence, "numbers"


@pytest.mark.parametrize("name", SPECIMENS)
def test_without_its_check_a_specimen_goes_uncaught(name):
    """Checks know nothing of one another, so what the others said is what they say without it."""
    others = [finding for finding in examined(name).findings if finding.check != name]
    assert not any(finding.told for finding in others)


SQUARE = (torch.linspace(-1, 1, 12).view(3, 4).requires_grad_(),)


@pytest.mark.parametrize("backend", ["triton", "cuda", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_square_is_healthy(backend, dtype, device):
    x = SQUARE[0].detach().to(device, dtype).requires_grad_()
    report = rawgrad.examine(lambda x: rawgrad.square(x, backend=backend), (x,), torch.square)
    assert report.ok
    assert not any(finding.told for finding in report.findings), report


def test_nothing_that_was_given_is_changed():
    x, mask = torch.randn(3, 4, requires_grad=True), torch.ones(3, 4)
    x.grad = torch.full((3, 4), 7.0)
    before = copy.deepcopy((x.detach(), x.grad, mask))
    state = torch.get_rng_state()
    rawgrad.examine(lambda x, m: specimens.GradientInSaved.apply(x, "torch") * m.mul_(2), (x, mask))
    assert torch.equal(x, before[0])
    assert torch.equal(x.grad, before[1])
    assert torch.equal(mask, before[2])
    assert (x._version, mask._version) == (0, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_same_seed_gives_the_same_report():
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    func = lambda x: torch.nn.functional.dropout(x, 0.5) ** 2  # noqa: E731
    first, second = (rawgrad.examine(func, (x,), seed=3) for _ in range(2))
    assert first.ok
    assert repr(first) == repr(second)


def test_only_what_requires_grad_is_differentiated():
    x, index = torch.randn(5, 3, requires_grad=True), torch.tensor([0, 2, 2])
    report = rawgrad.examine(lambda x, i, n: x[i] * n, (x, index, 3))
    assert report.ok


def test_a_module_is_examined_with_its_parameters():
    module = torch.nn.Linear(3, 2)
    assert rawgrad.examine(module, (torch.randn(4, 3, requires_grad=True),), checks=["serves_any_subset", "repeats"]).ok
    before = module.weight.detach().clone()

    class Clobbers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x):
            return specimens.GradientInSaved.apply(self.weight, None) * x

    report = rawgrad.examine(Clobbers(), (torch.randn(4),))
    assert "input 0" in report.of("repeats")[0].evidence
    assert torch.equal(module.weight, before)


def test_a_kink_is_no_fault():
    x = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    report = rawgrad.examine(torch.relu, (x,))
    assert report.ok
    assert report.verdict("matches_differences") == "note"
    assert rawgrad.examine(lambda x: x.amax(-1), (torch.ones(3, 4, dtype=torch.float64, requires_grad=True),)).ok


def test_a_modules_buffers_are_left_alone():
    module = torch.nn.BatchNorm1d(3)
    rawgrad.examine(module, (torch.randn(5, 3, requires_grad=True),), checks=["repeats", "accumulates"])
    assert module.num_batches_tracked == 0
    assert torch.equal(module.running_mean, torch.zeros(3))


def test_one_tensor_is_a_tuple_of_one():
    assert rawgrad.examine(torch.square, SQUARE[0], checks=["repeats"]).ok


def test_what_never_ran_is_not_ok():
    def raises(x):
        raise ValueError("two are needed")

    report = rawgrad.examine(raises, SQUARE)
    assert not report.ok
    assert str(report).startswith("raises: NOT EXAMINED, on plain contiguous inputs: ValueError: two are needed")
    with pytest.raises(Broken, match="two are needed"):
        report.raise_if_broken()


def test_inputs_may_be_made_from_a_number():
    seen = []

    def inputs(size):
        seen.append(size)
        return (torch.linspace(-1, 1, 3 * size).view(3, size).requires_grad_(),)

    assert rawgrad.examine(torch.square, inputs, torch.square).ok
    assert {0, 1, 31, 32, 33, 1025} <= set(seen)


def test_an_exception_is_evidence():
    def raises(x):
        raise IndexError("beyond the end")

    (finding,) = rawgrad.examine(raises, SQUARE).findings
    assert (finding.check, finding.verdict) == ("runs", "broken")
    assert "IndexError: beyond the end" in finding.evidence


def test_a_refusal_is_neither_right_nor_wrong():
    class WantsContiguous(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if not x.is_contiguous():
                raise ValueError("x has to be contiguous")
            return 3 * x

        @staticmethod
        def backward(ctx, dy):
            return 3 * dy.contiguous()

    report = rawgrad.examine(WantsContiguous.apply, SQUARE)
    assert report.ok
    assert report.verdict("respects_input_strides") == "refused"
    assert "x has to be contiguous" in report.of("respects_input_strides")[0].evidence


def test_one_shot_refuses_and_is_not_broken():
    report = rawgrad.examine(lambda x: specimens.OneShot.apply(x + 0, "torch"), SQUARE)
    assert report.ok, report
    refused = {finding.check for finding in report.findings if finding.verdict == "refused"}
    assert {"repeats", "survives_checkpoint", "survives_saved_tensor_hooks"} <= refused


def test_what_is_declared_is_told_apart():
    def verdicts(function):
        return {f.verdict for f in rawgrad.examine(lambda x: function.apply(x, "torch"), SQUARE).of("leaves_inputs_alone")}

    assert verdicts(specimens.GradientInSaved) == {"note"}, "PyTorch's own write is counted"
    report = rawgrad.examine(lambda x: specimens.GradientInSaved.apply(x, None), SQUARE)
    assert report.verdict("leaves_inputs_alone") == "unsafe"
    assert report.of("leaves_inputs_alone")[0].silent
    report = rawgrad.examine(lambda x: specimens.DoublesInPlaceAnnounced.apply(x, None), SQUARE)
    assert report.verdict("leaves_upstream_alone") == "unsafe", "declaring never helps dy"


class _Marked(torch.autograd.Function):
    """In place, and it says so."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


def test_a_declared_write_in_forward_is_a_note():
    report = rawgrad.examine(_Marked.apply, SQUARE)
    assert report.ok, report
    assert report.verdict("leaves_inputs_alone") == "note"


def test_what_is_allowed_becomes_a_note():
    func = lambda x: specimens.DoublesInPlace.apply(x, "torch")  # noqa: E731
    meant = {"leaves_upstream_alone": "saves memory, by design", "shares_with_siblings": "no residual here"}
    report = rawgrad.examine(func, SQUARE, allow=meant)
    assert report.ok
    assert report.of("leaves_upstream_alone")[0].evidence.startswith(
        "allowed, saves memory, by design: backward writes over 12"
    )
    assert not rawgrad.examine(func, SQUARE).ok


def test_checks_select_and_progress_is_told():
    told = []
    report = rawgrad.examine(torch.square, SQUARE, checks=["repeats", "lets_go"], progress=told.append)
    assert [finding.check for finding in report.findings] == ["runs", "repeats", "lets_go"]
    assert told == ["repeats", "lets_go"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rawgrad.examine(torch.square, (torch.ones(2),)), "none of these does: x.requires_grad_"),
        (
            lambda: rawgrad.examine(torch.square, SQUARE, checks=["respects"]),
            "there is no check 'respects'; did you mean 'repeats'",
        ),
        (lambda: rawgrad.examine(torch.square, SQUARE, checks=["xyz"]), "there is no check 'xyz'; there are agrees_with"),
        (lambda: rawgrad.examine(torch.square, SQUARE, checks="repeats"), r"a list of names, got one string: \['repeats'\]"),
        (lambda: rawgrad.examine(torch.square, SQUARE, allow=["repeats"]), "allow is a dict of check and reason, got a list"),
        (lambda: rawgrad.examine(rawgrad.ops.square.Square, SQUARE), "give Square.apply"),
        (lambda: rawgrad.examine(torch.square, SQUARE, lambda x: 1 / 0), "the reference raised ZeroDivisionError"),
        (lambda: rawgrad.examine(torch.square, SQUARE, allow={"x": "y"}), "there is no check 'x'"),
        (
            lambda: rawgrad.examine(torch.square, (torch.ones(2).to_sparse().requires_grad_(),)),
            "examine needs strided tensors, and input 0 is torch.sparse_coo",
        ),
    ],
)
def test_a_callers_mistake_gets_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


FINDINGS = tuple(
    Finding(f"check_{verdict}", verdict, verdict == "broken", f"{verdict} <12> " + "long " * 40, "mend it", "02")
    for verdict in VERDICTS
)


def test_a_report_fits_a_hundred_columns():
    report = Report("Square", FINDINGS)
    lines = repr(report).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "Square: BROKEN (1 broken, 1 unsafe, 1 refused, 1 note, 1 skipped, 1 healthy)"
    assert sum(line.startswith("  ") and line[2] != " " for line in lines) == len(FINDINGS), "one line a check"
    assert "-> mend it (lesson 02)" in repr(report)


def test_a_report_as_html_escapes():
    text = Report("f<x>", FINDINGS)._repr_html_()
    assert "<12>" not in text
    assert "f&lt;x&gt;" in text
    assert text.count("<tr") == 1 + len(FINDINGS)


def test_a_broken_report_raises_for_a_test_suite():
    with pytest.raises(Broken, match=r"(?s)Square: BROKEN.*broken: broken <12>.*mend it \(lesson 02\)") as raised:
        Report("Square", FINDINGS).raise_if_broken()
    assert "unsafe:" not in str(raised.value)
    Report("Square", FINDINGS[1:]).raise_if_broken()
