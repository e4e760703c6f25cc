"""The README's results tables, from parquet: `python analysis/make_tables.py`.

Reads results/**/*.parquet and rewrites what is between `<!-- results:begin -->` and `<!-- results:end -->`. Each op on
each device gets one table for a representative problem and, folded away, those of every other. No number is typed
here or there: all come from rows. Everything up to the choice of problems is done on columns, because a million rows
must not take more than seconds; only the problems that are shown become Python objects.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the project is run from its folder, not installed

from minfer import store

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
COMMAND = "python analysis/make_tables.py"
REFERENCE = "torch"  # the kernel that "% of PyTorch throughput" is against
MOST_PROBLEMS = 250  # that all sections may unfold, of about 1.8 KiB each: GitHub shows 500 KiB of a README
MOST_NAMES = 4  # runs, commits, ... that a sentence lists before it only counts them
MESSAGE = 100  # characters shown of a message
IDENTITY = ("case", "op", "kernel", "status")  # what a row must say to be shown

REGIMES = ("cold", "steady")
HEADER = "| Kernel | Time | Throughput (TFLOP/s) | % of PyTorch throughput | Speed-up vs. baseline |"
RULE = "| :-- | --: | --: | --: | :-- |"
LEGEND = (
    "*Cold* is one call at a time, caches flushed before it; *steady* is calls back to back in blocks long enough for"
    " the clocks to settle. Times are medians and speed-ups medians of paired ratios, in brackets their 95 % confidence"
    " interval (cold) or range over neighbouring blocks (steady); a *tie* cannot be told from the baseline. The fastest"
    " kernel is in bold."
)
PROVENANCE = {"run": "run", "commit": "commit", "torch": "PyTorch version", "driver": "driver"}
COLUMNS = ["run", "finished", "case", "op", "kernel", "status", "message", "baseline", "flops", "device", "device_kind"]
COLUMNS += ["driver", "torch", "commit"]
COLUMNS += [f"{r}_{c}" for r in REGIMES for c in ("us", "tflops", "speedup", "speedup_low", "speedup_high", "verdict")]


def usable(table: pa.Table) -> pa.Table:
    """The rows that say what ran and what became of it; a row without a device keeps a place of its own."""
    if any(table[name].null_count for name in IDENTITY):  # rare, and a filter is a copy
        table = table.filter(functools.reduce(pc.and_, (pc.is_valid(table[name]) for name in IDENTITY)))
    devices = pc.fill_null(table["device"], "unknown device")
    return table.set_column(table.column_names.index("device"), "device", devices)


def newest(table: pa.Table) -> pa.Table:
    """Of the rows with the same device and case, the one finished last; of those finished at once, the last run's."""
    case, device, run = (_codes(table[name]) for name in ("case", "device", "run"))
    finished = pc.fill_null(table["finished"].cast(pa.int64()), np.iinfo(np.int64).min).to_numpy()
    order = np.lexsort((run, finished, device, case))
    last = np.ones(len(table), dtype=bool)
    last[:-1] = (np.diff(case[order]) != 0) | (np.diff(device[order]) != 0)
    keep = np.zeros(len(table), dtype=bool)
    keep[order[last]] = True
    return table if keep.all() else table.filter(pa.array(keep))


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """A number for each text, in the texts' order; -1 for null."""
    encoded = column.dictionary_encode().combine_chunks()
    rank = np.full(len(encoded.dictionary) + 1, -1)
    rank[pc.array_sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(encoded.dictionary))
    codes: np.ndarray = rank[pc.fill_null(encoded.indices, len(encoded.dictionary)).to_numpy()]
    return codes


@functools.cache  # of 100,000 problems, few dtypes and parameters differ
def natural(text: str) -> tuple[str | int, ...]:
    """Sorts m=512 before m=4096."""
    return tuple(int(part) if i % 2 else part for i, part in enumerate(re.split("([0-9]{1,18})", text)))


def kernel_order(row: store.Row) -> tuple[object, ...]:
    """The ladder: PyTorch, the numbered versions, then the others."""
    name = row["kernel"]
    return name != REFERENCE, not re.match("v[0-9]", name), natural(name), row["case"]


def plain(text: str | None, most: int | None = None) -> str:
    """Text as markdown that shows it as it is, in one line, within one cell; cut to `most` characters."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text or "").split())
    if most and len(text) > most:
        text = text[: most - 1].rstrip() + "…"
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "&#124;")
    # an underscore after a letter opens no emphasis, so v01_naive stays as it is
    return re.sub(r"([\\`*\[\]~$]|(?<![^\W_])_)", r"\\\1", text) or "—"


def number(row: store.Row, column: str) -> float | None:
    """A row's value if it is one that a time, rate or ratio can have."""
    value = row[column]
    return value if value is not None and 0 < value < math.inf else None


def significant(value: float, digits: int = 4) -> str:
    """A positive number to that many significant digits; integer digits all stay."""
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # that of the rounded value: 9.9996 is 10.00
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


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


def problem_lines(problem: str, rows: list[store.Row]) -> list[str]:
    """Everything about one problem: a table for each regime that somebody has, and who was left out and why."""
    name = " · ".join(plain(part.replace(",", ", ")) for part in problem.split("/") if part)
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


