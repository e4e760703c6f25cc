"""Do the figures of the results tables agree with each other? `python analysis/check_figures.py README.md docs/results/*/*.md`

From the times and throughputs that a table shows this computes the ratios beside them, as a reader with a calculator would,
and names each that differs by more than rounding. The fastest kernel must be bold, and a sentence above the tables must
repeat their figures.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

SECONDS = {"µs": 1e-6, "ms": 1e-3}
PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
ROUNDED = 0.0012  # relative: a ratio of two figures of four digits
HEADER = ["Kernel", "Time", "Throughput", "% of PyTorch throughput", "Speed-up vs."]
SENTENCE = re.compile(r"^(?P<problem>.+): of PyTorch's throughput \*\*(?P<kernel>.+?)\*\* reaches (?P<said>.+)\.$")
SHARE = re.compile(r"(?P<share>[0-9.]+) %[^%]*? (?P<regime>cold|steady)")

Table = tuple[str, list[list[str]]]  # its title, and its cells with the header


def tables(text: str) -> Iterator[Table]:
    """The tables of one problem in one regime."""
    title, cells = "", list[list[str]]()
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            cells.append([cell.strip() for cell in line.strip("|").split("|")])
        elif cells:
            if all(cell.startswith(name) for name, cell in zip(HEADER, cells[0], strict=False)):
                yield title, [cells[0], *cells[2:]]
            cells = []
        elif line.startswith("**"):
            title = line.strip("*")


def seconds(cell: str) -> float | None:
    found = re.fullmatch(r"\**([0-9.]+) (µs|ms)\**", cell)
    return float(found[1]) * SECONDS[found[2]] if found else None


def amount(cell: str) -> float | None:
    """A rate, a percentage or a ratio, without its interval and its tie."""
    found = re.match(r"\**([0-9.]+)(?: ([kMGT]))?(?![0-9.])", cell)
    return float(found[1]) * PREFIXES[found[2] or ""] if found else None


def last_digit(cell: str) -> float:
    """What one in the last digit of a percentage or a ratio is worth."""
    found = re.match(r"\**[0-9]+\.?([0-9]*)", cell)
    return 10.0 ** -len(found[1]) if found else 0.0


def contradictions(text: str) -> Iterator[str]:
    """What does not agree, in a sentence each."""
    shares: dict[tuple[str, str, str], float] = {}
    for title, (header, *rows) in tables(text):
        times = {row[0].strip("* †"): time for row in rows if (time := seconds(row[1]))}
        rates = {row[0].strip("* †"): rate for row in rows if (rate := amount(row[2]))}
        first = header[4].removeprefix("Speed-up vs. ")
        for row in rows:
            kernel = row[0].strip("* †")
            share, gain = amount(row[3]), amount(row[4])
            if share:
                problem, _, regime = title.rpartition(" · ")
                shares[problem, regime, kernel] = share
            if kernel not in times:
                continue
            claims = []
            if "torch" in times:
                claims += [("% of PyTorch's time", share, row[3], 100 * times["torch"] / times[kernel])]
            if first in times:
                claims += [(f"times the speed of {first}", gain, row[4], times[first] / times[kernel])]
            if {"torch", kernel} <= rates.keys() and re.fullmatch(r"\**[0-9.]+( [kMGT])?\**", row[2]):
                claims += [("% of PyTorch's rate", share, row[3], 100 * rates[kernel] / rates["torch"])]
            for what, said, cell, computed in claims:
                if said and abs(said - computed) > 0.51 * last_digit(cell) + ROUNDED * computed:
                    yield f"{title}: {kernel} is said to have {said:g} {what}, and its figures give {computed:.4g}"
        if times and not any(
            row[0].strip("* †") == min(times, key=lambda k: times[k]) and "**" in row[0] for row in rows
        ):
            yield f"{title}: the fastest kernel is not in bold"
    yield from _sentences(text, shares)


def _sentences(text: str, shares: dict[tuple[str, str, str], float]) -> Iterator[str]:
    for line in text.splitlines():
        if found := SENTENCE.match(line):
            for said in SHARE.finditer(found["said"]):
                shown = shares.get((found["problem"], said["regime"], found["kernel"]))
                if shown != float(said["share"]):
                    yield f"{found['problem']}: the sentence says {said['share']} % {said['regime']}, the table {shown} %"


def main(words: Iterable[str] | None = None) -> int:
    """Returns the exit status: 1 where figures contradict each other."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("pages", nargs="+", type=Path)
    pages = made.parse_args(list(words) if words is not None else None).pages
    found = [f"{page}: {said}" for page in pages for said in contradictions(page.read_text())]
    counted = sum(len(rows) - 1 for page in pages for _, rows in tables(page.read_text()))
    print("\n".join(found) or f"{counted} rows of tables agree", file=sys.stderr if found else sys.stdout)
    return int(bool(found) or not counted)


if __name__ == "__main__":
    sys.exit(main())
