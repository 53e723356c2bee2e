"""What the lessons run, to the letter, by every kernel. F1 to F18 number the measured facts that the tests hold."""

import contextlib
import dataclasses
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rawgrad import probes, runtime, scenarios, specimens
from rawgrad.scenarios import gradient_path, memory_strip, version_timeline

KERNELS = ["the Triton kernel", "the CUDA kernel"]
TWO_VIEWS = "view(2, 4, 8).view(8, 8)"

SILENT = {
    "x": [2, 4, 8],
    "grad": [2, 6, 14],
    "version": [0, 0, 0],
    "verdict": "silent and wrong",
    "stolen": False,
    "saved": [2, 4, 8],
}
STOLEN = {
    "x": [2, 8, 8],
    "grad": [2, 8, 8],
    "version": [0, 1, 1],
    "verdict": "raises at backward 3",
    "stolen": True,
    "saved": [2, 8, 8],
}
CLONED = {**SILENT, "x": [1, 1, 1]}

# F7: what stands before the Function, and what three backwards by a kernel then do
F7 = {
    **dict.fromkeys(
        [
            "view(64)",
            TWO_VIEWS,
            "view_as(X)",
            "reshape(64)",
            "flatten()",
            "t()",
            "permute(1, 0)",
            "unsqueeze(0)",
            "squeeze(1) of [8, 1, 8]",
        ],
        STOLEN,
    ),
    **dict.fromkeys(["nothing", "contiguous()", "X[...]", "flatten(1)", "squeeze()", "expand(8, 8)"], SILENT),
    **dict.fromkeys(["X[:]", "narrow(0, 0, 8)", "select(0, 0)"], SILENT),
    **dict.fromkeys(["clone()", "X * 1"], CLONED),
}


def seen(run):
    return {
        "x": [b.x for b in run.backwards],
        "grad": [b.grad for b in run.backwards],
        "version": [b.x_version for b in run.backwards],
        "verdict": run.verdict,
        "stolen": run.backwards[0].grad_is_x,
        "saved": [b.saved for b in run.backwards],
    }


def test_f7_names_every_knob():
    assert F7.keys() == scenarios.BEFORE.keys()


@pytest.mark.parametrize("writer", KERNELS)
@pytest.mark.parametrize("before", F7)
def test_f5_and_f7_what_stands_before_decides_whether_the_fault_is_loud(before, writer):
    run = version_timeline(before, writer)
    assert seen(run) == F7[before]
    assert run.x_intact == (F7[before] is CLONED)
    assert [b.write for b in run.backwards] == ["not counted"] * 2 + ["none" if run.backwards[2].raised else "not counted"]


@pytest.mark.parametrize("before", ["nothing", TWO_VIEWS])
def test_f5_torch_in_place_raises_at_the_second_backward(before):
    run = version_timeline(before, "torch in place")
    assert run.verdict == "raises at backward 2"
    assert [(b.x_version, b.x, b.grad, b.write) for b in run.backwards] == [(1, 2, 2, "counted"), (1, 2, 2, "none")]


