"""`matmul`: the kernels of hgemm as one function of PyTorch, `torch.ops.minfer.hgemm`."""

from __future__ import annotations

import torch

from minfer.functional import library
from minfer.functional.contract import Contract

TAKES = Contract(
    "matmul",
    """
    a: float16 | bfloat16 (m, k)
    b: a (k, n)
    -> a (m, n)
    """,
)


@library.public
def matmul(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The product, (M, N), of a (M, K) and b (K, N), both float16 or both bfloat16, on one device; sums are fp32.

    `best` picks the kernel, which is compiled at its first call; with MINFER_EXPLAIN=1 each choice is printed to stderr
    once. `weight.t()` of an `nn.Linear` is a b that is read in place. If rows (in TN: columns of b) have a multiple of 8
    elements but do not start at multiples of 16 bytes, each call first copies the operand. If their length is no multiple
    of 8, it depends on the kernel: v18_fitted copies the operand, v20_any_columns and v22_any_size read it in place.
    With `out` the product is written to `out`, which is returned; if `out` is not contiguous, or shares memory with an
    operand, the product is computed elsewhere and copied to it.
    Works under `torch.compile`. It has no backward: raises RuntimeError where one would be recorded. Raises ValueError
    for operands that do not fit each other."""
    library.refuse_gradients("matmul", a, b, out)
    if out is None:
        return _hgemm_op(a, b)
    _hgemm_out_op(a, b, out)
    return out


def _multiply(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    (m, k), n = a.shape, b.shape[1]
    if m == 0 or n == 0:
        return
    if k == 0:
        out.zero_()
        return
    layout, (b,) = library.readable_weights(b)
    shape, params = {"m": m, "n": n, "k": k}, {"layout": layout, "accumulate": "float32"}
    library.call("hgemm", (out, library.readable(a), b), a.dtype, shape, params, alpha=1.0, beta=0.0)


_hgemm_op, _hgemm_out_op = library.define_with_out("hgemm(Tensor a, Tensor b) -> Tensor", _multiply, lambda *_: TAKES)
