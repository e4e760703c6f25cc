"""Does a race tell a kernel that was slowed by 2 % from one that was not changed? `python benchmarks/race_power.py`

Unpacks a kernel of hgemm as `minfer race` does, with a wait after its work: as the baseline, the same again, and with a wait
that is longer by 2 % of a call. Each of the last two is timed against the baseline again and again, every time with new
operands, and the verdicts are counted: all of the first must be ties, all of the second slower. The races are spread over
`--processes` new processes, one after the other. Runs on a GPU, or on a quiet machine's CPU, and writes
benchmarks/results/sensitivity-race-<device>.parquet.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import tempfile
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rows import write
from benchmarks.sensitivity import row
from minfer import build, ops
from minfer.bench import device as devices
from minfer.bench.measure import Bench
from minfer.bench.stats import compare
from minfer.bench.timing import Timing
from minfer.ops import Kernel
from minfer.run import race

LABELS = ["before", "after"]
SLOWER = 0.02
WAIT_NS = 5_000  # in all of them, so that what it costs to wait at all is in all of them
WARM_UP_S = 0.5
TIMING = Timing(cold_cap_s=10.0, precision=0.005)
DEFAULTS = {"cuda": ("v13_cooperative", 4096), "cpu": ("cpu_blocked", 256)}
PRELOADED = [
    "torch",
    "minfer.run.race",
    "minfer.bench.measure",
    "benchmarks.sensitivity",
]  # none of them uses the device

# What follows a kernel's work: on a GPU in its stream, on a CPU in its thread.
WAITS = {
    "cuda": """
namespace minfer {
__global__ void wait_ns(unsigned long long ns) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (now - begin < ns);
}
template <typename T>
void launch_and_wait(const Gemm<T>& g) {
  LAUNCH(g);
  wait_ns<<<1, 1, 0, g.stream>>>(NANOSECONDS);
}
}  // namespace minfer
""",
    "cpp": """
#include <chrono>
namespace minfer {
template <typename T>
void launch_and_wait(const Gemm<T>& g) {
  LAUNCH(g);
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begin < std::chrono::nanoseconds(NANOSECONDS)) {}
}
}  // namespace minfer
""",
}


def with_wait(kernel: Kernel, tree: Path, nanoseconds: int) -> None:
    """Make a kernel's source in a tree wait after its work."""
    source = tree / kernel.source.relative_to(ops.PACKAGE)
    pattern = rf"MINFER_HGEMM\({kernel.symbol}, (.+)\)"
    text = source.read_text()
    found = re.search(pattern, text)
    if found is None:
        sys.exit(f"{kernel.name} is not registered by one MINFER_HGEMM; choose another with --kernel")
    wait = WAITS[kernel.backend].replace("LAUNCH", found[1]).replace("NANOSECONDS", str(nanoseconds))
    text = text.replace(found[0], f"{wait}\nMINFER_HGEMM({kernel.symbol}, minfer::launch_and_wait)")
    source.write_text(text)


def device() -> torch.device:
    return devices.pick("cuda" if devices.no_gpu() is None else "cpu")


def compiled(registration: Path, kernel: str) -> None:
    """Build one side of a race, without loading it."""
    ops.load_file(registration)
    build.build(ops.get("hgemm").kernels[kernel], devices.arch(device()))


def races(registration: Path, kernel: str, size: int, seeds: range) -> list[dict[str, Any]]:
    """One race for each seed, with operands of its own, in this process: the verdict, and what was found."""
    ops.load_file(registration)
    op, where = ops.get("hgemm"), device()
    case = op.case(kernel, "bfloat16", dict.fromkeys("mnk", size))
    functions = [build.function(op.kernels[name], devices.arch(where)) for name in (kernel, op.baseline(case))]
    found = []
    for seed in seeds:
        bench = Bench(op, case, functions[0], functions[1], where, seed)
        bench.warm_up(WARM_UP_S)
        samples = bench.cold(TIMING)
        ratio = compare(*samples.T)
        about = {"verdict": ratio.verdict, "speedup": ratio.speedup, "half_width": ratio.half_width}
        found.append(about | {"baseline_us": float(np.median(samples[:, 1])) * 1e6})
    return found


def new_processes(most: int = 1) -> Pool:
    """Up to `most` processes at a time, a new one for each task: copies of one that has imported PyTorch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context.Pool(most, maxtasksperchild=1)


def prepared(kernel: Kernel, folder: Path, waits: tuple[int, int]) -> Path:
    """The registration of a kernel against itself, compiled, with these waits: of the baseline and of the candidate."""
    for label, nanoseconds in zip(LABELS, waits, strict=True):
        with_wait(kernel, race.unpack(race.TREE, folder / label), nanoseconds)
    registration = race.register(ops.get("hgemm"), [kernel], LABELS, folder)
    with new_processes(len(LABELS)) as pool:
        pool.starmap(compiled, [(registration, f"{kernel.name}@{label}") for label in LABELS])
    return registration


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernel", help="a kernel of hgemm (default: one of this machine's)")
    parser.add_argument("--size", type=int, help="m = n = k")
    parser.add_argument("--repeats", type=int, default=20, help="races of each kind (default: 20)")
    parser.add_argument("--processes", type=int, help="new processes for them (default: one a race)")
    options = parser.parse_args()
    kind = "cuda" if devices.no_gpu() is None else "cpu"
    name, size = options.kernel or DEFAULTS[kind][0], options.size or DEFAULTS[kind][1]
    kernel, after = ops.get("hgemm").kernels[name], f"{name}@{LABELS[1]}"
    each = -(-options.repeats // (options.processes or options.repeats))  # races in a process, rounded up
    shares = [range(first, min(first + each, options.repeats)) for first in range(0, options.repeats, each)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="minfer-race-") as temporary, new_processes() as pool:
        unchanged = prepared(kernel, Path(temporary) / "unchanged", (WAIT_NS, WAIT_NS))
        us = pool.apply(races, (unchanged, after, size, range(1)))[0]["baseline_us"]
        longer = WAIT_NS + round(1e3 * SLOWER * us)
        slowed = prepared(kernel, Path(temporary) / "slowed", (WAIT_NS, longer))
        for registration, wanted in ((unchanged, "tie"), (slowed, "slower")):
            tasks = [(registration, after, size, share) for share in shares]
            found = [race for task in tasks for race in pool.apply(races, task)]
            missed = sum(race["verdict"] != wanted for race in found)
            median = float(np.median([1 / race["speedup"] - 1 for race in found]))
            width = float(np.median([race["half_width"] for race in found]))
            what = f"{name}, {size}³, {us:.0f} µs, {'unchanged' if wanted == 'tie' else f'slowed by {SLOWER:.0%}'}"
            what += f" (found: {median:.2%}, ± {width:.2%}): not called {wanted}, of {len(found)}"
            what += f" in {len(shares)} processes"
            rows.append(row("race of two revisions", what, missed / len(found), 0.0, "share"))
            print(f"{'MISSED' if missed else 'met   '} {what}: {missed}", flush=True)
    write("sensitivity-race", rows, devices.pick(kind))
    return 0 if all(found["met"] for found in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
