"""The measured tables of docs/decoder.md: `python analysis/make.py decoder`.

Reads the rows of the op `decoder`, and what `benchmarks/decoder_split.py` and `serve_trace.py` wrote to benchmarks/results/;
rewrites what is between `<!-- decoder-steps:begin -->` ..., `<!-- decoder-split:begin -->` ... and `<!-- serve-trace:begin -->`
..."""

from __future__ import annotations

import csv
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from minfer.analysis.data.prepare import WHICH, kernel_order, on_one_clock, primary, with_problem
from minfer.analysis.makers import Maker, Options
from minfer.analysis.tables.markdown import escape, significant, table_lines, update
from minfer.rows import store
from minfer.rows.store import Row

COMMAND = "python analysis/make.py decoder"
REGIMES = ("steady", "cold")  # the first that a row has is shown
COLUMNS = [
    *WHICH,
    "dtype",
    "params",
    "shape",
    "device",
    "device_kind",
    "baseline",
    "launches",
    "roof",
    "metrics",
    "steady_joules",
]
COLUMNS += [
    f"{regime}_{name}"
    for regime in REGIMES
    for name in ("us", "baseline_us", "rate", "tflops", "gbps", "speedup", "percent_of_peak", "verdict")
]
STEPS, SPLIT, SERVED = "decoder-steps", "decoder-split", "serve-trace"
SCRIPTS = {
    STEPS: "python -m minfer.launch +sweep=decoder",
    SPLIT: "python benchmarks/decoder_split.py",
    SERVED: "python benchmarks/serve_trace.py TRACE",
}
HEADER = [
    "Model",
    "Computes",
    "By",
    "ms",
    "Tokens/s",
    "GB/s",
    "TFLOP/s",
    "% of peak",
    "Times as fast as PyTorch",
    "J/token",
]
HEADER += ["Launches"]
SIZES = ("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")


def models(sources: Path) -> dict[tuple[int, ...], str]:
    """The names of public models by their sizes, from models.csv."""
    path = sources / "models.csv"
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {tuple(int(row[name] or 0) for name in SIZES): row["model"] for row in csv.DictReader(file)}


def problem(row: Row, names: dict[tuple[int, ...], str]) -> tuple[str, str]:
    """A model's name, with the format of its weights, and what it computes."""
    shape, quant = row["shape"], row["params"].get("quant", "none")
    sizes = tuple(shape[name] for name in SIZES)
    model = names.get(sizes, f"{shape['layers']} layers of {shape['hidden']}")
    model += "" if quant == "none" else f", {quant}"
    if shape["new"] == 1:
        return model, f"decode, batch {shape['batch']}, context {shape['context']}"
    return model, f"prefill of {shape['batch']} × {shape['new']}"


def step_lines(table: pa.Table, names: dict[tuple[int, ...], str]) -> list[str]:
    """A table for each device: a line for each problem and kernel."""
    table = table.filter(pc.equal(table["op"], "decoder"))
    if not len(table):
        return []
    found = on_one_clock(with_problem(table)).to_pylist(maps_as_pydicts="lossy")
    lines: list[str] = []
    for device in primary(table):
        rows = [row for row in found if row["device"] == device]
        rows.sort(key=lambda row: (*problem(row, names), *kernel_order(row)[:3]))
        body = [[*problem(row, names), escape(row["kernel"]), *cells(row)] for row in rows]
        lines += [f"**{escape(device)}**", "", *table_lines(HEADER, [":--"] * 3 + ["--:"] * 8, body), ""]
    return lines


