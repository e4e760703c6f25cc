"""Do the figures of the results tables agree with each other, and with what their devices can do?

From the times and throughputs that a table shows this computes the ratios beside them, as a reader with a calculator would,
and names each that differs by more than rounding. The fastest kernel must be bold, and a sentence above the tables must repeat
their figures. A device's table of ops must have the figures of the pages that it links to, and its counts of problems must add
up. The README's table of ops, its headline and its ladder must repeat figures of these pages. Times, rates and shares of
PyTorch that a page says under "Measured on …" must be in the tables that it links to. docs/hgemm.md and docs/claims.md have
tables of their own (`hgemm`, `claims`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from minfer.analysis.checks.cells import Table, agrees, find_tables, parse_amount, parse_seconds
from minfer.analysis.checks.prose import FIGURES, check_sections, find_links
from minfer.analysis.data.prepare import REFERENCE
from minfer.analysis.tables.sections import OPS_HEADER, README_HEADER
from minfer.rows.rules import REGIMES

HEADER = ["Kernel", "Time", "Throughput", "% of PyTorch throughput"]
HOST_BOUND = "§"  # marks a time that was not scaled to the baseline: its ratio may differ from the quotient of times
MARKS = f"* †{HOST_BOUND}"  # around a kernel's name
OTHER, GAIN = "% of ", "Speed-up vs. "  # how the columns behind these begin; the first is not in every table
SENTENCE = re.compile(r"^(?P<problem>.+): of PyTorch's throughput \*\*(?P<kernel>.+?)\*\* reaches (?P<said>.+)\.$")
SHARE = re.compile(r"(?P<share>[0-9.]+) %[^%]*? (?P<regime>cold|steady)")

HEADLINE = re.compile(r"\((?P<problem>.+)\): \*\*(?P<kernel>.+?)\*\* reaches (?P<said>.+) of PyTorch's throughput\.$")
LINK = re.compile(r"\[(?P<count>[0-9]*)[^]]*\]\((?P<page>[^)]+)\)")

Shares = dict[tuple[str, str, str], float]  # % of another kernel by problem, regime and kernel


def find_problem_tables(text: str) -> Iterator[Table]:
    """The tables of one problem in one regime."""
    for title, cells in find_tables(text):
        if all(cell.startswith(name) for name, cell in zip(HEADER, cells[0], strict=False)):
            yield title, cells


def read_shares(text: str, of: str = HEADER[3]) -> Shares:
    """Each kernel's % of PyTorch's throughput, or that of another column, in the tables of a page."""
    found: Shares = {}
    for title, (header, *rows) in find_problem_tables(text):
        problem, _, regime = title.rpartition(" · ")
        for row in rows:
            if of in header and (share := parse_amount(row[header.index(of)])):
                found[problem, regime, row[0].strip(MARKS)] = share
    return found


def check_tables(text: str) -> Iterator[str]:
    """What does not agree, in a sentence each."""
    for title, (header, *rows) in find_problem_tables(text):
        times = {row[0].strip(MARKS): time for row in rows if (time := parse_seconds(row[1]))}
        rates = {row[0].strip(MARKS): rate for row in rows if (rate := parse_amount(row[2]))}
        ratios = {at: name.removeprefix(GAIN) for at, name in enumerate(header) if name.startswith(GAIN)}
        others = {at: name.removeprefix(OTHER) for at, name in enumerate(header) if name.startswith(OTHER)}
        others[3] = "torch"
        unscaled = {row[0].strip(MARKS) for row in rows if HOST_BOUND in row[0]}
        for row in rows:
            kernel = row[0].strip(MARKS)
            paired = bool(unscaled & {kernel, "torch"})
            share = parse_amount(row[3])
            if kernel not in times:
                continue
            claims = []
            for at, other in others.items():
                if other in times and not (paired and at == 3):
                    what = "% of PyTorch's time" if other == "torch" else f"% of {other}'s time"
                    claims += [(what, parse_amount(row[at]), row[at], 100 * times[other] / times[kernel])]
            for at, first in ratios.items():
                if first in times:
                    gain = times[first] / times[kernel]
                    claims += [(f"times the speed of {first}", parse_amount(row[at]), row[at], gain)]
            if not paired and {"torch", kernel} <= rates.keys() and re.fullmatch(r"\**[0-9.]+( [kMGT])?\**", row[2]):
                claims += [("% of PyTorch's rate", share, row[3], 100 * rates[kernel] / rates["torch"])]
            for what, said, cell, computed in claims:
                if said and not agrees(cell, computed):
                    yield f"{title}: {kernel} is said to have {said:g} {what}, and its figures give {computed:.4g}"
        if times and not any(
            row[0].strip(MARKS) == min(times, key=lambda k: times[k]) and "**" in row[0] for row in rows
        ):
            yield f"{title}: the fastest kernel is not in bold"
    yield from _check_sentences(text, read_shares(text))


def check_ops_table(readme: Path) -> Iterator[str]:
    """Where a device's table of ops has another figure than the page that it links to."""
    ops = [row for _, (header, *rows) in find_tables(readme.read_text()) if header == OPS_HEADER for row in rows]
    for op, kernel, problem, *said, of_other, _, link in ops:
        page = LINK.search(link)
        file = readme.parent / page["page"] if page else readme
        figures_of = file.read_text() if file.is_file() else ""
        shares, (share, _, other) = read_shares(figures_of), of_other.rpartition(", ")
        if other != "—":
            shown = read_shares(figures_of, OTHER + other).get((write_out(problem), REGIMES[0], kernel))
            if parse_amount(share) != shown:
                yield f"{op}: the table of ops says {kernel} has {share} of {other}, {file} has {shown}"
        figures = dict(zip(REGIMES, said, strict=True))
        for regime, cell in figures.items():
            if parse_amount(cell) != (shown := shares.get((write_out(problem), regime, kernel))):
                yield f"{op}: the table of ops says {kernel} has {cell} {regime}, {file} has {shown}"


