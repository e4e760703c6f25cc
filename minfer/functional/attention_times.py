"""Which kernel takes the least time for attention on an H100 or H200, by models of their times. `preferred.py` and
`attention.py` use them.

A kernel gives a tile of queries to a thread block, which goes through the keys in blocks. Its time in microseconds is a sum of
constants of the kernel and the heads, each times one of `terms_of_time`. benchmarks/fit_attention.py fits the constants, which
are in attention_times.json, to times of an H200, which benchmarks/attention_times.py took, and says how good the choice
is."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

MULTIPROCESSORS = 132  # of an H100 or H200
DECODE = "decode_attention"  # not a kernel: `attention` calls this function where it is the fastest
MOST_PACKED = 16  # heads in a tile of v07_short and v08_compact
ROWS_OF_DECODE, KEYS_OF_DECODE = 8, 64  # rows of queries of one mma of decode_attention, and a number of keys
ROWS_OF_WARPGROUP = 64  # of which a tile of 128 rows has two
# How keys and values are kept: side by side, in pages of 8 slots or more, in smaller pages, or in fp8.
TOGETHER, PAGES, SMALL_PAGES, FP8 = "together", "pages", "small pages", "fp8"
MOST_COPIED = 2**29 / 1e6  # megabytes of keys and values that v15_gathered and v16_fp8_gathered copy
MANY_KEYS = 2048  # from here on, keys are counted in whole blocks
DIVIDED = ", divided"  # behind the name of a kernel that divides keys at some problems, for its times there


class Problem(NamedTuple):
    """Sequences of equal lengths. `seq_kv` are the keys that any of the queries sees."""

    batch: int
    seq_q: int
    seq_kv: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    causal: bool

    @property
    def group(self) -> int:
        """The query heads of a key-value head; 1 where the numbers do not fit, which no kernel takes."""
        return max(1, self.heads // max(1, self.kv_heads))


class Parts(NamedTuple):
    """Of the keys of a tile, as key_parts.h says."""

    least: int = 4  # blocks of a part
    besides: int = 6  # the fixed cost of a part, in blocks


class Tile(NamedTuple):
    rows: int
    keys: int  # of a block
    packed: bool  # whether a tile has the queries of several heads that share keys
    parts: Parts | None = None  # into which the keys of a tile are divided


MMA, LONG = Tile(128, 64, False), Tile(128, 128, False)
SHORT, SHORT_IN_PARTS = Tile(128, 64, True), Tile(128, 64, True, Parts())
TILES = {
    "v03_mma": MMA,
    "v05_pingpong": LONG,
    "v06_no_maximum": LONG,
    "v07_short": SHORT,
    "v08_compact": SHORT,
    "v09_paged": MMA,
    "v10_paged_boxes": LONG,
    "v11_paged_short": SHORT,
    "v12_fp8": MMA,
    "v13_wide_heads": LONG,
    "v14_key_parts": SHORT_IN_PARTS,
    "v15_gathered": LONG,
    f"v15_gathered{DIVIDED}": SHORT_IN_PARTS,
    "v16_fp8_gathered": LONG,
    f"v16_fp8_gathered{DIVIDED}": SHORT_IN_PARTS,
    "v17_wide_parts": Tile(128, 128, False, Parts(2, 4)),
    "v18_paged_parts": SHORT_IN_PARTS,
}
GATHERED = ("v15_gathered", "v16_fp8_gathered")  # they copy keys and values first
MOST_PARTS, MOST_WAVES = 64, 8  # of `count_parts` in key_parts.h
# By how keys and values are kept, by head_dim and v_dim, and by kernel: constants in the order of `terms_of_time`, or of
# `terms_of_decode` for decode_attention. The latter count the launch that writes the lengths, too.
Constants = Mapping[str, Mapping[tuple[int, int], Mapping[str, tuple[float, ...]]]]
DATA = Path(__file__).with_suffix(".json")


def read_constants() -> Constants:
    def dims(words: str) -> tuple[int, int]:
        head_dim, v_dim = map(int, words.split("/"))
        return head_dim, v_dim

    return {
        kept: {dims(words): {name: tuple(each) for name, each in of.items()} for words, of in of_dims.items()}
        for kept, of_dims in json.loads(DATA.read_text()).items()
    }


CONSTANTS = read_constants()


def terms_of_time(of: Problem, kernel: str) -> tuple[float, ...]:
    """1; the blocks of keys on the busiest multiprocessor; the waves of tiles, or of parts; all blocks of keys, divided by the
    number of multiprocessors; the megabytes of q, k, v and out, and those of a copy; and the second term again. A tile with at
    most 64 rows counts half in the fourth term, because one of its two warpgroups has nothing to do; and in the second, if all
    tiles are such."""
    tile = TILES[kernel]
    packed = heads_in_tile(of.group) if tile.packed else 1
    queries = tile.rows // packed
    tiles = max(1, math.ceil(of.seq_q / queries))
    units = of.batch * of.heads // packed
    last = math.ceil(of.seq_kv / tile.keys)
    seen_by_first = min(of.seq_kv, max(0, of.seq_kv - of.seq_q) + queries) if of.causal else of.seq_kv
    first = math.ceil(seen_by_first / tile.keys)
    parts = count_parts(units * tiles, last, *tile.parts) if tile.parts else 1
    pieces = units * tiles * parts
    waves = math.ceil(pieces / MULTIPROCESSORS)
    rows_of_last = (of.seq_q - (tiles - 1) * queries) * packed
    filled = 0.5 if rows_of_last <= ROWS_OF_WARPGROUP else 1.0
    average = (first + last) / 2
    blocks = units * ((tiles - 1) * average + filled * last) / MULTIPROCESSORS
    # Longest first, a multiprocessor would take every 132nd piece. But the one that is free first takes the next piece, so none
    # has more than the mean and one piece.
    shorter = (last - first) / parts * MULTIPROCESSORS * waves * (waves - 1) / 2 / max(1, pieces - 1)
    most = min(waves * last / parts - shorter, units * tiles * average / MULTIPROCESSORS + last / parts)
    copied = 2 * megabytes_of_rows(of, of.batch * of.seq_kv * of.kv_heads) if kernel.startswith(GATHERED) else 0.0
    return 1, most * (filled if tiles == 1 else 1), waves, blocks, megabytes(of) + copied, most


def count_parts(items: int, blocks: int, least: int = Parts().least, besides: int = Parts().besides) -> int:
    """Into how many parts v14_key_parts divides the keys of each item (`count_parts` of key_parts.h). v17_wide_parts has other
    constants."""
    if items == 0:
        return 1
    most = max(1, min(MOST_PARTS, blocks // least, MOST_WAVES * MULTIPROCESSORS // items))
    of_whole = -(-items // MULTIPROCESSORS)
    shortest, found = of_whole * (blocks + besides), 1
    for waves in range(of_whole, MOST_WAVES + 1):
        of_wave = waves * MULTIPROCESSORS // items  # the most parts that make so many waves
        longest = -(-blocks // (of_wave if of_wave < most else most))
        if (time := waves * (longest + besides)) < shortest:
            shortest, found = time, -(-blocks // longest)
        if of_wave >= most:
            break
    return found


def heads_in_tile(group: int) -> int:
    """The largest power of 2 that divides the query heads of a key-value head, up to MOST_PACKED."""
    return min(MOST_PACKED, group & -group)


def terms_of_decode(of: Problem) -> tuple[float, ...]:
    """1; the waves of key-value heads, times the tiles of 8 rows of each; all products of a tile with 64 keys, for each
    multiprocessor; the megabytes of k and v, and of q and out."""
    units = of.batch * of.kv_heads
    products = math.ceil(of.seq_q * of.group / ROWS_OF_DECODE)
    waves = math.ceil(units / MULTIPROCESSORS)
    all_products = units * products * of.seq_kv / (KEYS_OF_DECODE * MULTIPROCESSORS)
    cached = megabytes_of_rows(of, units * of.seq_kv)
    return 1, waves * products, all_products, cached, megabytes(of) - cached


def megabytes(of: Problem) -> float:
    return megabytes_of_rows(of, of.batch * (of.seq_q * of.heads + of.seq_kv * of.kv_heads))


def megabytes_of_rows(of: Problem, rows: int) -> float:
    return 2e-6 * rows * (of.head_dim + of.v_dim)


def times(of: Problem, kept: str = TOGETHER) -> dict[str, float]:
    """The time in microseconds of each kernel that takes such heads, and of decode_attention, which takes up to 16 queries.
    `kept` says how keys and values are kept. Heads of 192 with values of 192 count as those of 256, because no language model
    that was timed has them."""
    dims = (of.head_dim, of.v_dim) if of.head_dim != of.v_dim or of.head_dim != 192 else (256, 256)
    found = {}
    for name, constants in CONSTANTS[kept].get(dims, {}).items():
        if not has_times(of, name):
            continue
        parts = terms_of_decode(of) if name == DECODE else terms_of_time(of, name)
        found[name.removesuffix(DIVIDED)] = sum(map(operator.mul, constants, parts))
    return found


def has_times(of: Problem, name: str) -> bool:
    """Whether the constants `name` are for this problem, if the kernel takes it. A kernel that divides keys has constants only
    where it does so. Where it does not, it launches another kernel, which has its own. There must be room for the copies of
    those that gather."""
    if name == DECODE:
        return True
    if name.startswith(GATHERED):
        divides = of.head_dim == of.v_dim in (64, 128) and parts_of_item(of, SHORT_IN_PARTS) > 1
        copied = megabytes_of_rows(of, of.batch * of.seq_kv * of.kv_heads)
        return copied <= MOST_COPIED and divides == name.endswith(DIVIDED)
    return TILES[name].parts is None or parts_of_item(of, TILES[name]) > 1


def parts_of_item(of: Problem, tile: Tile) -> int:
    packed = heads_in_tile(of.group) if tile.packed else 1
    items = of.batch * of.heads // packed * math.ceil(of.seq_q / (tile.rows // packed))
    return count_parts(items, math.ceil(of.seq_kv / tile.keys), *(tile.parts or Parts()))


def fastest(of: Problem, with_decode: bool = False, *, kept: str = TOGETHER, hopper: bool = True) -> str:
    """The kernel's name; empty if no kernel takes such heads. With `with_decode` it may be decode_attention. Without
    `hopper`, for keys and values side by side, it is v03_mma or decode_attention, by an H200's times."""
    return _fastest(in_blocks(of), with_decode, kept, hopper)


