"""The measured line in the header of each kernel's file, from parquet: `python analysis/make.py headers`.

The header is the comment that a file begins with; behind it (in Python behind the docstring, which is part of what a row's
`source` hashes, as comments are not) comes one line `Measured (device, problem): …`, cold and steady. The problem is the op's
representative one where the kernel has it, else the kernel's largest. A kernel without rows has no such line.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from minfer.analysis.data.prepare import REFERENCE, WHICH, choose_problems, lead, on_one_clock, with_problem
from minfer.analysis.makers import Maker, Options
from minfer.analysis.plots.series import setting, shape_words
from minfer.analysis.tables.markdown import format_scaled
from minfer.analysis.tables.problem import percent
from minfer.rows import store
from minfer.rows.problems import number
from minfer.rows.rules import REGIMES
from minfer.rows.store import Row

COMMAND = "python analysis/make.py headers"
SUFFIXES = {".cu": "// ", ".cpp": "// ", ".py": "# "}  # with what begins a comment
COLUMNS = [*WHICH, "dtype", "params", "shape", "device", "device_kind"]
COLUMNS += ["metric", "flops", "bytes", "baseline"]
COLUMNS += [f"{regime}_{name}" for regime in REGIMES for name in ("us", "rate", "tflops", "baseline_us", "speedup")]
COLUMNS += [f"{regime}_{name}" for regime in REGIMES for name in ("speedup_low", "speedup_high", "verdict")]
WIDTH = 128
SEE = re.compile(r" *Measured: see(?: |\n// )\S+\.md\.")


def choose_rows(table: pa.Table) -> dict[tuple[str, str], Row]:
    """The row of each op and kernel that the kernel's header quotes, from the device with most cases of the op."""
    table = on_one_clock(with_problem(table))
    table = table.filter(pc.is_in(table["status"], pa.array(store.MEASURED)))
    found: dict[tuple[str, str], Row] = {}
    for op in sorted(set(table["op"].to_pylist())):
        for kind in ("cuda", "cpu"):
            here = table.filter(pc.and_(pc.equal(table["op"], op), pc.equal(table["device_kind"], kind)))
            if (first := lead(here)) is None:
                continue
            here = here.filter(pc.equal(here["device"], first[1]))
            _, problem = choose_problems(here)
            rows = [row for row in here.to_pylist(maps_as_pydicts="lossy") if number(row, "cold_rate")]
            group = (problem or "").rpartition("/")[0]  # dtype and parameters
            for row in sorted(rows, key=lambda row: rank(row, problem, group)):
                if row["kernel"] != REFERENCE:
                    found.setdefault((op, row["kernel"]), row)
    return found


def rank(row: Row, problem: str | None, group: str) -> tuple[object, ...]:
    """What stands for a kernel: the representative problem, else the largest of its dtype and parameters, else the largest. The
    work of a kernel that is measured in TFLOP/s is in FLOPs, that of others in bytes."""
    size = number(row, "flops" if row["metric"] == "TFLOP/s" else "bytes") or 0
    return row["problem"] != problem, setting(row) != group, -size, row["case"]


def line(row: Row, stem: str) -> str:
    """What was measured: `Measured (H200, bfloat16, m=n=k=8192): 6.3 TFLOP/s cold, …; 0.8 % and … of torch.`"""
    found = [(regime, rate) for regime in REGIMES if (rate := number(row, f"{regime}_rate"))]
    shares = [re.sub(r" (tie|\(.*?\))", "", percent(row, regime, None)) for regime, _ in found]
    rates = ", ".join(f"{format_scaled(rate)} {regime}" for regime, rate in found).replace(" ", f" {row['metric']} ", 1)
    of = f"; {' and '.join(shares)} of {REFERENCE}" if "—" not in shares else ""
    where = [row["device"].removeprefix("NVIDIA "), row["dtype"], *dict(row["params"] or {}).values(), shape_words(row)]
    where += [row["kernel"]] if row["kernel"] != stem else []
    return f"Measured ({', '.join(where)}): {rates}{of}."


def with_line(text: str, suffix: str, said: str | None) -> str:
    """A source with that line behind its header instead of the one it has."""
    comment = SUFFIXES[suffix]
    text = re.sub(rf"^{comment}Measured \(.*\n(?:{comment}  .*\n)*", "", text, flags=re.MULTILINE)
    python = suffix == ".py"
    header = re.match(r'""".*?"""\n' if python else r"(?://.*\n)+", text, re.DOTALL if python else 0)
    if header is None:
        return text
    before, _, why = header[0].partition("// Why: ")  # the sentence that explains the figures stays behind them
    if not python and SEE.search(before):
        before = re.sub(r"^//\s*\n", "", SEE.sub("", before), flags=re.MULTILINE)
    lines = textwrap.wrap(said or "", WIDTH - len(comment), subsequent_indent="  ")
    shown = "".join(f"{comment}{line}\n" for line in lines)
    return before + shown + (f"// Why: {why}" if why else "") + text[header.end() :]


def row_of_file(path: Path, rows: dict[tuple[str, str], Row]) -> Row | None:
    """The row of the kernel that a file is named after; of a file with kernels of other names, which begin as it does, the
    fastest's."""
    op = path.parent.name
    found = [row for (of, kernel), row in rows.items() if of == op and kernel.startswith(f"{path.stem}_")]
    return rows.get((op, path.stem)) or max(found, key=lambda row: float(row["cold_rate"]), default=None)


def updated_sources(folder: Path, rows: dict[tuple[str, str], Row]) -> Iterator[tuple[Path, str]]:
    """Each kernel's file with the text that it should have."""
    for path in sorted(path for path in folder.glob("*/*") if path.suffix in SUFFIXES):
        row = row_of_file(path, rows)
        if path.suffix != ".py" or row or "\n# Measured (" in path.read_text():
            yield path, with_line(path.read_text(), path.suffix, line(row, path.stem) if row else None)


def write(table: pa.Table, options: Options) -> list[str]:
    wrong = []
    for path, text in updated_sources(options.sources, choose_rows(table)):
        if path.read_text() != text:
            if options.check:
                wrong.append(f"{path} is out of date: run `{COMMAND}`")
            else:
                path.write_text(text)
    return wrong


MAKER = Maker(write, COLUMNS)
