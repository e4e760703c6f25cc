"""Each module here makes pages from rows, and defines a `MAKER` that `analysis/make.py` calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa


@dataclass(frozen=True)
class Options:
    """What a user asked for: whether to write or only to check, and where files are."""

    check: bool
    results: Path  # folder of the rows, and of the traces of runs
    readme: Path
    docs: Path
    pages: Path  # of ops, by device
    plots: Path
    sources: Path  # of kernels
    best: Path
    fusion: Path
    benchmarks: Path  # folder of what the scripts of benchmarks/ recorded
    measured: list[Path]  # files to read instead of those in `benchmarks`
    outcomes: Path


@dataclass(frozen=True)
class Maker:
    """Writes pages, or only checks them."""

    write: Callable[[pa.Table, Options], list[str]]  # takes usable rows; returns each problem as a sentence
    columns: Sequence[str] = ()  # that it needs; if none, it gets an empty table
    of_drawn: bool = False  # gets the rows of drawn problems, too; other makers show chosen problems only
    all_or_nothing: bool = True  # write nothing if some file of rows could not be read
