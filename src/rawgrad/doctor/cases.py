"""Ten cases for lesson 05, and to test the doctor.

A case knows its symptom as somebody first told it, a run that shows it, and a near miss: a run in which the same illness does
not show. The Functions are in ill.py.
"""

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from textwrap import wrap

import torch
from torch import Tensor

from rawgrad import runtime
from rawgrad.doctor import examine, ill
from rawgrad.doctor.report import Report


@dataclass(frozen=True)
class Case:
    """One illness."""

    number: str  # "T1"
    name: str  # of the symptom
    symptom: str  # as it is first told: no mechanism
    mechanisms: tuple[str, ...]  # to choose from
    mechanism: str  # which of them it is
    ill: type[torch.autograd.Function]
    well: type[torch.autograd.Function]
    reference: Callable
    inputs: Callable[[], tuple]  # small ones, for the doctor
    shows: Callable[[Callable], dict[str, object]]  # runs the callable where it goes wrong: label -> numbers
    hides: Callable[[Callable], dict[str, object]]  # and where it does not
    check: str  # the doctor's check that names it
    lesson: str
    remedy: str

    @property
    def sick(self) -> Callable:
        return self.ill.apply

    @property
    def healthy(self) -> Callable:
        return self.well.apply

    def told(self) -> "Beside":
        """label -> (what the sick one gives, what is right), where it shows."""
        return _beside(self.shows(self.sick), self.shows(self.reference))

    def hidden(self) -> "Beside":
        """The same in the near miss: equal, although nothing was cured."""
        return _beside(self.hides(self.sick), self.hides(self.reference))

    def with_backward(self, backward: Callable) -> Callable:
        """The healthy twin, with another backward."""
        return type("Yours", (self.well,), {"backward": staticmethod(backward)}).apply

    def named_by(self, report: Report) -> str:
        """The mechanism, where the report tells of the check that names it."""
        return self.mechanism if any(finding.told for finding in report.of(self.check)) else "the doctor does not find it"

    def excerpt(self, report: Report) -> "Excerpt":
        """Of a report, the check that names this case, and the names of what else it tells."""
        return Excerpt(report, self.check)


class Beside(dict):
    """label -> (what came, what is right), as a table."""

    def __repr__(self) -> str:
        rows = [(label, _said(got), _said(right)) for label, (got, right) in self.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            f"{label:{widths[0]}}   got {got:{widths[1]}}   {'right' if got == right else f'wrong, {right} is right'}"
            for label, got, right in rows
        )


def _beside(got: dict, right: dict) -> Beside:
    return Beside({label: (got[label], right[label]) for label in got})


def _said(value) -> str:
    if isinstance(value, list):
        return (" / " if value and isinstance(value[0], list) else " ").join(map(_said, value))
    return "None" if value is None else f"{value:g}"


@dataclass(frozen=True, repr=False)
class Excerpt:
    """Of a report, one check in full, and the names of the others that tell something."""

    report: Report
    check: str

    def __repr__(self) -> str:
        (finding,) = self.report.of(self.check)
        lines = [f"{self.report.subject}: {self.check} is {finding.verdict}{', silent' if finding.silent else ''}"]
        lines += wrap(shortened(finding.evidence), 100, initial_indent="  ", subsequent_indent="  ")
        if finding.remedy:
            lines += wrap(finding.remedy, 100, initial_indent="  -> ", subsequent_indent="     ")
        others = [other.check for other in self.report.findings if other.told and other.check != self.check]
        return "\n".join([*lines, *wrap(f"also told: {', '.join(others) or 'nothing'}", 100, subsequent_indent="  ")])


def shortened(evidence: str) -> str:
    """Without the names of layouts that fail in the same way."""
    return re.sub(r"; and (\d+) more: .*", r"; and in \1 more layouts", evidence)


def examined(func: Callable, case: Case) -> Report:
    """The doctor's report on `func` with a case's inputs and reference."""
    return examine(func, case.inputs(), case.reference)


# Runs that show it, and runs that hide it


def _of(values, grad: bool = True) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=runtime.DEVICE, requires_grad=grad)


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64, device=runtime.DEVICE, requires_grad=True)


def _numbers(tensor: Tensor | None):
    return None if tensor is None else (tensor.detach().round(decimals=4) + 0.0).tolist()  # + 0.0: no -0


def _gradient(x: Tensor, loss: Tensor):
    (dx,) = torch.autograd.grad(loss, x, allow_unused=True)
    return _numbers(dx)


def _eight() -> Tensor:
    return _of([[0, 1, 2, 3], [4, 5, 6, 7]])


