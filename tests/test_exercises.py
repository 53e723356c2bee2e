"""Predictions are kept and never lost; verdicts rest on evidence, and the known wrong answers are refused."""

import json

import pytest
import torch

import rawgrad
from rawgrad import cuda, exercises, runtime, scenarios, specimens
from rawgrad.exercises import check, outcome, predict
from rawgrad.ops.rotary import rotary_into
from rawgrad.ops.square import square_backward


@pytest.fixture(autouse=True)
def _nobodys_answers(monkeypatch):
    monkeypatch.setattr(exercises, "_asked", {})
    monkeypatch.setattr(exercises, "_shown", {})
    monkeypatch.setattr(exercises, "_answers", {})
    monkeypatch.setattr(exercises, "_replays", {})
    monkeypatch.delenv("RAWGRAD_ANSWERS", raising=False)


@pytest.fixture
def file(monkeypatch, tmp_path):
    monkeypatch.setenv("RAWGRAD_ANSWERS", str(tmp_path / "work" / "answers.json"))
    return tmp_path / "work" / "answers.json"


def press(prediction, letter):
    prediction.children[1].value = letter


# Predictions


def test_an_unanswered_prediction_says_so():
    assert predict("P", "What?", "0", "1").as_text() == "What?\n  A  0\n  B  1\nI predict: no answer yet"
    assert outcome("P", 1).as_text() == "It is B: 1. You have not predicted; the buttons above still work."


def test_an_outcome_follows_the_prediction():
    asked, shown = predict("P", "What?", "0", "1"), outcome("P", 1)
    press(asked, "A")
    assert shown.as_text() == "It is B: 1. You predicted A: 0."
    assert "You predicted A: 0." in shown.children[0].value
    press(asked, "B")
    assert "It is B: 1. You predicted B, too." in shown.children[0].value


def test_a_prediction_that_is_asked_again_finds_its_answer_and_its_outcome():
    press(predict("P", "What?", "0", "1"), "A")
    shown = outcome("P", 1)
    again = predict("P", "What?", "0", "1")
    assert again.answer == "A"
    press(again, "B")
    assert "You predicted B, too" in shown.children[0].value


def test_what_no_option_says_is_said():
    predict("P", "What?", "0", "1")
    assert outcome("P", "it raises").as_text().startswith("None of the answers: it raises.")


def test_an_outcome_before_its_prediction_says_so_and_waits_for_it():
    shown = outcome("P", 1)
    assert shown.as_text() == "Run the cell that asks prediction P first, and then this one."
    press(predict("P", "What?", "0", "1"), "B")
    assert "It is B: 1. You predicted B, too." in shown.children[0].value


def test_markup_in_a_question_is_text():
    assert "<b>a &lt; b</b>" in predict("P", "a < b", "0", "1").as_html()


def test_first_and_last_answers_are_kept_in_the_learners_file(file):
    asked = predict("P", "What?", "0", "1", "2")
    for letter in "ABC":
        press(asked, letter)
    press(predict("Q", "What?", "0", "1"), "A")
    assert json.loads(file.read_text()) == {"P": ["A", "C"], "Q": ["A", "A"]}


def test_a_new_session_finds_the_answers(file):
    press(predict("P", "What?", "0", "1"), "B")
    exercises._answers.clear()
    assert predict("P", "What?", "0", "1").answer == "B"
    press(predict("Q", "What?", "0", "1"), "A")
    assert json.loads(file.read_text()) == {"P": ["B", "B"], "Q": ["A", "A"]}


def test_a_file_that_cannot_be_read_is_put_aside_and_nothing_is_lost(file):
    file.parent.mkdir()
    file.write_text('{"P": ["A"')
    press(predict("P", "What?", "0", "1"), "B")
    assert json.loads(file.read_text()) == {"P": ["B", "B"]}
    assert file.with_suffix(".unreadable").read_text() == '{"P": ["A"'


def test_two_unreadable_files_are_both_put_aside(file):
    file.parent.mkdir()
    for number, text in enumerate(("[1, 2]", '{"P": 5}', "{")):
        file.write_text(text)
        press(predict("P", "What?", "0", "1"), "AB"[number % 2])
    assert sorted(path.read_text() for path in file.parent.glob("*.unreadable*")) == ["[1, 2]", "{", '{"P": 5}']


def test_two_notebooks_do_not_undo_each_other(file):
    press(predict("P", "What?", "0", "1", "2"), "A")
    file.write_text('{"P": ["A", "C"]}')  # the other notebook's kernel
    press(predict("Q", "What?", "0", "1"), "B")
    assert json.loads(file.read_text()) == {"P": ["A", "C"], "Q": ["B", "B"]}


