"""Pictures and tables of what scripts of `benchmarks/` record beside the rows: scopes within kernels, copies from host memory,
and what autograd keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from matplotlib.axes import Axes

from minfer.analysis.plots.every_op import Picture, plain_ticks, rungs
from minfer.analysis.plots.style import LIGHT, SMALL, Theme, figure, name_ends, printable, title
from minfer.analysis.tables.markdown import escape, pluralise, significant, table_lines
from minfer.rows.store import Row

Event = dict[str, Any]  # of a Chrome trace
WARP = 0.24  # inches of a warp's line
ORDER = ("issue", "load", "product", "epilogue")
WORDS = {
    "issue": "asks for copies",
    "load": "waits for copies",
    "product": "multiplies",
    "epilogue": "bias, ReLU, store",
}


@dataclass(frozen=True)
class Inside:
    """A trace of `benchmarks/scopes.py`: about the run, and its scopes by block and warp, in nanoseconds."""

    about: Mapping[str, Any]
    blocks: Mapping[str, Mapping[str, list[tuple[str, float, float]]]]

    @classmethod
    def of(cls, trace: Mapping[str, Any]) -> Inside:
        """Raises KeyError, TypeError or ValueError for another file."""
        blocks: dict[str, dict[str, list[tuple[str, float, float]]]] = {}
        for event in trace["traceEvents"]:
            scopes = blocks.setdefault(str(event["pid"]), {}).setdefault(str(event["tid"]), [])
            scopes.append((event["name"], 1e3 * event["ts"], 1e3 * (event["ts"] + event["dur"])))
        if not blocks or not trace["otherData"]["kernel"]:
            raise ValueError("no scopes of a kernel")
        return cls(trace["otherData"], blocks)

    def span(self, block: str) -> tuple[float, float]:
        scopes = [scope for warp in self.blocks[block].values() for scope in warp]
        return min(begin for _, begin, _ in scopes), max(end for _, _, end in scopes)

    @property
    def typical(self) -> str:
        """The block whose length is the median of all."""
        lengths = sorted((self.span(block)[1] - self.span(block)[0], block) for block in self.blocks)
        return lengths[len(lengths) // 2][1]

    def totals(self) -> dict[str, float]:
        """Nanoseconds of each scope in a warp that has it, the median over all such warps."""
        found: dict[str, list[float]] = {}
        for warps in self.blocks.values():
            for scopes in warps.values():
                for name in {name for name, _, _ in scopes}:
                    found.setdefault(name, []).append(sum(end - begin for n, begin, end in scopes if n == name))
        return {name: median(found[name]) for name in ORDER if name in found}


def scopes(traces: list[Inside], device: str, theme: Theme = LIGHT) -> Picture:
    """What each warp of one block does when, the traces below each other on the same scale."""
    heights = [0.2 + WARP * len(trace.blocks[trace.typical]) for trace in traces]
    drawn, axes = figure(heights, gap=1.0, right=0.86)
    colors = dict(zip(ORDER, (theme.muted, theme.others, theme.ours, theme.torch), strict=True))
    longest = max(end - begin for trace in traces for begin, end in [trace.span(trace.typical)])
    for ax, trace in zip(axes, traces, strict=True):
        warps = trace.blocks[trace.typical]
        zero = trace.span(trace.typical)[0]
        for line, warp in enumerate(sorted(warps)):
            for name, begin, end in warps[warp]:
                ax.barh(
                    line, end - begin, 0.72, left=begin - zero, color=colors[name], edgecolor=theme.paper, linewidth=0.4
                )
        rungs(ax, sorted(warps))
        ax.set_xlim(0, 1.02 * longest)
        sizes = ", ".join(f"{axis.upper()}={size}" for axis, size in trace.about["shape"].items())
        title(
            ax,
            f"{trace.about['kernel']} on {device}",
            f"{trace.about['op']} · {sizes} · one block of {len(trace.blocks)}",
        )
    axes[-1].set_xlabel("nanoseconds since the first stamp of the block")
    used = [name for name in ORDER if any(name in trace.totals() for trace in traces)]
    place = 0.0
    for name in used:
        about: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": SMALL}
        axes[-1].annotate("■", (0, 0), (place, -46), color=colors[name], **about)
        axes[-1].annotate(f"{name}: {WORDS[name]}", (0, 0), (place + 12, -46), **about)
        place += 128
    return Picture(
        drawn,
        f"What the warps of a block of {' and of '.join(t.about['kernel'] for t in traces)} do when, on {device}.",
    )


def scope_lines(traces: list[Inside]) -> list[str]:
    """A table: how long a block takes, and how long a warp is in each scope."""
    body = []
    for trace in traces:
        block = median(end - begin for begin, end in map(trace.span, trace.blocks))
        totals = trace.totals()
        cells = [f"{totals[name]:.0f}" if name in totals else "—" for name in ORDER]
        body.append([escape(trace.about["kernel"]), str(len(trace.blocks)), f"{block:.0f}", *cells])
    return table_lines(
        ["Kernel", "Blocks", "A block (ns)", *(f"{name} (ns)" for name in ORDER)], [":--"] + ["--:"] * 6, body
    )


# --- Copies from host memory ------------------------------------------------------------------------------------------

LINES = {  # the modes of benchmarks/transfer.py that are drawn
    "one stream, pageable": "one stream, pageable",
    "one stream, pinned": "one stream, pinned",
    "two streams, pinned": "two streams, pinned",
    "copies alone, pinned": "copies alone",
    "products alone": "products alone",
}


def layer_ms(row: Row) -> float:
    """Milliseconds of a layer, the median."""
    return float(median(row["ms"])) / row["layers"]


def transfer(rows: list[Row], device: str, theme: Theme = LIGHT) -> Picture:
    """Milliseconds of a layer over the tokens that its weight is multiplied by."""
    drawn, (ax,) = figure([3.4], right=0.76)
    title(ax, f"Weights from host memory to {device}", f"{rows[0]['bytes'] / 1e6:.0f} MB a layer · copy and product")
    hues = dict(zip(LINES, (theme.torch, theme.rungs[0], theme.ours, theme.muted, theme.rungs[1]), strict=True))
    lines = {mode: sorted((row["tokens"], layer_ms(row)) for row in rows if row["mode"] == mode) for mode in LINES}
    for mode, line in lines.items():
        ax.plot(
            *zip(*line, strict=True), "o--" if "alone" in mode else "o-", color=hues[mode], linewidth=2, markersize=4
        )
    ax.set_xscale("log", base=2)
    tokens = [at for at, _ in lines["products alone"]]
    ax.set_xticks(tokens, [str(at) if at < 1024 else f"{at // 1024}K" for at in tokens])
    ax.minorticks_off()
    ax.set_ylim(0, 1.08 * max(ms for line in lines.values() for _, ms in line))
    plain_ticks(ax.yaxis)
    ax.set_xlabel("tokens that a weight is multiplied by")
    ax.set_ylabel("milliseconds a layer")
    name_ends(
        ax, {LINES[mode]: line[-1] for mode, line in lines.items()}, {LINES[mode]: hue for mode, hue in hues.items()}
    )
    return Picture(drawn, f"Time of a layer whose weight comes from host memory, on {device}; {overlap(rows)}")


def overlap(rows: list[Row]) -> str:
    """What two streams come to at the tokens where copy and product alone are nearest to each other."""
    alone = {(row["mode"], row["tokens"]): layer_ms(row) for row in rows}
    pinned, products, both, one = "copies alone, pinned", "products alone", "two streams, pinned", "one stream, pinned"
    apart = {at: abs(alone[pinned, at] - ms) for (mode, at), ms in alone.items() if mode == products}
    at = min(apart, key=lambda tokens: apart[tokens])
    figures = [significant(alone[mode, at], 3) for mode in (pinned, products, one, both)]
    return (
        f"at {pluralise(at, 'token')} a copy alone takes {figures[0]} ms, a product alone {figures[1]} ms, one after the other "
        f"{figures[2]} ms, and in two streams {figures[3]} ms."
    )


def transfer_lines(rows: list[Row]) -> list[str]:
    """A table: milliseconds of a layer, for each mode and number of tokens; beside copies their rate, and the host's time."""
    tokens = sorted({row["tokens"] for row in rows})
    body = []
    for mode in dict.fromkeys(row["mode"] for row in rows):
        found = {row["tokens"]: row for row in rows if row["mode"] == mode}
        last = found[tokens[0]]
        rate = f"{last['bytes'] / layer_ms(last) * 1e-6:.1f}" if mode.startswith("copies") else "—"
        host = significant(float(median(last["host_ms"])) / last["layers"], 3)
        body.append([escape(mode), *(significant(layer_ms(found[at]), 3) for at in tokens), rate, host])
    header = [
        "A layer, ms",
        *(pluralise(at, "token") for at in tokens),
        "GB/s",
        f"until enqueued, {pluralise(tokens[0], 'token')}",
    ]
    return table_lines(header, [":--", *["--:"] * (len(tokens) + 2)], body)


