"""`matmul`: the kernels of hgemm as one function of PyTorch, `torch.ops.minfer.hgemm`."""

from __future__ import annotations

import torch

from minfer.functional import library
from minfer.functional.preferred import SHORT

# Not taken for fewer columns than any that were measured: there its N-slices leave SMs idle.
LEAST = {"v17_one_wave": "n"}


@library.public
def matmul(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The product, (M, N), of a (M, K) and b (K, N), both float16 or both bfloat16, on one device; sums are fp32.

    `best` picks the kernel, which is compiled at its first call; with MINFER_EXPLAIN=1 each choice is printed to stderr
    once. `weight.t()` of an `nn.Linear` is a b that is read in place. An operand whose rows (in TN: columns of b) do
    not start at multiples of 16 bytes is copied first, and on Hopper also a row-major b of at least 512 x 512 whose N is no
    multiple of 8, each time. With `out` the product is written to `out`, which is returned;
    if `out` is not contiguous, or shares memory with an operand, the product is computed elsewhere and copied to it.
    Works under `torch.compile`. It has no backward: raises RuntimeError where one would be recorded. Raises ValueError
    for operands that do not fit each other."""
    library.refuse_gradients("matmul", a, b, out)
    if out is None:
        return _hgemm_op(a, b)
    _hgemm_out_op(a, b, out)
    return out


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = _fake(a, b)
    _write(a, b, out)
    return out


def _multiply_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    _fake_into(a, b, out)
    if library.is_writable(out, a, b):
        _write(a, b, out)
    else:
        out.copy_(_multiply(a, b))


def _write(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    (m, k), n = a.shape, b.shape[1]
    if m == 0 or n == 0:
        return
    if k == 0:
        out.zero_()
        return
    a = library.readable(a)
    if b.stride(0) == 1 and not (b.stride(1) == 1 and n == 1):
        b, layout = library.readable(b.t()).t(), "TN"
    else:
        b, layout = library.readable(b), "NN"
        if n % 8 and k % 8 == 0 and min(n, k) >= SHORT and library.capability_of(a) == (9, 0):
            b = _padded(b)
    shape, params = {"m": m, "n": n, "k": k}, {"layout": layout, "accumulate": "float32"}
    library.call("hgemm", (out, a, b), a.dtype, shape, params, LEAST, alpha=1.0, beta=0.0)


def _padded(b: torch.Tensor) -> torch.Tensor:
    """A copy of b, (K, N), whose rows start at multiples of 16 bytes: only such rows can be copied by TMA. Copying takes less
    time than ordinary loads add to the product."""
    k, n = b.shape
    return b.new_empty(k, -(-n // 8) * 8)[:, :n].copy_(b)


def _fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _check(a, b)
    return a.new_empty(a.shape[0], b.shape[1])


def _fake_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    _check(a, b)
    library.check_out("matmul", out, (a.shape[0], b.shape[1]), a)


_hgemm_op = library.define("hgemm(Tensor a, Tensor b) -> Tensor", _multiply, _fake)
_hgemm_out_op = library.define("hgemm_out(Tensor a, Tensor b, Tensor(a!) out) -> ()", _multiply_into, _fake_into)


def _check(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"minfer.matmul takes (M, K) and (K, N), got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype != b.dtype or a.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"minfer.matmul takes float16 or bfloat16 for both operands, got {a.dtype} and {b.dtype}")
    if a.device != b.device:
        raise ValueError(f"minfer.matmul takes operands on one device, got {a.device} and {b.device}")
