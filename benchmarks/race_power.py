"""Does a race tell a kernel that was slowed by 2 % from one that was not changed? `python benchmarks/race_power.py`

Unpacks a kernel of hgemm three times, as `minfer race` does, with a wait after its work: once as the baseline, once the same
again, and once with a wait that is longer by 2 % of a call. Each of the two is timed against the baseline again and again,
every time in a new process, and the verdicts are counted: all of the first must be ties, all of the second slower. Runs on a
GPU, or on a quiet machine's CPU, and writes benchmarks/results/sensitivity-race-<device>.parquet.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.sensitivity import FOLDER, row
from minfer import build, ops
from minfer.bench import device as devices
from minfer.bench.measure import Bench
from minfer.bench.stats import compare
from minfer.bench.timing import Timing
from minfer.ops import Kernel
from minfer.rows import store
from minfer.run import race
from minfer.run.start import commit_of_sources

SLOWER = 0.02
WAIT_NS = 5_000  # in all of them, so that what it costs to wait at all is in all of them
TIMING = Timing(cold_cap_s=10.0, precision=0.005)
DEFAULTS = {"cuda": ("v13_cooperative", 8192), "cpu": ("cpu_blocked", 256)}

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


def once(registration: Path, kernel: str, size: int) -> dict[str, Any]:
    """One race, in this process: the verdict, and what was found."""
    ops.load_file(registration)
    op, device = ops.get("hgemm"), devices.pick("cuda" if devices.no_gpu() is None else "cpu")
    case = op.case(kernel, "bfloat16", dict.fromkeys("mnk", size))
    arch = devices.arch(device)
    functions = [build.function(op.kernels[name], arch) for name in (kernel, op.baseline(case))]
    bench = Bench(op, case, functions[0], functions[1], device, seed=1)
    bench.warm_up(1.0)
    samples = bench.cold(TIMING)
    found = compare(*samples.T)
    about = {"verdict": found.verdict, "speedup": found.speedup, "half_width": found.half_width}
    return about | {"baseline_us": float(np.median(samples[:, 1])) * 1e6, "rounds": len(samples)}


def in_process(registration: Path, kernel: str, size: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--once", str(registration), "--kernel", kernel, "--size", str(size)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"a race failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def prepared(kernel: Kernel, folder: Path, waits: tuple[int, int]) -> Path:
    """The registration of a kernel against itself, with these waits: of the baseline and of the candidate."""
    labels = ["before", "after"]
    for label, nanoseconds in zip(labels, waits, strict=True):
        with_wait(kernel, race.unpack(race.TREE, folder / label), nanoseconds)
    return race.register(ops.get("hgemm"), [kernel], labels, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernel", help="a kernel of hgemm (default: one of this machine's)")
    parser.add_argument("--size", type=int, help="m = n = k")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(options.once, options.kernel, options.size)))
        return 0
    kind = "cuda" if devices.no_gpu() is None else "cpu"
    name, size = options.kernel or DEFAULTS[kind][0], options.size or DEFAULTS[kind][1]
    kernel = ops.get("hgemm").kernels[name]
    rows = []
    with tempfile.TemporaryDirectory(prefix="minfer-race-") as temporary:
        unchanged = prepared(kernel, Path(temporary) / "unchanged", (WAIT_NS, WAIT_NS))
        us = in_process(unchanged, f"{name}@after", size)["baseline_us"]
        longer = WAIT_NS + round(1e3 * SLOWER * us)
        slowed = prepared(kernel, Path(temporary) / "slowed", (WAIT_NS, longer))
        for registration, wanted in ((unchanged, "tie"), (slowed, "slower")):
            found = [in_process(registration, f"{name}@after", size) for _ in range(options.repeats)]
            missed = sum(each["verdict"] != wanted for each in found)
            median = float(np.median([1 / each["speedup"] - 1 for each in found]))
            width = float(np.median([each["half_width"] for each in found]))
            what = f"{name}, {size}³, {us:.0f} µs, {'unchanged' if wanted == 'tie' else f'slowed by {SLOWER:.0%}'}"
            what += f" (found: {median:.2%}, ± {width:.2%}): not called {wanted}, of {options.repeats}"
            rows.append(row("race of two revisions", what, missed / options.repeats, 0.0, "share"))
            print(f"{'MISSED' if missed else 'met   '} {what}: {missed}", flush=True)
    environment = devices.environment(devices.pick(kind))
    about = {key: environment[key] for key in ("device", "driver", "torch")} | {"commit": commit_of_sources()}
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"sensitivity-race-{store.slug(environment['device'])}.parquet"
    pq.write_table(pa.Table.from_pylist([found | about for found in rows]), path)
    print(f"written: {path}")
    return 0 if all(found["met"] for found in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
