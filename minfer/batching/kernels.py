"""Batches as tensors, and minfer's kernels on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from minfer.batching.policies import Batch

if TYPE_CHECKING:
    import torch


def join(batch: Batch, values: Iterable[torch.Tensor]) -> torch.Tensor:
    """One tensor of a value for each request, (length, ...), in the order of `batch.requests`: (requests, width, ...), or
    (slots, ...) of a packed batch. Padding is 0. Raises ValueError for values of other lengths, or unlike each other, and
    TypeError for what is no tensor."""
    import torch

    values = list(values)
    _tensors(*values)
    found = [len(value) if value.dim() else None for value in values]
    if found != batch.lengths:
        raise ValueError(f"a batch with the lengths {batch.lengths} takes a value of each, got {found}")
    kinds = {(value.dtype, value.device, value.shape[1:]) for value in values}
    if len(kinds) != 1:
        unlike = sorted(f"{dtype} {tuple(shape)} on {device}" for dtype, device, shape in kinds)
        raise ValueError(f"a batch takes values that are alike but for their lengths, got {', '.join(unlike)}")
    if batch.packed:
        return torch.cat([*values, values[0].new_zeros(batch.slots - batch.tokens, *values[0].shape[1:])])
    made = values[0].new_zeros(len(values), batch.width, *values[0].shape[1:])
    for row, value in enumerate(values):
        made[row, : len(value)] = value
    return made


def _tensors(*values: Any) -> None:
    import torch

    for value in values:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"a batch takes tensors, got {type(value).__name__}")


def seqlens(batch: Batch, device: Any) -> dict[str, torch.Tensor]:
    """The true lengths as `minfer.attention` and `minfer.seq_sum` take them, so that padding is skipped: `cu_seqlens` of a
    packed batch, else `lengths`."""
    import torch

    name, values = ("cu_seqlens", batch.cu_seqlens) if batch.packed else ("lengths", batch.lengths)
    return {name: torch.tensor(values, dtype=torch.int32, device=device)}


def split(batch: Batch, y: torch.Tensor) -> list[torch.Tensor]:
    """The part of each request, (length, ...), of a result that lies as what `join` made; views of it. Raises ValueError
    for another, TypeError for what is no tensor."""
    _tensors(y)
    shape = (batch.slots,) if batch.packed else (len(batch.requests), batch.width)
    if tuple(y.shape[: len(shape)]) != shape:
        raise ValueError(f"a result of this batch begins with the sizes {shape}, got {tuple(y.shape)}")
    if not batch.packed:
        return [row[:length] for row, length in zip(y, batch.lengths, strict=True)]
    return list(y[: batch.tokens].split(batch.lengths))


class _Work:
    """A batch's kernel on data that is there already: what is timed is the call and the copy of the lengths.

    skip: hand the true lengths over; without it padding is computed like tokens, and packed batches, which need them, are
    refused."""

    def __init__(self, capacity: int, shape: tuple[int, ...], dtype: str, device: Any, skip: bool) -> None:
        import torch

        from minfer.ops import DTYPES

        if type(capacity) is not int or capacity < 1:
            raise ValueError(f"a step takes an int of at least 1 as its capacity, got {capacity!r}")
        if dtype not in DTYPES:
            raise ValueError(f"a step takes its dtype as one of {', '.join(DTYPES)}, got {dtype!r}")
        self.device = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
        generator = torch.Generator(self.device).manual_seed(0)
        whole = torch.randn(capacity, *shape, generator=generator, device=self.device)
        self.skip, self.data = skip, whole.to(DTYPES[dtype])

    def arguments(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The data in the batch's shape, and its lengths."""
        if batch.slots > len(self.data):
            raise ValueError(f"a batch has {batch.slots} slots, and there is data for {len(self.data)}; raise capacity")
        if batch.packed and not self.skip:
            raise ValueError("a packed batch needs its lengths; use skip=True or another policy")
        x = self.data[: batch.slots]
        if not batch.packed:
            x = x.unflatten(0, (len(batch.requests), batch.width))
        return x, seqlens(batch, self.device) if self.skip else {}


class Attention(_Work):
    """Causal self-attention over each batch: `minfer.attention`, with `heads` heads of `head_dim` (64, 96, 128, 192 or 256)
    in float16 or bfloat16. capacity: of the batches to come. device: the GPU, or the CPU where there is none, unless given."""

    def __init__(
        self, capacity: int, *, heads: int = 4, head_dim: int = 64, dtype: str = "bfloat16", device: Any = None,
        skip: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(capacity, (3, heads, head_dim), dtype, device, skip)

    def __call__(self, batch: Batch) -> Any:
        from minfer import attention

        x, given = self.arguments(batch)
        q, k, v = x.unbind(-3)
        return attention(q, k, v, causal=True, **given)


class SeqSum(_Work):
    """`minfer.seq_sum` over each batch, in float32 or bfloat16; else as `Attention`."""

    def __init__(self, capacity: int, *, dtype: str = "float32", device: Any = None, skip: bool = True) -> None:
        super().__init__(capacity, (), dtype, device, skip)

    def __call__(self, batch: Batch) -> Any:
        from minfer import seq_sum

        x, given = self.arguments(batch)
        return seq_sum(x, **given)


def timed(work: Callable[[Batch], Any]) -> Callable[[Batch], float]:
    """`work` as a step of `compare`: runs a batch and returns its seconds by the host's clock, from an idle GPU to an idle GPU.
    A batch of a shape that did not run before runs once untimed, because kernels are chosen and compiled then."""
    seen: set[tuple[bool, int, int]] = set()

    def finished() -> float:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def step(batch: Batch) -> float:
        shape = (batch.packed, len(batch.requests), batch.slots)
        if shape not in seen:
            work(batch)
            seen.add(shape)
        begin = finished()
        work(batch)
        return finished() - begin

    return step