def test_a_file_that_cannot_be_written_is_said_and_the_outcome_still_follows(monkeypatch, tmp_path):
    (tmp_path / "work").touch()
    monkeypatch.setenv("RAWGRAD_ANSWERS", str(tmp_path / "work" / "answers.json"))
    asked, shown = predict("P", "What?", "0", "1"), outcome("P", 1)
    press(asked, "B")
    assert "This answer cannot be kept in a file" in asked.children[2].value
    assert "You predicted B, too" in shown.children[0].value


def test_an_answer_that_is_no_longer_an_option_is_not_shown(file):
    press(predict("P", "What?", "0", "1", "2"), "C")
    assert predict("P", "What?", "0", "1").answer is None


def test_without_a_file_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    press(predict("P", "What?", "0", "1"), "A")
    assert list(tmp_path.iterdir()) == []


def test_a_replay_says_where_you_changed_your_mind(file):
    assert exercises.replay("01").as_text() == "No prediction of this notebook has been asked yet."
    asked = predict("01-P1", "What?", "0", "1")
    predict("01-P2", "What?", "0", "1")
    predict("02-P1", "What?", "0", "1")
    shown = exercises.replay("01")
    assert shown.as_text() == "\n".join(f"01-P{n}  you: no answer  it is: not seen yet" for n in (1, 2))
    press(asked, "A")
    outcome("01-P1", 1)
    press(asked, "B")
    assert "01-P1  you: A, then B  it is: B  you changed your mind\n01-P2" in shown.children[0].value
    assert shown.children[1].value == "01-P1:AB"
    outcome("01-P2", 0)
    assert "01-P2  you: no answer  it is: A" in shown.children[0].value


def test_answers_leave_in_a_line_and_come_back(monkeypatch):
    for name, letters in {"01-P1": "AC", "02-P1": "B"}.items():
        asked = predict(name, "What?", "0", "1", "2")
        for letter in letters:
            press(asked, letter)
    line = exercises.export_answers()
    assert line == "01-P1:AC 02-P1:BB"
    exercises._answers.clear()  # another runtime
    asked, happened, shown = predict("01-P1", "What?", "0", "1", "2"), outcome("01-P1", 2), exercises.replay("01")
    assert asked.answer is None
    shown.children[1].value = f" {line}\n"
    shown.children[2].click()
    assert exercises.export_answers() == line
    assert asked.answer == "C"
    assert "You predicted C, too" in happened.as_text()
    assert "you: A, then C" in shown.children[0].value
    assert predict("02-P1", "What?", "0", "1", "2").answer == "B", "of a notebook that is not open, too"


@pytest.mark.parametrize("line", ["01-P1", "01-P1:A", "01-P1:AX", "01-P1:AB 02", "<b>:AB"])
def test_a_line_that_holds_no_answers_changes_nothing(line, file):
    press(predict("01-P1", "What?", "0", "1"), "B")
    shown = exercises.replay("01")
    shown.children[1].value = line
    shown.children[2].click()
    assert "is no answer: paste the whole line" in shown.children[3].value
    assert "<b>" not in shown.children[3].value
    assert shown.children[1].value == line, "what was pasted is still there to be mended"
    assert json.loads(file.read_text()) == {"01-P1": ["B", "B"]}


def test_answers_that_come_in_leave_the_others(file):
    press(predict("01-P1", "What?", "0", "1"), "B")
    exercises.import_answers("02-P1:AB")
    assert json.loads(file.read_text()) == {"01-P1": ["B", "B"], "02-P1": ["A", "B"]}


def test_a_question_needs_options():
    with pytest.raises(ValueError, match="two to eight options, got 1"):
        predict("P", "What?", "0")


# Exercises


def over_saved(ctx, dy):
    (x,) = ctx.saved_tensors
    square_backward(x, dy, x)
    return x


def announced(ctx, dy):
    x = over_saved(ctx, dy)
    torch.autograd.graph.increment_version(x)
    return x


def announced_first(ctx, dy):
    (x,) = ctx.saved_tensors
    torch.autograd.graph.increment_version(x)
    square_backward(x, dy, x)
    return x


def one_shot(ctx, dy):
    if getattr(ctx, "used", False):
        raise RuntimeError("only once")
    ctx.used = True
    return over_saved(ctx, dy)


