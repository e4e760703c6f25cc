"""The profiler `ncu`: hardware counters of one cold call, by NVIDIA Nsight Compute. It never supplies a time.

Several cases share a process (`ncu_target.py`), which marks the beginning of each with a kernel of its own (`MARKER`);
the report is kept as `ncu/<number>.ncu-rep`. Caches are flushed before every pass, and the clock is left alone unless
`clock_control` says otherwise. Metrics are named in `SETS`, in base units: bytes, percent, MHz. Where a call launches
several kernels, counts are added up, other values are averaged with the cycles as weights, and what belongs to a launch
is that of the longest kernel. A counter that this GPU does not have is left out.

With `timing.audit=true` the caches are flushed once more as the bench does it, and memory must then supply what a call
has to read (`AUDITED`): a cold time that was none is said so in the row.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from minfer import ops
from minfer.build import toolchain
from minfer.ops import Case
from minfer.plan.counters import SETS
from minfer.profilers import Finding, Job

RUNS_KERNELS = True
DEVICES = ("cuda",)

MARKER = "spin_kernel"  # of torch.cuda._sleep
BATCH = 16  # cases a process: starting one takes 5 s, a case half a second
START_S, CASE_S = 60.0, 30.0  # until a batch is taken to hang

CYCLES = "sm__cycles_elapsed.max"
AUDITED = {"window_dram_read_bytes": "dram__bytes_read.sum"}  # L2's own hit rate takes several passes
COLD = 0.95  # of the inputs' bytes, from memory: then the caches held nothing of them

# What Nsight Compute says when it cannot count at all, and what to do.
REFUSALS = {
    r"ERR_NVGPUCTRPERM": "this user may not read the GPU's counters; an administrator can allow it with the driver option"
    " NVreg_RestrictProfilingToAdminUsers=0 (https://developer.nvidia.com/ERR_NVGPUCTRPERM)",
    r"[Dd]river resource was unavailable|DCGM": "another tool holds the GPU's counters, such as a monitor of the data"
    " centre; pause it (dcgmi profiling --pause), or profile on another node",
    r"not supported on device|unsupported|driver is not compatible|newer version": "this Nsight Compute does not know the"
    " GPU or its driver; install a newer one",
    r"LibraryNotLoaded|[Ff]ailed to initialize the profiler": "Nsight Compute could not be loaded into the process, as"
    " happens in some sandboxes",
}


class Refused(Exception):
    """Nsight Compute cannot count anything here; the message says why and what to do."""


def profile(job: Job) -> Iterator[Finding]:
    """A finding for each case. When Nsight Compute cannot count here, every case says why."""
    refusal = "counts on a CUDA GPU only" if job.device not in DEVICES else ""
    for first in range(0, len(job.cases), BATCH):
        batch = job.cases[first : first + BATCH]
        try:
            if refusal:
                raise Refused(refusal)
            found = _batch(job, batch, first // BATCH)
        except Refused as error:
            refusal = str(error)
            found = [Finding(why=refusal)] * len(batch)
        yield from found


def _batch(job: Job, cases: list[Case], number: int) -> list[Finding]:
    """The findings of one batch. A case that ends or hangs the process is left out of the next try."""
    why: dict[str, str] = {}
    while left := [case for case in cases if case.key not in why]:
        counted, culprit, reason = count(job, left, f"{number:03d}")
        if culprit is None and job.audit:
            try:
                windows, culprit, reason = count(job, left, f"{number:03d}-audit", audit=True)
            except Refused as error:
                windows = [Finding(why=str(error))] * len(left)
            counted = [add_audit(*about) for about in zip(left, counted, windows, strict=False)]
        if culprit is None:
            rows = iter(counted)
            return [Finding(why=why[case.key]) if case.key in why else next(rows) for case in cases]
        why[culprit.key] = reason
    return [Finding(why=why[case.key]) for case in cases]


def add_audit(case: Case, counted: Finding, window: Finding) -> Finding:
    """A finding with what memory supplied after the bench's own flush, and whether that was cold."""
    needed = ops.get(case.op).traffic_of(case)[0]
    read, why = window.metrics.get("window_dram_read_bytes"), [counted.why, window.why]
    if read is not None and read < COLD * needed:
        why.append(f"its cold calls were not cold: memory supplied {read / 1e6:.1f} of {needed / 1e6:.1f} MB")
    said = "; ".join(dict.fromkeys(sentence for sentence in why if sentence != "ok"))
    metrics = {name: window.metrics[name] for name in AUDITED if name in window.metrics}
    return Finding(counted.metrics | metrics, counted.functions, said or "ok")


