"""The cold times of the benchmarks that choose among kernels."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks import cold

SLEEP = 1e-3  # seconds


@pytest.mark.gpu
def test_a_cold_time_leaves_out_the_host() -> None:
    x, flushed = torch.zeros(1, device="cuda"), cold.to_flush(torch.device("cuda"))

    def after_a_sleep() -> None:
        time.sleep(SLEEP)
        x.zero_()

    times = cold.medians({"late": after_a_sleep, "early": x.zero_}, flushed, 3)
    assert times["late"] < SLEEP * 1e6 / 2
    assert times["early"] < SLEEP * 1e6 / 2


@pytest.mark.gpu
def test_a_call_that_waits_for_the_gpu_ends_the_program() -> None:
    with pytest.raises(SystemExit, match="the host is still in waits"):
        cold.medians({"waits": torch.cuda.synchronize}, cold.to_flush(torch.device("cuda")), 1)
