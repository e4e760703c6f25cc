"""Tables in markdown, from rows: one for each problem and regime, and where the figures come from."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from statistics import median

import pyarrow as pa
import pyarrow.compute as pc

from minfer.analysis.data.others import LIBRARY, best_other, compare_with_other
from minfer.analysis.data.prepare import REFERENCE, WHICH, kernel_order, metric_of
from minfer.analysis.tables.markdown import escape, format_scaled, pluralise, significant
from minfer.analysis.tables.markdown import table_lines as markdown_table
from minfer.rows import store
from minfer.rows.problems import number
from minfer.rows.rules import LEAST_GAIN, REGIMES, is_too_wide
from minfer.rows.select import TFLOPS

MOST_NAMES = 4  # runs, commits, ... that a sentence lists before it only counts them
MESSAGE = 100  # characters shown of a message
WORKSPACE, ENERGY, TUNING = "Workspace", "Energy efficiency", "Autotuning (s)"  # columns that only pages have
SHORT_US = 10.0  # of a cold call: below it, a sentence says what launching takes
LEGEND = (
    "*Cold* is one call at a time, caches flushed before it; *steady* is calls back to back in blocks long enough for"
    " the clocks to settle. *% of PyTorch throughput* is PyTorch's time over the kernel's, timed side by side; in brackets"
    " is its 95 % confidence interval (cold) or its range over neighbouring blocks (steady), and a *tie* cannot be told from"
    " PyTorch. Kernels are not timed at one moment, and the card's clock differs between them by up to 10 %. So *Time* is"
    " PyTorch's median time divided by the kernel's paired ratio: all rows of a table share one clock. The fastest kernel is"
    " in bold, with those that cannot be told from it."
)
OTHER_LEGEND = (
    "Where torch.compile or a library (Liger, cuBLASLt, …) beats PyTorch's own kernels, *% of* the fastest of them is the"
    " figure to look at. Kernel and library were each timed beside PyTorch in rounds of their own. So it is the quotient of"
    " their two ratios to PyTorch, and its interval adds both: as independent errors (cold), or at their extremes (steady)."
)
MORE_LEGEND = (
    "*Workspace* is the device memory that a call takes beyond its operands. *Energy efficiency* is of steady calls, from"
    " the board's energy counter; the ratio after it is the baseline's joules over the kernel's, with its range over"
    " neighbouring blocks."
)
HOST_BOUND = (
    "The GPU waited for the host in cold calls of this kernel, or of the baseline beside it. Both times may include host time."
    " So the table shows the measured time, not one scaled to the baseline."
)
PROVENANCE = {"run": "run", "commit": "commit", "torch": "PyTorch version", "driver": "driver"}
COLUMNS = [*WHICH, "message", "metric", "baseline", "flops", "bytes"]
COLUMNS += [
    "device",
    "device_kind",
    "driver",
    "torch",
    "commit",
    "workspace_bytes",
    "steady_joules",
    "tune_s",
    "launches",
]
COLUMNS += ["cold_empty_us", "cold_launch_us"]
COLUMNS += ["energy_gain", "energy_gain_low", "energy_gain_high", "energy_verdict"]
FIGURES = ("us", "rate", "tflops", "baseline_us", "speedup", "speedup_low", "speedup_high", "verdict", "aa_spread")
COLUMNS += [f"{regime}_{figure}" for regime in REGIMES for figure in FIGURES]


def duration(us: float) -> str:
    return f"{significant(us)} µs" if us < 999.95 else f"{significant(us / 1000)} ms"


def percent(row: store.Row, regime: str, reference: store.Row | None) -> str:
    """This row's throughput over PyTorch's: the paired ratio with its interval if PyTorch was the baseline, else that of the
    times, which `on_one_clock` has made comparable."""
    if row["kernel"] == REFERENCE:
        return "100.0 %"
    if row["baseline"] == REFERENCE and (ratio := number(row, f"{regime}_speedup")):
        low, high = (number(row, f"{regime}_speedup_{end}") for end in ("low", "high"))
        return share(ratio, low, high, row[f"{regime}_verdict"])
    if reference and (theirs := number(reference, f"{regime}_us")):
        ratio = theirs / row[f"{regime}_us"]
        return f"{significant(100 * ratio, 3 if ratio < 1 else 4)} %"
    return "—"


def share(ratio: float, low: float | None, high: float | None, verdict: str | None) -> str:
    """A ratio in percent: `104.8 % (104.7–105.2)`; a tie says so. If the interval is too wide, only the verdict."""
    if is_too_wide(low, high):
        return verdict or "unknown"
    decimals = len(significant(100 * ratio, 3 if ratio < 1 else 4).partition(".")[2])
    text = f"{100 * ratio:.{decimals}f} %"
    if low and high:
        text += f" ({100 * low:.{decimals}f}–{100 * high:.{decimals}f})"
    return text + (" tie" if verdict == "tie" else "")


def percent_of_other(row: store.Row, other: store.Row, regime: str) -> str:
    """This row's throughput over that of the best other kernel, through the baseline of both. Where its two times
    differ too much, or contain the host's, the quotient of the kernels' own times, without an interval."""
    if row["kernel"] == other["kernel"]:
        return "100.0 %"
    if ratio := compare_with_other(row, other, regime):
        return share(ratio.value, ratio.low, ratio.high, ratio.verdict)
    mine, theirs = (regime_time(each, regime) for each in (row, other))
    return share(theirs / mine, None, None, None) if mine and theirs and row["baseline"] == other["baseline"] else "—"


def first_rung(rows: Iterable[store.Row], regime: str) -> store.Row | None:
    """Where a ladder begins: the first naive or numbered kernel that was timed, of rows in ladder order."""
    timed = (row for row in rows if regime_time(row, regime))
    return next((row for row in timed if re.match("v[0-9]|.*_naive$", row["kernel"])), None)


def speedup(row: store.Row, regime: str, first: store.Row | None) -> str:
    """How much faster than the first rung, by times on one clock."""
    if first is None:
        return "—"
    if row["kernel"] == first["kernel"]:
        return "baseline"
    ratio = first[f"{regime}_us"] / row[f"{regime}_us"]
    return f"{significant(ratio, 4 if 1 <= ratio < 10 else 3)}×"


def fastest(rows: Iterable[store.Row], regime: str) -> list[str]:
    """The kernel with the shortest time, and those that cannot be told from it: less than 1 % slower, or with intervals of
    the ratio to one baseline that overlap."""
    timed = [row for row in rows if regime_time(row, regime)]
    if not timed:
        return []
    best = min(timed, key=lambda row: float(row[f"{regime}_us"]))
    low, _ = interval(best, regime)
    found = []
    for row in timed:
        near = row[f"{regime}_us"] < (1 + LEAST_GAIN) * best[f"{regime}_us"]
        beside = row["baseline"] == best["baseline"] and interval(row, regime)[1] >= low
        if near or beside:
            found.append(row["kernel"])
    return found


def interval(row: store.Row, regime: str) -> tuple[float, float]:
    """Of the ratio to the baseline; the ratio twice where it is not known, and of the baseline itself 1."""
    if row["kernel"] == row["baseline"]:
        return 1.0, 1.0
    low, high = (number(row, f"{regime}_speedup_{end}") for end in ("low", "high"))
    ratio = number(row, f"{regime}_speedup")
    return (low, high) if low and high else (ratio or math.inf, ratio or 0.0)


def ratio_text(row: store.Row, column: str) -> str:
    """A ratio, with its interval where that is known: `1.031× (1.028–1.034)`."""
    ratio, low, high = (number(row, f"{column}{end}") for end in ("", "_low", "_high"))
    if ratio is None:
        return ""
    decimals = len(significant(ratio, 3 if ratio < 1 else 4).partition(".")[2])
    return f"{ratio:.{decimals}f}×" + (f" ({low:.{decimals}f}–{high:.{decimals}f})" if low and high else "")


def memory(nbytes: int | None) -> str:
    if nbytes is None:
        return "—"
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{significant(nbytes / 1024**power, 3)} {unit}"
    return f"{nbytes} B"


def energy_unit(metric: str) -> str:
    """What a joule buys: GFLOP/J, GB/J, tokens/J; calls, where the metric is no rate a second."""
    if metric == TFLOPS:
        return "GFLOP/J"
    return f"{metric.removesuffix('/s')}/J" if metric.endswith("/s") else "calls/J"


def energy(row: store.Row, metric: str) -> str:
    """How much a joule buys in steady calls, and the ratio to the baseline's joules."""
    joules, rate, us = (number(row, f"steady_{name}") for name in ("joules", "rate", "us"))
    if joules is None:
        return "—"
    done = 1.0  # of one call
    if metric.endswith("/s"):
        if rate is None or us is None or row["metric"] != metric:
            return "—"
        done = rate * us * 1e-6 * (1000 if metric == TFLOPS else 1)
    ratio = "" if row["kernel"] == row["baseline"] else ratio_text(row, "energy_gain")
    tie = " tie" if ratio and row["energy_verdict"] == "tie" else ""
    return format_scaled(done / joules) + (f"; {ratio}{tie}" if ratio else "")