def _rotates_shows(f) -> dict:
    return {"y.sum(), x.grad": _gradient(x := _eight(), f(x).sum())}


def _rotates_hides(f) -> dict:
    return {
        "(y * 1).sum(), x.grad": _gradient(x := _eight(), (f(x) * 1).sum()),
        "y.mean() * 8, x.grad": _gradient(x := _eight(), f(x).mean() * 8),
    }


def _in_cat(f, first: bool):
    x, other = _ones(2, 2), _ones(2, 2)
    weights = _of([[1, 2, 3, 4], [5, 6, 7, 8]], grad=False)
    return _gradient(x, (torch.cat([f(x), other] if first else [other, f(x)], 1) * weights).sum())


def _triples_shows(f) -> dict:
    transposed = _gradient(x := _ones(2, 2), (f(x).t() * _of([[1, 2], [3, 4]], grad=False)).sum())
    return {"cat([y, c], 1)": _in_cat(f, True), "cat([c, y], 1)": _in_cat(f, False), "y.t()": transposed}


def _triples_hides(f) -> dict:
    x, other = _ones(1, 2), _ones(1, 2)
    weights = _of([[1, 2, 3, 4]], grad=False)
    return {"cat([y, c], 1), one row": _gradient(x, (torch.cat([f(x), other], 1) * weights).sum())}


def _squares_shows(f) -> dict:
    u = _of([0, 0, 0])
    behind_exp = _gradient(u, f(torch.exp(u)).sum())
    x = _of([3, 5])
    loss = f(x).sum()
    twice = [_numbers(torch.autograd.grad(loss, x, retain_graph=True)[0]) for _ in range(2)]
    parameter = _of([3, 5])
    f(parameter).sum().backward()
    torch.optim.SGD([parameter], lr=0.1).step()
    return {"behind exp(u), u's gradient": behind_exp, "one graph, twice": twice, "after a step": _numbers(parameter)}


def _squares_hides(f) -> dict:
    return {"behind x + 0, once": _gradient(x := _of([3, 5]), f(x + 0).sum())}


def _siblings(f, sibling_first: bool):
    a, c = _ones(3), _ones(3)
    if sibling_first:
        fives = 5 * c
        z = f(a) + fives
    else:
        y = f(a)
        z = y + 5 * c
    (z * _of([1, 2, 3], grad=False)).sum().backward()
    return _numbers(c.grad)


def _doubles_shows(f) -> dict:
    a, w = _ones(3), _of([1, 2, 3], grad=False)
    h = 5 * a
    residual = _gradient(a, ((f(h) + h) * w).sum())
    mine = _of([1, 2, 3], grad=False)
    torch.autograd.grad(f(x := _ones(3)), x, mine)
    return {"f(a) + 5c, c.grad": _siblings(f, True), "h + f(h), h = 5a": residual, "the caller's dy": _numbers(mine)}


def _doubles_hides(f) -> dict:
    a, c, w = _ones(3), _ones(3), _of([1, 2, 3], grad=False)
    ((f(a) + c) * w).sum().backward()
    return {"5c made after f(a), c.grad": _siblings(f, False), "f(a) + c, c.grad": _numbers(c.grad)}


def _one_by_one_shows(f) -> dict:
    return {"y.sum(), x.grad": _gradient(x := _ones(4), f(x).sum())}


def _one_by_one_hides(f) -> dict:
    return {"(y * 1).sum(), x.grad": _gradient(x := _ones(4), (f(x) * 1).sum())}


def _batches() -> tuple[Tensor, Tensor]:
    return _of([1, 2], grad=False), _of([10, 20], grad=False)


def _weights_shows(f) -> dict:
    w, one, two = _ones(2), _ones(2), _ones(2)
    for x in _batches():
        f(w, x).sum().backward()
    accumulated = _numbers(w.grad)  # now: w.grad may be the buffer that the next backward fills
    for parameter, x in zip((one, two), _batches(), strict=True):
        f(parameter, x).sum().backward()
    return {"two micro-batches, w.grad": accumulated, "two parameters, the first's": _numbers(one.grad)}


def _weights_hides(f) -> dict:
    w, seen = _ones(2), []
    for x in _batches():
        w.grad = None
        f(w, x).sum().backward()
        seen.append(_numbers(w.grad))
    return {"a step after each batch": seen}


def _weight_of_loss_shows(f) -> dict:
    return {f"({weight} * f)": _gradient(x := _of([1, 2]), weight * f(x)) for weight in (0.1, 0)}


def _weight_of_loss_hides(f) -> dict:
    return {"(1 * f)": _gradient(x := _of([1, 2]), f(x))}


