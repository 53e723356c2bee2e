"""Looking sees every write and changes nothing."""

import pytest
import torch

from rawgrad import look, probes, runtime, shared_memory
from rawgrad.probes import overlap, written_unseen


def test_a_look_says_where_and_how_a_tensor_lies(device):
    x = torch.zeros(3, 4, device=device)[1:, ::2]
    seen = look(x)
    assert (seen.version, seen.shape, seen.stride, seen.offset, seen.storage_nbytes) == (0, (2, 2), (4, 2), 4, 48)
    assert seen.storage == x.untyped_storage().data_ptr()
    assert "storage=" not in repr(seen)
    assert "digest=" not in repr(seen)


def test_the_digest_is_of_the_whole_storage(device):
    x = torch.zeros(4, device=device)
    before = look(x[:1])
    x.data[3] = 1
    assert written_unseen(before, look(x[:1]))


def test_looking_changes_nothing(device):
    x = torch.randn(3, device=device, requires_grad=True)
    assert look(x) == look(x)
    assert (x._version, x.grad, x.grad_fn) == (0, None, None)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64], ids=str)
def test_every_dtype_can_be_looked_at(dtype, device):
    x = torch.zeros(5, dtype=dtype, device=device)
    before = look(x)
    x[4] = 1
    assert look(x).digest != before.digest


# F10: which writes the counter counts.  All change the memory.
COUNTED = {
    "mul_": lambda x: x.mul_(2),
    "out=": lambda x: torch.mul(x, 2, out=x),
    "through a view": lambda x: x.view(4).mul_(2),
    "through detach()": lambda x: x.detach().mul_(2),
    "under no_grad": lambda x: torch.no_grad()(x.mul_)(2),
}
UNCOUNTED = {
    ".data": lambda x: x.data.mul_(2),
    "untyped_storage": lambda x: torch.empty(0, device=x.device).set_(x.untyped_storage()).mul_(2),
}


@pytest.mark.parametrize("write", COUNTED)
def test_the_counter_counts(write, device):
    x = torch.ones(2, 2, device=device)
    before = look(x)
    COUNTED[write](x)
    assert look(x).version == 1
    assert look(x).digest != before.digest
    assert not written_unseen(before, look(x))


@pytest.mark.parametrize("write", UNCOUNTED)
def test_the_counter_does_not_count(write, device):
    x = torch.ones(2, 2, device=device)
    before = look(x)
    UNCOUNTED[write](x)
    assert look(x).version == 0
    assert written_unseen(before, look(x))


def test_numpy_writes_are_not_counted():
    x = torch.ones(4)
    before = look(x)
    x.numpy()[:] = 2
    assert written_unseen(before, look(x))


def test_inference_mode_has_no_version():
    with torch.inference_mode():
        assert look(torch.ones(2)).version is None


def test_two_storages_are_not_compared(device):
    a, b = torch.ones(2, device=device), torch.ones(2, device=device)
    with pytest.raises(ValueError, match="got two storages"):
        written_unseen(look(a), look(b))


def test_a_sparse_tensor_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match="look needs a strided tensor, got torch.sparse_coo"):
        look(torch.ones(3).to_sparse())


@pytest.mark.parametrize(
    ("pick", "shares"),
    [
        pytest.param(lambda x: (x, x), True, id="itself"),
        pytest.param(lambda x: (x, x.view(-1)), True, id="view"),
        pytest.param(lambda x: (x[0], x[1]), False, id="two_rows"),
        pytest.param(lambda x: (x[:1], x), True, id="same_start"),
        pytest.param(lambda x: (x, x[1, 2:]), True, id="other_start"),
        pytest.param(lambda x: (x[:, 0], x[:, 1]), True, id="interleaved_columns"),
        pytest.param(lambda x: (x, x.clone()), False, id="clone"),
        pytest.param(lambda x: (x[:, :0], x), False, id="empty"),
        pytest.param(lambda x: (x[0, 0].expand(9), x[1]), False, id="expanded"),
    ],
)
def test_memory_is_shared_where_address_ranges_meet(pick, shares, device):
    a, b = pick(torch.zeros(2, 4, device=device))
    assert overlap(a, b) is shares
    assert overlap(b, a) is shares


