"""`matmul`: the kernels of hgemm as one function of PyTorch, `torch.ops.minfer.hgemm`."""

from __future__ import annotations

import torch

from minfer.functional import library

# Not taken for fewer columns than any that were measured: there its N-slices leave SMs idle.
LEAST = {"v17_one_wave": "n"}


@library.public
def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product, (M, N), of a (M, K) and b (K, N), both float16 or both bfloat16, on one device; sums are fp32.

    `best` picks the kernel, which is compiled at its first call; with MINFER_EXPLAIN=1 each choice is printed to stderr
    once. `weight.t()` of an `nn.Linear` is a b that is read in place. An operand whose rows (in TN: columns of b) do
    not start at multiples of 16 bytes is copied first. Works under `torch.compile`. It has no backward: raises
    RuntimeError where one would be recorded. Raises ValueError for operands that do not fit each other."""
    library.refuse_gradients("matmul", a, b)
    return _hgemm_op(a, b)


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _check(a, b)
    (m, k), n = a.shape, b.shape[1]
    out = a.new_empty(m, n)
    if m == 0 or n == 0:
        return out
    if k == 0:
        return out.zero_()
    a = library.readable(a)
    if b.stride(0) == 1 and not (b.stride(1) == 1 and n == 1):
        b, layout = library.readable(b.t()).t(), "TN"
    else:
        b, layout = library.readable(b), "NN"
    shape, params = {"m": m, "n": n, "k": k}, {"layout": layout, "accumulate": "float32"}
    library.call("hgemm", (out, a, b), a.dtype, shape, params, LEAST, alpha=1.0, beta=0.0)
    return out


def _fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _check(a, b)
    return a.new_empty(a.shape[0], b.shape[1])


_hgemm_op = library.define("hgemm(Tensor a, Tensor b) -> Tensor", _multiply, _fake)


def _check(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"minfer.matmul takes (M, K) and (K, N), got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype != b.dtype or a.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"minfer.matmul takes float16 or bfloat16 for both operands, got {a.dtype} and {b.dtype}")
    if a.device != b.device:
        raise ValueError(f"minfer.matmul takes operands on one device, got {a.device} and {b.device}")
