"""How long `make_tables` takes for a million rows and more: `python benchmarks/tables_at_scale.py --rows 1000000 10000000`.

For each number it writes rows of the real schema to a temporary folder, runs analysis/make_tables.py on them in a process of
its own on two cores, and prints its seconds and peak memory. It writes what it found to benchmarks/results/, from where
analysis/make.py evidence takes it. Exits 1 when a target is missed. Linux only (wait4, affinity).
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from minfer.rows import store

ROOT = Path(__file__).resolve().parents[1]
CORES = 2
TARGETS = {1_000_000: (10.0, 2.0), 10_000_000: (90.0, 4.0)}  # seconds and GB on two cores, for up to that many rows
OPS = ("hgemm", "rope", "decode_attention")
DEVICES = ("NVIDIA H200", "NVIDIA L40S")
DTYPES = ("bfloat16", "float16")
KERNELS = ("torch", *(f"v{i:02d}_version" for i in range(1, 8)), "triton_tiled", "triton_persistent")
PARAMS = ("layout=TN,accumulate=float32", "layout=NN,accumulate=float32")
SAMPLES = 3  # a list: real rows have 30 and more, but nothing here reads them


Problem = tuple[str, str, str, int, int, int]  # op, dtype, params, m, n, k


def problems() -> Iterator[Problem]:
    """Every op x dtype x parameters x shape, without end: sizes grow."""
    for step in itertools.count(1):
        for op, dtype, params, aspect in itertools.product(OPS, DTYPES, PARAMS, (1, 4)):
            yield op, dtype, params, 64 * step, 64 * step * aspect, 128 * step


def write_file(folder: Path, run: int, device: str, index: int, first: int, count: int, listed: list[Problem]) -> None:
    """One file: `count` problems from the `first` on, each with every kernel, as `run` on `device` left them."""
    n = count * len(KERNELS)
    random = np.random.default_rng([run, index])
    cases = [(kernel, *problem) for problem in listed[first : first + count] for kernel in KERNELS]
    us = random.lognormal(4, 1, n)
    flops = np.array([2.0 * m * n * k for *_, m, n, k in cases])
    status = random.choice(["ok", "unconverged", "wrong", "unsupported"], n, p=[0.9, 0.03, 0.01, 0.06])
    measured = np.isin(status, store.MEASURED)
    start = np.datetime64("2026-03-01T00:00:00", "us") + np.timedelta64(run, "D")
    values: dict[str, object] = {
        "run": [f"202603{run + 1:02d}-120000-sweep"] * n,
        "finished": start + random.integers(0, 10**10, n).astype("timedelta64[us]"),
        "case": [f"{op}/{kernel}/{dtype}/{params}/m={m},n={n},k={k}" for kernel, op, dtype, params, m, n, k in cases],
        "kernel": [case[0] for case in cases],
        "op": [case[1] for case in cases],
        "dtype": [case[2] for case in cases],
        "params": [[tuple(part.split("=")) for part in case[3].split(",")] for case in cases],
        "shape": [list(zip("mnk", case[4:], strict=True)) for case in cases],
        "status": status,
        "message": pa.array(["needs sm_90a, this GPU is sm_89"] * n, mask=measured),
        "baseline": ["torch"] * n,
        "flops": flops,
        "device": [device] * n,
        "device_kind": ["cuda"] * n,
        "driver": ["580.95.05"] * n,
        "torch": ["2.11.0+cu130"] * n,
        "python": ["3.11.9"] * n,
        "node": [f"node{index % 8}"] * n,
        "commit": [f"{run:040x}"] * n,
    }
    for regime in ("cold", "steady"):
        numbers = {"us": us, "p10_us": us * 0.99, "p90_us": us * 1.01, "tflops": flops / us / 1e6}
        numbers |= {"speedup": 50 / us, "speedup_low": 49.8 / us, "speedup_high": 50.2 / us, "baseline_us": us * 0 + 50}
        values |= {f"{regime}_{name}": pa.array(value, mask=~measured) for name, value in numbers.items()}
        values[f"{regime}_verdict"] = pa.array(np.where(us < 50, "faster", "slower"), mask=~measured)
        for who in ("", "baseline_", "duplicate_"):
            values[f"{regime}_{who}samples_us"] = list(random.lognormal(4, 1, (n, SAMPLES)))
    arrays = [pa.array(values[f.name], f.type) if f.name in values else pa.nulls(n, f.type) for f in store.SCHEMA]
    path = folder / store.slug(device) / f"run{run:02d}" / f"{index:06d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_arrays(arrays, schema=store.SCHEMA), path, compression="zstd")


def generate(folder: Path, rows: int, runs: int, rows_per_file: int) -> int:
    """Write about `rows` rows, the same cases in each run; returns how many files."""
    count = max(1, rows // (runs * len(DEVICES) * len(KERNELS)))
    step = max(1, rows_per_file // len(KERNELS))
    listed = list(itertools.islice(problems(), count))
    with ProcessPoolExecutor(CORES) as pool:  # so that this process stays small: wait4 counts the parent's peak too
        futures = [
            pool.submit(write_file, folder, run, device, index, first, min(step, count - first), listed)
            for run in range(runs)
            for device in DEVICES
            for index, first in enumerate(range(0, count, step))
        ]
        for future in futures:
            future.result()
    return len(futures)


def measure(folder: Path, readme: Path) -> tuple[float, float, int]:
    """Seconds, peak resident GB and exit status of make_tables on a folder, in a process of its own."""
    script = str(ROOT / "analysis" / "make_tables.py")
    command = [sys.executable, script, "--results", str(folder), "--readme", str(readme)]
    started = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    return time.perf_counter() - started, usage.ru_maxrss * 1024 / 1e9, os.waitstatus_to_exitcode(status)


def target(rows: int) -> tuple[float, float]:
    """The most seconds and GB that so many rows may take. Raises ValueError for more rows than there is a target for."""
    for most, allowed in TARGETS.items():
        if rows <= most:
            return allowed
    raise ValueError(f"there are targets for up to {max(TARGETS)} rows, and none for {rows}; ask for fewer")


def checks(rows: int, files: int, seconds: float, gb: float, status: int) -> list[dict[str, object]]:
    """What one size is judged by, as analysis/make.py evidence shows it."""
    check = f"tables of {rows:,} rows in {files:,} files"
    found = (("seconds on two cores", seconds, "s"), ("peak memory", gb, "GB"))
    return [
        {
            "check": check,
            "what": what,
            "value": value,
            "target": most,
            "unit": unit,
            "met": status == 0 and value < most,
        }
        for (what, value, unit), most in zip(found, target(rows), strict=True)
    ]


def one_size(rows: int, runs: int, rows_per_file: int) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as name:
        folder, readme = Path(name) / "results", Path(name) / "README.md"
        readme.write_text("<!-- results:begin -->\n<!-- results:end -->\n")
        files = generate(folder, rows, runs, rows_per_file)
        return checks(rows, files, *measure(folder, readme))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--runs", type=int, default=8, help="how many times every case was run; 1: no two rows alike")
    parser.add_argument("--rows-per-file", type=int, default=5_000)
    options = parser.parse_args()
    if min(*options.rows, options.runs, options.rows_per_file) < 1:
        parser.error("--rows, --runs and --rows-per-file take numbers of at least 1")
    try:
        for rows in options.rows:
            target(rows)
    except ValueError as error:
        parser.error(str(error))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    found = [row for rows in options.rows for row in one_size(rows, options.runs, options.rows_per_file)]
    for row in found:
        said = f"{row['value']:.2f} {row['unit']}, {'met' if row['met'] else 'missed'} (under {row['target']:g})"
        print(f"{row['check']}: {row['what']} {said}")
    from benchmarks.rows import write  # only now: it imports PyTorch, and wait4 counts this process's peak too
    from minfer.bench.device import pick

    write("tables-at-scale", found, pick("cpu"))
    return 0 if all(row["met"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
