"""Every registered kernel, so that a new one is tested without a new test."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import pytest
import torch

from minfer import build, ops
from minfer.bench.device import capability, pick
from minfer.bench.verify import Trial, oracle, verify
from minfer.ops import Kernel, Op
from tests.conftest import ROOT

ARCHS = ("sm_89", "sm_90a")
SHARED_LIMIT = {"sm_89": 99 << 10, "sm_90a": 227 << 10}


def cases(kernel: Kernel, sizes: list[dict[str, int]]):
    """The cases of some sizes that the kernel supports, over all dtypes and parameters."""
    op = ops.get(kernel.op)
    for shape, dtype, values in product(sizes, kernel.dtypes, product(*op.params.values())):
        case = op.case(kernel.name, dtype, shape, dict(zip(op.params, values, strict=True)))
        if kernel.unsupported(case, None) is None:
            yield op, case


def name(kernel: Kernel) -> str:
    return f"{kernel.op}-{kernel.name}"


CPU_SIZES = [
    {"m": 1, "n": 1, "k": 1},
    {"m": 7, "n": 600, "k": 300},
    {"m": 100, "n": 64, "k": 520},
    {"m": 64, "n": 64, "k": 64},
]
GPU_SIZES = [
    *CPU_SIZES,
    {"m": 1, "n": 4096, "k": 4096},
    {"m": 8, "n": 264, "k": 416},
    {"m": 257, "n": 384, "k": 1000},
    {"m": 1024, "n": 1024, "k": 1024},
    {"m": 2550, "n": 2552, "k": 1032},  # 100 tiles of 256x256: one wave and a half of an H100's clusters
]


# Each tile of the kernels that choose one, on 132 multiprocessors, with an edge of it in the last.
TILES = {
    "v07_tuned_acc16": [(4090, 4088, 200)],
    "v14_small": [
        (500, 520, 712),
        (1000, 1000, 840),
        (1270, 1288, 520),
        (1500, 1544, 520),
        (100, 4104, 2120),
        (130, 4104, 2120),
        (1000, 1032, 2120),
    ],
    "v17_one_wave": [
        (16, 4104, 1160),
        (33, 6152, 1032),
        (64, 8200, 968),
        (40, 14344, 712),
        (9, 28680, 520),
        (100, 4104, 712),
        (65, 6152, 712),
        (128, 8200, 584),
        (120, 14344, 456),
        (127, 28680, 328),
    ],
}


@pytest.mark.parametrize("kernel", [k for k in ops.every_kernel() if "cpu" in k.devices], ids=name)
def test_cpu_kernel_agrees_with_the_oracle(kernel):
    function = build.function(kernel)
    tried = 0
    for op, case in cases(kernel, CPU_SIZES):
        tried += verify(op, case, kernel, function, torch.device("cpu"), None, seed=tried).tried
    assert tried > 20


@pytest.mark.parametrize("kernel", [k for k in ops.every_kernel() if "cpu" in k.devices], ids=name)
def test_cpu_kernel_takes_matrices_inside_larger_ones(kernel):
    """Leading dimensions that are not the width, and nothing written beside the output."""
    function = build.function(kernel)
    for op, case in cases(kernel, [{"m": 20, "n": 40, "k": 24}]):
        check_strided(op, case, function, torch.device("cpu"))


def check_strided(op: Op, case: ops.Case, function, device: torch.device) -> None:
    trial = Trial(case, op.calls[0], "uniform", seed=5)
    inputs = []
    for tensor in trial.operands(op, device)[2]:
        transposed = tensor.stride(-1) != 1
        rows = tensor.t() if transposed else tensor
        wide = torch.full((rows.shape[0], rows.shape[1] + 8), float("nan"), dtype=tensor.dtype, device=device)
        wide[:, : rows.shape[1]] = rows
        inputs.append(wide[:, : rows.shape[1]].t() if transposed else wide[:, : rows.shape[1]])
    m, n = op.out_shape(case)
    around = torch.full((m + 1, n + 8), 7.0, dtype=inputs[0].dtype, device=device)
    out = around[:m, :n]
    function(out, *inputs, **trial.call)
    expected, bound = oracle(op, trial, out, tuple(inputs))
    assert bool(((out.double() - expected).abs() <= bound).all())
    assert bool((around[:, n:] == 7.0).all()) and bool((around[m:] == 7.0).all())


def test_every_source_file_is_registered():
    """A kernel that was written and not registered would be silently left out."""
    for op_name in ops.names():
        op = ops.get(op_name)
        if not op.folder.is_dir():
            continue
        function = f"def {op_name}("  # of a Triton kernel; other Python files are the op's own
        files = {
            path
            for path in op.folder.iterdir()
            if path.suffix in (".cu", ".cpp") or (path.suffix == ".py" and function in path.read_text())
        }
        assert files == {kernel.source for kernel in op.kernels.values() if kernel.source.stem != "__init__"}


@pytest.mark.usefixtures("cubins")
@pytest.mark.skipif(build.toolkit() is None, reason="no CUDA compiler that fits this PyTorch")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", {k.source: k for k in ops.every_kernel(["cuda"])}.values(), ids=name)
def test_cuda_kernel_compiles_for(kernel, arch):
    if not kernel.builds_for(arch):
        pytest.skip(f"{kernel.archs} only")
    binary = build.cached_cubin(kernel, arch)
    used = build.resources(binary, arch, build.toolkit())
    assert used["local_bytes"] == 0, "it spills, or indexes registers at run time"
    assert 0 < used["registers"] <= 255
    assert used["shared_bytes"] <= min(48 << 10, SHARED_LIMIT[arch])  # static; more needs dynamic shared memory


INTERPRETED = """
import sys, torch
from minfer import build, ops
from minfer.bench.verify import verify
kernel = ops.get(sys.argv[1]).kernels[sys.argv[2]]
from tests.test_kernels import cases
tried = 0
for op, case in cases(kernel, [{"m": 20, "n": 72, "k": 40}]):
    if case.dtype == "bfloat16":
        continue  # the interpreter keeps bfloat16 as integers and multiplies those
    tried += verify(op, case, kernel, build.function(kernel), torch.device("cpu"), None, seed=tried).tried
