"""`matmul`: the kernels of hgemm as one function of PyTorch, `torch.ops.minfer.hgemm`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache

import torch

from minfer import build
from minfer.ops import DTYPES, get
from minfer.ops.hgemm.best import best

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product, (M, N), of a (M, K) and b (K, N), both float16 or both bfloat16, on one device; sums are fp32.

    `best` picks the kernel, which is compiled at its first call; with MINFER_EXPLAIN=1 each choice is printed to stderr
    once. `weight.t()` of an `nn.Linear` is a b that is read as it lies. An operand whose rows (in TN: columns of b) do
    not start at multiples of 16 bytes is copied first. Works under `torch.compile`. It has no backward: raises
    RuntimeError where one would be recorded. Raises ValueError for operands that do not fit each other."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        raise RuntimeError("hgemm.matmul has no backward: call it under torch.no_grad(), or with detached tensors")
    return _matmul(a, b)


@torch.library.custom_op("minfer::hgemm", mutates_args=())
def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _check(a, b)
    out = a.new_empty(a.shape[0], b.shape[1])
    if out.numel() == 0:
        return out
    if a.shape[1] == 0:
        return out.zero_()
    a = _readable(a)
    if b.stride(0) == 1 and not (b.stride(1) == 1 and b.stride(0) >= b.shape[1]):
        b, layout = _readable(b.t()).t(), "TN"
    else:
        b, layout = _readable(b), "NN"
    capability = torch.cuda.get_device_capability(a.device) if a.is_cuda else None
    choice = best(a.shape[0], b.shape[1], a.shape[1], NAMES[a.dtype], layout, capability)
    if os.environ.get("MINFER_EXPLAIN") == "1":
        _explain(f"{a.shape[0]}x{b.shape[1]}x{a.shape[1]} {NAMES[a.dtype]} {layout}", choice.kernel, choice.why)
    with torch.cuda.device_of(a):
        _function(choice.kernel, build.arch_of(capability) if capability else "")(out, a, b, alpha=1.0, beta=0.0)
    return out


@_matmul.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _check(a, b)
    return a.new_empty(a.shape[0], b.shape[1])


def _check(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"hgemm.matmul takes (M, K) and (K, N), got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype != b.dtype or a.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"hgemm.matmul takes float16 or bfloat16 for both operands, got {a.dtype} and {b.dtype}")
    if a.device != b.device:
        raise ValueError(f"hgemm.matmul takes operands on one device, got {a.device} and {b.device}")


def _readable(rows: torch.Tensor) -> torch.Tensor:
    """The matrix itself where its rows are contiguous and start at multiples of 16 bytes, else a copy.

    Rows that cannot (their length is odd) stay: then `best` finds a kernel that needs no such thing."""
    contiguous = rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1]
    aligned = rows.data_ptr() % 16 == 0 and rows.stride(0) % 8 == 0
    return rows if contiguous and (aligned or rows.shape[1] % 8) else rows.clone(memory_format=torch.contiguous_format)


@cache
def _function(kernel: str, arch: str) -> Callable[..., None]:
    return build.function(get("hgemm").kernels[kernel], arch)


@cache
def _explain(problem: str, kernel: str, why: str) -> None:
    print(f"hgemm.matmul {problem}: {kernel}, {why}", file=sys.stderr)
