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
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path

import torch

from minfer import ops
from minfer.bench.device import arch, pick
from minfer.build import cache, toolchain
from minfer.ops import Kernel
from minfer.profilers.memcheck import ENVIRONMENT, MEMCHECK, MISSING, OPTIONS, Refused, verdict
from minfer.profilers.memcheck_target import run_all

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs" / "sanitize"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def check(kernel: Kernel, device: torch.device) -> int:
    """The child's part: run a kernel on all shapes that it supports, and compare with the reference. Returns the number
    of runs."""
    op = ops.get(kernel.op)
    firsts = op.cases(kernel, (*op.odd_shapes, *op.sizes.get("small", ())))
    return run_all(kernel, (case for first in firsts for case in op.under_each_call(first)), device)


def title(kernel: Kernel) -> str:
    return f"{kernel.op}/{kernel.name}"


def compile_error(kernel: Kernel, arch: str) -> str:
    """Why a kernel does not compile; empty when it is in the cache now."""
    if cache.find(kernel, arch):
        return ""
    command = [sys.executable, "-m", "minfer.build", kernel.op, kernel.name, arch]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return (done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1] if done.returncode else ""


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
        refusal = MISSING
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