@pytest.mark.parametrize("writer", KERNELS)
def test_f5_the_error_compares_the_version_at_save_with_a_later_one(writer):
    run = version_timeline(TWO_VIEWS, writer)
    assert [(b.version_at_save, b.version_found) for b in run.backwards] == [(0, 0), (0, 0), (0, 1)]
    assert [b.raised for b in run.backwards] == [False, False, True]
    assert [(b.version_written, b.version_left) for b in run.backwards] == [(0, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize("writer", KERNELS)
def test_f6_a_view_makes_accumulate_grad_steal(writer):
    straight, view, sliced = (gradient_path(before, writer) for before in ("nothing", "view(64)", "X[:]"))
    assert [(s.node, s.storage, s.tensor) for s in straight.stops] == [("dy", "B", "a new tensor"), ("f", "A", "X itself")]
    assert (straight.grad.storage, straight.taken_over) == ("C", False)
    assert [(s.node, s.storage, s.tensor) for s in view.stops] == [
        ("dy", "B", "a new tensor"),
        ("f", "A", "saved x"),
        ("View", "A", "a new tensor"),
    ]
    assert (view.grad.storage, view.taken_over) == ("A", True)
    assert [s.storage for s in sliced.stops] == ["B", "A", "C"]
    assert (sliced.grad.storage, sliced.taken_over) == ("C", True)


@pytest.mark.parametrize("writer", KERNELS)
def test_f7_a_hook_that_keeps_makes_it_silent_and_one_that_prints_does_not(writer):
    assert seen(version_timeline("view(64)", writer, hook="keeps the gradient")) == SILENT
    assert seen(version_timeline("view(64)", writer, hook="prints the gradient")) == STOLEN


@pytest.mark.parametrize("before", scenarios.BEFORE)
def test_f7_what_arrives_decides_who_is_robbed(before):
    """Held by the node that saved it: copied. New over X's memory: stolen. New over fresh memory: taken over, and no harm."""
    path = gradient_path(before)
    last = path.stops[-1]
    stolen = F7[before] is STOLEN
    assert (last.tensor == "a new tensor" and last.storage == "A") == stolen == (path.grad.storage == "A")
    assert path.taken_over == (last.tensor == "a new tensor")


F9 = {  # repair: straight, through one view, X intact
    "none": ("silent and wrong", "raises at backward 3", False),
    "increment_version": ("raises at backward 2", "raises at backward 2", False),
    "clone the result": ("silent and wrong", "silent and wrong", False),
    "return detach()": ("raises at backward 3", "raises at backward 3", False),
    "declare with custom_op": ("raises at backward 2", "raises at backward 2", False),
    "new memory": ("silent and right", "silent and right", True),
}


def test_f9_names_every_knob():
    assert F9.keys() == scenarios.REPAIRS.keys()


@pytest.mark.parametrize("writer", KERNELS)
@pytest.mark.parametrize("repair", F9)
def test_f9_repairs(repair, writer):
    straight, view, intact = F9[repair]
    for before, verdict in (("nothing", straight), ("view(64)", view)):
        run = version_timeline(before, writer, repair)
        assert (run.verdict, run.x_intact) == (verdict, intact)
        assert run.backwards[0].grad == 2, "the first gradient is right under every repair"
    if intact:
        assert [b.grad for b in run.backwards] == [2, 4, 6]


@pytest.mark.parametrize("writer", ["triton", "cuda"])
@pytest.mark.parametrize("before", [lambda w: w, lambda w: w.view(2, 2)], ids=["straight", "view"])
def test_f8_plain_sgd_is_silently_wrong(before, writer, device):
    def train(function):
        w = torch.ones(4, device=device, requires_grad=True)
        optimizer, steps = torch.optim.SGD([w], lr=0.1), []
        for _ in range(3):
            optimizer.zero_grad()
            function.apply(before(w), writer).sum().backward()
            optimizer.step()
            steps.append(round(w[0].item(), 2))
        return steps

    assert train(specimens.GradientInSaved) == [1.8, 3.24, 5.83]
    assert train(specimens.GradientInNewMemory) == [0.8, 0.64, 0.51]


@pytest.mark.parametrize("writer", ["triton", "cuda"])
def test_f8_zero_grad_clears_the_weights(writer, device):
    w = torch.ones(4, device=device, requires_grad=True)
    specimens.GradientInSaved.apply(w.view(2, 2), writer).sum().backward()
    assert probes.overlap(w, w.grad)
    torch.optim.SGD([w], lr=0.1).zero_grad(set_to_none=False)
    assert w.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("writer", ["triton", "cuda"])
def test_f8_a_leaf_saved_detached_shares_memory_with_its_gradient(writer, device):
    class SavesDetached(specimens.GradientInSaved):
        @staticmethod
        def setup_context(ctx, inputs, output):
            x, ctx.writer = inputs
            ctx.save_for_backward(x.detach())

    x = torch.ones(4, device=device, requires_grad=True)
    SavesDetached.apply(x, writer).sum().backward()
    assert probes.overlap(x, x.grad)


@pytest.mark.parametrize("writer", ["triton", "cuda"])
def test_f10_a_kernels_write_is_not_counted(writer, device):
    x = torch.ones(4, device=device)
    before = probes.look(x)
    specimens.multiply_into_saved(x, torch.ones_like(x), writer)
    assert x.tolist() == [2, 2, 2, 2]
    assert probes.written_unseen(before, probes.look(x))


@pytest.mark.parametrize(("writer", "version"), [("triton", 0), ("cuda", 0), ("torch", 1)])
def test_q2s_second_fault_the_callers_gradient_is_doubled(writer, version, device):
    x = torch.full((4,), 3.0, device=device, requires_grad=True)
    ones = torch.ones(4, device=device)
    specimens.DoublesUpstream.apply(x, writer).backward(ones)
    assert x.grad.tolist() == [6, 6, 6, 6]
    assert (ones.tolist(), ones._version) == ([2, 2, 2, 2], version)


def test_q2s_second_fault_raises_at_once_through_stride_0(device):
    x = torch.ones(4, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="single memory location"):
        specimens.DoublesUpstream.apply(x, "torch").sum().backward()


VIEWS = {
    "view": (lambda p: p.view(6), True),
    "reshape": (lambda p: p.reshape(6), True),
    "flatten": (lambda p: p.flatten(), True),
    "unsqueeze": (lambda p: p.unsqueeze(0), True),
    "squeeze": (lambda p: p.squeeze(1), True),
    "t": (lambda p: p.t(), False),
    "nothing": (lambda p: p, False),
}


@pytest.mark.parametrize("view", VIEWS)
def test_f18_stock_torch_lets_two_parameters_share_one_gradient(view, device):
    make, shared = VIEWS[view]
    shape = (2, 1, 3) if view == "squeeze" else (2, 3)
    a, b = (torch.zeros(shape, device=device, requires_grad=True) for _ in range(2))
    weights = torch.arange(1.0, 7.0, device=device).view(make(a).shape)
    for _ in range(2):
        ((make(a) + make(b)) * weights).sum().backward()
    assert probes.overlap(a.grad, b.grad) == shared
    right = [2, 4, 6] if view != "t" else [2, 6, 10]
    for parameter in (a, b):
        assert parameter.grad.flatten()[:3].tolist() == ([3, 6, 9] if shared else right)


@pytest.mark.skipif(runtime.DEVICE == "cuda", reason="needs a machine without a GPU: one fused kernel clips there")
def test_f18_clipping_scales_shared_memory_twice():
    a, b = (torch.zeros(2, 4, requires_grad=True) for _ in range(2))
    ((a.view(8) + b.view(8)) * torch.arange(1.0, 9.0)).sum().backward()
    torch.nn.utils.clip_grad_norm_([a, b], 1.0)
    norm = torch.cat([a.grad.flatten(), b.grad.flatten()]).norm().item()
    assert norm < 0.06, "clipped to 1, and then once more"


def test_f18_learned_embeddings_in_a_module(device):
    def train(share):
        torch.manual_seed(0)
        position, kind = (torch.nn.Parameter(torch.randn(3, 4, device=device)) for _ in range(2))
        for batch in range(2):
            torch.manual_seed(batch)
            x = torch.randn(1, 3, 4, device=device)
            total = position.unsqueeze(0) + kind.unsqueeze(0) if share else (position + kind)[None]
            ((total + x) ** 2).mean().backward()
        return position.grad

    shared, right = train(True), train(False)
    assert (shared - right).abs().max() > 0.1


@pytest.mark.parametrize("before", ["nothing", "view(64)", "t()", "X[:]", "clone()"])
def test_looking_changes_nothing(before, device):
    """The same backwards without the scenario's hooks on the node."""
    x = torch.arange(1.0, 65.0).view(8, 8).to(device).requires_grad_()
    y = specimens.GradientInSaved.apply(scenarios.BEFORE[before](x), runtime.backends()[0])
    alone = []
    for _ in range(3):
        with contextlib.suppress(RuntimeError):
            y.backward(torch.ones_like(y), retain_graph=True)
        alone.append((x.detach()[0, 0].item(), x.grad[0, 0].item(), x._version, x.grad.data_ptr() == x.data_ptr()))
    assert alone == [(b.x, b.grad, b.x_version, b.grad_is_x) for b in version_timeline(before).backwards]


@pytest.mark.parametrize("backwards", [0, 1, 2, 3])
def test_a_shorter_run_is_the_beginning_of_a_longer_one(backwards):
    run, longest = version_timeline("view(64)", backwards=backwards), version_timeline("view(64)")
    assert run.backwards == longest.backwards[:backwards]
    assert (
        run.verdict
        == [
            "nothing has run yet",
            "silent: the gradient is right, and X is overwritten",
            "silent and wrong",
            "raises at backward 3",
        ][backwards]
    )


def test_a_kernel_is_the_first_that_runs_here():
    ours, first = version_timeline("view(64)"), version_timeline("view(64)", KERNELS[runtime.backends()[0] == "cuda"])
    assert dataclasses.replace(ours, writer="") == dataclasses.replace(first, writer="")


def test_a_machine_without_any_kernel_says_so_in_one_sentence(monkeypatch):
    monkeypatch.setattr(runtime, "problem", lambda backend, device="cpu": None if backend == "torch" else f"no {backend}")
    with pytest.raises(RuntimeError, match="no kernel runs here: no triton; no cuda"):
        version_timeline()
    assert version_timeline(writer="torch in place").verdict == "raises at backward 2"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: version_timeline("veiw(64)"), "before is one of 'nothing', .* got 'veiw"),
        (lambda: version_timeline(writer="triton"), "writer is one of 'a kernel', .* got 'triton'"),
        (lambda: version_timeline(repair="clone"), "repair is one of 'none', .* got 'clone'"),
        (lambda: version_timeline(hook="keep the gradient"), "hook is one of 'none', .* got 'keep the gradient'"),
        (lambda: version_timeline(backwards=4), "backwards is one of 0, 1, 2, 3, got 4"),
        (lambda: memory_strip("sum"), r"consumer is one of 'y.sum\(\)', .* got 'sum'"),
        (lambda: memory_strip(writer="torch in place"), "writer is one of 'a kernel', .* got 'torch in place'"),
        (lambda: scenarios.rotary_strip("y.t()"), r"consumer is one of '\(y.transpose\(1, 2\) \* w\).sum\(\)', .* got 'y.t"),
        (lambda: scenarios.view_strip("m.T"), "view is one of 'm', .* got 'm.T'"),
        (lambda: scenarios.recording("x"), "name is one of 'stale_print', .* got 'x'"),
    ],
)
def test_a_value_that_no_knob_has_is_refused_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("writer", ["triton", "cuda"])
@pytest.mark.parametrize(("cured", "second"), [("GradientInNewMemory", 14), ("ReadsContiguous", 12), ("ReadsStrides", 12)])
def test_f16_the_cured_can_be_differentiated_again(cured, second, writer, device):
    """x^3 and the cured Function at 2, by .backward() and by grad; and by gradgradcheck."""
    x = torch.full((1, 1), 2.0, dtype=torch.float64, device=device, requires_grad=True)
    function = lambda x: getattr(specimens, cured).apply(x, writer)  # noqa: E731
    (g,) = torch.autograd.grad((x**3 + function(x)).sum(), x, create_graph=True)
    assert torch.autograd.grad(g, x, retain_graph=True)[0].item() == second
    g.backward()
    assert x.grad.item() == second
    x = torch.randn(2, 3, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradgradcheck(function, x, gen_non_contig_grad_outputs=True)


def test_an_error_of_another_kind_is_not_taken_for_autograds_refusal(monkeypatch):
    monkeypatch.setattr(specimens, "multiply_into_saved", lambda x, dy, writer: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        version_timeline()


# F1 to F3 and F17: how dy lies in memory, and what a kernel without strides reads

SUM, DENSE = (0, 0), (3, 1)
F1 = {  # consumer: strides, read without strides, after clone()
    "y.sum()": (SUM, "other cells", "right"),
    "(y + 0).sum()": (SUM, "other cells", "right"),
    "y.sum() / 2": (SUM, "other cells", "right"),
    "cat([y, z], 1).sum()": (SUM, "other cells", "right"),
    "y.sum(0).mean()": ((0, 1), "other cells", "right"),
    "(y.t() * w).sum()": ((1, 2), "wrong order", "wrong order"),
    "(cat([y, z], 1) * w).sum()": ((6, 1), "other cells", "right"),
    "stack([y, z, ...], -1)[..., 0].sum()": ((24, 8), "other cells", "right"),
    **dict.fromkeys(
        ["y.mean()", "(y * 1).sum()", "(y @ w).sum()", "mse_loss(y, z)", "cross_entropy(y, c)", "y.max()", "y[:, ::2].sum()"],
        (DENSE, "right", "right"),
    ),
}


def test_f1_names_every_knob():
    assert F1.keys() == scenarios.CONSUMERS.keys()


@pytest.mark.parametrize("writer", KERNELS)
@pytest.mark.parametrize("consumer", F1)
def test_f1_the_consumer_decides_the_layout_and_so_what_is_read(consumer, writer):
    stride, flat, cloned = F1[consumer]
    strip = memory_strip(consumer, "none", writer)
    assert (strip.shape, strip.stride, strip.verdict) == ((2, 3), stride, flat)
    assert strip.kernel == tuple(range(6)), "without strides a kernel walks the memory"
    assert memory_strip(consumer, "dy.clone()", writer).verdict == cloned
    assert memory_strip(consumer, "dy + 0", writer).verdict == cloned
    assert memory_strip(consumer, "dy.contiguous()", writer).verdict == "right"
    assert memory_strip(consumer, "strides to the kernel", writer).verdict == "right"
    copies = {how: memory_strip(consumer, how, writer).copied for how in scenarios.READINGS}
    needed = stride != DENSE
    assert copies == {
        "none": False,
        "dy.clone()": True,
        "dy + 0": True,
        "dy.contiguous()": needed,
        "strides to the kernel": False,
    }


@pytest.mark.parametrize("consumer", F1)
def test_f1_the_storage_without_staging(consumer, device):
    """What autograd really hands over: strides, and how many elements its storage has."""
    got = []
    y = torch.arange(1.0, 7.0, device=device).view(2, 3).requires_grad_() * 1
    y.register_hook(got.append)
    scenarios.CONSUMERS[consumer](y).backward()
    elements = {SUM: 1, (0, 1): 3, (1, 2): 6, (6, 1): 12, (24, 8): 48, DENSE: 6}[F1[consumer][0]]
    assert got[0].stride() == F1[consumer][0]
    assert got[0].untyped_storage().nbytes() == 4 * elements


@pytest.mark.parametrize("writer", KERNELS)
def test_f3_a_staged_read_shows_whose_memory_it_is(writer):
    strip = memory_strip("y.sum()", "none", writer)
    assert strip.prints == (1,) * 6
    assert strip.reads == (1, 11, 12, 13, 14, 15)
    strip = memory_strip("(y.t() * w).sum()", "none", writer)
    assert (strip.prints, strip.reads) == ((1, 3, 5, 2, 4, 6), (1, 2, 3, 4, 5, 6))
    strip = memory_strip("(cat([y, z], 1) * w).sum()", "none", writer)
    assert (strip.prints, strip.reads) == ((1, 2, 3, 7, 8, 9), (1, 2, 3, 13, 14, 15))


@pytest.mark.parametrize("writer", KERNELS)
@pytest.mark.parametrize("repair", {**scenarios.READINGS, **scenarios.GUARDS})
@pytest.mark.parametrize("consumer", scenarios.CONSUMERS)
def test_every_read_of_every_state_stays_inside_its_storage(consumer, repair, writer):
    strip = memory_strip(consumer, repair, writer)
    assert len(strip.python) == len(strip.kernel) == len(strip.reads) == 6
    assert all(0 <= place < len(strip.values) for place in (*strip.python, *strip.kernel))
    assert [strip.values[place] for place in strip.kernel] == pytest.approx(strip.reads, rel=1e-6), (
        "the record says what was read"
    )


F2 = {"none": [1, 0, 0, 0, 0, 0, 0, 0], "dy.clone()": [1] * 8, "dy.contiguous()": [1] * 8}


@pytest.mark.parametrize("writer", ["triton", "cuda"])
@pytest.mark.parametrize("repair", F2)
def test_f2_stack_and_select_give_the_report_to_the_letter(repair, writer, device):
    x = torch.ones(1, 1, 8, device=device, requires_grad=True)
    y, got = scenarios.READINGS[repair].apply(x, writer), []
    y.register_hook(got.append)
    torch.stack([y] + [torch.ones_like(y)] * 7, -1)[..., 0].sum().backward()
    assert got[0].flatten().tolist() == [1] * 8
    assert got[0].stride() == (64, 64, 8)
    assert (x.grad / 3).flatten().tolist() == F2[repair]


@pytest.mark.parametrize("writer", ["triton", "cuda"])
def test_f2_sum_gives_ones_too_and_the_read_past_them_is_refused(writer, device):
    x = torch.ones(1, 1, 8, device=device, requires_grad=True)
    with pytest.raises(ValueError, match=r"would read element 7 of a storage that has 1 .* scenarios.staged\(y\)"):
        specimens.ReadsFlat.apply(x, writer).sum().backward()
    scenarios.staged(specimens.ReadsFlat.apply(x, writer)).sum().backward()
    assert (x.grad / 3).flatten().tolist() == [1, 11, 12, 13, 14, 15, 16, 17]


GUARDS = {  # wrong behind sum, behind t(), behind cat
    "a guard without brackets": (True, True, True),
    "a guard that looks at the last stride": (False, False, True),
    "the copy is dropped": (True, True, True),
    "the row stride alone": (True, True, False),
    "the strides of x": (True, True, True),
}


@pytest.mark.parametrize("writer", KERNELS)
@pytest.mark.parametrize("guard", GUARDS)
def test_guards_that_do_not_guard(guard, writer):
    consumers = ("y.sum()", "(y.t() * w).sum()", "(cat([y, z], 1) * w).sum()")
    assert GUARDS.keys() == scenarios.GUARDS.keys()
    assert tuple(memory_strip(c, guard, writer).verdict != "right" for c in consumers) == GUARDS[guard]
    assert memory_strip("y.mean()", guard, writer).verdict == "right", "a test that ends in mean hides it"


F17 = {
    "plain": (lambda y: y, True),
    "mean": (lambda y: y.mean(), True),
    "slice": (lambda y: y[:, ::2], True),
    "sum": (lambda y: y.sum(), False),
    "sum(0)": (lambda y: y.sum(0), False),
    "cat": (lambda y: torch.cat([y, torch.ones_like(y)], 1), False),
    "t": (lambda y: y.t(), False),
}


@pytest.mark.parametrize("writer", ["triton", "cuda"])
@pytest.mark.parametrize("follow", F17)
def test_f17_gradcheck_alone_passes_a_read_without_strides(follow, writer, device):
    then, passes = F17[follow]

    def check(function):
        x = torch.ones(2, 3, dtype=torch.float64, device=device, requires_grad=True)
        return torch.autograd.gradcheck(lambda x: then(scenarios.staged(function.apply(x, writer))), x, raise_exception=False)

    assert check(specimens.ReadsFlat) == passes
    assert check(specimens.ReadsStrides)
    assert check(specimens.ReadsContiguous)


ROTARY = {  # consumer: strides, read without strides, after clone()
    "(y.transpose(1, 2) * w).sum()": ((8, 2, 4, 1), "wrong order", "wrong order"),
    "y.sum()": ((0, 0, 0, 0), "other cells", "right"),
    "(y.sum(2) * w).sum()": ((4, 2, 0, 1), "other cells", "right"),
    "(cat([y, z], 3) * w).sum()": ((16, 8, 4, 1), "other cells", "right"),
    "stack([y, z, ...], -1)[..., 0].sum()": ((64, 32, 16, 8), "other cells", "right"),
    "(y * w).sum()": ((8, 4, 2, 1), "right", "right"),
    "y.mean()": ((8, 4, 2, 1), "right", "right"),
}


@pytest.mark.parametrize("writer", KERNELS)
@pytest.mark.parametrize("consumer", ROTARY)
def test_rotary_misreads_what_the_consumer_lays_out(consumer, writer):
    assert ROTARY.keys() == scenarios.ROTARY_CONSUMERS.keys()
    stride, flat, cloned = ROTARY[consumer]
    strips = {repair: scenarios.rotary_strip(consumer, repair, writer) for repair in scenarios.ROTARY_READINGS}
    assert {repair: strip.verdict for repair, strip in strips.items()} == {
        "none": flat, "dy.clone()": cloned, "dy.contiguous()": "right", "strides to the kernel": "right",
    }  # fmt: skip
    needed = stride != (8, 4, 2, 1)
    assert [strip.copied for strip in strips.values()] == [False, True, needed, False]
    for strip in strips.values():
        assert (strip.shape, strip.stride) == ((1, 2, 2, 2), stride)
        assert all(0 <= place < len(strip.values) for place in (*strip.python, *strip.kernel))
        assert [strip.values[place] for place in strip.kernel] == list(strip.reads), "the record says what was read"


@pytest.mark.parametrize("writer", scenarios.KERNELS)
@pytest.mark.parametrize("strip", [memory_strip, scenarios.rotary_strip])
def test_a_strip_is_run_by_the_kernel_that_was_asked_for(strip, writer, monkeypatch):
    used, choose = set(), runtime.choose
    monkeypatch.setattr(runtime, "choose", lambda backend, *rest: used.add(backend) or choose(backend, *rest))
    strip(writer=writer)
    assert used <= {
        scenarios.KERNELS[writer],
        runtime.backends()[0] if writer == "a kernel" else None,
        scenarios.KERNELS[writer],
    }
    assert scenarios.KERNELS[writer] in used


def test_the_rotary_strip_really_turns(device):
    """Token 0 is at position 1 and token 1 at position 2, and what was read shows no -0."""
    experiment = scenarios._ROTARY
    x = torch.arange(1.0, 9.0, device=device).view(1, 2, 2, 2)
    y = experiment.apply(specimens.RotaryCured, x, runtime.backends()[0])
    assert y.flatten().tolist() == [-2, 1, -4, 3, -5, -6, -7, -8]
    assert torch.equal(experiment.read(torch.zeros_like(x)).signbit(), torch.zeros_like(x, dtype=torch.bool))
    strip = scenarios.rotary_strip("stack([y, z, ...], -1)[..., 0].sum()")
    assert "-0" not in repr(strip.reads)


def test_quarter_turns_are_exact(device):
    cos, sin = scenarios.quarter_turns(4)
    angle = torch.arange(4, dtype=torch.float64, device=device)[:, None].expand(4, 2) * torch.pi / 2
    assert (cos.double() - angle.cos()).abs().max() < 1e-15
    assert (sin.double() - angle.sin()).abs().max() < 1e-15


def test_staging_has_room_for_64_elements(device):
    y = scenarios.staged(torch.ones(65, device=device, requires_grad=True) * 1)
    with pytest.raises(ValueError, match="staged has room for 64 elements, and this gradient reaches element 64"):
        (y * 1).sum().backward()


@pytest.mark.parametrize("view", scenarios.VIEWS)
def test_a_view_is_read_in_its_own_order(view):
    strip = scenarios.view_strip(view)
    assert strip.prints == tuple(scenarios.VIEWS[view](torch.arange(12.0).view(3, 4)).flatten().tolist())
    assert strip.verdict == ""


@pytest.mark.parametrize(
    ("retain", "backwards", "done", "raised", "saved", "grad"),
    [
        (False, 0, 0, False, "kept", None),
        (False, 1, 1, False, "freed", 6),
        (False, 2, 1, True, "freed", 6),
        (True, 0, 0, False, "kept", None),
        (True, 1, 1, False, "kept", 6),
        (True, 2, 2, False, "kept", 12),
    ],
)
def test_a_graph_is_freed_unless_it_is_retained(retain, backwards, done, raised, saved, grad):
    assert scenarios.graph(retain, backwards) == scenarios.Graph(retain, backwards, done, raised, saved, grad)


def test_every_recording_is_shipped_and_names_its_card():
    for name in scenarios.GPU_ONLY:
        where, *lines = repr(scenarios.recording(name)).splitlines()
        assert re.match(r"(recorded on .+, 20\d\d-\d\d-\d\d|measured here, on .+)$", where)
        assert len(lines) == (12 if name == "shipped" else 2)


@pytest.mark.gpu
def test_f14_a_copy_to_the_host_that_is_read_at_once_is_stale():
    at_once, later = scenarios.recording("stale_print").lines
    assert at_once.endswith("[0.0, 0.0, 0.0, 0.0]")
    assert later.endswith("[1.0, 1.0, 1.0, 1.0]")


@pytest.mark.gpu
def test_f2_an_unstaged_read_finds_somebodys_numbers():
    printed, read = scenarios.recording("unstaged_read").lines
    assert printed.split()[2:] == ["1"] * 8
    assert read.split()[2] == "1"
    assert read.split()[3:] != ["1"] * 7


@pytest.mark.gpu
def test_f4_the_caching_allocator_hides_the_read_from_the_sanitizer():
    lines = scenarios.recording("sanitizer").lines
    if len(lines) == 1:
        pytest.skip(f"needs a GPU with compute-sanitizer: {lines[0]}")
    assert [line.split()[-3] for line in lines] == ["0", "7"]


# F11: one dy for two branches

F11 = {  # P: c.grad where f(a) was made first, and where P was
    "5 * c": ((5, 10, 15), (10, 20, 30)),
    "c": ((1, 2, 3), (1, 2, 3)),
    "c.view(3)": ((2, 4, 6), (2, 4, 6)),
}


@pytest.mark.parametrize("writer", KERNELS)
@pytest.mark.parametrize("repair", ["none", "increment_version"])
@pytest.mark.parametrize("beside", F11)
def test_f11_a_write_into_dy_reaches_the_sibling(beside, repair, writer):
    assert F11.keys() == scenarios.BESIDE.keys()
    for first, got in zip(scenarios.ORDERS, F11[beside], strict=True):
        record = scenarios.siblings(beside, first, repair, writer)
        assert record.grads["c"][0] == got
        assert record.grads["a"] == ((2, 4, 6), (2, 4, 6))
        assert record.w == (2, 4, 6), "the caller's gradient changes, too"
        assert [branch.name for branch in record.branches] == (["f", "P"] if first == "P" and beside != "c" else ["P", "f"])
        assert record.verdict.startswith("right" if got == record.grads["c"][1] else "silent and wrong: c.grad is")
        waits, taken = "P, whose turn comes later" in record.holders, "c.grad" in record.holders
        assert (waits, taken) == (first == "P" and beside != "c", first == "f(a)" and beside == "c.view(3)")


@pytest.mark.parametrize("writer", KERNELS)
@pytest.mark.parametrize("beside", scenarios.BESIDE)
def test_f11_names_the_leaves_whose_gradient_lies_in_dy(beside, writer):
    found = {first: scenarios.siblings(beside, first, "none", writer).in_dy for first in scenarios.ORDERS}
    assert found == dict.fromkeys(scenarios.ORDERS, ("c",) if beside == "c.view(3)" else ())


@pytest.mark.parametrize("writer", KERNELS)
@pytest.mark.parametrize("first", scenarios.ORDERS)
def test_f11_a_residual_has_no_lucky_order(first, writer):
    record = scenarios.siblings(scenarios.RESIDUAL, first, "none", writer)
    assert record.grads == {"a": ((20, 40, 60), (15, 30, 45))}
    assert record.holders == ("you, as w", "h's own gradient, which waits for f's")


@pytest.mark.parametrize("writer", KERNELS)
@pytest.mark.parametrize("repair", ["over its own clone", "new memory"])
@pytest.mark.parametrize("beside", [*scenarios.BESIDE, scenarios.RESIDUAL])
def test_f11_the_cured_are_right_beside_anything(beside, repair, writer):
    for first in scenarios.ORDERS:
        record = scenarios.siblings(beside, first, repair, writer)
        assert (record.verdict, record.w) == ("right", (1, 2, 3))


@pytest.mark.parametrize("writer", ["triton", "cuda"])
def test_f11_by_hand_without_the_scenarios_hooks(writer, device):
    """The hooks on the nodes change nothing: the same sums without them."""
    for beside, first, got in [("5 * c", 0, [5, 10, 15]), ("5 * c", 1, [10, 20, 30]), ("c.view(3)", 0, [2, 4, 6])]:
        a, c = (torch.zeros(3, device=device, requires_grad=True) for _ in range(2))
        if first == 0:
            f = specimens.DoublesInPlace.apply(a, writer)
            z = f + scenarios.BESIDE[beside](c)
        else:
            p = scenarios.BESIDE[beside](c)
            z = specimens.DoublesInPlace.apply(a, writer) + p
        z.backward(torch.tensor([1.0, 2, 3], device=device))
        assert c.grad.tolist() == got


@pytest.mark.parametrize("keeps", scenarios.KEEPS)
def test_a_pointer_does_not_keep_memory_and_a_saved_tensor_does(keeps):
    run = scenarios.reuse(keeps)
    assert run.came_back == (keeps == "the pointer")
    assert run.gradient == ((9, 9, 9) if keeps == "the pointer" else (2, 4, 6))
    assert run.right == (2, 4, 6)


LAID_OUT = {"transposed": lambda dy: dy.t().contiguous().t(), "expanded": lambda dy: dy[:1, :1].expand(2, 3)}


@pytest.mark.parametrize("layout", LAID_OUT)
def test_the_kernel_that_keeps_a_tensor_reads_any_dy(layout, device):
    x = torch.arange(1.0, 7.0, device=device).view(2, 3).requires_grad_()
    y = specimens.KeepsTensor.apply(x, lambda shape: torch.empty(shape, device=device))
    dy = LAID_OUT[layout](torch.arange(1.0, 7.0, device=device).view(2, 3))
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], 2 * x.detach() * dy)