print(tried)
"""


@pytest.mark.parametrize("kernel", ops.every_kernel(["triton"]), ids=name)
def test_triton_kernel_agrees_with_the_oracle_when_interpreted(kernel):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, kernel.op, kernel.name],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 10


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [k for k in ops.every_kernel() if "cuda" in k.devices], ids=name)
def test_gpu_kernel_agrees_with_the_oracle(kernel):
    device = pick("cuda")
    function = build.function(kernel, build.arch_of(capability(device)))
    tried = 0
    tiles = [{"m": m, "n": n, "k": k} for m, n, k in TILES.get(kernel.name, [])]
    for op, case in cases(kernel, [*GPU_SIZES, *tiles]):
        if kernel.unsupported(case, capability(device)) is None:
            tried += verify(op, case, kernel, function, device, capability(device), seed=tried).tried
    assert tried > 20


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [k for k in ops.every_kernel() if "cuda" in k.devices], ids=name)
def test_gpu_kernel_takes_matrices_inside_larger_ones(kernel):
    device = pick("cuda")
    function = build.function(kernel, build.arch_of(capability(device)))
    for op, case in cases(
        kernel, [{"m": 5, "n": 40, "k": 24}, {"m": 20, "n": 40, "k": 24}, {"m": 136, "n": 264, "k": 72}]
    ):
        if kernel.unsupported(case, capability(device)) is None:
            check_strided(op, case, function, device)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [k for k in ops.every_kernel() if "cuda" in k.devices], ids=name)
def test_gpu_kernel_carries_nan_and_repeats_itself(kernel):
    device = pick("cuda")
    function = build.function(kernel, build.arch_of(capability(device)))
    for op, case in cases(kernel, [{"m": 64, "n": 128, "k": 64}, {"m": 8, "n": 128, "k": 1024}]):
        _, _, inputs = Trial(case, op.calls[0], "normal", 1).operands(op, device)
        outs = [torch.empty(op.out_shape(case), dtype=inputs[0].dtype, device=device) for _ in range(2)]
        for out in outs:
            function(out, *inputs, **op.calls[0])
        assert torch.equal(*outs) or not kernel.deterministic
        inputs[0][3, 5] = float("nan")
        inputs[0][4, 6] = float("inf")
        function(outs[0], *inputs, **op.calls[0])
        assert bool(outs[0][3].isnan().all()) and not bool(outs[0][:3].isnan().any())
        assert not bool(outs[0][4].isfinite().any())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["v08_split_k", "v08_stream_k", "v14_stream_k", "v16_skinny"])
def test_gpu_sums_of_several_blocks_have_the_same_bits_each_time(name):
    """On two streams at once, which must not meet in the memory where blocks leave their sums."""
    device, kernel = pick("cuda"), ops.get("hgemm").kernels[name]
    if not kernel.builds_for(build.arch_of(capability(device))):
        pytest.skip(f"{kernel.archs} only")
    function, m = build.function(kernel, build.arch_of(capability(device))), 100 if name == "v16_skinny" else 2550
    a = torch.randn(m, 1032, device=device).half()
    b = torch.randn(2552, 1032, device=device).half().t()
    outs = [torch.empty(m, 2552, dtype=torch.float16, device=device) for _ in range(24)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for i, out in enumerate(outs):
        with torch.cuda.stream(streams[i % 2]):
            function(out, a, b)
    torch.cuda.synchronize()
    assert all(torch.equal(out, outs[0]) for out in outs)
    torch.testing.assert_close(outs[0].float(), a.float() @ b.float(), rtol=2e-3, atol=0.1)
