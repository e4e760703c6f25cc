"""What makes pages from rows: a module each, with its `MAKER`. `analysis/make.py` calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa


@dataclass(frozen=True)
class Options:
    """What a user asked for: whether to write or only to check, and where things are."""

    check: bool
    results: Path  # folder with the traces of runs, too
    readme: Path
    docs: Path
    pages: Path  # of ops, by device
    plots: Path
    sources: Path  # of kernels
    best: Path
    fusion: Path
    benchmarks: Path  # folder with what its scripts recorded
    measured: list[Path]  # files from there that are read instead
    outcomes: Path


@dataclass(frozen=True)
class Maker:
    """Writes pages, or only checks them."""

    write: Callable[[pa.Table, Options], list[str]]  # from usable rows; what is wrong, in sentences
    columns: Sequence[str] = ()  # of rows that it needs; without any it gets no rows
    all_or_nothing: bool = True  # it writes nothing where some file of rows could not be read
