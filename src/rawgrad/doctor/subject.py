"""The Function under examination: fresh copies of its inputs, seeded calls, and what is right.

Every call starts from the same seed inside `fork_rng`, so that dropout is itself. Nothing that the caller gave is touched: a
check works on copies. No hook keeps a gradient, and value checks use `torch.autograd.grad`, so nobody's turn to take a
gradient over is spoilt.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rawgrad import probes

GUARD = 512  # bytes before and behind a tensor, and any multiple of it: a GPU's allocator works in such blocks
MOST = 16384  # elements, where sizes are tried: an interpreted kernel takes minutes for more
REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError)  # others are mistakes of the code


Results = tuple[Sequence[Tensor | None], Sequence[Tensor | None]]  # outputs, and gradients by what is wanted


class Refused(Exception):
    """The Function raised before anything that can be seen had changed."""


class Crashed(Exception):
    """The Function raised after it had changed something, or by a mistake of its code."""


def sort(problem: Exception, changed: bool = False) -> Exception:
    """What Python raised, as Refused or as Crashed, with the first line of what it said."""
    if isinstance(problem, Refused | Crashed):
        return problem
    said = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"[:200]
    if isinstance(problem, REFUSALS) and (not changed or "modified by an inplace operation" in said):
        return Refused(said)  # autograd's version check is the loud end of a declared write
    return Crashed(f"raised {said}{', after it had changed a tensor' if changed else ''}")


class Filled(TorchDispatchMode):
    """Fills what torch.empty and its kin hand out with the subject's `fill`."""

    MAKERS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

    def __init__(self, subject: "Subject"):
        super().__init__()
        self.subject = subject

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if (
            func.overloadpacket.__name__ in self.MAKERS
            and isinstance(made, Tensor)
            and made.numel()
            and made.dtype != torch.bool
        ):
            floats = made.is_floating_point() or made.is_complex()
            made.fill_(self.subject.fill if floats else 0 if math.isnan(self.subject.fill) else int(self.subject.fill))
        return made


