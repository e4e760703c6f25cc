"""The tokens of a step and the places of their keys in the cache, as tensors for the model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minfer.models.config import Config

Tensor = torch.Tensor
ALIGNED = 16  # bytes
GRAIN = 64  # tokens: longer pieces are padded to a multiple


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
    last: Tensor  # (sequences,) int64: the row of each piece's last token; padding adds row 0
    # Of the longer pieces, packed one after the other:
    keys: Tensor  # int64: page * slots + slot of every key they see; padding adds those of a piece
    of_q: Tensor  # (pieces + 1,) int32: cumulative tokens
    of_kv: Tensor  # (pieces + 1,) int32: cumulative keys
    spans: list[tuple[int, int]]  # tokens and keys of each
    packed: Tensor | None = None  # all of these tensors as bytes, where they lie in one buffer

    @property
    def single(self) -> int:
        return len(self.lengths)


def bucket(count: int) -> int:
    """The least power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


def batch(pieces: Sequence[Piece], page: int, device: torch.device | str, pad: bool = False) -> Batch:
    """The tensors of a step. All are sent to the device in one copy, and the host does not wait for it.

    With `pad` the tensors of many steps have the same sizes, so that a graph can be replayed, and calls outside of graphs are
    prepared once for many steps: the numbers of pieces of one token and of their pages are rounded up to a power of two, and
    that of the tokens of longer pieces to a multiple of GRAIN. Keys of padding are not kept. Its logits come last. Raises
    ValueError where a piece of one token comes after a longer one, or pages are too few."""
    single = sum(len(piece.tokens) == 1 for piece in pieces)
    if any(len(piece.tokens) != 1 for piece in pieces[:single]):
        raise ValueError("a batch takes pieces of one token first")
    ids, where, last, keys = (array("q") for _ in range(4))
    positions, lengths, of_q, of_kv = (array("i", start) for start in ((), (), (0,), (0,)))
    spans: list[tuple[int, int]] = []

    def add(piece: Piece) -> int:
        count, end = len(piece.tokens), piece.start + len(piece.tokens)
        if not count or end > page * len(piece.pages):
            raise ValueError(
                f"a piece of {count} tokens from {piece.start} does not fit {len(piece.pages)} pages of {page}"
            )
        ids.extend(piece.tokens)
        positions.extend(range(piece.start, end))
        _add_slots(where, piece.pages, page, piece.start, end)
        last.append(len(ids) - 1)
        return end

    def add_padding(count: int) -> None:
        for values, value in ((ids, 0), (where, -1), (positions, 0)):
            values.extend([value] * count)

    def add_span(tokens: int, seen: int) -> None:
        spans.append((tokens, seen))
        of_q.append(of_q[-1] + tokens)
        of_kv.append(of_kv[-1] + seen)

    lengths.extend(map(add, pieces[:single]))
    used = [array("i", piece.pages[: -(-length // page)]) for piece, length in zip(pieces, lengths, strict=False)]
    width = max(map(len, used), default=0)
    if pad and single:
        added, width = bucket(single) - single, bucket(width)
        add_padding(added)
        lengths.extend([0] * added)
        used += [array("i")] * added
    for piece in pieces[single:]:
        end = add(piece)
        _add_slots(keys, piece.pages, page, 0, end)
        add_span(len(piece.tokens), end)
    if pad and spans:
        added = -of_q[-1] % GRAIN
        seen = added + -(len(keys) + added) % (16 * GRAIN)  # at least as many as tokens, so that each sees one
        add_padding(added)
        keys.extend([keys[0]] * seen)
        add_span(added, seen)
        while len(spans) < bucket(len(spans)):
            add_span(0, 0)
    if pad:
        last.extend([0] * (bucket(len(last)) - len(last)))
    table = array("i", b"".join(row.tobytes().ljust(4 * width, b"\0") for row in used))
    return send((ids, positions, where, lengths, table, last, keys, of_q, of_kv), spans, width, device)


def send(values: Sequence[array[int]], spans: list[tuple[int, int]], width: int, device: torch.device | str) -> Batch:
    """A batch of these values, in the order of its fields, in one buffer on the device. Each tensor starts at a multiple of
    ALIGNED bytes, as kernels like it."""
    texts = [each.tobytes() for each in values]
    packed = on_device(torch.frombuffer(bytearray().join(map(_aligned, texts)), dtype=torch.uint8), device)
    tensors, start = [], 0
    for each, text in zip(values, texts, strict=True):
        part = packed[start : start + len(text)]
        tensors.append(part.view(torch.int64 if each.typecode == "q" else torch.int32))
        start += len(_aligned(text))
    ids, positions, where, lengths, table, last, keys, of_q, of_kv = tensors
    table = table.view(len(lengths), width)
    return Batch(ids, positions, where, lengths, table, last, keys, of_q, of_kv, spans, packed)


def on_device(values: Tensor, device: torch.device | str) -> Tensor:
    """Values of the host on the device. A GPU copies them in the order of its stream, and the host does not wait."""
    if torch.device(device).type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def _aligned(text: bytes) -> bytes:
    return text.ljust(len(text) + -len(text) % ALIGNED, b"\0")


def _add_slots(to: array[int], pages: Sequence[int], page: int, start: int, end: int) -> None:
    """The places of positions [start, end) of a sequence."""
    while start < end:
        first, upto = pages[start // page] * page + start % page, min(end, start - start % page + page)
        to.extend(range(first, first + upto - start))
        start = upto


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
