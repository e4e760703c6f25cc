"""The targets of a decoder in docs/decoder.md, beside what the rows of each device say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minfer.analysis.tables.markdown import escape, table_lines
from minfer.rows.store import Row

COMPILED = ("torch_compile", "torch_max_autotune")
REGIMES = ("steady", "cold")  # the first that a row has is shown


def figure(row: Row, name: str) -> float | None:
    """A figure of the first regime that the row has, such as `us`."""
    regime = next((each for each in REGIMES if row.get(f"{each}_us")), None)
    return row[f"{regime}_{name}"] if regime else None


def share(quant: str = "none", **sizes: int) -> Callable[[list[Row], list[Row]], float | None]:
    """Finds by how many per cent minfer reaches the row's peak, at the problem of these sizes."""

    def find(rows: list[Row], served: list[Row]) -> float | None:
        return next(
            (
                figure(row, "percent_of_peak")
                for row in rows
                if row["kernel"] == "minfer"
                and row["params"].get("quant", "none") == quant
                and all(row["shape"][axis] == size for axis, size in sizes.items())
            ),
            None,
        )

    return find


def least_gain(rows: list[Row], served: list[Row]) -> float | None:
    """How many times as fast minfer is as the faster of the compiled ones, at the problem where this is least. Only problems
    without int4 count. It is the ratio of two speed-ups over plain PyTorch, each from rounds that timed PyTorch, too."""
    gains: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["params"].get("quant", "none") == "none" and (gain := figure(row, "speedup")):
            gains.setdefault(row["problem"], {})[row["kernel"]] = gain
    found = [
        of["minfer"] / max(of[name] for name in COMPILED if name in of)
        for of in gains.values()
        if "minfer" in of and any(name in of for name in COMPILED)
    ]
    return min(found, default=None)


def served_share(rows: list[Row], served: list[Row]) -> float | None:
    """The time of a trace's steps alone, in per cent of the time in which the loop serves it."""
    for row in served:
        if row["policy"] == "continuous" and row["rate"] is None:
            return 100.0 * float(row["steps_s"]) / float(row["seconds"])
    return None


@dataclass(frozen=True)
class Target:
    """What is wanted: at least so much. `find` gets a device's rows of the 8B model, and its rows of served traces."""

    what: str
    least: float
    unit: str
    find: Callable[[list[Row], list[Row]], float | None]

    def cell(self, rows: list[Row], served: list[Row]) -> str:
        if (found := self.find(rows, served)) is None:
            return "not measured"
        digits = 1 if self.unit == " %" else 2
        return f"{found:.{digits}f}{self.unit}, {'met' if round(found, digits) >= self.least else 'missed'}"


TARGETS = (
    Target(
        "8B, bfloat16, decode, batch 1, context 1024: the floor as a share of the step's time",
        86, " %", share(new=1, batch=1, context=1024),
    ),
    Target("the same at batch 64", 85, " %", share(new=1, batch=64, context=1024)),
    Target("the same in int4 at batch 1", 55, " %", share("int4_g128", new=1, batch=1, context=1024)),
    Target(
        "8B, bfloat16, prefill of 8192 tokens: share of the measured peak", 70, " %", share(new=8192, batch=1),
    ),
    Target(
        "8B, bfloat16, each problem: times as fast as the faster of torch_compile and torch_max_autotune, where it is least",
        1.1, "", least_gain,
    ),
    Target(
        "a served trace (`continuous`, all requests wait at time 0): share of the tokens/s of its steps alone",
        85, " %", served_share,
    ),
)  # fmt: skip


def target_lines(rows: list[Row], served: list[list[Row]], devices: list[str]) -> list[str]:
    """A column for each device. `rows` are those of the 8B model, `served` the rows of each file of served traces."""
    if not devices:
        return []
    header = ["", "Target", *map(escape, devices)]
    of = {device: [row for row in rows if row["device"] == device] for device in devices}
    traces = {device: [row for each in served for row in each if row["device"] == device] for device in devices}
    body = [
        [each.what, f"{each.least:g}{each.unit}", *(each.cell(of[device], traces[device]) for device in devices)]
        for each in TARGETS
    ]
    return table_lines(header, [":--", "--:", *[":--"] * len(devices)], body)
