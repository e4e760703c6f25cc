"""The table of times that a launch ends with, and what to know before its figures are compared with each other."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.cells import cell_len
from rich.table import Table

from minfer.rows import store
from minfer.rows.rules import ABOVE_ROOF, MOST_DRIFT, WIDEST, is_above_roof, is_too_wide
from minfer.rows.select import is_judged

ABOVE = "*"  # behind a share of the peak that is above 100 %
LABELS = ("kernel", "dtype", "parameters", "shape")
READABLE = 15  # characters of a label that stay on a line, such as those of 4096x14336x4096
COLUMNS = (*LABELS, "cold time", "cold rate", "cold share", "share of the peak", "steady time", "steady rate", "judged time",
           "judged rate", "judged share", "status")  # fmt: skip
# What is dropped where a terminal is narrow, first what a reader needs least. A kernel's time always stays.
DROPPED = (
    "steady rate",
    "steady time",
    "share of the peak",
    "cold rate",
    "judged rate",
    "status",
    "cold share",
    "judged share",
)


def tabulate(title: str, rows: list[store.Row], width: int) -> Table:
    """A line for each row; of one that was judged, the judge's figures only. What all rows have in common of dtype and
    parameters is in the title, and columns of numbers that no row has are left out. A number is never cut. Where the terminal
    has fewer columns than `width` needs, labels are wrapped, then columns are dropped, and the caption names these."""
    metric = next((row["metric"] for row in rows if row["metric"]), "throughput")
    baselines = {row["baseline"] for row in rows if row["baseline"]}
    other = "PyTorch" if baselines <= {"torch"} else baselines.pop() if len(baselines) == 1 else "baseline"
    share, peak = f"% of {other}", "% of\npeak"
    numbers = ("cold µs", metric, share, peak, "steady\nµs", metric, "judged\nµs", metric, share)
    columns = list(zip((*LABELS, *numbers, "status"), zip(*map(_cells, rows), strict=True), strict=True))
    common = [i for i in (1, 2) if len({*columns[i][1]}) == 1]
    left_out = [*common, *(i for i in range(len(LABELS), len(columns) - 1) if not any(columns[i][1]))]
    title = ", ".join([title, *(columns[i][1][0] for i in common if columns[i][1][0])])
    kept = [i for i in range(len(columns)) if i not in left_out]
    dropped = []
    for name in DROPPED:
        i = COLUMNS.index(name)
        if i in kept and _least_width([columns[i] for i in kept]) > width:
            kept.remove(i)
            dropped.append(("steady " if name == "steady rate" else "") + columns[i][0].replace("\n", " "))
    chosen = [columns[i] for i in kept]
    if _least_width(chosen) > width:  # one column of all labels, wrapped at its blanks
        labels = [column for column in chosen if column[0] in LABELS]
        joined = tuple(" ".join(filter(None, cells)) for cells in zip(*(cells for _, cells in labels), strict=True))
        chosen = [(LABELS[0], joined), *chosen[len(labels) :]]
    caption = f"Too wide for {width} columns: {', '.join(dropped)}." if dropped else None
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=box.SIMPLE_HEAD,
                  padding=(0, 1, 0, 0), pad_edge=False)  # fmt: skip
    for name, cells in chosen:
        if name in LABELS:
            table.add_column(name, overflow="fold", min_width=_width(name, cells))
        else:
            table.add_column(name, justify="left" if name == "status" else "right", no_wrap=True)
    for line in zip(*(cells for _, cells in chosen), strict=True):
        table.add_row(*line)
    return table


def _least_width(columns: list[tuple[str, tuple[str, ...]]]) -> int:
    """The characters that a table of these columns needs: a column has a blank behind it and another before the next one."""
    return sum(_width(name, cells) + 2 for name, cells in columns)


def _width(name: str, cells: tuple[str, ...]) -> int:
    """The characters that a column needs."""
    longest = max(cell_len(line) for cell in (name, *cells) for line in cell.split("\n"))
    return min(longest, READABLE) if name in LABELS else longest


def label(row: store.Row) -> list[str]:
    """What identifies a row, for the columns `LABELS`."""
    shape = "x".join(str(size) for size in row["shape"].values())
    return [row["kernel"], row["dtype"], " ".join(row["params"].values()), shape]


def _cells(row: store.Row) -> list[str]:
    def number(name: str, form: str) -> str:
        return "" if row[name] is None else format(row[name], form)

    def time(regime: str) -> list[str]:
        return [number(f"{regime}_us", ",.1f"), number(f"{regime}_rate", ".3g")]

    if is_judged(row):
        timed = [*[""] * 6, *time("judged"), share_of_baseline(row)]
    else:
        timed = [
            *time("cold"),
            share_of_baseline(row),
            number("cold_percent_of_peak", ".1f") + (ABOVE if is_above_roof(row["cold_percent_of_peak"]) else ""),
            *time("steady"),
            *[""] * 3,
        ]
    return [*label(row), *timed, row["status"]]


def value_of(row: store.Row, name: str) -> Any:
    return row[f"{'judged' if is_judged(row) else 'cold'}_{name}"]


def share_of_baseline(row: store.Row) -> str:
    """The throughput as a share of the baseline's, in percent, with its interval: `104.8 ± 0.3`, or `104.8 (104.1–104.9)`
    where it is not symmetric in these digits. Only the verdict where the interval is too wide (`WIDEST`)."""
    if value_of(row, "speedup") is None:
        return ""
    if row["kernel"] == row["baseline"]:
        return "100"
    if is_wide(row):
        return str(value_of(row, "verdict") or "unknown")
    share, low, high = (value_of(row, f"speedup{end}") for end in ("", "_low", "_high"))
    percent = lambda part: format(100 * part, ".1f" if share < 10 else ".0f")
    interval = ""
    if low is not None and high is not None:
        below, above = percent(share - low), percent(high - share)
        interval = f" ± {above}" if below == above else f" ({percent(low)}–{percent(high)})"
    return f"{percent(share)}{interval}{' tie' if value_of(row, 'verdict') == 'tie' else ''}"


def is_wide(row: store.Row) -> bool:
    low, high = value_of(row, "speedup_low"), value_of(row, "speedup_high")
    return row["kernel"] != row["baseline"] and is_too_wide(low, high)


def list_notes(rows: list[store.Row]) -> list[str]:
    """What to know of the rows of a table, in sentences: which have no percentage, and where the baseline's time beside a
    kernel is not the one in its own row, so that the percentage does not follow from the times in the table."""
    found = []
    if wide := sum(map(is_wide, rows)):
        found.append(
            f"{wide} of the percentages {'is' if wide == 1 else 'are'} not shown: the interval's upper end is more than "
            f"{WIDEST} times its lower end, and only the verdict is left."
        )
    if any(not is_judged(row) and is_above_roof(row["cold_percent_of_peak"]) for row in rows):
        found.append(f"{ABOVE} {ABOVE_ROOF}.")
    own = {tuple(label(row)): row for row in rows if value_of(row, "us")}
    drifts = []
    for row in rows:
        baseline, beside = own.get((row["baseline"], *label(row)[1:])), value_of(row, "baseline_us")
        if not baseline or is_judged(baseline) != is_judged(row):
            continue
        if baseline is not row and beside and value_of(row, "speedup") is not None:
            alone = value_of(baseline, "us")
            drift = max(beside / alone, alone / beside)
            if drift > MOST_DRIFT:
                drifts.append((drift, row, baseline))
    if drifts:
        _, row, baseline = max(drifts, key=lambda each: each[0])
        rest = f" The same holds for {len(drifts) - 1} more of these rows." if len(drifts) > 1 else ""
        found.append(
            f"{' '.join(label(row))}: its percentage compares with {value_of(row, 'baseline_us'):,.1f} µs, {row['baseline']}'s "
            f"time in the same rounds, not with the {value_of(baseline, 'us'):,.1f} µs of {row['baseline']}'s own row; "
            f"{_explain_drift(row, baseline)}.{rest}"
        )
    return found


def _explain_drift(row: store.Row, baseline: store.Row) -> str:
    if row["node"] != baseline["node"]:
        return f"the two ran on different nodes, {row['node']} and {baseline['node']}"
    if not is_judged(row) and any(store.HOST_BOUND in (each["flags"] or "") for each in (row, baseline)):
        return "the cold times of one of the two include host time"
    return "the machine was probably busy"
