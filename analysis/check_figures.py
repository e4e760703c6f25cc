"""Do the figures of the results tables agree with each other, and with what their devices can do?

    python analysis/check_figures.py README.md docs/*.md docs/results/*/*.md results/*/*.parquet

From the times and throughputs that a table shows this computes the ratios beside them, as a reader with a calculator would,
and names each that differs by more than rounding. The fastest kernel must be bold, a sentence above the tables must repeat
their figures, and so must the README's table of ops and its headline, whose figures are those of the pages they link to, and
whose counts of problems add up. Times, rates and shares of PyTorch that a page says under "Measured on …" must be in the tables
that it links to. docs/hgemm.md and docs/claims.md have tables of their own (`figures_of_hgemm`, `figures_of_claims`). Of the
parquet files, no time may be below its row's floor, and no rate above its row's measured peak.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from minfer.analysis.cells import Table, agree, amount, every_table, seconds
from minfer.analysis.figures_of_claims import of_claims
from minfer.analysis.figures_of_hgemm import of_hgemm
from minfer.analysis.prose import FIGURES, linked, said_in_prose
from minfer.analysis.roofs import COLUMNS, beyond_roofs
from minfer.analysis.rows import load
from minfer.analysis.sections import OPS_HEADER

REGIMES = ("cold", "steady")
HEADER = ["Kernel", "Time", "Throughput", "% of PyTorch throughput"]
HOST_BOUND = "§"  # marks a time that was not scaled to the baseline: its ratio may differ from the quotient of times
MARKS = f"* †{HOST_BOUND}"  # around a kernel's name
OTHER, GAIN = "% of ", "Speed-up vs. "  # how the columns behind these begin; the first is not in every table
SENTENCE = re.compile(r"^(?P<problem>.+): of PyTorch's throughput \*\*(?P<kernel>.+?)\*\* reaches (?P<said>.+)\.$")
SHARE = re.compile(r"(?P<share>[0-9.]+) %[^%]*? (?P<regime>cold|steady)")

HEADLINE = re.compile(r"\((?P<problem>.+)\): \*\*(?P<kernel>.+?)\*\* reaches (?P<said>.+) of PyTorch's throughput\.$")
LINK = re.compile(r"\[(?P<count>[0-9]*)[^]]*\]\((?P<page>[^)]+)\)")

Shares = dict[tuple[str, str, str], float]  # % of another kernel by problem, regime and kernel


def tables(text: str) -> Iterator[Table]:
    """The tables of one problem in one regime."""
    for title, cells in every_table(text):
        if all(cell.startswith(name) for name, cell in zip(HEADER, cells[0], strict=False)):
            yield title, cells


def shown_shares(text: str, of: str = HEADER[3]) -> Shares:
    """Each kernel's % of PyTorch's throughput, or that of another column, in the tables of a page."""
    found: Shares = {}
    for title, (header, *rows) in tables(text):
        problem, _, regime = title.rpartition(" · ")
        for row in rows:
            if of in header and (share := amount(row[header.index(of)])):
                found[problem, regime, row[0].strip(MARKS)] = share
    return found


def contradictions(text: str) -> Iterator[str]:
    """What does not agree, in a sentence each."""
    for title, (header, *rows) in tables(text):
        times = {row[0].strip(MARKS): time for row in rows if (time := seconds(row[1]))}
        rates = {row[0].strip(MARKS): rate for row in rows if (rate := amount(row[2]))}
        ratios = {at: name.removeprefix(GAIN) for at, name in enumerate(header) if name.startswith(GAIN)}
        others = {at: name.removeprefix(OTHER) for at, name in enumerate(header) if name.startswith(OTHER)}
        others[3] = "torch"
        unscaled = {row[0].strip(MARKS) for row in rows if HOST_BOUND in row[0]}
        for row in rows:
            kernel = row[0].strip(MARKS)
            paired = bool(unscaled & {kernel, "torch"})
            share = amount(row[3])
            if kernel not in times:
                continue
            claims = []
            for at, other in others.items():
                if other in times and not (paired and at == 3):
                    what = "% of PyTorch's time" if other == "torch" else f"% of {other}'s time"
                    claims += [(what, amount(row[at]), row[at], 100 * times[other] / times[kernel])]
            for at, first in ratios.items():
                if first in times:
                    gain = times[first] / times[kernel]
                    claims += [(f"times the speed of {first}", amount(row[at]), row[at], gain)]
            if not paired and {"torch", kernel} <= rates.keys() and re.fullmatch(r"\**[0-9.]+( [kMGT])?\**", row[2]):
                claims += [("% of PyTorch's rate", share, row[3], 100 * rates[kernel] / rates["torch"])]
            for what, said, cell, computed in claims:
                if said and not agree(cell, computed):
                    yield f"{title}: {kernel} is said to have {said:g} {what}, and its figures give {computed:.4g}"
        if times and not any(
            row[0].strip(MARKS) == min(times, key=lambda k: times[k]) and "**" in row[0] for row in rows
        ):
            yield f"{title}: the fastest kernel is not in bold"
    yield from _sentences(text, shown_shares(text))


def of_pages(readme: Path) -> Iterator[str]:
    """Where the table of ops, or the headline above it, says another figure than the page that the table links to."""
    text = readme.read_text()
    ops = [row for _, (header, *rows) in every_table(text) if header == OPS_HEADER for row in rows]
    headline = next((found for line in text.splitlines() if (found := HEADLINE.search(line))), None)
    lines = list[tuple[str, str, dict[str, float | None]]]()  # each problem and kernel with its figures
    for op, kernel, problem, *said, of_other, _, link in ops:
        page = LINK.search(link)
        file = readme.parent / page["page"] if page else readme
        figures_of = file.read_text() if file.is_file() else ""
        shares, (share, _, other) = shown_shares(figures_of), of_other.rpartition(", ")
        if other != "—":
            shown = shown_shares(figures_of, OTHER + other).get((in_full(problem), REGIMES[0], kernel))
            if amount(share) != shown:
                yield f"{op}: the table of ops says {kernel} has {share} of {other}, {file} has {shown}"
        figures = dict(zip(REGIMES, said, strict=True))
        lines.append((problem, kernel, {regime: amount(cell) for regime, cell in figures.items() if amount(cell)}))
        for regime, cell in figures.items():
            if amount(cell) != (shown := shares.get((in_full(problem), regime, kernel))):
                yield f"{op}: the table of ops says {kernel} has {cell} {regime}, {file} has {shown}"
    if headline:
        repeated = {found["regime"]: float(found["share"]) for found in SHARE.finditer(headline["said"])}
        if (headline["problem"], headline["kernel"], repeated) not in lines:
            yield f"the headline says {headline['said']}, and no line of the table of ops does"


def of_prose(page: Path) -> Iterator[str]:
    """Times, rates and shares of a page's prose that the tables which it links to do not have."""
    shown: dict[str, dict[str, list[float]]] = {what: {} for what in FIGURES}
    for file in filter(Path.is_file, linked(page)):
        for _, (_, *rows) in tables(file.read_text()):
            for row in rows:
                for what, figure in zip(FIGURES, (seconds(row[1]), amount(row[2]), amount(row[3])), strict=True):
                    if figure:
                        shown[what].setdefault(row[0].strip(MARKS), []).append(figure)
    yield from said_in_prose(page, shown) if shown["time"] else ()


