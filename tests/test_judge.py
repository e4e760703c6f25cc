"""What the judge makes of a kernel's own claims, by what it measured from outside."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minfer.worker import judge

CLAIMS = {"cold_us": 17.0, "cold_speedup": 40.0, "steady_us": 17.0, "steady_speedup": 40.0}


def race(kernel_us: float, *baseline_us: float, waited: float = 0.0, device: str = "cpu") -> SimpleNamespace:
    """Blocks of one kernel and of a baseline whose times go round."""
    made = SimpleNamespace(device=torch.device(device), kernel=object(), baseline=object(), blocks=0)

    def block(remote: object) -> tuple[float, float]:
        if remote is made.kernel:
            return kernel_us * 1e-6, waited
        made.blocks += 1
        return baseline_us[made.blocks % len(baseline_us)] * 1e-6, 0.0

    made.block = block
    made.cold_baseline = lambda: 0.0
    return made


def test_claims_that_the_clock_outside_confirms_are_believed_at_once():
    made = race(17.0, 680.0)
    row = judge._compare(made, CLAIMS)
    assert row["guarantee"] == "judged" and made.blocks == judge.BLOCKS
    assert (row["judged_us"], row["judged_baseline_us"]) == pytest.approx((17.0, 680.0))


@pytest.mark.parametrize(
    "kernel_us, baseline_us, said", [(17.0, 34.0, "times as fast"), (340.0, 13600.0, "us by the clock outside")]
)
def test_claims_that_it_never_sees_are_not(kernel_us, baseline_us, said):
    row = judge._compare(race(kernel_us, baseline_us), CLAIMS)
    assert row["status"] == "dishonest" and said in row["message"]


@pytest.mark.parametrize("device, accused", [("cpu", False), ("cuda", True)])
def test_a_baseline_that_a_busy_processor_holds_up_accuses_nobody(device, accused):
    made = race(0.0, 34.0, 700.0, device=device)
    baseline, mine = made.block, iter([30.0, 18.0] * judge.MOST_BLOCKS)  # at its best where the baseline is, too
    made.block = lambda remote: (next(mine) * 1e-6, 0.0) if remote is made.kernel else baseline(remote)
    assert (judge._compare(made, CLAIMS).get("status") == "dishonest") == accused


@pytest.mark.parametrize("cold_us, accused", [(700.0, False), (200.0, True)])
def test_a_baseline_that_is_slow_only_when_cold_accuses_nobody(cold_us, accused):
    made = race(17.0, 17.0 * 3)
    made.cold_baseline = lambda: cold_us * 1e-6
    row = judge._compare(made, CLAIMS | {"steady_speedup": 3.0})
    assert (row.get("status") == "dishonest") == accused


def test_nobody_is_accused_where_the_kernel_never_had_a_cpu_to_itself():
    row = judge._compare(race(340.0, 340.0, waited=0.5), CLAIMS)
    assert row["status"] == "error"
