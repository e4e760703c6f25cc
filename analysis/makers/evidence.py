"""The evidence that the bench can be believed, from parquet: `python analysis/make.py evidence`.

Reads what `benchmarks/sensitivity.py`, `clock_trap.py`, `cost.py` and `*_at_scale.py` wrote to benchmarks/results/, draws
docs/plots/<device>/clock-trap, and rewrites what is between markers (`<!-- sensitivity:begin -->` ...) in docs/evidence.md
and in docs/methodology.md. No number is typed here or there. Where nothing was measured, the text says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from minfer.analysis.demonstrations.trap import clock_trap, format_apart, most_apart, runs
from minfer.analysis.makers import Maker, Options
from minfer.analysis.plots import files
from minfer.analysis.tables.markdown import escape, pluralise, significant, table_lines, update
from minfer.rows import store
from minfer.rows.problems import number
from minfer.rows.rules import CASE_OVERHEAD_S, SWEEP_OVER_WINDOWS
from minfer.rows.store import Row

COMMAND = "python analysis/make.py evidence"

# The kinds of files, <kind>-<device>.parquet, with the script that makes them and the columns that they must have.
KINDS = {
    "sensitivity": ("sensitivity.py", ("check", "what", "value", "target", "unit", "met")),
    "clock-trap": ("clock_trap.py", ("method", "repetition", "arm", "tflops")),
    "cost": ("cost.py", ("cases", "sweep_s", "ratio", "case_s", "case_overhead_s")),
    "tables-at-scale": ("tables_at_scale.py", ("check", "what", "value", "target", "unit", "met")),
    "report-at-scale": ("report_at_scale.py", ("check", "what", "value", "target", "unit", "met")),
}
ORIGIN = {"driver": "driver", "torch": "PyTorch version", "commit": "commit"}

# What the checks of sensitivity.py belong to, by how their names begin; what begins otherwise is about verdicts.
GROUPS = {"steady,": "two-processes", "cold,": "nvbench"}
WORDS = {"verdicts": "about verdicts", "two-processes": "between two processes", "nvbench": "against nvbench"}

OTHER_FLUSH = "minfer, reading flush"  # beside nvbench's, which writes: a difference, and no target, also in old files

RELATIVE = ("share", "relative")  # units of numbers that are shown in percent

# Where the time of a case goes; together they are `case_s`.
PARTS = {
    "case_windows_s": "the windows: what the samples cover",
    "case_verify_s": "verifying",
    "case_warmup_s": "warming up",
    "case_timing_rest_s": "around the windows: flushing caches, checking every call, capturing graphs",
    "case_rest_s": "between the cases: new operands, messages, writing the row",
}

Found = dict[str, list[list[Row]]]  # by kind, the rows of each file


def load(named: Iterable[Path], folder: Path) -> tuple[Found, list[str]]:
    """The rows of the named files, else of those in `folder`, and a sentence for each file that cannot be used."""
    found: Found = {kind: [] for kind in KINDS}
    problems = []
    searched = (path for kind in KINDS for path in folder.glob(f"{kind}-*.parquet"))  # others' files may lie there, too
    for path in sorted(set(named) or searched):
        kind = next((kind for kind in KINDS if path.name.startswith(f"{kind}-")), None)
        try:
            if kind is None:
                raise ValueError(f"its name begins with none of {', '.join(KINDS)}")
            with pq.ParquetFile(path) as file:
                table = file.read()
            if lacking := [name for name in KINDS[kind][1] if name not in table.column_names]:
                raise ValueError(f"it has no column {', '.join(lacking)}")
        except (pa.ArrowException, OSError, ValueError) as error:
            problems.append(f"{path}: {(str(error).splitlines() or [type(error).__name__])[0]}")
            continue
        rows = table.to_pylist()
        if kind == "sensitivity":
            rows = [row | {"target": None, "met": None} if OTHER_FLUSH in row["what"] else row for row in rows]
        if kind == "clock-trap":
            rows = [row for row in rows if number(row, "tflops")]
        if rows:
            found[kind].append(rows)
    return found, problems


def device(rows: list[Row]) -> str:
    return rows[0].get("device") or "unknown device"


def origin(rows: list[Row]) -> str:
    """Where figures come from, as far as their file says."""
    known = [f"{noun} {escape(rows[0][column])}" for column, noun in ORIGIN.items() if rows[0].get(column)]
    return "; ".join([f"Measured on {escape(device(rows))}", *known]) + "."


def say_missing(kind: str) -> str:
    return f"Nothing was measured yet: `uv run python benchmarks/{KINDS[kind][0]}` does it.\n"


def format_amount(value: float | None, unit: str) -> str:
    if value is None:
        return "—"
    return f"{100 * value:g} %" if unit in RELATIVE else f"{value:g} {unit}"


def format_found(row: Row) -> str:
    """What a check found, in three digits or in as many more as show on which side of the target it is."""
    value, target = row["value"], row["target"]
    if row["unit"] in RELATIVE:
        value, target = 100 * value, None if target is None else 100 * target
    unit = "%" if row["unit"] in RELATIVE else row["unit"]
    for digits in range(3, 18):
        text = significant(value, digits) if value > 0 else f"{value:g}"
        if target is None or (float(text) <= target) == (value <= target):
            break
    return f"{text} {unit}"


def check_lines(rows: list[Row]) -> list[str]:
    """A table of checks: what was found, and what is allowed at most."""
    results = {True: "met", False: "**missed**", None: "shown only"}
    body = [
        [
            escape(row["check"]),
            escape(row["what"]),
            format_found(row),
            format_amount(row["target"], row["unit"]),
            results[row["met"]],
        ]
        for row in rows
    ]
    return table_lines(
        ["Checked", "What", "Found", "Allowed at most", "Target"], [":--", ":--", "--:", "--:", ":--"], body
    )


def group(row: Row) -> str:
    """Which rule a check of sensitivity.py is evidence for."""
    return next((name for start, name in GROUPS.items() if row["check"].startswith(start)), "verdicts")


def summary(rows: list[Row]) -> str:
    """How many targets were met, and which were not, in a sentence."""
    judged = [row for row in rows if row["met"] is not None]
    missed = [row for row in judged if not row["met"]]
    if not missed:
        return f"Met: {len(judged)} of {pluralise(len(judged), 'target')}."
    where = []
    for name, words in WORDS.items():
        if n := sum(group(row) == name for row in missed):
            where.append(f"{n} of the {sum(group(row) == name for row in judged)} {words}")
    met = f"Met: {len(judged) - len(missed)} of {pluralise(len(judged), 'target')}"
    return f"{met}. **Missed: {len(missed)}** ({', '.join(where)})."


def sensitivity(measured: list[list[Row]]) -> str:
    """How many targets each device met, and which kinds it missed."""
    return "\n".join(f"{origin(rows)} {summary(rows)}\n" for rows in measured if rows) or say_missing("sensitivity")


def checks(measured: list[list[Row]], only: str) -> str:
    """The checks of one group, a table for each device."""
    lines: list[str] = []
    for rows in measured:
        if chosen := [row for row in rows if group(row) == only]:
            lines += [origin(rows), "", *check_lines(chosen), ""]
    return "\n".join(lines) or say_missing("sensitivity")


def scale(measured: list[list[Row]], kind: str) -> str:
    """What many rows cost, a table for each machine."""
    lines: list[str] = []
    for rows in measured:
        lines += [origin(rows), "", *check_lines(rows), ""]
    return "\n".join(lines) or say_missing(kind)


def trap(measured: list[list[Row]], folder: str) -> str:
    """Each device's picture and table of the clock trap; `folder` is where the pictures are, seen from the text."""
    lines: list[str] = []
    for rows in measured:
        said = "; ".join(f"{escape(method)}: {text}" for method, text in most_apart(rows).items())
        lines += [f"{origin(rows)} How far apart the same kernel seems, at most: {said}.", ""]
        lines += [files.shown(f"{folder}/{picture_name(rows)}", clock_trap(device(rows), rows).about), ""]
        shown = runs(rows)
        most = max(len(each) for *_, each in shown)
        header = [
            "Method",
            "Repetition",
            *(f"Candidate {n + 1} (TFLOP/s)" for n in range(most)),
            "Apart",
            "SM clock (MHz)",
        ]
        body = []
        for method, repetition, each in shown:
            rates = [candidate["tflops"] for candidate in each]
            cells = [significant(rate) for rate in rates] + ["—"] * (most - len(rates))
            mhz = [f"{candidate['sm_mhz']:.0f}" if candidate.get("sm_mhz") else "—" for candidate in each]
            mhz = mhz[:1] if len(set(mhz)) == 1 else mhz
            body.append([escape(method), str(repetition + 1), *cells, format_apart(rates), ", ".join(mhz)])
        lines += [*table_lines(header, [":--", "--:", *["--:"] * most, "--:", "--:"], body), ""]
    return "\n".join(lines) or say_missing("clock-trap")


