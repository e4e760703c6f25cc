"""What the judge's samples come to, and which times inside of a kernel's process they contradict."""

from __future__ import annotations

from typing import Any

import pytest

from minfer import ops
from minfer.bench import judged
from minfer.bench.judged import ATTEMPTS, BELIEVED, FASTER, HELD_UP, LINK_VARIES, LONGER, WIDE, Contradiction, Samples

CASE = ops.get("hgemm").case("torch", "float16", {"m": 64, "n": 64, "k": 64})
US = 1e-6
HONEST = {"cold_us": 40.0, "cold_baseline_us": 80.0, "steady_us": 17.0, "steady_baseline_us": 35.0}


def samples(**changes: list[float]) -> Samples:
    """Of an honest kernel on a quiet machine, in us, but for the changes."""
    usual = {
        "kernel": [17.0] * 4,
        "work": [17.0] * 4,
        "main": [17.0] * 4,
        "own": [17.0] * 4,
        "cold_baseline": [80.0] * 30,
        "steady_baseline": [35.0] * 30,
    }
    usual |= {"baseline": [35.0] * 4, "duplicate": [35.0] * 4}
    lags = {"lag": changes.pop("lag", [1.1] * 4), "baseline_lag": [1.1, 1.3] * 4}
    lags |= {"calls": changes.pop("calls", [100.0, 100.0]), "waited": changes.pop("waited", [0.01])}
    return Samples.of({name: [value * US for value in values] for name, values in (usual | changes).items()} | lags)


def test_the_times_outside_are_the_result() -> None:
    measured = samples(kernel=[17.0, 18.0, 17.0, 40.0], baseline=[35.0, 36.0, 35.0, 80.0])
    found = judged.columns(CASE, HONEST | {"status": "ok"}, measured, "cpu")
    assert found["judged_us"] == pytest.approx(17.5) and found["judged_speedup"] == pytest.approx(2.0, rel=0.05)
    assert len(found["judged_samples_us"]) == len(found["judged_baseline_samples_us"]) == 4
    assert found["judged_verdict"] in ("faster", "tie", "slower") and found["status"] == "ok"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_cold_time_is_not_held_against_warm_blocks(device: str) -> None:
    """oneDNN's cold time is two to three times its warm one: the baseline's cold time is compared with cold times."""
    assert judged.contradiction(HONEST, samples(), device) is None
    alone = judged.contradiction(HONEST, samples(cold_baseline=[30.0] * 30), device)
    assert alone is not None and alone.proven and "the baseline takes 80 us (cold)" in alone.words


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        (
            {"cold_us": 4.0},
            "takes 4 us (cold) by the clock inside of its process, but at least 17 us in the judge's blocks",
        ),
        (
            {"steady_us": 4.0},
            "takes 4 us (steady) by the clock inside of its process, but at least 17 us in the judge's blocks",
        ),
        ({"steady_baseline_us": 350.0}, "the baseline takes 350 us (steady) inside of the kernel's process"),
        ({"cold_baseline_us": 800.0}, "the baseline takes 800 us (cold) inside of the kernel's process"),
    ],
)
def test_what_flatters_the_kernel_is_contradicted(claims: dict[str, float], words: str) -> None:
    found = judged.contradiction(HONEST | claims, samples(), "cpu")
    assert found is not None and found.proven and words in found.words
    told = judged.verdict([found] * ATTEMPTS)
    assert told["status"] == "dishonest" and words in told["message"]


@pytest.mark.parametrize("claims", [{"cold_us": 400.0}, {"steady_us": 400.0}, {"cold_baseline_us": 8.0}])
def test_what_does_not_flatter_it_is_not(claims: dict[str, float]) -> None:
    assert judged.contradiction(HONEST | claims, samples(), "cpu") is None


def test_waiting_for_a_cpu_accuses_nobody() -> None:
    waited = samples(kernel=[170.0] * 4)  # of which it worked 17
    assert judged.contradiction(HONEST, waited, "cpu") is None
    assert judged.contradiction(HONEST, waited, "cuda") is not None  # a GPU's work is no CPU time


