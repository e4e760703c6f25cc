"""What does measuring cost beside the measured time? A sweep of about 200 cases at `timing=quick`, with nothing built
yet; of 24 where there is no GPU.

    uv run python benchmarks/cost.py       # some minutes; writes benchmarks/results/

A case's *windows* are the time that its samples cover: its cold windows and its steady blocks. Triton compiles when a
kernel is first called, which is a build like those before. Everything else between two cases is overhead: verifying,
warming up, filling caches between windows, checking, writing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from minfer.rows import store
from minfer.rows.rules import CASE_OVERHEAD_S, SWEEP_OVER_WINDOWS
from minfer.rows.writer import Writer

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "results"
GPU = (
    "dtype=bfloat16",
    "shape.name=cost",
    "shape.gpu=[{m:[1,16,64,128],n:2048,k:2048},{m:[256,512],n:1024,k:1024},{m:[512,1024],n:512,k:512},{m:512,n:256,k:[2048,4096]}]",
)
CPU = (
    "device=cpu",
    "params.layout=[TN,NN]",
    "shape.name=cost",
    "shape.cpu=[{m:[1,16],n:64,k:64}]",
)
SWEEP = ("+sweep=hgemm", "timing=quick", "profiler=none", "cluster=local")


def sweep(words: list[str], folder: Path) -> tuple[float, list[store.Row], list[dict[str, Any]]]:
    """Run a sweep with empty caches. Returns its seconds, its rows and the events of its shard."""
    command = [
        sys.executable,
        "-m",
        "minfer.launch",
        *SWEEP,
        *words,
        f"results={folder}/results",
        f"runs={folder}/runs",
    ]
    caches = {"TORCH_EXTENSIONS_DIR": f"{folder}/extensions", "TRITON_CACHE_DIR": f"{folder}/triton"}
    begin = time.time()
    done = subprocess.run(command, cwd=ROOT, env=os.environ | caches, stdout=subprocess.DEVNULL)
    seconds = time.time() - begin
    if done.returncode not in (0, 4):  # 4: a kernel failed; `split` names the case
        sys.exit(f"the sweep failed with status {done.returncode}; its logs were in {folder}")
    rows = list(store.rows(store.files(folder / "results")))
    (progress,) = (folder / "runs").glob("*/progress/*.jsonl")
    return seconds, rows, [json.loads(line) for line in progress.read_text().splitlines()]


def windows(row: store.Row, block_s: float) -> float:
    """Seconds that a case's samples cover."""
    cold = sum(sum(row[f"cold_{of}samples_us"]) for of in ("", "baseline_", "duplicate_")) * 1e-6
    return cold + 4 * block_s


def write_s(rows: list[store.Row], folder: Path) -> float:
    """Seconds to append a row, on average."""
    writer = Writer(folder / "written", "0000")
    begin = time.perf_counter()
    for row in rows:
        writer.append(row)
    return (time.perf_counter() - begin) / len(rows)


def split(seconds: float, rows: list[store.Row], events: list[dict[str, Any]], folder: Path) -> dict[str, float]:
    """Where the time went, in seconds: of the whole sweep, and of a case on average."""
    timing = json.loads(next((folder / "runs").glob("*/shards/*.json")).read_text())["timing"]
    begun = {event["case"]: event["time"] for event in events if event["event"] == "case"}
    ended = {event["case"]: event["time"] for event in events if event["event"] == "done"}
    moment = {event["event"]: event["time"] for event in events}
    ahead = moment["built"] - moment["building"]
    measured = [row for row in rows if row["status"] in store.MEASURED]
    if failed := [row["case"] for row in rows if row["status"] not in (*store.MEASURED, "unsupported")]:
        sys.exit(f"{len(failed)} of {len(rows)} cases failed, the first of them {failed[0]}")
    if lost := begun.keys() - {row["case"] for row in rows}:
        sys.exit(f"{len(lost)} of {len(begun)} cases have no row, {min(lost)} among them")
    covered = [windows(row, timing["steady_block_s"]) for row in measured]
    late = np.array([row["build_s"] or 0.0 if row["backend"] == "triton" else 0.0 for row in measured])
    whole = np.array([ended[row["case"]] - begun[row["case"]] for row in measured]) - late
    builds = ahead + float(late.sum())
    verify, timed = (np.array([row[name] for row in measured]) for name in ("verify_s", "time_s"))
    return {
        "cases": len(measured),
        "sweep_s": seconds,
        "start_s": seconds - builds - float(whole.sum()),
        "build_ahead_s": ahead,
        "build_late_s": float(late.sum()),
        "windows_s": sum(covered),
        "ratio": seconds / (sum(covered) + builds),
        "case_s": float(whole.mean()),
        "case_windows_s": float(np.mean(covered)),
        "case_verify_s": float(verify.mean()),
        "case_warmup_s": timing["warmup_s"],
        "case_timing_rest_s": float(timed.mean() - np.mean(covered)) - timing["warmup_s"],
        "case_write_s": write_s(measured, folder),
        "case_rest_s": float((whole - verify - timed).mean()),
        "case_overhead_s": float((whole - covered).mean()),
        "case_overhead_median_s": float(np.median(whole - covered)),
        "case_overhead_p90_s": float(np.percentile(whole - covered, 90)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    import torch

    words = list(GPU if torch.cuda.is_available() else CPU)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds, rows, events = sweep(words, folder)
        found = split(seconds, rows, events, folder)
    for key, value in found.items():
        print(f"{key:24} {value:10.3f}")
    met = found["case_overhead_s"] <= CASE_OVERHEAD_S, found["ratio"] <= SWEEP_OVER_WINDOWS
    print(f"{'met' if met[0] else 'MISSED'}: at most {CASE_OVERHEAD_S} s of overhead a case, on average")
    print(f"{'met' if met[1] else 'MISSED'}: at most {SWEEP_OVER_WINDOWS} times windows and builds")
    about = {key: rows[0][key] for key in ("device", "driver", "torch", "commit")}
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"cost-{store.slug(rows[0]['device'])}.parquet"
    pq.write_table(pa.Table.from_pylist([found | about]), path)
    print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
