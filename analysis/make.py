"""Makes all tables, plots and pages from rows: `python analysis/make.py [NAME...] [ROWS...] [--check]`.

Each NAME is a module of `analysis/makers/`, whose docstring says what it writes. Without a name all are made, and the figures
of the pages are checked at the end. ROWS are parquet files; without any these are the files of results/ that git tracks.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from minfer.analysis.data import sources
from minfer.analysis.data.prepare import load, select_columns
from minfer.analysis.makers import Maker, Options
from minfer.analysis.tables.markdown import README, pluralise
from minfer.rows import store

COMMAND = "python analysis/make.py"
# In the order in which they are made: some pages show what an earlier maker wrote.
NAMES = (
    "tables", "plots", "claims", "headers", "best", "fusion", "hgemm", "decoder", "anywhere", "functions", "evidence",
    "demonstrations", "reliability", "figures",
)  # fmt: skip
# Places that few users change: option, default, what is there.
PLACES = (
    ("--sources", Path("minfer/ops"), "folder of the kernels, whose headers get the measured lines"),
    ("--best", Path("minfer/functional/best.json"), "table by which functions choose a kernel"),
    ("--fusion", Path("minfer/fusion/measured.json"), "table by which minfer.fuse decides"),
    ("--benchmarks", Path("benchmarks/results"), "folder with what the scripts of benchmarks/ recorded"),
    ("--outcomes", Path("tests/cluster/outcomes.json"), "what the tests on a cluster noted"),
)


def main(
    arguments: Iterable[str] | None = None, only: str | None = None, command: str = COMMAND, about: str | None = __doc__
) -> int:
    """Makes or checks what the arguments name. With `only`, makes only that, and every word names a parquet file. Returns
    the exit status: 0 if everything matches the rows and every file could be read."""
    parser = _parser(only, command, about or "")
    words = parser.parse_intermixed_args(list(arguments) if arguments is not None else None)
    names = [only] if only else [name for name in NAMES if name in words.words] or NAMES
    files = [word for word in words.words if only or word not in NAMES]
    if unknown := [word for word in files if not only and not word.endswith(".parquet")]:
        parser.error(f"{unknown[0]} is no parquet file, and none of {', '.join(NAMES)}")
    problems = list(_make(names, [Path(file) for file in files], words.results, _options(words)))
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0


def _parser(only: str | None, command: str, about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=command, description=about.splitlines()[0])
    of = "parquet files to read instead of searching --results"
    what = of if only else f"what to make (default: all of {', '.join(NAMES)}), and {of}"
    parser.add_argument("words", nargs="*", metavar="ROWS" if only else "NAME|ROWS", help=what)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if anything is out of date")
    default = f"{sources.RESULTS}; in a git clone only files that git tracks"
    parser.add_argument("--results", type=Path, help=f"folder to search (default: {default})")
    parser.add_argument("--readme", type=Path, default=README, help=f"file to rewrite (default: {README})")
    parser.add_argument("--docs", type=Path, help="folder of pages (default: docs beside the README)")
    parser.add_argument("--pages", type=Path, help="folder of the pages of ops (default: results in --docs)")
    of_others = (lambda about: argparse.SUPPRESS) if only else str  # hides the help on options that `only` does not use
    about = "folder of pictures (default: plots in --docs)"
    parser.add_argument("--plots", type=Path, help=of_others(about))
    for option, place, about in PLACES:
        parser.add_argument(option, type=Path, default=place, help=of_others(f"{about} (default: {place})"))
    about = "parquet files of benchmarks/ for `evidence` (default: those in --benchmarks)"
    parser.add_argument("--measured", nargs="+", type=Path, default=[], metavar="FILE", help=of_others(about))
    return parser


def _options(words: argparse.Namespace) -> Options:
    named = {name: value for name, value in vars(words).items() if name != "words"}
    docs = words.docs or words.readme.parent / "docs"
    places = {"docs": docs, "pages": words.pages or docs / "results", "plots": words.plots or docs / "plots"}
    return Options(**named | places | {"results": words.results or sources.RESULTS})


def _make(names: Sequence[str], files: list[Path], results: Path | None, options: Options) -> Iterator[str]:
    """Makes or checks pages from the usable rows of the files or of the folder. Yields each problem as a sentence."""
    # Imports each maker only when it is asked for: tables need no Matplotlib.
    makers = {name: _maker(name) for name in names}
    rows, skipped, left = None, list[str](), list[str]()
    if columns := [column for maker in makers.values() for column in maker.columns]:
        try:
            rows, skipped = load(files or ([] if results else _published()), options.results, columns)
        except FileNotFoundError as error:
            yield str(error)
    yield from skipped
    chosen = rows.filter(pc.is_null(rows["drawn"])) if rows is not None else None
    for name, maker in makers.items():
        if not maker.columns:
            yield from maker.write(store.SCHEMA.empty_table(), options)
        elif rows is not None and skipped and (maker.all_or_nothing or not len(rows)):
            left.append(name)
        elif rows is not None:
            yield from maker.write(select_columns(rows if maker.of_drawn else chosen, maker.columns), options)
    if left:
        of = f" of {', '.join(left)}" if len(names) > 1 else ""
        yield f"nothing was written{of}: the rows that are left would not say the same"


def _maker(name: str) -> Maker:
    found: Maker = importlib.import_module(f"minfer.analysis.makers.{name}").MAKER
    return found


def _published() -> list[Path]:
    """The files of `results/` that git tracks; prints how many it leaves out. An empty list means: read all."""
    kept = sources.list_tracked(sources.RESULTS)
    if kept and (others := len(store.files(sources.RESULTS)) - len(kept)):
        them, folder = "it" if others == 1 else "them", sources.RESULTS
        print(
            f"{pluralise(others, 'file')} of {folder} left out: git does not track {them}; run `git add {folder}`, "
            f"or pass `--results {folder}`",
            file=sys.stderr,
        )
    return kept


if __name__ == "__main__":
    pa.set_memory_pool(pa.system_memory_pool())  # for a million rows mimalloc takes 0.2 GiB and 1 s more
    sys.exit(main())