def told(claims: dict[str, float], measured: Samples, device: str, **row: str) -> str | None:
    """The message of a row with these hints, which is unconverged if it has one, and `ok` otherwise."""
    found = judged.columns(CASE, claims | {"status": "ok"} | row, measured, device)
    assert found["status"] == ("unconverged" if found["message"] else "ok")
    message: str | None = found["message"]
    return message


def test_a_row_whose_judged_time_contains_waiting_is_not_ok() -> None:
    waited = samples(kernel=[170.0] * 4)
    assert told(HONEST, waited, "cpu") == LONGER.format(170.0, 27.2)
    noisy = told(HONEST, waited, "cpu", status="unconverged", message="after 30 rounds")
    assert noisy == LONGER.format(170.0, 27.2)


@pytest.mark.parametrize(("device", "most"), [("cpu", 1.6), ("cuda", 1.25)])
def test_the_judges_interval_decides_and_not_that_of_the_hints(device: str, most: float) -> None:
    def message(factor: float, **row: str) -> str | None:
        """Of a kernel whose four blocks differ by this factor up and down."""
        blocks = [17.0 / factor, 17.0, 17.0, 17.0 * factor]
        return told(HONEST, samples(kernel=blocks, work=blocks), device, **row)

    wide = {"status": "unconverged", "message": "after 30 rounds the ratio is known to ±18.07%"}
    assert message(most - 0.01) is None and message(most - 0.01, **wide) is None
    assert message(most + 0.01) == WIDE.format(most + 0.01, 4, most) == message(most + 0.01, **wide)


def test_a_row_that_was_not_measured_stays_what_it_is() -> None:
    assert "status" not in judged.columns(CASE, HONEST | {"status": "impossible"}, samples(), "cpu")


def test_on_a_gpu_a_block_may_be_longer_than_the_hints_by_as_much_as_the_baselines() -> None:
    """Blocks of rmsnorm and softmax took 1.26 to 1.37 times the smaller hint on an H100, and the baseline's were longer too."""
    claims = {"cold_us": 30.0, "cold_baseline_us": 30.0, "steady_us": 31.0, "steady_baseline_us": 31.0}

    def message(block: float, of_baseline: float = 40.0, cold: float = 30.0, steady: float = 31.0) -> str | None:
        times = {"kernel": [block] * 4, "work": [block] * 4}
        times |= {"baseline": [of_baseline] * 4, "duplicate": [of_baseline] * 4}
        return told(claims, samples(**times, cold_baseline=[cold] * 30, steady_baseline=[steady] * 30), "cuda")

    assert message(40.0) is None
    assert message(48.0) == LONGER.format(48, 1.25 * 1.25 * 30)  # at most 1.25 twice
    assert message(40.0, of_baseline=31.0) == LONGER.format(40, 1.25 * 31)  # if it is as long as its own times
    assert message(45.0, of_baseline=35.2) == LONGER.format(45, 1.25 * 35.2)
    assert message(45.0, steady=80.0) == LONGER.format(45, 1.25 * 31)  # a baseline's long time takes nothing off
    assert message(45.0, cold=80.0) == LONGER.format(45, 1.25 * 30)


def test_on_a_cpu_it_may_not() -> None:
    measured = samples(kernel=[28.0] * 4, baseline=[70.0] * 4, duplicate=[70.0] * 4)
    assert told(HONEST, measured, "cpu") == LONGER.format(28, 1.6 * 17)


def test_a_row_whose_baseline_was_held_up_is_not_ok() -> None:
    """Of 146 honest rows on an H100, one that was `ok` had 1.9 times the speed-up of its steady times."""
    held_up = samples(baseline=[60.0] * 4, duplicate=[60.0] * 4)
    assert told(HONEST, held_up, "cuda") == FASTER.format(60 / 17, 1.25 * 35 / 17)
    cold_only = {name: us for name, us in HONEST.items() if name.startswith("cold")}
    assert told(cold_only, held_up, "cuda") == FASTER.format(60 / 17, 1.25 * 2)
    assert told(cold_only, held_up, "cpu") is None  # where a cold call may take three times as long as one in a block
    slower = samples(baseline=[40.0] * 4, duplicate=[40.0] * 4)
    assert told(HONEST, slower, "cuda") is None
    found = judged.columns(CASE, HONEST | {"status": "ok"}, slower, "cuda")
    assert found["judged_speedup"] == pytest.approx(2.35, rel=0.01)


