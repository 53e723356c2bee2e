"""Memory read and written as a kernel does, and never outside the storage."""

import pytest
import torch

from rawgrad import look, raw
from rawgrad.probes import written_unseen


def test_a_read_ignores_strides(device):
    x = torch.arange(6.0, device=device).view(2, 3)
    assert raw.read(x.t()).tolist() == [0, 1, 2, 3, 4, 5]
    assert raw.read(x[:, 1:], 4).tolist() == [1, 2, 3, 4]  # the offset is honoured
    assert raw.read(x[0, 0].expand(5), 1).tolist() == [0]


def test_a_read_is_a_copy(device):
    x = torch.ones(3, device=device)
    raw.read(x).zero_()
    assert x.tolist() == [1, 1, 1]


def test_a_write_ignores_strides_and_is_not_counted(device):
    x = torch.zeros(2, 3, device=device)
    before = look(x)
    raw.write(x.t()[1:], torch.tensor([[1, 2], [3, 4]], device=device))
    assert x.tolist() == [[0, 1, 2], [3, 4, 0]]
    assert written_unseen(before, look(x))


def test_a_leaf_that_requires_grad_can_be_written(device):
    x = torch.zeros(2, device=device, requires_grad=True)
    raw.write(x, torch.ones(2, device=device))
    assert x.tolist() == [1, 1]
    assert x._version == 0


@pytest.mark.parametrize("count", [3, -1, 10**9])
def test_nothing_leaves_the_storage(count, device):
    x = torch.zeros(4, device=device)[2:]
    with pytest.raises(ValueError, match=f"{count} elements from offset 2 on, but 2 are left there; ask for at most 2"):
        raw.read(x, count)


def test_a_write_that_would_leave_the_storage_changes_nothing(device):
    x = torch.zeros(4, device=device)
    with pytest.raises(ValueError, match="raw.write stays inside the storage"):
        raw.write(x[2:], torch.ones(3, device=device))
    assert x.tolist() == [0, 0, 0, 0]


def test_elements_left_counts_to_the_end_of_the_storage(device):
    x = torch.zeros(10, dtype=torch.float64, device=device)
    assert [raw.elements_left(t) for t in (x, x[3:5], x[9].expand(7))] == [10, 7, 1]


def test_flat_takes_a_tensor_for_contiguous(device):
    t = torch.arange(8.0, device=device).view(4, 2).t()
    assert raw.flat(t[:, :2]).tolist() == [[0, 1], [2, 3]]
    assert raw.flat(t).data_ptr() == t.data_ptr()
    with pytest.raises(ValueError, match=r"taken for contiguous, \(2, 3\) needs 6 elements, and the storage has 1 from"):
        raw.flat(torch.ones(1, device=device).expand(2, 3))
