"""Tables in markdown, from rows: one for each problem and regime, and where the figures come from."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.compute as pc

from analysis.readme import counted, plain, significant
from analysis.rows import REFERENCE, kernel_order, number
from minfer.rows import store

MOST_NAMES = 4  # runs, commits, ... that a sentence lists before it only counts them
MESSAGE = 100  # characters shown of a message

REGIMES = ("cold", "steady")
HEADER = "| Kernel | Time | Throughput (TFLOP/s) | % of PyTorch throughput | Speed-up vs. baseline |"
RULE = "| :-- | --: | --: | --: | :-- |"
LEGEND = (
    "*Cold* is one call at a time, caches flushed before it; *steady* is calls back to back in blocks long enough for"
    " the clocks to settle. Speed-ups are medians of paired ratios, in brackets their 95 % confidence interval (cold) or"
    " range over neighbouring blocks (steady); a *tie* cannot be told from the baseline. Kernels are not timed at one"
    " moment, and the card's clock differs between them by up to 10 %; so a cold time is the baseline's, the median over"
    " all rows of the problem, divided by the speed-up. The fastest kernel is in bold."
)
PROVENANCE = {"run": "run", "commit": "commit", "torch": "PyTorch version", "driver": "driver"}
COLUMNS = ["run", "finished", "case", "op", "kernel", "status", "message", "baseline", "flops", "device", "device_kind"]
COLUMNS += ["driver", "torch", "commit"]
FIGURES = ("us", "tflops", "baseline_us", "speedup", "speedup_low", "speedup_high", "verdict")
COLUMNS += [f"{regime}_{figure}" for regime in REGIMES for figure in FIGURES]


def duration(us: float) -> str:
    return f"{significant(us)} µs" if us < 999.95 else f"{significant(us / 1000)} ms"


def percent(row: store.Row, regime: str, reference: store.Row | None) -> str:
    """This row's throughput over PyTorch's: the paired ratio if PyTorch was the baseline, else that of the medians."""
    ratio = number(row, f"{regime}_speedup") if row["baseline"] == REFERENCE else None
    if row["kernel"] == REFERENCE:
        ratio = 1.0
    elif ratio is None and reference and (theirs := number(reference, f"{regime}_us")):
        ratio = theirs / row[f"{regime}_us"]
    if ratio is None:
        return "—"
    return f"{significant(100 * ratio, 3 if ratio < 1 else 4)} %"


def speedup(row: store.Row, regime: str, baselines: set[str]) -> str:
    """The ratio with its interval, and over what where the table has several baselines."""
    ratio, low, high = (number(row, f"{regime}_speedup{end}") for end in ("", "_low", "_high"))
    if row["kernel"] == row["baseline"] or (ratio is None and row["kernel"] in baselines):
        return "baseline"
    if ratio is None:
        return "—"
    decimals = len(significant(ratio, 3 if ratio < 1 else 4).partition(".")[2])
    text = f"{ratio:.{decimals}f}×"
    if low and high:
        text += f" ({low:.{decimals}f}–{high:.{decimals}f})"
    if len(baselines) > 1:
        text += f" over {plain(row['baseline'])}"
    return text + (" tie" if row[f"{regime}_verdict"] == "tie" else "")


def regime_time(row: store.Row, regime: str) -> float | None:
    """Microseconds, of a case that has times."""
    return number(row, f"{regime}_us") if row["status"] in store.MEASURED else None


def cells(row: store.Row, regime: str, reference: store.Row | None, baselines: set[str]) -> list[str]:
    """The five cells of a kernel; those of a failed case say what became of it."""
    if row["status"] not in store.MEASURED:
        return [plain(row["kernel"]), plain(row["status"]), "—", "—", plain(row["message"], MESSAGE)]
    name = plain(row["kernel"]) + (" †" if row["status"] == "unconverged" and regime == "cold" else "")
    us, tflops = regime_time(row, regime), number(row, f"{regime}_tflops")
    if us is None:
        return [name, "—", "—", "—", "—"]
    rate = significant(tflops) if tflops else "—"
    return [name, duration(us), rate, percent(row, regime, reference), speedup(row, regime, baselines)]


def table_lines(rows: list[store.Row], regime: str) -> list[str]:
    """One table: the kernels of one problem in one regime, in ladder order, the fastest in bold."""
    timed = [(time, i) for i, row in enumerate(rows) if (time := regime_time(row, regime))]
    best = min(timed)[1] if timed else None
    measured = [row for row in rows if row["status"] in store.MEASURED]
    reference = next((row for row in measured if row["kernel"] == REFERENCE), None)
    baselines = {row["baseline"] for row in measured if row["baseline"]}
    lines = [HEADER, RULE]
    for i, row in enumerate(rows):
        texts = cells(row, regime, reference, baselines)
        lines.append("| " + " | ".join(f"**{text}**" if i == best else text for text in texts) + " |")
    return lines


def title(problem: str) -> str:
    """A problem, or a part of it, as people read it: `bfloat16 · layout=TN · m=1, n=2`."""
    return " · ".join(plain(part.replace(",", ", ")) for part in problem.split("/") if part)


def problem_lines(problem: str, rows: list[store.Row]) -> list[str]:
    """Everything about one problem: a table for each regime that somebody has, and who was left out and why."""
    name = title(problem)
    rows = sorted(rows, key=kernel_order)
    skipped = [row for row in rows if row["status"] == "unsupported"]
    rows = [row for row in rows if row["status"] != "unsupported"]
    lines: list[str] = []
    regimes = [regime for regime in REGIMES if any(regime_time(row, regime) for row in rows)]
    for regime in regimes or REGIMES[:1]:
        lines += [f"**{name} · {regime if regimes else 'not timed'}**", "", *table_lines(rows, regime), ""]
    if any(row["status"] == "unconverged" for row in rows):
        lines += [f"† unconverged: {store.STATUSES['unconverged']}.", ""]
    if skipped:
        why = "; ".join(f"{plain(row['kernel'])} ({plain(row['message'], MESSAGE)})" for row in skipped)
        lines += [f"Not run, {len(skipped)} unsupported: {why}.", ""]
    return lines


def provenance(table: pa.Table) -> str:
    """One sentence on where a section's figures come from."""
    parts = [counted(len(table), "case")]
    dates = pc.min_max(table["finished"]).as_py()
    if dates["min"]:
        first, last = f"{dates['min']:%Y-%m-%d}", f"{dates['max']:%Y-%m-%d}"
        parts[0] += f", finished {first}" + (f" to {last}" if last != first else "")
    for column, noun in PROVENANCE.items():
        values = sorted(value for value in pc.unique(table[column]).to_pylist() if value)
        names = [plain(re.sub("^([0-9a-f]{12})[0-9a-f]+", r"\1", value)) for value in values]
        if names:
            count = counted(len(names), noun)
            parts.append(count if len(names) > MOST_NAMES else f"{count.partition(' ')[2]} {', '.join(names)}")
    return "; ".join(parts) + "."