def regime_time(row: store.Row, regime: str) -> float | None:
    """Microseconds, of a case that has times."""
    return number(row, f"{regime}_us") if row["status"] in store.MEASURED else None


def launch_lines(rows: Iterable[store.Row]) -> list[str]:
    """What the clock reads without a kernel and with an empty one, in a sentence, where a cold call takes hardly longer."""
    rows = list(rows)
    if min((us for row in rows if (us := regime_time(row, "cold"))), default=SHORT_US) >= SHORT_US:
        return []
    read = {
        what: median(found)
        for what, column in (("no kernel", "cold_empty_us"), ("an empty kernel", "cold_launch_us"))
        if (found := [us for row in rows if (us := number(row, column))])
    }
    said = ", and ".join(f"{duration(us)} with {what} in it" for what, us in read.items())
    return [f"The window in which a call is timed reads {said}; times contain that.", ""] if said else []


def throughput(row: store.Row, regime: str, metric: str) -> str:
    """The rate; with its unit where that is not the table's."""
    rate = number(row, f"{regime}_rate")
    if rate is None:
        return "—"
    return format_scaled(rate) + (f" {escape(row['metric'])}" if row["metric"] != metric else "")


def cells(
    row: store.Row,
    regime: str,
    metric: str,
    reference: store.Row | None,
    other: store.Row | None,
    first: store.Row | None,
) -> list[str]:
    """The five cells of a kernel, six where there is a best other; those of a failed case say how it failed."""
    shares = 2 if other else 1
    if row["status"] not in store.MEASURED:
        return [escape(row["kernel"]), escape(row["status"]), "—", *["—"] * shares, escape(row["message"], MESSAGE)]
    name = escape(row["kernel"]) + (" †" if row["status"] == "unconverged" and regime == "cold" else "")
    us = regime_time(row, regime)
    if us is None:
        return [name, "—", "—", *["—"] * shares, "—"]
    name += " §" if row["host_bound"] and regime == "cold" else ""
    of = [percent(row, regime, reference)] + ([percent_of_other(row, other, regime)] if other else [])
    return [name, duration(us), throughput(row, regime, metric), *of, speedup(row, regime, first)]


