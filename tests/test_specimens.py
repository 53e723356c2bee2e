"""Each specimen of rotary and of memory has its disease and no other, and its cure has none; test_scenarios holds the rest."""

import pytest
import torch

from rawgrad import probes, scenarios, specimens
from rawgrad.ops import rotary as rotary_op
from rawgrad.ops.rotary import rotary_reference

DISEASED = {
    "reads_flat": specimens.RotaryReadsFlat,
    "reads_a_clone": specimens.RotaryReadsClone,
    "turns_on": specimens.RotaryTurnsOn,
    "into_upstream": specimens.RotaryIntoUpstream,
    "into_input": specimens.RotaryIntoInput,
    "slips": specimens.RotaryWithSlips,
}
CURED = {"cured": specimens.RotaryCured, "contiguous": specimens.RotaryReadsContiguous}
SEQ, HEADS, DIM = 3, 2, 4
LAYOUTS = {  # of dy [1, SEQ, HEADS, DIM], in a storage that a flat read does not leave
    "contiguous": (24, 8, 4, 1),
    "heads_first": (24, 4, 12, 1),
    "wider": (48, 16, 8, 1),
    "expanded": (0, 0, 0, 0),
}


def examined(function, layout, writer, device, rotary_size=DIM, base=0, positions=(3, 1, 2)) -> dict[str, bool]:
    """What a run of `function` shows, each False where it is healthy."""
    x = torch.arange(1.0, 25.0, device=device).view(1, SEQ, HEADS, DIM).requires_grad_()
    dy = torch.arange(100.0, 148.0, device=device).as_strided((1, SEQ, HEADS, DIM), LAYOUTS[layout])
    cos, sin = scenarios.quarter_turns(rotary_size)
    positions = torch.tensor(positions, device=device)
    kinds = {"rotary_dim": rotary_size, "heads": (base, HEADS)}
    y_right = rotary_reference(x.detach(), cos, sin, positions, **kinds)
    dx_right = rotary_reference(dy, cos, -sin, positions, **kinds)
    before = probes.look(x).digest, probes.look(dy).digest
    y = function.apply(x, cos, sin, positions, rotary_size, base, writer)
    seen = {"wrong value": not torch.equal(y.detach(), y_right), "x written": probes.look(x).digest != before[0]}
    try:
        (dx,) = torch.autograd.grad(y, x, dy)
    except NameError:
        return {**seen, "raises": True}
    return seen | {
        "wrong gradient": not torch.equal(dx, dx_right),
        "dy written": probes.look(dy).digest != before[1],
        "dx shares dy": probes.overlap(dx, dy),
    }


def shown(function, layout, writer, device, **kinds):
    return {name for name, bad in examined(function, layout, writer, device, **kinds).items() if bad}


