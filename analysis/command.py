"""What the programs share that write from rows: their options, and what goes wrong before a row is shown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa

from minfer.analysis.data import sources
from minfer.analysis.data.prepare import load
from minfer.analysis.tables.markdown import counted
from minfer.rows import store

Options = argparse.Namespace


def parser(command: str, about: str, option: str, target: Path, results: Path | None = None) -> argparse.ArgumentParser:
    """The parser of a program that reads parquet files and writes `target`, or the file that `option` names. `results` is the
    default folder; if it is None, `run` reads the files of `results/` that git tracks."""
    made = argparse.ArgumentParser(prog=command, description=about.splitlines()[0])
    made.add_argument("files", nargs="*", type=Path, help="parquet files to read instead of searching --results")
    default = results or f"{sources.RESULTS}; in a git clone only files that git tracks"
    made.add_argument("--results", type=Path, default=results, help=f"folder to search (default: {default})")
    made.add_argument(option, type=Path, default=target, help=f"file to rewrite (default: {target})")
    made.add_argument("--check", action="store_true", help="write nothing; exit 1 if anything is out of date")
    return made


def run(
    parser: argparse.ArgumentParser,
    arguments: Iterable[str] | None,
    columns: Iterable[str],
    write: Callable[[pa.Table, Options], list[str]],
    all_or_nothing: bool = False,
) -> int:
    """Read the usable rows and have them written; `write` returns what is wrong, in sentences. The exit status: 0 when all
    is as it should be. Nothing is written where no row could be read or, `all_or_nothing`, where some file could not."""
    options = parser.parse_args(list(arguments) if arguments is not None else None)
    try:
        rows, problems = load(
            options.files or ([] if options.results else _published()), options.results or sources.RESULTS, columns
        )
    except FileNotFoundError as error:
        rows, problems = None, [str(error)]
    if rows is not None:
        if problems and (all_or_nothing or not len(rows)):
            problems.append("nothing was written: the rows that are left would not say the same")
        else:
            problems += write(rows, options)
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0


def _published() -> list[Path]:
    """The files of `results/` that git tracks; prints how many it leaves out. An empty list means: read all."""
    kept = sources.tracked(sources.RESULTS)
    if kept and (others := len(store.files(sources.RESULTS)) - len(kept)):
        them, folder = "it" if others == 1 else "them", sources.RESULTS
        print(
            f"{counted(others, 'file')} of {folder} left out: git does not track {them}; run `git add {folder}`, "
            f"or pass `--results {folder}`",
            file=sys.stderr,
        )
    return kept
