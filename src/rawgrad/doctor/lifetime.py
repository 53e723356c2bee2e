"""How long memory lives: what backward needs until it runs, and what nobody needs afterwards."""

import gc

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rawgrad import probes
from rawgrad.doctor.checks import Seen, check
from rawgrad.doctor.subject import Subject


class Held(TorchDispatchMode):
    """Holds every storage that operators meet, so that what is dropped can be found and written over."""

    def __init__(self):
        super().__init__()
        self.met: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for storage in probes.storages((args, kwargs, result)):
            if storage.nbytes():
                self.met.setdefault(storage._cdata, storage)
        return result

    def scribble(self) -> int:
        """Write NaN over what nobody else holds, as its next owner would; how many there were."""
        gc.collect()
        dropped = [storage for storage in self.met.values() if torch._C._storage_Use_Count(storage._cdata) == 1]
        for storage in dropped:
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            content.fill_(255)  # NaN in every floating dtype
        return len(dropped)


@check("save the tensor by save_for_backward: a pointer keeps no memory alive", "03")
def keeps_what_it_needs(subject: Subject) -> Seen:
    """Between forward and backward, memory that was dropped in forward is written over, as its next owner would."""
    inputs = subject.inputs()
    with Held() as held:
        outputs = subject.differentiable(subject.attempt(lambda: subject.call(inputs)))
    dropped = held.scribble()
    got = subject.attempt(lambda: subject.gradients(outputs, inputs, subject.upstream(outputs)))
    wrong = subject.all_off(got, subject.truth()[1])
    if wrong:
        yield "broken", f"{dropped} tensors were dropped in forward and their memory written over by its next owner: {wrong}"


@check("keep tensors by save_for_backward, and none on ctx, the class or the module that grows with each call", "04")
def lets_go(subject: Subject) -> Seen:
    """What is alive after a call and its backward, all results dropped, does not grow with each call."""

    def once() -> None:
        outputs = subject.differentiable(subject.call(inputs))
        subject.attempt(lambda: subject.gradients(outputs, inputs, subject.upstream(outputs)))

    alive, inputs = [], subject.inputs()
    with probes.Alive() as born:
        for calls in (2, 4):
            for _ in range(calls):
                once()
            gc.collect()
            alive.append(len(born.sizes()))
    if alive[1] - alive[0] >= 4:
        yield "unsafe", f"after 2 calls, all results dropped, {alive[0]} tensors are alive, and after 6 calls {alive[1]}"
