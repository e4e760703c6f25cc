"""The measured tables of docs/decoder.md, and its picture: `python analysis/make.py decoder`.

Reads the rows of the op `decoder`, and what `benchmarks/decoder_split.py` and `serve_trace.py` wrote to benchmarks/results/.
Draws docs/plots/<device>/decoder-split, and rewrites what is between `<!-- decoder-steps:begin -->` ...,
`<!-- decoder-targets:begin -->` ..., `<!-- decoder-split:begin -->` ... and `<!-- serve-trace:begin -->` ..., and in the README
what is between `<!-- decoder:begin -->` and `<!-- decoder:end -->`."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from minfer.analysis.data.prepare import WHICH, kernel_order, on_one_clock, primary, with_problem
from minfer.analysis.demonstrations import steps as drawn_steps
from minfer.analysis.makers import Maker, Options
from minfer.analysis.plots import files
from minfer.analysis.tables.decoder_targets import REGIMES, target_lines
from minfer.analysis.tables.markdown import escape, significant, table_lines, update
from minfer.rows import store
from minfer.rows.store import Row

COMMAND = "python analysis/make.py decoder"
COLUMNS = [
    *WHICH,
    "dtype",
    "params",
    "shape",
    "device",
    "device_kind",
    "baseline",
    "launches",
    "workspace_bytes",
    "roof",
    "metrics",
    "steady_joules",
]
COLUMNS += [
    f"{regime}_{name}"
    for regime in REGIMES
    for name in ("us", "baseline_us", "rate", "tflops", "gbps", "speedup", "percent_of_peak", "verdict")
]
STEPS, TARGETS, SPLIT, SERVED = "decoder-steps", "decoder-targets", "decoder-split", "serve-trace"
HEADLINE = "decoder"
SHOWN = "Llama-3.1-8B"  # in the README
SCRIPTS = {
    STEPS: "python -m minfer.launch +sweep=decoder",
    TARGETS: "python -m minfer.launch +sweep=decoder",
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
HEADER += ["Launches a layer", "Workspace (MB)"]
WHICH_REQUESTS = ["Model", "Trace", "Requests", "Policy"]
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


def decoder_rows(table: pa.Table) -> tuple[list[str], list[Row]]:
    """The devices with rows of the op `decoder`, and these rows."""
    table = table.filter(pc.equal(table["op"], "decoder"))
    if not len(table):
        return [], []
    return primary(table), on_one_clock(with_problem(table)).to_pylist(maps_as_pydicts="lossy")


def step_lines(table: pa.Table, names: dict[tuple[int, ...], str]) -> list[str]:
    """A table for each device: a line for each problem and kernel."""
    devices, found = decoder_rows(table)
    lines: list[str] = []
    for device in devices:
        rows = [row for row in found if row["device"] == device]
        rows.sort(key=lambda row: (*problem(row, names), *kernel_order(row)[:3]))
        body = [[*problem(row, names), escape(row["kernel"]), *cells(row)] for row in rows]
        lines += [f"**{escape(device)}**", "", *table_lines(HEADER, [":--"] * 3 + ["--:"] * 9, body), ""]
    return lines


def headline(table: pa.Table, names: dict[tuple[int, ...], str]) -> str:
    """A sentence for each batch of a step of SHOWN in its rows' dtype, on the first device that has one."""
    devices, rows = decoder_rows(table)
    found = [
        row
        for row in rows
        if row["kernel"] == "minfer"
        and problem(row, names)[0] == SHOWN
        and row["shape"]["new"] == 1
        and row["steady_us"]
    ]
    for device in devices:
        steps = sorted((row for row in found if row["device"] == device), key=lambda row: row["shape"]["batch"])
        if steps:
            about = f"{steps[0]['dtype']}, context {steps[0]['shape']['context']}"
            each = ", ".join(
                f"{significant(row['steady_us'] / 1e3)} ms at batch {row['shape']['batch']} "
                f"({row['steady_rate']:,.0f} tokens/s; the floor is {row['steady_percent_of_peak']:.1f} % of this time; "
                f"{row['steady_speedup']:.2f} times as fast as PyTorch)"
                for row in steps
            )
            return (
                f"**A whole decoder.** On one {escape(device)}, a step of decoding with {SHOWN} ({about}) takes {each}. "
                "The floor is the time in which the GPU reads the weights and the cache once. "
                "PyTorch runs the same model in a CUDA graph, too. "
                "[Where the time goes](docs/decoder.md).\n"
            )
    return ""


def targets(table: pa.Table, names: dict[tuple[int, ...], str], served: list[list[Row]]) -> list[str]:
    """The targets of SHOWN, and what the rows of each device say."""
    devices, rows = decoder_rows(table)
    return target_lines([row for row in rows if problem(row, names)[0].startswith(SHOWN)], served, devices)


