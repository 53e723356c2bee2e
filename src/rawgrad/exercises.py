"""Predictions and exercises of the notebooks: shown, never raised.

A prediction is kept by its name, for as long as Python runs and in the learner's file where there is one, so that a cell run
again, a restart and the next day find it. A verdict rests on a run of the learner's code.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import ipywidgets
import torch
from torch import Tensor

from rawgrad import probes, runtime, scenarios
from rawgrad.doctor.cases import CASES, examined, shortened
from rawgrad.ops.rotary import rotary, rotary_reference
from rawgrad.widgets import Shown

# Predictions


_asked: dict[str, "Prediction"] = {}  # the newest of each name
_shown: dict[str, "Outcome"] = {}
_answers: dict[str, list[str]] = {}  # name -> first and last answer
_replays: dict[str, "Replay"] = {}


def _stored() -> dict[str, list[str]]:
    """What the learner's file holds. A file that is not such a record is put aside under a name of its own."""
    file = runtime.answers_file()
    if file is None or not file.exists():
        return {}
    try:
        stored = json.loads(file.read_text())
        if all(isinstance(pair, list) and len(pair) == 2 for pair in stored.values()):
            return stored
    except (ValueError, AttributeError):
        pass
    aside = next(name for n in itertools.count() if not (name := file.with_suffix(f".unreadable{n or ''}")).exists())
    os.replace(file, aside)
    return {}


def _kept() -> dict[str, list[str]]:
    return {**_answers, **_stored()}


def _keep(name: str, letter: str) -> None:
    """Keep an answer beside the first one."""
    _keep_all({name: [_kept().get(name, [letter])[0], letter]})


def _keep_all(answers: dict[str, list[str]]) -> None:
    """Only these names are written, so that two notebooks do not undo each other."""
    _answers.update(answers)
    stored, file = _stored(), runtime.answers_file()
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump({**stored, **answers}, new, indent=1, sort_keys=True)
        os.replace(new.name, file)


class Prediction(Shown):
    """A question with lettered answers, asked before its output exists."""

    def __init__(self, name: str, question: str, options: tuple[str, ...]):
        self.name, self.question = name, question
        self.options = dict(zip("ABCDEFGH"[: len(options)], options, strict=True))
        answers = [f"<li><b>{letter}</b>&ensp;{escape(text)}</li>" for letter, text in self.options.items()]
        self._asked_html = f"<p><b>{escape(question)}</b></p><ul style='list-style:none;margin:0'>{''.join(answers)}</ul>"
        kept = _kept().get(name, [None])[-1]
        self._buttons = ipywidgets.ToggleButtons(
            options=list(self.options), value=kept if kept in self.options else None, description="I predict"
        )
        self._buttons.style.button_width = "auto"
        self._buttons.observe(self._answered, names="value")
        self._trouble = ipywidgets.HTML()
        super().__init__([ipywidgets.HTML(self._asked_html), self._buttons, self._trouble])

    @property
    def answer(self) -> str | None:
        return self._buttons.value

    def _answered(self, change) -> None:
        try:
            if change.new is not None:
                _keep(self.name, change.new)
            self._trouble.value = ""
        except OSError as problem:  # an observer's exception would show nowhere; the answer lasts as long as Python
            self._trouble.value = f"<p role='alert'>This answer cannot be kept in a file: {escape(str(problem))}</p>"
        for shown in (_shown.get(self.name), *_replays.values()):
            if shown:
                shown.refresh()

    def take(self, letter: str) -> None:
        """Show an answer that was given elsewhere."""
        if letter in self.options:
            self._buttons.value = letter

    def as_html(self) -> str:
        return f"{self._asked_html}<p>I predict: {self.answer or 'no answer yet'}</p>"

    def as_text(self) -> str:
        options = "\n".join(f"  {letter}  {text}" for letter, text in self.options.items())
        return f"{self.question}\n{options}\nI predict: {self.answer or 'no answer yet'}"

    def as_data(self) -> dict:
        return {"prediction": self.name, "question": self.question, "options": self.options}