def test_on_a_cpu_the_baseline_may_not_be_slower_beside_the_kernel_than_before() -> None:
    """The intervals of both medians decide, so noise of a busy machine accuses nobody; the times inside decide nothing."""
    alone = {"before": [35.0, 36.0, 34.0, 50.0] * 2}
    beside = lambda us: {"baseline": [us, us + 1, us + 2, us + 3], "duplicate": [us] * 4}
    assert told(HONEST, samples(**alone, **beside(79.0)), "cpu") is None
    assert told(HONEST, samples(**alone, **beside(81.0)), "cpu") == HELD_UP.format(81 / 50)
    noisy = {"baseline": [35.0, 36.0, 37.0, 36.0], "duplicate": [900.0, 36.0, 800.0, 700.0]}
    assert told(HONEST, samples(**alone, **noisy), "cpu") is None
    # A block begins with waking the baseline's threads: 17 us a call in steady timing, 120 us in short blocks.
    woken = {"before": [120.0] * 8, "baseline": [125.0] * 4, "duplicate": [118.0] * 4}
    short = HONEST | {"cold_baseline_us": 60.0, "steady_us": 13.0, "steady_baseline_us": 17.0}
    assert told(short, samples(**woken), "cpu") is None
    assert told(short, samples(), "cpu") is None  # samples of a judge that took none before


def test_on_a_gpu_the_whole_interval_must_be_higher_than_the_hints() -> None:
    """With four rounds an interval is the range of the ratios."""
    once = samples(baseline=[60.0, 60.0, 60.0, 40.0], duplicate=[60.0] * 4)
    assert told(HONEST, once, "cuda") != FASTER.format(60 / 17, 1.25 * 35 / 17)


def test_a_kernel_is_compared_with_another_one_in_the_same_rounds() -> None:
    """Round by round: the times of both vary by a factor of two, and their ratio does not."""
    drifting = [17.0, 20.0, 27.0, 34.0]
    measured = samples(kernel=drifting, work=drifting, beside=[2 * us for us in drifting])
    found = judged.columns(CASE, HONEST | {"status": "ok"}, measured, "cpu")["metrics"]
    assert [found[f"beside.speedup{end}"] for end in ("", "_low", "_high")] == pytest.approx([2.0] * 3)
    assert "metrics" not in judged.columns(CASE, HONEST | {"status": "ok"}, samples(), "cpu")
    with pytest.raises(ValueError, match="do not fit each other"):
        samples(beside=[17.0] * 3)


def test_a_clock_that_is_slower_than_the_one_outside_is_proven_on_a_busy_machine_too() -> None:
    busy = {"kernel": [170.0] * 4, "baseline": [35.0, 900.0] * 2, "duplicate": [35.0, 900.0] * 2}
    found = judged.contradiction(HONEST | {"cold_us": 400.0}, samples(**busy, lag=[9.0] * 4), "cpu")
    assert found is not None and found.proven and "by the clock inside of its process" in found.words
    assert judged.contradiction(HONEST, samples(**busy, lag=[9.0, 1.2, 9.0, 9.0]), "cpu") is None


def test_a_short_kernel_may_lose_in_a_block_what_the_baseline_loses() -> None:
    """Microseconds, as of a cold start, or a factor, as on a busy machine."""
    claims = HONEST | {"steady_us": 8.0}
    assert judged.contradiction(claims, samples(), "cpu") is not None
    cold = {"baseline": [36.0] * 4, "duplicate": [36.0] * 4}
    assert judged.contradiction(claims, samples(**cold, steady_baseline=[30.0]), "cpu") is None
    busy = {"baseline": [90.0] * 4, "duplicate": [90.0] * 4, "work": [40.0] * 4, "kernel": [40.0] * 4}
    assert judged.contradiction(HONEST, samples(**busy, steady_baseline=[30.0]), "cpu") is None
    found = judged.contradiction(HONEST, samples(**busy, steady_baseline=[90.0]), "cpu")
    assert found is not None and found.proven


