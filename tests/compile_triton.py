"""Compiles every Triton kernel for GPUs that are not here; test_cuda.py runs it without the interpreter switch."""

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from rawgrad.ops import square

KERNELS = [square._square_forward_kernel, square._square_backward_kernel]
ELEMENTS = {"fp64": "fp64", "fp32": "fp32", "fp16": "fp32", "bf16": "fp32"}  # and what the kernel computes in

for kernel in KERNELS:
    for capability in (75, 90):
        for element, acc in ELEMENTS.items():
            constants = {
                "BLOCK_ROWS": 4,
                "BLOCK_COLS": 256,
                "ACC": getattr(square.tl, {"fp64": "float64", "fp32": "float32"}[acc]),
            }
            signature = {
                name: "constexpr" if name in constants else f"*{element}" if name.endswith("_ptr") else "i64"
                for name in kernel.arg_names
            }
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            compiled = compile(source, target=GPUTarget("cuda", capability, 32))
            assert compiled.asm["cubin"][:4] == b"\x7fELF"
            print(kernel.__name__, capability, element)
