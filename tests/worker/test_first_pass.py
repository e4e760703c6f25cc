"""The first pass over a shard: cold times of a whole ladder before anything is timed in full."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minfer import ops
from minfer.bench.timing import BRIEF_ROUNDS, Timing
from minfer.build.cache import Built
from minfer.ops import Case
from minfer.plan.order import LONG_S, find_first_pass
from minfer.plan.shard import Shard
from minfer.process.stopping import Stopping
from minfer.rows import store
from minfer.rows.store import Row
from minfer.rows.writer import Writer
from minfer.worker.case_runner import CaseRunner
from minfer.worker.compiler import Builds
from minfer.worker.resume import find_written
from minfer.worker.supervisor import Machine
from tests.conftest import FAST

HGEMM = ops.get("hgemm")
# Seconds of a call on an H100 at 8192³ in fp16; the other rungs take a few milliseconds.
CALL_S = {"v01_naive": 2.196, "v02_tiled": 0.174, "v02a_column": 2.146, "v02b_padded": 0.140, "v02c_swizzled": 0.223}
SLOWEST = ("v01_naive", "v02a_column", "v02c_swizzled")  # above SLOW_S of minfer.bench.verify
BACKENDS = ("torch", "cuda", "triton")
LADDER = [name for name, of in HGEMM.kernels.items() if of.backend in BACKENDS and not name.endswith("acc16")]
CASES = [HGEMM.case(name, "float16", dict.fromkeys("mnk", 8192)) for name in LADDER]
CASES += [HGEMM.case(name, "float16", dict.fromkeys("mnk", 512)) for name in LADDER[:3]]


class Line:
    """A supervisor with a clock that only it moves: each case takes the seconds that it took on an H100."""

    def __init__(self) -> None:
        self.now, self.peaks = 0.0, None
        self.ran: list[tuple[str, int, str, float]] = []  # kernel, size, timing, when it had ended

    def check_log(self) -> None: ...

    def take(self, builds: dict[str, Built | str]) -> None: ...

    def run(self, case: Case, built: Built | str | None, timing: Timing) -> Row:
        call = CALL_S.get(case.kernel, 0.002) if case["m"] == 8192 else 1e-5
        is_slow = case.kernel in SLOWEST and case["m"] == 8192
        if is_slow:
            self.now += (5 + BRIEF_ROUNDS) * call
        else:
            self.now += 15 * call + max(5 * call, min(timing.cold_cap_s, 60 * call)) + timing.steady_s
        self.ran.append((case.kernel, case["m"], timing.name, self.now))
        flags = store.SLOW if is_slow else ""
        return {
            "status": "ok",
            "cold_us": call * 1e6,
            "flags": flags,
            "steady_us": None if is_slow or not timing.block_s else 1.0,
        }


def built(names: list[str]) -> dict[tuple[str, str], Future[Built | str]]:
    """Builds that have ended."""
    jobs: dict[tuple[str, str], Future[Built | str]] = {}
    for name in names:
        jobs["hgemm", name] = Future()
        jobs["hgemm", name].set_result("not loaded here")
    return jobs


def runner(tmp_path: Path, jobs: dict[Any, Any], stopping: Stopping | None = None) -> tuple[CaseRunner, Line]:
    shard = Shard("0000", "run", str(tmp_path / "run"), str(tmp_path / "results"), "cuda", CASES, Timing(), 60.0, 60.0)
    line = Line()
    tell = lambda **event: None
    builds = Builds(SimpleNamespace(tell=tell), jobs, None, [])  # type: ignore[arg-type]
    writer, claim = (
        Writer(tmp_path / "results" / "gpu" / "run", "0000"),
        SimpleNamespace(skew_s=0.0, check=lambda: None),
    )
    machine = Machine({"device": "a GPU"}, (9, 0), None)
    return CaseRunner(shard, machine, line, builds, writer, claim, stopping or Stopping(), tell), line  # type: ignore[arg-type]


def rows(tmp_path: Path) -> list[Row]:
    return list(store.rows(store.files(tmp_path / "results")))


def test_a_first_pass_is_over_the_first_problem_and_goes_down_the_ladder() -> None:
    first = find_first_pass(CASES, Timing())
    assert {case.problem for case in first} == {CASES[0].problem}
    assert [case.kernel for case in first] == ["torch", *[name for name in LADDER[::-1] if name != "torch"]]
    few = CASES[: int(LONG_S / Timing().steady_s)]
    assert find_first_pass(few, Timing()) == [] and find_first_pass(few[:1] + CASES, Timing()) != []
    assert find_first_pass(CASES, Timing(steady_block_s=0.0)) == []  # nothing would come after it
    assert find_first_pass([], Timing()) == []


def test_every_rung_of_the_headline_is_timed_cold_before_any_is_timed_steady(tmp_path: Path) -> None:
    """With the times that were measured on an H100."""
    run, line = runner(tmp_path, built(LADDER))
    run.run_first_pass(find_first_pass(CASES, Timing()))
    assert {row["kernel"] for row in rows(tmp_path)} == set(LADDER)
    ends, names = [end for *_, end in line.ran], [kernel for kernel, *_ in line.ran]
    slow = [names.index(name) for name in CALL_S]
    assert min(slow) == len(names) - len(CALL_S)  # the slow rungs come last,
    assert ends[min(slow) - 1] < (ends[-1] - ends[min(slow) - 1])  # and take longer than all others together
    finished = {case.key for case, _ in run.statuses}
    for case in CASES:
        if case.key not in finished:
            run.run(case)
    first, second = line.ran[: len(LADDER)], line.ran[len(LADDER) :]
    assert {timing for _, _, timing, _ in first} == {Timing().first().name}
    assert {timing for _, _, timing, _ in second} == {Timing().name}
    again = [name for name, size, *_ in second if size == 8192]
    assert again == [
        name for name in LADDER if name not in SLOWEST
    ]  # of the slow rungs there is nothing more to measure
    found = rows(tmp_path)
    assert sorted(row["case"] for row in found) == sorted(case.key for case in CASES)  # each once
    assert {row["timing"] for row in found} == {Timing().name}


def test_a_kernel_is_timed_as_soon_as_it_is_built(tmp_path: Path) -> None:
    """A slow one that was timed while compilers ran is timed again."""
    jobs = built(LADDER)
    late = jobs["hgemm", LADDER[-1]] = Future()
    run, line = runner(tmp_path, jobs)
    first = find_first_pass(CASES, Timing())
    line_run = line.run

    def run_and_build(case: Case, *about: Any) -> Row:
        if len(line.ran) == len(first) - 2:
            late.set_result("not loaded here")
        return line_run(case, *about)

    line.run = run_and_build  # type: ignore[method-assign]
    run.run_first_pass(first)
    assert [name for name, *_ in line.ran] == ["torch", *[n for n in LADDER[-2::-1] if n != "torch"], LADDER[-1]]
    assert [case.kernel for case, _ in run.statuses] == []


def test_what_ended_in_the_first_pass_goes_on_there_and_no_row_is_doubled(tmp_path: Path) -> None:
    first = find_first_pass(CASES, Timing())
    run, _ = runner(tmp_path, built(LADDER))
    run.run_first_pass(first[:5])
    found = list(find_written(run.shard))
    assert [(each.case, each.is_first) for each in found] == [(case, True) for case in first[:5]]
    again, _ = runner(tmp_path, built(LADDER))
    again.writer.where = {each.case.key: each.path for each in found}
    again.run_first_pass(first[5:8])
    for case in first[:7]:
        again.run(case)
    assert sorted(row["case"] for row in rows(tmp_path)) == sorted(case.key for case in first[:8])
    assert sum(row["timing"] == Timing().name for row in rows(tmp_path)) == 7
    assert len(store.files(tmp_path / "results")) == 1  # the first process's file is empty, and gone


@pytest.mark.slow
def test_a_shard_has_a_first_pass(
    run_shard: Callable[..., list[Row]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minfer.plan.order.LONG_S", 0.0)
    (row,) = run_shard(["torch"])
    assert row["status"] in store.MEASURED and row["timing"] == FAST.name and row["steady_us"]
    told = [json.loads(line) for line in (tmp_path / "run" / "progress" / "0000.jsonl").read_text().splitlines()]
    assert [event["event"] for event in told if event["event"] in ("case", "first", "done")] == [
        "case",
        "first",
        "case",
        "done",
    ]
    assert row["finished"] <= datetime.datetime.now(datetime.UTC)


@pytest.mark.slow
def test_a_kernel_that_crashes_ends_no_compiler_beside_it(
    run_shard: Callable[..., list[Row]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minfer.plan.order.LONG_S", 0.0)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "empty"))
    found = {row["kernel"]: row for row in run_shard(["torch", "cpu_naive", "segfaults", "exits"])}
    assert {name: row["status"] for name, row in found.items() if name not in ("torch", "cpu_naive")} == {
        "segfaults": "crashed", "exits": "crashed"
    }  # fmt: skip
    assert found["cpu_naive"]["status"] in store.MEASURED and found["cpu_naive"]["build_s"]
    assert len(found) == 4 and {row["timing"] for row in found.values()} == {FAST.name}
    told = [json.loads(line) for line in (tmp_path / "run" / "progress" / "0000.jsonl").read_text().splitlines()]
    ran = [event["case"].split("/")[1] for event in told if event["event"] == "case"]
    assert ran.count("segfaults") == 1 and ran.index("segfaults") < ran.index("cpu_naive")  # while it was compiled
