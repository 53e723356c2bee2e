"""What a tensor is at one moment: version, layout, storage, bytes. Looking changes nothing."""

import gc
import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Snapshot:
    """One look at one tensor. What differs from run to run is kept out of the printed form."""

    version: int | None  # autograd's count of the in-place writes that it was told about; None in inference mode
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    offset: int  # elements from the start of the storage
    storage_nbytes: int
    storage: int = field(repr=False)  # address, bytes
    digest: str = field(repr=False)  # of all the storage's bytes, also those that the view does not show


def look(tensor: Tensor) -> Snapshot:
    """Take a Snapshot of `tensor`.

    Args:
        tensor: strided, any dtype, on the CPU or a GPU.

    Raises:
        ValueError: `tensor` is not strided.

    Cost: copies the whole storage to the CPU and hashes it; on a GPU it waits for the current stream.
    """
    if tensor.layout != torch.strided:
        raise ValueError(f"look needs a strided tensor, got {tensor.layout}")
    storage = tensor.untyped_storage()
    content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return Snapshot(
        version=None if tensor.is_inference() else tensor._version,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=tensor.storage_offset(),
        storage_nbytes=storage.nbytes(),
        storage=storage.data_ptr(),
        digest=hashlib.blake2b(content.cpu().numpy().tobytes(), digest_size=8).hexdigest(),
    )


def written_unseen(before: Snapshot, after: Snapshot) -> bool:
    """True where the bytes changed and the version counter did not: a write that autograd was not told about.

    Raises:
        ValueError: the two looks are not at one storage.
    """
    if (before.storage, before.storage_nbytes) != (after.storage, after.storage_nbytes):
        raise ValueError("written_unseen compares two looks at one storage, got two storages")
    return before.digest != after.digest and before.version == after.version


def address_range(tensor: Tensor) -> tuple[int, int]:
    """First and one past the last byte that `tensor` can touch; equal for an empty tensor."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


class Allocations(TorchDispatchMode):
    """A context that follows every storage that PyTorch's operators make in it: `sizes`, in bytes, in order of appearance,
    and every copy: `copies`, in elements.

    Args:
        given: tensors whose storages were there before.
    """

    def __init__(self, *given: Tensor):
        super().__init__()
        self._known = {t.untyped_storage().data_ptr() for t in given}
        self._alive = []  # so that no address comes back
        self.sizes: list[int] = []
        self.copies: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten._to_copy):
            self.copies.append(args[0].numel())
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, Tensor) and made.untyped_storage().nbytes():
                storage = made.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self._known.add(storage.data_ptr())
                    self._alive.append(storage)
                    self.sizes.append(storage.nbytes())
        return result


class Peak:
    """A context that meters memory above what was there when it began: `nbytes` is the most at once since the last `mark()`.

    On a GPU the allocator's own peak. On the CPU every storage that PyTorch's operators return is followed until it is freed,
    and what there is after each operator is summed. Not seen there: temporaries inside an operator, what is not strided, and
    memory from elsewhere, such as numpy's or torch.tensor(list)'s. Python's garbage collection waits until the end, so that
    what was garbage before is not counted as freed.

    Args:
        device: "cpu" or "cuda".
    """

    def __init__(self, device: str):
        self._mode = None if device == "cuda" else Alive()

    def __enter__(self) -> "Peak":
        self._collects = gc.isenabled()
        gc.disable()
        if self._mode:
            self._mode.__enter__()
        else:
            torch.cuda.synchronize()
            self._before = torch.cuda.memory_allocated()
        self.mark()
        return self

    def __exit__(self, *raised) -> None:
        if self._mode:
            self._mode.__exit__(*raised)
        if self._collects:
            gc.enable()

    def mark(self) -> None:
        """Begin a new peak, at what there is now."""
        if self._mode:
            self._mode.most = self._mode.now()
        else:
            torch.cuda.reset_peak_memory_stats()

    @property
    def nbytes(self) -> int:
        return self._mode.most if self._mode else torch.cuda.max_memory_allocated() - self._before

    def now(self) -> int:
        """Bytes at this moment."""
        return self._mode.now() if self._mode else torch.cuda.memory_allocated() - self._before


def storages(tree) -> list[torch.UntypedStorage]:
    """Of every strided tensor with memory in `tree`, and the storages in it themselves."""
    tensors = [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.layout == torch.strided and not t.is_meta]
    return [t.untyped_storage() for t in tensors] + [s for s in tree_leaves(tree) if isinstance(s, torch.UntypedStorage)]


class Alive(TorchDispatchMode):
    """Follows the storages that operators make, by weak references, and those that they make grow."""

    def __init__(self):
        super().__init__()
        self.most = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}  # a weak reference keeps the key from coming back

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {storage._cdata: storage.nbytes() for storage in storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for key, storage in {storage._cdata: storage for storage in storages((args, kwargs, result))}.items():
            reference, nbytes = self._storages.get(key, (None, 0))
            grown = storage.nbytes() - given.get(key, nbytes)
            if grown:
                self._storages[key] = (reference or StorageWeakRef(storage), nbytes + grown)
        self.most = max(self.most, self.now())
        return result

    def sizes(self) -> list[int]:
        """Bytes of each that is alive."""
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        return [nbytes for _, nbytes in self._storages.values()]

    def now(self) -> int:
        """Bytes of all that are alive."""
        return sum(self.sizes())


def shared_memory(module: torch.nn.Module) -> list[tuple[str, str]]:
    """After a backward: which gradients share memory with one another, or with a parameter or a buffer, by address range.

    Args:
        module: any; parameters without a gradient, and tensors without memory, are passed over. A sparse gradient counts
            by its values.

    Returns:
        Pairs of names, such as ("position.grad", "kind.grad") or ("weight", "weight.grad"). What is added to one of a pair is
        added to the other. Empty: nothing in the module shares its gradients' memory; a tensor outside may, such as a kernel's
        workspace. Two gradients that interleave without a common element, such as columns of one tensor, count as sharing.

    Cost: compares addresses, and reads no memory.
    """
    parameters = [*module.named_parameters(), *module.named_buffers()]
    named = parameters + [
        (f"{name}.grad", p.grad._values() if p.grad.layout == torch.sparse_coo else p.grad)
        for name, p in parameters
        if p.grad is not None
    ]
    ranges = [
        (*address_range(t), str(t.device), place)
        for place, (_, t) in enumerate(named)
        if t.layout == torch.strided and not t.is_meta
    ]
    pairs, open_ranges = [], []
    for start, end, device, place in sorted(ranges):
        open_ranges = [other for other in open_ranges if other[1] > start]
        for _, _, its_device, other in open_ranges:
            if its_device == device and end > start and max(place, other) >= len(parameters):  # one of them is a gradient
                pairs.append((min(place, other), max(place, other)))
        open_ranges.append((start, end, device, place))
    return [(named[first][0], named[second][0]) for first, second in sorted(pairs)]


def overlap(a: Tensor, b: Tensor) -> bool:
    """True where the address ranges of `a` and `b` meet, whoever made them and whatever their first addresses are.

    Two views that interleave without a common element, such as x[::2] and x[1::2], count as sharing. Two halves of one
    storage do not.
    """
    if a.device != b.device:
        return False
    (a_start, a_end), (b_start, b_end) = address_range(a), address_range(b)
    return max(a_start, b_start) < min(a_end, b_end)
