"""One HTML file from rows, to look into: `python analysis/report.py RESULTS... -o FILE`, or `minfer report`.

A leaderboard, all rows to filter and sort, plots to hover and zoom, the roofline, and a page for each kernel: its source,
registers, counters, errors and history. The file needs no network and no other file.
"""

from __future__ import annotations

import argparse
import html
import importlib.util
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from minfer.analysis.data import sources
from minfer.analysis.data.prepare import keep_usable
from minfer.analysis.web import columns, content, kernels
from minfer.rows import store
from minfer.rows.select import read_shown

PAGE = Path(__file__).parent / "web"
SCRIPTS = ("data.js", "table.js", "views.js", "plots.js", "overview.js", "kernel.js", "main.js")
NESTED = ("peaks", "metrics", "functions")
MOST_ROWS = 400_000
EXACT_ROWS = 20_000  # of more, the last digit of a figure may differ: they are stored with seven
NO_PLOTLY = "the report's plots need the package plotly: pip install plotly"


class Mistake(Exception):
    """There is no report to write; one sentence that says why and what to do."""


def main(arguments: Iterable[str] | None = None) -> int:
    """Returns the exit status: 0 when the report is written and every file could be read, 2 for a mistake."""
    parser = argparse.ArgumentParser(prog="minfer report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="*", help="folders, parquet files or names of runs (default: results)")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="default: report.html")
    parser.add_argument(
        "--results", dest="folder", type=Path, default=sources.RESULTS, help="where runs are looked for"
    )
    options = parser.parse_args(list(arguments) if arguments is not None else None)
    try:
        return write(options.results or [str(options.folder)], options.folder, options.output)
    except (Mistake, sources.Unknown) as error:
        print(f"minfer report: {error}", file=sys.stderr)
        return 2


def write(words: Iterable[str], folder: Path, output: Path) -> int:
    """Write the report of what the words name. Raises Mistake and Unknown."""
    script = plotly()
    with tempfile.TemporaryDirectory() as kept:
        paths = sorted({path for word in words for path in sources.find_files(word, folder, Path(kept))})
        table, bad = read_shown(paths, [*content.COLUMNS, *NESTED])
    sources.print_skipped(bad)
    table = keep_usable(table)
    if not len(table):
        if bad:
            raise Mistake("there are no rows to show beside the files that cannot be read; name another run or folder")
        raise Mistake("there are no rows to show; run `minfer +sweep=hgemm` first, or name another folder")
    if len(table) > MOST_ROWS:
        raise Mistake(
            f"{len(table)} rows are more than a page can show ({MOST_ROWS}); name a run or a folder of a device"
        )
    text = page(table, script)
    try:
        output.write_text(text, "utf-8")
    except OSError as error:
        raise Mistake(f"cannot write {output}: {error.strerror or error}; choose another file with -o") from error
    print(f"{output}: {len(table)} rows, {output.stat().st_size / 1e6:.1f} MB; open it in a browser.")
    return 1 if bad else 0


def plotly() -> str:
    """Plotly's JavaScript, from its Python package. Raises Mistake."""
    found = importlib.util.find_spec("plotly")
    places = found.submodule_search_locations if found else None
    script = Path(places[0]) / "package_data" / "plotly.min.js" if places else None
    if script is None or not script.is_file():
        raise Mistake(NO_PLOTLY)
    return script.read_text("utf-8")


def page(table: pa.Table, script: str) -> str:
    """The report of usable rows; `script` is Plotly's."""
    newest, older = content.split(table)
    rows = content.add_shares(newest.drop_columns(["functions"]).to_pylist(maps_as_pydicts="lossy"))
    past = older.drop_columns([*NESTED, "place"]).to_pylist(maps_as_pydicts="lossy")
    every = [row | {"newest": True} for row in rows]
    every += [row | {"newest": False, "metrics": None} for row in past]
    facts: dict[str, Any] = {
        "sections": content.about(newest, rows),
        "kernels": kernels.facts(rows, table),
        "looks": content.looks(dict.fromkeys(row["kernel"] for row in every)),
        "statuses": store.STATUSES,
        "measured": store.MEASURED,
        "docs": {name: doc for name, _, doc in store.COLUMNS},
    }
    tables = {"rows": content.columns(every), "leaders": content.leaders(rows)}
    compact = len(every) > EXACT_ROWS
    data = columns.pack({name: columns.encode(found, compact) for name, found in tables.items()}, facts)
    devices = ", ".join(dict.fromkeys(section["device"] for section in facts["sections"]))
    return assemble(
        {"title": html.escape(f"minfer: {devices}"), "data": data, "plotly": columns.compress(script.encode())}
    )


def assemble(parts: dict[str, str]) -> str:
    """The page from its files: each `{{name}}` of page.html is replaced once."""
    parts |= {"style": (PAGE / "report.css").read_text("utf-8")}
    parts |= {"script": "\n".join((PAGE / name).read_text("utf-8") for name in SCRIPTS)}
    before, *rest = (PAGE / "page.html").read_text("utf-8").split("{{")
    texts = [before]
    for part in rest:
        name, _, after = part.partition("}}")
        texts += [parts[name], after]
    return "".join(texts)


if __name__ == "__main__":
    sys.exit(main())
