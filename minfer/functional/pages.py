"""What functions over a key-value cache check alike."""

from __future__ import annotations

import torch

Tensor = torch.Tensor
MOST_LOG_SLOTS = 29  # a page has at most 2^29 slots


def is_power_of_two(slots: int) -> bool:
    """Whether a page may have so many slots."""
    return any(slots == 1 << bits for bits in range(MOST_LOG_SLOTS + 1))


def check_pages(function: str, cache: Tensor, lengths: Tensor, page_table: Tensor | None) -> None:
    """Raises ValueError for a length that the cache, (blocks, slots, ...), does not have, or a page index out of range among
    those that are read. Waits for the device."""
    slots = cache.shape[1]
    most = slots if page_table is None else slots * page_table.shape[1]
    wrong = (lengths < 0) | (lengths > most)
    if bool(wrong.any()):
        raise ValueError(f"minfer.{function} takes lengths from 0 to {most}, got {int(lengths[wrong][0])}")
    if page_table is None:
        return
    used = torch.arange(page_table.shape[1], device=page_table.device) * slots < lengths[:, None]
    wrong = used & ((page_table < 0) | (page_table >= len(cache)))
    if bool(wrong.any()):
        got = int(page_table[wrong][0])
        raise ValueError(f"minfer.{function} takes pages of page_table from 0 to {len(cache) - 1}, got {got}")


def page_of_prefill(slots: int) -> str:
    """The parameter `page` of prefill_attention by which a kernel is chosen. A kernel takes other powers of two, too."""
    return next(page for least, page in ((64, "64"), (8, "16"), (1, "1")) if slots >= least)
