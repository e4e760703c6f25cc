"""The process that a profiler runs in, and that the supervisor can lose.

The first request names the profiler, its options and the cases; each further one is answered with the next finding."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from minfer import ops
from minfer.ops import Case
from minfer.process.remote import serve
from minfer.profilers import Finding, Job, Profiler


def findings(profiler: Profiler, job: Job) -> Iterator[Finding]:
    """One for each case; what was not measured is kept from a profiler that runs kernels."""
    skip = [profiler.RUNS_KERNELS and case.key not in job.measured for case in job.cases]
    kept = [case for case, skipped in zip(job.cases, skip, strict=True) if not skipped]
    found = profiler.profile(dataclasses.replace(job, cases=kept))
    for skipped in skip:
        yield Finding(why="the case was not measured") if skipped else next(found)


def main() -> None:
    found: Iterator[Finding] | None = None

    def answer(request: dict[str, Any], say: Any) -> dict[str, Any]:
        nonlocal found
        if found is not None:
            return dataclasses.asdict(next(found))
        for path in request["extra"]:
            ops.load_file(Path(path))
        profiler = cast(Profiler, importlib.import_module(f"minfer.profilers.{request['profiler']}"))
        cases = [(Case(**case), ok) for case, ok in request["cases"]]
        job = Job(
            [case for case, _ in cases], request["options"], request["device"], Path(request["folder"]),
            request["build_timeout_s"], frozenset(case.key for case, ok in cases if ok), request["extra"], request["audit"],
        )  # fmt: skip
        found = findings(profiler, job)
        return {}

    serve(answer)


if __name__ == "__main__":
    main()
