"""What the doctor sees on a GPU alone."""

import pytest
import torch
from diseased import FOLLOWS_NO_STREAM

import rawgrad
from rawgrad import specimens


@pytest.mark.gpu
def test_a_launch_on_another_stream_is_caught():
    (x,) = FOLLOWS_NO_STREAM.inputs()
    report = rawgrad.examine(FOLLOWS_NO_STREAM.func, (x.detach().cuda().requires_grad_(),), lambda x: 3 * x)
    assert [finding.check for finding in report.findings if finding.told] == ["follows_the_stream"]
    (finding,) = report.of("follows_the_stream")
    assert "0 where" in finding.evidence


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_our_kernels_follow_torchs_stream(backend):
    x = torch.linspace(-1, 1, 12, device="cuda").view(3, 4).requires_grad_()
    for function, reference in (
        (lambda x: rawgrad.square(x, backend), torch.square),
        (lambda x: specimens.ReadsContiguous.apply(x, backend), lambda x: 3 * x),
    ):
        assert (
            rawgrad.examine(function, (x,), reference, checks=["follows_the_stream"]).verdict("follows_the_stream") == "healthy"
        )