# --- What autograd keeps ----------------------------------------------------------------------------------------------


def memory(rows: list[Row], device: str, theme: Theme = LIGHT) -> Picture:
    """Bytes allocated over time, forward and then backward, in tensors of the input's size."""
    drawn, axes = figure([1.7, 1.7], gap=1.1, right=0.96)
    for ax, (name, found), color in zip(axes, by_name(rows).items(), (theme.torch, theme.ours), strict=False):
        turn = next(row["us"] for row in found if row["part"] == "backward")
        x = [row["us"] for row in found]
        y = [row["allocated"] / row["tensor_bytes"] for row in found]
        ax.step([min(0.0, x[0]), *x, 1.05 * x[-1]], [0, *y, y[-1]], where="post", color=color, linewidth=2)
        ax.axvline(turn, color=theme.muted, linestyle=":", linewidth=1.2)
        ax.annotate("backward", (turn, 0), (4, 4), "data", "offset points", fontsize=SMALL, color=theme.muted)
        of_axes(ax, rows)
        title(ax, f"{name} on {device}", " × ".join(map(str, found[0]["shape"])) + " in fp32")
    axes[-1].set_xlabel("microseconds of the host since the start of forward")
    most = ", ".join(f"{name} {peak(found):.2g}" for name, found in by_name(rows).items())
    return Picture(drawn, printable(f"Memory of RoPE's forward and backward on {device}; at most, in tensors: {most}."))