def test_memory_of_another_dtype_is_refused(device):
    x = torch.ones(3, dtype=torch.float64, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="allocate makes torch.float32, and x is torch.float64"):
        specimens.KeepsTensor.apply(x, lambda shape: torch.empty(shape, device=device))


def test_slots_have_room_for_four_of_eight():
    slots = scenarios.Slots()
    with pytest.raises(ValueError, match=r"four tensors of up to 8 elements, got \(9,\) with 4 free"):
        slots((9,))
    held = [slots((8,)) for _ in range(4)]
    with pytest.raises(ValueError, match=r"got \(1,\) with 0 free"):
        slots((1,))
    del held[0]
    assert slots((1,)).numel() == 1


def test_slots_hand_out_freed_memory_and_no_other():
    slots = scenarios.Slots()
    held, freed = slots((3,)), slots((3,))
    address = freed.data_ptr()
    del freed
    again = slots((2, 4))
    assert again.data_ptr() == address
    assert not probes.overlap(again, held)


# The ways to save: peak of one backward in N, and right, loud or silent in four situations

R, L, S = "right", "loud", "silent"
WAYS = {  # forward, kept, backward; one backward, a second one, a sibling, a second derivative
    "new memory": ((2, 2, 3), (R, R, R, R)),
    "new memory, X a leaf": ((1, 1, 2), (R, R, R, R)),
    "in place, X a leaf": ((1, 1, 2), (S, S, S, S)),
    "in place": ((2, 2, 2), (R, S, S, S)),
    "in place, increment_version": ((2, 2, 2), (R, L, L, S)),
    "in place, custom_op": ((2, 2, 2), (R, L, L, S)),
    "in place, triton_op": ((2, 2, 2), (R, L, L, S)),
    "in place, one shot": ((2, 2, 2), (R, L, L, L)),
    "in place, allow_mutation": ((2, 2, 2), (R, S, S, S)),
    "torch in place, allow_mutation": ((2, 2, 4), (R, R, R, R)),
    "gradient in forward": ((3, 2, 3), (R, R, R, S)),
    "recomputed": ((2, 1, 3), (R, R, R, R)),
    "offloaded": ((2, 1, 3), (R, R, R, R)),
    "an unused output": ((4, 2, 6), (R, R, R, R)),
    "an unused output, no zeros": ((4, 2, 3), (R, R, R, R)),
    "in steps": ((3, 2, 6), (R, R, R, R)),
    "in steps, cleared on access": ((3, 2, 5), (R, L, R, R)),
    "in steps, cleared and boxed": ((3, 2, 4), (R, L, R, R)),
}


