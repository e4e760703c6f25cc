"""Every CUDA kernel under NVIDIA's compute-sanitizer, on small and odd shapes. Needs a GPU.

    uv run python tools/sanitize.py                                    # all kernels, memcheck and racecheck
    uv run python tools/sanitize.py rmsnorm                            # all of an op
    uv run python tools/sanitize.py hgemm/v13_cooperative --tool racecheck

A kernel with right results may still read beside its operands, or run a race that it happens to win. Each kernel and
tool is a process of its own, whose whole log stays in `runs/sanitize/OP-KERNEL-TOOL.log`.

Two reports are the tools' own, and come of the smallest kernels that do the same: synccheck knows no barrier that some
warps reach at one place of the code and others at another, and racecheck none that bytes of the copy engine arrive at.
v14_stream_k has both where clusters share a tile, which they do not at the sizes here.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path

import torch

from minfer import build, ops
from minfer.bench.device import arch, capability, pick
from minfer.bench.operands import Operands
from minfer.bench.timed_results import matches_reference
from minfer.build import cache, toolchain
from minfer.ops import Kernel

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs" / "sanitize"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
MARK = "========="  # before each line of the sanitizer's own

# Without PyTorch's cache each tensor is an allocation of its own, so that memcheck sees the first element beside it.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
# A failed call of ours raises in the child; what PyTorch only asks the driver about is no error of a kernel. Processes
# that start together need ports of their own, and importing PyTorch takes longer than the sanitizer cares to wait.
OPTIONS = ["--target-processes", "application-only", "--error-exitcode", "86"]
OPTIONS += ["--max-connections", "100", "--launch-timeout", "600"]
MEMCHECK = ["--report-api-errors", "no"]


class Refused(Exception):
    """The sanitizer cannot work on this GPU, whatever the kernel."""


def check(kernel: Kernel, device: torch.device) -> int:
    """The child's part: run a kernel on all that it supports of the shapes, and compare with the reference; how often.

    Inputs are made and results compared on the CPU, so that the sanitizer has no kernels but ours to slow down."""
    op, function, tried = ops.get(kernel.op), build.function(kernel, arch(device)), 0
    for first in op.cases(kernel, (*op.odd_shapes, *op.sizes.get("small", ()))):
        for case in op.under_each_call(first):
            if kernel.unsupported(case, capability(device)):
                continue
            operands = Operands(op, case, tried, "normal", torch.device("cpu"))
            given = {name: tensor.to(device, copy=True) for name, tensor in operands.tensors.items()}
            function(*given.values(), **op.call(case))
            results = {name: given[name].cpu() for name in operands.named("out", "inout")}
            if not matches_reference(op, case, operands.named("in", "inout"), results):
                raise AssertionError(f"the result is wrong ({case.problem}, seed {tried})")
            tried += 1
    if not tried:
        raise AssertionError("it supports none of the shapes")
    return tried


def title(kernel: Kernel) -> str:
    return f"{kernel.op}/{kernel.name}"


def compile_error(kernel: Kernel, arch: str) -> str:
    """Why a kernel does not compile; empty when it is in the cache now."""
    if cache.find(kernel, arch):
        return ""
    command = [sys.executable, "-m", "minfer.build", kernel.op, kernel.name, arch]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return (done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1] if done.returncode else ""


def verdict(log: str, status: int) -> str:
    """What a log says: "clean", or what is wrong. Raises Refused where it says nothing of the kernel."""
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


def sanitize(program: str, kernel: Kernel, tool: str) -> str:
    """The verdict of a tool on a kernel, which has been built."""
    child = [sys.executable, str(Path(__file__).resolve()), "--child", kernel.op, kernel.name]
    command = [program, "--tool", tool, *OPTIONS, *(MEMCHECK if tool == "memcheck" else []), *child]
    path = FOLDER / f"{kernel.op}-{kernel.name}-{tool}.log"
    with open(path, "w") as log:
        status = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=log, stderr=log).returncode
    return verdict(path.read_text(errors="replace"), status)


def gpu() -> str:
    """What kernels for the GPU at hand are compiled for; empty without one."""
    return arch(pick("cuda")) if torch.cuda.is_available() else ""


def run(kernels: list[Kernel], tools: list[str], target: str, program: str, jobs: int) -> int:
    """Build the kernels, then put each under each tool, `jobs` at once; the exit status. Raises Refused."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        print(f"building {len(kernels)} kernels for {target}, unless they are in the cache", flush=True)
        errors = list(pool.map(lambda kernel: compile_error(kernel, target), kernels))
        for kernel, error in zip(kernels, errors, strict=True):
            if error:
                print(f"{title(kernel)} does not compile: {error}", flush=True)
        built = [kernel for kernel, error in zip(kernels, errors, strict=True) if not error]
        pairs = {pool.submit(sanitize, program, k, tool): (k, tool) for k, tool in product(built, tools)}
        wrong = any(errors)
        for done, future in enumerate(as_completed(pairs), 1):
            kernel, tool = pairs[future]
            try:
                found = future.result()
            except Refused:
                pool.shutdown(cancel_futures=True)
                raise
            wrong |= found != "clean"
            print(f"[{done}/{len(pairs)}] {title(kernel)} {tool}: {found}", flush=True)
    return int(wrong)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", metavar="NAME", help="OP or OP/KERNEL; default: every CUDA kernel")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: memcheck and racecheck")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes at once")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.child:
        op, name = args.child
        print(f"right in {check(ops.get(op).kernels[name], pick('cuda'))} runs")
        return 0

    known = ops.every_kernel(["cuda"])
    names = [*dict.fromkeys(kernel.op for kernel in known), *map(title, known)]
    asked = [k for k in known if not args.kernels or {k.op, title(k)} & set(args.kernels)]
    target, program = gpu(), toolchain.tool("compute-sanitizer")
    kernels = [k for k in asked if k.builds_for(target or k.archs)]
    refusal = ""
    if unknown := [name for name in args.kernels if name not in names]:
        refusal = f"no CUDA kernel or op {', '.join(unknown)}; there are {', '.join(names)}"
    elif args.jobs < 1:
        refusal = f"--jobs is how many processes run at once, at least 1, not {args.jobs}"
    elif not target:
        refusal = "this machine has no CUDA GPU that PyTorch can use; run this where there is one"
    elif not program:
        refusal = "no compute-sanitizer here: put the bin folder of NVIDIA's CUDA toolkit on the PATH, or set CUDA_HOME"
    elif foreign := {title(k) for k in asked if k not in kernels} & set(args.kernels):
        refusal = f"{', '.join(sorted(foreign))}: not for this GPU, which is {target}"
    if not refusal:
        try:
            return run(kernels, list(dict.fromkeys(args.tool or TOOLS[:2])), target, str(program), args.jobs)
        except Refused as error:
            refusal = str(error)
    print(refusal, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
