"""Which kernel takes the least time for attention on an H100 or H200, by models of their times. `preferred.py` and
`attention.py` use them.

A kernel gives a tile of queries to a thread block, which goes through the keys in blocks. Its time in microseconds is a sum of
constants of the kernel and the heads, each times one of `terms_of_time`. benchmarks/fit_attention.py fits the constants to
times of an H200, which benchmarks/attention_times.py took, and says how good the choice is."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

MULTIPROCESSORS = 132  # of an H100 or H200
DECODE = "decode_attention"  # not a kernel: `attention` calls this function where it is the fastest
MOST_PACKED = 16  # heads in a tile of v07_short and v08_compact
ROWS_OF_DECODE, KEYS_OF_DECODE = 8, 64  # rows of queries that decode_attention multiplies at once, and by how many keys


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


class Tile(NamedTuple):
    rows: int
    keys: int  # of a block
    packed: bool  # whether a tile has the queries of several heads that share keys
    divided: bool = False  # whether the keys of a tile are divided into parts, as key_parts.h says


TILES = {
    "v03_mma": Tile(128, 64, False),
    "v05_pingpong": Tile(128, 128, False),
    "v06_no_maximum": Tile(128, 128, False),
    "v07_short": Tile(128, 64, True),
    "v08_compact": Tile(128, 64, True),
    "v13_wide_heads": Tile(128, 128, False),
    "v14_key_parts": Tile(128, 64, True, True),
}
# Of `count_parts` in key_parts.h.
LEAST_BLOCKS, MOST_PARTS, MOST_WAVES, BLOCKS_BESIDES = 4, 64, 8, 6
# By head_dim and v_dim, in the order of `terms_of_time`, or of `terms_of_decode` for decode_attention. The latter count the
# launch that writes the lengths, too.
CONSTANTS: Mapping[tuple[int, int], Mapping[str, tuple[float, ...]]] = {
    (64, 64): {
        "v03_mma": (5.893, 0.9066, 1.343, 0.8378, 0.03806),
        "v05_pingpong": (6.75, 0.6385, 2.726, 1.403, 0.0),
        "v06_no_maximum": (11.65, 0.4965, 2.452, 1.069, 0.002768),
        "v07_short": (10.33, 0.2775, 1.616, 0.612, 0.0),
        "v08_compact": (7.336, 0.4389, 1.766, 0.8364, 0.0),
        "decode_attention": (7.435, 1.219, 0.06335, 0.1959, 0.4282),
    },
    (96, 96): {
        "v03_mma": (5.673, 1.258, 1.706, 0.9964, 0.05989),
        "v05_pingpong": (7.959, 0.8382, 2.99, 1.566, 0.0),
        "v06_no_maximum": (12.33, 0.5398, 2.608, 1.197, 0.03527),
        "v08_compact": (7.643, 0.4232, 1.6, 0.931, 0.0),
        "decode_attention": (7.982, 1.375, 0.7374, 0.0, 1.088),
    },
    (128, 128): {
        "v03_mma": (6.175, 1.342, 1.767, 1.297, 0.07748),
        "v05_pingpong": (8.228, 0.9715, 3.087, 1.624, 0.01691),
        "v06_no_maximum": (11.88, 0.6848, 2.761, 1.183, 0.05962),
        "v07_short": (10.93, 0.3834, 1.908, 0.7139, 0.02328),
        "v08_compact": (7.268, 0.6182, 1.835, 0.9615, 0.0),
        "decode_attention": (8.111, 1.072, 0.1712, 0.1748, 1.05),
    },
    (192, 128): {
        "v03_mma": (4.242, 1.2, 2.905, 2.255, 0.0),
        "v05_pingpong": (8.977, 1.081, 2.734, 1.938, 0.009864),
        "v06_no_maximum": (12.31, 0.8317, 2.084, 1.69, 0.04107),
        "v08_compact": (7.671, 0.5453, 1.64, 1.205, 0.0),
        "v13_wide_heads": (9.4, 0.9473, 3.571, 1.818, 0.02726),
        "decode_attention": (8.176, 1.529, 0.1559, 0.1895, 1.003),
    },
    (256, 256): {
        "v03_mma": (5.965, 2.199, 0.1542, 2.183, 0.1049),
        "v05_pingpong": (8.35, 2.139, 1.904, 2.501, 0.09577),
        "v13_wide_heads": (10.93, 1.443, 4.951, 1.912, 0.04255),
        "decode_attention": (8.686, 1.474, 0.2547, 0.2117, 1.471),
    },
}


def terms_of_time(of: Problem, tile: Tile) -> tuple[float, ...]:
    """1; the blocks of keys of the longest tile, or of a part of it; the waves of tiles, or of parts; all blocks of keys for
    each multiprocessor; and the megabytes of q, k, v and out."""
    packed = heads_in_tile(of.group) if tile.packed else 1
    queries = tile.rows // packed
    tiles = math.ceil(of.seq_q / queries)
    each = of.batch * of.heads // packed * tiles
    last = math.ceil(of.seq_kv / tile.keys)
    seen_by_first = min(of.seq_kv, max(0, of.seq_kv - of.seq_q) + queries) if of.causal else of.seq_kv
    blocks = each * (math.ceil(seen_by_first / tile.keys) + last) / 2
    parts = count_parts(each, last) if tile.divided else 1
    waves = math.ceil(each * parts / MULTIPROCESSORS)
    return 1, math.ceil(last / parts), waves, blocks / MULTIPROCESSORS, megabytes(of)


def count_parts(items: int, blocks: int) -> int:
    """Into how many parts v14_key_parts divides the keys of each item (`count_parts` of key_parts.h)."""
    most = min(MOST_PARTS, blocks // LEAST_BLOCKS, MOST_WAVES * MULTIPROCESSORS // max(1, items))

    def time(parts: int) -> int:
        return math.ceil(items * parts / MULTIPROCESSORS) * (math.ceil(blocks / parts) + BLOCKS_BESIDES)

    return min(range(1, max(1, most) + 1), key=time)


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


def times(of: Problem) -> dict[str, float]:
    """The time in microseconds of each kernel that takes such heads, and of decode_attention, which takes up to 16 queries.
    Heads of 192 with values of 192 count as those of 256, because no language model that was timed has them."""
    dims = (of.head_dim, of.v_dim) if of.head_dim != of.v_dim or of.head_dim != 192 else (256, 256)
    found = {}
    for name, constants in CONSTANTS.get(dims, {}).items():
        parts = terms_of_decode(of) if name == DECODE else terms_of_time(of, TILES[name])
        found[name] = sum(map(operator.mul, constants, parts))
    return found


@lru_cache(4096)
def fastest(of: Problem, with_decode: bool = False, *, hopper: bool = True) -> str:
    """The kernel's name; empty if no kernel takes such heads. With `with_decode` it may be decode_attention. Without
    `hopper` it is v03_mma or decode_attention, by an H200's times."""
    able = {name: us for name, us in times(of).items() if (name != DECODE or with_decode)}
    if not hopper:
        able = {name: us for name, us in able.items() if name in ("v03_mma", DECODE)}
    return min(able, key=able.__getitem__, default="")


def explained(of: Problem) -> str:
    """The times of the kernels, least first, such as "v08_compact 12.1 us, v07_short 14.9 us"."""
    kernels = sorted((us, name) for name, us in times(of).items() if name != DECODE)
    return ", ".join(f"{name} {us:.1f} us" for us, name in kernels)
