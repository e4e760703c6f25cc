"""The same cases on several nodes (`cluster.distribute`): which node is slow, and one row a case for the tables."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rich.table import Table

from minfer.rows import store
from minfer.rows.rules import REGIMES
from minfer.rows.select import is_judged

COLUMNS = ("node", "device", "guarantee", "cold_us", "steady_us", "judged_us")  # that `compare` reads


@dataclass(frozen=True)
class NodeTimes:
    """How long a node takes for the cases that other nodes with the same device have times of, too: the ratio of its time to
    the median over these nodes, of each case. Above 1 is slower."""

    node: str
    device: str | None
    cases: int  # that are compared
    cold: float | None  # the median ratio of the cold times
    steady: float | None
    worst: float | None  # the largest ratio of either kind
    worst_case: str | None


def compare(rows: Iterable[store.Row], nodes: Collection[str] = ()) -> list[NodeTimes]:
    """The slowest node first; at the end those of `nodes` that nothing can be said of."""
    times: dict[tuple[str, str, str], dict[str, float]] = {}  # regime, device, case -> node -> microseconds
    devices: dict[str, str] = {}
    for row in rows:
        devices[row["node"]] = row["device"]
        for regime in REGIMES:
            if (time := _time(row, regime)) is not None:
                times.setdefault((regime, row["device"], row["case"]), {})[row["node"]] = time
    ratios: dict[str, dict[tuple[str, str], float]] = {}  # node -> regime, case -> ratio
    for (regime, _, case), of in times.items():
        if len(of) > 1:
            median = statistics.median(of.values())
            for node, time in of.items():
                ratios.setdefault(node, {})[regime, case] = time / median
    found = [_node(node, devices[node], of) for node, of in ratios.items()]
    found.sort(key=lambda each: max(each.cold or 0.0, each.steady or 0.0), reverse=True)
    return found + [
        NodeTimes(node, devices.get(node), 0, None, None, None, None)
        for node in dict.fromkeys([*devices, *nodes])
        if node not in ratios
    ]


def _time(row: store.Row, regime: str) -> float | None:
    """A row's time in a regime. A judged row has the judge's time as its cold one, and no steady one."""
    if not is_judged(row):
        return row[f"{regime}_us"]
    return row["judged_us"] if regime == "cold" else None


def _node(node: str, device: str, ratios: Mapping[tuple[str, str], float]) -> NodeTimes:
    of = {regime: [ratio for (kind, _), ratio in ratios.items() if kind == regime] for regime in REGIMES}
    cold, steady = (statistics.median(of[regime]) if of[regime] else None for regime in REGIMES)
    worst = max(ratios, key=ratios.__getitem__)
    return NodeTimes(node, device, len({case for _, case in ratios}), cold, steady, ratios[worst], worst[1])


def pick_median_rows(rows: Mapping[tuple[str, str], store.Row]) -> dict[tuple[str, str], store.Row]:
    """Of each case on each device one row, by the same keys: that of the median node by its cold time; where no node has a
    time, the first."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for key, row in rows.items():
        groups.setdefault((row["device"], row["case"]), []).append(key)
    chosen = {}
    for keys in groups.values():
        times = {key: time for key in keys if (time := _time(rows[key], "cold")) is not None}
        timed = sorted(times, key=times.__getitem__)
        key = timed[(len(timed) - 1) // 2] if timed else keys[0]
        chosen[key] = rows[key]
    return chosen


def tabulate(run: str, found: Iterable[NodeTimes]) -> Table:
    """The nodes, a line each."""
    table = Table(title=f"{run}: each node's time over the median of the nodes", title_justify="left")
    table.add_column("node", no_wrap=True)
    table.add_column("device")
    for name in ("cases", "cold", "steady", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("worst case")
    for each in found:
        numbers = ("" if value is None else f"{value:.3f}" for value in (each.cold, each.steady, each.worst))
        table.add_row(each.node, each.device or "no rows", str(each.cases), *numbers, each.worst_case or "")
    return table
