"""A lesson's live experiments: knobs in, plain records out. Every record comes from a run that happens in the call."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rawgrad import probes, runtime, specimens

# Names are the code that a learner would type. X is [8, 8]; for squeeze(1) it is made as [8, 1, 8].
BEFORE = {
    "nothing": lambda X: X,
    "view(64)": lambda X: X.view(64),
    "view(2, 4, 8).view(8, 8)": lambda X: X.view(2, 4, 8).view(8, 8),
    "view_as(X)": lambda X: X.view_as(X),
    "reshape(64)": lambda X: X.reshape(64),
    "flatten()": lambda X: X.flatten(),
    "flatten(1)": lambda X: X.flatten(1),
    "t()": lambda X: X.t(),
    "permute(1, 0)": lambda X: X.permute(1, 0),
    "unsqueeze(0)": lambda X: X.unsqueeze(0),
    "squeeze(1)": lambda X: X.squeeze(1),
    "squeeze()": lambda X: X.squeeze(),
    "contiguous()": lambda X: X.contiguous(),
    "expand(8, 8)": lambda X: X.expand(8, 8),
    "X[...]": lambda X: X[...],
    "X[:]": lambda X: X[:],
    "narrow(0, 0, 8)": lambda X: X.narrow(0, 0, 8),
    "select(0, 0)": lambda X: X.select(0, 0),
    "clone()": lambda X: X.clone(),
    "X * 1": lambda X: X * 1,
}
REPAIRS = {
    "none": specimens.GradientInSaved,
    "increment_version": specimens.GradientInSavedAnnounced,
    "clone the result": specimens.GradientInSavedCloned,
    "return detach()": specimens.GradientInSavedDetached,
    "declare with custom_op": specimens.GradientInSavedDeclared,
    "new memory": specimens.GradientInNewMemory,
}
# "a kernel" is the Triton kernel, or the CUDA kernel where Triton does not run: a lesson's outputs are the same with both.
WRITERS = {"a kernel": None, "torch in place": "torch", "the Triton kernel": "triton", "the CUDA kernel": "cuda"}
HOOKS = ("none", "prints the gradient", "keeps the gradient")
MOST_BACKWARDS = 3


@dataclass(frozen=True)
class Backward:
    """One backward: what autograd compared, what was written, what arrived. Numbers are of element 0, whose X0 is 1."""

    version_at_save: int
    version_found: int  # of the saved tensor, when backward asks for it
    raised: bool  # autograd refused, because the two differ
    write: str  # to the saved tensor: "counted", "not counted", "none"
    arrival: str  # what became of the memory that the Function returned: "taken over" as X.grad, "copied", "added", "nothing"
    x: float  # afterwards
    saved: float
    grad: float
    right_grad: float
    version_written: int  # of the saved tensor, when the Function returned
    version_left: int  # of the saved tensor, when the backward was over
    x_version: int
    grad_is_x: bool  # X.grad and X share memory


@dataclass(frozen=True)
class Timeline:
    """Some backwards of one graph, y = f(before(X)), with the gradient 1 for every element of y."""

    before: str
    writer: str
    repair: str
    hook: str
    backwards: tuple[Backward, ...]  # a raise ends them
    x_intact: bool  # no byte of X changed

    @property
    def verdict(self) -> str:
        if not self.backwards:
            return "nothing has run yet"
        if self.backwards[-1].raised:
            return f"raises at backward {len(self.backwards)}"
        return "silent and right" if self.right else "silent and wrong"

    @property
    def right(self) -> bool:
        """Every gradient that was handed out was right, and X is what it was."""
        return self.x_intact and all(b.grad == b.right_grad for b in self.backwards if not b.raised)


def version_timeline(
    before: str = "nothing", writer: str = "a kernel", repair: str = "none", hook: str = "none", backwards: int = MOST_BACKWARDS
) -> Timeline:
    """Run `backwards` backwards with retain_graph through a Function that stores its gradient in what it saved.

    Args:
        before: what stands between X and the Function, a key of BEFORE.
        writer: who writes, a key of WRITERS.
        repair: which would-be repair the Function has, a key of REPAIRS.
        hook: what a hook on X does with the gradient, one of HOOKS.
        backwards: 0 to MOST_BACKWARDS.

    Raises:
        RuntimeError: this machine cannot run the writer; the sentence says what to do.
    """
    run = _Run(before, writer, repair, hook)
    done = []
    while len(done) < backwards and not (done and done[-1].raised):
        done.append(run.backward())
    return Timeline(before, writer, repair, hook, tuple(done), x_intact=not run.x_changed())


class _Run:
    """One graph, and what it looks like from outside between two backwards."""

    def __init__(self, before: str, writer: str, repair: str, hook: str):
        backend = runtime.choose(WRITERS[writer])
        if writer == "a kernel" and backend == "torch":
            raise RuntimeError(f"no kernel runs here: {runtime.problem('triton')}; {runtime.problem('cuda')}")
        shape = (8, 1, 8) if before == "squeeze(1)" else (8, 8)
        self.x = torch.arange(1.0, 65.0).view(shape).to(runtime.DEVICE).requires_grad_()
        self.kept = []  # what the hook keeps
        if hook == "prints the gradient":
            self.x.register_hook(self._print)
        if hook == "keeps the gradient":
            self.x.register_hook(self.kept.append)
        self.saved = BEFORE[before](self.x)
        self.x_first, self.version_at_save = probes.look(self.x), self.saved._version
        self.y = REPAIRS[repair].apply(self.saved, backend)
        self.count = 0
        # Hooks on the node itself hold nobody's gradient, so they change nothing: a test compares runs with and without.
        self.y.grad_fn.register_prehook(self._before_node)
        self.y.grad_fn.register_hook(self._after_node)

    def _print(self, gradient: Tensor) -> None:
        self.printed = str(gradient)  # what print shows; a lesson's output has room for the picture only

    def _before_node(self, _gradients) -> None:
        self.found = probes.look(self.saved)

    def _after_node(self, returned, _gradients) -> None:
        self.left, self.returned_storage = probes.look(self.saved), returned[0].untyped_storage().data_ptr()

    def x_changed(self) -> bool:
        return probes.look(self.x).digest != self.x_first.digest

    def backward(self) -> Backward:
        self.count += 1
        had_gradient, self.left = self.x.grad is not None, None
        raised = False
        try:
            self.y.backward(torch.ones_like(self.y), retain_graph=True)
        except RuntimeError as refusal:
            if "modified by an inplace operation" not in str(refusal):
                raise
            raised = True
        return Backward(
            version_at_save=self.version_at_save,
            version_found=self.found.version,
            raised=raised,
            write=self._write(),
            arrival=self._arrival(had_gradient),
            x=_first(self.x),
            saved=_first(self.saved),
            grad=_first(self.x.grad),
            right_grad=2.0 * self.count,
            version_written=(self.left or self.found).version,
            version_left=self.saved._version,
            x_version=self.x._version,
            grad_is_x=self.x.grad is not None and probes.overlap(self.x.grad, self.x),
        )

    def _write(self) -> str:
        if self.left is None or self.left.digest == self.found.digest:
            return "none"
        return "not counted" if probes.written_unseen(self.found, self.left) else "counted"

    def _arrival(self, had_gradient: bool) -> str:
        if self.left is None:
            return "nothing"
        if had_gradient:
            return "added"
        return "taken over" if self.x.grad.untyped_storage().data_ptr() == self.returned_storage else "copied"


def _first(tensor: Tensor | None) -> float:
    return float("nan") if tensor is None else tensor.detach().flatten()[0].item()


@dataclass(frozen=True)
class Stop:
    """A gradient on its way back, as it leaves a node."""

    node: str
    storage: str  # letter; A is X's
    is_x: bool  # the very tensor object X, not another one over its memory


@dataclass(frozen=True)
class GradientPath:
    """Where the first backward's gradient lies at every step from y to X.grad."""

    before: str
    repair: str
    saved: Stop  # what the Function keeps for its backward
    stops: tuple[Stop, ...]  # dy first, then what every node returns
    grad: Stop  # X.grad

    @property
    def taken_over(self) -> bool:
        """AccumulateGrad kept the memory that arrived, instead of copying it."""
        return self.grad.storage == self.stops[-1].storage


def gradient_path(before: str = "nothing", writer: str = "a kernel", repair: str = "none") -> GradientPath:
    """Follow the gradient of one backward through the graph that `version_timeline` runs; its knobs, its errors."""
    run = _Run(before, writer, repair, "none")
    letters = {run.x.untyped_storage().data_ptr(): "A"}

    def stop(node: str, gradient: Tensor) -> Stop:
        letter = letters.setdefault(gradient.untyped_storage().data_ptr(), "ABCDEFGH"[len(letters)])
        return Stop(node, letter, gradient is run.x)

    saved, dy = stop("saved x", run.saved), torch.ones_like(run.y)
    stops, node = [stop("dy", dy)], run.y.grad_fn
    while node.next_functions:  # all but AccumulateGrad
        name = "f" if node is run.y.grad_fn else node.name().rstrip("0").removesuffix("Backward")
        node.register_hook(lambda returned, _, name=name: stops.append(stop(name, returned[0])))
        node = node.next_functions[0][0]
    run.y.backward(dy)
    return GradientPath(before, repair, saved, tuple(stops), stop("X.grad", run.x.grad))
