"""The README's results tables and the pages behind them, from parquet: `python analysis/make_tables.py`.

Reads results/**/*.parquet and rewrites what is between `<!-- results:begin -->` and `<!-- results:end -->`: for each op
on each device the tables of a representative problem, and an overview of the sets of shapes that it belongs to. The
tables of every problem are pages below docs/results/. No number is typed here or there: all come from rows. Only the
problems that are shown become Python objects.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from analysis import pages
from analysis.command import Options, parser, run
from analysis.overview import by_group, overview_lines
from analysis.readme import README, counted, markers, plain, update
from analysis.rows import choose, on_one_clock, sections, with_problem
from analysis.tables import (
    COLUMNS,
    LEGEND,
    MORE_LEGEND,
    PROVENANCE,
    REGIMES,
    headline,
    more_columns,
    problem_lines,
    provenance,
    title,
)
from minfer.rows import store

MARKED = "results"
BEGIN, END = markers(MARKED)
COMMAND = "python analysis/make_tables.py"
MOST_PROBLEMS = 250  # on a page, of about 1.8 KiB each: GitHub shows 500 KiB


@dataclass(frozen=True)
class Section:
    """One op on one device."""

    op: str
    device: str
    origin: str  # a sentence
    problems: dict[str, list[store.Row]]  # those that are shown, in order
    headline: str | None  # the representative one; None where no kernel supports any
    count: int
    left_out: int  # problems that no kernel supports

    @property
    def page(self) -> Path:
        """Where its page belongs, below the folder of the pages."""
        return Path(store.slug(self.device)) / f"{store.slug(self.op)}.md"

    @property
    def title(self) -> str:
        return f"{plain(self.op)} on {plain(self.device)}"

    @property
    def has_more(self) -> bool:
        """Whether there are figures that only a page shows."""
        return any(more_columns(rows, regime) for rows in self.problems.values() for regime in REGIMES)

    @property
    def has_page(self) -> bool:
        return self.count > 1 or self.has_more

    def readme_lines(self, folder: str) -> list[str]:
        lines = [f"### {self.title}", "", self.origin, ""]
        if self.headline is not None:
            rows = self.problems[self.headline]
            lines += [f"{title(self.headline)}: {said}", ""] if (said := headline(rows)) else []
            lines += problem_lines(self.headline, rows)
            group = self.headline.rpartition("/")[0]
            lines += overview_lines(self.op, group, dict(by_group(self.problems))[group])
        if self.has_page:
            all_of = f"All {self.count} problems" if self.count > 1 else "With workspace and energy"
            lines += [f"[{all_of}]({folder}/{self.page.as_posix()}), cold and steady.", ""]
        if self.left_out:
            lines += [f"Not run: {counted(self.left_out, 'problem')} that no kernel here supports.", ""]
        return lines

    def page_lines(self) -> list[str]:
        lines = [f"# {self.title}", "", self.origin, "", LEGEND, ""]
        if self.has_more:
            lines += [MORE_LEGEND, ""]
        for group, problems in by_group(self.problems):
            lines += overview_lines(self.op, group, problems)
        for name, rows in self.problems.items():
            lines += problem_lines(name, rows, full=True)
        if more := self.count - len(self.problems):
            lines += [f"{counted(more, 'more problem')} {'is' if more == 1 else 'are'} in the parquet files only.", ""]
        return lines


def every_section(table: pa.Table) -> Iterator[Section]:
    """The sections of all usable rows, in the order in which they are shown."""
    table = on_one_clock(with_problem(table))
    for op, device in sections(table):
        here = pc.and_(pc.equal(table["op"], op), pc.equal(table["device"], device))
        origin = table.select(["finished", *PROVENANCE]).filter(here)  # to filter every column would cost a second
        supported = pc.and_(here, pc.not_equal(table["status"], "unsupported"))
        order, headline = choose(table.select(["problem", "status", "flops", "bytes"]).filter(supported))
        shown = order[:MOST_PROBLEMS]
        if headline is not None and headline not in shown:
            shown[-1] = headline
        rows: dict[str, list[store.Row]] = {name: [] for name in shown}
        for row in table.filter(pc.and_(here, pc.is_in(table["problem"], pa.array(shown, pa.string())))).to_pylist():
            rows[row["problem"]].append(row)
        left_out = pc.count_distinct(table["problem"].filter(here)).as_py() - len(order)
        yield Section(op, device, provenance(origin), rows, headline, len(order), left_out)


def markdown(found: Iterable[Section], folder: str) -> str:
    """What goes between the markers; the pages lie in `folder`."""
    lines = [line for section in found for line in section.readme_lines(folder)]
    return "\n".join([LEGEND, "", *lines] if lines else ["No results yet: `python -m minfer.launch` makes them.", ""])


def main(arguments: Iterable[str] | None = None) -> int:
    """Returns the exit status: 0 when the tables are those of the results, and every file could be read."""
    made = parser(COMMAND, __doc__ or "", "--readme", README)
    made.add_argument("--pages", type=Path, help="folder (default: docs/results beside the README)")
    return run(made, arguments, COLUMNS, write)


def write(table: pa.Table, options: Options) -> list[str]:
    folder = options.pages or options.readme.parent / "docs" / "results"
    found = list(every_section(table))
    where = Path(os.path.relpath(folder, options.readme.parent)).as_posix()
    problem = update(options.readme, MARKED, markdown(found, where), COMMAND, options.check)
    texts = {folder / section.page: "\n".join(section.page_lines()) for section in found if section.has_page}
    return ([problem] if problem else []) + pages.bring_up_to_date(texts, folder, COMMAND, options.check)


if __name__ == "__main__":
    pa.set_memory_pool(pa.system_memory_pool())  # a million rows: 0.6 GiB, with mimalloc 0.8 and a second more
    sys.exit(main())