def test_the_table_names_every_way():
    assert set(WAYS) == {*scenarios.WAYS, *scenarios.NEWER}
    assert set(scenarios.newer_ways()) <= set(scenarios.NEWER)


@pytest.mark.parametrize("writer", KERNELS)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_costs_and_does_what_the_table_says(way, writer):
    if way in scenarios.NEWER and way not in scenarios.newer_ways():
        pytest.skip(f"needs {scenarios.NEWER[way]}")
    judged = [scenarios.saving(way, situation, writer) for situation in scenarios.SITUATIONS]
    sizes, verdicts = WAYS[way]
    assert (judged[0].forward, judged[0].kept, judged[0].backward) == sizes
    assert tuple(one.verdict for one in judged) == verdicts
    assert all(bool(one.because) == (one.verdict != R) for one in judged)


@pytest.mark.parametrize("ask", range(4))
def test_a_second_derivative_is_asked_for_in_four_ways(ask):
    asked = []

    def silent_at_one(x, backend):
        asked.append(None)
        function = specimens.GradientInSavedAnnounced if len(asked) == ask + 1 else specimens.GradientInNewMemory
        return function.apply(x, backend)

    verdict, _ = scenarios._second_derivative(scenarios.Way(silent_at_one), runtime.backends()[0])
    assert (verdict, len(asked)) == ("silent", 4)


