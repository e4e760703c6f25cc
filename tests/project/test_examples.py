"""The examples that are kernels give right results."""

from __future__ import annotations

import torch

from minfer import build, ops
from minfer.bench.verify import verify
from tests.conftest import ROOT


def test_the_kernel_of_the_example_is_right() -> None:
    op = ops.get("rmsnorm")
    before = dict(op.kernels)
    try:
        ops.load_file(ROOT / "examples" / "time_my_kernel.py")
        case = op.case("mine", "bfloat16", {"tokens": 3, "hidden": 64})
        kernel = op.kernels["mine"]
        assert verify(op, case, kernel, build.function(kernel), torch.device("cpu"), None, seed=1).tried > 2
    finally:
        op.kernels.clear()
        op.kernels.update(before)
        ops.load_file.cache_clear()
