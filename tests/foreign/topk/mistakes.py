"""Kernels whose values are right, and whose indices are not. `MISTAKES` says what becomes of each: its status, and words of
the message."""

import torch

from minfer import ops

op = ops.get("foreign_topk")
MISTAKES = {
    "repeats_the_first_tie": (
        "wrong",
        r"an element of the output indices is not what it must be; \d+ of \d+ elements (is|are) wrong, the first at ",
    ),
    # Not always all: the next index may be that of an equal value.
    "counts_from_one": (
        "wrong",
        r"is not what it must be; \d+ of \d+ elements are wrong, the first at .\d+, \d+.: got ",
    ),
    "forgets_the_indices": ("wrong", "the output indices is constant"),
}


def repeats_the_first_tie(values: torch.Tensor, indices: torch.Tensor, x: torch.Tensor) -> None:
    """Looks for each value from the front, and so finds the first of equal ones again and again."""
    values.copy_(x.topk(values.shape[1]).values)
    indices.copy_((x[:, None, :] == values[:, :, None]).int().argmax(-1))


def counts_from_one(values: torch.Tensor, indices: torch.Tensor, x: torch.Tensor) -> None:
    found = x.topk(values.shape[1])
    values.copy_(found.values)
    indices.copy_(found.indices + 1)


def forgets_the_indices(values: torch.Tensor, indices: torch.Tensor, x: torch.Tensor) -> None:
    values.copy_(x.topk(values.shape[1]).values)


for function in (repeats_the_first_tie, counts_from_one, forgets_the_indices):
    op.torch(function.__name__, function, dtypes=("float32",))
