"""How long Triton's compiler and autotuner have taken in this process."""

from __future__ import annotations

import sys
from typing import Any


class TritonTimes:
    """Adds up the times, once `listen` was called."""

    def __init__(self) -> None:
        self.compiled_s = self.tuned_s = 0.0  # so far

    def listen(self) -> None:
        """Have Triton report to this object, if a kernel has imported it."""
        if triton := sys.modules.get("triton"):
            triton.knobs.compilation.listener = self._add_compilation
            self.time_autotuner(triton.runtime.autotuner.Autotuner)

    def _add_compilation(self, *, times: Any, cache_hit: bool, **_: object) -> None:
        self.compiled_s += 0 if cache_hit else times.total * 1e-6

    def time_autotuner(self, autotuner: Any) -> None:
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
