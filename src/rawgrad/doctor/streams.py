"""What only a GPU can show: the stream on which work is done, and the device."""

import torch

from rawgrad.doctor.checks import Seen, check
from rawgrad.doctor.subject import Subject


@check("launch on torch's current stream of the tensors' own device", "06")
def follows_the_stream(subject: Subject) -> Seen:
    """Inputs that a side stream fills late are read after that; and tensors of a device that is not the current one."""
    if subject.device.type != "cuda":
        yield "skipped", "no GPU"
        return
    side = torch.cuda.Stream(subject.device)
    values = {n: subject.inputs()[n].detach() for n in subject.tensors}
    late = {n: torch.zeros_like(t).requires_grad_(n in subject.wanted) for n, t in values.items() if t.is_floating_point()}
    inputs = subject.inputs(late)
    torch.cuda.synchronize(subject.device)
    with torch.cuda.stream(side), torch.no_grad():
        torch.cuda._sleep(50_000_000)  # cycles
        for n, tensor in late.items():
            tensor.copy_(values[n])
    with torch.cuda.stream(side):
        got = subject.attempt(lambda: subject.run(inputs))
    torch.cuda.synchronize(subject.device)
    wrong = subject.results_off(got, subject.truth())
    if wrong:
        yield "broken", f"on a side stream that is behind, {wrong}"
        return
    if torch.cuda.device_count() < 2:
        return
    elsewhere = next(n for n in range(torch.cuda.device_count()) if n != (subject.device.index or 0))
    with torch.cuda.device(elsewhere):
        inputs = subject.inputs()
        _, grads = subject.attempt(lambda: subject.run(inputs))
    wrong = subject.all_off(grads, subject.truth()[1])
    if wrong:
        yield "broken", f"where another device is current, {wrong}"