@pytest.mark.parametrize("writer", ["triton", "cuda"])
@pytest.mark.parametrize(("rotary_size", "base"), [(DIM, 0), (2, 1)], ids=["whole", "partial"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CURED)
def test_the_cured_are_healthy(name, layout, rotary_size, base, writer, device):
    assert shown(CURED[name], layout, writer, device, rotary_size=rotary_size, base=base) == set()


@pytest.mark.parametrize("writer", ["triton", "cuda"])
@pytest.mark.parametrize(
    ("name", "layout", "disease"),
    [
        ("reads_flat", "contiguous", set()),
        ("reads_flat", "heads_first", {"wrong gradient"}),
        ("reads_flat", "wider", {"wrong gradient"}),
        ("reads_flat", "expanded", {"wrong gradient"}),
        ("reads_a_clone", "heads_first", {"wrong gradient"}),
        ("reads_a_clone", "wider", set()),
        ("reads_a_clone", "expanded", set()),
        ("turns_on", "contiguous", {"wrong gradient"}),
        ("into_upstream", "contiguous", {"dy written", "dx shares dy"}),
        ("into_upstream", "heads_first", {"dy written", "dx shares dy"}),
        ("into_input", "contiguous", {"x written"}),
        ("slips", "contiguous", {"raises"}),
    ],
)
def test_each_disease_shows_itself_and_nothing_else(name, layout, disease, writer, device):
    assert shown(DISEASED[name], layout, writer, device) == disease


@pytest.mark.parametrize("names", [(), ("rotary_size",), ("base",)])
def test_both_slips_are_slips(names, monkeypatch, device):
    for name in names:
        monkeypatch.setitem(vars(specimens), name, {"rotary_size": DIM, "base": 0}[name])
    assert shown(specimens.RotaryWithSlips, "contiguous", None, device) == {"raises"}
    for name, value in {"rotary_size": DIM, "base": 0}.items():
        monkeypatch.setitem(vars(specimens), name, value)
    assert shown(specimens.RotaryWithSlips, "heads_first", None, device) == set()


@pytest.mark.parametrize("writer", ["triton", "cuda"])
@pytest.mark.parametrize("function", [*DISEASED.values(), *CURED.values()], ids=[*DISEASED, *CURED])
def test_the_writer_that_was_asked_for_writes(function, writer, monkeypatch, device):
    used, launch = [], rotary_op._launch
    monkeypatch.setattr(rotary_op, "_launch", lambda backend, *rest: used.append(backend) or launch(backend, *rest))
    shown(function, "contiguous", writer, device)
    assert set(used) == {writer}


@pytest.mark.parametrize("name", [name for name in [*DISEASED, *CURED] if name != "slips"])
def test_a_lazily_negated_gradient_is_another_matter(name, device):
    x = torch.zeros(1, SEQ, HEADS, DIM, device=device, requires_grad=True)
    dy = torch.arange(1.0, 25.0, device=device).view(1, SEQ, HEADS, DIM)
    tables, positions = scenarios.quarter_turns(DIM), torch.tensor([0, 2, 0], device=device)
    y = (DISEASED | CURED)[name].apply(x, *tables, positions, DIM, 0, None)
    if name == "into_upstream":
        with pytest.raises(ValueError, match="lazily negated"):
            torch.autograd.grad(y, x, dy._neg_view())
        return
    (dx,) = torch.autograd.grad(y, x, dy._neg_view())
    assert torch.equal(dx, rotary_reference(-dy, *tables, positions))


@pytest.mark.parametrize("positions", [(0, 0, 0), (2, 2, 2), (0, 2, 0)])
def test_the_identity_and_half_turns_hide_the_sign(positions, device):
    assert shown(specimens.RotaryTurnsOn, "heads_first", None, device, positions=positions) == set()
    assert shown(specimens.RotaryTurnsOn, "heads_first", None, device, positions=(0, 1, 0)) == {"wrong gradient"}


@pytest.mark.parametrize("writer", ["triton", "cuda"])
@pytest.mark.parametrize("name", ["into_upstream", "into_input"])
def test_no_version_tells_of_the_write(name, writer, device):
    x = torch.arange(1.0, 25.0, device=device).view(1, SEQ, HEADS, DIM).requires_grad_()
    dy = torch.ones_like(x)
    looked = [probes.look(t) for t in (x, dy)]
    y = DISEASED[name].apply(x, *scenarios.quarter_turns(DIM), torch.tensor([1, 2, 3], device=device), DIM, 0, writer)
    torch.autograd.grad(y, x, dy)
    unseen = [probes.written_unseen(before, probes.look(t)) for before, t in zip(looked, (x, dy), strict=True)]
    assert unseen == [name == "into_input", name == "into_upstream"]


@pytest.mark.parametrize("writer", ["triton", "cuda"])
@pytest.mark.parametrize("name", [*CURED, "into_input"])
def test_the_cured_can_be_differentiated_again(name, writer, device):
    positions = torch.tensor([1, 3, 2], device=device)
    tables = scenarios.quarter_turns(DIM, like=torch.empty(0, dtype=torch.float64, device=device))
    x = torch.randn(1, SEQ, HEADS, DIM, dtype=torch.float64, device=device, requires_grad=True)
    function = lambda x: (CURED | DISEASED)[name].apply(x + 0, *tables, positions, DIM, 0, writer) ** 2  # noqa: E731
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x, gen_non_contig_grad_outputs=True)


# Memory: F13 and its neighbours

WORKSPACES = {  # p.grad after q's backward, and after two micro-batches, 2 and then 5
    specimens.KeepsWorkspaceItself: (2, 7),
    specimens.KeepsWorkspace: (5, 10),
    specimens.KeepsWorkspaceDetached: (5, 10),
    specimens.KeepsNoWorkspace: (2, 7),
}


