"""Chooses the problem that stands for an op: tables and plots show it, and a run times it first."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

SIZE = re.compile(r"=([0-9]+)(?:,|$)")  # of an axis, in the last part of a problem
MANY = 0.8  # share of the most kernels that any problem was measured with
MUCH = 10  # times the work of the largest square: with that much, another problem represents an op better


@functools.cache  # of 100,000 problems, few dtypes and parameters differ
def natural(text: str) -> tuple[str | int, ...]:
    """Sorts m=512 before m=4096."""
    return tuple(int(part) if i % 2 else part for i, part in enumerate(re.split("([0-9]{1,18})", text)))


def number(row: Mapping[str, Any], column: str) -> float | None:
    """A row's value if it is one that a time, rate or ratio can have."""
    value = row[column]
    return value if value is not None and 0 < value < math.inf else None


def work_column(rows: Iterable[Mapping[str, Any]]) -> str:
    """The column that says which problem is larger: FLOPs, or bytes if an op has no FLOPs."""
    return "flops" if any(number(row, "flops") for row in rows) else "bytes"


def representative_problem(problems: list[dict[str, Any]]) -> str | None:
    """The problem that stands for an op in tables and plots. Each one has `problem`, its name; `measured`, the number of
    measured kernels; `flops` and `bytes`. Of the problems with many measured kernels it is the one with most work
    (`work_column`), then with most kernels, then the first by name. Where squares are a series (`square_problems`), a square
    is preferred, because people compare squares, unless another problem has MUCH more work."""
    many = MANY * max((row["measured"] for row in problems), default=0)
    full = [row for row in problems if row["measured"] >= many]
    column = work_column(problems)
    work = lambda row: number(row, column) or 0
    squares = square_problems(row["problem"] for row in problems)
    square = [row for row in full if row["problem"] in squares]
    if MUCH * max(map(work, square), default=0) > max(map(work, full), default=0):
        full = square
    rank = lambda row: (work(row), row["measured"])
    best = max(map(rank, full), default=None)
    return min((row["problem"] for row in full if rank(row) == best), key=by_parts, default=None)


def by_parts(problem: str) -> list[tuple[str | int, ...]]:
    return [natural(part) for part in problem.split("/")]


def square_problems(problems: Iterable[str]) -> set[str]:
    """The square problems, where they are a series of their own: of several sizes, and not the diagonal of a grid, as where
    all numbers of tokens were measured with all widths of a layer."""
    shapes = {name: tuple(SIZE.findall(name.rpartition("/")[2])) for name in problems}
    square = {name: of[0] for name, of in shapes.items() if len(of) > 1 and len(set(of)) == 1 and of[0] != "0"}
    sizes = set(square.values())
    grid = {of for of in shapes.values() if of and sizes.issuperset(of)}
    return set(square) if len(sizes) > 1 and len(grid) < 2 * len(sizes) else set()