def _packs_shows(f) -> dict:
    x = _ones(7, 1)
    with nan_in_empty_memory():
        dx = _gradient(x, f(x, (2, 5), 3).sum())
    return {"lengths 2 and 5, longest 3": [row[0] for row in dx]}


def _packs_hides(f) -> dict:
    x = _ones(5, 1)
    with nan_in_empty_memory():
        dx = _gradient(x, f(x, (2, 3), 3).sum())
    return {"lengths 2 and 3, longest 3": [row[0] for row in dx]}


def _norms_shows(f) -> dict:
    return {"[1, 2, 3]": _numbers(f(_of([[1, 2, 3]])))}


def _norms_hides(f) -> dict:
    return {str(row): _numbers(f(_of([row]))) for row in ([-1, 0, 1], [1, 2, 3, 4])}


def _trunk(f, transposed: bool) -> dict:
    leaf, w = _ones(2, 3, 2), _ones(2, 2)
    h = leaf * 2
    f(h.transpose(0, 1) if transposed else h, w).sum().backward()
    where = "behind a transpose" if transposed else "without it"
    trunk = None if leaf.grad is None else leaf.grad.unique().tolist()
    return {f"w.grad, {where}": _numbers(w.grad), f"the trunk's, {where}": trunk}


@contextlib.contextmanager
def nan_in_empty_memory() -> Iterator[None]:
    """PyTorch's own switch: what `empty` returns is filled with NaN."""
    mode, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn)
        torch.utils.deterministic.fill_uninitialized_memory = filled


# The cases

LAYOUT = "the kernel reads dy's memory without dy's strides"
IN_SAVED = "backward writes over the input that it saved"
IN_UPSTREAM = "backward writes over the dy that it was given"
BUFFER = "all backwards share one buffer"
IGNORED = "backward does not multiply by dy"
EMPTY = "backward leaves part of its new memory as it was"
LANES = "lanes beyond the row take part in a sum"
ASKED = "backward asks a copy whether a gradient is wanted"
RACE = "two programs meet in one cell, without atomics"