def of_axes(ax: Axes, rows: list[Row]) -> None:
    ax.set_ylim(0, 1.15 * max(row["allocated"] / row["tensor_bytes"] for row in rows))
    ax.set_ylabel("tensors")
    plain_ticks(ax.xaxis)


def by_name(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["name"], []).append(row)
    return found


def peak(rows: list[Row]) -> float:
    """The most that is allocated at a time, in tensors of the input's size."""
    return max(row["allocated"] / row["tensor_bytes"] for row in rows)


def memory_lines(rows: list[Row]) -> list[str]:
    """A table: allocations, the most at a time, and what is there between forward and backward, the result included."""
    body = []
    for name, found in by_name(rows).items():
        forward = [row for row in found if row["part"] == "forward"]
        made, size = sum(row["bytes"] > 0 for row in found), found[0]["tensor_bytes"]
        kept = forward[-1]["allocated"] / size
        body.append(
            [
                escape(name),
                str(made),
                f"{peak(found) * size / 1e6:.1f} ({peak(found):.2f})",
                f"{kept * size / 1e6:.1f} ({kept:.2f})",
            ]
        )
    header = ["RoPE", "Allocations", "At most, MB (tensors)", "Between forward and backward, MB (tensors)"]
    return table_lines(header, [":--", "--:", "--:", "--:"], body)