def more_cells(row: store.Row, regime: str, metric: str, more: Iterable[str]) -> list[str]:
    """The cells of the columns that only pages have."""
    if row["status"] not in store.MEASURED:
        return ["—" for _ in more]
    tuned = number(row, "tune_s")
    texts = {
        WORKSPACE: memory(row["workspace_bytes"]),
        TUNING: significant(tuned, 2) if tuned else "—",
        ENERGY: energy(row, metric),
    }
    return [texts[name] for name in more]


def more_columns(rows: Iterable[store.Row], regime: str) -> list[str]:
    """Which of the columns that only pages have some row has figures for."""
    measured = [row for row in rows if row["status"] in store.MEASURED]
    found = [WORKSPACE] if any(row["workspace_bytes"] is not None for row in measured) else []
    found += [TUNING] if any(number(row, "tune_s") for row in measured) else []
    return found + ([ENERGY] if regime == "steady" and any(number(row, "steady_joules") for row in measured) else [])


def time_header(rows: Iterable[store.Row]) -> str:
    """What the times of one problem are: those of `on_one_clock`."""
    clocks = {row["baseline"] for row in rows if row["baseline"]}
    whose = "each baseline" if len(clocks) > 1 else "PyTorch" if clocks == {REFERENCE} else escape("".join(clocks))
    return f"Time (on {whose}'s clock)" if clocks else "Time"