def section_lines(op: str, device: str, table: pa.Table, most: int) -> list[str]:
    """One op on one device, at most `most` problems of it; `table` has a column `problem` and all sections' rows."""
    here = pc.and_(pc.equal(table["op"], op), pc.equal(table["device"], device))
    origin = table.select(["finished", *PROVENANCE]).filter(here)  # to filter every column would cost a second
    lines = [f"### {plain(op)} on {plain(device)}", "", provenance(origin), ""]
    supported = pc.and_(here, pc.not_equal(table["status"], "unsupported"))
    order, headline = choose(table.select(["problem", "status", "flops"]).filter(supported))
    if headline is not None:
        shown = order[:most]
        chosen = pc.is_in(table["problem"], pa.array([headline, *shown], pa.string()))
        rows: dict[str, list[store.Row]] = {}
        for row in table.filter(pc.and_(here, chosen)).to_pylist():
            rows.setdefault(row["problem"], []).append(row)
        lines += problem_lines(headline, rows[headline])
        if len(order) > 1:
            count = f"All {len(order)}" if len(shown) == len(order) else f"The first {len(shown)} of {len(order)}"
            lines += ["<details>", f"<summary>{count} problems</summary>", ""]
            for name in shown:
                lines += problem_lines(name, rows[name])
            if len(shown) < len(order):
                lines += [f"{len(order) - len(shown)} more problems are in the parquet files only.", ""]
            lines += ["</details>", ""]
    if left_out := pc.count_distinct(table["problem"].filter(here)).as_py() - len(order):
        lines += [f"Not run: {_count(left_out, 'problem')} that no kernel here supports.", ""]
    return lines


def choose(table: pa.Table) -> tuple[list[str], str | None]:
    """The problems in order, and the representative one: most kernels measured, then most FLOPs, then by name."""
    measured = pc.is_in(table["status"], pa.array(store.MEASURED)).cast(pa.int64())
    groups = table.append_column("measured", measured).group_by("problem")
    totals = groups.aggregate([("measured", "sum"), ("flops", "max")])
    rows = sorted(totals.to_pylist(), key=lambda row: [natural(part) for part in row["problem"].split("/")])
    best = min(rows, key=lambda row: (-row["measured_sum"], -(number(row, "flops_max") or 0)), default=None)
    return [row["problem"] for row in rows], best and best["problem"]


def provenance(table: pa.Table) -> str:
    """One sentence on where a section's figures come from."""
    parts = [_count(len(table), "case")]
    dates = pc.min_max(table["finished"]).as_py()
    if dates["min"]:
        first, last = f"{dates['min']:%Y-%m-%d}", f"{dates['max']:%Y-%m-%d}"
        parts[0] += f", finished {first}" + (f" to {last}" if last != first else "")
    for column, noun in PROVENANCE.items():
        values = sorted(value for value in pc.unique(table[column]).to_pylist() if value)
        names = [plain(re.sub("^([0-9a-f]{12})[0-9a-f]+", r"\1", value)) for value in values]
        if names:
            count = _count(len(names), noun)
            parts.append(count if len(names) > MOST_NAMES else f"{count.partition(' ')[2]} {', '.join(names)}")
    return "; ".join(parts) + "."


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def markdown(table: pa.Table) -> str:
    """What goes between the markers, for every usable row."""
    table = newest(table)
    problem = pc.replace_substring_regex(table["case"], "^[^/]*/[^/]*/", "")  # the key without op and kernel
    table = table.append_column("problem", problem)
    groups = table.group_by(["op", "device"]).aggregate([("device_kind", "max")]).to_pylist()
    groups.sort(key=lambda g: (g["op"], {"cuda": 0, "cpu": 1}.get(g["device_kind_max"], 2), g["device"]))
    lines = [LEGEND, ""] if groups else ["No results yet: `python -m minfer.launch` makes them.", ""]
    for g in groups:
        lines += section_lines(g["op"], g["device"], table, max(1, MOST_PROBLEMS // len(groups)))
    return "\n".join(lines)


def replaced(text: str, body: str) -> str:
    """The README's text with `body` between the markers, in the README's own line endings. Raises ValueError."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"it needs one line {BEGIN} and, below it, one line {END}: add them where the tables belong")
    newline = "\r\n" if "\r\n" in text else "\n"
    body = f"{BEGIN}\n\n{body}\n{END}".replace("\n", newline)
    return text[: text.index(BEGIN)] + body + text[text.index(END) + len(END) :]


def update(readme: Path, body: str, check: bool) -> str | None:
    """Bring the README up to date, or only check it; what is wrong, in a sentence."""
    try:
        old = readme.read_bytes().decode()
        new = replaced(old, body)
        if check and new != old:
            return f"{readme} is out of date: run `{COMMAND}`"
        if new != old:
            readme.write_bytes(new.encode())
    except OSError as error:
        return f"{readme}: {error.strerror or error}"
    except ValueError as error:
        return f"{readme}: {error}"
    return None


def main(arguments: Iterable[str] | None = None) -> int:
    """Returns the exit status: 0 when the README's tables are those of the results, and every file could be read."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, help="parquet files to read instead of searching --results")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder to search (default: results)")
    parser.add_argument("--readme", type=Path, default=Path("README.md"), help="file to rewrite (default: README.md)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the README is out of date")
    options = parser.parse_args(list(arguments) if arguments is not None else None)
    if not options.files and not options.results.is_dir():
        print(f"{options.results} is not a folder: name the one with the results with --results", file=sys.stderr)
        return 1
    paths = sorted(set(options.files)) or store.files(options.results)
    table, bad = store.read(paths, COLUMNS)
    problems = [f"{path}: {reason}; skipped" for path, reason in bad.items()]
    shown = usable(table)
    if len(shown) < len(table):
        print(f"{len(table) - len(shown)} rows lack one of {', '.join(IDENTITY)} and are left out", file=sys.stderr)
    if bad and not len(shown):
        problems.append(f"{options.readme} is left as it is: the readable files have no row")
    elif problem := update(options.readme, markdown(shown), options.check):
        problems.append(problem)
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    pa.set_memory_pool(pa.system_memory_pool())  # a million rows: 0.6 GiB, with mimalloc 0.8 and a second more
    sys.exit(main())
