"""Kernels that read what they must not, or remember. `MISTAKES` says what becomes of each: its status, and words of the
message."""

import torch

from minfer import ops

op = ops.get("foreign_gather")
MISTAKES = {
    "reads_past_a_length": ("wrong", "of the output packed is NaN"),
    "follows_the_tail": ("error", "out of (bounds|range)"),
    "off_by_a_page": ("wrong", "the output packed is (NaN|not what it must be)"),
    "remembers_by_table": ("dishonest", "a wrong result, though it was right when verified"),
}
Tensor = torch.Tensor
remembered: dict[bytes, Tensor] = {}


def reads_past_a_length(packed: Tensor, table: Tensor, starts: Tensor, cache: Tensor) -> None:
    """Copies an entry more than there is of each sequence, the last one first."""
    for i in reversed(range(len(table))):
        first, behind = int(starts[i]), min(int(starts[i + 1]) + 1, len(packed))
        used = -(-(int(starts[i + 1]) - first) // cache.shape[1])
        entries = cache[table[i, :used].long()].flatten(0, 1)
        count = min(behind - first, len(entries))
        packed[first : first + count] = entries[:count]


def follows_the_tail(packed: Tensor, table: Tensor, starts: Tensor, cache: Tensor) -> None:
    """Reads all pages that the table could have, and takes of them what is used."""
    entries = cache[table.long()].flatten(1, 2)
    for i in range(len(table)):
        packed[starts[i] : starts[i + 1]] = entries[i, : starts[i + 1] - starts[i]]


def off_by_a_page(packed: Tensor, table: Tensor, starts: Tensor, cache: Tensor) -> None:
    packed.copy_(op.kernels["torch"].function(packed, (table + 1).remainder(len(cache)), starts, cache))


def remembers_by_table(packed: Tensor, table: Tensor, starts: Tensor, cache: Tensor) -> None:
    """Takes a table that it has seen for a cache that it has seen."""
    key = table.numpy().tobytes() + starts.numpy().tobytes() + repr(packed.shape).encode()
    if key not in remembered:
        remembered[key] = op.kernels["torch"].function(packed, table, starts, cache)
    packed.copy_(remembered[key])


for function in (reads_past_a_length, follows_the_tail, off_by_a_page, remembers_by_table):
    op.torch(function.__name__, function, dtypes=("float32",))
