"""Tables over the shapes of a named set: how fast, and how much faster than the baseline, size by size.

The sets are those of `minfer/ops/<op>/shapes.yaml` and `conf/shape`. The tables are about cold calls. A set of few shapes is a
table of throughputs with a line for each kernel. A set of many has a line for each shape, and beside the baseline only the
kernels that are our fastest or the best other at some shape. Axes that have one size in the whole table are in its title; the
others name its lines or columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from minfer.analysis.data.others import LIBRARY, best_other
from minfer.analysis.data.prepare import kernel_order, metric_of
from minfer.analysis.tables.markdown import escape, significant, table_lines
from minfer.analysis.tables.problem import duration, fastest, regime_time, throughput, title
from minfer.rows import store
from minfer.rows.problems import number
from minfer.shapes import OPS, named_sets

PACKAGE = Path(store.__file__).resolve().parents[1]
CONF = (PACKAGE if (PACKAGE / "conf").is_dir() else PACKAGE.parent) / "conf"  # of a wheel, or of a clone
SETS = CONF / "shape"
FEWEST, MOST_ACROSS = 2, 8  # shapes that are worth a table, and those that fit beside each other

Problems = Mapping[str, list[store.Row]]  # by shape, such as "m=1,n=2"
Timed = Mapping[str, Mapping[str, store.Row]]  # by shape and kernel


@dataclass(frozen=True)
class Axes:
    """How the shapes of a table are called: by what they differ in."""

    names: list[str]  # of the axes that vary; none where the shapes are square
    constant: str  # the others: `hidden=4096`
    labels: dict[str, str]  # of each shape: `512` where all of them are square, else `1 × 4096`

    @classmethod
    def of(cls, shapes: Iterable[str]) -> Axes:
        """Shapes of an op, at least two."""
        sizes = {shape: dict(part.split("=") for part in shape.split(",")) for shape in shapes}
        first = next(iter(sizes.values()))
        if len(first) > 1 and all(len(set(each.values())) == 1 for each in sizes.values()):
            return cls([], "", {shape: next(iter(each.values())) for shape, each in sizes.items()})
        # An axis that some shapes leave out, because they have its default size, varies, too.
        axes = dict.fromkeys(axis for each in sizes.values() for axis in each)
        varying = [axis for axis in axes if len({each.get(axis) for each in sizes.values()}) > 1]
        constant = ", ".join(f"{axis}={size}" for axis, size in first.items() if axis not in varying)
        labels = {shape: " × ".join(each.get(axis, "–") for axis in varying) for shape, each in sizes.items()}
        return cls([axis.upper() if len(axis) == 1 else axis for axis in varying], constant, labels)

    def __str__(self) -> str:
        return escape(" × ".join(self.names))


def shape_sets(op: str, folder: Path = SETS, ops: Path = OPS) -> dict[str, list[frozenset[str]]]:
    """The shapes of each set of an op in the order of the file, a GPU's and a CPU's together; one is {"m=1", "n=2"}."""
    written = named_sets(ops) | {content["name"]: content for content in _files(folder) if content.get("op") == op}
    found: dict[str, list[frozenset[str]]] = {}
    for name, content in sorted(written.items()):
        if content["op"] != op:
            continue
        shapes = found.setdefault(name, [])
        for entry in (*content.get("gpu", ()), *content.get("cpu", ())):
            sizes = [size if isinstance(size, list) else [size] for size in entry.values()]
            for chosen in itertools.product(*sizes):
                shapes.append(frozenset(f"{axis}={size}" for axis, size in zip(entry, chosen, strict=True)))
    return found


@cache  # for each page anew, they took longer than all the rest
def _files(folder: Path) -> list[dict[str, Any]]:
    """What the files of sets say, in the order of their names."""
    found: list[Any] = [OmegaConf.to_container(OmegaConf.load(file)) for file in sorted(folder.glob("*.yaml"))]
    return found


def overview_lines(op: str, group: str, problems: Problems) -> list[str]:
    """A table for each set of the op that has at least two timed shapes here, the small sets first. `group` is what the
    problems have in common."""
    lines: list[str] = []
    named = {frozenset(shape.split(",")): shape for shape in problems}
    tables = []
    for name, shapes in shape_sets(op).items():
        measured = dict.fromkeys(named[shape] for shape in shapes if shape in named)
        tables.append((name, {shape: rows for shape in measured if (rows := _select_timed(problems[shape]))}))
    for name, timed in sorted(tables, key=lambda table: len(table[1])):
        if len(timed) >= FEWEST:
            axes, few = Axes.of(timed), len(timed) <= MOST_ACROSS
            metric = metric_of(row for rows in timed.values() for row in rows.values())
            common = [title(f"{group}/{axes.constant}"), f"cold, {escape(metric) if few else 'time'}"]
            body = _across(timed, axes, metric) if few else _down(timed, axes)
            lines += [f"**{' · '.join([escape(name), *common])}**", "", *body, ""]
    return lines


def _select_timed(rows: Iterable[store.Row]) -> dict[str, store.Row]:
    """The measured rows by kernel, in ladder order."""
    return {row["kernel"]: row for row in sorted(rows, key=kernel_order) if regime_time(row, "cold")}


def _kernels(timed: Timed) -> list[str]:
    every = [row for rows in timed.values() for row in rows.values()]
    return list(dict.fromkeys(row["kernel"] for row in sorted(every, key=kernel_order)))


def _across(timed: Timed, axes: Axes, metric: str) -> list[str]:
    """A line a kernel, a column a shape."""
    corner = f"Kernel / {axes}" if axes.names else "Kernel"
    body = []
    best = {shape: fastest(rows.values(), "cold") for shape, rows in timed.items()}
    for kernel in _kernels(timed):
        cells = [escape(kernel)]
        for shape, rows in timed.items():
            rate = throughput(rows[kernel], "cold", metric) if kernel in rows else "—"
            cells.append(_bold(rate, kernel in best[shape]))
        body.append([*cells, _mean(rows.get(kernel) for rows in timed.values())])
    return _table([corner, *map(escape, axes.labels.values()), f"{_over(timed)}, geometric mean"], body)


def _down(timed: Timed, axes: Axes) -> list[str]:
    """A line a shape; a column for the baselines, for each of our kernels that is our fastest somewhere, and for each other
    that is the best other somewhere."""
    baselines = {row["baseline"] for rows in timed.values() for row in rows.values()}
    ours = {
        shape: [kernel for kernel, row in rows.items() if kernel not in baselines and row["backend"] != LIBRARY]
        for shape, rows in timed.items()
    }
    first = {shape: min(ours[shape], key=_cold(rows)) for shape, rows in timed.items() if ours[shape]}
    others = {other["kernel"] for rows in timed.values() if (other := best_other(rows.values(), "cold"))}
    kernels = [kernel for kernel in _kernels(timed) if kernel in {*baselines, *first.values(), *others}]
    body = []
    chosen = {shape: rows.get(first.get(shape, "")) for shape, rows in timed.items()}
    for shape, rows in timed.items():
        best = fastest(rows.values(), "cold")
        times = [_bold(duration(rows[k]["cold_us"]) if k in rows else "—", k in best) for k in kernels]
        body.append([escape(axes.labels[shape]), *times, _mean([chosen[shape]])])
    means = [_mean(rows.get(kernel) for rows in timed.values()) for kernel in kernels]
    body.append([f"{_over(timed)}, geometric mean", *means, _mean(chosen.values())])
    return _table(
        [str(axes) if axes.names else "Size", *map(escape, kernels), f"{_over(timed)}, fastest of ours"], body
    )


def _over(timed: Timed) -> str:
    """What the ratios of a table are."""
    baselines = {row["baseline"] for rows in timed.values() for row in rows.values() if row["baseline"]}
    return f"Speed-up over {escape(baselines.pop())}" if len(baselines) == 1 else "Speed-up"


def _cold(rows: Mapping[str, store.Row]) -> Callable[[str], float]:
    return lambda kernel: float(rows[kernel]["cold_us"])


def _ratio(row: store.Row | None) -> float | None:
    if row is None:
        return None
    return 1.0 if row["kernel"] == row["baseline"] else number(row, "cold_speedup")


def _mean(rows: Iterable[store.Row | None]) -> str:
    """The geometric mean of the paired speed-ups; none where a shape is missing, which would favour a kernel."""
    ratios = [_ratio(row) for row in rows]
    known = [ratio for ratio in ratios if ratio]
    return f"{significant(math.exp(sum(map(math.log, known)) / len(known)), 3)}×" if len(known) == len(ratios) else "—"


def _bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text


def _table(header: list[str], body: Iterable[list[str]]) -> list[str]:
    return table_lines(header, [":--", *["--:"] * (len(header) - 1)], body)


def by_group(problems: Mapping[str, list[store.Row]]) -> Iterator[tuple[str, Problems]]:
    """The problems that differ in nothing but their shape; the name of each group, and its rows by shape."""
    groups: dict[str, dict[str, list[store.Row]]] = {}
    for problem, rows in problems.items():
        group, _, shape = problem.rpartition("/")
        groups.setdefault(group, {})[shape] = rows
    yield from groups.items()