class Outcome(Shown):
    """What happened, beside what was predicted. It follows the prediction when that changes."""

    def __init__(self, name: str, happened: str):
        self._name, self._happened = name, happened
        self._html = ipywidgets.HTML()
        super().__init__([self._html])
        self.refresh()

    def refresh(self) -> None:
        """Show the prediction as it is now."""
        self._html.value = self.as_html()

    @property
    def right(self) -> list[str]:
        """The letter of the option that says what happened; empty where none does, or the prediction was not asked yet."""
        return [letter for letter, option in getattr(_asked.get(self._name), "options", {}).items() if option == self._happened]

    def as_text(self) -> str:
        prediction = _asked.get(self._name)
        if prediction is None:
            return f"Run the cell that asks prediction {self._name} first, and then this one."
        if prediction.answer is None:
            return f"{self._what(prediction)} You have not predicted; the buttons above still work."
        return self._beside(prediction, prediction.answer)

    def _what(self, prediction: Prediction) -> str:
        right = self.right
        return f"It is {right[0]}: {self._happened}." if right else f"None of the answers: {self._happened}."

    def _beside(self, prediction: Prediction, answer: str) -> str:
        too = [answer] == self.right
        return f"{self._what(prediction)} You predicted {answer}{', too' if too else ': ' + prediction.options[answer]}."

    def as_html(self) -> str:
        return f"<p><b>{escape(self.as_text())}</b></p>"

    def as_data(self) -> dict:
        asked = _asked[self._name]
        says = {letter: self._beside(asked, letter) for letter in asked.options}
        return {"outcome": self._name, "says": {"": self._what(asked), **says}}


def predict(name: str, question: str, *options: str) -> Prediction:
    """Ask `question` before its output exists.

    Args:
        name: of the prediction, one in all notebooks; its answer is kept under it.
        options: two to eight answers; they get the letters A, B, C, ...
    """
    if not 2 <= len(options) <= 8:
        raise ValueError(f"predict needs two to eight options, got {len(options)}")
    _asked[name] = Prediction(name, question, options)
    if name in _shown:
        _shown[name].refresh()
    return _asked[name]


def outcome(name: str, happened) -> Outcome:
    """Set what `happened`, measured in this cell, beside the prediction of that name. The option that reads so was right.

    Where that prediction has not been asked yet, it says so, and shows itself as soon as it is.
    """
    _shown[name] = Outcome(name, str(happened))
    for shown in _replays.values():
        shown.refresh()
    return _shown[name]


class Replay(Shown):
    """First and last answers to a notebook's predictions, and a line in which all answers leave and come back."""

    def __init__(self, notebook: str):
        self._notebook = notebook
        self._html = ipywidgets.HTML()
        self._line = ipywidgets.Text(
            description="Your answers", layout={"width": "100%"}, style={"description_width": "initial"}
        )
        taken = ipywidgets.Button(description="Take in", tooltip="Take in the answers that you pasted into the line above")
        taken.on_click(lambda _: self._take_in())
        self._trouble = ipywidgets.HTML()
        super().__init__([self._html, self._line, taken, self._trouble])
        self.refresh()

    def refresh(self) -> None:
        """Show the answers as they are now."""
        self._html.value, self._line.value, self._trouble.value = f"<pre>{escape(self.as_text())}</pre>", export_answers(), ""

    def _take_in(self) -> None:
        try:
            import_answers(self._line.value)
        except (ValueError, OSError) as problem:  # an observer's exception would show nowhere
            self._trouble.value = f"<p role='alert'>{escape(str(problem))}</p>"

    def as_text(self) -> str:
        kept, lines = _kept(), []
        for name in _asked:
            if name.startswith(self._notebook):
                right = "".join(_shown[name].right) if name in _shown else ""
                first, last = kept.get(name, ("", ""))
                said = "no answer" if not last else f"{first}, then {last}" if first != last else last
                changed = "" if first == last else "  you changed your mind"
                lines.append(f"{name}  you: {said:9}  it is: {right or 'not seen yet'}{changed}")
        return "\n".join(lines) or "No prediction of this notebook has been asked yet."

    def as_html(self) -> str:
        return f"<pre>{escape(self.as_text())}</pre>"

    def as_data(self) -> dict:
        names = [name for name in _asked if name.startswith(self._notebook)]
        return {"replay": self._notebook, "right": {name: "".join(_shown[name].right) for name in names}}


