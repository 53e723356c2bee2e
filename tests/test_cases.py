"""The ten cases: each is wrong to the letter where it shows, right where it hides, and its twin is healthy."""

import itertools
import math
from pathlib import Path

import nbformat
import pytest
import torch

from rawgrad import examine, runtime
from rawgrad.doctor import ill
from rawgrad.doctor.cases import CASES, Beside, examined, nan_in_empty_memory, said_by_others
from rawgrad.exercises import check

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)

# label -> (wrong, right)
TOLD = {
    "T1": {"y.sum(), x.grad": ([[0, 0, -1, 0], [0, 0, 0, 0]], [[1, 1, -1, -1], [1, 1, -1, -1]])},
    "T2": {
        "cat([y, c], 1)": ([[3, 6], [9, 12]], [[3, 6], [15, 18]]),
        "cat([c, y], 1)": ([[9, 12], [15, 18]], [[9, 12], [21, 24]]),
        "y.t()": ([[3, 6], [9, 12]], [[3, 9], [6, 12]]),
    },
    "T5": {"y.sum(), x.grad": ([16] * 4, [2] * 4)},
    "T4": {
        "f(a) + 5c, c.grad": ([10, 20, 30], [5, 10, 15]),
        "h + f(h), h = 5a": ([20, 40, 60], [15, 30, 45]),
        "the caller's dy": ([2, 4, 6], [1, 2, 3]),
    },
    "T3": {
        "behind exp(u), u's gradient": ([4] * 3, [2] * 3),
        "one graph, twice": ([[6, 10], [12, 20]], [[6, 10], [6, 10]]),
        "after a step": ([5.4, 9], [2.4, 4]),
    },
    "T6": {
        "two micro-batches, w.grad": ([20, 40], [11, 22]),
        "two parameters, the first's": ([10, 20], [1, 2]),
    },
    "T7": {"(0.1 * f)": ([2, 4], [0.2, 0.4]), "(0 * f)": ([2, 4], [0, 0])},
    "T8": {"lengths 2 and 5, longest 3": ([1] * 5 + [math.nan] * 2, [1] * 5 + [0] * 2)},
    "T9": {"[1, 2, 3]": ([[-0.7071, 0, 0.7071]], [[-1.2247, 0, 1.2247]])},
    "T10": {"w.grad, behind a transpose": ([[12, 12], [12, 12]],) * 2, "the trunk's, behind a transpose": (None, [4])},
}
# gradcheck, gradgradcheck, the same with gradients in other strides, opcheck
PASSES = {
    "T1": (True, True, False, True),
    "T2": (True, True, False, True),
    "T5": (True, False, False, True),
    "T4": (True, False, False, True),
    "T3": (False, False, False, True),
    "T6": (True, False, False, True),
    "T7": (False, False, False, True),
    "T8": (False, False, False, True),
    "T9": (False, True, True, True),
    "T10": (True, False, False, True),
}


def leaf(*values, grad=True):
    return torch.tensor(values, dtype=torch.float64, device=runtime.DEVICE, requires_grad=grad)


def same(got, right) -> bool:
    return repr(torch.tensor(got or [], dtype=torch.float64)) == repr(torch.tensor(right or [], dtype=torch.float64))


@each_case
def test_it_shows_to_the_letter(case):
    told = case.told()
    assert told.keys() == TOLD[case.number].keys()
    for label, (wrong, right) in TOLD[case.number].items():
        assert same(told[label][0], wrong), label
        assert same(told[label][1], right), label
        assert same(case.shows(case.healthy)[label], right), label


@each_case
def test_the_near_miss_hides_it(case):
    hidden = case.hidden()
    assert hidden
    for label, (got, right) in hidden.items():
        assert same(got, right), label
        assert "nan" not in str(right), label


@each_case
def test_the_doctor_names_it_and_lets_the_healthy_twin_go(case):
    sick = examine(case.sick, case.inputs(), case.reference)
    (found,) = sick.of(case.check)
    assert found.told
    assert found.silent
    assert not sick.ok
    assert found.lesson == case.lesson
    healthy = examine(case.healthy, case.inputs(), case.reference)
    assert not [finding for finding in healthy.findings if finding.told]


