"""Writes the rows of a benchmark to benchmarks/results/, one parquet file for each benchmark and device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from minfer.bench import device as devices
from minfer.rows import store
from minfer.run.start import commit_of_sources

ROOT = Path(__file__).resolve().parents[1]


def write(benchmark: str, rows: list[dict[str, Any]], device: torch.device, root: Path = ROOT) -> None:
    """Write the rows of a benchmark, and print the path. Each row gets the device, the driver, torch's version and threads, the
    commit, and how busy the machine was: its cores, and its load average of the last minute. A row's own values
    override these."""
    environment = devices.environment(device)
    about = {key: environment[key] for key in ("device", "driver", "torch", "threads")}
    about |= {"commit": commit_of_sources(), "load": os.getloadavg()[0], "cores": os.cpu_count()}
    names = dict.fromkeys(name for row in rows for name in row)  # a column each, null where a row has none
    full = [about | dict.fromkeys(names) | row for row in rows]
    path = root / "benchmarks" / "results" / f"{benchmark}-{store.slug(environment['device'])}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")  # who is killed meanwhile leaves the rows that were there before
    pq.write_table(pa.Table.from_pylist(full), partial)
    partial.replace(path)
    print(f"written: {path}")