def replay(notebook: str) -> Replay:
    """Set first and last answers beside what happened, for the predictions whose names begin with `notebook`."""
    _replays[notebook] = Replay(notebook)
    return _replays[notebook]


def export_answers() -> str:
    """All answers that are kept, of all notebooks, in one line: first and last letter behind each name."""
    return " ".join(f"{name}:{first}{last}" for name, (first, last) in sorted(_kept().items()))


def import_answers(line: str) -> None:
    """Take in what `export_answers` gave. A name that it holds is replaced, every other answer stays.

    Raises:
        ValueError: something in the line is no answer. Nothing is taken in then.
    """
    answers = {}
    for word in line.split():
        found = re.fullmatch(r"([\w-]+):([A-H])([A-H])", word)
        if not found:
            raise ValueError(f"{word!r} is no answer: paste the whole line, such as 01-P1:AD 01-P2:BB")
        answers[found[1]] = [found[2], found[3]]
    _keep_all(answers)
    for name in answers.keys() & _asked.keys():
        _asked[name].take(answers[name][1])
    for shown in _replays.values():
        shown.refresh()


# Exercises


@dataclass(frozen=True)
class Verdict:
    """Shown under an exercise. Raising would stop Run All, so nothing here raises."""

    exercise: str
    passed: bool
    evidence: str

    def __repr__(self) -> str:
        return f"{'passed' if self.passed else 'not yet'}, {self.exercise}: {self.evidence}"


def check(exercise: str, answer) -> Verdict:
    """Run `answer` as a lesson's exercise asks, and say what came of it.

    Args:
        exercise: its name, a key of EXERCISES.
        answer: what the exercise asks for: a backward, or a Function.
    """
    if exercise not in EXERCISES:
        raise ValueError(f"there is no exercise {exercise!r}; there are {', '.join(map(repr, EXERCISES))}")
    try:
        return Verdict(exercise, True, EXERCISES[exercise](answer))
    except _NotYet as reason:
        return Verdict(exercise, False, str(reason))
    except NotImplementedError:
        return Verdict(exercise, False, "waiting for your code")
    except Exception as problem:  # whatever a learner's code raises belongs under the learner's cell
        return Verdict(exercise, False, f"your code raised {_said(problem)}")


def _said(problem: Exception) -> str:
    """Its type and the first line of its message."""
    return f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}"


class _NotYet(Exception):
    """Evidence that an answer is not right."""


BEFORE = {"straight": lambda X: X, "through a view": lambda X: X.view(-1)}


def _counting_up(y: Tensor) -> Tensor:
    """A gradient for y that no two elements share."""
    return torch.arange(1.0, y.numel() + 1.0, device=y.device).view(y.shape)


def _leaf() -> Tensor:
    return torch.arange(1.0, 9.0).view(4, 2).to(runtime.DEVICE).requires_grad_()


def _off(gradient: Tensor | None, right: Tensor) -> str | None:
    """What is wrong with `gradient`, in one clause; None where nothing is."""
    if gradient is None:
        return "there is no gradient"
    if gradient.shape != right.shape:
        return f"it has shape {tuple(gradient.shape)} instead of {tuple(right.shape)}"
    wrong = (gradient != right).nonzero()
    if not len(wrong):
        return None
    index = tuple(wrong[0].tolist())
    return f"element {list(index)} is {gradient[index].item():g} where {right[index].item():g} is right"


