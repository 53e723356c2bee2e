"""Looking sees every write and changes nothing."""

import pytest
import torch

from rawgrad import look
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
