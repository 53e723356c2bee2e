"""Compiles every Triton kernel for GPUs that are not here; test_cuda.py runs it without the interpreter switch."""

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from rawgrad import specimens
from rawgrad.ops import rotary, square

KERNELS = [
    square._square_forward_kernel,
    square._square_backward_kernel,
    specimens._triple_flat_kernel,
    specimens._triple_kernel,
    rotary._rotary_kernel,
]
CONSTANTS = {
    "BLOCK": 1024, "BLOCK_ROWS": 4, "BLOCK_COLS": 256,
    "HAS_POSITIONS": True, "HAS_K": True, "INTERLEAVED": False, "EXPANDED": False,
    "BLOCK_HEADS": 4, "BLOCK_K_HEADS": 2, "BLOCK_HALF": 64, "BLOCK_REST": 32,
}  # fmt: skip
TYPES = {"positions_ptr": "*i64", "sign": "fp32"}
# An element, and what square's kernels compute in
ELEMENTS = {"fp64": square.tl.float64, "fp32": square.tl.float32, "fp16": square.tl.float32, "bf16": square.tl.float32}

for kernel in KERNELS:
    for capability in (75, 90):
        for element, acc in ELEMENTS.items():
            values = {**CONSTANTS, "ACC": acc}
            constants = {name: value for name, value in values.items() if name in kernel.arg_names}
            signature = {
                name: "constexpr" if name in constants else TYPES.get(name, f"*{element}" if name.endswith("_ptr") else "i64")
                for name in kernel.arg_names
            }
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            compiled = compile(source, target=GPUTarget("cuda", capability, 32))
            assert compiled.asm["cubin"][:4] == b"\x7fELF"
            print(kernel.__name__, capability, element)