def test_a_way_whose_value_is_wrong_is_silent():
    way = scenarios.Way(lambda x, backend: specimens.GradientInNewMemory.apply(x, backend) + 1)
    judged = scenarios.judge("one more", way, "one backward", runtime.backends()[0])
    assert (judged.verdict, judged.because) == ("silent", "y is 2 where 1 is right")


def test_in_place_saves_nothing_on_a_leaf_and_one_n_elsewhere():
    peaks = {way: scenarios.saving(way).peak for way in WAYS if way in scenarios.WAYS}
    assert peaks["new memory, X a leaf"] - peaks["in place, X a leaf"] == 0
    assert peaks["new memory"] - peaks["in place, one shot"] == 1


def test_one_shot_refuses_what_it_would_ruin(device):
    X = torch.ones(4, device=device, requires_grad=True)
    (a_chunk, _), detached = torch.unsafe_chunk(X + 0, 2), _Detaches.apply(X + 0)[:2]
    for x in (X, (X + 0).view(2, 2), a_chunk, detached):
        with pytest.raises(ValueError, match="neither a leaf nor a view"):
            specimens.OneShot.apply(x, None)
    with torch.no_grad():
        assert specimens.OneShot.apply(X + 0, None).tolist() == [1] * 4, "without a backward nothing is written"
    x = X + 0
    y = specimens.OneShot.apply(x, None)
    before = probes.look(x)
    for refused in (lambda: y.sum().backward(create_graph=True), lambda: torch.autograd.grad(y.sum(), X, create_graph=True)):
        with pytest.raises(RuntimeError, match="OneShot has no second derivative"):
            refused()
    assert probes.look(x).digest == before.digest, "it refuses before it writes"
    y.sum().backward(retain_graph=True)
    written = probes.look(x)
    assert written.version == before.version + 1
    with pytest.raises(RuntimeError, match="one backward is all there is"):
        y.sum().backward()
    assert probes.look(x).digest == written.digest


