"""The tokens of a step and the places of their keys in the cache, as tensors for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minfer.models.config import Config

Tensor = torch.Tensor


@dataclass(frozen=True)
class Piece:
    """The next tokens of a sequence: their ids, the position of the first, and the sequence's pages, which have room for
    them. Position j is slot j % page of pages[j // page]."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]


@dataclass
class Batch:
    """The tensors of a step of T tokens: first the `single` pieces of one token, then the longer pieces."""

    ids: Tensor  # (T,) int64
    positions: Tensor  # (T,) int32
    where: Tensor  # (T,) int64: page * slots + slot of each token's key; -1: it is not kept
    lengths: Tensor  # (single,) int32: keys of each sequence, with the new one
    table: Tensor  # (single, most pages) int32
    last: Tensor  # (sequences,) int64: the row of each piece's last token
    # Of the longer pieces, packed one after the other:
    keys: Tensor  # int64: page * slots + slot of every key they see
    of_q: Tensor  # (pieces + 1,) int32: cumulative tokens
    of_kv: Tensor  # (pieces + 1,) int32: cumulative keys
    spans: list[tuple[int, int]]  # tokens and keys of each

    @property
    def single(self) -> int:
        return len(self.lengths)


def batch(pieces: Sequence[Piece], page: int, device: torch.device | str) -> Batch:
    """The tensors of a step. Raises ValueError where a piece of one token comes after a longer one, or pages are too few."""
    single = sum(len(piece.tokens) == 1 for piece in pieces)
    if any(len(piece.tokens) != 1 for piece in pieces[:single]):
        raise ValueError("a batch takes pieces of one token first")
    ids: list[int] = []
    positions: list[int] = []
    where: list[int] = []
    last: list[int] = []
    for piece in pieces:
        count, end = len(piece.tokens), piece.start + len(piece.tokens)
        if not count or end > page * len(piece.pages):
            raise ValueError(
                f"a piece of {count} tokens from {piece.start} does not fit {len(piece.pages)} pages of {page}"
            )
        ids += piece.tokens
        positions += range(piece.start, end)
        where += _slots(piece.pages, page, piece.start, end)
        last.append(len(ids) - 1)
    keys, spans = [], []
    for piece in pieces[single:]:
        end = piece.start + len(piece.tokens)
        keys += _slots(piece.pages, page, 0, end)
        spans.append((len(piece.tokens), end))
    lengths = [piece.start + 1 for piece in pieces[:single]]
    used = [list(piece.pages[: -(-length // page)]) for piece, length in zip(pieces, lengths, strict=False)]
    width = max(map(len, used), default=0)

    def whole(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Batch(
        whole(ids),
        whole(positions, torch.int32),
        whole(where),
        whole(lengths, torch.int32),
        whole([row + [0] * (width - len(row)) for row in used], torch.int32).view(single, width),
        whole(last),
        whole(keys),
        whole(_sums([queries for queries, _ in spans]), torch.int32),
        whole(_sums([seen for _, seen in spans]), torch.int32),
        spans,
    )


def _slots(pages: Sequence[int], page: int, start: int, end: int) -> list[int]:
    return [pages[j // page] * page + j % page for j in range(start, end)]


def _sums(counts: list[int]) -> list[int]:
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums


def cache(
    config: Config, pages: int, page: int, device: torch.device | str, dtype: torch.dtype
) -> list[tuple[Tensor, ...]]:
    """The caches of each layer, with `pages` pages of `page` slots: one of keys and one of values, (pages, page, kv_heads,
    head_dim). With latent attention there is one, of latents and rotated keys, (pages + 1, page, rank + rotated). Its last page
    belongs to no sequence: a -1 in `Batch.where` writes to the end of that page."""
    if config.latent is not None:
        width = config.latent.rank + config.latent.rotated
        return [(torch.zeros(pages + 1, page, width, device=device, dtype=dtype),) for _ in range(config.layers)]
    shape = (pages, page, config.kv_heads, config.head_dim)
    return [
        (torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype))
        for _ in range(config.layers)
    ]