class Subject:
    """A callable and its inputs.

    Args:
        func: takes `inputs`, returns a tensor or several.
        inputs: tensors and whatever else it takes. Those that require grad are differentiated.
        reference: what func means, in PyTorch's own operators; None: func is compared with itself.
        seed: of every call, and of every tensor that a check makes.
        tolerance: relative, of the largest number; None: by dtype.
        rebuild: makes inputs of another size, from one number; None where none can be made.
    """

    def __init__(
        self,
        func: Callable,
        inputs: tuple,
        reference: Callable | None = None,
        seed: int = 0,
        tolerance: float | None = None,
        rebuild: Callable[[int], tuple] | None = None,
    ):
        self.func, self.reference, self.seed, self.tolerance, self.rebuild = func, reference, seed, tolerance, rebuild
        self.given = inputs
        self.tensors = [n for n, value in enumerate(inputs) if isinstance(value, Tensor)]
        self.wanted = [n for n in self.tensors if inputs[n].requires_grad]
        if not self.wanted:
            raise ValueError("examine differentiates inputs that require grad, and none of these does: x.requires_grad_()")
        for n in self.tensors:
            if inputs[n].layout != torch.strided:
                raise ValueError(f"examine needs strided tensors, and input {n} is {inputs[n].layout}")
        self.device = inputs[self.wanted[0]].device
        self.grads: list[Tensor | None] = [None] * len(self.wanted)  # of plain inputs, once learnt
        self.plain: Results = [], self.grads  # the reference's of plain inputs, once learnt
        self.random = False  # func draws random numbers
        self.agrees = True  # with its reference
        self.leaves = True  # False: func writes over its input and says so, which autograd refuses for a leaf
        self.fill = 0.0  # of what torch.empty hands out, so that what nobody wrote is the same in every check but its own
        self.alone = False  # in a process of its own, where a crash harms nobody

    def at(self, size: int) -> "Subject":
        """The same at another size."""
        return self._with(self.rebuild(size))

    def scaled(self) -> "Subject":
        """The same with each number that is differentiated times one of its own, between 1/2 and 1: signs stay."""
        made = self.inputs()
        with torch.no_grad():
            for n in self.wanted:
                generator = torch.Generator().manual_seed(self.seed + 31 + n)
                made[n] *= (0.5 + torch.rand(made[n].shape, generator=generator) / 2).to(made[n])
        return self._with(made)

    def nudged(self) -> "Subject":
        """The same with each number that is differentiated moved by up to a thousandth: off a kink, such as relu's at 0."""
        made = self.inputs()
        with torch.no_grad():
            for n in self.wanted:
                generator = torch.Generator().manual_seed(self.seed + 61 + n)
                made[n] += (torch.rand(made[n].shape, generator=generator) / 500 - 1e-3).to(made[n])
        return self._with(made)

    def _with(self, inputs: Sequence) -> "Subject":
        other = Subject(self.func, tuple(inputs), self.reference, self.seed, self.tolerance)
        other.leaves, other.agrees = self.leaves, self.agrees
        return other

    def most_rows(self) -> int:
        """The largest size at which all inputs together hold no more than MOST elements."""
        one, two = (sum(t.numel() for t in self.rebuild(size) if isinstance(t, Tensor)) for size in (1, 2))
        return MOST if two <= one else max(1, (MOST - one) // (two - one))

    # Copies

    def inputs(self, change: dict[int, Tensor] | None = None, dtype: torch.dtype | None = None) -> list:
        """Fresh contiguous leaves with the given values. `change` replaces some of them by tensors of the check's own."""
        made = []
        for n, value in enumerate(self.given):
            if change and n in change:
                value = change[n]
            elif isinstance(value, Tensor):
                value = _leaf_like(value, n in self.wanted, dtype)
            made.append(value)
        return made

    def upstream(self, outputs: Sequence[Tensor], salt: int = 0) -> list[Tensor]:
        """Gradients that look like `outputs`, contiguous, no two elements alike, the same at each call."""
        made = []
        for n, y in enumerate(outputs):
            generator = torch.Generator().manual_seed(self.seed + 1009 * salt + n + 1)
            real = y.dtype if not y.is_complex() else y.dtype.to_real()
            wide = torch.float32 if real in (torch.float16, torch.bfloat16) else real
            numbers = torch.randn((*y.shape, *((2,) if y.is_complex() else ())), generator=generator, dtype=wide) + 0.5
            numbers = torch.view_as_complex(numbers) if y.is_complex() else numbers
            made.append(numbers.to(dtype=y.dtype, device=y.device))
        return made

    # Calls

    @contextlib.contextmanager
    def seeded(self) -> Iterator[None]:
        devices = [torch.cuda.current_device()] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(self.seed)
            yield

    def call(self, inputs: Sequence, func: Callable | None = None) -> list[Tensor]:
        """The outputs, in order; whatever is no tensor is left out."""
        if not self.leaves:
            inputs = [value.clone() if n in self.wanted else value for n, value in enumerate(inputs)]
        with self.seeded():
            before = self._random_state()
            outputs = [y for y in tree_leaves((func or self.func)(*inputs)) if isinstance(y, Tensor)]
            self.random |= not torch.equal(before, self._random_state())
        return outputs

    def _random_state(self) -> Tensor:
        states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if self.device.type == "cuda" else [])]
        return torch.cat(states)

    def differentiable(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        return [y for y in outputs if y.requires_grad]

    def gradients(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], upstream: Sequence[Tensor], **how
    ) -> list[Tensor | None]:
        """By every input that is wanted; None where none came back."""
        wanted = [inputs[n] for n in self.wanted]
        with self.seeded():
            return list(torch.autograd.grad(outputs, wanted, list(upstream), allow_unused=True, **how))

    def run(self, inputs: Sequence, upstream: Callable | None = None, func: Callable | None = None, **how):
        """Outputs and gradients of one forward and one backward; `upstream(outputs)` gives other gradients."""
        outputs = self.differentiable(self.call(inputs, func))
        given = self.upstream(outputs) if upstream is None else upstream(outputs)
        return [y.detach() for y in outputs], self.gradients(outputs, inputs, given, **how)

    def attempt(self, what: Callable, *watched: Tensor):
        """what(), with an exception sorted: refused, or crashed.

        Args:
            watched: tensors whose bytes tell whether anything had changed by then.

        Raises:
            Refused, Crashed: with the first line of what was said.
        """
        before = [probes.look(tensor).digest for tensor in watched]
        try:
            return what()
        except Exception as problem:
            raise sort(problem, before != [probes.look(tensor).digest for tensor in watched]) from problem

    # What is right

    def learn(self) -> None:
        """Run twice on plain copies; afterwards `outputs`, `grads`, `first_grads` and `upstreams` are there, and `plain`, the
        reference's outputs and gradients of the same, where there is a reference.

        Raises:
            Refused, Crashed: on what the caller gave.
        """
        try:
            self.first_grads = self._learnt()
        except Refused as refusal:
            if "leaf Variable" not in str(refusal):
                raise
            self.leaves = False
            self.first_grads = self._learnt()
        self.grads = self._learnt()  # of a second call: the first may have been one of its own
        if self.reference and self.outputs:
            try:
                self.plain = self.referred()
            except Exception as problem:
                raise ValueError(f"the reference raised {type(problem).__name__}: {problem}") from problem
            same = len(self.plain[0]) == len(self.outputs)
            self.agrees = same and not self.results_off((self.outputs, self.grads), self.plain)

    def _learnt(self) -> list[Tensor | None]:
        inputs = self.inputs()
        outputs = self.attempt(lambda: self.call(inputs))
        self.all_outputs = [y.detach() for y in outputs]
        self.outputs = [y.detach().clone() for y in self.differentiable(outputs)]
        self.upstreams = self.upstream(self.outputs)
        if not self.outputs:
            return [None] * len(self.wanted)
        grads = self.attempt(lambda: self.gradients(self.differentiable(outputs), inputs, self.upstream(self.outputs)))
        return [None if g is None else g.clone() for g in grads]

    def truth(self, change: dict[int, Tensor] | None = None, upstream: Sequence[Tensor] | None = None):
        """Right outputs and gradients for these values: the reference's, or func's own on contiguous copies where there is
        none, or where func does not agree with it on plain inputs, which agrees_with_reference tells."""
        if change is None and upstream is None:
            return self.plain if self.reference and self.agrees else (self.outputs, self.grads)
        if self.reference and self.agrees:
            return self.referred(change, upstream)
        inputs = self.inputs({n: _leaf_like(t, n in self.wanted) for n, t in (change or {}).items()})
        return self.run(inputs, None if upstream is None else lambda _: [dy.clone() for dy in upstream])

    def referred(self, change: dict[int, Tensor] | None = None, upstream: Sequence[Tensor] | None = None):
        """Outputs and gradients of the reference, in float64."""
        wide, given = torch.float64, self.upstreams if upstream is None else upstream
        inputs = self.inputs({n: _leaf_like(t, n in self.wanted, wide) for n, t in (change or {}).items()}, wide)
        return self.run(inputs, lambda ys: [dy.to(y.dtype, copy=True) for dy, y in zip(given, ys, strict=True)], self.reference)

    def allowed(self, like: Tensor, right: Tensor, *also: Tensor | None) -> float:
        """How far from `right` a number may be: a multiple of what rounding costs in `like`'s dtype, at the size of `right` or
        of `also`: where terms cancel, what is left is smaller than their rounding."""
        sizes = [t.detach().abs().nan_to_num(0, 0, 0).max().item() for t in (right, *also) if t is not None and t.numel()]
        size = max(sizes, default=0.0)
        if self.tolerance is not None:
            return self.tolerance * max(size, 1e-30)
        if not (like.is_floating_point() or like.is_complex()):
            return 0.0
        return 16 * torch.finfo(like.dtype).eps * max(size, 1e-30) * max(1.0, math.log2(max(2, right.numel())))

    def off(self, got: Tensor | None, right: Tensor | None, what: str, *also: Tensor | None, slack: float = 0.0) -> str | None:
        """What is wrong with `got`, in one clause with numbers; None where nothing is. A missing gradient is a zero one.

        Args:
            also: of whose size rounding is allowed as well.
            slack: that it may be off beyond rounding.
        """
        if got is None and right is None:
            return None
        got = torch.zeros_like(right) if got is None else got.detach()
        right = torch.zeros_like(got) if right is None else right.detach()
        if got.shape != right.shape:
            return f"{what} has shape {list(got.shape)} where {list(right.shape)} is right"
        wide_got, wide = _wide(got), _wide(right)
        wrong = ~((wide_got - wide).abs() <= self.allowed(got, wide, *also) + slack) & ~(
            (wide_got == wide) | (wide_got.isnan() & wide.isnan())
        )
        if not wrong.any():
            return None
        first = wrong.nonzero()[0].tolist() if wrong.ndim else []
        place = f"[{', '.join(map(str, first))}]"
        return (
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, first {place}: "
            f"{_said(got[tuple(first)])} where {_said(right[tuple(first)])} is right"
        )

    def all_off(
        self,
        got: Sequence[Tensor | None],
        right: Sequence[Tensor | None] | None = None,
        slack: Sequence[float] | None = None,
    ) -> str | None:
        """`off` of the first gradient that is wrong."""
        right = self.grads if right is None else right
        slack = [0.0] * len(got) if slack is None else slack
        for n, one, good, plain, loose in zip(self.wanted, got, right, self.grads, slack, strict=True):
            wrong = self.off(one, good, f"the gradient of input {n}", plain, slack=loose)
            if wrong:
                return wrong
        return None

    def results_off(
        self, got: Results, right: Results, output: str = "the output", shaken: dict[int, Tensor] | None = None
    ) -> str | None:
        """`off` of the first output, then of the first gradient, that is wrong.

        Args:
            shaken: input -> tensor; four times what a rounding of these moves is allowed as well.
        """

        def first(loose: Sequence[float], looser: Sequence[float]) -> str | None:
            for n, (y, good, slack) in enumerate(zip(got[0], right[0], loose, strict=True)):
                wrong = self.off(y, good, output.format(n), slack=slack)
                if wrong:
                    return wrong
            return self.all_off(got[1], right[1], looser)

        wrong = first([0.0] * len(got[0]), [0.0] * len(got[1]))
        if wrong and shaken is not None:
            wrong = first(*([4 * by for by in moved] for moved in self.unsteady(shaken)))
        return wrong

    def difference(self, directions: dict[int, Tensor], upstream: Sequence[Tensor], step: float, dtype=None) -> float:
        """Of the outputs times `upstream`, where inputs move by `step` along `directions`, to either side."""
        ends = []
        for sign in (1, -1):
            moved = self.inputs(dtype=dtype)
            with torch.no_grad():
                for n, direction in directions.items():
                    moved[n] += sign * step * direction
            outputs = self.differentiable(self.attempt(lambda moved=moved: self.call(moved)))
            terms = zip(outputs, upstream, strict=True)
            ends.append(sum((y.detach().double() * dy.double()).sum().item() for y, dy in terms))
        return (ends[0] - ends[1]) / (2 * step)

    def unsteady(self, change: dict[int, Tensor]) -> tuple[list[float], list[float]]:
        """How far func's own outputs and gradients move where every input in `change` moves by a rounding: much where terms
        cancel, as in the layer norm of a constant row."""
        runs = [self.run(self.inputs({n: _leaf_like(t, n in self.wanted) for n, t in change.items()}))]
        shaken = {}
        for n, t in change.items():
            if t.is_floating_point() or t.is_complex():
                generator = torch.Generator().manual_seed(self.seed + n)
                up = torch.randint(0, 2, t.shape, generator=generator).to(t.device).bool()
                eps = torch.finfo(t.dtype).eps
                t = torch.where(up, t.detach() * (1 + eps), t.detach() * (1 - eps))
            shaken[n] = t
        runs.append(self.run(self.inputs({n: _leaf_like(t, n in self.wanted) for n, t in shaken.items()})))
        return tuple(
            [
                0.0 if a is None or b is None or not a.numel() else (_wide(a) - _wide(b)).abs().nan_to_num(0, 0, 0).max().item()
                for a, b in zip(one, other, strict=True)
            ]
            for one, other in zip(*runs, strict=True)
        )


