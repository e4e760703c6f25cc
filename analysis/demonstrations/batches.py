"""The picture and the table of `benchmarks/batching.py`: padding, tokens/s and latency by policy."""

from __future__ import annotations

from statistics import median

from matplotlib.axes import Axes

from minfer.analysis.plots.every_op import Picture, plain_ticks
from minfer.analysis.plots.style import LIGHT, SMALL, Theme, figure, printable, title
from minfer.analysis.tables.markdown import escape, scale, significant, table_lines
from minfer.rows.store import Row

BAR = 0.21  # inches
AT_ONCE, AT_RANDOM = "at once", "at random"


def way_of(row: Row) -> str:
    """A policy, and what kernels do with padding."""
    return row["policy"] if row["told"] else f"{row['policy']}, padding computed"


def select_rows(rows: list[Row], kernel: str, arrivals: str) -> list[Row]:
    return [row for row in rows if row["kernel"] == kernel and row["arrivals"] == arrivals]


def median_of(row: Row, name: str) -> float:
    """The median over the rounds."""
    return float(median(row[name]))


def batches(rows: list[Row], device: str, theme: Theme = LIGHT) -> Picture:
    """Bars of attention by trace and policy: the padded share with all requests at once, and p99 with random arrivals."""
    padded = [row for row in select_rows(rows, "attention", AT_ONCE) if row["told"]]
    late = [row for row in select_rows(rows, "attention", AT_RANDOM) if row["told"] or row["policy"] == "none"]
    drawn, (above, below) = figure([0.3 + BAR * len(padded), 0.3 + BAR * len(late)], gap=1.2, right=0.9)
    title(above, f"Padded share by policy on {device}", f"{padded[0]['requests']} requests there at once")
    shares = [100 * median_of(row, "padded_share") for row in padded]
    bars(above, padded, shares, [f"{share:.1f}" for share in shares], theme)
    above.set_xlim(0, 100)
    above.set_xlabel("% of a batch's slots")
    title(below, f"p99 latency of attention on {device}", "the same requests, arriving at random")
    values = [median_of(row, "p99_ms") for row in late]
    bars(below, late, values, [significant(value, 3) for value in values], theme)
    below.set_xlim(0, 1.1 * max(values))
    plain_ticks(below.xaxis)
    below.set_xlabel("milliseconds")
    share = ", ".join(f"{way_of(row)} {100 * median_of(row, 'padded_share'):.0f} %" for row in last_trace(padded))
    about = f"Padding and latency by policy on {device}; padded share of {padded[-1]['trace']} lengths: {share}."
    return Picture(drawn, printable(about))


def last_trace(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["trace"] == rows[-1]["trace"]]


def bars(ax: Axes, rows: list[Row], values: list[float], said: list[str], theme: Theme) -> None:
    """A bar for each row from above, named on the left, with its figure behind it; grey where padding is computed."""
    for place, (row, value, text) in enumerate(zip(rows, values, said, strict=True)):
        ax.barh(place, value, 0.7, color=theme.ours if row["told"] else theme.others)
        ax.annotate(text, (value, place), (4, 0), "data", "offset points", va="center", fontsize=SMALL)
    ax.set_yticks(range(len(rows)), [printable(f"{row['trace']} · {way_of(row)}") for row in rows], fontsize=SMALL)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)


def format_range(values: list[float]) -> str:
    """The least and the most of the rounds."""
    return f"{significant(min(values), 3)}–{significant(max(values), 3)}"


def batch_lines(rows: list[Row]) -> list[str]:
    """A table: a line for each kernel, trace and way."""
    late = {(row["kernel"], row["trace"], way_of(row)): row for row in rows if row["arrivals"] == AT_RANDOM}
    body = []
    for row in (row for row in rows if row["arrivals"] == AT_ONCE):
        other = late[row["kernel"], row["trace"], way_of(row)]
        rate, prefix = scale(median_of(row, "tokens_per_s"))
        unit = median_of(row, "tokens_per_s") / rate
        rates = f"{significant(rate, 3)}{prefix} ({format_range([each / unit for each in row['tokens_per_s']])})"
        latencies = [significant(median_of(other, name), 3) for name in ("p50_ms", "p90_ms", "p99_ms")]
        latencies[-1] += f" ({format_range(other['p99_ms'])})"
        share = f"{100 * median_of(row, 'padded_share'):.1f} %"
        cells = [escape(row["kernel"]), escape(row["trace"]), escape(way_of(row)), share, rates, *latencies]
        body.append([*cells, f"{100 * median_of(other, 'busy_share'):.0f} %"])
    header = ["Kernel", "Lengths", "Policy", "Padded", "tokens/s", "p50 (ms)", "p90 (ms)", "p99 (ms)", "Busy"]
    return table_lines(header, [":--"] * 3 + ["--:"] * 6, body)