def check_readme(readme: Path) -> Iterator[str]:
    """Where the README's table of ops, or its ladder, has another figure than the pages that they link to."""
    tables = list(find_tables(readme.read_text()))
    for op, problem, share, verdicts in (
        row for _, (header, *rows) in tables if header == README_HEADER for row in rows
    ):
        link = LINK.search(verdicts)
        file = readme.parent / link["page"] if link else readme
        figures, other = file.read_text() if file.is_file() else "", re.search(r"\) of (\S+)|% of (\S+)", share)
        name = (other[1] or other[2]) if other else REFERENCE
        column = HEADER[3] if name == REFERENCE else OTHER + name
        shown = [said for (what, regime, _), said in read_shares(figures, column).items()
                 if (what, regime) == (write_out(problem), REGIMES[0])]  # fmt: skip
        if (said := parse_amount(share)) is not None and said not in shown:
            yield f"{op}: the README says {share}, {file} has {shown} in the column {column}"
        whole = file.parent / "README.md"
        lines = [row for _, (header, *rows) in find_tables(whole.read_text() if whole.is_file() else "")
                 if header == OPS_HEADER for row in rows]  # fmt: skip
        if not any(page and page["page"].endswith(file.name) and line[-2].replace("—", "none compared") in verdicts
                   for line in lines if (page := LINK.search(line[-1]))):  # fmt: skip
            yield f"{op}: the README says {verdicts}, and no line of {whole} does"
    yield from _check_headline(readme)


def _check_headline(readme: Path) -> Iterator[str]:
    """The sentence above the README's ladder, and the ladder."""
    text = readme.read_text()
    sentence = next((found for line in text.splitlines() if (found := HEADLINE.search(line))), None)
    link = re.search(r"\[All kernels and problems\]\((?P<page>[^)]+)\)", text)
    if sentence is None or link is None:
        return
    page = readme.parent / link["page"]
    figures, problem = page.read_text() if page.is_file() else "", write_out(sentence["problem"])
    shares = read_shares(figures)
    for said in SHARE.finditer(sentence["said"]):
        if (shown := shares.get((problem, said["regime"], sentence["kernel"]))) != float(said["share"]):
            yield f"the headline says {said['share']} % {said['regime']}, and {page} {shown} %"
    known = dict[str, list[str]]()
    for title, (header, *rows) in find_problem_tables(figures):
        if title == f"{problem} · {REGIMES[0]}":
            gain = next(place for place, name in enumerate(header) if name.startswith(GAIN))
            known = {row[0].strip(MARKS): [row[place].strip("*") for place in (2, 3, gain)] for row in rows}
    for _, (header, *rows) in find_tables(text):
        for name, *cells in rows if "% of PyTorch" in header else ():
            if known.get(name.strip(MARKS)) != (written := [cell.strip("*") for cell in cells]):
                yield f"the README's ladder says {written} of {name}, and {page} {known.get(name.strip(MARKS))}"


def check_prose(page: Path) -> Iterator[str]:
    """Times, rates and shares of a page's prose that the tables which it links to do not have."""
    shown: dict[str, dict[str, list[float]]] = {what: {} for what in FIGURES}
    for file in filter(Path.is_file, find_links(page)):
        for _, (_, *rows) in find_problem_tables(file.read_text()):
            for row in rows:
                for what, figure in zip(
                    FIGURES, (parse_seconds(row[1]), parse_amount(row[2]), parse_amount(row[3])), strict=True
                ):
                    if figure:
                        shown[what].setdefault(row[0].strip(MARKS), []).append(figure)
    yield from check_sections(page, shown) if shown["time"] else ()


def check_counts(text: str) -> Iterator[str]:
    """Where the counts of the table of ops do not add up to the problems that it links to."""
    for _, (header, *rows) in find_tables(text):
        for row in rows if header == OPS_HEADER else ():
            counts, link = re.findall(r"([0-9]+) [a-z]", row[-2]), LINK.search(row[-1])
            if counts and link and sum(map(int, counts)) != int(link["count"] or 0):
                yield f"{row[0]}: the counts {row[-2]} do not add up to the {link['count']} problems of the page"


def write_out(problem: str) -> str:
    """A problem as tables have it, of one whose square is written once: `m=n=8` is `m=8, n=8`."""
    head, between, shape = problem.rpartition(" · ")
    axes, _, size = shape.rpartition("=")
    return (
        head
        + between
        + (", ".join(f"{axis}={size}" for axis in axes.split("=")) if "=" in axes and "," not in shape else shape)
    )


def _check_sentences(text: str, shares: Shares) -> Iterator[str]:
    for line in text.splitlines():
        if found := SENTENCE.match(line):
            for said in SHARE.finditer(found["said"]):
                shown = shares.get((found["problem"], said["regime"], found["kernel"]))
                if shown != float(said["share"]):
                    yield f"{found['problem']}: the sentence says {said['share']} % {said['regime']}, the table {shown} %"
