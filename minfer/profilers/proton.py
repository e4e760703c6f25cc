"""The profiler `proton`: Triton's own, which times the kernels of a call by CUPTI and knows what they had to do.

All metrics are of one call: `proton.tflops` and `proton.gbps` are the op's FLOPs and least bytes over
`proton.device_us`, the time of all kernels without the gaps between them; the rest is `calls.per_call`'s. As in
the profiler `torch`, the operands lie in the L2 cache where they fit.

Kept: `<case>.hatchet`, which proton-viewer reads, and the same as text, `<case>.txt`. With `instrument=true` a Triton
kernel is compiled and called once more with the scopes that it marks by `triton.profiler.language`, and what each warp
spent in them is a Chrome trace, `<case>.chrome_trace` (ui.perfetto.dev).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from minfer import ops
from minfer.ops import Case
from minfer.profilers import Finding, Job
from minfer.profilers.calls import artefact, attempt, per_call, prepare_call, sentence

RUNS_KERNELS = True

OWN = "__proton_launch_metadata"  # frames of what proton itself launches begin so
COUNT, NS = "count", "time (ns)"

Frame = dict[str, Any]  # {"frame": {"name": ...}, "metrics": {...}, "children": [...]}


def profile(job: Job) -> Iterator[Finding]:
    """A finding for each case."""
    for case in job.cases:
        yield attempt(measure, job, case) if job.device == "cuda" else Finding(why="proton needs a CUDA GPU")


def measure(job: Job, case: Case) -> Finding:
    """Profile `calls` calls of a case. Raises what a kernel, proton or a full disk may raise."""
    op, calls = ops.get(case.op), job.options["calls"]
    call = prepare_call(case, job.device)
    path = artefact(job, case, ".hatchet")
    work = {"flops": op.flops(case), "bytes": op.bytes(case)}
    with session(path) as proton:
        for _ in range(calls):
            with proton.scope(scope(case), work):
                call()
    tree = read(path)
    finding = summary(tree, scope(case), calls)
    path.with_suffix(".txt").write_text(run_viewer(path) or "\n".join(render(tree)) + "\n")
    if job.options["instrument"] and op.kernels[case.kernel].backend == "triton":
        inside = attempt(trace_scopes, call, artefact(job, case, ".chrome_trace"))
        finding = Finding(finding.metrics, finding.functions, inside.why)
    return finding


def scope(case: Case) -> str:
    """What a call is named in the tree, such as `hgemm [M=1024, N=256, K=512]`; the file's name says of which kernel."""
    sizes = (f"{axis.upper() if len(axis) == 1 else axis}={size}" for axis, size in case.shape.items())
    return f"{case.op} [{', '.join(sizes)}]"


@contextlib.contextmanager
def session(path: Path, **how: str) -> Iterator[Any]:
    """Triton's profiler, recording into `path`, whose suffix is the one that proton gives. Raises RuntimeError."""
    proton = importlib.import_module("triton.profiler")
    path.unlink(missing_ok=True)  # of an earlier attempt
    try:
        number = proton.start(str(path.with_suffix("")), **how)
    except Exception as error:  # no CUPTI, or it is taken
        raise RuntimeError(f"proton cannot start: {sentence(error)}") from error
    try:
        yield proton
        torch.cuda.synchronize()
    finally:
        proton.finalize(number)
    if not path.is_file():
        raise RuntimeError("proton wrote nothing; is it switched off (TRITON_PROTON_DISABLE)?")


def trace_scopes(call: Any, path: Path) -> Finding:
    """Make one call with the kernel's own scopes compiled in, and keep their trace."""
    with session(path, backend="instrumentation", data="trace"):
        call()
    if b'"ph"' in path.read_bytes():  # an event of a Chrome trace
        return Finding()
    path.unlink()
    return Finding(why="the kernel marks no scopes (triton.profiler.language), so there is no trace of its inside")


def read(path: Path) -> Frame:
    """The root frame of a hatchet file: a JSON list of it and the devices. Raises RuntimeError for anything else."""
    try:
        root = json.loads(path.read_text())[0]
        return _check(root)
    except (ValueError, LookupError, TypeError) as error:
        raise RuntimeError(f"{path.name} is no hatchet file: {error!r}") from error


def _check(node: Frame) -> Frame:
    """A frame with its children, without what proton itself launched."""
    children = [_check(child) for child in node["children"]]
    kept = [child for child in children if not child["frame"]["name"].startswith(OWN)]
    metrics = {key: float(value) for key, value in node["metrics"].items() if isinstance(value, int | float)}
    return {"frame": {"name": str(node["frame"]["name"])}, "metrics": metrics, "children": kept}


def kernels(node: Frame) -> dict[str, tuple[float, float]]:
    """Launches and microseconds of each device function under a frame."""
    found: dict[str, tuple[float, float]] = {}
    if node["metrics"].get(COUNT):
        found[node["frame"]["name"]] = node["metrics"][COUNT], node["metrics"][NS] * 1e-3
    for child in node["children"]:
        for name, (count, us) in kernels(child).items():
            before = found.get(name, (0.0, 0.0))
            found[name] = before[0] + count, before[1] + us
    return found


def summary(tree: Frame, scope: str, calls: int) -> Finding:
    """The metrics of one call, from what was recorded in a scope with its FLOPs and bytes. Raises RuntimeError."""
    frame = next((child for child in tree["children"] if child["frame"]["name"] == scope), None)
    ran = per_call(kernels(frame), calls) if frame else Finding()
    if not frame or not ran.metrics["device_us"]:
        raise RuntimeError("proton saw no kernel on the GPU")
    us = ran.metrics["device_us"] * calls
    rates = {"tflops": frame["metrics"]["flops"] / us * 1e-6, "gbps": frame["metrics"]["bytes"] / us * 1e-3}
    return Finding(ran.metrics | rates, ran.functions)


def run_viewer(path: Path) -> str | None:
    """The tree as proton-viewer prints it, with the average time and the rate; None where llnl-hatchet is absent."""
    if importlib.util.find_spec("hatchet") is None:
        return None
    command = [sys.executable, "-m", "triton.profiler.viewer", "-m", "avg_time/us,tflop/s", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout if done.returncode == 0 else None


def render(node: Frame, depth: int = 0) -> list[str]:
    """A frame and those under it, a line each: average microseconds, launches, TFLOP/s where FLOPs are known, name."""
    under = kernels(node).values()
    count, us = sum(n for n, _ in under), sum(t for _, t in under)
    mean = f"{us / count:12,.3f} us" if count else " " * 15
    rate = f"{node['metrics']['flops'] / us * 1e-6:10,.3f} TFLOP/s" if node["metrics"].get("flops") and us else " " * 18
    line = f"{mean} x {count:<6,.0f}{rate}  {'  ' * depth}{node['frame']['name']}"
    return [line, *(text for child in node["children"] for text in render(child, depth + 1))]