# Inputs with which every run of a test is right: those of the case, but for the three that hide there.
NEAR_MISSES = {
    "T2": lambda: (leaf([1, 2]),),
    # none is longer than 8 at the size that is tried first
    "T8": lambda: lambda size: (leaf(*[[1]] * (2 + size)), (2, size), 8),
    "T9": lambda: (leaf([-1, 0, 1]),),
    "T9, by its width": lambda: lambda width: (leaf(*torch.linspace(-1, 2, 2 * width).view(2, width).tolist()),),
    "T10": lambda: (leaf(*[[[1, 2]] * 3] * 4), leaf([1, 1], [1, 1])),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_the_near_miss_does_not_hide_it_from_the_doctor(name):
    case, inputs = CASES[name.partition(",")[0]], NEAR_MISSES[name]()
    plain = inputs(8) if callable(inputs) else inputs
    torch.testing.assert_close(case.sick(*plain), case.reference(*plain))
    check = "handles_any_size" if name == "T9, by its width" else case.check
    assert [finding.told for finding in examine(case.sick, inputs, case.reference).of(check)] == [True]
    assert examine(case.healthy, inputs, case.reference).ok


@each_case
def test_what_others_say(case):
    said = said_by_others(case)
    assert tuple(said) == ("gradcheck", "gradgradcheck", "gradgradcheck, other strides", "opcheck")
    assert tuple(verdict == "passes" for verdict in said.values()) == PASSES[case.number], said


def test_what_others_say_about_a_healthy_twin():
    for case in CASES.values():
        assert torch.autograd.gradcheck(case.healthy, case.inputs())
        assert torch.autograd.gradgradcheck(case.healthy, case.inputs(), gen_non_contig_grad_outputs=True)


def test_the_learner_chooses_among_four():
    places = {case.mechanisms.index(case.mechanism) for case in CASES.values()}
    assert len(places) >= 3, "the right one should not always stand at one place"
    assert all(len(set(case.mechanisms)) == 4 for case in CASES.values())
    assert list(CASES) == ["T1", "T2", "T5", "T4", "T3", "T6", "T7", "T8", "T9", "T10"]


def test_t2_gradcheck_of_a_composition_fails():
    other = leaf([1, 1], [1, 1], grad=False)
    x = leaf([1, 2], [3, 4])
    assert torch.autograd.gradcheck(lambda x: CASES["T2"].healthy(torch.cat([x, other], 1)), (x,))
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(lambda x: torch.cat([CASES["T2"].sick(x), other], 1).t().contiguous(), (x,))


def test_t5_one_program_with_four_lanes_is_right_behind_a_sum():
    x = leaf(1, 1, 1, 1)
    CASES["T4"].sick(x).sum().backward()
    assert x.grad.tolist() == [2] * 4


def test_t5_torchs_own_write_raises():
    one = torch.ones((), device=runtime.DEVICE).expand(4)
    with pytest.raises(RuntimeError, match="more than one element"):
        one.mul_(2)


@pytest.mark.parametrize("first", ["sibling", "f"])
def test_t4_a_view_as_sibling_is_wrong_in_both_orders(first):
    a, c = leaf(1, 1, 1), leaf(1, 1, 1)
    sibling = c.view(3) if first == "sibling" else None
    y = CASES["T4"].sick(a)
    z = y + (c.view(3) if sibling is None else sibling)
    (z * leaf(1, 2, 3, grad=False)).sum().backward()
    assert c.grad.tolist() == [2, 4, 6]


def test_t4_gradcheck_of_the_residual_fails():
    with pytest.raises(RuntimeError, match="Jacobian mismatch|not reentrant|Backward"):
        torch.autograd.gradcheck(lambda h: CASES["T4"].sick(h) + h, (leaf(1, 2, 3),))


def test_t3_no_version_moves_and_gradcheck_says_not_reentrant():
    h = torch.exp(leaf(0, 0, 0))
    CASES["T3"].sick(h).sum().backward()
    assert h._version == 0
    assert h.tolist() == [2, 2, 2]
    assert "not reentrant" in said_by_others(CASES["T3"])["gradcheck"]


def test_t6_the_buffer_itself_is_right_by_luck():
    shown = CASES["T6"].shows(ill.WeightsBufferItself.apply)
    assert list(shown.values()) == [[11, 22], [1, 2]]
    assert examine(ill.WeightsBufferItself.apply, CASES["T6"].inputs(), checks=["accumulates"]).ok


def test_t7_the_shortcut_is_right_for_one_only():
    for weight, right in ((1, [2, 4]), (0.5, [4, 8])):
        x = leaf(1, 2)
        (weight * ill.SumsSquaresWrongWeight.apply(x)).backward()
        assert x.grad.tolist() == right
    assert "not multiplied by grad_output" in said_by_others(CASES["T7"])["gradcheck"]
    with pytest.raises(RuntimeError):
        torch.autograd.gradcheck(ill.SumsSquaresWrongWeight.apply, CASES["T7"].inputs())


def test_t8_gradcheck_passes_where_memory_happens_to_be_zero(monkeypatch):
    case = CASES["T8"]
    monkeypatch.setattr(torch, "empty", torch.zeros)
    assert torch.autograd.gradcheck(case.sick, case.inputs())
    monkeypatch.undo()
    with nan_in_empty_memory(), pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(case.sick, case.inputs())


def test_t8_lengths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"the lengths \[2, 4\] make 6 rows, and x has 7"):
        CASES["T8"].sick(CASES["T8"].inputs()[0], (2, 4), 3)


