"""The measured gains of docs/hgemm.md, from parquet: `python analysis/make_hgemm.py`.

Reads results/**/*.parquet and rewrites what is between `<!-- ladder:begin -->` ... and `<!-- skinny:begin -->` ... in
docs/hgemm.md. The rungs are the CUDA files of minfer/ops/hgemm; one without rows is "not measured yet".
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the project is run from its folder, not installed

from analysis.command import Options, parser, run
from analysis.readme import plain, significant, table_lines, update
from analysis.rows import natural, newest, number
from minfer import store
from minfer.store import Row

COMMAND = "python analysis/make_hgemm.py"
SOURCES = Path("minfer/ops/hgemm")
PAGE = Path("docs/hgemm.md")
COLUMNS = ["run", "finished", "case", "op", "kernel", "backend", "status", "dtype", "params", "shape", "device"]
COLUMNS += ["baseline", "cold_us", "cold_baseline_us", "cold_tflops", "cold_speedup", "metrics"]
SKINNY_M = 128  # the most rows of A that count as skinny
NONE = "not measured yet"

Setting = tuple[str, str, str, str]  # device, dtype, layout, accumulate


def rungs(folder: Path) -> list[str]:
    """The kernels that the CUDA files define, in ladder order."""
    found = {
        name for path in folder.glob("v*.cu") for name in re.findall(r"MINFER_HGEMM\(hgemm_(\w+)", path.read_text())
    }
    return sorted(found, key=natural)


def setting(row: Row) -> Setting:
    return row["device"], row["dtype"], row["params"].get("layout", ""), row["params"].get("accumulate", "")


def fullest(rows: list[Row], accumulate: str) -> dict[str, list[Row]]:
    """Of each device, the rows of the dtype and layout with most of them."""
    found: dict[str, list[Row]] = {}
    counts = Counter(setting(row) for row in rows if setting(row)[3] == accumulate)
    for chosen, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        found.setdefault(chosen[0], [row for row in rows if setting(row) == chosen])
    return found


def title(rows: list[Row]) -> str:
    device, dtype, layout, accumulate = setting(rows[0])
    return f"**{plain(device)} · {dtype} · {layout} · sums in {accumulate}, cold**"


def square(row: Row) -> int | None:
    """The side of a square problem."""
    sizes = set(row["shape"].values())
    return sizes.pop() if len(sizes) == 1 else None


def conflicts(row: Row | None) -> str:
    """Bank conflicts a load from shared memory, where ncu counted them."""
    metrics = (row or {}).get("metrics") or {}
    loads, found = metrics.get("ncu.shared_load_instructions"), metrics.get("ncu.shared_load_conflicts")
    return f"{found / loads:.2f}" if loads and found is not None else "—"


def ladder_lines(rows: list[Row], names: list[str]) -> list[str]:
    """A line a rung: its throughput at each side, and its time's gain over the rung before, at the largest that both
    have."""
    cells: dict[str, dict[int, Row]] = {}
    for row in rows:
        if side := square(row):
            cells.setdefault(row["kernel"], {})[side] = row
    sides = sorted({side for of in cells.values() for side in of})
    body, before = [], None
    for name in names:
        mine = cells.get(name, {})
        if not mine:
            body.append([plain(name), NONE, *[""] * (len(sides) + 1)])
            continue
        rates = [significant(mine[side]["cold_tflops"]) if side in mine else "—" for side in sides]
        shared: list[int] = sorted(mine.keys() & cells[before].keys()) if before else []
        gain = "—"
        if shared:
            theirs, ours = cells[before or ""][shared[-1]], mine[shared[-1]]
            gain = f"{significant(theirs['cold_us'] / ours['cold_us'], 3)}× {plain(before)}, at {shared[-1]}"
        body.append([plain(name), *rates, gain, conflicts(mine[max(mine)])])
        before = name
    header = ["Rung", *(f"{side} (TFLOP/s)" for side in sides), "Gain over", "Bank conflicts a load"]
    return table_lines(header, [":--", *["--:"] * len(sides), ":--", "--:"], body)


def ladder(rows: list[Row], names: list[str]) -> str:
    """The tables of the square ladder: of each device, fp32 sums and fp16 sums."""
    lines: list[str] = []
    for accumulate, chosen in (
        ("float32", [name for name in names if not name.endswith("_acc16") and not re.match("v1[56]", name)]),
        ("float16", [name for name in names if name.endswith("_acc16")]),
    ):
        squares = [row for row in rows if square(row)]
        for of_device in fullest(squares, accumulate).values():
            lines += [title(of_device), "", *ladder_lines(of_device, chosen), ""]
    return "\n".join(lines) or "Nothing was measured yet: `uv run python -m minfer.launch +sweep=hgemm` does it.\n"


def skinny_lines(rows: list[Row], names: list[str]) -> list[str]:
    """A line a shape: the baseline's time, that of each skinny rung, and how far the fastest of ours is ahead."""
    shapes: dict[tuple[int, int, int], dict[str, Row]] = {}
    for row in rows:
        shape = row["shape"]
        shapes.setdefault((shape["n"], shape["k"], shape["m"]), {})[row["kernel"]] = row
    body, gains = [], []
    for (n, k, m), found in sorted(shapes.items()):
        ours = {name: row for name, row in found.items() if row["backend"] != "torch" and number(row, "cold_speedup")}
        baseline = next((number(row, "cold_baseline_us") for row in ours.values()), None)
        times = [f"{significant(found[name]['cold_us'])} µs" if name in found else NONE for name in names]
        best = max(ours.values(), key=lambda row: row["cold_speedup"], default=None)
        ahead = "—"
        if best:
            gains.append(best["cold_speedup"])
            ahead = f"{significant(best['cold_speedup'], 3)}×, {plain(best['kernel'])}"
        base = f"{significant(baseline)} µs" if baseline else "—"
        body.append([f"{n} × {k}", str(m), base, *times, ahead])
    header = ["N × K", "M", "cuBLAS", *map(plain, names), "Fastest of ours over cuBLAS"]
    lines = table_lines(header, [":--", "--:", "--:", *["--:"] * len(names), ":--"], body)
    if gains:
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        lines += ["", f"Geometric mean over {len(gains)} shapes: {mean:.3f}×; the least is {min(gains):.3f}×."]
    return lines


