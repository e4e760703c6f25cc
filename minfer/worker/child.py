"""The process that runs kernels. If it dies, its supervisor goes on.

The first request names the kind of device, and the reply is the environment. The second request comes when everything is
built, and asks for the device's peaks. Each further request is a case; the reply has its samples and the columns that it
fills (`minfer.process.remote` has the protocol). The supervisor computes everything else from the samples
(`minfer.bench.derived`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minfer import build, ops
from minfer.bench import device as devices
from minfer.bench import footprint, peaks
from minfer.bench.audit import audit
from minfer.bench.clock import CudaClock
from minfer.bench.integrity import Dishonest, Watch, check_delegation, check_library, check_sources
from minfer.bench.measure import Bench
from minfer.bench.telemetry import Telemetry, watts
from minfer.bench.timing import Timing
from minfer.bench.verify import Function, Trial, WrongResult, verify
from minfer.build import cache
from minfer.build.errors import DISK_FULL, BuildError
from minfer.ops import Case, Kernel, Op
from minfer.process.remote import serve
from minfer.process.threads import delay_s, run_delays
from minfer.rows.store import BUSY, HOST_BOUND, Row

SUSPENDED = "stopped and continued while it was timed, twice: its times contain that"

MOST_WAITED = 0.1  # of `cold_waited`; more is flagged
EMPTY = {"cuda": 30, "cpu": 10}  # cold windows without a call; fewer on a CPU, where each flush takes long
SETTLING = 0.2  # the part of a steady block that energy leaves out, because the card was idle for a moment before it

Say = Callable[..., None]


class Child:
    """Runs cases on one device, one after the other."""

    def __init__(self, kind: str, timing: Timing) -> None:
        self.device = devices.pick(kind)
        self.timing = timing
        self.capability = devices.capability(self.device)
        self.arch = devices.arch(self.device)
        self.telemetry = Telemetry(self.device)
        self.watch = Watch()
        self.compiled_s = self.tuned_s = 0.0  # by Triton and its autotuner, so far

    def _compiled(self, *, times: Any, cache_hit: bool, **_: object) -> None:
        self.compiled_s += 0 if cache_hit else times.total * 1e-6

    def _time_autotuner(self, autotuner: Any) -> None:
        """Have the time of what Triton's autotuner tries added up. It keeps that in `bench_time`; only a Triton newer than 3.6
        has a listener for it."""
        if hasattr(autotuner.run, "inner"):
            return
        inner = autotuner.run

        def run(tuner: Any, *arguments: Any, **options: Any) -> Any:
            tuner.bench_time = 0.0  # of an earlier problem
            try:
                return inner(tuner, *arguments, **options)
            finally:
                self.tuned_s += tuner.bench_time

        run.inner = inner  # type: ignore[attr-defined]
        autotuner.run = run

    def measure_peaks(self) -> dict[str, float]:
        """The device's peaks, measured before any kernel is loaded; empty if they cannot be measured, and then cases are timed
        all the same."""
        try:
            return peaks.measure(self.device, self.telemetry)
        except (BuildError, RuntimeError, OSError) as error:
            print(f"peaks could not be measured: {error}", flush=True)
            return {}
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # its buffers are gigabytes

    def run(self, case: Case, say: Say) -> dict[str, Any]:
        """The reply: `row`, the columns that the case fills; `cold` and `steady`, its samples in seconds, if it is right; and
        `usable`, whether this process can be trusted with another case."""
        reply = self._run(case, say)
        if reply["row"]["status"] in ("dishonest", "crashed"):
            return reply | {"usable": False}
        return reply | {"usable": self._changed() is None}  # the next kernel must not be blamed for this one

    def _changed(self) -> str | None:
        """What a kernel has changed in this process, in a sentence, or None."""
        try:
            self.watch.check()
        except Dishonest as error:
            return str(error)
        return None

    def _run(self, case: Case, say: Say) -> dict[str, Any]:
        op = ops.get(case.op)
        kernel = op.kernels[case.kernel]
        row: Row = {"seed": int.from_bytes(os.urandom(4), "little")}
        reply: dict[str, Any] = {"row": row}
        try:
            reply |= self._measure(op, kernel, case, row, say)
            row["status"] = "ok"
        except WrongResult as error:
            errors = error.errors
            row |= {
                "rel_l2_error": errors.rel_l2,
                "max_abs_error": errors.max_abs,
                "error_over_bound": errors.over_bound,
            }
            row |= {"status": "wrong", "message": str(error), "verified": errors.tried}
        except Dishonest as error:
            row |= {"status": "dishonest", "message": str(error)}
        except BuildError as error:
            row |= {"status": "compile_error", "message": str(error)}
        except (torch.OutOfMemoryError, MemoryError) as error:
            row |= {"status": "oom", "message": _sentence(error)}
        except Exception as error:  # whatever a kernel raises becomes a row and does not end the shard
            message = _sentence(error)
            if changed := self._changed():  # the kernel may have caused an error in the harness
                row |= {"status": "dishonest", "message": changed}
            elif "can't allocate memory" in message or "out of memory" in message:
                row |= {"status": "oom", "message": message}
            elif self.device.type == "cuda" and "CUDA error" in str(error):
                # An illegal access or a failed assertion leaves the CUDA context unusable.
                row |= {"status": "crashed", "message": message}
            elif (full := DISK_FULL.search(str(error))) and "triton" in sys.modules:
                where = os.environ.get("TRITON_CACHE_DIR", "~/.triton")
                why = f"cannot compile by Triton in {where}: {full[0]}; free it or set cluster.scratch"
                row |= {"status": "error", "message": why}
            else:
                row |= {"status": "error", "message": message}
        finally:
            gc.collect()
            if self.device.type == "cuda" and row.get("status") != "crashed":
                torch.cuda.empty_cache()
        return reply

    def _measure(self, op: Op, kernel: Kernel, case: Case, row: Row, say: Say) -> dict[str, Any]:
        """Verify, then time; `row` gets its columns as they are known. Returns the samples."""
        say(phase="load")
        function = build.function(kernel, self.arch)
        if triton := sys.modules.get("triton"):  # imported by the first of its kernels
            triton.knobs.compilation.listener = self._compiled
            self._time_autotuner(triton.runtime.autotuner.Autotuner)
        baseline = build.function(op.kernels[op.baseline(case)], self.arch)

        say(phase="verify")
        begin, compiled, tuned = time.perf_counter(), self.compiled_s, self.tuned_s
        errors = verify(op, case, kernel, function, self.device, self.capability, row["seed"])
        row |= {"rel_l2_error": errors.rel_l2, "max_abs_error": errors.max_abs, "error_over_bound": errors.over_bound}
        self._check_own_work(op, kernel, case, function, row["seed"])
        compiling = self.compiled_s - compiled
        tuning = max(0.0, self.tuned_s - tuned - compiling)  # the autotuner has its configurations compiled
        self._take_footprint(op, case, function, row)
        row |= {"verified": errors.tried, "verify_s": time.perf_counter() - begin - compiling - tuning}
        row |= {"tune_s": tuning or None}
        row["build_s"] = (compiling or None) if kernel.backend == "triton" else 0.0

        say(phase="time")
        begin = time.perf_counter()
        bench = Bench(op, case, function, baseline, self.device, row["seed"])
        with self.telemetry.watch() as watched:
            samples = self._time(bench, row)
        row |= watched
        bench.check_operands()
        self._check_own_work(op, kernel, case, function, row["seed"])  # again: it may have waited for the timing
        row |= {"time_s": time.perf_counter() - begin}
        return samples

    def _time(self, bench: Bench, row: Row) -> dict[str, Any]:
        """Time both regimes; once more if this process was stopped meanwhile, as by `scontrol suspend`: clocks went on."""
        for last in (False, True):
            with continued() as times:
                samples = self._time_once(bench, row)
            if not times:
                break
            if last:
                row["flags"] = "; ".join(filter(None, [row["flags"], SUSPENDED]))
        return samples

    def _time_once(self, bench: Bench, row: Row) -> dict[str, Any]:
        """Time both regimes, and then with the second clock, which comes last so that it cannot disturb them."""
        bench.warm_up(self.timing.warmup_s)
        begin, delays = time.perf_counter(), run_delays(os.getpid())
        samples: dict[str, Any] = {"cold": bench.cold(self.timing).tolist(), "steady": [], "watts": []}
        waited = delay_s(delays, run_delays(os.getpid())) / (time.perf_counter() - begin)
        row["cold_empty_us"] = bench.clock.empty(EMPTY[self.device.type]) * 1e6
        if isinstance(bench.clock, CudaClock):
            row["cold_launch_us"] = bench.clock.launch(EMPTY[self.device.type]) * 1e6
            row["cold_late"], row["cold_baseline_late"], _ = np.concatenate(bench.late).mean(axis=0).tolist()
        else:
            row["cold_waited"] = waited if delays else None
        flags = [HOST_BOUND] if isinstance(bench.clock, CudaClock) and bench.clock.host_bound else []
        flags += [BUSY] if (row.get("cold_waited") or 0) > MOST_WAITED else []
        if self.timing.block_s > 0:
            with self.telemetry.meter() as readings:
                blocks = bench.steady(self.timing, lambda: row.update(self.telemetry.sample()))
            samples["steady"] = [block.tolist() for block in blocks]
            row["steady_rotations"] = bench.rotations
            drawn = [watts(readings, begin + SETTLING * (end - begin), end) for begin, end in bench.spans]
            if not bench.in_place and None not in drawn:  # the counter also counts copies that restore operands
                samples["watts"] = drawn
        if self.timing.audit and isinstance(bench.clock, CudaClock):
            second = audit(bench.clock, bench.candidates[0], row["cold_empty_us"])
            row |= {"audit_us": second.cupti_us, "audit_events_us": second.events_us, "audit_kernels": second.kernels}
            flags += second.flags()
        row["flags"] = "; ".join(flags)
        return samples

    def _check_own_work(self, op: Op, kernel: Kernel, case: Case, function: Function, seed: int) -> None:
        """Raises Dishonest if a kernel that is not registered as PyTorch's lets PyTorch or a library do the work."""
        self.watch.check()
        if kernel.backend == "torch":
            return
        if kernel.needs_build:
            check_library(Path(build.build(kernel, self.arch).library))
            check_sources(kernel.sources())
        operands = Trial(case, "normal", seed).operands(op, self.device)
        check_delegation(lambda: function(*operands.arguments, **op.call(case)))

    def _take_footprint(self, op: Op, case: Case, function: Function, row: Row) -> None:
        """What a call takes besides time, on a GPU: workspace and launches."""
        if self.device.type != "cuda":
            return
        operands = Trial(case, "normal", 0).operands(op, self.device)
        call = lambda: function(*operands.arguments, **op.call(case))
        row["workspace_bytes"] = footprint.workspace_bytes(call, self.device)
        try:
            row["launches"] = footprint.launches(call, self.device)
        except (RuntimeError, OSError, TypeError) as error:
            print(f"the launches of {case.key} could not be counted: {_sentence(error)}", flush=True)


