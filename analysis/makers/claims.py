"""What people say of these kernels beside what the rows say: `python analysis/make.py claims` writes docs/claims.md.

The claims and their queries are in analysis/claims.py. Every figure is of a row that the page names; whether a claim holds is
computed from the figures shown.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from minfer.analysis.claims import CLAIMS, Claim, Counter, Over, Peaks, Query, Schedulers, Share
from minfer.analysis.data.peaks import best_peaks, under_one_peak
from minfer.analysis.data.prepare import on_one_clock, with_problem
from minfer.analysis.makers import Maker, Options
from minfer.analysis.tables.markdown import escape, significant, table_lines
from minfer.analysis.tables.pages import update_page
from minfer.rows import store
from minfer.rows.problems import natural, number
from minfer.rows.rules import REGIMES
from minfer.rows.store import Row

COMMAND = "python analysis/make.py claims"
COLUMNS = ["run", "finished", "case", "op", "kernel", "status", "dtype", "params", "shape", "device", "device_kind"]
COLUMNS += ["flops", "bytes", "peaks", "roof", "operands", "metric", "metrics", "baseline", "cold_percent_of_peak"]
COLUMNS += [f"{regime}_{name}" for regime in REGIMES for name in ("us", "rate", "baseline_us", "speedup")]
HEAD = """# Claims