def cells(row: Row) -> list[str]:
    """The figures of a row, or its status."""
    regime = next((each for each in REGIMES if row.get(f"{each}_us")), None)
    if regime is None or row["status"] not in store.MEASURED:
        return [escape(row["status"]), *["—"] * 7]
    share, speedup = row[f"{regime}_percent_of_peak"], row[f"{regime}_speedup"]
    tokens = row["shape"]["batch"] * row["shape"]["new"]
    return [
        significant(row[f"{regime}_us"] / 1e3),
        *(significant(row[f"{regime}_{name}"]) for name in ("rate", "gbps", "tflops")),
        f"{share:.1f} ({escape(row['roof'])})" if share else "—",
        f"{speedup:.3f}" if speedup and row["kernel"] != row["baseline"] else "—",
        significant(row["steady_joules"] / tokens, 3) if row["steady_joules"] else "—",
        str(row["launches"] or "—"),
    ]


def read(folder: Path, kind: str) -> list[list[Row]]:
    """The rows of each file <kind>-<device>.parquet."""
    return [pq.read_table(path).to_pylist() for path in sorted(folder.glob(f"{kind}-*.parquet"))]


def origin(about: Row) -> str:
    return f"Measured on {escape(about['device'])}; PyTorch {escape(about['torch'])}; commit {escape(about['commit'])}."


def split_lines(rows: list[Row]) -> list[str]:
    """A table for each step: microseconds of each operation, beside the floor."""
    lines = [origin(rows[0]), ""]
    steps: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        steps.setdefault((row["model"], row["batch"], row["context"]), []).append(row)
    for (model, batch, context), each in steps.items():
        whole = next(row for row in each if row["operation"] == "step")
        body = [
            [
                f"`{row['operation']}`", str(row["calls"] or "—"), significant(row["us"]), f"{row['us'] / whole['us']:.1%}",
                significant(row["floor_us"]) if row["read_bytes"] else "—",
                f"{row['floor_us'] / row['us']:.2f}" if row["read_bytes"] else "—",
            ]
            for row in each
        ]  # fmt: skip
        header = ["Operation", "Calls", "µs a step", "Of the step", "Floor (µs)", "Share of the floor"]
        lines += [
            f"**{escape(model)}, batch {batch}, context {context}; memory is read at {whole['read_gbps']:.0f} GB/s**",
            "",
        ]
        lines += [*table_lines(header, [":--", *["--:"] * 5], body), ""]
    return lines


def served_lines(rows: list[Row]) -> list[str]:
    """What the serving loop generated a second, and how long tokens took."""
    lines = [origin(rows[0]), ""]
    for row in rows:
        what = f"{row['requests']:,} requests of {escape(row['trace'])}, {escape(row['model'])}"
        if row.get("steps_s"):
            share = row["steps_s"] / row["seconds"]
            said = (
                f"all waiting at time 0: {row['generated']:,} tokens in {row['seconds']:.1f} s, "
                f"{row['tokens_per_s']:,.0f} tokens/s, {share:.2f} of the {row['steps_tokens_per_s']:,.0f} tokens/s that the "
                f"{row['steps']:,} steps alone would give. {row['prompt_tokens']:,} tokens of prompts were computed; requests "
                f"gave their pages back {row['preempted']} times"
            )
        else:
            said = (
                f"{row['rate']:g} a second: the first token comes after {row['first_p50_ms']:.0f} ms (median; "
                f"99 %: {row['first_p99_ms']:.0f} ms), the next ones {row['between_p50_ms']:.1f} ms after each other "
                f"(99 %: {row['between_p99_ms']:.1f} ms)"
            )
        lines.append(f"- {what}, {said}.")
    return [*lines, ""]


def write(table: pa.Table, options: Options) -> list[str]:
    texts = {
        STEPS: step_lines(table, models(options.sources)),
        SPLIT: [line for rows in read(options.benchmarks, SPLIT) for line in split_lines(rows)],
        SERVED: [line for rows in read(options.benchmarks, SERVED) for line in served_lines(rows)],
    }
    problems = []
    for name, lines in texts.items():
        body = "\n".join(lines) or f"Nothing was measured yet: `{SCRIPTS[name]}` does it.\n"
        if wrong := update(options.docs / "decoder.md", name, body, COMMAND, options.check):
            problems.append(wrong)
    return problems


MAKER = Maker(write, COLUMNS)