def cells(row: Row) -> list[str]:
    """The figures of a row, or its status."""
    regime = next((each for each in REGIMES if row.get(f"{each}_us")), None)
    if regime is None or row["status"] not in store.MEASURED:
        return [escape(row["status"]), *["—"] * 8]
    share, speedup = row[f"{regime}_percent_of_peak"], row[f"{regime}_speedup"]
    tokens = row["shape"]["batch"] * row["shape"]["new"]
    return [
        significant(row[f"{regime}_us"] / 1e3),
        *(significant(row[f"{regime}_{name}"]) for name in ("rate", "gbps", "tflops")),
        f"{share:.1f} ({escape(row['roof'])})" if share else "—",
        f"{speedup:.3f}" if speedup and row["kernel"] != row["baseline"] else "—",
        significant(row["steady_joules"] / tokens, 3) if row["steady_joules"] else "—",
        f"{row['launches'] / row['shape']['layers']:.1f}" if row["launches"] else "—",
        significant(row["workspace_bytes"] / 1e6, 3) if row["workspace_bytes"] else "—",
    ]


def read(folder: Path, kind: str) -> list[list[Row]]:
    """The rows of each file <kind>-<device>.parquet."""
    return [pq.read_table(path).to_pylist() for path in sorted(folder.glob(f"{kind}-*.parquet"))]


def origin(about: Row) -> str:
    return f"Measured on {escape(about['device'])}; PyTorch {escape(about['torch'])}; commit {escape(about['commit'])}."


def split_lines(rows: list[Row]) -> list[str]:
    """A table for each step: microseconds of each operation, beside the floor."""
    lines = []
    header = ["Operation", "Calls", "µs a step", "Of the step", "Floor (µs)", "Share of the floor"]
    for each in drawn_steps.by_step(rows):
        whole = each[-1]
        body = [
            [
                f"`{row['operation']}`", str(row["calls"] or "—"), significant(row["us"]), f"{row['us'] / whole['us']:.1%}",
                significant(row["floor_us"]) if row["read_bytes"] else "—",
                f"{row['floor_us'] / row['us']:.2f}" if row["read_bytes"] else "—",
            ]
            for row in each
        ]  # fmt: skip
        about = f"{escape(whole['model'])}, batch {whole['batch']}, context {whole['context']}"
        lines += [f"**{about}; memory is read at {whole['read_gbps']:.0f} GB/s**", ""]
        lines += [*table_lines(header, [":--", *["--:"] * 5], body), ""]
    return lines


def served_lines(rows: list[Row]) -> list[str]:
    """What the serving loop generated a second under each policy, and how long tokens took."""
    whole, timed = ([row for row in rows if bool(row.get("steps_s")) is of] for of in (True, False))
    lines = [origin(rows[0]), ""]
    if whole:
        body = [
            [
                *which(row), f"{row['seconds']:.1f}", f"{row['generated']:,}", f"{row['prompt_tokens']:,}",
                f"{row['tokens_per_s']:,.0f}", f"{row['steps']:,}", f"{row['steps_tokens_per_s']:,.0f}",
                f"{row['steps_s'] / row['seconds']:.2f}", f"{row['preempted']:,}",
            ]
            for row in whole
        ]  # fmt: skip
        header = [
            *WHICH_REQUESTS,
            "Seconds",
            "Tokens",
            "Of prompts",
            "Tokens/s",
            "Steps",
            "Tokens/s of its steps alone",
        ]
        header += ["Share of that", "Pages given back"]
        lines += ["**All requests wait at time 0**", "", *table_lines(header, [":--"] * 4 + ["--:"] * 8, body), ""]
    if timed:
        names = ("first_p50_ms", "first_p99_ms", "between_p50_ms", "between_p99_ms")
        body = [[*which(row), f"{row['rate']:g}", *(significant(row[name], 3) for name in names)] for row in timed]
        header = [*WHICH_REQUESTS, "Requests/s", "First token (ms), p50", "p99", "Between tokens (ms), p50", "p99"]
        lines += ["**Requests come at a rate**", "", *table_lines(header, [":--"] * 4 + ["--:"] * 5, body), ""]
    return lines


def which(row: Row) -> list[str]:
    return [escape(row["model"]), escape(row["trace"]), f"{row['requests']:,}", f"`{row['policy']}`"]


def write(table: pa.Table, options: Options) -> list[str]:
    pictures, split, names = {}, list[str](), models(options.sources)
    served = read(options.benchmarks, SERVED)
    to_plots = Path(os.path.relpath(options.plots, options.docs)).as_posix()
    for rows in read(options.benchmarks, SPLIT):
        where = f"{store.slug(rows[0]['device'])}/{SPLIT}"
        made = pictures[options.plots / where] = drawn_steps.split(rows, rows[0]["device"])
        split += [origin(rows[0]), "", files.shown(f"{to_plots}/{where}", made.about), "", *split_lines(rows)]
    texts = {
        STEPS: step_lines(table, names),
        TARGETS: targets(table, names, served),
        SPLIT: split,
        SERVED: [line for rows in served for line in served_lines(rows)],
    }
    problems = files.bring_up_to_date(pictures, options.plots, SPLIT, COMMAND, options.check)
    for name, lines in texts.items():
        body = "\n".join(lines) or f"Nothing was measured yet: `{SCRIPTS[name]}` does it.\n"
        if wrong := update(options.docs / "decoder.md", name, body, COMMAND, options.check):
            problems.append(wrong)
    if wrong := update(options.readme, HEADLINE, headline(table, names), COMMAND, options.check):
        problems.append(wrong)
    return problems


MAKER = Maker(write, COLUMNS)
