"""One .cu, two compilers: what runs, what is refused, what is kept."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rawgrad import cuda, runtime

SRC = Path(cuda.__file__).parent
EVERY_CU = sorted(SRC.rglob("*.cu"))

KERNELS = """
extern "C" __global__ void add_one(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + 1;
}

extern "C" __global__ void reversed_by_blocks(const T* x, T* y) {
  __shared__ T tile[64];
  tile[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  y[blockIdx.x * blockDim.x + threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void sum_all(const float* x, float* total, int n) {
  __shared__ float partial[128];
  const int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
  partial[t] = i < n ? x[i] : 0;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (t < half) partial[t] += partial[t + half];
    __syncthreads();
  }
  if (t == 0) atomicAdd(total, partial[0]);
}

extern "C" __global__ void where(int* out) {  // every coordinate, as one number
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = 1000 * block + thread;
}

extern "C" __global__ void scalars(double* out, int a, long long b, unsigned c, float d, double e, bool f) {
  out[0] = a; out[1] = (double)b; out[2] = c; out[3] = d; out[4] = e; out[5] = f;
}

extern "C" __global__ void __launch_bounds__(64) narrow(const float* x, T* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = rounded<T>(x[i]);
}

extern "C" __global__ void widen(const T* x, float* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = value(x[i]);
}

extern "C" __global__ void multiply_add(const float* x, float* y) { y[0] = x[0] * x[1] + x[2]; }

/* __global__ void commented_out(int n) */
extern "C" __global__ void hello() { printf("block %d thread %d\\n", blockIdx.x, threadIdx.x); }
"""


def launch(kernel, grid, block, *arguments):
    cuda.launch(KERNELS, kernel, grid, block, *arguments)


# What runs


def test_shared_memory_and_barriers_work(device):
    x = torch.arange(128.0, device=device)
    y = torch.zeros_like(x)
    launch("reversed_by_blocks", (2,), (64,), x, y)
    assert torch.equal(y, torch.cat([x[:64].flip(0), x[64:].flip(0)]))


def test_barriers_in_a_loop_and_atomics_work(device):
    x, total = torch.arange(1000.0, device=device), torch.zeros(1, device=device)
    launch("sum_all", (8,), (128,), x, total, 1000)
    assert total.item() == 499_500


def test_grids_and_blocks_of_three_axes_work(device):
    out = torch.zeros(24 * 24, dtype=torch.int32, device=device)
    launch("where", (2, 3, 4), (4, 3, 2), out)
    assert out.tolist() == [1000 * block + thread for block in range(24) for thread in range(24)]


def test_a_block_can_have_all_threads(device):
    out = torch.zeros(1024, dtype=torch.int32, device=device)
    launch("where", (1,), (1024,), out)
    assert out.tolist() == list(range(1024))


def test_every_scalar_arrives_at_its_width(device):
    out = torch.zeros(6, dtype=torch.float64, device=device)
    launch("scalars", (1,), (1,), out, -7, 2**40 + 1, 2**32 - 1, 0.1, 0.1, True)
    assert out.tolist() == [-7, 2**40 + 1, 2**32 - 1, np.float32(0.1), 0.1, 1]
    launch("scalars", (1,), (1,), out, np.int64(3), np.int32(4), 5, np.float64(0.5), 6, False)
    assert out.tolist() == [3, 4, 5, 0.5, 6, 0]


@pytest.mark.skipif(runtime.DEVICE == "cuda", reason="on a GPU printf arrives at the next synchronisation")
def test_printf_prints(capfd):
    launch("hello", (2,), (2,))
    assert capfd.readouterr().out == "block 0 thread 0\nblock 0 thread 1\nblock 1 thread 0\nblock 1 thread 1\n"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_number_is_read_right(dtype, device):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    y = torch.zeros(2**16, device=device)
    launch("widen", (256,), (256,), x, y)
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(y.nan_to_num(0), x.float().nan_to_num(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_numbers_are_rounded_to_the_nearest_and_ties_to_even(dtype, device):
    x = torch.randn(2**16) * torch.randint(-60, 60, (2**16,)).double().exp2().float()
    edges = (
        torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype if dtype.itemsize == 2 else torch.float16)
    )
    edges = edges.float()[edges.isfinite()]
    ties = (edges[1:].double() + edges[:-1].double()).float() / 2
    x = torch.cat([x, edges, ties, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65519.9, 65520.0, 1e38, 1e-45])])
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    x = torch.cat([x, nans, torch.zeros(-(len(x) + 4) % 64)]).to(device)
    y = torch.zeros(len(x), dtype=dtype, device=device)
    launch("narrow", (len(x) // 64,), (64,), x, y)
    want = x.to(dtype)
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.nan_to_num(0, 1, -1), want.nan_to_num(0, 1, -1))


def test_nvrtc_is_told_not_to_fuse(monkeypatch):
    core, told = runtime.cuda_core(), {}
    spy = SimpleNamespace(
        Program=core.Program, ProgramOptions=lambda **given: told.update(given) or core.ProgramOptions(**given)
    )
    monkeypatch.setattr(runtime, "cuda_core", lambda: spy)
    cuda._cubin.cache_clear()
    cuda.compile_for(EVERY_CU[0], "sm_90")
    assert told["fma"] is False


def test_multiplication_and_addition_are_not_fused(device):
    third = torch.tensor([1 / 3, 3.0, -1.0], device=device)
    y = torch.ones(1, device=device)
    launch("multiply_add", (1,), (1,), third, y)
    assert y.item() == 0.0  # fused, it would be 2^-25 or so


def test_launches_from_many_threads_do_not_mix(device):
    wrong = []

    def work(seed):
        x = torch.full((512,), float(seed), device=device)
        for _ in range(20):
            y = torch.zeros(512, device=device)
            launch("add_one", (4,), (128,), x, y, 512)
            if not torch.equal(y, x + 1):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_kernel_can_have_two_types_that_its_tensors_decide(device):
    text = 'extern "C" __global__ void k(const T* x, const U* y, T* z) { z[0] = rounded<T>(value(x[0]) + value(y[0])); }'
    for x_dtype, y_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        x, y = torch.tensor([1.5], dtype=x_dtype, device=device), torch.tensor([0.25], dtype=y_dtype, device=device)
        z = torch.zeros_like(x)
        cuda.launch(text, "k", (1,), (1,), x, y, z)
        assert z.item() == 1.75
    with pytest.raises(TypeError, match="takes float16 for z, got a tensor of torch.float32"):
        cuda.launch(text, "k", (1,), (1,), x.half(), x, x)


def test_a_thread_that_torch_has_not_touched_can_launch(device):
    x, y, failed = torch.ones(4, device=device), torch.zeros(4, device=device), []
    launch("add_one", (1,), (4,), x, y, 4)  # built and loaded, so that the thread only launches

    def work():
        try:
            launch("add_one", (1,), (4,), x, y, 4)
        except Exception as problem:
            failed.append(problem)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_can_launch_though_the_parent_is_in_a_launch():
    y = torch.zeros(1)
    text = 'extern "C" __global__ void k(float* y) { y[0] = 5; }'
    cuda.launch(text, "k", (1,), (1,), y)
    with cuda._host:
        child = os.fork()
        if child == 0:
            import signal

            signal.alarm(10)
            cuda.launch(text, "k", (1,), (1,), y)
            os._exit(0 if y.item() == 5 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_changed_file_is_compiled_anew(tmp_path, device):
    file, y = tmp_path / "k.cu", torch.zeros(1, device=device)
    for number in (3, 4):
        file.write_text(f'extern "C" __global__ void k(float* y) {{ y[0] = {number}; }}')
        cuda.launch(file, "k", (1,), (1,), y)
        assert y.item() == number


# What is refused, before anything is launched

F32, F64, I32 = (torch.zeros(4, dtype=dtype, device=runtime.DEVICE) for dtype in (torch.float32, torch.float64, torch.int32))


@pytest.mark.parametrize(
    ("kernel", "arguments", "error", "message"),
    [
        ("add_one", (F32, F32), TypeError, r"add_one takes 3 arguments \(x, y, n\), got 2"),
        ("add_one", (F32, F32, 2.0), TypeError, r"takes a whole number for n \(int\), got 2.0"),
        ("add_one", (F32, F32, 2**31), ValueError, "takes -2147483648 to 2147483647 for n .* got 2147483648"),
        ("add_one", (F32, 5, 4), TypeError, "takes a tensor for y, got int"),
        ("add_one", (F32, F32, F32), TypeError, "takes a number for n, got Tensor"),
        ("add_one", (F64, F32, 4), TypeError, "takes float for x, got a tensor of torch.float64"),
        ("reversed_by_blocks", (F32, F64), TypeError, "takes float for y, got a tensor of torch.float64"),
        ("reversed_by_blocks", (F32.to(torch.complex64), F32), TypeError, "got a tensor of torch.complex64"),
        ("add_one", (F32, torch.zeros(4, device="meta"), 4), ValueError, "takes tensors of one device, got y on meta beside"),
        ("scalars", (F64, 1, 1, -1, 1, 1, 1), ValueError, "takes 0 to 4294967295 for c .* got -1"),
        ("scalars", (F64, 1, 1, 1, "x", 1, 1), TypeError, r"takes a number for d \(float\), got 'x'"),
        ("add_two", (F32,), ValueError, "has no kernel 'add_two'; its extern \"C\" __global__ functions are 'add_one', "),
        (
            "scalars",
            (F64, 1, 1, 1, 1e300, 1, 1),
            ValueError,
            r"takes -3.40\d+e\+38 to 3.40\d+e\+38 for d \(float\), got 1e\+300",
        ),
        ("scalars", (F64, 1, 1, 1, 1j, 1, 1), TypeError, r"takes a number for d \(float\), got 1j"),
        ("commented_out", (4,), ValueError, "has no kernel 'commented_out'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_one_sentence(kernel, arguments, error, message):
    with pytest.raises(error, match=message):
        launch(kernel, (1,), (4,), *arguments)


def test_a_tensor_of_another_kind_of_device_is_refused():
    x = torch.zeros(4, device="meta")
    with pytest.raises(ValueError, match="add_one runs on cpu and cuda tensors, got meta"):
        launch("add_one", (1,), (4,), x, x, 4)


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [
        ((0,), (1,), r"a grid has up to three whole sizes, from 1 to .* got \(0,\)"),
        ((1000 / 128,), (128,), r"a grid has up to three whole sizes, .* got \(7.8125,\)"),
        (8, (128,), "a grid has up to three whole sizes, .* got 8"),
        ((1, 65_536), (1,), r"a grid .* got \(1, 65536\)"),
        ((1,), (1, 1, 65), r"a block .* got \(1, 1, 65\)"),
        ((1,), (64, 32), r"a block has at most 1024 threads, got \(64, 32, 1\)"),
        ((1, 1, 1, 1), (1,), r"a grid .* got \(1, 1, 1, 1\)"),
    ],
)
def test_sizes_outside_cudas_limits_are_refused_on_the_host_too(grid, block, message):
    with pytest.raises(ValueError, match=message):
        launch("hello", grid, block)


def test_a_type_that_no_launch_can_pass_is_refused():
    text = 'struct Box { int n; };\nextern "C" __global__ void k(Box box) {}'
    with pytest.raises(TypeError, match="k declares 'Box box'; a launch can pass numbers of type T, U, bool, int"):
        cuda.launch(text, "k", (1,), (1,), 3)


def test_a_16_bit_scalar_is_refused():
    text = 'extern "C" __global__ void k(T* x, T a) {}'
    with pytest.raises(TypeError, match="declares a as T = float16, which a number cannot be: declare it float"):
        cuda.launch(text, "k", (1,), (1,), torch.zeros(1, dtype=torch.float16, device=runtime.DEVICE), 1.0)


def test_a_kernel_with_a_mangled_name_is_refused_on_both_sides():
    with pytest.raises(ValueError, match='has no kernel .k.; its extern "C" __global__ functions are none'):
        cuda.launch("__global__ void k(float* x) { x[0] = 7; }", "k", (1,), (1,), F32)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_a_fake_tensor_is_refused():
    with torch._subclasses.FakeTensorMode(), pytest.raises(ValueError, match="takes a tensor with memory for x"):
        launch("add_one", (1,), (4,), torch.ones(4), torch.ones(4), 4)


def by_both_compilers(text: str, tmp_path: Path, dtype: torch.dtype):
    """The error of g++ or clang++, and that of NVRTC, which needs no GPU."""
    file = tmp_path / "kernel.cu"
    file.write_text(text)
    for compile in (
        lambda: cuda.launch(file, "k", (1,), (1,), torch.ones(1, dtype=dtype)),
        lambda: cuda.compile_for(file, "sm_90", dtype),
    ):
        with pytest.raises(cuda.CompileError) as caught:
            compile()
        assert "\n" not in str(caught.value)
        yield str(caught.value)


def test_an_error_in_a_template_names_the_line_that_asked_for_it(tmp_path):
    text = '\nextern "C" __global__ void k(T* x) {\n  x[0] = rounded<T>(value(x[0]) * 2.0);\n}'
    for error in by_both_compilers(text, tmp_path, torch.float16):
        assert error.startswith("kernel.cu, line 3: ")
        assert error.endswith(": x[0] = rounded<T>(value(x[0]) * 2.0);")


def test_a_warning_is_not_taken_for_the_error(tmp_path):
    text = '#warning "error: not one"\nextern "C" __global__ void k(T* x) {\n  x[0] = missing;\n}'
    for error in by_both_compilers(text, tmp_path, torch.float32):
        assert error.startswith("kernel.cu, line 3: ")
        assert "missing" in error


BROKEN = '\n\nextern "C" __global__ void k(float* x) {\n  x[0] = not_declared;\n}\n'


def test_a_compile_error_names_the_line_of_the_cu(tmp_path, device):
    file = tmp_path / "broken.cu"
    file.write_text(BROKEN)
    with pytest.raises(cuda.CompileError, match=r"broken.cu, line 4: .*not_declared.*: x\[0\] = not_declared;") as caught:
        cuda.launch(file, "k", (1,), (1,), torch.zeros(1, device=device))
    assert "\n" not in str(caught.value)
    assert "broken.cu" in caught.value.log


def test_nvrtc_names_the_line_of_the_cu(tmp_path):
    file = tmp_path / "broken.cu"
    file.write_text(BROKEN)
    with pytest.raises(cuda.CompileError, match='broken.cu, line 4: identifier "not_declared" is undefined'):
        cuda.compile_for(file, "sm_90")


def test_a_failed_build_leaves_nothing_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "cache_folder", lambda: tmp_path)
    with pytest.raises(cuda.CompileError):
        cuda.launch(BROKEN, "k", (1,), (1,), torch.zeros(1))
    assert list(tmp_path.iterdir()) == []


# What is kept

LAUNCH_SQUARE = """
import sys, torch
from rawgrad import cuda
cuda.launch('extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }', "twice", (1,), (4,), x := torch.ones(4))
assert x.tolist() == [2, 2, 2, 2]
"""


def run_square(cache: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", LAUNCH_SQUARE], env={**os.environ, "XDG_CACHE_HOME": str(cache)})


def test_a_build_is_found_again(tmp_path):
    assert run_square(tmp_path).wait() == 0
    (built,) = (tmp_path / "rawgrad").iterdir()
    made = built.stat().st_mtime_ns
    assert run_square(tmp_path).wait() == 0
    assert [(p, p.stat().st_mtime_ns) for p in (tmp_path / "rawgrad").iterdir()] == [(built, made)]


def test_two_processes_can_build_the_same_at_once(tmp_path):
    assert [process.wait() for process in [run_square(tmp_path), run_square(tmp_path)]] == [0, 0]
    assert [path.suffix for path in (tmp_path / "rawgrad").iterdir()] == [".so"]


def test_another_compiler_or_flag_is_another_build(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "cache_folder", lambda: tmp_path)
    text = 'extern "C" __global__ void k(float* x) {}'
    built = {cuda._shared_object(text, "k.cu", ("float", "float"))}
    built.add(cuda._shared_object(text, "k.cu", ("double", "float")))
    command = runtime.compiler()
    monkeypatch.setattr(runtime, "compiler", lambda: (*command, "-DNDEBUG"))
    built.add(cuda._shared_object(text, "k.cu", ("float", "float")))
    monkeypatch.setattr(runtime, "compiler_version", lambda: "another version")
    built.add(cuda._shared_object(text, "k.cu", ("float", "float")))
    assert len(built) == 4


def test_two_threads_can_build_the_same_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "cache_folder", lambda: tmp_path)
    text = 'extern "C" __global__ void thrice(float* x) { x[threadIdx.x] *= 3; }'
    tensors = [torch.ones(4) for _ in range(4)]
    threads = [threading.Thread(target=cuda.launch, args=(text, "thrice", (1,), (4,), x)) for x in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [x.tolist() for x in tensors] == [[3, 3, 3, 3]] * 4
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


# Every kernel of the package, for GPUs that are not here


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", cuda.FLOATING, ids=str)
@pytest.mark.parametrize("source", EVERY_CU, ids=lambda p: p.stem)
def test_every_cu_compiles_for(source, dtype, architecture):
    assert cuda.compile_for(source, architecture, dtype)[:4] == b"\x7fELF"


@pytest.mark.triton
def test_every_triton_kernel_compiles_ahead_of_time():
    """In a process without the interpreter switch, for GPUs that are not here; the child prints a line a kernel."""
    child = Path(__file__).with_name("compile_triton.py")
    done = subprocess.run(
        [sys.executable, str(child)], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    kernels = {line.split()[0] for line in lines}
    parts = {"_tile", "_load_pairs", "_turn_pairs", "_copy_rest"}  # these are called by kernels
    declared = kernels_in_source() - parts
    assert kernels == declared
    assert len(lines) == len(declared) * 2 * 4  # sm_75 and sm_90; four dtypes


def kernels_in_source() -> set[str]:
    import re

    return {name for path in SRC.rglob("*.py") for name in re.findall(r"@triton\.jit\s+def (\w+)", path.read_text())}


def test_a_wheel_holds_every_cu_and_h(tmp_path):
    """Built from a copy: in the tree, setuptools' stale build/ would hide a missing one."""
    root = SRC.parent.parent
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, copy)
    shutil.copytree(root / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    build = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=copy, check=True, capture_output=True)
    import zipfile

    (wheel,) = tmp_path.glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".cu", ".h"))}
    assert inside == {str(p.relative_to(SRC.parent)) for p in SRC.rglob("*") if p.suffix in (".cu", ".h")}
