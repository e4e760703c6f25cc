"""Plots of the results, from parquet: `python analysis/make_plots.py`.

Draws, of each op on each device, up to four plots into docs/plots/<device>/, each as SVG and PNG, and rewrites what is
between `<!-- plots:begin -->` and `<!-- plots:end -->` in the README. What the rows do not suffice for is left out, with
a sentence. The same rows give the same bytes with the same Matplotlib, which `--check` relies on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from analysis import files, plots
from analysis.command import Options, parser, run
from analysis.peaks import under_one_peak
from analysis.readme import README, plain, update
from analysis.roofline import roofline
from analysis.rows import kernel_order, metric_of, on_one_clock, sections, with_problem
from minfer.rows import store

COMMAND = "python analysis/make_plots.py"
MARKED = "plots"
PLOTS = {
    "ladder": plots.ladder,
    "roofline": roofline,
    "throughput": plots.throughput,
    "cold-steady": plots.cold_steady,
}
AS_MEASURED = ("cold-steady",)  # what a kernel loses is of one moment; the others compare kernels, on one clock
SHOWN = ("ladder", "roofline")  # in the README itself; it links to the others
LINKS = {"throughput": "throughput over size", "cold-steady": "cold against steady"}
COLUMNS = ["run", "finished", "case", "op", "kernel", "status", "shape", "device", "device_kind", "flops", "bytes"]
COLUMNS += ["peaks", "roof", "metric", "metrics", "sm_mhz", "throttle", "cold_us", "cold_p10_us", "cold_p90_us"]
COLUMNS += ["cold_rate", "cold_tflops", "cold_percent_of_peak", "steady_rate", "steady_tflops"]
COLUMNS += ["baseline", "cold_baseline_us", "cold_speedup"]


def pictures(table: pa.Table) -> Iterator[tuple[str, str, str, plots.Picture | str]]:
    """Op, device, name and picture of every plot, or a sentence on why there is none, from usable rows."""
    measured = with_problem(table)
    compared = on_one_clock(measured)
    for op, device in sections(measured):
        one_clock, own_clock = rows_of(compared, op, device), rows_of(measured, op, device)
        for name, draw in PLOTS.items():
            try:
                yield op, device, name, draw(op, device, own_clock if name in AS_MEASURED else one_clock)
            except plots.LeftOut as error:
                yield op, device, name, f"the {name} plot of {op} on {device} is left out: {error}"


def rows_of(table: pa.Table, op: str, device: str) -> list[store.Row]:
    """The measured rows of an op on a device that have its metric, in ladder order."""
    wanted = pc.and_(pc.equal(table["op"], op), pc.equal(table["device"], device))
    here = table.filter(pc.and_(wanted, pc.is_in(table["status"], pa.array(store.MEASURED))))
    rows = here.to_pylist(maps_as_pydicts="lossy")
    metric = metric_of(rows) if rows else None
    return under_one_peak(sorted((row for row in rows if row["metric"] == metric), key=kernel_order))


def path(op: str, device: str, name: str) -> Path:
    """Where a picture belongs, below the folder of the plots, without a suffix."""
    return Path(store.slug(device)) / f"{store.slug(op)}-{name}"


def markdown(drawn: Iterable[tuple[str, str, str, plots.Picture]], folder: str) -> str:
    """What goes between the markers: some plots of each op and device, and links to the others."""
    groups: dict[tuple[str, str], dict[str, plots.Picture]] = {}
    for op, device, name, picture in drawn:
        groups.setdefault((op, device), {})[name] = picture
    lines: list[str] = []
    for (op, device), found in groups.items():
        svgs = {name: f"{folder}/{path(op, device, name).as_posix()}.svg" for name in found}
        for name in SHOWN:
            if name in found:
                lines += [f"![{plain(found[name].about)}]({svgs[name]})", ""]
        links = [f"[{LINKS[name]}]({svgs[name]})" for name in LINKS if name in found]
        if links:
            lines += [f"More of {plain(op)} on {plain(device)}: {', '.join(links)}.", ""]
    return "\n".join(lines or ["No plots yet: they need results.", ""])


def main(arguments: Iterable[str] | None = None) -> int:
    """Returns the exit status: 0 when the plots are those of the results, and every file could be read."""
    made = parser(COMMAND, __doc__ or "", "--readme", README)
    made.add_argument("--plots", type=Path, help="folder (default: docs/plots beside the README)")
    return run(made, arguments, COLUMNS, write)


def write(table: pa.Table, options: Options) -> list[str]:
    folder, drawn = options.plots or options.readme.parent / "docs" / "plots", []
    for op, device, name, picture in pictures(table):
        if isinstance(picture, str):
            print(picture)
        else:
            drawn.append((op, device, name, picture))
    named = {folder / path(op, device, name): picture for op, device, name, picture in drawn}
    problems = files.bring_up_to_date(named, folder, f".+-({'|'.join(PLOTS)})", COMMAND, options.check)
    where = Path(os.path.relpath(folder, options.readme.parent)).as_posix()
    problem = update(options.readme, MARKED, markdown(drawn, where), COMMAND, options.check)
    return problems + ([problem] if problem else [])


if __name__ == "__main__":
    sys.exit(main())