def test_a_cold_call_may_leave_in_the_cache_what_a_block_writes_to_memory() -> None:
    """On an H100 honest kernels of rmsnorm and softmax were accused: 22 us cold, 29 us in a block."""
    claims = HONEST | {"cold_us": 12.0, "cold_baseline_us": 25.0}
    assert judged.contradiction(HONEST | {"cold_us": 12.0}, samples(), "cuda") is not None
    quick = samples(cold_baseline=[25.0] * 30)  # and 35 in a block
    assert judged.contradiction(claims, quick, "cuda") is None
    assert judged.contradiction(claims | {"cold_us": 10.0}, quick, "cuda") is not None  # a quarter is the most
    assert judged.contradiction(HONEST | {"cold_us": 17.5}, samples(), "cuda") is None  # however long the baseline's is
    small = samples(cold_baseline=[25.0] * 30, calls=[8.0, 4000.0])  # it is no cost of the block, which its calls share
    assert judged.contradiction(claims | {"cold_us": 10.0}, small, "cuda") is not None


def test_what_a_block_loses_is_shared_by_its_calls() -> None:
    """A kernel of 113 us was accused: its block had two calls, and the baseline's a hundred."""
    claims = HONEST | {"cold_us": 1000.0, "steady_us": 113.0}
    short = {"work": [1010.0] * 4, "kernel": [1010.0] * 4, "baseline": [53.0] * 4, "duplicate": [53.0] * 4}
    assert judged.contradiction(claims, samples(**short, calls=[2.0, 100.0]), "cpu") is None
    found = judged.contradiction(claims, samples(**short), "cpu")
    assert found is not None and found.proven


def test_a_baseline_that_a_busy_machine_slows_down_inside_accuses_nobody() -> None:
    """Beside two busy loops torch took 8000 us inside of the kernel's process and 580 us in blocks, whose threads wake on CPUs
    of their own. In the judge's process it takes as long as in the kernel's."""
    claims = HONEST | {"steady_baseline_us": 8000.0, "cold_baseline_us": 8000.0}
    for waited, proven in ((0.05, True), (0.9, False)):
        found = judged.contradiction(claims, samples(waited=[waited]), "cpu")
        assert found is not None and found.proven == proven and "the baseline takes 8000 us" in found.words
    both = judged.contradiction(claims | {"steady_us": 4.0, "cold_us": 4.0}, samples(waited=[0.9]), "cpu")
    assert both is not None and both.proven and "takes 4 us" in both.words  # a busy machine makes no kernel faster
    assert judged.contradiction(claims, samples(steady_baseline=[4000.0, 9000.0] * 20), "cpu") is None


def test_one_block_in_which_it_was_quick_is_enough() -> None:
    assert judged.contradiction(HONEST, samples(work=[90.0, 80.0, 17.0, 70.0]), "cpu") is None


def test_what_the_machine_does_to_the_baseline_too_accuses_nobody() -> None:
    noisy = samples(
        work=[100.0] * 4, kernel=[100.0] * 4, baseline=[35.0, 140.0, 35.0, 140.0], duplicate=[35.0, 140.0] * 2
    )
    found = judged.contradiction(HONEST, noisy, "cpu")
    assert found is not None and not found.proven
    told = judged.verdict([found] * ATTEMPTS)
    assert told["status"] == "error" and "could not be judged" in told["message"] and "run it again" in told["message"]


def test_one_attempt_that_the_noise_explains_clears_a_kernel() -> None:
    proven, explained = Contradiction("it lies", 9.0, 2.0), Contradiction("it was busy", 3.0, 4.0)
    assert judged.verdict([proven] * ATTEMPTS)["status"] == "dishonest"
    assert judged.verdict([proven, proven, explained, proven])["status"] == "error"


