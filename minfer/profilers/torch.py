"""The profiler `torch`: what PyTorch's own profiler sees of a few calls, on a GPU and on a CPU.

All metrics are of one call. `torch.cpu_us` is the host's time in it, from entering the kernel's function to leaving it
(on a GPU: before the kernels are done), with what the profiler adds; of the operators that take longest,
`torch.<op>.cpu_us`, `.self_cpu_us` (without the operators that it calls) and `.calls`. On a GPU also what
`calls.per_call` says of the kernels, `torch.copies_us` of copies and fills, `torch.launches` and `torch.launch_us`, the
host's time in CUDA's launch functions, and of the operators `.device_us` and `.self_device_us`, the time of what they
launched. The operands of these calls lie in the L2 cache where they fit: these times explain a row's `cold_us` and
`steady_us`, and do not replace them.

Kept: the table of all operators, `<case>.txt`, and a Chrome trace, `<case>.trace.json.gz` (ui.perfetto.dev).
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# torch.profiler's own class does the same, and first imports torch._dynamo, which takes 5 s.
from torch.autograd.profiler import profile as record
from torch.autograd.profiler import record_function

from minfer.ops import Case
from minfer.profilers import Finding, Job
from minfer.profilers.calls import artefact, attempt, per_call, prepare_call

RUNS_KERNELS = True

MOST_OPS = 8  # operators that get metrics of their own; the table has all of them
LAUNCH = re.compile(r"^cu(da)?(Graph)?Launch")
COPY = re.compile(r"^Mem(cpy|set)\b")  # on the device, and no kernels


def profile(job: Job) -> Iterator[Finding]:
    """A finding for each case."""
    for case in job.cases:
        yield attempt(measure, job, case)


def measure(job: Job, case: Case) -> Finding:
    """Profile `calls` calls of a case. Raises what a kernel or a full disk may raise."""
    calls: int = job.options["calls"]
    on_gpu = job.device == "cuda"
    call = prepare_call(case, job.device)
    with record(use_device="cuda" if on_gpu else None, use_kineto=True) as recorded:
        for _ in range(calls):
            with record_function(case.kernel):
                call()
    events = recorded.key_averages()
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    table = events.table(sort_by=order, row_limit=-1, max_name_column_width=100)
    artefact(job, case, ".txt").write_text(f"{calls} calls of {case.key}\n{table}")
    keep_trace(recorded, artefact(job, case, ".trace.json.gz"))
    return summary(events, calls, on_gpu)


def keep_trace(recorded: Any, path: Path) -> None:
    """Write a profile as a compressed Chrome trace, without the path that PyTorch notes in it. Raises OSError."""
    plain = path.with_suffix("")
    recorded.export_chrome_trace(str(plain))
    trace = json.loads(plain.read_bytes())
    trace.pop("traceName", None)
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    plain.unlink()


def summary(events: Iterable[Any], calls: int, on_gpu: bool) -> Finding:
    """The metrics of one call, from PyTorch's averages (`FunctionEventAvg`; its times are in microseconds).

    What is annotated counts once, on the host: its shadow on the device would count every kernel again."""
    host = [event for event in events if event.device_type.name == "CPU"]
    device = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
    own = [event for event in host if not event.is_user_annotation]
    metrics: dict[str, float] = {
        "cpu_us": sum(event.cpu_time_total for event in host if event.is_user_annotation) / calls
    }
    functions: dict[str, str] = {}
    why = "ok"
    if on_gpu:
        launches = [event for event in own if LAUNCH.match(event.key)]
        metrics["launches"] = sum(event.count for event in launches) / calls
        metrics["launch_us"] = sum(event.self_cpu_time_total for event in launches) / calls
        metrics["copies_us"] = sum(event.self_device_time_total for event in device if COPY.match(event.key)) / calls
        kernels = {e.key: (e.count, e.self_device_time_total) for e in device if not COPY.match(e.key)}
        if kernels:
            ran = per_call(kernels, calls)
            metrics, functions = metrics | ran.metrics, ran.functions
        else:
            why = "PyTorch's profiler saw no kernel on the GPU; another profiler may hold CUPTI"

    operators = [event for event in own if "::" in event.key]  # not CUDA's functions, nor what the profiler itself does
    operators.sort(key=lambda event: (-event.self_device_time_total, -event.self_cpu_time_total))
    for event in operators[:MOST_OPS]:
        found = {"calls": event.count, "cpu_us": event.cpu_time_total, "self_cpu_us": event.self_cpu_time_total}
        if on_gpu:
            found |= {"device_us": event.device_time_total, "self_device_us": event.self_device_time_total}
        metrics |= {f"{event.key}.{name}": value / calls for name, value in found.items()}
    return Finding(metrics, functions, why)