def _loud(backward: Callable) -> str:
    """The write may stay, but a second backward must not be silent and wrong; the first must be right."""

    class Loud(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

    Loud.backward = staticmethod(backward)
    raised = []
    for way, before in BEFORE.items():
        X = _leaf()
        y = Loud.apply(before(X))
        dy = _counting_up(y)
        right = 2 * X.detach() * dy.view(X.shape)
        try:
            y.backward(dy, retain_graph=True)
        except NotImplementedError:  # a RuntimeError, too
            raise
        except RuntimeError as refusal:
            raise _NotYet(f"{way}, the first backward raises already, with {_said(refusal)}") from refusal
        wrong = _off(X.grad, right)
        if wrong:
            raise _NotYet(f"{way}, in the first gradient, {wrong}")
        try:
            y.backward(dy, retain_graph=True)
        except Exception:  # any error is loud
            raised.append(way)
            continue
        wrong = _off(X.grad, 2 * right)
        if wrong:
            raise _NotYet(f"{way}, the second backward is silent and wrong: in X.grad, {wrong}")
    if not raised:
        return "both backwards are right and nothing is written, so there is nothing to be loud about: that is 02.2 already"
    return f"the first gradient is right, and the second backward raises ({' and '.join(raised)})"


def _be_a_function(answer) -> None:
    if not (isinstance(answer, type) and issubclass(answer, torch.autograd.Function)):
        raise _NotYet("give check the Function itself, which is a class, and not its backward or a call of it")


def _right(function: type[torch.autograd.Function]) -> str:
    """Any number of backwards are right, X and dy stay as they are; what is kept beside x is told."""
    _be_a_function(function)
    for way, before in BEFORE.items():
        X = _leaf()
        X_before, squares = probes.look(X), before(X.detach() ** 2)
        y = function.apply(before(X))
        wrong = _off(y.detach(), squares)
        if wrong:
            raise _NotYet(f"{way}, forward is not x^2: {wrong}")
        dy = _counting_up(y)
        right, dy_before = 2 * X.detach() * dy.view(X.shape), dy.clone()
        for count in (1, 2, 3):
            y.backward(dy, retain_graph=True)
            if probes.look(X).digest != X_before.digest:
                raise _NotYet(
                    f"{way}, backward {count} changes X: its first element is {X.detach().flatten()[0].item():g}, was 1"
                )
            if not torch.equal(dy, dy_before):
                raise _NotYet(f"{way}, backward {count} changes dy, which is the caller's")
            wrong = _off(X.grad, count * right)
            if wrong:
                raise _NotYet(f"{way}, after backward {count}, in X.grad, {wrong}")
    first, second = _leaf(), _leaf()
    for leaf, factor in ((first, 1), (second, 3)):
        (factor * function.apply(leaf).sum()).backward()
        wrong = _off(leaf.grad, factor * 2 * leaf.detach())
        if wrong:
            raise _NotYet(f"behind sum(), whose dy is one number with stride 0, {wrong}")
    if not torch.equal(first.grad, 2 * first.detach()):
        raise _NotYet("the backward of another tensor changes the gradient that this one got: they share memory")
    extra = _kept_beside_x(function)
    told = f"keeps +{extra:g} N until backward beside x" + (", which x itself could serve as" if extra else "")
    return f"three backwards are right, straight and through a view, X and dy are untouched; it {told}"


def _kept_beside_x(function: type[torch.autograd.Function]) -> float:
    """Memory that the graph of one call keeps until backward, in sizes of x, x's own not counted."""
    X, kept = _leaf(), {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = function.apply(X)  # alive, and with it all that it saved, until the storages are counted
    for value in vars(y.grad_fn).values():  # what was put on ctx instead
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, Tensor):
                pack(tensor)
    kept.pop(X.untyped_storage().data_ptr(), None)
    kept.pop(y.untyped_storage().data_ptr(), None)
    return sum(kept.values()) / X.nbytes


def _place(answer: Callable) -> str:
    """The number of an element in its storage, from its index, strides and offset."""
    m = torch.arange(12.0).view(3, 4)
    views = {"m": m, "m.t()": m.t(), "m[:, ::2]": m[:, ::2], "m[1:, 1:]": m[1:, 1:], "m[0].expand(3, 4)": m[0].expand(3, 4)}
    for name, view in views.items():
        for row in range(view.shape[0]):
            for col in range(view.shape[1]):
                said, right = answer(row, col, view.stride(), view.storage_offset()), int(view[row, col])  # m counts its places
                if said != right:
                    raise _NotYet(f"element [{row}, {col}] of {name} lies at {right}, not at {said}")
    return f"right for every element of {', '.join(views)}"


def _two_strides(answer: Callable) -> str:
    """3 dy for any strides of dy [2, 3], in one new tensor and no other memory."""
    layouts = {
        "contiguous": (3, 1), "transposed": (1, 2), "rows of a wider tensor": (6, 1), "every other column": (6, 2),
        "one number, expanded": (0, 0), "one row, expanded": (0, 1), "one column, expanded": (1, 0),
    }  # fmt: skip
    return _any_layout(answer, (2, 3), layouts, lambda dy: 3 * dy)


def _any_layout(answer: Callable, shape: tuple[int, ...], layouts: dict, right: Callable, **tables: Tensor) -> str:
    """answer(dy, *tables.values()) is right(dy) for a dy of any layout, in one new tensor and no other memory."""
    for name, strides in layouts.items():
        room = torch.arange(10.0, 1034.0, device=runtime.DEVICE)  # for wrong strides, too
        dy = room.as_strided(shape, strides, 3)
        expected, untouched = right(dy), _untouched(dy=dy, **tables)
        with probes.Allocations(dy, *tables.values()) as made:
            dx = answer(dy, *tables.values())
        large = sum(size >= 4 * dy.numel() for size in made.sizes)
        wrong = _off(dx, expected) or untouched()
        if wrong is None and not dx.is_contiguous():
            wrong = f"dx has strides {dx.stride()}, and a contiguous one is asked for"
        if wrong is None and dy.numel() in made.copies:
            wrong = "as many elements as dy has were copied"
        if wrong is None and large > 1:
            wrong = f"{large} tensors of dy's size were made where the result needs one"
        if wrong:
            raise _NotYet(f"{name}, strides {strides}: {wrong}")
    return f"right for {len(layouts)} layouts, each without a copy"


def _untouched(**tensors: Tensor) -> Callable[[], str | None]:
    """Asked later: which of `tensors` was changed since, in one clause; None where none was."""
    before = {name: probes.look(tensor).digest for name, tensor in tensors.items()}

    def changed() -> str | None:
        names = [name for name, tensor in tensors.items() if probes.look(tensor).digest != before[name]]
        return f"{names[0]} was changed, which is the caller's" if names else None

    return changed


def _two_slips(backward: Callable) -> str:
    """A rotary backward that takes what forward put on ctx, whatever that is."""

    class Slips(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, cos, sin, position_ids, rotary_size, base):
            ctx.save_for_backward(cos, sin, position_ids)
            ctx.rotary_size, ctx.base = rotary_size, base
            return rotary(x, cos, sin, position_ids, rotary_dim=rotary_size, heads=(base, x.shape[2]))

    Slips.backward = staticmethod(backward)
    places = [3, 2]
    positions = torch.tensor(places, device=runtime.DEVICE)
    for rotary_size, base in ((4, 0), (2, 1), (2, 0)):
        x = torch.arange(1.0, 25.0, device=runtime.DEVICE).view(1, 2, 3, 4).requires_grad_()
        (cos, sin), dy = scenarios.quarter_turns(rotary_size), _counting_up(x)
        right = rotary_reference(dy, cos, -sin, positions, rotary_dim=rotary_size, heads=(base, 3))
        untouched = _untouched(output_grad=dy, cos=cos, sin=sin, position_ids=positions)
        y = Slips.apply(x, cos, sin, positions, rotary_size, base)
        (dx,) = torch.autograd.grad(y, x, dy, allow_unused=True)
        wrong = untouched() or _off(dx, right)
        if wrong:
            raise _NotYet(f"with rotary_size {rotary_size}, base {base} and positions {places}, {wrong}")
    return "right for three pairs of rotary_size and base, at positions other than 0"


def _turn_back(answer: Callable) -> str:
    """dy [seq, heads, head_dim] turned back, whatever its strides, in one new tensor and no other memory."""
    layouts = {
        "contiguous": (8, 4, 1), "heads first in memory": (4, 12, 1), "heads of a wider projection": (16, 4, 1),
        "every other dimension": (16, 8, 2), "dimensions first in memory": (2, 1, 6), "one number, expanded": (0, 0, 0),
        "one token, expanded": (0, 4, 1), "one head, expanded": (4, 0, 1),
    }  # fmt: skip
    pairs = torch.tensor([[0, 0], [1, 2], [2, 3]], device=runtime.DEVICE)  # quarters, for each token and pair
    cos, sin = (table[:, 0][pairs] for table in scenarios.quarter_turns(2))
    back = cos.clone(), -sin  # an answer may change its tables
    return _any_layout(answer, (3, 2, 4), layouts, lambda dy: rotary_reference(dy[None], *back)[0], cos=cos, sin=sin)


def _beside(function: type[torch.autograd.Function]) -> str:
    """y = 2 x; right beside a sibling made first or last, through a view and in a residual, in any layout, with dy untouched,
    and in memory of its own."""
    _be_a_function(function)
    numbers = torch.arange(1.0, 7.0, device=runtime.DEVICE)
    alone = "alone, with a contiguous dy"
    _doubled(function, alone, numbers.view(2, 3))
    for name in (*scenarios.BESIDE, scenarios.RESIDUAL):
        for first in scenarios.ORDERS:
            record = scenarios.branched(name, first, lambda x, _: function.apply(x))
            where = "in a residual" if name == scenarios.RESIDUAL else f"beside {name}, with {first} made first"
            if record.wrong:
                got, right = record.grads[record.wrong[0]]
                raise _NotYet(f"{where}, {record.wrong[0]}.grad is {_spaced(got)} where {_spaced(right)} is right")
            if record.w != (1, 2, 3):
                raise _NotYet(f"{where}, all is right, but dy was changed: the caller's 1 2 3 is {_spaced(record.w)}")
    _doubled(function, "alone, with a transposed dy", numbers.view(3, 2).t())
    _doubled(function, "alone, with an expanded dy", numbers[1].expand(2, 3))
    first, second = _doubled(function, alone, numbers), _doubled(function, alone, 3 * numbers)
    if probes.overlap(first, second):
        raise _NotYet("two backwards hand out the same memory: the second changes the gradient that the first gave")
    return (
        "right beside every sibling and in a residual, for three layouts, dy is untouched, and each gradient has its own memory"
    )


def _doubled(function: type[torch.autograd.Function], where: str, dy: Tensor) -> Tensor:
    """What `function`, y = 2 x, gives for dy."""
    x, right = torch.ones(dy.shape, device=dy.device, requires_grad=True), 2 * dy
    before = probes.look(x).digest
    y = function.apply(x)
    wrong = _off(y.detach(), torch.full_like(y, 2))
    if wrong or probes.look(x).digest != before:
        raise _NotYet(f"forward is not 2 x: {wrong}" if wrong else "forward changes x, which is the caller's")
    (dx,) = torch.autograd.grad(y, x, dy, allow_unused=True)
    wrong = _off(dx, right)
    if wrong:
        raise _NotYet(f"{where}, {wrong}")
    return dx


def _spaced(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)


def _one_shot(backward: Callable) -> str:
    """In place, right once, and loud for whoever else asks."""

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.used = False
            return x * x

    InPlace.backward = staticmethod(backward)
    way, backend = scenarios.Way(lambda x, _: InPlace.apply(x)), runtime.backends()[0]
    found = {situation: scenarios.judge("yours", way, situation, backend) for situation in scenarios.SITUATIONS}
    once = found["one backward"]
    if once.verdict == "loud":
        raise _NotYet(f"one backward: {once.because}, where it should be right")
    for situation, record in found.items():
        if record.verdict == "silent":
            wrapped = hasattr(backward, "__wrapped__") and situation == "a second derivative"
            raise _NotYet(f"{situation}: silent and wrong, {record.because}{_ONCE if wrapped else ''}")
    _refuses_before_it_writes(InPlace)
    if once.backward > 2:
        raise _NotYet(f"right or loud everywhere, and the peak is {once.backward} N: in place it is 2 N")
    return f"one backward is right at a peak of {once.backward} N, and nothing else is silent: " + ", ".join(
        f"{situation} {record.verdict}" for situation, record in found.items() if situation != "one backward"
    )


_ONCE = "; once_differentiable runs backward without grad mode, and refuses only where dy requires grad"


def _refuses_before_it_writes(function: type[torch.autograd.Function]) -> None:
    """dy counts, and stays; where a second backward or a second derivative raises, x stays as well."""
    X = _leaf()
    x = X * 1
    y = function.apply(x)
    dy, before = _counting_up(y), probes.look(x).digest
    untouched = _untouched(dy=dy)
    with contextlib.suppress(Exception):
        torch.autograd.grad(y, X, dy, create_graph=True)
        before = probes.look(x).digest  # it has not refused, and what came of it was judged
    if probes.look(x).digest != before:
        raise _NotYet("a second derivative is refused after the gradient was written over x: refuse first")
    y, right = function.apply(x), 2 * X.detach() * dy
    y.backward(dy, retain_graph=True)
    wrong = untouched() or _off(X.grad, right)
    if wrong:
        raise _NotYet(f"one backward, with a dy that counts: {wrong}")
    before = probes.look(x).digest
    with contextlib.suppress(Exception):
        y.backward(dy)
        before = probes.look(x).digest
    if probes.look(x).digest != before:
        raise _NotYet("a second backward is refused after the gradient was written over x again: refuse first")


def _examined(number: str, backward: Callable) -> str:
    """A case's Function with this backward, before the doctor."""
    report = examined(CASES[number].with_backward(backward), CASES[number])
    told = [
        f"{finding.check} is {finding.verdict}: {shortened(finding.evidence)}" for finding in report.findings if finding.told
    ]
    if told:
        raise _NotYet(told[0] + (f" (and {len(told) - 1} more)" if told[1:] else ""))
    for check in ("runs", CASES[number].check):
        if report.verdict(check) != "healthy":
            raise _NotYet(f"{check} is {report.verdict(check)}: {shortened(report.of(check)[0].evidence)}")
    return f"the doctor finds nothing broken and nothing unsafe, and {CASES[number].check} is healthy"


EXERCISES = {
    "00.1 place": _place,
    "01.1 two strides": _two_strides,
    "01.2 two slips": _two_slips,
    "01.3 turn back": _turn_back,
    "02.1 loud": _loud,
    "02.2 right": _right,
    "03.1 beside": _beside,
    "04.1 one shot": _one_shot,
    "05.1 guard": functools.partial(_examined, "T1"),
    "05.2 rows": functools.partial(_examined, "T8"),
}
