"""`matmul`: the kernels of hgemm as one function of PyTorch, `torch.ops.minfer.hgemm`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache

import torch

from minfer import build
from minfer.functional.best import best
from minfer.ops import DTYPES, get

# Not taken for fewer columns than any that were measured: strips of them leave multiprocessors idle there.
LEAST = {"v17_one_wave": "n"}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product, (M, N), of a (M, K) and b (K, N), both float16 or both bfloat16, on one device; sums are fp32.

    `best` picks the kernel, which is compiled at its first call; with MINFER_EXPLAIN=1 each choice is printed to stderr
    once. `weight.t()` of an `nn.Linear` is a b that is read as it lies. An operand whose rows (in TN: columns of b) do
    not start at multiples of 16 bytes is copied first. Works under `torch.compile`. It has no backward: raises
    RuntimeError where one would be recorded. Raises ValueError for operands that do not fit each other."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        raise RuntimeError("minfer.matmul has no backward: call it under torch.no_grad(), or with detached tensors")
    return torch.ops.minfer.hgemm.default(a, b)


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _check(a, b)
    (m, k), n = a.shape, b.shape[1]
    out = a.new_empty(m, n)
    if m == 0 or n == 0:
        return out
    if k == 0:
        return out.zero_()
    a = _readable(a)
    if b.stride(0) == 1 and not (b.stride(1) == 1 and n == 1):
        b, layout = _readable(b.t()).t(), "TN"
    else:
        b, layout = _readable(b), "NN"
    kernel = _kernel(m, n, k, a.dtype, layout, a.device)
    with torch.cuda.device_of(a):
        kernel(out, a, b, alpha=1.0, beta=0.0)
    return out


def _fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _check(a, b)
    return a.new_empty(a.shape[0], b.shape[1])


# Not by `custom_op`, which takes longer at each call, and seconds at the first: it imports all of torch.compile.
_LIBRARY = torch.library.Library("minfer", "FRAGMENT")
_LIBRARY.define("hgemm(Tensor a, Tensor b) -> Tensor")
_LIBRARY.impl("hgemm", _multiply, "CompositeExplicitAutograd")
torch.library.register_fake("minfer::hgemm", _fake, lib=_LIBRARY)


def _check(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"minfer.matmul takes (M, K) and (K, N), got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype != b.dtype or a.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"minfer.matmul takes float16 or bfloat16 for both operands, got {a.dtype} and {b.dtype}")
    if a.device != b.device:
        raise ValueError(f"minfer.matmul takes operands on one device, got {a.device} and {b.device}")


def _readable(rows: torch.Tensor) -> torch.Tensor:
    """The matrix itself where its rows are contiguous and start at multiples of 16 bytes, else a copy.

    Rows that cannot (their length is odd) stay: then `best` finds a kernel that needs no such thing."""
    contiguous = rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1]
    aligned = rows.data_ptr() % 16 == 0 and rows.stride(0) % 8 == 0
    return rows if contiguous and (aligned or rows.shape[1] % 8) else rows.clone(memory_format=torch.contiguous_format)


@cache
def _kernel(m: int, n: int, k: int, dtype: torch.dtype, layout: str, device: torch.device) -> Callable[..., None]:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    params, shape = {"layout": layout, "accumulate": "float32"}, {"m": m, "n": n, "k": k}
    choice = best("hgemm", NAMES[dtype], params, shape, capability, LEAST)
    if os.environ.get("MINFER_EXPLAIN") == "1":
        print(f"minfer.matmul {m}x{n}x{k} {NAMES[dtype]} {layout}: {choice.kernel}, {choice.why}", file=sys.stderr)
    return build.function(get("hgemm").kernels[choice.kernel], build.arch_of(capability) if capability else "")