def new_memory(ctx, dy):
    (x,) = ctx.saved_tensors
    dx = torch.empty_like(x)
    square_backward(x, dy, dx)
    return dx


def asserts(ctx, dy):
    assert not getattr(ctx, "used", False)
    ctx.used = True
    return over_saved(ctx, dy)


def ignores_dy(ctx, dy):
    (x,) = ctx.saved_tensors
    return 2 * x


def always_raises(ctx, dy):
    raise RuntimeError("never")


def gradient_zero(ctx, dy):
    return announced(ctx, dy) * 0


@pytest.mark.parametrize("answer", [announced, announced_first, one_shot, asserts], ids=lambda f: f.__name__)
def test_loud_answers_pass(answer):
    verdict = check("02.1 loud", answer)
    assert verdict.passed
    assert "the second backward raises (straight and through a view)" in repr(verdict)


def test_an_answer_that_is_right_already_passes_as_loud():
    assert check("02.1 loud", new_memory).passed


@pytest.mark.parametrize(
    ("answer", "evidence"),
    [
        (over_saved, "straight, the second backward is silent and wrong: in X.grad, element \\[0, 0\\] is 6 where 4 is right"),
        (ignores_dy, "straight, in the first gradient, element"),
        (always_raises, "straight, the first backward raises already, with RuntimeError: never"),
        (gradient_zero, "straight, in the first gradient, element \\[0, 0\\] is 0 where 2 is right"),
        (lambda ctx, dy: over_saved(ctx, dy).clone(), "the second backward is silent and wrong"),
        (lambda ctx, dy: None, "there is no gradient"),
        (lambda ctx, dy: over_saved(ctx, dy)[0], "your code raised RuntimeError|the first backward raises already"),
        (lambda ctx, dy: 1 / 0, "your code raised ZeroDivisionError: division by zero"),
    ],
    ids=[
        "as_given",
        "ignores_dy",
        "always_raises",
        "wrong_first",
        "clones_the_result",
        "returns_nothing",
        "wrong_shape",
        "mistake",
    ],
)
def test_wrong_loud_answers_are_refused(answer, evidence):
    import re

    verdict = check("02.1 loud", answer)
    assert not verdict.passed
    assert re.search(evidence, repr(verdict))
    assert repr(verdict).startswith("not yet, 02.1 loud: ")


