"""Measures the time that Triton's compiler and autotuner take in this process."""

from __future__ import annotations

import sys
from typing import Any


class TritonTimes:
    """The sums of these times since `listen` was called."""

    def __init__(self) -> None:
        self.compiled_s = self.tuned_s = 0.0  # so far

    def listen(self) -> None:
        """Make Triton report to this object, if a kernel has imported Triton."""
        if triton := sys.modules.get("triton"):
            triton.knobs.compilation.listener = self._add_compilation
            self.time_autotuner(triton.runtime.autotuner.Autotuner)

    def _add_compilation(self, *, times: Any, cache_hit: bool, **_: object) -> None:
        self.compiled_s += 0 if cache_hit else times.total * 1e-6

    def time_autotuner(self, autotuner: Any) -> None:
        """Add up the times that Triton's autotuner takes. It stores each in `bench_time`; only Triton after 3.6 has a listener
        for it."""
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