def table_lines(rows: list[store.Row], regime: str, full: bool) -> list[str]:
    """One table: the kernels of one problem in one regime, in ladder order, the `fastest` in bold; `full` with
    workspace and energy."""
    best, first = fastest(rows, regime), first_rung(rows, regime)
    measured = [row for row in rows if row["status"] in store.MEASURED]
    reference = next((row for row in measured if row["kernel"] == REFERENCE), None)
    metric, more = metric_of(measured or rows), more_columns(rows, regime) if full else []
    over, other = escape(first["kernel"]) if first else "baseline", best_other(rows, regime)
    of = ["% of PyTorch throughput"] + ([f"% of {escape(other['kernel'])}"] if other else [])
    header = ["Kernel", time_header(measured), f"Throughput ({escape(metric)})", *of, f"Speed-up vs. {over}"]
    header += [f"{name} ({escape(energy_unit(metric))})" if name == ENERGY else name for name in more]
    body = []
    for row in rows:
        texts = [*cells(row, regime, metric, reference, other, first), *more_cells(row, regime, metric, more)]
        body.append([f"**{text}**" if row["kernel"] in best else text for text in texts])
    return markdown_table(header, [":--", "--:", "--:", *[":--"] * len(of), "--:", *["--:"] * len(more)], body)


def fastest_of_ours(rows: Iterable[store.Row]) -> store.Row | None:
    """The fastest kernel, cold, that is not written in PyTorch and was timed beside a baseline: beside `torch`, else beside
    whatever was there."""
    ours = [row for row in rows if row["backend"] != "torch" and row["baseline"] not in (None, row["kernel"])]
    ours = [row for row in ours if row["baseline"] == REFERENCE] or ours
    timed = [row for row in sorted(ours, key=kernel_order) if regime_time(row, "cold")]
    return min(timed, key=lambda row: float(row["cold_us"]), default=None)


def format_shares(row: store.Row) -> str:
    """A kernel's share of PyTorch's throughput in words: `104.8 % (104.7–105.2) cold and 99.9 %, a tie, steady`; nothing where
    its baseline is another kernel. A share whose interval is too wide is left out."""
    if row["baseline"] != REFERENCE:
        return ""
    shares = {regime: percent(row, regime, None) for regime in REGIMES if number(row, f"{regime}_speedup")}
    shown = {regime: share for regime, share in shares.items() if "%" in share}
    return " and ".join(f"{share.replace(' tie', ', a tie,')} {regime}" for regime, share in shown.items())


def headline(rows: Iterable[store.Row]) -> str:
    """The fastest of our kernels in a sentence, cold and steady; empty where none was compared."""
    best = fastest_of_ours(rows)
    said = format_shares(best) if best else ""
    return f"of PyTorch's throughput **{escape(best['kernel'])}** reaches {said}." if best and said else ""


