"""Times a case in the kernel's own process: cold, steady, and once more with the second clock."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from minfer.bench.audit import audit
from minfer.bench.clock import CudaClock
from minfer.bench.measure import Bench
from minfer.bench.telemetry import Telemetry, watts
from minfer.bench.timing import Timing
from minfer.process.threads import delay_s, run_delays
from minfer.rows.store import BUSY, HOST_BOUND, SLOW, Row

SUSPENDED = "stopped and continued while it was timed, twice: its times contain that"

MOST_WAITED = 0.1  # of `cold_waited`; more is flagged
EMPTY = {"cuda": 30, "cpu": 10}  # cold windows without a call; fewer on a CPU, where each flush takes long
SETTLING = 0.2  # the part of a steady block that energy leaves out, because the card was idle for a moment before it


class CaseTimer:
    """Times one case after the other by the rules of `timing`, and records the device's state."""

    def __init__(self, timing: Timing, telemetry: Telemetry) -> None:
        self.timing, self.telemetry = timing, telemetry

    def time(self, bench: Bench, row: Row, brief: bool = False) -> dict[str, Any]:
        """Time both regimes, or with `brief` as a kernel that takes long (`Timing.brief`), and return the samples; `row` gets
        the other columns. Repeats once if this process was stopped meanwhile, as by `scontrol suspend`, because the clocks did
        not stop."""
        for last in (False, True):
            with watch_for_stops() as times:
                samples = self._time_once(bench, row, self.timing.brief() if brief else self.timing)
            if not times:
                break
            if last:
                row["flags"] = "; ".join(filter(None, [row["flags"], SUSPENDED]))
        if brief:
            row["flags"] = "; ".join(filter(None, [row["flags"], SLOW]))
        return samples

    def _time_once(self, bench: Bench, row: Row, timing: Timing) -> dict[str, Any]:
        """Time both regimes, and then the second clock's times, which come last so that they disturb nothing."""
        bench.warm_up(timing.warmup_s)
        begin, delays = time.perf_counter(), run_delays(os.getpid())
        samples: dict[str, Any] = {"cold": bench.cold(timing).tolist(), "steady": [], "watts": []}
        waited = delay_s(delays, run_delays(os.getpid())) / (time.perf_counter() - begin)
        row["cold_empty_us"] = bench.clock.empty(EMPTY[bench.device.type]) * 1e6
        if isinstance(bench.clock, CudaClock):
            row["cold_launch_us"] = bench.clock.launch(EMPTY[bench.device.type]) * 1e6
            row["cold_late"], row["cold_baseline_late"], _ = np.concatenate(bench.late).mean(axis=0).tolist()
        else:
            row["cold_waited"] = waited if delays else None
        flags = [HOST_BOUND] if isinstance(bench.clock, CudaClock) and bench.clock.host_bound else []
        flags += [BUSY] if (row.get("cold_waited") or 0) > MOST_WAITED else []
        if timing.block_s > 0:
            with self.telemetry.meter() as readings:
                blocks = bench.steady(timing, lambda: row.update(self.telemetry.sample()))
            samples["steady"] = [block.tolist() for block in blocks]
            row["steady_rotations"] = bench.rotations
            drawn = [watts(readings, begin + SETTLING * (end - begin), end) for begin, end in bench.spans]
            if not bench.in_place and None not in drawn:  # the counter also counts copies that restore operands
                samples["watts"] = drawn
        if timing.audit and isinstance(bench.clock, CudaClock):
            second = audit(bench.clock, bench.candidates[0], row["cold_empty_us"])
            row |= {"audit_us": second.cupti_us, "audit_events_us": second.events_us, "audit_kernels": second.kernels}
            flags += second.flags()
        row["flags"] = "; ".join(flags)
        return samples


@contextlib.contextmanager
def watch_for_stops() -> Iterator[list[int]]:
    """Yields a list, to which each SIGCONT adds an entry: this process was stopped and goes on."""
    times: list[int] = []
    before = signal.signal(signal.SIGCONT, lambda number, frame: times.append(number))
    try:
        yield times
    finally:
        signal.signal(signal.SIGCONT, before)