class _Detaches(torch.autograd.Function):
    """Hands out an alias that is no view."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, dy):
        return dy


HOOKED = {
    "identity": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "allow_mutation": torch.autograd.graph.allow_mutation_on_saved_tensors,
}


@pytest.mark.parametrize("hooked", HOOKED)
def test_one_shot_refuses_saved_tensor_hooks_which_hide_the_sibling(hooked, device):
    X = torch.ones(4, device=device, requires_grad=True)
    with HOOKED[hooked](), pytest.raises(RuntimeError, match="OneShot relies on autograd's version check"):
        specimens.OneShot.apply(X + 0, None)


def test_one_shot_refuses_checkpoint(device):
    X = torch.ones(4, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="OneShot relies on autograd's version check"):
        checkpoint(lambda x: specimens.OneShot.apply(x + 0, None), X, use_reentrant=False)


def test_one_shot_is_loud_where_an_operator_before_it_saved_its_output(device):
    X = torch.zeros(4, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        specimens.OneShot.apply(X.exp(), None).sum().backward()
    h = X + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (specimens.OneShot.apply(h, None) + specimens.OneShot.apply(h, None)).sum().backward()
    h = X + 1
    X.grad = None
    (specimens.OneShot.apply(h, None) + h).sum().backward()
    assert X.grad.tolist() == [3] * 4


KEPT = {  # how backward keeps x = 3, which is then multiplied by 10: the gradient, where 6 is right; None: it raises
    "save_for_backward(x)": (lambda ctx, x: ctx.save_for_backward(x), None),
    "save_for_backward(x.detach())": (lambda ctx, x: ctx.save_for_backward(x.detach()), None),
    "save_for_backward(x.data)": (lambda ctx, x: ctx.save_for_backward(x.data), 60),
    "ctx.x = x": (lambda ctx, x: setattr(ctx, "x", x), 60),
}


@pytest.mark.parametrize("how", KEPT)
def test_f16_what_is_not_saved_is_not_checked(how, device):
    keep, gradient = KEPT[how]

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            keep(ctx, x)
            return x * x

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy * (ctx.x if hasattr(ctx, "x") else ctx.saved_tensors[0])

    X = torch.tensor(3.0, device=device, requires_grad=True)
    x = X + 0
    y = Keeps.apply(x)
    x.detach().mul_(10)
    if gradient is None:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
    else:
        y.backward()
        assert X.grad.item() == gradient


class _CubeOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * dy


@pytest.mark.parametrize("trained", [False, True], ids=["no_weight", "weight"])
def test_f16_once_differentiable_does_not_always_save_you(trained, device):
    x = torch.tensor(2.0, device=device, requires_grad=True)
    weight = torch.tensor(1.0, device=device, requires_grad=trained)
    (g,) = torch.autograd.grad(weight * _CubeOnce.apply(x) + x**2, x, create_graph=True)
    assert torch.autograd.grad(g, x, retain_graph=True)[0].item() == 2, "14 is right"
    if trained:
        with pytest.raises(RuntimeError, match="once_differentiable"):
            g.backward()
    else:
        g.backward()
        assert x.grad.item() == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scenarios.siblings("6 * c"), r"beside is one of '5 \* c', .* got '6 \* c'"),
        (lambda: scenarios.siblings(first="c"), r"first is one of 'f\(a\)', 'P', got 'c'"),
        (lambda: scenarios.siblings(repair="clone"), "repair is one of 'none', .* got 'clone'"),
        (lambda: scenarios.reuse("it"), "keeps is one of 'the pointer', 'the tensor', got 'it'"),
        (lambda: scenarios.saving("x"), "way is one of 'new memory', .* got 'x'"),
        (lambda: scenarios.saving(situation="x"), "situation is one of 'one backward', .* got 'x'"),
    ],
)
def test_a_value_that_no_memory_knob_has_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
