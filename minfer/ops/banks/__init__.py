"""banks: what a warp's way of touching shared memory costs.

x is (rows, 32 pieces), fp32, a piece being `width` bytes: 4, 8 or 16. A warp keeps a row, a piece a lane. In each of
`rounds` rounds every lane stores its piece in shared memory, `stride` words behind that of the lane before it, and loads
that of the lane after it: y is x with every row rolled by `rounds` pieces. Nothing but shared memory can carry that.

Shared memory has 32 banks; word i is in bank i % 32, and a wavefront moves one word of each bank. Kernels differ in where
they put the words of a tile of 32 x 32: as they are, with padding, or swizzled.
"""

from __future__ import annotations

import torch

from minfer.ops import Case, Expected, Metric, Op, Spec, Tensors, exact, given, out, size

LANES = BANKS = 32
STRIDES = (1, 2, 3, 4, 8, 16, 32)
ACROSS = 16  # lanes from the one that stores a piece to the one that loads it
ROUNDS = 257  # one more than a multiple of 32: what comes back to its place would prove nothing


def words(case: Case) -> int:
    """The words of a piece."""
    return int(case.params["width"]) // 4


def place(word: int, layout: str, words: int) -> int:
    """Where a word of a tile of 32 x 32 lies: in the layout `plain`, `padded` or `swizzled`, for pieces of so many words."""
    row, column = divmod(word, 32)
    if layout == "padded":
        return word + row * words
    if layout == "swizzled":
        return row * 32 + (column ^ row * words % 32)
    return word


def wavefronts(stride: int, layout: str, words: int) -> int:
    """How many wavefronts a warp's load or store should take, whose lane i touches the piece at word i * stride.

    A wavefront has 128 bytes. A warp's 8-byte accesses are made by halves of it, its 16-byte accesses by quarters, and
    each part takes as many wavefronts as the bank of which it needs the most words."""
    total, lanes = 0, LANES // words
    for first in range(0, LANES, lanes):
        touched = [
            place(lane * stride, layout, words) + i for lane in range(first, first + lanes) for i in range(words)
        ]
        banks = [word % BANKS for word in set(touched)]
        total += max(map(banks.count, banks))
    return total


def unaligned(case: Case) -> str | None:
    """The rule that a piece lies at a multiple of its size."""
    stride = op.call(case)["stride"]
    return f"needs a stride of a multiple of {words(case)} words, got {stride}" if stride % words(case) else None


def tensors(case: Case) -> list[Spec]:
    columns = LANES * words(case)
    return [out("y", case["rows"], columns), given("x", case["rows"], columns)]


def reference(case: Case, t: Tensors, stride: int, rounds: int) -> dict[str, Expected]:
    return {"y": exact(t["x"].roll(-rounds * ACROSS * words(case), 1))}


def roll(y: torch.Tensor, x: torch.Tensor, stride: int = 1, rounds: int = ROUNDS) -> torch.Tensor:
    """PyTorch, which needs no rounds: the result alone, so that a ratio to it says nothing."""
    return x.roll(-rounds * ACROSS * (x.shape[1] // LANES), 1)


op = Op(
    "banks",
    axes={"rows": size(24)},
    params={"width": ("4", "8", "16")},
    tensors=tensors,
    reference=reference,
    calls={f"stride_{stride}": {"stride": stride, "rounds": ROUNDS} for stride in STRIDES},
    # What a warp stores and loads in shared memory.
    metric=Metric("shared GB/s", lambda op, case: 2 * ROUNDS * op.specs(case)[0].nbytes * 1e-9),
    odd_shapes=({"rows": 1}, {"rows": 11}),
    sizes={"small": [{"rows": 3}, {"rows": 16}], "nan": [], "large": [{"rows": 1000}]},
)

FP32 = ("float32",)

op.torch("torch", roll, baseline=True, returns=(0,), dtypes=FP32)
for rung in ("v01_plain", "v02_padded", "v03_swizzled"):
    op.cuda("exchange.cu", name=rung, dtypes=FP32, requires=unaligned)
op.cpp("cpu_exchange.cpp", dtypes=FP32, requires=unaligned)