def test_a_row_that_is_believed_agrees_with_its_judged_time() -> None:
    """Whatever the claims: where nothing is contradicted, no time inside is shorter than the best outside by more than
    what is believed."""
    found = samples()
    for inside in (1.0, 5.0, 10.0, 11.0, 17.0, 30.0):
        if judged.contradiction(HONEST | {"cold_us": inside, "steady_us": inside}, found, "cpu") is None:
            assert min(found.kernel) / US / inside <= BELIEVED["cpu"]


@pytest.mark.parametrize(
    "broken",
    [
        {"kernel": []},
        {"kernel": [float("nan")]},
        {"kernel": [-1.0]},
        {"baseline": [[1.0]]},
        {"kernel": "four"},
        {"calls": [2.0]},
        {"calls": [0.0, 2.0]},
        {"waited": []},
    ],
)
def test_samples_that_no_clock_gives_are_refused(broken: dict[str, Any]) -> None:
    good = {
        "kernel": [1.0],
        "work": [1.0],
        "lag": [1.0],
        "baseline_lag": [1.0],
        "calls": [2.0, 2.0],
        "waited": [0.01],
        "baseline": [1.0],
        "duplicate": [1.0],
        "cold_baseline": [1.0],
        "steady_baseline": [1.0],
    }
    with pytest.raises((ValueError, TypeError)):
        Samples.of(good | broken)


def test_a_judged_time_below_the_floor_is_impossible() -> None:
    row = HONEST | {"status": "ok", "floor_us": 16.0}
    assert judged.columns(CASE, row, samples(), "cuda")["status"] == "ok"
    found = judged.columns(CASE, row | {"floor_us": 18.0}, samples(), "cuda")
    assert found["status"] == "impossible" and "judged time of 17 us is less than the 18 us" in found["message"]


LINKED = {"linked_baseline": [40.0] * 4, "baseline_work": [35.0] * 4, "linked": [22.0] * 4}  # a link takes 5 us


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_kernel_whose_calls_do_not_depend_on_each_other_is_contradicted(device: str) -> None:
    """17 us a call in a block, and 17 us after the 5 us of a link; then more, which only several calls at once explain."""
    assert judged.contradiction(HONEST, samples(**LINKED), device) is None
    slow = judged.contradiction(HONEST, samples(**LINKED | {"linked": [80.0, 90.0, 80.0, 80.0]}), device)
    assert slow is not None and slow.proven
    assert slow.words.startswith("takes 17 us a call in the judge's blocks, but 73.75 us where each call depends")
    assert slow.factor == pytest.approx((80 - 5 * LINK_VARIES) / 17)


def test_what_noise_explains_hides_nothing_that_is_proven() -> None:
    """Two clocks that differ by no more than the baseline's do, and calls that are computed at once."""
    linked = LINKED | {"linked": [80.0] * 4}
    doubt = judged.contradiction(HONEST, samples(**linked, lag=[1.3] * 4), "cuda")
    assert doubt is not None and doubt.proven and "where each call depends" in doubt.words
    doubt = judged.contradiction(HONEST, samples(**LINKED, lag=[1.3] * 4), "cuda")
    assert doubt is not None and not doubt.proven and "by the clock outside" in doubt.words


def test_a_link_may_take_as_long_as_the_baselines() -> None:
    """The link of a busy machine, by the baseline's quartiles, and one call in a block without a link."""
    busy = LINKED | {"linked_baseline": [35.0, 90.0, 90.0, 90.0], "linked": [72.0] * 4}
    assert judged.contradiction(HONEST, samples(**busy), "cpu") is None
    assert samples(**LINKED, calls=[2.0, 2.0]).linked_call() == pytest.approx((22 - 5 * LINK_VARIES) * US)
    assert samples(**LINKED, calls=[2.0, 100.0]).linked_call() == pytest.approx((22 - LINK_VARIES * 5 / 0.99 / 2) * US)
    assert samples().linked_call() is None


def test_linked_samples_come_together() -> None:
    with pytest.raises(ValueError, match="not a time"):
        samples(**{name: values for name, values in LINKED.items() if name != "baseline_work"})
