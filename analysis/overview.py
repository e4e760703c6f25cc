"""Tables over the shapes of a set of `conf/shape`: how fast, and how much faster than the baseline, size by size.

They are about cold calls. A set of few shapes is a table of throughputs with a line a kernel; one of many has a line a
shape, and beside the baseline only the kernels that are the fastest of the others at some shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from analysis.readme import plain, significant
from analysis.rows import kernel_order, number
from analysis.tables import duration, regime_time, title
from minfer.rows import store

SETS = Path(__file__).resolve().parents[1] / "conf" / "shape"
FEWEST, MOST_ACROSS = 2, 8  # shapes that are worth a table, and those that fit beside each other

Problems = Mapping[str, list[store.Row]]  # by shape, such as "m=1,n=2"


def shape_sets(folder: Path = SETS) -> dict[str, list[str]]:
    """The shapes of each set, written as in a case's key, in the order of the file; a GPU's and a CPU's together."""
    found: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.yaml")):
        content: Any = OmegaConf.to_container(OmegaConf.load(file))
        shapes = found.setdefault(content["name"], [])
        for entry in (*content.get("gpu", ()), *content.get("cpu", ())):
            sizes = [size if isinstance(size, list) else [size] for size in entry.values()]
            for chosen in itertools.product(*sizes):
                shapes.append(",".join(f"{axis}={size}" for axis, size in zip(entry, chosen, strict=True)))
    return found


def overview_lines(group: str, problems: Problems) -> list[str]:
    """A table for each set that has at least two timed shapes here, the small sets first. `group` is what the problems
    have in common."""
    lines: list[str] = []
    tables = [
        (name, {shape: rows for shape in shapes if (rows := _timed(problems.get(shape, ())))})
        for name, shapes in shape_sets().items()
    ]
    for name, timed in sorted(tables, key=lambda table: len(table[1])):
        if len(timed) >= FEWEST:
            few = len(timed) <= MOST_ACROSS
            what = "TFLOP/s" if few else "time"
            lines += [f"**{plain(name)} · {title(group)} · cold, {what}**", "", *(_across if few else _down)(timed), ""]
    return lines


def _timed(rows: Iterable[store.Row]) -> dict[str, store.Row]:
    """The measured rows by kernel, in ladder order."""
    return {row["kernel"]: row for row in sorted(rows, key=kernel_order) if regime_time(row, "cold")}


def _kernels(timed: Mapping[str, Mapping[str, store.Row]]) -> list[str]:
    every = [row for rows in timed.values() for row in rows.values()]
    return list(dict.fromkeys(row["kernel"] for row in sorted(every, key=kernel_order)))


def _across(timed: Mapping[str, Mapping[str, store.Row]]) -> list[str]:
    """A line a kernel, a column a shape."""
    lines = _header(["Kernel", *(_short(shape) for shape in timed), "Speed-up, geometric mean"])
    best = {shape: min(rows, key=_cold(rows)) for shape, rows in timed.items()}
    for kernel in _kernels(timed):
        cells = [plain(kernel)]
        for shape, rows in timed.items():
            tflops = number(rows[kernel], "cold_tflops") if kernel in rows else None
            cells.append(_bold(significant(tflops) if tflops else "—", best[shape] == kernel))
        lines.append(_line([*cells, _mean(rows.get(kernel) for rows in timed.values())]))
    return lines


def _down(timed: Mapping[str, Mapping[str, store.Row]]) -> list[str]:
    """A line a shape, and a column for the baselines and for each kernel that is the fastest of the others somewhere."""
    baselines = {row["baseline"] for rows in timed.values() for row in rows.values()}
    others = {shape: [kernel for kernel in rows if kernel not in baselines] for shape, rows in timed.items()}
    first = {shape: min(others[shape], key=_cold(rows)) for shape, rows in timed.items() if others[shape]}
    kernels = [kernel for kernel in _kernels(timed) if kernel in {*baselines, *first.values()}]
    axes = " × ".join(part.partition("=")[0].upper() for part in next(iter(timed)).split(","))
    lines = _header([plain(axes), *map(plain, kernels), "Speed-up of the fastest"])
    chosen = {shape: rows.get(first.get(shape, "")) for shape, rows in timed.items()}
    for shape, rows in timed.items():
        best = min(rows, key=_cold(rows))
        times = [_bold(duration(rows[k]["cold_us"]) if k in rows else "—", k == best) for k in kernels]
        lines.append(_line([_short(shape), *times, _mean([chosen[shape]])]))
    means = [_mean(rows.get(kernel) for rows in timed.values()) for kernel in kernels]
    return [*lines, _line(["Speed-up, geometric mean", *means, _mean(chosen.values())])]


def _cold(rows: Mapping[str, store.Row]) -> Callable[[str], float]:
    return lambda kernel: float(rows[kernel]["cold_us"])


def _short(shape: str) -> str:
    """`512` where all sizes are the same, else `1 × 4096 × 4096`."""
    sizes = [part.partition("=")[2] for part in shape.split(",")]
    return plain(sizes[0] if len(set(sizes)) == 1 and len(sizes) > 1 else " × ".join(sizes))


def _ratio(row: store.Row | None) -> float | None:
    if row is None:
        return None
    return 1.0 if row["kernel"] == row["baseline"] else number(row, "cold_speedup")


def _mean(rows: Iterable[store.Row | None]) -> str:
    """The geometric mean of the paired speed-ups; none where a shape is missing, which would flatter somebody."""
    ratios = [_ratio(row) for row in rows]
    known = [ratio for ratio in ratios if ratio]
    return f"{significant(math.exp(sum(map(math.log, known)) / len(known)), 3)}×" if len(known) == len(ratios) else "—"


def _bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text


def _header(names: list[str]) -> list[str]:
    return [_line(names), _line([":--", *["--:"] * (len(names) - 1)])]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def by_group(problems: Mapping[str, list[store.Row]]) -> Iterator[tuple[str, Problems]]:
    """The problems that differ in nothing but their shape; the name of each group, and its rows by shape."""
    groups: dict[str, dict[str, list[store.Row]]] = {}
    for problem, rows in problems.items():
        group, _, shape = problem.rpartition("/")
        groups.setdefault(group, {})[shape] = rows
    yield from groups.items()
