"""Plots and text from what scripts record beside the rows: `python analysis/make.py demonstrations`.

Reads the traces of `benchmarks/scopes.py` below results/<device>/scopes, and what other scripts (`PAGES`) wrote to
benchmarks/results/; draws docs/plots/<device>/gemm-bias-relu-scopes, transfer and so on, and rewrites what is between markers
in their pages. Where nothing was recorded, the text says so.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from minfer.analysis.demonstrations import adapting, batches, fused, generated, loops, timelines
from minfer.analysis.demonstrations import traces as draw
from minfer.analysis.demonstrations.traces import Inside
from minfer.analysis.makers import Maker, Options
from minfer.analysis.plots import files
from minfer.analysis.plots.every_op import Picture
from minfer.analysis.tables.markdown import escape, pluralise, update
from minfer.rows import store
from minfer.rows.store import Row

COMMAND = "python analysis/make.py demonstrations"
# What is drawn and told: the page, and the script that records it.
SCOPES, TRANSFER, MEMORY = "gemm-bias-relu-scopes", "transfer", "rope-memory"
BATCHING, SPECIALISE, FUSION, LOOPS, GENERATE = "batching", "specialise", "fusion", "llvm-fusion", "generate"
PINGPONG, SPLIT, STREAM_K = "pingpong-timeline", "split-timeline", "stream-k-timeline"
TIMELINES = {PINGPONG: "v05_pingpong", SPLIT: "v03_packed", STREAM_K: "v14_stream_k"}
PAGES = {
    SCOPES: ("gemm_bias_relu.md", "benchmarks/scopes.py"),
    TRANSFER: ("transfer.md", "benchmarks/transfer.py"),
    MEMORY: ("rope.md", "benchmarks/rope_memory.py"),
    BATCHING: ("batching.md", "benchmarks/batching.py"),
    SPECIALISE: ("specialise.md", "benchmarks/specialise.py"),
    FUSION: ("fusion.md", "benchmarks/fusion.py --write"),
    LOOPS: ("llvm_fusion.md", "examples/llvm_fusion.py --write ."),
    GENERATE: ("board.md", "examples/generate_kernels.py softmax silu_mul --compare --write ."),
    PINGPONG: ("prefill_attention.md", "benchmarks/timelines.py"),
    SPLIT: ("decode_attention.md", "benchmarks/timelines.py"),
    STREAM_K: ("hgemm.md", "benchmarks/timelines.py"),
}
PARQUET = {
    "transfer": ("mode", "tokens", "layers", "bytes", "ms", "host_ms", "device"),
    "rope-memory": ("name", "us", "part", "bytes", "allocated", "shape", "tensor_bytes", "device"),
    "batching": (
        "kernel", "trace", "arrivals", "policy", "told", "requests", "padded_share", "tokens_per_s", "busy_share",
        "p50_ms", "p90_ms", "p99_ms", "device",
    ),
    "specialise": ("kind", "what", "ns", "recipe", "length", "trace", "at", "tokens", "adaptive_s", "load", "device"),
    "fusion": ("shape", "batch", "seq", "past", "way", "fused", "launches", "calls", "bytes", "samples_us", "device"),
    "llvm-fusion": ("elements", "rounds", "two_us", "again_us", "fused_us", "speedup", "low", "high", "llvm", "device"),
    "timelines": ("op", "kernel", "shape", "block", "warp", "scope", "tile", "begin", "end", "device"),
    "generate": ("op", "way", "number", "constants", "verdict", "ratio", "low", "high", "submission", "device"),
}  # fmt: skip
ORIGIN = {"driver": "driver", "torch": "PyTorch", "triton": "Triton", "commit": "commit"}


def load_traces(results: Path) -> tuple[list[list[Inside]], list[str]]:
    """The traces of each device's folder, and a sentence for each file that is none."""
    found: dict[Path, list[Inside]] = {}
    problems = []
    for path in sorted(results.glob("*/scopes/*.trace.json.gz"), reverse=True):  # v03_one_wave first
        try:
            found.setdefault(path.parent, []).append(Inside.of(json.loads(gzip.decompress(path.read_bytes()))))
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{path}: no trace of benchmarks/scopes.py: {type(error).__name__}: {error}")
    return [found[folder] for folder in sorted(found)], problems


