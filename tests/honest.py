"""A kernel that is right, and how one is checked: for the tests of verification. All on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minfer import ops
from minfer.bench.errors import Errors, compare_output, describe_wrong, run_reference
from minfer.bench.verify import Function, WrongResult, verify
from minfer.ops import Case, Kernel, Op, Tensors

CPU = torch.device("cpu")
HGEMM = ops.get("hgemm")
ANY = Kernel("hgemm", "honest", "torch", Path("test"))
SQUARE = {"m": 24, "n": 24, "k": 64}

both_dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
both_layouts = pytest.mark.parametrize("layout", ["TN", "NN"])


def check(
    function: Function, dtype: str = "float16", layout: str = "TN", kernel: Kernel = ANY, seed: int = 0,
    accumulate: str = "float32", **shape: int,
) -> Errors:  # fmt: skip
    params = {"layout": layout, "accumulate": accumulate}
    case = HGEMM.case("honest", dtype, SQUARE | shape, params)
    return verify(HGEMM, case, kernel, function, CPU, None, seed)


def fails(function: Function, dtype: str = "float16", layout: str = "TN", k: int = 64) -> WrongResult:
    """How a wrong kernel is reported."""
    with pytest.raises(WrongResult) as caught:
        check(function, dtype, layout, k=k)
    message = str(caught.value)
    assert "\n" not in message and "seed" in message and "m=" in message  # enough to repeat it
    return caught.value


def check_right(op: Op, case: Case, inputs: Tensors, results: Tensors) -> None:
    """Fails with a sentence on what is wrong, where results are not right by the reference; `inputs` are as they were before
    the call."""
    expected, tensors = run_reference(op, case, inputs), {**inputs, **results}
    for name in results:
        if not compare_output(op, case, name, tensors, expected).over <= 1:
            pytest.fail(f"{case.key}: output {name}: {describe_wrong(op, case, name, tensors, expected)}")


Tensor = torch.Tensor


def honest(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
    """Accumulates in float32, rounds once."""
    product = alpha * (a.float() @ b.float())
    out.copy_(product + beta * out.float() if beta else product)


def after(change: Function) -> Function:
    """The honest kernel, and then something done to its output."""

    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        honest(out, a, b, alpha, beta)
        change(out)

    return kernel
