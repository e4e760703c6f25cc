"""rmsnorm, add_rmsnorm and layernorm on rows whose squares a half type cannot add up, of zeros, and with inf and NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minfer import build, ops
from minfer.bench.device import capability, pick
from minfer.build import toolchain
from minfer.ops import Kernel

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = (4096, 64)  # the second for kernels that take short rows only
LARGE = {torch.float32: 1e17, torch.bfloat16: 1e17, torch.float16: 6e4}  # 4096 squares of it are below the largest fp32

NORMS = ("rmsnorm", "add_rmsnorm", "layernorm")
KERNELS = [kernel for kernel in ops.every_kernel() if kernel.op in NORMS]
ON_CPU = [kernel for kernel in KERNELS if "cpu" in kernel.devices]
ON_GPU = [kernel for kernel in KERNELS if kernel.backend in ("cuda", "triton")]


def name(kernel: Kernel) -> str:
    """The same in each of pytest-xdist's processes. A kernel's repr has the address of its function."""
    return f"{kernel.op}-{kernel.name}"


@pytest.mark.parametrize("kernel", ON_CPU, ids=name)
def test_extreme_rows(kernel: Kernel) -> None:
    if kernel.name == "torch_compile":
        pytest.skip("takes seconds, and is PyTorch's own")
    check(kernel, build.function(kernel), torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ON_GPU, ids=name)
def test_extreme_rows_on_a_gpu(kernel: Kernel) -> None:
    device = pick("cuda")
    found = capability(device)
    assert found
    arch = toolchain.arch_of(found)
    if not kernel.builds_for(arch):
        pytest.skip(f"{kernel.archs} only")
    check(kernel, build.function(kernel, arch), device)


def width(kernel: Kernel, dtype: torch.dtype, device: torch.device) -> int:
    """The first of WIDTHS that the kernel has code for."""
    op, name = ops.get(kernel.op), str(dtype).removeprefix("torch.")
    cases = (op.case(kernel.name, name, {"tokens": 8, "hidden": n}) for n in WIDTHS)
    return next(case["hidden"] for case in cases if kernel.unsupported(case, capability(device)) is None)


def rows(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One extreme a row; the squares of the first three have a sum that no fp16 holds."""
    x = torch.randn(8, n, generator=torch.Generator().manual_seed(0))
    x[0] *= 300
    x[1] *= LARGE[dtype] / x[1].abs().max()
    x[2, 9] = LARGE[dtype]
    x[3] = 0.0
    x[4] *= torch.finfo(dtype).tiny
    x[5, 7] = math.inf
    x[6, n - 1] = -math.inf
    x[7, 8] = math.nan
    return x.to(dtype).to(device)


def check(kernel: Kernel, function: Callable[..., Any], device: torch.device) -> None:
    op = kernel.op
    for dtype in DTYPES:
        n = width(kernel, dtype, device)
        x = rows(n, dtype, device)
        weight, bias = (
            torch.linspace(0.5, 1.5, n, device=device).to(dtype),
            torch.linspace(-1, 1, n, device=device).to(dtype),
        )
        y, wide = torch.full_like(x, 7.0), x.double()
        if op == "add_rmsnorm":
            residual = x.flip(1).clone()
            residual[3] = x[3] = LARGE[dtype]  # whose sum is infinite in fp16
            total = (x.float() + residual.float()).to(dtype)
            function(y, residual, x, weight)
            torch.testing.assert_close(residual, total, equal_nan=True, rtol=0, atol=0)
            wide = total.double()
        elif op == "rmsnorm":
            function(y, x, weight)
        else:
            function(y, x, weight, bias)
        if op == "layernorm":
            expected = torch.nn.functional.layer_norm(wide, (n,), weight.double(), bias.double(), 1e-5)
        else:
            expected = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * weight.double()
        expected = expected.to(dtype)
        assert bool(expected[7].isnan().all()) and bool(expected[5, 7].isnan()), "the reference shows what is asked"
        torch.testing.assert_close(y, expected, equal_nan=True)
