"""Counters for the cases of a shard, after they were timed.

A profiler is a module of this folder, named as in `conf/profiler` (`Profiler` below). It runs in a process of its own
(`host.py`), which may crash, hang or answer nonsense: that costs its own metrics and never a row or a time. What it finds
for a case lands in the case's row: `metrics` and `functions` under `<profiler>.<name>`, and in `profilers` "ok" or why
there is nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from minfer.ops import Case
from minfer.process.death import Died
from minfer.process.remote import Process
from minfer.rows.store import MEASURED, Row


@dataclass(frozen=True)
class Finding:
    """What a profiler found for one case; `why` is "ok", or a sentence that says why there is nothing, or not all."""

    metrics: dict[str, float] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)  # which device function the metrics are of
    why: str = "ok"


@dataclass(frozen=True)
class Job:
    """What a profiler is given."""

    cases: list[Case]
    options: dict[str, Any]  # its section of the config
    device: str  # "cuda" or "cpu"
    folder: Path  # for files worth keeping, beside the rows; not made yet
    build_timeout_s: float  # for a compiler that it starts
    measured: frozenset[str] = frozenset()  # keys of the cases that may be run: others may hang or crash
    extra: list[str] = field(default_factory=list)  # Python files that register kernels, loaded already
    audit: bool = False  # whether to check, too, what the timing took for granted


class Profiler(Protocol):
    """The module of a profiler."""

    RUNS_KERNELS: bool  # then it gets only cases that were measured

    def profile(self, job: Job) -> Iterator[Finding]:
        """One finding for each case, in their order. An error ends the process; a new one gets the cases after it."""
        ...


@dataclass(frozen=True)
class Setting:
    """Where and how a shard's profilers run."""

    device: str
    extra: list[str]
    folder: Path  # of the run's rows
    log: Path
    build_timeout_s: float
    timeout_s: float  # for one finding
    audit: bool = False


def run(
    name: str, options: dict[str, Any], rows: list[tuple[Case, str]], setting: Setting
) -> Generator[tuple[Case, Row]]:
    """Each case and the columns that the profiler fills. `rows` are the cases with their status.

    When the process dies, the case whose turn it was gets the reason, and a new process the rest; after two deaths
    without a finding in between, the rest get the reason too."""
    left = [case for case, status in rows]
    statuses = {case.key: status for case, status in rows}
    deaths = 0
    while left:
        process = Process("minfer.profilers.host", setting.log)
        try:
            cases = [[case.to_dict(), statuses[case.key] in MEASURED] for case in left]
            process.ask(
                setting.timeout_s, profiler=name, options=options, cases=cases, device=setting.device,
                extra=setting.extra, folder=str(setting.folder / name), build_timeout_s=setting.build_timeout_s,
                audit=setting.audit,
            )  # fmt: skip
            process.phase = "profile"
            while left:
                finding = _check_finding(process.ask(setting.timeout_s))
                deaths = 0
                yield left[0], _columns(name, finding)
                del left[0]
        except Died as death:
            deaths += 1
            lost = left[:1] if deaths < 2 else left
            for case in lost:
                yield case, _columns(name, Finding(why=str(death)))
            left = left[len(lost) :]
        finally:
            process.kill()


def _check_finding(reply: dict[str, Any]) -> Finding:
    """A reply as a finding, if it is one."""
    metrics, functions, why = (reply.get(key) for key in ("metrics", "functions", "why"))
    numbers = isinstance(metrics, dict) and all(
        isinstance(value, int | float) and abs(value) < 1e300 for value in metrics.values()
    )
    texts = isinstance(functions, dict) and all(isinstance(value, str) for value in functions.values())
    if set(reply) != {"metrics", "functions", "why"} or not (numbers and texts and isinstance(why, str) and why):
        return Finding(why="its answer is no finding: numbers, names and a sentence")
    return Finding(**reply)


def _columns(name: str, finding: Finding) -> Row:
    return {
        "metrics": {f"{name}.{key}": float(value) for key, value in finding.metrics.items()},
        "functions": {f"{name}.{key}": value for key, value in finding.functions.items()},
        "profilers": {name: finding.why},
    }
