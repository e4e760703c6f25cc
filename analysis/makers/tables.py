"""The README's table of ops and the pages behind it, from parquet: `python analysis/make_tables.py`.

Reads the parquet files of results/ that git tracks and rewrites what is between `<!-- results:begin -->` and `<!-- results:end
-->` in the README: a table with one line for each op, of the GPU with most cases, and links to the tables of all devices.
Where the README has the markers `headline`, the sentence and the ladder between them are rewritten too. The tables of every
problem are pages below docs/results/, by device. No number is typed in: all come from rows. Only the problems that are shown
become Python objects.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from minfer.analysis.data.prepare import choose_problems, lead, on_one_clock, primary, sections, with_problem
from minfer.analysis.makers import Maker, Options
from minfer.analysis.tables import pages
from minfer.analysis.tables.markdown import has_markers, markers, update
from minfer.analysis.tables.problem import COLUMNS, PROVENANCE, provenance
from minfer.analysis.tables.sections import Section, Where, device_lines, headline_lines, readme_lines
from minfer.rows import store

MARKED, HEADLINE = "results", "headline"
BEGIN, END = markers(MARKED)
COMMAND = "python analysis/make_tables.py"
MOST_PROBLEMS = 250  # on a page: each takes about 1.8 KiB, and GitHub shows 500 KiB of a page


def every_section(table: pa.Table) -> Iterator[Section]:
    """The sections of all usable rows, in the order in which they are shown."""
    table = on_one_clock(with_problem(table))
    for op, device in sections(table):
        here = pc.and_(pc.equal(table["op"], op), pc.equal(table["device"], device))
        named = [f"{regime}{name}" for name in ("finished", *PROVENANCE) for regime in ("", "steady_")]
        origin = table.select(named).filter(here)  # filtering every column would take a second more
        supported = pc.and_(here, pc.not_equal(table["status"], "unsupported"))
        order, headline = choose_problems(table.select(["problem", "status", "flops", "bytes"]).filter(supported))
        shown = order[:MOST_PROBLEMS]
        if headline is not None and headline not in shown:
            shown[-1] = headline
        rows: dict[str, list[store.Row]] = {name: [] for name in shown}
        for row in table.filter(pc.and_(here, pc.is_in(table["problem"], pa.array(shown, pa.string())))).to_pylist():
            rows[row["problem"]].append(row)
        left_out = pc.count_distinct(table["problem"].filter(here)).as_py() - len(order)
        yield Section(op, device, provenance(origin), rows, headline, len(order), left_out)


def write(table: pa.Table, options: Options) -> list[str]:
    docs, folder, devices = options.docs, options.pages, primary(table)
    to_pages = Path(os.path.relpath(folder, options.readme.parent)).as_posix()
    found = list(every_section(table))
    where = Where(docs, "docs/", f"{to_pages}/")
    bodies = {MARKED: "\n".join(readme_lines(found, devices, where))}
    if has_markers(options.readme, HEADLINE):
        first = lead(table)
        bodies[HEADLINE] = "\n".join(
            line for s in found if (s.op, s.device) == first for line in headline_lines(s, where)
        )
    problems = [update(options.readme, name, body, COMMAND, options.check) for name, body in bodies.items()]
    texts = {folder / section.page: "\n".join(section.page_lines()) for section in found}
    for device in devices:
        here = folder / store.slug(device)
        to_docs = Path(os.path.relpath(docs, here)).as_posix()
        lines = device_lines(found, device, Where(docs, f"{to_docs}/", "../"))
        texts[here / "README.md"] = "\n".join(lines)
    return [p for p in dict.fromkeys(problems) if p] + pages.update_pages(texts, folder, COMMAND, options.check)


MAKER = Maker(write, COLUMNS, all_or_nothing=False)