def picture_name(rows: list[Row]) -> str:
    return f"{store.slug(device(rows))}/clock-trap"


def cost(measured: list[list[Row]]) -> str:
    """Where the time of a case goes, and whether what is spent beside the windows is within its targets."""
    lines: list[str] = []
    for row, *_ in measured:
        whole = row["case_s"]
        parts = {text: row.get(column) for column, text in PARTS.items()} | {"**a case, on average**": whole}
        body = [[text, f"{s:.3f} s", f"{100 * s / whole:.1f} %"] for text, s in parts.items() if s is not None]
        lines += [origin([row]), "", *table_lines(["Part", "Time", "Share"], [":--", "--:", "--:"], body), ""]
        others = {"median": row.get("case_overhead_median_s"), "90th percentile": row.get("case_overhead_p90_s")}
        overhead = "on average; " + ", ".join(f"{k} {s:.3f} s" for k, s in others.items() if s is not None)
        cases = pluralise(row["cases"], "case")
        limits = [
            ("A case without its windows", overhead, row["case_overhead_s"], CASE_OVERHEAD_S, "s"),
            (
                f"A sweep of {cases}, {row['sweep_s']:.1f} s",
                "over its windows and builds",
                row["ratio"],
                SWEEP_OVER_WINDOWS,
                "times",
            ),
        ]
        names = ("check", "what", "value", "target", "unit")
        lines += check_lines([dict(zip(names, c, strict=True)) | {"met": c[2] <= c[3]} for c in limits])
        lines.append("")
    return "\n".join(lines) or say_missing("cost")


