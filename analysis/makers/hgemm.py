"""The measured gains of docs/hgemm.md, from parquet: `python analysis/make.py hgemm`.

Reads the parquet files of results/ that git tracks and rewrites what is between `<!-- ladder:begin -->` ...,
`<!-- devices:begin -->` ... and `<!-- skinny:begin -->` ... in docs/hgemm.md. The rungs are the CUDA files of
minfer/ops/hgemm; on the primary device one without rows is "not measured yet". The plot of several devices is shown where
`make.py plots` drew one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from minfer.analysis.data.prepare import WHICH, on_one_clock, primary, with_problem
from minfer.analysis.makers import Maker, Options
from minfer.analysis.plots import files
from minfer.analysis.tables.markdown import escape, significant, table_lines, update
from minfer.rows import store
from minfer.rows.problems import natural, number
from minfer.rows.store import Row

COMMAND = "python analysis/make.py hgemm"
COLUMNS = [*WHICH, "dtype", "params", "shape", "device", "device_kind"]
COLUMNS += ["baseline", "bytes", "cold_us", "cold_baseline_us", "cold_tflops", "cold_speedup", "metrics"]
OVER = {  # what a rung's gain is over, where that is not the rung before
    "v02b_padded": "v02a_column", "v02c_swizzled": "v02a_column", "v03_wmma": "v02_tiled",
    "v08_split_k": "v07_tuned", "v08_stream_k": "v07_tuned", "v09_a_stationary": "v07_tuned", "v10_wgmma": "v07_tuned",
    "v13_cooperative": "v11_specialised", "v14_small": "v12_pingpong", "v14_stream_k": "v13_cooperative",
}  # fmt: skip
SKINNY = re.compile("v1[5679]")
NARROW = re.compile(
    "v14_small|v1[567]"
)  # the rungs of the table of skinny shapes; v19 gains only behind other launches
ENTRY = "_constant"  # ends the name of a rung's second entry, which is no kernel of its own
SKINNY_M = 128  # the most rows of A that count as skinny
NONE = "not measured yet"

Setting = tuple[str, str, str, str]  # device, dtype, layout, accumulate


def rungs(folder: Path) -> list[str]:
    """The kernels that the CUDA files define, in ladder order."""
    found = {
        name for path in folder.glob("v*.cu") for name in re.findall(r"MINFER_HGEMM\(hgemm_(\w+)", path.read_text())
    }
    return sorted((name for name in found if not name.endswith(ENTRY)), key=natural)


def setting(row: Row) -> Setting:
    return row["device"], row["dtype"], row["params"].get("layout", ""), row["params"].get("accumulate", "")


def choose_fullest(rows: list[Row], accumulate: str, devices: list[str]) -> dict[str, list[Row]]:
    """Of each device in this order, the rows of the dtype and layout with most of them."""
    found: dict[str, list[Row]] = {}
    counts = Counter(setting(row) for row in rows if setting(row)[3] == accumulate)
    for chosen, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        found.setdefault(chosen[0], [row for row in rows if setting(row) == chosen])
    return {device: found[device] for device in devices if device in found}


def shown_rungs(names: list[str], rows: list[Row], first: bool) -> list[str]:
    """The rungs that a table has: on the primary device all, with those that were not measured; else those with rows."""
    measured = {row["kernel"] for row in rows}
    return [name for name in names if first or name in measured]


def title(rows: list[Row]) -> str:
    device, dtype, layout, accumulate = setting(rows[0])
    return f"**{escape(device)} · {dtype} · {layout} · sums in {accumulate}, cold**"


def square(row: Row) -> int | None:
    """The side of a square problem."""
    sizes = set(row["shape"].values())
    return sizes.pop() if len(sizes) == 1 else None


COUNTERS = (
    "Counted at",
    "Tensor pipe busy",
    "SM throughput",
    "SM clock",
    "DRAM bytes over the least",
    "Bank conflicts a load",
)


def counters(rows: Mapping[int, Row]) -> list[str]:
    """What ncu counted at the largest side where it did."""
    side = max(
        (side for side, row in rows.items() if (row["metrics"] or {}).get("ncu.tensor_percent") is not None),
        default=None,
    )
    if side is None:
        return ["—"] * len(COUNTERS)
    row = rows[side]
    metrics = row["metrics"]
    tensor, clock, moved = (metrics.get(f"ncu.{name}") for name in ("tensor_percent", "sm_mhz", "dram_bytes"))
    loads, found = metrics.get("ncu.shared_load_instructions"), metrics.get("ncu.shared_load_conflicts")
    pipes = metrics.get("ncu.sm_percent")
    return [
        str(side),
        f"{tensor:.1f} %" if tensor is not None else "—",
        f"{pipes:.1f} %" if pipes is not None else "—",
        f"{clock:.0f} MHz" if clock else "—",
        f"{moved / row['bytes']:.2f}×" if moved and number(row, "bytes") else "—",
        f"{found / loads:.2f}" if loads and found is not None else "—",
    ]


def ladder_lines(rows: list[Row], names: list[str]) -> list[str]:
    """A line a rung: its throughput at each side, its gain over the rung that it grew from at the smallest and the largest
    side that both have, and what ncu counted at its largest where it ran."""
    cells: dict[str, dict[int, Row]] = {}
    for row in rows:
        if side := square(row):
            cells.setdefault(row["kernel"], {})[side] = row
    sides = sorted({side for of in cells.values() for side in of})
    body, before = [], None
    for name in names:
        mine = cells.get(name, {})
        if not mine:
            body.append([escape(name), NONE, *[""] * (len(sides) + len(COUNTERS))])
            continue
        rates = [significant(mine[side]["cold_tflops"]) if side in mine else "—" for side in sides]
        base = OVER.get(name, before)
        theirs = cells.get(base or "", {})
        shared = sorted(mine.keys() & theirs.keys())
        gains = [
            f"{significant(theirs[side]['cold_us'] / mine[side]['cold_us'], 3)}× at {side}"
            for side in dict.fromkeys((*shared[:1], *shared[-1:]))
        ]
        gain = f"{escape(base)}: {', '.join(gains)}" if gains else "—"
        body.append([escape(name), *rates, gain, *counters(mine)])
        before = name
    header = ["Rung", *(f"{side} (TFLOP/s)" for side in sides), "Gain over", *COUNTERS]
    return table_lines(header, [":--", *["--:"] * len(sides), ":--", *["--:"] * len(COUNTERS)], body)


def ladder(rows: list[Row], names: list[str], devices: list[str]) -> str:
    """The tables of the square ladder: of each device, fp32 sums and fp16 sums."""
    lines: list[str] = []
    for accumulate, chosen in (
        ("float32", [name for name in names if not name.endswith("_acc16") and not SKINNY.match(name)]),
        ("float16", [name for name in names if name.endswith("_acc16")]),
    ):
        squares = [row for row in rows if square(row)]
        for device, found in choose_fullest(squares, accumulate, devices).items():
            shown = shown_rungs(chosen, found, device == devices[0])
            lines += [title(found), "", *ladder_lines(found, shown), ""]
    return "\n".join(lines) or "Nothing was measured yet: `uv run python -m minfer.launch +sweep=hgemm` does it.\n"


def skinny_lines(rows: list[Row], names: list[str]) -> list[str]:
    """A line a shape: the baseline's time, that of each skinny rung, and how far the fastest of ours is ahead; all times are
    on one clock, so that this ratio is that of the two times shown."""
    shapes: dict[tuple[int, int, int], dict[str, Row]] = {}
    for row in rows:
        shape = row["shape"]
        shapes.setdefault((shape["n"], shape["k"], shape["m"]), {})[row["kernel"]] = row
    measured_at_all = {row["kernel"] for row in rows}
    missing = {name: "—" if name in measured_at_all else NONE for name in names}  # a shape that it does not take
    body, gains = [], []
    for (n, k, m), found in sorted(shapes.items()):
        ours = {name: row for name, row in found.items() if row["backend"] != "torch" and number(row, "cold_speedup")}
        times = [f"{significant(found[name]['cold_us'])} µs" if name in found else missing[name] for name in names]
        best = max(ours.values(), key=lambda row: row["cold_speedup"], default=None)
        ahead = base = "—"
        if best:
            base = f"{significant(best['cold_us'] * best['cold_speedup'])} µs"
            gains.append(best["cold_speedup"])
            ahead = f"{significant(best['cold_speedup'], 3)}×, {escape(best['kernel'])}"
        body.append([f"{n} × {k}", str(m), base, *times, ahead])
    header = ["N × K", "M", "cuBLAS", *map(escape, names), "Fastest of ours over cuBLAS"]
    lines = table_lines(header, [":--", "--:", "--:", *["--:"] * len(names), ":--"], body)
    if gains:
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        lines += ["", f"Geometric mean over {len(gains)} shapes: {mean:.3f}×; the least is {min(gains):.3f}×."]
    return lines


def skinny(rows: list[Row], names: list[str], devices: list[str]) -> str:
    """The tables of up to 128 rows of A, of each device."""
    narrow = [row for row in rows if row["shape"]["m"] <= SKINNY_M < min(row["shape"]["n"], row["shape"]["k"])]
    chosen = [name for name in names if NARROW.match(name)]
    lines: list[str] = []
    for device, found in choose_fullest(narrow, "float32", devices).items():
        shown = shown_rungs(chosen, found, device == devices[0])
        lines += [title(found), "", *skinny_lines(found, shown), ""]
    return "\n".join(lines) or "Nothing was measured yet: `uv run python -m minfer.launch +sweep=hgemm shape=skinny`.\n"


def devices_plot(page: Path, first: str) -> str:
    """The plot of our fastest kernel on several devices; nothing where `make.py plots` drew none."""
    plot = Path("plots") / store.slug(first) / "hgemm-devices"
    drawn = (page.parent / plot).with_suffix(".svg").is_file()
    about = "Cold throughput of our fastest HGEMM kernel and of PyTorch over the size of square problems, by device."
    return f"{files.shown(plot.as_posix(), about)}\n" if drawn else ""


def select_rows(table: pa.Table) -> list[Row]:
    """The newest timed rows of hgemm on GPUs, maps as dictionaries."""
    table = on_one_clock(with_problem(table))
    wanted = pc.and_(pc.equal(table["op"], "hgemm"), pc.is_in(table["status"], pa.array(store.MEASURED)))
    rows = table.filter(wanted).to_pylist(maps_as_pydicts="lossy")
    return [
        row for row in rows if row["backend"] != "cpp" and number(row, "cold_us") and row["shape"] and row["params"]
    ]


def write(table: pa.Table, options: Options) -> list[str]:
    page = options.docs / "hgemm.md"
    rows, names, devices = select_rows(table), rungs(options.sources / "hgemm"), primary(table)
    bodies = {"ladder": ladder(rows, names, devices), "skinny": skinny(rows, names, devices)}
    if devices:
        bodies["devices"] = devices_plot(page, devices[0])
    said = [update(page, name, body, COMMAND, options.check) for name, body in bodies.items()]
    return list(dict.fromkeys(problem for problem in said if problem))


MAKER = Maker(write, COLUMNS)