def function(forward, backward):
    return type("Answer", (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def saves_x(ctx, x):
    ctx.save_for_backward(x)
    return x * x


def saves_a_clone(ctx, x):
    ctx.save_for_backward(x.clone())
    return x * x


def keeps_clones_on_ctx(ctx, x):
    ctx.save_for_backward(x)
    ctx.one, ctx.more = x.clone(), [x.clone()]
    return x * x


def forward_of_five(ctx, x):
    ctx.save_for_backward(x)
    return x * 0 + 5


def wrong_behind_sum(ctx, dy):
    return new_memory(ctx, dy) if dy.is_contiguous() else torch.full_like(dy, 99)


def clones_first(ctx, dy):
    (x,) = ctx.saved_tensors
    x = x.clone()
    square_backward(x, dy, x)
    return x


workspace = torch.empty(0)


def keeps_a_workspace(ctx, dy):
    global workspace
    (x,) = ctx.saved_tensors
    if workspace.numel() != x.numel():
        workspace = torch.empty(x.numel(), device=x.device)
    square_backward(x, dy, workspace.view(x.shape))
    return workspace.view(x.shape)


workspaces = {}


def keeps_two_workspaces(ctx, dy):
    """A kept buffer for contiguous dy (handed out as a copy), and one for all others, handed out itself."""
    (x,) = ctx.saved_tensors
    if dy.is_contiguous():
        return new_memory(ctx, dy)
    kept = workspaces.setdefault(x.shape, torch.empty_like(x))
    square_backward(x, dy, kept)
    return kept[:]


def doubles_dy(ctx, dy):
    (x,) = ctx.saved_tensors
    square_backward(torch.ones_like(dy), dy, dy)
    return x * dy


@pytest.mark.parametrize(
    ("answer", "extra"),
    [
        (function(saves_x, new_memory), "keeps +0 N until backward beside x"),
        (function(saves_x, clones_first), "keeps +0 N until backward beside x"),
        (function(keeps_clones_on_ctx, new_memory), "keeps +2 N until backward beside x, which x itself could serve as"),
        (function(saves_a_clone, new_memory), "keeps +1 N until backward beside x, which x itself could serve as"),
    ],
    ids=["new_memory", "clone_in_backward", "clones_on_ctx", "clone_in_forward"],
)
def test_right_answers_pass_and_are_told_what_they_keep(answer, extra):
    verdict = check("02.2 right", answer)
    assert verdict.passed
    assert verdict.evidence.endswith(extra)


@pytest.mark.parametrize(
    ("answer", "evidence"),
    [
        (function(saves_x, over_saved), "straight, backward 1 changes X: its first element is 2, was 1"),
        (function(saves_x, announced), "straight, backward 1 changes X"),
        (
            function(saves_a_clone, over_saved),
            "straight, after backward 2, in X.grad, element \\[0, 0\\] is 6 where 4 is right",
        ),
        (function(saves_x, doubles_dy), "backward 1 changes dy, which is the caller's"),
        (function(saves_x, keeps_a_workspace), "straight, after backward [23], in X.grad, element"),
        (function(saves_x, keeps_two_workspaces), "the backward of another tensor changes the gradient .* they share memory"),
        (function(saves_x, ignores_dy), "straight, after backward 1, in X.grad, element"),
        (function(forward_of_five, new_memory), "straight, forward is not x\\^2: element \\[0, 0\\] is 5 where 1 is right"),
        (function(saves_x, wrong_behind_sum), "behind sum\\(\\), .*, element \\[0, 0\\] is 99 where 2 is right"),
        (function(saves_x, lambda ctx, dy: new_memory(ctx, dy) + 1), "in X.grad, element"),
        (42, "give check the Function itself"),
    ],
    ids=[
        "as_given",
        "announced",
        "clone_then_write",
        "doubles_dy",
        "workspace",
        "workspaces",
        "ignores_dy",
        "forward",
        "behind_sum",
        "wrong",
        "no_function",
    ],
)
def test_wrong_right_answers_are_refused(answer, evidence):
    import re

    verdict = check("02.2 right", answer)
    assert not verdict.passed
    assert re.search(evidence, verdict.evidence), verdict.evidence


RIGHT_PLACE = "offset + row * strides[0] + col * strides[1]"


@pytest.mark.parametrize(
    ("formula", "evidence"),
    [
        (RIGHT_PLACE, None),
        ("row * strides[0] + col * strides[1]", "element [0, 0] of m[1:, 1:] lies at 5, not at 0"),
        ("offset + row * strides[1] + col * strides[0]", "element [0, 1] of m lies at 1, not at 4"),
        ("offset + row * strides[0] + col", "element [0, 1] of m.t() lies at 4, not at 1"),
        ("offset + row * 4 + col", "element [0, 1] of m.t() lies at 4, not at 1"),
    ],
    ids=["right", "no_offset", "swapped", "rows_only", "as_if_contiguous"],
)
def test_places(formula, evidence):
    verdict = check("00.1 place", eval(f"lambda row, col, strides, offset: {formula}"))
    assert verdict.passed == (evidence is None)
    assert evidence is None or evidence == verdict.evidence


def two_strides(index: str, prepare=lambda dy: dy):
    source = f"""
    extern "C" __global__ void k(const T* dy, long long row_stride, long long col_stride, T* dx, long long cols, long long n) {{
      const long long i = blockIdx.x * blockDim.x + threadIdx.x, row = i / cols, col = i % cols;
      if (i < n) dx[i] = 3 * dy[{index}];
    }}"""

    def answer(dy):
        dy = prepare(dy)
        dx = torch.empty(dy.shape, device=dy.device)
        cuda.launch(source, "k", (1,), (64,), dy, *dy.stride(), dx, dy.shape[1], dy.numel())
        return dx

    return answer


@pytest.mark.parametrize(
    ("answer", "evidence"),
    [
        (two_strides("row * row_stride + col * col_stride"), None),
        (two_strides("i"), "transposed, strides (1, 2): element [0, 1] is 42 where 45 is right"),
        (two_strides("row * row_stride + col"), "transposed, strides (1, 2): element [0, 1] is 42 where 45 is right"),
        (
            two_strides("col_stride == 1 ? i : row + col * 2"),
            "rows of a wider tensor, strides (6, 1): element [1, 0] is 48 where 57 is right",
        ),
        (
            two_strides("i", torch.Tensor.contiguous),
            "transposed, strides (1, 2): as many elements as dy has were copied",
        ),
        (lambda dy: dy.mul_(3), "contiguous, strides (3, 1): dy was changed, which is the caller's"),
        (
            lambda dy: torch.empty(2, 3, device=dy.device).copy_(dy).mul_(3),
            "contiguous, strides (3, 1): as many elements as dy has were copied",
        ),
        (lambda dy: 3 * dy + 0 * dy, "contiguous, strides (3, 1): 3 tensors of dy's size were made where the result needs one"),
        (lambda dy: 3 * dy, "transposed, strides (1, 2): dx has strides (1, 2), and a contiguous one is asked for"),
        (lambda dy: None, "contiguous, strides (3, 1): there is no gradient"),
    ],
    ids=[
        "right",
        "as_given",
        "row_stride_alone",
        "transposed_alone",
        "hidden_contiguous",
        "in_place",
        "copied_into_the_result",
        "temporaries",
        "layout_of_dy",
        "nothing",
    ],
)
def test_two_strides(answer, evidence):
    verdict = check("01.1 two strides", answer)
    assert verdict.passed == (evidence is None)
    assert evidence is None or evidence == verdict.evidence


def slips(
    size: str, base: str, sin: str = "-sin", cos: str = "cos", positions: str = "position_ids", back: str = "dx, *[None] * 5"
):
    code = f"""
def backward(ctx, dy):
    cos, sin, position_ids = ctx.saved_tensors
    dx = rawgrad.rotary(dy, {cos}, {sin}, {positions}, rotary_dim={size}, heads=({base}, dy.shape[2]))
    return {back}
"""
    exec(code, made := {"rawgrad": rawgrad})
    return made["backward"]


HERE = "with rotary_size {}, base {} and positions [3, 2], "
WHOLE, PARTIAL, FROM_0 = HERE.format(4, 0), HERE.format(2, 1), HERE.format(2, 0)
MINE = ("ctx.rotary_size", "ctx.base")
SLIPS = {
    "right": (slips(*MINE), None),
    "as_given": (slips("rotary_size", "base"), "your code raised NameError: name 'rotary_size' is not defined"),
    "one_slip_left": (slips("ctx.rotary_size", "base"), "your code raised NameError: name 'base' is not defined"),
    "base_0": (slips("2 * cos.shape[1]", "0"), PARTIAL + "element [0, 0, 0, 0] is"),
    "base_by_size": (slips("ctx.rotary_size", "(4 - ctx.rotary_size) // 2"), FROM_0 + "element [0, 0, 0, 0] is"),
    "size_4": (slips("4", "ctx.base"), "your code raised ValueError: rotary needs cos and sin of shape"),
    "turned_on": (slips(*MINE, sin="sin"), WHOLE + "element [0, 0, 0, 0] is 3 where -3 is right"),
    "minus_cos": (slips(*MINE, cos="-cos"), WHOLE + "element [0, 1, 0, 0] is"),
    "no_positions": (slips(*MINE, positions="None"), WHOLE + "element [0, 0, 0, 0] is 1 where -3 is right"),
    "over_dy": (slips(*MINE, back="dy.zero_(), *[None] * 5"), WHOLE + "output_grad was changed, which is the caller's"),
    "over_positions": (slips(*MINE, positions="position_ids.zero_()"), WHOLE + "position_ids was changed"),
    "nothing": (slips(*MINE, back="*[None] * 6,"), WHOLE + "there is no gradient"),
    "too_few": (slips(*MINE, back="dx"), "your code raised RuntimeError: function SlipsBackward returned"),
}


@pytest.mark.parametrize("name", SLIPS)
def test_two_slips(name):
    answer, evidence = SLIPS[name]
    verdict = check("01.2 two slips", answer)
    assert verdict.passed == (evidence is None)
    assert evidence is None or verdict.evidence.startswith(evidence), verdict.evidence


def turn_back(dy_a: str, dy_b: str, prepare=lambda dy: dy, minus: str = "-"):
    source = f"""
    extern "C" __global__ void k(const T* dy, long long token_stride, long long head_stride, long long dim_stride, T* dx,
                                 const T* cos, const T* sin, int half) {{
      const int token = blockIdx.x, head = blockIdx.y, pair = threadIdx.x;
      const int a = (token * gridDim.y + head) * 2 * half + pair, b = a + half;
      const T c = cos[token * half + pair], s = {minus}sin[token * half + pair];
      const T dy_a = dy[{dy_a}], dy_b = dy[{dy_b}];
      dx[a] = dy_a * c - dy_b * s;
      dx[b] = dy_b * c + dy_a * s;
    }}"""

    def answer(dy, cos, sin):
        dy, half = prepare(dy), dy.shape[2] // 2
        dx = torch.empty(dy.shape, device=dy.device)
        cuda.launch(source, "k", dy.shape[:2], (half,), dy, *dy.stride(), dx, cos, sin, half)
        return dx

    return answer


def in_place_of_a_copy(dy, cos, sin):
    dx = dy.clone(memory_format=torch.contiguous_format)
    rotary_into(dx[None], dx[None], cos, sin, sign=-1, backend="cuda")
    return dx


def negates_the_callers_table(dy, cos, sin):
    dx = torch.empty(dy.shape, device=dy.device)
    rotary_into(dy[None], dx[None], cos, sin.neg_(), backend="cuda")
    return dx


def negates_a_table_of_its_own(dy, cos, sin):
    dx = torch.empty(dy.shape, device=dy.device)
    rotary_into(dy[None], dx[None], cos, -sin, backend="cuda")
    return dx


def lays_dx_out_like_dy(dy, cos, sin):
    dx = torch.empty_like(dy)
    rotary_into(dy[None], dx[None], cos, sin, sign=-1, backend="cuda")
    return dx


A, B = (f"token * token_stride + head * head_stride + (pair{plus}) * dim_stride" for plus in ("", " + half"))


def but_where(case: str):
    """Right, but flat where `case` holds."""
    return turn_back(f"{case} ? a : {A}", f"{case} ? b : {B}")


FIRST, HEADS, STEPPED = (
    "contiguous, strides (8, 4, 1): ",
    "heads first in memory, strides (4, 12, 1): ",
    "every other dimension",
)
TURN_BACK = {
    "right": (turn_back(A, B), None),
    "a_negated_table_of_its_own": (negates_a_table_of_its_own, None),
    "as_given": (turn_back("a", "b"), HEADS + "element [0, 1, 0] is 17 where 25 is right"),
    "hidden_contiguous": (turn_back("a", "b", torch.Tensor.contiguous), HEADS + "as many elements as dy has were copied"),
    "clone": (turn_back("a", "b", torch.Tensor.clone), FIRST + "as many elements as dy has were copied"),
    "copied_and_turned_in_place": (in_place_of_a_copy, FIRST + "as many elements as dy has were copied"),
    "dx_like_dy": (lays_dx_out_like_dy, HEADS + "dx has strides (4, 12, 1), and a contiguous one is asked for"),
    "the_callers_table_negated": (negates_the_callers_table, FIRST + "sin was changed, which is the caller's"),
    "token_stride_alone": (
        turn_back("token * token_stride + head * 4 + pair", "token * token_stride + head * 4 + pair + half"),
        HEADS + "element [0, 1, 0] is 17 where 25 is right",
    ),
    "heads_first_alone": (
        turn_back("token * 4 + head * 12 + pair", "token * 4 + head * 12 + pair + half"),
        FIRST + "element [0, 1, 0] is 25 where 17 is right",
    ),
    "dim_stride_forgotten": (turn_back(A.replace(" * dim_stride", ""), B.replace(" * dim_stride", "")), STEPPED),
    "partner_by_half": (turn_back(A, "token * token_stride + head * head_stride + pair * dim_stride + half"), STEPPED),
    "flat_where_wider": (but_where("token_stride == 16 && head_stride == 4"), "heads of a wider projection"),
    "flat_where_dimensions_first": (but_where("token_stride == 2"), "dimensions first in memory"),
    "flat_where_one_number": (but_where("dim_stride == 0"), "one number, expanded"),
    "flat_where_one_token": (but_where("head_stride && !token_stride"), "one token, expanded"),
    "flat_where_one_head": (but_where("token_stride && !head_stride"), "one head, expanded"),
    "turned_on": (turn_back(A, B, minus=""), FIRST + "element [1, 0, 0] is -23 where 23 is right"),
    "in_place": (lambda dy, cos, sin: dy.mul_(2), FIRST + "element [0, 0, 0] is 26 where 13 is right"),
    "shape": (lambda dy, cos, sin: dy[0], FIRST + "it has shape (2, 4) instead of (3, 2, 4)"),
}


@pytest.mark.parametrize("name", TURN_BACK)
def test_turn_back(name):
    answer, evidence = TURN_BACK[name]
    verdict = check("01.3 turn back", answer)
    assert verdict.passed == (evidence is None)
    assert evidence is None or verdict.evidence.startswith(evidence), verdict.evidence


def doubles(backward, forward=lambda x: 2 * x):
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return forward(x)

    Doubles.backward = staticmethod(backward)
    return Doubles


def scaled(prepare, factor=2, hand_out=lambda dx, dy: dx):
    def backward(ctx, dy):
        dx = prepare(dy)
        specimens.scale(dy, factor, dx, None)
        return hand_out(dx, dy)

    return doubles(backward)


def keeps_what_it_hands_out(ctx, dy, kept={}):  # noqa: B006
    dx = kept.setdefault(dy.shape, torch.empty(dy.shape, device=dy.device))
    dx.copy_(2 * dy)
    return dx[:]


def flat(ctx, dy):
    return 2 * dy.as_strided(dy.shape, torch.empty(dy.shape).stride())


DOUBLED = "beside 5 * c, with f(a) made first, all is right, but dy was changed: the caller's 1 2 3 is 2 4 6"
BESIDE = {
    "new_memory": (scaled(lambda dy: torch.empty(dy.shape, device=dy.device)), None),
    "like_dy": (scaled(torch.empty_like), None),
    "torch": (doubles(lambda ctx, dy: 2 * dy), None),
    "own_clone": (doubles(lambda ctx, dy: dy.clone().mul_(2) if dy.is_contiguous() else 2 * dy), None),
    "as_given": (scaled(lambda dy: dy), DOUBLED),
    "clone_handed_out": (scaled(lambda dy: dy, hand_out=lambda dx, dy: dx.clone()), DOUBLED),
    "announced": (
        scaled(lambda dy: dy, hand_out=lambda dx, dy: (torch.autograd.graph.increment_version(dy), dx)[1]),
        DOUBLED,
    ),
    "hands_out_dy": (
        scaled(torch.empty_like, hand_out=lambda dx, dy: dy),
        "alone, with a contiguous dy, element [0, 0] is 1 where 2 is right",
    ),
    "wrong_factor": (scaled(torch.empty_like, 3), "alone, with a contiguous dy, element [0, 0] is 3 where 2 is right"),
    "wrong_dtype": (
        doubles(lambda ctx, dy: dy.new_ones(2)),
        "your code raised RuntimeError: Function DoublesBackward returned",
    ),
    "nothing": (doubles(lambda ctx, dy: None), "alone, with a contiguous dy, there is no gradient"),
    "workspace": (doubles(keeps_what_it_hands_out), "two backwards hand out the same memory"),
    "flat": (doubles(flat), "alone, with a transposed dy, element [0, 1] is 4 where 6 is right"),
    "flat_where_expanded": (
        doubles(lambda ctx, dy: dy if dy.stride() == (0, 0) else 2 * dy),
        "alone, with an expanded dy, element [0, 0] is 2 where 4 is right",
    ),
    "forward_of_three": (doubles(lambda ctx, dy: 2 * dy, lambda x: 3 * x), "forward is not 2 x: element [0, 0] is 3"),
    "forward_in_place": (doubles(lambda ctx, dy: 2 * dy, lambda x: x.mul_(2)), "forward changes x, which is the caller's"),
    "its_backward": (flat, "give check the Function itself, which is a class, and not its backward"),
    "its_apply": (scaled(torch.empty_like).apply, "give check the Function itself"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_beside(name):
    answer, evidence = BESIDE[name]
    verdict = check("03.1 beside", answer)
    assert verdict.passed == (evidence is None), verdict.evidence
    assert verdict.evidence.startswith(evidence or "right beside every sibling and in a residual"), verdict.evidence


def test_beside_looks_at_every_sibling_in_both_orders(monkeypatch):
    """A write that spares all but one is found there."""
    answer = scaled(lambda dy: dy)
    branched = scenarios.branched

    def healthy_but_at(case):
        def run(name, first, f, repair=""):
            good = lambda x, _: specimens.DoublesInNewMemory.apply(x, None)  # noqa: E731
            return branched(name, first, f if (name, first) == case else good, repair)

        return run

    cases = [(name, first) for name in (*scenarios.BESIDE, scenarios.RESIDUAL) for first in scenarios.ORDERS]
    for case in cases:
        monkeypatch.setattr(scenarios, "branched", healthy_but_at(case))
        verdict = check("03.1 beside", answer)
        where = "in a residual" if case[0] == scenarios.RESIDUAL else f"beside {case[0]}, with {case[1]} made first"
        assert not verdict.passed
        assert verdict.evidence.startswith(where), verdict.evidence


def one_shot(flag=True, announced=True, graph=True, write=True):
    def backward(ctx, dy):
        if flag and ctx.used:
            raise RuntimeError("used")
        if graph and torch.is_grad_enabled():
            raise RuntimeError("no second derivative")
        (x,) = ctx.saved_tensors
        ctx.used = True
        dx = x if write else torch.empty_like(x)
        square_backward(x, dy, dx)
        if announced:
            torch.autograd.graph.increment_version(x)
        return dx

    return backward


def ignores_dy_one_shot(ctx, dy):
    if torch.is_grad_enabled():
        raise RuntimeError("no second derivative")
    (x,) = ctx.saved_tensors
    x.mul_(2)
    return x


def keeps_its_flag_elsewhere(ctx, dy, used=[]):  # noqa: B006
    if used:
        raise RuntimeError("used")
    used.append(True)
    return one_shot()(ctx, dy)


def writes_and_then_refuses(ctx, dy):
    dx = one_shot(graph=False)(ctx, dy)
    if torch.is_grad_enabled():
        raise RuntimeError("no second derivative")
    return dx


def writes_and_then_looks_at_its_flag(ctx, dy, kept={}):  # noqa: B006
    x = kept.setdefault(ctx, ctx.saved_tensors[0] if not ctx.used else None)
    if torch.is_grad_enabled():
        raise RuntimeError("no second derivative")
    square_backward(x, dy, x)
    torch.autograd.graph.increment_version(x)
    if ctx.used:
        kept.clear()
        raise RuntimeError("used")
    ctx.used = True
    return x


def writes_into_dy(ctx, dy):
    dx = one_shot()(ctx, dy)
    dy.zero_()
    return dx


def forgets_to_return(ctx, dy):
    one_shot()(ctx, dy)


def asserts_not_used(ctx, dy):
    assert not ctx.used
    return one_shot()(ctx, dy)


ONE_SHOT = {
    "asserts": (asserts_not_used, "one backward is right at a peak of 2 N, and nothing else is silent: a second backward loud"),
    "ignores_dy": (ignores_dy_one_shot, "one backward, with a dy that counts: element [0, 1] is 4 where 8 is right"),
    "global_flag": (keeps_its_flag_elsewhere, "one backward: raises RuntimeError, where it should be right"),
    "writes_first": (writes_and_then_refuses, "a second derivative is refused after the gradient was written over x"),
    "flag_last": (
        writes_and_then_looks_at_its_flag,
        "a second backward is refused after the gradient was written over x again",
    ),
    "dy_too": (writes_into_dy, "one backward, with a dy that counts: dy was changed, which is the caller's"),
    "no_return": (forgets_to_return, "one backward: silent and wrong, a gradient is missing"),
    "right": (one_shot(), "one backward is right at a peak of 2 N, and nothing else is silent"),
    "announced_is_flag_enough": (one_shot(flag=False), "one backward is right at a peak of 2 N"),
    "as_given": (over_saved, "a second backward: silent and wrong, a gradient is 6 where 4 is right"),
    "flag_alone": (one_shot(announced=False, graph=False), "a sibling: silent and wrong, a gradient is 6 where 4 is right"),
    "announced_alone": (
        one_shot(flag=False, graph=False),
        "a second derivative: silent and wrong, alone, a second derivative is 1",
    ),
    "once_differentiable": (
        torch.autograd.function.once_differentiable(one_shot(graph=False)),
        "a second derivative: silent and wrong, alone, a second derivative is 1 where 2 is right; once_differentiable runs",
    ),
    "not_in_place": (one_shot(write=False), "right or loud everywhere, and the peak is 3 N: in place it is 2 N"),
    "always": (
        lambda ctx, dy: (_ for _ in ()).throw(RuntimeError("no")),
        "one backward: raises RuntimeError, where it should be right",
    ),
    "cloned": (lambda ctx, dy: over_saved(ctx, dy).clone(), "a second backward: silent and wrong"),
}


@pytest.mark.parametrize("name", ONE_SHOT)
def test_one_shot(name):
    answer, evidence = ONE_SHOT[name]
    verdict = check("04.1 one shot", answer)
    assert verdict.passed == (name in ("right", "announced_is_flag_enough", "asserts"))
    assert verdict.evidence.startswith(evidence), verdict.evidence


def test_a_stub_that_waits_is_not_an_error():
    def stub(ctx, dy):
        raise NotImplementedError

    assert check("02.1 loud", stub).evidence == "waiting for your code"


def test_an_exercise_that_does_not_exist_is_named():
    with pytest.raises(
        ValueError, match="there is no exercise '02.9'; there are '00.1 place', '01.1 two strides', '01.2 two slips', "
    ):
        check("02.9", None)


def test_answers_file_is_named_by_the_environment_only(file):
    assert runtime.answers_file() == file
