"""Do the figures of docs/hgemm.md agree: the gains with the throughputs, the ratios with the times, the prose with both?"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from minfer.analysis.checks.cells import agrees, find_tables, parse_amount, parse_seconds

GAIN = re.compile(r"(?P<gain>[0-9.]+)× at (?P<side>[0-9]+)")
MEAN = re.compile(r"Geometric mean over (?P<count>[0-9]+) shapes: (?P<mean>[0-9.]+)×; the least is (?P<least>[0-9.]+)×")
COUNTERS = {"Tensor pipe busy": r"busy ([0-9.]+) %|([0-9.]+) % busy", "SM throughput": r"([0-9.]+) % SM throughput"}
ABOUT = re.compile(
    r"^(?:\| |\*\*)(?P<rung>v[0-9]+[a-z]?_\w+)(?: \||\.\*\*)(?P<text>.*?)(?=^\| v[0-9]|\n\n|\Z)", re.M | re.S
)

Cells = dict[str, dict[str, str]]  # of a table, by the first cell of a line and the header


def check_hgemm(text: str) -> Iterator[str]:
    """A sentence for each figure that does not agree; nothing for other pages."""
    counted: Cells = {}
    for title, (header, *rows) in find_tables(text):
        if header[0] == "Rung" and "Gain over" in header:
            table = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
            counted = (
                counted or table
            )  # the first is that of the primary device with sums in fp32, which the prose is about
            yield from _check_gains(title, table)
        if header[-1] == "Fastest of ours over cuBLAS":
            yield from _check_skinny(title, header, rows)
    yield from _check_means(text)
    yield from _check_prose(text, counted)


def _check_gains(title: str, table: Cells) -> Iterator[str]:
    for rung, cells in table.items():
        before, _, gains = cells["Gain over"].partition(": ")
        for found in GAIN.finditer(gains):
            column = f"{found['side']} (TFLOP/s)"
            rates = [parse_amount(table.get(name, {}).get(column, "")) for name in (rung, before)]
            if not rates[0] or not rates[1] or not agrees(found["gain"], rates[0] / rates[1]):
                yield f"{title}: {rung} is said to gain {found[0]}, and the table has {rates[0]} over {rates[1]} TFLOP/s"


def _check_skinny(title: str, header: list[str], rows: list[list[str]]) -> Iterator[str]:
    for row in rows:
        ratio, _, kernel = row[-1].partition(", ")
        if not kernel:
            continue
        times = parse_seconds(row[header.index("cuBLAS")]), parse_seconds(row[header.index(kernel)])
        if not times[0] or not times[1] or not agrees(ratio, times[0] / times[1]):
            yield f"{title}: {row[0]}, M={row[1]}: the times of cuBLAS and {kernel} do not give {ratio}"


def _check_means(text: str) -> Iterator[str]:
    """The sentences below the tables of skinny shapes, each of which repeats what the table above it has."""
    said = MEAN.finditer(text)
    for title, (header, *rows) in find_tables(text):
        ratios = [ratio for row in rows if (ratio := parse_amount(row[-1]))]
        if header[-1] != "Fastest of ours over cuBLAS" or not ratios:
            continue
        if (found := next(said, None)) is None:
            yield f"{title}: no sentence has the geometric mean"
            continue
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        off = [abs(float(found["mean"]) - mean), abs(float(found["least"]) - min(ratios))]
        if int(found["count"]) != len(ratios) or max(off) > 0.0055:  # ratios are shown with two decimals
            yield f"{title}: {found[0]}, and the table gives {mean:.3f} and {min(ratios):g} over {len(ratios)}"


def _check_prose(text: str, counted: Cells) -> Iterator[str]:
    """What is said of a rung's counters where a paragraph or a line of a table begins with its name."""
    for about in ABOUT.finditer(text):
        cells = counted.get(about["rung"])
        if cells is None or about["text"].count("|") > 6:  # a line of the table itself
            continue
        for column, pattern in COUNTERS.items():
            for found in re.finditer(pattern, about["text"]):
                said = next(filter(None, found.groups()))
                shown = parse_amount(cells[column])
                decimals = len(said.partition(".")[2])
                if shown is None or abs(float(said) - shown) > 0.51 * 10.0**-decimals:
                    yield f"{about['rung']}: “{found[0]}”, and the table has {cells[column]} ({column})"
