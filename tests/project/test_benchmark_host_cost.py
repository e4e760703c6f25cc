"""benchmarks/host_cost.py calls every function, and says for each how its cost compares with that of torch.mm."""

from __future__ import annotations

import pytest
import torch

from benchmarks import host_cost
from tests.functional.calls import FUNCTIONS

CPU = torch.device("cpu")


def test_every_function_is_called() -> None:
    assert {function for function, _ in host_cost.cases(CPU).values()} == set(FUNCTIONS)


@pytest.mark.slow  # kernels are loaded
def test_a_row_has_the_cost_and_that_of_a_product() -> None:
    chosen = {name: host_cost.cases(CPU)[name] for name in ("rms_norm, residual", "rope")}
    norm, rope = host_cost.measure(chosen, CPU, rounds=2)
    assert (norm["case"], norm["function"], norm["tensors"], norm["goal"]) == ("rms_norm, residual", "rms_norm", 3, 1.3)
    assert (rope["tensors"], rope["goal"]) == (5, 2.0)
    for row in (norm, rope):
        assert (
            0 < row["host_us_least"] <= row["host_us"] and 0 < row["mm_us_least"] <= row["mm_us"] and row["ratio"] > 0
        )
    with pytest.raises(SystemExit, match="has no matmull; it has attention"):
        host_cost.main(["--device", "cpu", "--only", "matmull"])