def write(_: pa.Table, options: Options) -> list[str]:
    """Write or only check the plots and both texts; what is wrong, in sentences."""
    found, problems = load(options.measured, options.benchmarks)
    if problems:
        return problems
    evidence, methodology = (options.docs / name for name in ("evidence.md", "methodology.md"))
    folder, check = options.plots, options.check
    drawn = {folder / picture_name(rows): clock_trap(device(rows), rows) for rows in found["clock-trap"]}
    where = Path(os.path.relpath(folder, methodology.parent)).as_posix()
    bodies = {
        (evidence, "sensitivity"): sensitivity(found["sensitivity"]),
        (evidence, "scale"): "\n".join(scale(found[kind], kind) for kind in ("tables-at-scale", "report-at-scale")),
        (methodology, "clock-trap"): trap(found["clock-trap"], where),
        (methodology, "cost"): cost(found["cost"]),
    }
    bodies |= {(methodology, name): checks(found["sensitivity"], name) for name in WORDS}
    problems = files.bring_up_to_date(drawn, folder, files.pattern(["clock-trap"]).removeprefix(".+-"), COMMAND, check)
    said = [update(file, name, body, COMMAND, check) for (file, name), body in bodies.items()]
    return problems + list(dict.fromkeys(problem for problem in said if problem))


MAKER = Maker(write)