def _leaf_like(tensor: Tensor, wanted: bool, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous leaf with the values of `tensor`."""
    made = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if dtype and (made.is_floating_point() or made.is_complex()):
        made = made.to(dtype.to_complex() if made.is_complex() else dtype)
    return made.requires_grad_(wanted)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _said(number: Tensor) -> str:
    value = number.item()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def guarded(tensor: Tensor, fill: float = math.nan, strides: Sequence[int] | None = None, offset: int = 0) -> Tensor:
    """A copy of `tensor` in the middle of a storage of its own, with GUARD bytes or more on either side, all else `fill`.

    Args:
        strides: of the copy; None: contiguous. A stride of 0 wants equal values along that axis.
        offset: elements by which it begins behind the guard.
    """
    strides = contiguous_strides(tensor.shape) if strides is None else tuple(strides)
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True)) if tensor.numel() else 0
    guard = GUARD * max(1, -(-tensor.numel() * tensor.element_size() // GUARD)) // tensor.element_size()
    count = guard + offset + max(reach, tensor.numel()) + guard
    count += -count % (GUARD // tensor.element_size())
    room = torch.full((count,), fill if tensor.is_floating_point() or tensor.is_complex() else 0, dtype=tensor.dtype)
    room = room.to(tensor.device)
    view = room.as_strided(tensor.shape, strides, guard + offset)
    distinct = tuple(
        slice(0, 1) if step == 0 and size > 1 else slice(None) for size, step in zip(tensor.shape, strides, strict=True)
    )
    view[distinct].copy_(tensor.detach()[distinct])
    return view


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
