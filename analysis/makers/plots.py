"""Plots of the results, from parquet: `python analysis/make.py plots`.

Draws up to three plots of each op on each device into docs/plots/<device>/, and one of forward and backward where it has both,
with its points as CSV; each as one SVG, light or dark as its reader's browser asks; and a page README.md that shows them all.
If an op was timed on several GPUs, the folder of the GPU with most cases has a plot of all these GPUs. In the README it
rewrites what is between `<!-- plots:begin -->` and `<!-- plots:end -->`: one ladder, and links to these pages. A plot for which
there are not enough rows is left out, with a sentence. The same rows give the same bytes with the same Matplotlib, which
`--check` relies on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from minfer.analysis.data.peaks import Peaks, best_peaks, under_one_peak
from minfer.analysis.data.prepare import (
    WHICH,
    kernel_order,
    lead,
    metric_of,
    on_one_clock,
    primary,
    sections,
    with_problem,
)
from minfer.analysis.makers import Maker, Options
from minfer.analysis.plots import every_op as plots
from minfer.analysis.plots import files
from minfer.analysis.plots.devices import devices
from minfer.analysis.plots.directions import directions, has_backward
from minfer.analysis.plots.files import shown
from minfer.analysis.plots.roofline import roofline
from minfer.analysis.tables import pages
from minfer.analysis.tables.markdown import escape, update
from minfer.rows import store
from minfer.rows.rules import REGIMES

COMMAND = "python analysis/make.py plots"
MARKED = "plots"
Draw = Callable[[str, str, list[store.Row]], plots.Picture]
DEVICES = "devices"  # the plot that has several
PLOTS: dict[str, Draw] = {"ladder": plots.ladder, "throughput": plots.throughput, "roofline": roofline}
OF_BACKWARD: dict[str, Draw] = {"directions": directions}  # of ops that have one
COLUMNS = [*WHICH, "shape", "device", "device_kind", "flops", "bytes"]
COLUMNS += ["peaks", "roof", "operands", "metric", "baseline", "cold_percent_of_peak"]
COLUMNS += [f"{regime}_{name}" for regime in REGIMES for name in ("us", "rate", "tflops", "baseline_us")]
COLUMNS += [f"{regime}_speedup{end}" for regime in REGIMES for end in ("", "_low", "_high")]

Drawn = dict[tuple[str, str], dict[str, plots.Picture]]  # by op and device, the pictures by name


def pictures(table: pa.Table) -> Iterator[tuple[str, str, str, plots.Picture | str]]:
    """Op, device, name and picture of every plot, from usable rows; in place of a picture a sentence on why there is none."""
    table = on_one_clock(with_problem(table))
    best = peaks_of(table)
    for op, device in sections(table):
        rows = rows_of(table, op, device, best[device])
        for name, draw in (PLOTS | OF_BACKWARD if has_backward(rows) else PLOTS).items():
            yield op, device, name, drawn_or_why(partial(draw, op, device, rows), op, device, name)
    gpus = table.filter(pc.equal(table["device_kind"], "cuda"))
    for op in sorted(pc.unique(gpus["op"]).to_pylist()):
        everywhere = {device: rows_of(table, op, device, best[device]) for device in primary(gpus)}
        of = {device: rows for device, rows in everywhere.items() if rows}
        if len(of) > 1:
            first = next(iter(of))
            yield op, first, DEVICES, drawn_or_why(partial(devices, op, of), op, first, DEVICES)


def drawn_or_why(draw: Callable[[], plots.Picture], op: str, device: str, name: str) -> plots.Picture | str:
    try:
        return draw()
    except plots.LeftOut as error:
        return f"the {name} plot of {op} on {device} is left out: {error}"


def peaks_of(table: pa.Table) -> dict[str, Peaks]:
    """The best peaks of each device, of the measured rows of all ops."""
    found: dict[str, list[store.Row]] = {device: [] for device in pc.unique(table["device"]).to_pylist()}
    measured = table.filter(pc.is_in(table["status"], pa.array(store.MEASURED)))
    for row in measured.select(["device", "peaks"]).to_pylist(maps_as_pydicts="lossy"):
        found[row["device"]].append(row)
    return {device: best_peaks(rows) for device, rows in found.items()}


def rows_of(table: pa.Table, op: str, device: str, best: Peaks) -> list[store.Row]:
    """The measured rows of an op on a device that have its metric, in ladder order, under the best peaks of the device."""
    wanted = pc.and_(pc.equal(table["op"], op), pc.equal(table["device"], device))
    here = table.filter(pc.and_(wanted, pc.is_in(table["status"], pa.array(store.MEASURED))))
    rows = here.to_pylist(maps_as_pydicts="lossy")
    metric = metric_of(rows) if rows else None
    return under_one_peak(sorted((row for row in rows if row["metric"] == metric), key=kernel_order), best)


def path(op: str, device: str, name: str) -> Path:
    """Where a picture belongs, below the folder of the plots, without a suffix."""
    return Path(store.slug(device)) / f"{store.slug(op)}-{name}"


def readme_lines(drawn: Drawn, first: tuple[str, str] | None, folder: str) -> list[str]:
    """What goes between the markers: one op's ladder, and a link to the page of each device, that of the ladder first."""
    lines = []
    if first in drawn and "ladder" in drawn[first]:
        lines += [shown(f"{folder}/{path(*first, 'ladder').as_posix()}", drawn[first]["ladder"].about), ""]
    names = sorted(dict.fromkeys(device for _, device in drawn), key=lambda device: first is None or device != first[1])
    if not names:
        return ["No plots yet: they need results.", ""]
    said = (
        f"Plots of every op: {', '.join(f'[{escape(name)}]({folder}/{store.slug(name)}/README.md)' for name in names)}."
    )
    both = [
        f"[{escape(op)}]({folder}/{path(op, at, DEVICES).as_posix()}.svg)"
        for op, at in drawn
        if DEVICES in drawn[op, at]
    ]
    return [*lines, said + (f" Several GPUs in one plot: {', '.join(both)}." if both else ""), ""]