def test_peak_counts_by_hand(device):
    n = 4 * 4096
    with probes.Peak(device) as peak:
        assert (peak.now(), peak.nbytes) == (0, 0)
        a = torch.ones(4096, device=device)
        b = a + 1
        assert (peak.now(), peak.nbytes) == (2 * n, 2 * n)
        del a
        assert (peak.now(), peak.nbytes) == (n, 2 * n)
        peak.mark()
        assert peak.nbytes == n
        c = (b * 2) * 3  # b * 2 is there until c is
        assert (peak.now(), peak.nbytes) == (2 * n, 3 * n)
        c.view(64, 64).t().add_(1)  # views and writes in place make no memory
        assert (peak.now(), peak.nbytes) == (2 * n, 3 * n)
        del b, c
        assert peak.now() == 0


def test_garbage_from_before_is_not_counted_as_freed(device):
    cycle = [torch.ones(4096, device=device)]
    cycle.append(cycle)
    del cycle
    with probes.Peak(device) as peak:
        held = [torch.ones(4096, device=device) for _ in range(2)]
        assert [[] for _ in range(5000)], "enough for a collection"
        assert peak.now() == 2 * held[0].nbytes
    import gc

    assert gc.isenabled()


def test_peak_follows_a_backward_and_what_it_frees(device):
    n, x = 4 * 4096, torch.ones(4096, device=device, requires_grad=True)
    with probes.Peak(device) as peak:
        y = x.exp().exp()  # each saves its result
        assert round(peak.now() / n) == 2
        y.sum().backward()
        assert round(peak.now() / n) == 2, "y and x.grad: the inner result is freed"
    assert x.grad is not None
    assert y.shape == (4096,)


def test_peak_does_not_count_what_was_there_or_an_alias_of_it(device):
    before = torch.ones(4096, device=device)
    with probes.Peak(device) as peak:
        alias = torch.empty(0, device=device).set_(before.untyped_storage(), 0, (4096,), (1,))
        before.view(64, 64)[0].detach().mul_(2)
    assert peak.nbytes == 0
    assert alias[0].item() == 2


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.skipif(runtime.DEVICE != "cpu", reason="there the allocator's own peak")
def test_peak_follows_what_grows_and_passes_over_what_is_not_strided(device):
    n, out, before = 4 * 4096, torch.empty(0), torch.ones(8)
    with probes.Peak(device) as peak:
        torch.add(torch.ones(4096), 1, out=out)
        assert (peak.now(), peak.nbytes) == (n, 2 * n), "out grew, and ones is gone"
        fresh = torch.empty(4096)
        fresh.resize_(8192)
        assert peak.now() == 3 * n
        fresh.resize_(1024)
        assert peak.now() == 3 * n, "a storage does not shrink"
        before.resize_(16)
        assert peak.now() == 3 * n + 32, "what was there before counts where it grows"
        del out, fresh
        torch.ones(3, 3).to_sparse().coalesce()
        torch.ones(3, 3).to_sparse_csr()
        torch.ones(3, 3).to_mkldnn()
        torch.empty(1 << 20, device="meta").add(1)
    assert peak.nbytes == 3 * n + 32