def in_blocks(of: Problem) -> Problem:
    """The problem with the keys of a long cache in whole blocks. So a cache that grows by a token at a time has one answer for
    64 lengths: the models take tens of microseconds."""
    if of.seq_kv < MANY_KEYS or of.seq_kv < 2 * of.seq_q:
        return of
    return of._replace(seq_kv=-(-of.seq_kv // SHORT.keys) * SHORT.keys)


@lru_cache(4096)
def _fastest(of: Problem, with_decode: bool, kept: str, hopper: bool) -> str:
    able = {name: us for name, us in times(of, kept).items() if (name != DECODE or with_decode)}
    if not hopper:
        able = {name: us for name, us in able.items() if name in ("v03_mma", DECODE)}
    return min(able, key=able.__getitem__, default="")


def explained(of: Problem, kept: str = TOGETHER) -> str:
    """The times of the kernels, least first, such as "v08_compact 12.1 us, v07_short 14.9 us"."""
    kernels = sorted((us, name) for name, us in times(in_blocks(of), kept).items() if name != DECODE)
    return ", ".join(f"{name} {us:.1f} us" for us, name in kernels)


def how_kept(params: Mapping[str, str]) -> str:
    """How keys and values are kept, by the parameters of prefill_attention."""
    if params.get("quant", "none") == "fp8":
        return FP8
    page = params.get("page", "none")
    return TOGETHER if page == "none" else PAGES if int(page) >= 8 else SMALL_PAGES