def count(job: Job, cases: list[Case], name: str, audit: bool = False) -> tuple[list[Finding], Case | None, str]:
    """One process under Nsight Compute, which leaves the report `name`: the findings, or the case at which it ended and
    how. Raises Refused."""
    tool, report = toolchain.tool("ncu"), job.folder / f"{name}.ncu-rep"
    if tool is None:
        raise Refused("Nsight Compute is not installed; put its ncu on the PATH, or set CUDA_HOME")
    report.parent.mkdir(parents=True, exist_ok=True)
    names = {name: metric for chosen in job.options["sets"] for name, metric in SETS[chosen].items()}
    wanted = ["--set", "full"] if "full" in job.options["sets"] else []
    wanted += ["--metrics", ",".join([*names.values(), CYCLES])]
    if audit:
        names, wanted = AUDITED, ["--cache-control", "none", "--metrics", ",".join(AUDITED.values())]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as request:
        json.dump({"cases": [case.to_dict() for case in cases], "extra": job.extra, "flush": audit}, request)
        request.flush()
        command = [
            str(tool), "--profile-from-start", "off", "--clock-control", job.options["clock_control"], *wanted,
            "--force-overwrite", "--export", str(report), sys.executable, "-m", "minfer.profilers.ncu_target", request.name,
        ]  # fmt: skip
        said, ended = _run(command, START_S + CASE_S * len(cases))
    if reason := refusal(said):
        raise Refused(reason)
    started = re.findall(r"^minfer: case (\d+)$", said, re.MULTILINE)
    finished = len(re.findall(r"^minfer: done$", said, re.MULTILINE))
    if finished < len(cases):
        if len(started) == finished:  # not even the first was begun
            raise Refused(f"the process under ncu {ended}: {_last_error(said)}")
        return [], cases[finished], f"{ended} under ncu: {_last_error(said)}"
    if audit and (passes := re.findall(r"(\d+) passes", said)):
        raise Refused(f"the audit's counters took {max(map(int, passes))} passes, and the second finds the caches warm")
    page = [str(tool), "--import", str(report), "--page", "raw", "--csv", "--print-units", "base"]
    groups = read(_run(page, START_S)[0])
    if len(groups) != len(cases):
        raise Refused(f"ncu counted {len(groups)} of {len(cases)} cases: {_last_error(said)}")
    return [finding(group, names, f"{report.parent.name}/{report.name}") for group in groups], None, ""


def _run(command: list[str], timeout_s: float) -> tuple[str, str]:
    """What a command printed, and how it ended."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return process.communicate()[0], f"was killed after {timeout_s:g} s"
    return said, f"ended with status {process.returncode}"


def refusal(said: str) -> str | None:
    """Why Nsight Compute counts nothing at all here, if that is what it says."""
    errors = "\n".join(line for line in said.splitlines() if line.startswith("==ERROR=="))
    return next((why for pattern, why in REFUSALS.items() if re.search(pattern, errors)), None)


def _last_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith("==PROF==")]
    errors = [line for line in lines if line.startswith("==ERROR==")] or lines
    return errors[-1].removeprefix("==ERROR==").strip() if errors else "it said nothing"


def read(text: str) -> list[list[dict[str, str]]]:
    """The kernels of each case, from ncu's raw page in CSV; a kernel is a mapping from column to value."""
    lines = list(csv.reader(text.splitlines()))
    start = next((index for index, line in enumerate(lines) if line[:2] == ["ID", "Process ID"]), None)
    if start is None:
        return []
    groups: list[list[dict[str, str]]] = []
    for line in lines[start + 2 :]:  # a line of units follows the names
        kernel = dict(zip(lines[start], line, strict=False))
        if MARKER in kernel.get("Kernel Name", ""):
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    return groups


def finding(kernels: list[dict[str, str]], names: dict[str, str], report: str) -> Finding:
    """What the kernels of one call come to, by the rule at the top."""
    if not kernels:
        return Finding(why="the call launched no kernel")
    cycles = [number(kernel, CYCLES) or 1.0 for kernel in kernels]
    longest = kernels[cycles.index(max(cycles))]
    metrics: dict[str, float] = {"kernels": len(kernels), "cycles": sum(cycles)}
    for name, metric in names.items():
        values = [number(kernel, metric) for kernel in kernels]
        known = [(value, weight) for value, weight in zip(values, cycles, strict=True) if value is not None]
        if len(known) < len(kernels):
            continue
        if metric.startswith("launch__"):
            metrics[name] = number(longest, metric) or 0.0
        elif metric.endswith(".sum"):
            metrics[name] = sum(value for value, _ in known)
        else:
            metrics[name] = sum(value * weight for value, weight in known) / sum(cycles)
    if "sm_mhz" in metrics:
        metrics["sm_mhz"] *= 1e-6  # ncu says Hz
    if {"dram_read_bytes", "dram_write_bytes"} <= metrics.keys():
        metrics["dram_bytes"] = metrics["dram_read_bytes"] + metrics["dram_write_bytes"]
    missing = [name for name in names if name not in metrics]
    why = f"this GPU does not count {', '.join(missing)}" if missing else "ok"
    return Finding(metrics, {"kernel": longest["Kernel Name"], "report": report}, why)


def number(kernel: dict[str, str], column: str) -> float | None:
    """A value of the raw page, which groups digits by commas; None where there is none."""
    try:
        value = float(kernel.get(column, "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