class _Two(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.position, self.kind = (torch.nn.Parameter(torch.zeros(2, 3, device=device)) for _ in range(2))


def test_f18_shared_memory_names_gradients_that_are_one(device):
    module = _Two(device)
    assert shared_memory(module) == []
    weights = torch.arange(6.0, device=device).view(2, 3)
    ((module.position.unsqueeze(0) + module.kind.unsqueeze(0)) * weights).sum().backward()
    assert shared_memory(module) == [("position.grad", "kind.grad")]


def test_shared_memory_names_a_gradient_that_lies_in_a_parameter(device):
    module = _Two(device)
    module.kind.grad = module.position.detach()[:1].expand(2, 3)
    assert shared_memory(module) == [("position", "kind.grad")]
    module.kind.grad = module.kind.detach()
    assert shared_memory(module) == [("kind", "kind.grad")]


def test_shared_memory_is_silent_where_all_is_well(device):
    module = _Two(device)
    room = torch.zeros(4, 3, device=device)
    module.position.grad, module.kind.grad = room[:2], room[2:]  # one storage, no overlap
    assert shared_memory(module) == []
    module.tied = module.position  # one parameter under two names is one
    assert shared_memory(module) == []
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    assert shared_memory(embedding) == []
    nowhere = torch.nn.Linear(2, 2, device="meta")
    nowhere.weight.grad, nowhere.bias.grad = torch.empty(2, 2, device="meta"), torch.empty(2, device="meta")
    assert shared_memory(nowhere) == []
    empty = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(0, device=device)) for _ in range(2)])
    for parameter in empty:
        parameter.grad = module.position.detach()[:0, 0]
    assert shared_memory(empty) == []


@pytest.mark.parametrize(
    ("ranges", "pairs"),
    [
        ([(0, 4), (1, 5), (4, 8), (12, 16)], [(0, 1), (1, 2)]),
        ([(0, 16), (1, 2), (3, 4), (5, 6)], [(0, 1), (0, 2), (0, 3)]),  # the first stays open past those that end in it
        ([(12, 16), (4, 8), (7, 13)], [(0, 2), (1, 2)]),  # addresses out of order
        ([(0, 4), (4, 4), (4, 8)], []),  # an empty one in between
        ([(0, 4), (2, 2)], []),  # an empty one inside
    ],
)
def test_shared_memory_finds_all_of_many(ranges, pairs, device):
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(end - start, device=device)) for start, end in ranges])
    room = torch.zeros(16, device=device)
    for parameter, (start, end) in zip(module, ranges, strict=True):
        parameter.grad = room[start:end]
    assert shared_memory(module) == [(f"{a}.grad", f"{b}.grad") for a, b in pairs]


def test_shared_memory_asks_about_gradients_only(device):
    module = _Two(device)
    module.kind.data = module.position.data  # parameters that share are tied by intent
    assert shared_memory(module) == []
    module.position.grad, module.kind.grad = (torch.zeros(2, 3, device=device) for _ in range(2))
    assert shared_memory(module) == []


def test_shared_memory_names_a_gradient_that_lies_in_a_buffer(device):
    module = _Two(device)
    module.register_buffer("workspace", torch.zeros(2, 3, device=device))
    module.kind.grad = module.workspace[:]
    assert shared_memory(module) == [("workspace", "kind.grad")]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_shared_memory_looks_at_the_values_of_sparse_gradients(device):
    module = torch.nn.ModuleList([torch.nn.Embedding(4, 2, sparse=True, device=device) for _ in range(2)])
    for embedding in module:
        embedding(torch.tensor([1, 2], device=device)).sum().backward()
    assert shared_memory(module) == []
    values = torch.zeros(2, 2, device=device)
    for embedding in module:
        embedding.weight.grad = torch.sparse_coo_tensor(
            torch.tensor([[1, 2]], device=device), values, (4, 2), check_invariants=False
        )
    assert shared_memory(module) == [("0.weight.grad", "1.weight.grad")]


def test_equal_addresses_on_two_devices_are_two_memories(device, monkeypatch):
    module = _Two(device)
    module.position.grad = module.kind.grad = torch.zeros(2, 3, device=device)
    assert shared_memory(module) == [("position.grad", "kind.grad")]
    ranges = iter([(0, 24), (100, 124), (200, 224), (200, 224)])
    monkeypatch.setattr(probes, "address_range", lambda tensor: next(ranges))

    class Elsewhere(torch.Tensor):
        device = "cuda:7"

    module.position.grad = None
    module.position.grad = torch.zeros(2, 3, device=device).as_subclass(Elsewhere)
    assert shared_memory(module) == []