def title(problem: str) -> str:
    """A problem, or a part of it, as people read it: `bfloat16 · layout=TN · m=1, n=2`."""
    return " · ".join(escape(part.replace(",", ", ")) for part in problem.split("/") if part)


def problem_lines(problem: str, rows: list[store.Row], full: bool = False) -> list[str]:
    """Everything about one problem: a table for each regime that was timed, and which kernels were left out and why."""
    name = title(problem)
    rows = sorted(rows, key=kernel_order)
    skipped = [row for row in rows if row["status"] == "unsupported"]
    rows = [row for row in rows if row["status"] != "unsupported"]
    lines: list[str] = []
    regimes = [regime for regime in REGIMES if any(regime_time(row, regime) for row in rows)]
    for regime in regimes or REGIMES[:1]:
        lines += launch_lines(rows) if full and regime == "cold" else []
        lines += [f"**{name} · {regime if regimes else 'not timed'}**", "", *table_lines(rows, regime, full), ""]
    if any(row["status"] == "unconverged" for row in rows):
        lines += [f"† unconverged: {store.STATUSES['unconverged']}.", ""]
    if any(row["host_bound"] and regime_time(row, "cold") for row in rows):
        lines += [f"§ {HOST_BOUND}", ""]
    if skipped:
        why = "; ".join(f"{escape(row['kernel'])} ({escape(row['message'], MESSAGE)})" for row in skipped)
        lines += [f"Not run, {len(skipped)} unsupported: {why}.", ""]
    return lines


def ladder_lines(rows: list[store.Row]) -> list[str]:
    """The README's table of a ladder, cold: PyTorch, and each rung of ours that was faster than all before it."""
    regime, rows = REGIMES[0], sorted(rows, key=kernel_order)
    timed = [
        row for row in rows if regime_time(row, regime) and (row["kernel"] == REFERENCE or row["backend"] != LIBRARY)
    ]
    first, reference = first_rung(timed, regime), next((row for row in timed if row["kernel"] == REFERENCE), None)
    if first is None or reference is None:
        return []
    least, kept = math.inf, [reference]
    for row in timed:
        if row is not reference and row[f"{regime}_us"] < least:
            least = row[f"{regime}_us"]
            kept.append(row)
    metric, best = metric_of(timed), min(kept, key=lambda row: float(row[f"{regime}_us"]))
    header = ["Kernel", f"Throughput ({escape(metric)})", "% of PyTorch", f"Speed-up vs. {escape(first['kernel'])}"]
    body = []
    for row in kept:
        texts = [escape(row["kernel"]), throughput(row, regime, metric)]
        texts += [percent(row, regime, reference), speedup(row, regime, first)]
        body.append([f"**{text}**" if row is best else text for text in texts])
    return [*markdown_table(header, [":--", "--:", ":--", "--:"], body), ""]


def provenance(table: pa.Table) -> str:
    """One sentence on where a section's figures come from, cold and steady; of rows `with_problem`."""
    parts = [pluralise(len(table), "case")]

    def both(column: str) -> pa.ChunkedArray:
        return pa.chunked_array([*table[column].chunks, *table[f"steady_{column}"].chunks], table[column].type)

    dates = pc.min_max(both("finished")).as_py()
    if dates["min"]:
        first, last = f"{dates['min']:%Y-%m-%d}", f"{dates['max']:%Y-%m-%d}"
        parts[0] += f", finished {first}" + (f" to {last}" if last != first else "")
    for column, noun in PROVENANCE.items():
        values = sorted(value for value in pc.unique(both(column)).to_pylist() if value)
        names = [escape(re.sub("^([0-9a-f]{12})[0-9a-f]+", r"\1", value)) for value in values]
        if names:
            count = pluralise(len(names), noun)
            parts.append(count if len(names) > MOST_NAMES else f"{count.partition(' ')[2]} {', '.join(names)}")
    return "; ".join(parts) + "."
