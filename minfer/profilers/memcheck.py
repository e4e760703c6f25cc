"""What `verify.memcheck=true` adds: each setting runs once under NVIDIA's compute-sanitizer, which also sees reads and
writes outside of tensors that change no result.

A setting is a kernel with a dtype and parameters. It runs on the op's small and odd shapes, because a call takes far
longer under the sanitizer. All its cases get the same finding: "ok", or what the sanitizer reported first, and where. The
logs stay in `memcheck/<op>-<kernel>-<number>.log` beside the rows.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from minfer import ops
from minfer.build import toolchain
from minfer.ops import Case
from minfer.profilers import Finding, Job

RUNS_KERNELS = True
BACKENDS = ("cuda", "triton")
AT_ONCE = 8  # processes, each with a CUDA context of its own
MARK = "========="  # begins each line that the sanitizer writes

# Without PyTorch's cache each tensor is an allocation of its own, so memcheck sees an access to the first element behind it.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
# API errors are not reported: one of ours raises in the child anyway, and PyTorch provokes some when it asks the driver what it
# supports. Processes that start together need ports of their own. Importing PyTorch takes longer than the default timeout.
OPTIONS = ["--target-processes", "application-only", "--error-exitcode", "86"]
OPTIONS += ["--max-connections", "100", "--launch-timeout", "600"]
MEMCHECK = ["--report-api-errors", "no"]
MISSING = "no compute-sanitizer here: put the bin folder of NVIDIA's CUDA toolkit on the PATH, or set CUDA_HOME"


class Refused(Exception):
    """The sanitizer cannot work on this GPU, whatever the kernel."""


def profile(job: Job) -> Iterator[Finding]:
    """A finding for each case. The cases of a setting have the same one."""
    program = toolchain.tool("compute-sanitizer")
    refusal = "not run: it checks the memory of a CUDA GPU only" if job.device != "cuda" else "" if program else MISSING
    first: dict[tuple[str, ...], Case] = {}
    for case in job.cases:
        if ops.get(case.op).kernels[case.kernel].backend in BACKENDS:
            first.setdefault(_setting(case), case)
    job.folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = {
            setting: pool.submit(_check, str(program), case, job, number)
            for number, (setting, case) in enumerate(first.items())
            if not refusal
        }
        for case in job.cases:
            if refusal:
                yield Finding(why=refusal)
            elif one := found.get(_setting(case)):
                yield Finding(why=one.result())
            else:
                yield Finding(why="not run: neither CUDA nor Triton")


def _setting(case: Case) -> tuple[str, ...]:
    return case.op, case.kernel, case.dtype, *case.params.values()


def _check(program: str, case: Case, job: Job, number: int) -> str:
    """What memcheck says of a setting: "ok", or a sentence."""
    path = job.folder / f"{case.op}-{case.kernel}-{number}.log"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as request, open(path, "w") as log:
        json.dump({"case": case.to_dict(), "extra": job.extra}, request)
        request.flush()
        child = [sys.executable, "-m", "minfer.profilers.memcheck_target", request.name]
        command = [program, "--tool", "memcheck", *OPTIONS, *MEMCHECK, *child]
        try:
            environment = os.environ | ENVIRONMENT
            limit = job.build_timeout_s
            status = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            return f"memcheck was killed after {job.build_timeout_s:g} s"
    text = path.read_text(errors="replace")
    try:
        said = verdict(text, status)
    except Refused as refused:
        return str(refused)
    return "ok" if said == "clean" else said + find_place(text)


def find_place(log: str) -> str:
    """Where in the sources memcheck saw its first error, as in " in v04_mma.cu:51"; empty if it does not say."""
    found = re.search(rf"^{MARK} +at .* in (\S+?):(\d+)", log, re.MULTILINE)
    return f" in {Path(found[1]).name}:{found[2]}" if found else ""


def verdict(log: str, status: int) -> str:
    """What a log says: "clean", or what is wrong. Raises Refused if the sanitizer could not run here at all."""
    if "Device not supported" in log:
        raise Refused("compute-sanitizer does not support this GPU, or the sandbox that it is in; try another machine")
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    said = [line.removeprefix(MARK).strip() for line in lines if line.startswith(MARK)]
    said = [line for line in said if line and line != "COMPUTE-SANITIZER"]
    died = next((line for line in reversed(lines) if not line.startswith(MARK)), f"exit status {status}")
    counts = [int(count) for count in re.findall(rf"^{MARK} (?:ERROR|RACECHECK) SUMMARY: (\d+)", log, re.MULTILINE)]
    if not counts:
        return f"did not run: {said[0] if said and status == 255 and died.startswith('exit status') else died}"
    if total := sum(counts):
        return f"{total} error{'s' * (total > 1)}: {said[0]}"
    return f"failed: {died}" if status else "clean"
