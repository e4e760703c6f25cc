"""A strip of points for each group: how ratios spread around 1."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from minfer.analysis.plots.every_op import Picture
from minfer.analysis.plots.style import LIGHT, SMALL, Theme, figure, printable, title
from minfer.analysis.tables.markdown import significant

STRIP = 0.42  # inches of a strip
JITTER = 0.28  # of a strip's height, to both sides
TICKS = (0.1, 0.2, 0.33, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)
TICKS_APART = 0.12  # of logarithms


def strips(name: str, groups: Mapping[str, Sequence[tuple[float, str]]], theme: Theme = LIGHT) -> Picture:
    """The ratios of each group, each with its verdict (faster, tie or slower), and a bar at their geometric mean."""
    colors = {"faster": theme.ours, "tie": theme.muted, "slower": theme.torch}
    drawn, (ax,) = figure([0.5 + STRIP * len(groups)])
    title(
        ax, name, "speed over the fastest other implementation, cold; a point per problem, a bar at the geometric mean"
    )
    rng = random.Random(0)  # the same picture each time
    for place, ratios in enumerate(groups.values()):
        for verdict, color in colors.items():
            x = [ratio for ratio, of in ratios if of == verdict]
            y = [place + rng.uniform(-JITTER, JITTER) for _ in x]
            ax.plot(x, y, "o", color=color, markersize=3.5, markeredgewidth=0, alpha=0.8)
        mean = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
        ax.plot([mean, mean], [place - 0.42, place + 0.42], color=theme.ink, linewidth=2)
        ax.annotate(
            f"{significant(mean, 3)}×, least {significant(min(ratio for ratio, _ in ratios), 3)}×, of {len(ratios)}",
            (1, place), (6, 0), ("axes fraction", "data"), "offset points", va="center", fontsize=SMALL, color=theme.ink,
        )  # fmt: skip
    ax.axvline(1, color=theme.muted, linestyle="--", linewidth=1, zorder=0.5)
    ax.set_xscale("log")
    ends = [ratio for ratios in groups.values() for ratio, _ in ratios] + [1.0]
    low, high = min(ends) / 1.05, max(ends) * 1.05
    ax.set_xlim(low, high)
    apart = TICKS_APART * math.log(high / low)
    ticks: list[float] = []
    for tick in sorted((t for t in TICKS if low <= t <= high), key=lambda t: abs(math.log(t))):
        if all(abs(math.log(tick / other)) > apart for other in ticks):
            ticks.append(tick)
    ax.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set_yticks(range(len(groups)), [printable(group) for group in groups])
    ax.set_ylim(len(groups) - 0.5, -0.5)
    ax.annotate(
        "slower (orange), a tie (grey), faster (blue)",
        (0, 0),
        (0, -34),
        "axes fraction",
        "offset points",
        fontsize=SMALL,
    )
    least = {group: min(ratio for ratio, _ in ratios) for group, ratios in groups.items()}
    about = "; ".join(
        f"{group} at {len(groups[group])} problems, least {significant(least[group], 3)} times" for group in groups
    )
    return Picture(drawn, f"{name}, speed over the best other: {about}.")
