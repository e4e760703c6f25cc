"""Print where TMA puts the 16-byte pieces of a box under each of its swizzles; on a Hopper GPU, from a box that it loaded.

    uv run python tools/print_swizzle.py

A line is 128 bytes of shared memory, all banks once; a number is the piece of the box that lies there. A box has 1024 bytes, in
rows as long as the swizzle's span. Without a Hopper GPU the maps are those of the formula, and the first line says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from minfer import build
from minfer.bench import device as devices
from minfer.ops import Kernel

SPANS = (0, 32, 64, 128)
BYTES, PIECE, LINE = 1024, 16, 128
KERNEL = Kernel("tools", "print_swizzle", "cuda", Path(__file__).with_suffix(".cu"), archs="sm_90a")


def piece_at(address: int, span: int) -> int:
    """Which 16-byte piece of a box, in its rows' order, lies at a byte address of shared memory under a swizzle of `span`
    bytes (0 for none), in a box that starts at a multiple of 1024.

    The swizzle takes the number of the 128-byte line, address bits 7 to 9, and exchanges pieces within `span` bytes by an
    exclusive or: with as many of its low bits as number the pieces of a span (CUDA driver API, CUtensorMapSwizzle)."""
    pieces_of_span = max(1, span // PIECE)
    return address // PIECE ^ address // LINE % pieces_of_span


def expected(span: int) -> list[int]:
    """The map by the formula: the piece in each place."""
    return [piece_at(address, span) for address in range(0, BYTES, PIECE)]


def loaded(span: int) -> list[int]:
    """The map as this machine's GPU makes it. Raises RuntimeError where the words of a piece were torn apart."""
    device = devices.pick("cuda")
    torch.ops.load_library(build.build(KERNEL, devices.arch(device)).library)
    out, words = (torch.arange(BYTES // 4, dtype=torch.int32, device=device) for _ in range(2))
    torch.ops.minfer.tools_print_swizzle(out.fill_(-1), words, span)
    return pieces(out)


def pieces(words: torch.Tensor) -> list[int]:
    """The piece in each place, of a box of numbered words. Raises RuntimeError where a piece is not four in a row."""
    rows = words.cpu().view(-1, PIECE // 4)
    if not torch.equal(rows, rows[:, :1] + torch.arange(PIECE // 4, dtype=rows.dtype)) or bool((rows[:, 0] % 4).any()):
        raise RuntimeError(f"TMA tore a 16-byte piece apart, which no swizzle of ours does: {rows.tolist()}")
    return (rows[:, 0] // 4).tolist()


def printed(places: list[int]) -> str:
    """A map as text, a line for each 128 bytes."""
    count = LINE // PIECE
    return "\n".join(
        " ".join(f"{piece:2d}" for piece in places[first : first + count]) for first in range(0, len(places), count)
    )


def main() -> int:
    hopper = torch.cuda.is_available() and KERNEL.builds_for(devices.arch(devices.pick("cuda")))
    if not hopper:
        print("no Hopper GPU here: these maps are computed by the formula, and not loaded by TMA")
    wrong = 0
    for span in SPANS:
        places = loaded(span) if hopper else expected(span)
        print(f"\nswizzle of {span} bytes" if span else "no swizzle")
        print(printed(places))
        if places != expected(span):
            wrong = 1
            print("the formula says otherwise:")
            print(printed(expected(span)))
    return wrong


if __name__ == "__main__":
    sys.exit(main())