def load_rows(folder: Path, kind: str) -> tuple[list[list[Row]], list[str]]:
    """The rows of each file <kind>-<device>.parquet, and a sentence for each that cannot be used."""
    found, problems = [], []
    for path in sorted(folder.glob(f"{kind}-*.parquet")):
        try:
            table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            problems.append(f"{path}: {(str(error).splitlines() or [type(error).__name__])[0]}")
            continue
        if lacking := [name for name in PARQUET[kind] if name not in table.column_names]:
            problems.append(f"{path}: it has no column {', '.join(lacking)}")
        elif len(table):
            found.append(table.to_pylist())
    return found, problems


def origin(about: Row) -> str:
    """Where figures come from, as far as their file says."""
    known = [f"{noun} {escape(str(about[key]))}" for key, noun in ORIGIN.items() if about.get(key)]
    if about.get("threads"):
        busy = f"a load average of {about['load']:.1f} on {pluralise(about['cores'], 'core')}"
        known.append(f"{pluralise(about['threads'], 'thread')}, {busy}")
    return "; ".join([f"Measured on {escape(about['device'])}", *known]) + "."


def place(device: str, name: str) -> str:
    return f"{store.slug(device)}/{name}"


def write(_: pa.Table, options: Options) -> list[str]:
    """Write or only check the pictures and texts; what is wrong, in sentences."""
    traces, problems = load_traces(options.results)
    rows = {}
    for kind in PARQUET:
        rows[kind], unusable = load_rows(options.benchmarks, kind)
        problems += unusable
    if problems:
        return problems
    folder, drawn = options.plots, dict[Path, Picture]()
    to_plots = Path(os.path.relpath(folder, options.docs)).as_posix()
    texts: dict[str, list[str]] = {name: [] for name in PAGES}

    def add(name: str, about: Row, make: Callable[[str], Picture], lines: list[str]) -> None:
        where = place(about["device"], name)
        drawn[folder / where] = make(about["device"])
        shown = files.shown(f"{to_plots}/{where}", drawn[folder / where].about)
        texts[name] += [origin(about), "", shown, "", *lines, ""]

    for inside in traces:
        add(SCOPES, dict(inside[0].about), partial(draw.scopes, inside), draw.scope_lines(inside))
    for found in rows[TRANSFER]:
        add(TRANSFER, found[0], partial(draw.transfer, found), draw.transfer_lines(found))
    for found in rows[MEMORY]:
        add(MEMORY, found[0], partial(draw.memory, found), draw.memory_lines(found))
    for found in rows[BATCHING]:
        add(BATCHING, found[0], partial(batches.batches, found), batches.batch_lines(found))
    for found in rows[SPECIALISE]:
        add(SPECIALISE, found[0], partial(adapting.adapting, found), adapting.adapting_lines(found))
    for found in rows[FUSION]:
        add(FUSION, found[0], partial(fused.fused, found), fused.fused_lines(found))
    for found in rows[LOOPS]:
        add(LOOPS, found[0], partial(loops.loops, found), loops.loop_lines(found))
    for recorded, (name, kernel) in itertools.product(rows["timelines"], TIMELINES.items()):
        if found := [row for row in recorded if row["kernel"] == kernel]:
            add(name, found[0], partial(timelines.timeline, found), [])
    for found in rows[GENERATE]:
        add(GENERATE, found[0], partial(generated.generated, found), generated.generated_lines(found))

    pattern = files.pattern(PAGES).removeprefix(".+-")
    problems = files.bring_up_to_date(drawn, folder, pattern, COMMAND, options.check)
    for name, (page, script) in PAGES.items():
        body = "\n".join(texts[name]) or f"Nothing was recorded yet: `uv run python {script}` does it.\n"
        if problem := update(options.docs / page, name, body, COMMAND, options.check):
            problems.append(problem)
    return problems


MAKER = Maker(write)
