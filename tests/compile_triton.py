"""Compiles every Triton kernel for GPUs that are not here; test_cuda.py runs it without the interpreter switch."""

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from rawgrad import specimens
from rawgrad.ops import square

KERNELS = [
    square._square_forward_kernel,
    square._square_backward_kernel,
    specimens._triple_flat_kernel,
    specimens._triple_kernel,
]
# An element, and what square's kernels compute in
ELEMENTS = {"fp64": square.tl.float64, "fp32": square.tl.float32, "fp16": square.tl.float32, "bf16": square.tl.float32}

for kernel in KERNELS:
    for capability in (75, 90):
        for element, acc in ELEMENTS.items():
            values = {"BLOCK": 1024, "BLOCK_ROWS": 4, "BLOCK_COLS": 256, "ACC": acc}
            constants = {name: value for name, value in values.items() if name in kernel.arg_names}
            signature = {
                name: "constexpr" if name in constants else f"*{element}" if name.endswith("_ptr") else "i64"
                for name in kernel.arg_names
            }
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            compiled = compile(source, target=GPUTarget("cuda", capability, 32))
            assert compiled.asm["cubin"][:4] == b"\x7fELF"
            print(kernel.__name__, capability, element)