What tutorials and papers say of these kernels, beside the rows that test it. Each figure is of the row named beside it.
Whether a claim holds is computed from the figures and the limits that "Read as" names. Each device has a verdict of its own,
because a claim that fails on an H200 may hold elsewhere. The baseline that was timed beside each kernel brings all times to
one clock ([why](methodology.md#paired-because-clocks-drift)). `analysis/make.py claims` writes this page from
`analysis/claims.py`."""


@dataclass(frozen=True)
class Figure:
    """What one row answers."""

    row: Row
    what: str
    shown: tuple[float | None, float | None]  # cold, steady; a counter or a ratio of peaks is the first


Found = dict[tuple[str, str], Row]  # the measured rows of a device, by device and case


def index_rows(table: pa.Table) -> Found:
    """The newest timed rows by device and case, on one clock and under one peak a device."""
    table = on_one_clock(with_problem(table))
    rows = table.filter(pc.is_in(table["status"], pa.array(store.MEASURED))).to_pylist(maps_as_pydicts="lossy")
    devices: dict[str, list[Row]] = {}
    for row in rows:
        if row["device_kind"] != "cpu":
            devices.setdefault(row["device"], []).append(row)
    return {(name, row["case"]): row for name, of in devices.items() for row in under_one_peak(of)}


def name_case(query: Query, shape: Mapping[str, int]) -> str:
    """The case that a query asks for at a shape."""
    parts = [",".join(f"{name}={value}" for name, value in items) for items in (query.params.items(), shape.items())]
    return "/".join([query.op, query.kernel, query.dtype, *parts])


def find_figures(claim: Claim, rows: Found) -> Iterator[Figure]:
    """The figures of a claim by device, that with most rows first."""
    counts = Counts(device for device, _ in rows)
    for device in sorted(counts, key=lambda device: (-counts[device], natural(device))):
        for query in claim.queries:
            names = (name_case(query, shape) for shape in query.shapes)
            if row := next((rows[device, name] for name in names if (device, name) in rows), None):
                figure = read_figure(query, row, rows)
                if figure and any(value is not None for value in figure.shown):
                    yield figure


def read_figure(query: Query, row: Row, rows: Found) -> Figure | None:
    """What a query shows of a row; None where something is missing."""
    of_counters = row | {"run": row["counted_run"], "steady_run": row["counted_run"]}
    match query.show:
        case Share():
            cold = number(row, "cold_percent_of_peak")
            rates = [number(row, f"{regime}_rate") for regime in REGIMES]
            steady = cold * rates[1] / rates[0] if cold and rates[0] and rates[1] else None
            return Figure(row, "% of the measured peak", (cold, steady))
        case Over(kernel):
            other = rows.get((row["device"], row["case"].replace(f"/{row['kernel']}/", f"/{kernel}/", 1)))
            shown = (share(row, other, REGIMES[0]), share(row, other, REGIMES[1])) if other else (None, None)
            return Figure(row, f"% of {kernel}'s throughput", shown)
        case Counter(name, over):
            counted: list[float | None] = [(row["metrics"] or {}).get(each) for each in (name, over)]
            if counted[0] is None or (over and not counted[1]):
                return None
            return Figure(of_counters, f"{name} / {over}" if over else name, (counted[0] / (counted[1] or 1.0), None))
        case Schedulers():
            return Figure(of_counters, "schedulers", (schedulers(row["metrics"] or {}), None))
        case Peaks(name, over, per_clock):
            best = best_peaks(each for (device, _), each in rows.items() if device == row["device"])
            if not all(best.get(each) and (best.get(f"{each}_mhz") or not per_clock) for each in (name, over)):
                return None
            rate, other_rate = (best[each] / (best[f"{each}_mhz"] if per_clock else 1.0) for each in (name, over))
            return Figure(row, f"peak {name}, % of {over}{' a cycle' * per_clock}", (100 * rate / other_rate, None))


def schedulers(metrics: Mapping[str, float]) -> float | None:
    """The number of schedulers of a multiprocessor, computed as `analysis.claims.Schedulers` says; None where a counter is
    missing."""
    names = [f"ncu.{name}" for name in ("occupancy_percent", "blocks_by_warps", "block_threads", "issue_percent")]
    occupancy, blocks, threads, issue = (metrics.get(name) or 0.0 for name in names)
    cycles = sum(value for name, value in metrics.items() if name.startswith("ncu.stall_"))  # one is the issue itself
    most = blocks * threads / 32  # warps that a multiprocessor has room for
    return occupancy * most / (issue * cycles) or None if issue and cycles else None


def share(row: Row, other: Row, regime: str) -> float | None:
    """A row's throughput in percent of another kernel's: the paired ratio where that one was the baseline."""
    paired = number(row, f"{regime}_speedup") if row["baseline"] == other["kernel"] else None
    times = number(other, f"{regime}_us"), number(row, f"{regime}_us")
    if paired is None and times[0] and times[1]:
        paired = times[0] / times[1]
    return 100 * paired if paired else None


def verdicts(claim: Claim, found: list[Figure]) -> str:
    """Whether the claim holds, in a sentence for each device, which names it where there are several."""
    of: dict[str, list[Figure]] = {}
    for figure in found:
        of.setdefault(figure.row["device"], []).append(figure)
    said = {device: verdict(claim, figures) for device, figures in of.items()}
    if len(said) == 1:
        return f"**{next(iter(said.values()))}.**"
    return " ".join(f"**{escape(device)}: {text[0].lower() + text[1:]}.**" for device, text in said.items())


def verdict(claim: Claim, found: list[Figure]) -> str:
    """Whether the figures of a device are within the limits of the claim: all, none, or how many."""
    values = [value for figure in found for value in figure.shown if value is not None]
    within = [
        (claim.least is None or value >= claim.least) and (claim.most is None or value <= claim.most)
        for value in values
    ]
    if all(within):
        return "It holds"
    return f"It holds for {sum(within)} of {len(values)} figures" if any(within) else "It does not hold"


def name_runs(figure: Figure) -> str:
    """The run of a figure, and that of its steady part where it is another one."""
    run, steady = escape(figure.row["run"]), escape(figure.row["steady_run"])
    return run if steady == run or figure.shown[1] is None else f"{run}; steady: {steady}"


def claim_lines(claim: Claim, rows: Found) -> list[str]:
    """A claim, how it is read, whether it holds, and the rows that say so."""
    lines = [f"## {escape(claim.said)}", ""]
    found = list(find_figures(claim, rows))
    if not found:
        return [*lines, f"Read as: {escape(claim.read)}. No row measured it yet.", ""]
    body = []
    for figure in found:
        cells = [f"{significant(value, 3)}" if value else "0" if value == 0 else "—" for value in figure.shown]
        row = figure.row
        body.append([f"`{row['case']}`", escape(row["device"]), name_runs(figure), escape(figure.what), *cells])
    header = ["Row", "Device", "Run", "Figure", "Cold", "Steady"]
    lines += [f"Read as: {escape(claim.read)}. {verdicts(claim, found)}", ""]
    return [*lines, *table_lines(header, [":--", ":--", ":--", ":--", "--:", "--:"], body), ""]


def markdown(rows: Found) -> str:
    lines = [HEAD, ""]
    for claim in CLAIMS:
        lines += claim_lines(claim, rows)
    return "\n".join(lines)


def write(table: pa.Table, options: Options) -> list[str]:
    return update_page(options.docs / "claims.md", markdown(index_rows(table)), COMMAND, options.check)


MAKER = Maker(write, COLUMNS)