def test_t9_gradcheck_depends_on_the_width():
    assert torch.autograd.gradcheck(CASES["T9"].sick, (leaf([1, 2, 3, 5]),))
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(CASES["T9"].sick, (leaf([1, 2, 4]),))


def test_the_kernels_write_through_strides_and_no_version_moves():
    for together in (True, False):
        room = torch.arange(24.0, device=runtime.DEVICE)
        t = room.as_strided((2, 3), (8, 2), 1)
        expected = room.clone()
        for row, col in itertools.product(range(2), range(3)):
            expected[1 + 8 * row + 2 * col] *= 2
        ill.double_in_place(t, together)
        assert torch.equal(room, expected)
        assert room._version == 0


def test_a_read_past_the_storages_end_is_zero():
    one = torch.full((), 5.0, device=runtime.DEVICE).expand(2, 2)
    assert ill.as_read(one).tolist() == [[5, 0], [0, 0]]


@pytest.mark.parametrize("before", [(False, False, False), (True, True, True), (True, False, False)])
def test_the_switch_is_turned_on_and_put_back(before, monkeypatch):
    def now():
        warn = torch.is_deterministic_algorithms_warn_only_enabled()
        return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory, warn

    mode, fill, warn = before
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill)
    torch.use_deterministic_algorithms(mode, warn_only=warn)
    with nan_in_empty_memory():
        assert torch.empty(3).isnan().all()
    assert now() == before


# How they are told


def test_a_run_is_told_as_a_table():
    told = Beside({"sum": ([[0, -1.5]], [[1, 1]]), "a longer name": (None, None)})
    assert repr(told) == "sum             got 0 -1.5   wrong, 1 1 is right\na longer name   got None     right"


def test_an_excerpt_has_the_check_in_full_and_the_others_by_name():
    case = CASES["T5"]
    said = repr(case.excerpt(examined(case.sick, case)))
    assert said.startswith("DoublesOneByOne: leaves_upstream_alone is unsafe, silent\n  backward writes over 4 of 4 elements")
    assert said.endswith("also told: respects_upstream_strides, shares_with_siblings, second_derivative_is_right_or_refused")
    assert max(map(len, said.splitlines())) <= 100
    said = repr(CASES["T1"].excerpt(examined(CASES["T1"].sick, CASES["T1"])))
    assert "; and in 5 more layouts" in " ".join(said.split())


def test_a_case_is_named_only_where_the_report_tells_of_it():
    case = CASES["T4"]
    assert case.named_by(examined(case.sick, case)) == case.mechanism
    assert case.named_by(examined(case.healthy, case)) == "the doctor does not find it"


def test_the_notebook_asks_the_cases_in_their_order_and_tells_their_symptoms():
    (path,) = (Path(__file__).parent.parent / "notebooks").glob("05_*.ipynb")
    text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
    places = [text.index(f"### {case.number}, {case.name}\n\n> {case.symptom}\n") for case in CASES.values()]
    assert places == sorted(places)


# The exercises


def clones(ctx, dy):
    return ill.RotatesUnguarded.backward(ctx, dy.clone())


def refuses(ctx, dy):
    if not dy.is_contiguous():
        raise RuntimeError("contiguous gradients only")
    return ill.Rotates.backward(ctx, dy)


def turns_on(ctx, dy):
    return -ill.Rotates.backward(ctx, dy)


def not_written(ctx, dy):
    raise NotImplementedError


def ones(ctx, dy):
    dx = torch.ones(ctx.shape, dtype=dy.dtype, device=dy.device)
    return dx.index_copy(0, ctx.rows, dy.flatten(0, 1)[ctx.places]), None, None


@pytest.mark.parametrize(
    ("exercise", "backward", "evidence"),
    [
        ("05.1 guard", ill.RotatesUnguarded.backward, "respects_upstream_strides is broken: dy is one number, expanded"),
        ("05.1 guard", clones, "respects_upstream_strides is broken: dy is axes 0 and 1 exchanged in memory"),
        ("05.1 guard", refuses, "respects_upstream_strides is refused: dy is one number, expanded: RuntimeError: contiguous"),
        ("05.1 guard", turns_on, "agrees_with_reference is broken: the gradient of input 0: 8 of 8 elements"),
        ("05.1 guard", not_written, "runs is refused"),
        ("05.2 rows", ill.PacksIntoEmpty.backward, "fills_its_results is broken"),
        ("05.2 rows", ones, "agrees_with_reference is broken: the gradient of input 0: 2 of 7 elements"),
    ],
    ids=lambda value: getattr(value, "__qualname__", None),
)
def test_a_wrong_answer_hears_which_check_is_broken(exercise, backward, evidence):
    verdict = check(exercise, backward)
    assert not verdict.passed
    assert verdict.evidence.startswith(evidence), verdict.evidence


@pytest.mark.parametrize(("exercise", "well"), [("05.1 guard", ill.Rotates), ("05.2 rows", ill.Packs)])
def test_a_cure_passes(exercise, well):
    assert check(exercise, well.backward).passed