@contextlib.contextmanager
def continued() -> Iterator[list[int]]:
    """The list gets an entry for each time that this process is continued after it was stopped."""
    times: list[int] = []
    before = signal.signal(signal.SIGCONT, lambda number, frame: times.append(number))
    try:
        yield times
    finally:
        signal.signal(signal.SIGCONT, before)


def _sentence(error: BaseException) -> str:
    """The first line of an error. If it ends with a colon, the next line is added. The error's type comes before it, except
    for a RuntimeError with a text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return text if isinstance(error, RuntimeError) and text else f"{type(error).__name__}: {text}"


def main() -> None:
    gc.freeze()  # a collection after each case need not go through PyTorch's modules, which takes a tenth of a second
    child: Child | None = None

    def answer(request: dict[str, Any], say: Say) -> dict[str, Any]:
        nonlocal child
        if child is None:
            if request["device"] == "cuda" and (why := devices.no_gpu()):
                sys.exit(why)
            child = Child(request["device"], Timing(**request["timing"]))
            about = {"environment": devices.environment(child.device), "capability": child.capability}
            return about | {"gpu": devices.uuid(child.device)}
        cache.use_libraries(request["libraries"])
        if "extra" in request:
            peaks = child.measure_peaks() if request["peaks"] is None else request["peaks"]
            for path in request["extra"]:  # from here on, code that may do anything runs in this process
                ops.load_file(Path(path))
            return {"peaks": peaks}
        case = Case(**request["case"])
        print(f"--- {case.key}", flush=True)
        return child.run(case, say)

    serve(answer)


if __name__ == "__main__":
    main()
