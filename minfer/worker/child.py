"""The process that runs kernels. If it dies, its supervisor goes on.

The first request names the kind of device, and the reply is the environment. The second request comes when everything is
built, and asks for the device's peaks. Each further request is a case and its timing; the reply has the samples and the
columns that it fills (`minfer.process.remote` has the protocol). The supervisor computes everything else from the samples
(`minfer.bench.derived`).
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minfer import build, ops
from minfer.bench import device as devices
from minfer.bench import footprint, peaks
from minfer.bench.integrity import Dishonest, Watch, check_delegation, check_library, check_sources
from minfer.bench.measure import Bench
from minfer.bench.telemetry import Telemetry
from minfer.bench.timing import Timing
from minfer.bench.verify import SLOW_S, Function, Inputs, Known, verify
from minfer.build import cache
from minfer.build.errors import BuildError
from minfer.ops import Case, Kernel, Op
from minfer.process.remote import serve
from minfer.rows.store import Row
from minfer.worker.case_timer import CaseTimer
from minfer.worker.failures import describe_error, error_columns, failure_columns
from minfer.worker.triton_times import TritonTimes

Say = Callable[..., None]


@dataclass(frozen=True)
class Loaded:
    """A case with the functions of its kernel and of its baseline."""

    op: Op
    case: Case
    kernel: Kernel
    function: Function
    baseline: Function

    def call_on_inputs(self, seed: int, device: torch.device) -> Callable[[], object]:
        """A call of the kernel on normal inputs of this seed."""
        operands = Inputs(self.case, "normal", seed).operands(self.op, device)
        return lambda: self.function(*operands.arguments, **self.op.call(self.case))


class Child:
    """Runs cases on one device, one after the other."""

    def __init__(self, kind: str, timing: Timing) -> None:
        self.device = devices.pick(kind)
        self.capability = devices.capability(self.device)
        self.arch = devices.arch(self.device)
        self.telemetry = Telemetry(self.device)
        self.timer = CaseTimer(timing, self.telemetry)
        self.watch = Watch()
        self.triton = TritonTimes()
        self.known: Known = {}  # of the verifications so far: each kernel is run at each odd shape once
        self.choices: dict[tuple[str, str], str] = {}  # of minfer's functions, by op and problem: which kernel, and why

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
        op = ops.get(case.op)
        kernel = op.kernels[case.kernel]
        row: Row = {"seed": int.from_bytes(os.urandom(4), "little")}
        reply: dict[str, Any] = {"row": row}
        try:
            reply |= self._measure(op, kernel, case, row, say)
            row["status"] = "ok"
        except Exception as error:  # whatever a kernel raises becomes a row and does not end the shard
            row |= failure_columns(error, self.device, self._find_change)
        finally:
            gc.collect()
            if self.device.type == "cuda" and row.get("status") != "crashed":
                torch.cuda.empty_cache()
        if row["status"] in ("dishonest", "crashed"):
            return reply | {"usable": False}
        return reply | {"usable": self._find_change() is None}  # the next kernel must not be blamed for this one

    def _find_change(self) -> str | None:
        """A sentence on what a kernel has changed in this process, or None."""
        try:
            self.watch.check()
        except Dishonest as error:
            return str(error)
        return None

    def _measure(self, op: Op, kernel: Kernel, case: Case, row: Row, say: Say) -> dict[str, Any]:
        """Verify, then time; `row` gets its columns as they are known. Returns the samples."""
        say(phase="load")
        loaded = self._load(op, kernel, case)
        say(phase="verify")
        is_slow = self._verify(loaded, row, sparing=True)
        say(phase="time")
        samples = self._time(loaded, row, brief=is_slow)
        if is_slow and np.median(samples["cold"], axis=0)[0] < SLOW_S:  # it was not: perhaps the machine was busy
            say(phase="verify")
            self._verify(loaded, row, sparing=False)
            say(phase="time")
            samples = self._time(loaded, row, brief=False)
        return samples

    def _load(self, op: Op, kernel: Kernel, case: Case) -> Loaded:
        if kernel.backend == "function":
            from minfer.functional import library  # which registers ops: not while something is timed

            self.choices = library.note_choices()
        function = build.function(kernel, self.arch)
        self.triton.listen()  # the module of a Triton kernel has imported Triton by now
        return Loaded(op, case, kernel, function, build.function(op.kernels[op.baseline(case)], self.arch))

    def _verify(self, loaded: Loaded, row: Row, sparing: bool) -> bool:
        """Fill the columns of the verification. Returns whether the kernel is slow and therefore was not run on all inputs;
        this happens only with `sparing`."""
        begin, compiled, tuned = time.perf_counter(), self.triton.compiled_s, self.triton.tuned_s
        op, case, kernel = loaded.op, loaded.case, loaded.kernel
        errors = verify(
            op, case, kernel, loaded.function, self.device, self.capability, row["seed"], sparing, known=self.known
        )
        row |= error_columns(errors)
        if not errors.left_out:  # a slow kernel's work is checked once, after it was timed
            self._check_own_work(loaded, row["seed"])
        compiling = self.triton.compiled_s - compiled
        tuning = max(0.0, self.triton.tuned_s - tuned - compiling)  # autotuning includes compiling its configurations
        self._take_footprint(loaded, row)
        row |= {"verified": errors.tried, "verify_s": time.perf_counter() - begin - compiling - tuning}
        row["tune_s"] = tuning or None
        if kernel.backend == "function":
            row["chosen"] = self.choices.get((op.name, case.problem))
        row["build_s"] = (compiling or None) if kernel.backend == "triton" else 0.0
        return errors.left_out > 0

    def _time(self, loaded: Loaded, row: Row, brief: bool) -> dict[str, Any]:
        begin, sets = time.perf_counter(), 1 if brief or not self.timer.timing.block_s else 0
        bench = Bench(loaded.op, loaded.case, loaded.function, loaded.baseline, self.device, row["seed"], sets)
        with self.telemetry.watch() as watched:
            samples = self.timer.time(bench, row, brief)
        row |= watched
        bench.check_operands()
        self._check_own_work(loaded, row["seed"])  # again: a kernel may delegate only after it was verified
        row["time_s"] = time.perf_counter() - begin
        return samples

    def _check_own_work(self, loaded: Loaded, seed: int) -> None:
        """Raises Dishonest if a kernel that is not registered as PyTorch's lets PyTorch or a library do the work."""
        self.watch.check()
        kernel = loaded.kernel
        if kernel.backend == "torch":
            return
        if kernel.needs_build:
            check_library(Path(build.build(kernel, self.arch).library))
            check_sources(kernel.sources())
        check_delegation(loaded.call_on_inputs(seed, self.device))

    def _take_footprint(self, loaded: Loaded, row: Row) -> None:
        """What a call takes besides time, on a GPU: workspace and launches."""
        if self.device.type != "cuda":
            return
        call = loaded.call_on_inputs(0, self.device)
        row["workspace_bytes"] = footprint.workspace_bytes(call, self.device)
        try:
            row["launches"] = footprint.launches(call, self.device)
        except (RuntimeError, OSError, TypeError) as error:
            print(f"the launches of {loaded.case.key} could not be counted: {describe_error(error)}", flush=True)


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
        case, child.timer.timing = Case(**request["case"]), Timing(**request["timing"])
        print(f"--- {case.key}", flush=True)
        return child.run(case, say)

    serve(answer)


if __name__ == "__main__":
    main()
