"""Print what a cache of latents saves: bytes and FLOPs of attention for each token, compared with MHA and GQA.

    uv run python tools/print_mla_savings.py

The first table is for one layer with DeepSeek-V3's 128 heads of 128, in a type of two bytes. The second is for the sizes that
`mla_decode` is judged at. Both are computed from sizes and from the H200's data sheet; nothing in them is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from minfer.ops import get
from minfer.ops.mla_decode.baselines import LATENT, ROPE, ROW

HEADS, DIM, WIDTH, CONTEXT = 128, 128, 2, 4096  # DIM of keys that are not rotated, and of values; WIDTH in bytes
BYTES_S, FLOPS_S = 4.8e12, 989e12  # an H200's memory and its dense fp16 products, data sheet
JUDGED = ((1, 8192, 128), (64, 4096, 128), (64, 4096, 64), (16, 16384, 128))  # batch, keys, heads


@dataclass(frozen=True)
class Scheme:
    """A scheme's costs for each cached token, its bytes in the cache and the FLOPs of all heads of one new token; and `once`,
    the FLOPs of a new token that do not depend on the length of the cache."""

    name: str
    bytes: float
    flops: float
    once: float = 0.0

    @property
    def floor_ns(self) -> float:
        """The least time for each cached token: the longer of its bytes and its FLOPs at the H200's peaks."""
        return max(self.bytes / BYTES_S, self.flops / FLOPS_S) * 1e9


def schemes() -> list[Scheme]:
    plain = 4.0 * HEADS * DIM  # a multiply-add with the key and one with the value
    found = [
        Scheme(name, 2.0 * kv_heads * DIM * WIDTH, plain)
        for name, kv_heads in (("MHA", HEADS), ("GQA, 8 heads of keys", 8), ("MQA", 1))
    ]
    up = 2.0 * HEADS * LATENT * 2 * DIM  # keys and values of all heads from a latent
    unpacked = Scheme("MLA, keys and values made anew", ROW * WIDTH, 2.0 * HEADS * (DIM + ROPE + DIM) + up)
    return [*found, unpacked, Scheme("MLA, absorbed", ROW * WIDTH, 2.0 * HEADS * (ROW + LATENT), up)]


def savings() -> str:
    """The first table, in Markdown."""
    lines = [
        "| 128 heads of 128, 2 bytes an element | bytes cached a token | FLOPs for each cached token | FLOPs a byte "
        f"| read for a new token after {CONTEXT} | FLOPs for it | least time for it |",
        "| :-- | --: | --: | --: | --: | --: | --: |",
    ]
    for scheme in schemes():
        flops = scheme.flops * CONTEXT + scheme.once
        lines.append(
            f"| {scheme.name} | {scheme.bytes:,.0f} | {scheme.flops:,.0f} | {scheme.flops / scheme.bytes:,.1f} "
            f"| {scheme.bytes * CONTEXT / 1e6:,.1f} MB | {flops / 1e9:,.2f} GFLOP "
            f"| {scheme.floor_ns * CONTEXT / 1e3:,.2f} µs |"
        )
    return "\n".join(lines)


def roofs() -> str:
    """The second table, in Markdown, from the op's own count of FLOPs and bytes."""
    op = get("mla_decode")
    lines = ["| sequences × keys, heads | FLOPs | bytes | FLOPs a byte | at 4.8 TB/s | at 989 TFLOP/s |"]
    lines.append("| :-- | --: | --: | --: | --: | --: |")
    for batch, keys, heads in JUDGED:
        shape = {"batch": batch, "new": 1, "longest": keys, "heads": heads}
        case = op.case("torch_eager", "bfloat16", shape, {"page": "64"})
        flops, moved = op.flops(case), op.bytes(case)
        lines.append(
            f"| {batch} × {keys}, {heads} | {flops / 1e9:,.1f} G | {moved / 1e6:,.1f} MB | {flops / moved:,.0f} "
            f"| {moved / BYTES_S * 1e6:,.1f} µs | {flops / FLOPS_S * 1e6:,.1f} µs |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"{savings()}\n\n{roofs()}")
