"""Functions of liger-kernel in which the interpreter stops, examined on a GPU: `python -m rawgrad.doctor.shipped`."""

from textwrap import wrap

import torch
from torch.nn import functional as F

from rawgrad.doctor import examine
from rawgrad.doctor.report import Report

# What a Function that writes in place by design may break
CONTRACT = [
    "agrees_with_reference", "respects_upstream_strides", "leaves_inputs_alone", "leaves_upstream_alone",
    "shares_with_siblings", "spares_saved_outputs", "repeats", "is_linear_in_upstream",
]  # fmt: skip


def in_brief(name: str, report: Report) -> str:
    """What is told, a line each, without the first wrong element."""
    lines = [f"{name}: {'nothing is broken' if report.ok else 'broken beside others'}"]
    for finding in report.findings:
        if finding.told:
            said = finding.evidence.partition(", first")[0].partition(", and ")[0]
            head = f"  {finding.verdict:6} {finding.check:21} "
            lines += wrap(said, 96, initial_indent=head, subsequent_indent=" " * len(head))
    return "\n".join(lines)


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).cuda().requires_grad_()


if __name__ == "__main__":
    from liger_kernel.ops import layer_norm, rms_norm, swiglu

    shipped = {
        "RMSNorm": (
            lambda x, w: rms_norm.LigerRMSNormFunction.apply(x, w, 1e-6),
            (_leaf(4, 8), _leaf(8)),
            lambda x, w: F.rms_norm(x, (8,), w, 1e-6),
        ),
        "SwiGLU": (swiglu.LigerSiLUMulFunction.apply, (_leaf(4, 8), _leaf(4, 8)), lambda a, b: F.silu(a) * b),
        "layer norm": (
            lambda x, w, b: layer_norm.LigerLayerNormFunction.apply(x, w, b, 1e-6),
            (_leaf(4, 8), _leaf(8), _leaf(8)),
            lambda x, w, b: F.layer_norm(x, (8,), w, b, 1e-6),
        ),
    }
    for name, (function, inputs, reference) in shipped.items():
        print(in_brief(name, examine(function, inputs, reference, checks=CONTRACT, tolerance=1e-4)))
