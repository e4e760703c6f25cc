"""The tables of a page in Markdown, and the figures in their cells."""

from __future__ import annotations

import re
from collections.abc import Iterator

from minfer.analysis.checks.prose import SECONDS

PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
ROUNDED = 0.0012  # relative: a ratio of two figures of four digits

Table = tuple[str, list[list[str]]]  # its title, and its cells with the header


def find_tables(text: str) -> Iterator[Table]:
    """All tables of a page, each with the last bold line above it."""
    title, cells = "", list[list[str]]()
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            cells.append([cell.strip() for cell in line.strip("|").split("|")])
        elif cells:
            yield title, [cells[0], *cells[2:]]
            cells = []
        elif line.startswith("**"):
            title = line.strip("*")


def parse_seconds(cell: str) -> float | None:
    found = re.fullmatch(r"\**([0-9.]+) (µs|ms)\**", cell)
    return float(found[1]) * SECONDS[found[2]] if found else None


def parse_amount(cell: str) -> float | None:
    """A rate, a percentage or a ratio, without its interval and its tie."""
    found = re.match(r"\**([0-9.]+)(?: ([kMGT]))?(?![0-9.])", cell)
    return float(found[1]) * PREFIXES[found[2] or ""] if found else None


def last_digit(cell: str) -> float:
    """The value of one unit in the last digit of a percentage or a ratio."""
    found = re.match(r"\**[0-9]+\.?([0-9]*)", cell)
    return 10.0 ** -len(found[1]) if found else 0.0


def agrees(cell: str, computed: float) -> bool:
    """Whether a figure equals the one computed from others, within their rounding."""
    said = parse_amount(cell)
    return said is not None and abs(said - computed) <= 0.51 * last_digit(cell) + ROUNDED * computed