CASES: dict[str, Case] = {
    case.number: case
    for case in (
        Case(
            "T1", "prints as ones",
            "My dy prints as eight ones, and one -1 comes out. As soon as I multiply y by 1 before the sum, all is right.",
            (IN_UPSTREAM, LAYOUT, EMPTY, IGNORED), LAYOUT, ill.RotatesUnguarded, ill.Rotates, ill.Rotates.forward,
            lambda: (_eight(),), _rotates_shows, _rotates_hides, "respects_upstream_strides", "01",
            "call the guard, dy.is_contiguous(), or give the kernel dy's own strides",
        ),
        Case(
            "T2", "right in the first row",
            "Alone it passes every test. Put beside another tensor by cat, the first row is right, and the second is not.",
            (RACE, EMPTY, IN_SAVED, LAYOUT), LAYOUT, ill.TriplesWhatFollows, ill.Triples, ill.Triples.forward,
            lambda: (_of([[1, 2], [3, 4]]),), _triples_shows, _triples_hides, "respects_upstream_strides", "01",
            "give the kernel dy's own strides, or dy.contiguous()",
        ),
        Case(
            "T5", "two to the number of elements",
            "y = 2x of four numbers, and y.sum() gives me a gradient of 16. Of five numbers it is 32.",
            (BUFFER, LAYOUT, IN_UPSTREAM, IGNORED), IN_UPSTREAM, ill.DoublesOneByOne, ill.Doubles, ill.Doubles.forward,
            lambda: (_ones(4),), _one_by_one_shows, _one_by_one_hides, "leaves_upstream_alone", "03",
            "write to new memory: dy may be one cell that stands for all elements",
        ),
        Case(
            "T4", "the neighbour's gradient",
            "My layer's own gradient is right. The branch beside it gets twice of what it should, unless I swap two lines.",
            (IN_UPSTREAM, BUFFER, RACE, IN_SAVED), IN_UPSTREAM, ill.DoublesUpstream, ill.Doubles, ill.Doubles.forward,
            lambda: (_ones(3),), _doubles_shows, _doubles_hides, "leaves_upstream_alone", "03",
            "write to new memory: a sum hands one dy to all its addends",
        ),
        Case(
            "T3", "the layer before it is wrong",
            "My square is right, but exp before it gets twice its gradient. After a step my parameter is 5.4 instead of 2.4.",
            (BUFFER, IGNORED, IN_SAVED, IN_UPSTREAM), IN_SAVED, ill.SquaresIntoInput, ill.Squares, ill.Squares.forward,
            lambda: (_of([3, 5]),), _squares_shows, _squares_hides, "leaves_inputs_alone", "02",
            "write to new memory; announcing the write makes it loud, not right",
        ),
        Case(
            "T6", "only the last micro-batch counts",
            "With gradient accumulation I get twice the last micro-batch, not the sum. With one batch a step all is right.",
            (IGNORED, RACE, IN_UPSTREAM, BUFFER), BUFFER, ill.WeightsOneBuffer, ill.Weights, ill.Weights.forward,
            lambda: (_ones(2), _of([1, 2], grad=False)), _weights_shows, _weights_hides, "accumulates", "03",
            "return new memory for every gradient: autograd keeps what it is given as .grad",
        ),
        Case(
            "T7", "the loss weight that does nothing",
            "I weight my loss with 0.1, and it trains as before. With 0 it still trains.",
            (EMPTY, IGNORED, BUFFER, ASKED), IGNORED, ill.SumsSquaresUnweighted, ill.SumsSquares, ill.SumsSquares.forward,
            lambda: (_of([1, 2]),), _weight_of_loss_shows, _weight_of_loss_hides, "is_linear_in_upstream", "04",
            "multiply what forward made by dy, whatever dy is",
        ),
        Case(
            "T8", "NaN after some hundred steps",
            "It trains well, and then NaN is everywhere. It begins with a batch in which one text was longer than the limit.",
            (LANES, LAYOUT, RACE, EMPTY), EMPTY, ill.PacksIntoEmpty, ill.Packs, ill.packed,
            lambda: (_of([[1], [2], [3], [4], [5], [6], [7]]), (2, 5), 3), _packs_shows, _packs_hides, "fills_its_results",
            "03", "allocate by zeros, or write the rows that were cut off, too",
        ),
        Case(
            "T9", "wrong at width 3, right at width 4",
            "My layer norm agrees with PyTorch's at width 4, and at width 3 on rows like -1, 0, 1. On 1, 2, 3 it does not.",
            (LAYOUT, LANES, EMPTY, RACE), LANES, ill.NormsAllLanes, ill.Norms, ill.norm_reference,
            lambda: (_of([[1, 2, 3], [2, 4, 9]]),), _norms_shows, _norms_hides, "agrees_with_reference", "01",
            "mask the lanes beyond the row once more, after the mean is subtracted",
        ),
        Case(
            "T10", "the trunk that stopped training",
            "Loss goes down, no warning, but only the head changes. It began when a transpose came before the head.",
            (ASKED, IGNORED, LAYOUT, BUFFER), ASKED, ill.ProjectsAsSaved, ill.Projects, lambda h, w: h.flatten(0, 1) @ w,
            lambda: (_ones(4, 3, 2), _ones(2, 2)), functools.partial(_trunk, transposed=True),
            functools.partial(_trunk, transposed=False), "respects_input_strides", "01",
            "ask ctx.needs_input_grad",
        ),
    )
}  # fmt: skip


# What others say of them


def said_by_others(case: Case) -> dict[str, str]:
    """What PyTorch's own tools say of the sick one on the doctor's inputs: "passes", or the type of what they raise.

    `empty` holds NaN meanwhile. opcheck is given forward as an operator with the same backward, without its fourth test,
    which traces the backward and wants an operator there, too.
    """
    told = {"gradcheck": torch.autograd.gradcheck, "gradgradcheck": torch.autograd.gradgradcheck}
    told["gradgradcheck, other strides"] = functools.partial(torch.autograd.gradgradcheck, gen_non_contig_grad_outputs=True)
    verdicts = {}
    for name, check in told.items():
        verdicts[name] = _verdict(lambda check=check: check(case.sick, case.inputs()))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    verdicts["opcheck"] = _verdict(lambda: torch.library.opcheck(as_operator(case), case.inputs(), test_utils=tests))
    return verdicts


def _verdict(run: Callable) -> str:
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))  # such as that Triton is missing, on stderr
    try:
        with nan_in_empty_memory(), contextlib.redirect_stdout(None):
            run()
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem)[:200]}"
    finally:
        logging.disable(disabled)
    return "passes"


@functools.cache
def as_operator(case: Case) -> torch.library.CustomOpDef:
    """The sick one as an operator of torch.library."""
    operator = torch.library.custom_op(f"rawgrad_cases::{case.number.lower()}", case.ill.forward, mutates_args=())
    operator.register_fake(case.reference)
    operator.register_autograd(case.ill.backward, setup_context=case.ill.setup_context)
    return operator
