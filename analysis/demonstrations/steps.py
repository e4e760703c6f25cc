"""The picture of `benchmarks/decoder_split.py`: where the time of a decoder's step goes, operation by operation."""

from __future__ import annotations

from minfer.analysis.plots.every_op import Picture
from minfer.analysis.plots.style import LIGHT, SMALL, Theme, figure, printable, title
from minfer.analysis.tables.markdown import significant
from minfer.rows.store import Row

BAR = 0.24  # inches


def by_step(rows: list[Row]) -> list[list[Row]]:
    """The rows of each step: those of its operations, and last that of the whole step."""
    found: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row["model"], row["batch"], row["context"]), []).append(row)
    return list(found.values())


def split(rows: list[Row], device: str, theme: Theme = LIGHT) -> Picture:
    """A panel for each step, with a bar for each operation: its microseconds; the part up to the floor is dark."""
    steps = by_step(rows)
    drawn, axes = figure([0.3 + BAR * (len(each) - 1) for each in steps], gap=1.3, right=0.9)
    said = []
    for ax, each in zip(axes, steps, strict=True):
        *parts, whole = each
        about = f"{whole['model']}, batch {whole['batch']}, context {whole['context']}"
        floor = f"{significant(whole['us'], 4)} µs, of which reading memory sets {significant(whole['floor_us'], 4)}"
        title(ax, f"A step of {about}, on {device}", f"{floor}; dark: the floor of the operation")
        for place, row in enumerate(parts):
            us = max(row["us"], 0.0)
            ax.barh(place, us, 0.7, color=theme.pale)
            ax.barh(place, min(row["floor_us"], us), 0.7, color=theme.ours)
            text = f"{significant(row['us'], 3)} µs, {row['us'] / whole['us']:.1%}"
            ax.annotate(text, (us, place), (4, 0), "data", "offset points", va="center", fontsize=SMALL)
        ax.set_yticks(range(len(parts)), [printable(row["operation"]) for row in parts], fontsize=SMALL)
        ax.set_ylim(len(parts) - 0.4, -0.6)
        ax.set_xlim(0, 1.2 * max(row["us"] for row in parts))
        ax.grid(axis="y", visible=False)
        largest = ", ".join(f"{row['operation']} {row['us'] / whole['us']:.0%}" for row in parts[:3])
        said.append(f"{about}: {largest}")
    axes[-1].set_xlabel("microseconds of a step")
    return Picture(drawn, printable(f"Where the time of a decoder's step goes on {device}: {'; '.join(said)}."))