def skinny(rows: list[Row], names: list[str]) -> str:
    """The tables of up to 128 rows of A, of each device."""
    narrow = [row for row in rows if row["shape"]["m"] <= SKINNY_M < min(row["shape"]["n"], row["shape"]["k"])]
    chosen = [name for name in names if re.match("v1[56]", name)]
    lines: list[str] = []
    for of_device in fullest(narrow, "float32").values():
        lines += [title(of_device), "", *skinny_lines(of_device, chosen), ""]
    return "\n".join(lines) or "Nothing was measured yet: `uv run python -m minfer.launch +sweep=hgemm shape=skinny`.\n"


def measured(table: pa.Table) -> list[Row]:
    """The newest timed rows of hgemm on GPUs, maps as dictionaries."""
    table = newest(table)
    wanted = pc.and_(pc.equal(table["op"], "hgemm"), pc.is_in(table["status"], pa.array(store.MEASURED)))
    rows = table.filter(wanted).to_pylist(maps_as_pydicts="lossy")
    return [
        row for row in rows if row["backend"] != "cpp" and number(row, "cold_us") and row["shape"] and row["params"]
    ]


def main(arguments: Iterable[str] | None = None) -> int:
    """Returns the exit status: 0 when the page is that of the results, and every file could be read."""
    return run(parser(COMMAND, __doc__ or "", "--page", PAGE), arguments, COLUMNS, write, all_or_nothing=True)


def write(table: pa.Table, options: Options) -> list[str]:
    rows, names = measured(table), rungs(SOURCES)
    bodies = {"ladder": ladder(rows, names), "skinny": skinny(rows, names)}
    said = [update(options.page, name, body, COMMAND, options.check) for name, body in bodies.items()]
    return list(dict.fromkeys(problem for problem in said if problem))


if __name__ == "__main__":
    sys.exit(main())
