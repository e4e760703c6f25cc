"""The bench on a CPU: the same rounds, statistics and verdicts as on a GPU. No test knows how fast this machine is."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from minfer import build, ops
from minfer.bench.clock import CpuClock
from minfer.bench.device import cache_bytes
from minfer.bench.integrity import Dishonest
from minfer.bench.measure import LEAST_CHECKED, MOST_ROTATIONS, Bench, rotations
from minfer.bench.operands import Operands
from minfer.bench.stats import compare, compare_blocks
from minfer.bench.timed_results import TimedResults, Tolerance
from minfer.bench.timing import Timing
from minfer.ops.hgemm import torch_matmul

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")
HGEMM = ops.get("hgemm")
TIMING = Timing(name="test", looks=[40, 80, 160, 320], precision=0.02, cold_cap_s=4, steady_block_s=0.2)


def slowed(factor: float) -> Any:
    """The baseline, and then waiting until the call has taken so many times as long as it would have."""

    def kernel(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float, beta: float) -> None:
        begin = time.perf_counter()
        torch_matmul(out, a, b, alpha, beta)
        end = begin + factor * (time.perf_counter() - begin)
        while time.perf_counter() < end:
            pass

    return kernel


def bench(kernel: Any, sets: int = 0) -> Bench:
    """With as many sets of operands as steady calls need, which takes a third of a second, or for cold calls with one."""
    case = HGEMM.case("torch", "bfloat16", {"m": 128, "n": 128, "k": 128})
    made = Bench(HGEMM, case, kernel, torch_matmul, CPU, seed=1, sets=sets)
    made.warm_up(0.05)
    return made


def test_what_a_timed_call_changes_in_any_set_is_found() -> None:
    made = bench(torch_matmul)
    made.check_operands()
    last = made.sets[-1]
    last.tensors["b"][0, 0] += 1
    with pytest.raises(Dishonest, match="changed its input b while it was timed"):
        made.check_operands()
    last.tensors["b"].copy_(made.kept[-1]["b"])
    last._guards[-1][0] = 0
    with pytest.raises(Dishonest, match="wrote outside its output while it was timed"):
        made.check_operands()


def test_a_function_that_returns_a_result_and_changes_an_operand_is_right_in_steady_calls() -> None:
    op = ops.get("add_rmsnorm_quant")
    case = op.case("torch", "bfloat16", {"tokens": 5, "hidden": 64}, {"to": "int8", "residual": "added"})
    function = build.function(op.kernels["torch"], "")
    made = Bench(op, case, function, function, CPU, seed=1, sets=4)
    made.block(0, 0.01)
    made._check_steady(math.inf)  # whatever the time of a call


@pytest.mark.timing
def test_the_baseline_against_itself_is_a_tie() -> None:
    comparisons = [compare(*bench(torch_matmul, sets=1).cold(replace(TIMING, cold_cap_s=2)).T) for _ in range(3)]
    assert sum(comparison.verdict != "tie" for comparison in comparisons) <= 1
    assert all(comparison.low < 1.03 and comparison.high > 0.97 for comparison in comparisons)


@pytest.mark.timing
def test_a_kernel_slowed_by_a_fifth_is_found_and_by_how_much() -> None:
    comparison = compare(*bench(slowed(1.2), sets=1).cold(TIMING).T)
    assert comparison.verdict == "slower"
    assert comparison.speedup == pytest.approx(1 / 1.2, rel=0.1)


@pytest.mark.slow
@pytest.mark.timing
def test_a_kernel_is_faster_than_a_slowed_baseline() -> None:
    made = bench(torch_matmul, sets=1)
    made.candidates[1:] = [lambda index: slowed(1.5)(*made.sets[index].arguments, 1.0, 0.0)] * 2
    assert compare(*made.cold(TIMING).T).verdict == "faster"


@pytest.mark.timing
def test_steady_finds_the_same() -> None:
    blocks = bench(slowed(3)).steady(TIMING, lambda: None)
    comparison = compare_blocks([float(np.median(block)) for block in blocks])
    assert comparison.speedup == pytest.approx(1 / 3, rel=0.4)
    assert comparison.low <= comparison.speedup <= comparison.high


def test_rounds_stop_at_a_look_or_at_the_cap() -> None:
    loose = Timing(looks=[7, 14], precision=1e9, cold_cap_s=60)
    assert bench(torch_matmul, sets=1).cold(loose).shape == (7, 3)
    strict = Timing(looks=[7, 14], precision=1e-9, cold_cap_s=60)
    assert bench(torch_matmul, sets=1).cold(strict).shape == (14, 3)
    short = Timing(looks=[1000], precision=1e-9, cold_cap_s=0, least_rounds=3)
    assert 3 <= len(bench(torch_matmul, sets=1).cold(short)) < 1000


@pytest.mark.parametrize("size", [32, 64, 512, 4096])
def test_a_round_of_operands_is_twice_the_cache(size: int) -> None:
    case = HGEMM.case("torch", "float16", {"m": size, "n": size, "k": size})
    sets = rotations(HGEMM, case, CPU)
    assert sets == MOST_ROTATIONS[CPU.type] or (sets - 1) * HGEMM.operand_bytes(case) >= 2 * cache_bytes(CPU)
    assert sets >= 2 or HGEMM.operand_bytes(case) >= 2 * cache_bytes(CPU)


@pytest.mark.timing
def test_beyond_the_first_look_the_cap_holds_where_flushes_take_longer_than_calls(monkeypatch) -> None:
    made = bench(torch_matmul, sets=1)
    monkeypatch.setattr(made.clock, "flush", lambda: time.sleep(0.05))
    assert len(made.cold(Timing(looks=[4, 1000], precision=1e-9, cold_cap_s=1.0, least_rounds=3))) in range(4, 8)


@pytest.mark.timing
def test_times_are_of_the_candidate_that_took_them() -> None:
    order = np.array([[0, 1, 2], [2, 1, 0], [1, 2, 0]])
    candidates = [lambda index, s=seconds: time.sleep(s) for seconds in (0.0, 0.02, 0.05)]
    times = CpuClock(CPU).cold(candidates, order, bench(torch_matmul, sets=1))
    assert times.shape == order.shape
    assert (times[:, 0] < 0.02).all() and (times[:, 1] >= 0.02).all() and (times[:, 2] >= 0.05).all()


def test_every_timed_call_is_compared() -> None:
    calls = []

    def lazy_once(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float, beta: float) -> None:
        calls.append(1)
        if len(calls) != 30:
            torch_matmul(out, a, b, alpha, beta)

    with pytest.raises(Dishonest, match="a timed call returned a wrong result"):
        made = bench(torch_matmul, sets=1)
        made.candidates[0] = lambda index: lazy_once(*made.sets[index].arguments, 1.0, 0.0)
        made.cold(replace(TIMING, cold_cap_s=60))


BRIEF = replace(TIMING, steady_block_s=0.05)


@pytest.mark.timing
def test_slow_calls_are_checked_on_more_sets_than_they_used() -> None:
    """Ten calls fit a block; going through all sets would take seconds."""

    def slow(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float, beta: float) -> None:
        time.sleep(0.005)
        torch_matmul(out, a, b, alpha, beta)

    made = bench(slow)
    made.steady(BRIEF, lambda: None)
    assert made.rotations > 100 and made.reached == LEAST_CHECKED


@pytest.mark.timing
def test_a_kernel_that_remembers_the_sets_that_it_used_is_found() -> None:
    known: dict[int, torch.Tensor] = {}

    def remembers(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float, beta: float) -> None:
        if a.data_ptr() not in known:
            time.sleep(0.005)
            torch_matmul(out, a, b, alpha, beta)
            known[a.data_ptr()] = out.clone()
        out.copy_(known[a.data_ptr()])

    with pytest.raises(Dishonest, match="a steady call returned a wrong result"):
        bench(remembers).steady(BRIEF, lambda: None)


def test_equal_infinities_do_not_differ() -> None:
    """As a log-sum-exp over no keys."""
    op = ops.get("merge_state")
    case = op.case("torch", "float32", {"batch": 1, "seq": 4, "heads": 1, "head_dim": 8})
    tolerance = Tolerance(op, case, {"lse": torch.full((1, 1, 4), 1e-3)})
    mine, other = torch.tensor([[[-math.inf, 1.0, 2.0, -math.inf]]]), torch.tensor([[[-math.inf, 1.0, 2.0, -math.inf]]])
    assert tolerance.loosely({"lse": mine}, {"lse": other}, {})
    for value in (0.0, math.inf, math.nan):
        other[0, 0, 3] = value
        assert not tolerance.loosely({"lse": mine}, {"lse": other}, {})


def test_a_suspect_result_in_fp32_is_decided_by_the_reference_as_it_was() -> None:
    """A changed input moves the bound of softmax by orders of magnitude, so that right results are suspect now and then."""
    op = ops.get("softmax")
    case = op.case("torch", "float32", {"rows": 4, "n": 64})
    operands = Operands(op, case, 3, "normal", torch.device("cpu"))
    tolerance = Tolerance(op, case, {"y": torch.full((4, 64), -1.0)})  # all is suspect
    results = TimedResults(tolerance, operands.named("out"), lambda number: operands)
    right = {"y": torch.softmax(operands.tensors["x"], 1)}
    kept = right["y"].clone()
    results.compare(1, right, {"y": kept + 1}, operands.named("in"))
    assert torch.equal(right["y"], kept) and int(results._suspect) == 1
    assert not results.wrong()
    results.compare(2, {"y": kept + 0.01}, {"y": kept}, operands.named("in"))
    assert results.wrong()