def gallery_lines(device: str, drawn: Drawn) -> list[str]:
    """The page with all plots of a device."""
    lines = [f"# Plots of {escape(device)}", ""]
    for (op, where), found in drawn.items():
        if where == device:
            lines += [f"## {escape(op)}", "", f"[Tables](../../results/{store.slug(device)}/{store.slug(op)}.md)", ""]
            for name, picture in found.items():
                lines += [shown(path(op, device, name).name, picture.about), ""]
    return lines


def write(table: pa.Table, options: Options) -> list[str]:
    folder = options.plots
    named: dict[Path, plots.Picture] = {}
    drawn: Drawn = {}
    for op, device, name, picture in pictures(table):
        if isinstance(picture, str):
            print(picture)
        else:
            drawn.setdefault((op, device), {})[name] = picture
            named[folder / path(op, device, name)] = picture
    problems = files.bring_up_to_date(
        named, folder, files.pattern([*PLOTS, *OF_BACKWARD, DEVICES]), COMMAND, options.check
    )
    names = dict.fromkeys(device for _, device in drawn)
    galleries = {folder / store.slug(device) / "README.md": gallery_lines(device, drawn) for device in names}
    texts = {page: "\n".join(lines) for page, lines in galleries.items()}
    problems += pages.update_pages(texts, folder, COMMAND, options.check)
    where = Path(os.path.relpath(folder, options.readme.parent)).as_posix()
    body = "\n".join(readme_lines(drawn, lead(table), where))
    problem = update(options.readme, MARKED, body, COMMAND, options.check)
    return problems + ([problem] if problem else [])


MAKER = Maker(write, COLUMNS, all_or_nothing=False)