def of_counts(text: str) -> Iterator[str]:
    """Where the counts of the table of ops do not add up to the problems that it links to."""
    for _, (header, *rows) in every_table(text):
        for row in rows if header == OPS_HEADER else ():
            counts, link = re.findall(r"([0-9]+) [a-z]", row[-2]), LINK.search(row[-1])
            if counts and link and sum(map(int, counts)) != int(link["count"] or 0):
                yield f"{row[0]}: the counts {row[-2]} do not add up to the {link['count']} problems of the page"


def in_full(problem: str) -> str:
    """A problem as tables have it, of one whose square is written once: `m=n=8` is `m=8, n=8`."""
    head, between, shape = problem.rpartition(" · ")
    axes, _, size = shape.rpartition("=")
    return (
        head
        + between
        + (", ".join(f"{axis}={size}" for axis in axes.split("=")) if "=" in axes and "," not in shape else shape)
    )


def _sentences(text: str, shares: Shares) -> Iterator[str]:
    for line in text.splitlines():
        if found := SENTENCE.match(line):
            for said in SHARE.finditer(found["said"]):
                shown = shares.get((found["problem"], said["regime"], found["kernel"]))
                if shown != float(said["share"]):
                    yield f"{found['problem']}: the sentence says {said['share']} % {said['regime']}, the table {shown} %"


def main(words: Iterable[str] | None = None) -> int:
    """Returns the exit status: 1 where figures contradict each other."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("files", nargs="+", type=Path, help="pages, and parquet files")
    named = made.parse_args(list(words) if words is not None else None).files
    pages, rows = ([file for file in named if (file.suffix == ".parquet") == parquet] for parquet in (False, True))
    found, held = list[str](), 0
    if rows:
        table, found = load(rows, Path(), COLUMNS)
        impossible, held = beyond_roofs(table)
        found += impossible
    texts = {page: page.read_text() for page in pages}
    shares = {page: shown_shares(text) for page, text in texts.items()}
    for page, text in texts.items():
        said = [*of_prose(page), *contradictions(text), *of_pages(page), *of_counts(text)]
        found += [f"{page}: {sentence}" for sentence in (*said, *of_hgemm(text), *of_claims(page, shares))]
    counted = sum(len(cells) - 1 for text in texts.values() for _, cells in tables(text))
    right = f"{counted} rows of tables agree" + (f"; {held} measured rows are within their roofs" if held else "")
    print("\n".join(found) or right, file=sys.stderr if found else sys.stdout)
    return int(bool(found) or not counted)


if __name__ == "__main__":
    sys.exit(main())
