"""Kernels that rotate too seldom. `MISTAKES` says what becomes of each: its status, and words of the message."""

import torch

from minfer import ops

op = ops.get("foreign_rope")
MISTAKES = {
    "forgets_k": ("wrong", "an element of the output k is off"),
    "rotates_once": ("wrong|dishonest", "off by|looks like a race|wrong result"),
    "tires": ("dishonest", "a wrong result, though it was right when verified"),
}
rotated: set[tuple[int, int]] = set()
calls = 0


def rotate(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
    for x, turned in zip((q, k), op.kernels["torch"].function(q, k, positions), strict=True):
        x.copy_(turned)


def forgets_k(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
    q.copy_(op.kernels["torch"].function(q, k, positions)[0])


def rotates_once(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
    """Knows a tensor that it has rotated by its place, and leaves it alone."""
    if (q.data_ptr(), k.data_ptr()) not in rotated:
        rotated.add((q.data_ptr(), k.data_ptr()))
        rotate(q, k, positions)


def tires(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
    """Does its work for as long as it may be verified."""
    global calls
    calls += 1
    if calls <= 40:
        rotate(q, k, positions)


for function in (forgets_k, rotates_once, tires):
    op.torch(function.__name__, function, dtypes=("float32",))