@pytest.mark.parametrize("writer", ["triton", "cuda"])
@pytest.mark.parametrize("function", WORKSPACES)
def test_f13_a_workspace_that_is_handed_out_is_taken_over(function, writer, device):
    beside, micro_batches = WORKSPACES[function]
    workspace = torch.empty(3, device=device)
    p, q = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    for leaf, factor in ((p, 2.0), (q, 5.0)):
        function.apply(leaf, factor, workspace, writer).backward(torch.ones(3, device=device))
    assert p.grad.tolist() == [beside] * 3
    assert q.grad.tolist() == [5] * 3
    p.grad = None
    for factor in (2.0, 5.0):
        function.apply(p, factor, workspace, writer).backward(torch.ones(3, device=device))
    assert p.grad.tolist() == [micro_batches] * 3


@pytest.mark.parametrize("writer", ["triton", "cuda"])
def test_two_gradients_in_one_storage_are_healthy(writer, device):
    a, b = (torch.arange(first, first + 3.0, device=device).requires_grad_() for first in (1.0, 4.0))
    for times in (1, 2):
        specimens.ProductInOneStorage.apply(a, b, writer).sum().backward()
        assert (a.grad.tolist(), b.grad.tolist()) == ((times * b).tolist(), (times * a).tolist())
    assert a.grad.untyped_storage().data_ptr() == b.grad.untyped_storage().data_ptr()
    assert not probes.overlap(a.grad, b.grad)


@pytest.mark.parametrize("writer", ["triton", "cuda"])
def test_what_a_kernel_does_not_cover_is_poison(writer, device):
    x = torch.ones(4, 2, device=device, requires_grad=True)
    specimens.WritesHalf.apply(x, writer).backward(torch.ones_like(x))
    assert x.grad[:2].eq(2).all()
    assert x.grad[2:].isnan().all(), "tests fill torch.empty with NaN"


@pytest.mark.parametrize("writer", ["triton", "cuda"])
@pytest.mark.parametrize(
    ("function", "dy_kept", "shares"),
    [
        (specimens.DoublesInPlace, False, True),
        (specimens.DoublesInPlaceAnnounced, False, True),
        (specimens.DoublesItsClone, True, False),
        (specimens.DoublesInNewMemory, True, False),
    ],
)
def test_who_writes_into_dy(function, dy_kept, shares, writer, device):
    x, dy = torch.ones(3, device=device, requires_grad=True), torch.tensor([1.0, 2, 3], device=device)
    (dx,) = torch.autograd.grad(function.apply(x, writer), x, dy)
    assert dx.tolist() == [2, 4, 6]
    assert (dy.tolist() == [1, 2, 3]) == dy_kept
    assert probes.overlap(dx, dy) == shares
    assert dy._version == (function is specimens.DoublesInPlaceAnnounced)


@pytest.mark.parametrize("writer", ["triton", "cuda"])
def test_the_cure_of_doubling_can_be_differentiated_again(writer, device):
    x = torch.randn(3, dtype=torch.float64, device=device, requires_grad=True)
    function = lambda x: specimens.DoublesInNewMemory.apply(x, writer) ** 2  # noqa: E731
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x, gen_non_contig_grad_outputs=True)


@pytest.mark.parametrize("writer", ["triton", "cuda"])
@pytest.mark.parametrize(("function", "wrong"), [(specimens.RotaryIntoUpstream, True), (specimens.RotaryCured, False)])
def test_f12_rotary_that_writes_into_dy_is_wrong_in_a_residual_only(function, wrong, writer, device):
    tables, positions = scenarios.quarter_turns(DIM), torch.tensor([1, 2, 3], device=device)
    dy = torch.arange(1.0, 25.0, device=device).view(1, SEQ, HEADS, DIM)
    back = rotary_reference(dy, tables[0], -tables[1], positions)
    for residual in (False, True):
        x = torch.zeros(1, SEQ, HEADS, DIM, device=device, requires_grad=True)
        h = 1 * x
        y = function.apply(h, *tables, positions, DIM, 0, writer)
        (h + y if residual else y).backward(dy.clone())
        right = back + dy if residual else back
        assert torch.equal(x.grad, right) != (wrong and residual)
