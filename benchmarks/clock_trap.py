"""The trap of a power-limited card: one kernel, timed as if it were four, in three ways. Needs a GPU.

    uv run python benchmarks/clock_trap.py

The four candidates are the same cuBLAS product, so every difference comes from the method. Writes one row a candidate, method
and repetition to `benchmarks/results/`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from minfer.bench import device as devices
from minfer.bench.clock import CudaClock, Hooks
from minfer.bench.telemetry import Telemetry
from minfer.rows import store
from minfer.run.start import commit_of_sources

ROOT = Path(__file__).resolve().parents[1]
SIZE, CANDIDATES, CALLS, REPETITIONS, REST_S = 8192, 4, 40, 2, 4.0


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("clock_trap.py needs a CUDA GPU, and this machine has none")
    device = devices.pick("cuda")
    a, b = (torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(SIZE, SIZE, device=device, dtype=torch.bfloat16)
    clock, telemetry = CudaClock(device), Telemetry(device)
    candidate = lambda index: torch.mm(a, b.t(), out=out)
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    loops = [lambda index: candidate(index) for _ in range(CANDIDATES)]  # four objects: the clock keeps a graph of each

    def add(method: str, repetition: int, number: int, seconds: np.ndarray, mhz: float) -> None:
        tflops = 2 * SIZE**3 / float(np.median(seconds)) / 1e12
        rows.append({"method": method, "repetition": repetition, "arm": number, "tflops": tflops, "sm_mhz": mhz})

    for repetition in range(REPETITIONS):
        for _ in range(5):
            candidate(0)
        torch.cuda.synchronize()
        time.sleep(REST_S)  # as cool as at the start of a benchmark
        for number in range(CANDIDATES):
            with telemetry.watch() as watched:
                times = clock.cold([candidate], np.zeros((CALLS, 1), dtype=int), Hooks())[:, 0]
            add("one after the other", repetition, number, times, float(np.median(watched["watch_sm_mhz"])))

        time.sleep(REST_S)
        order = np.array([rng.permutation(CANDIDATES) for _ in range(CALLS)])
        with telemetry.watch() as watched:
            shuffled = clock.cold([candidate] * CANDIDATES, order, Hooks())
        for number in range(CANDIDATES):
            add("shuffled rounds", repetition, number, shuffled[:, number], float(np.median(watched["watch_sm_mhz"])))

        time.sleep(REST_S)
        blocks: list[list[np.ndarray]] = [[] for _ in range(CANDIDATES)]
        states.clear()
        clock.steady(loops[0], 2, 0.5, lambda: None)  # from idle to this power, as the bench does
        for number in (*range(CANDIDATES), *reversed(range(CANDIDATES))):
            blocks[number].append(clock.steady(loops[number], 2, 0.5, lambda: states.append(telemetry.sample())))
        for number in range(CANDIDATES):
            mean = np.array([np.mean([np.median(block) for block in blocks[number]])])
            add(
                "settled blocks, there and back",
                repetition,
                number,
                mean,
                float(np.median([s["sm_mhz"] for s in states])),
            )

    environment = devices.environment(device)
    about = {key: environment[key] for key in ("device", "driver", "torch")} | {"commit": commit_of_sources()}
    table = pa.Table.from_pylist([row | about for row in rows])
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / f"clock-trap-{store.slug(environment['device'])}.parquet")
    frame = table.to_pandas()
    for method, group in frame.groupby("method", sort=False):
        print(f"{method}:")
        for _, runs in group.groupby("repetition"):
            spread = runs.tflops.max() / runs.tflops.min() - 1
            print("  ", " ".join(f"{t:6.1f}" for t in runs.tflops), f"TFLOP/s, apart by {spread:.1%}")


if __name__ == "__main__":
    main()
