"""Models of the time that two of hgemm's kernels for Hopper take for a product with many rows. `preferred.py` uses them.

Both models have one form: a constant, plus the time of the waves of tiles or that of the bytes, whichever is longer; if these
two are about equal, somewhat more than either. That of v18_fitted is the one by which it chooses its tile (`fitted_choice.h`).
The other was fitted to cold times of random products on an H100. Times are in microseconds."""

from __future__ import annotations

import math
import re
from functools import cache, lru_cache
from pathlib import Path

MULTIPROCESSORS = 132  # of an H100 or H200
CLUSTERS = (66, 31, 15)  # of 2, 4 and 8 blocks that run at once there
CYCLES_PER_US = 1755.0
STEP = 64  # in k


@lru_cache(4096)
def is_stream_k_faster(m: int, n: int, k: int, is_tn: bool) -> bool:
    """Whether v14_stream_k takes less time than v18_fitted by these models. A call takes about 0.1 ms of the host, and less if
    it repeats an earlier one."""
    return stream_k_us(m, n, k) < fitted_us(m, n, k, is_tn)


def _together(work: float, memory: float) -> float:
    return math.cbrt(work**3 + memory**3)


def _megabytes(m: int, n: int, k: int) -> float:
    return 2e-6 * (m * k + n * k + m * n)


@cache
def fitted_tiles() -> tuple[tuple[int, int, float], ...]:
    """Rows, columns and fitted rate of v18_fitted's tiles."""
    text = (Path(__file__).parent / "hgemm" / "fitted_choice.h").read_text()
    return tuple(
        (int(rows), int(cols), float(rate)) for rows, cols, rate in re.findall(r"F\((\d+), (\d+), ([\d.]+)\)", text)
    )


def fitted_us(m: int, n: int, k: int, is_tn: bool) -> float:
    """As `choose_fitted` of `fitted_choice.h`."""
    all_steps, memory, best = -(-k // STEP), _megabytes(m, n, k) / 4 + 6.3, math.inf
    for rows, cols, rate in fitted_tiles():
        area = rows * cols
        for high, wide, factor in ((2 * rows, cols, 1.0), (rows, 2 * cols, 1.020)):
            tiles = -(-m // high) * -(-n // wide)
            step = (area / 32 * rate + 64) * factor * (1 if is_tn else 1.008)
            for halvings, clusters in enumerate(CLUSTERS):
                parts = 1 << halvings
                if parts > 1 and (tiles > clusters or k < parts * 256):
                    break
                waves, steps, busy = -(-tiles // clusters), -(-all_steps // parts), min(1.0, tiles / clusters)
                body = waves * (steps * step * (1 - 0.187 * (1 - busy)) + 1445 + area * 0.1266) / CYCLES_PER_US
                us = 2.98 + _together(body, memory) + (area * 1.043e-4 if parts > 1 else 0)
                best = min(best, us)
    return best


def stream_k_us(m: int, n: int, k: int) -> float:
    """Of v14_stream_k: a pair of blocks has tiles of 256 x 256, and those of the last wave are divided (`deal_out`)."""
    tiles, steps, clusters = -(-m // 256) * -(-n // 256), -(-k // STEP), CLUSTERS[0]
    whole, rest = divmod(tiles, clusters)
    of_pair, waves, dealt = float(-(-tiles // clusters) * steps), -(-tiles // clusters), 0.0
    if whole > 0 and 0 < rest <= 2 * (clusters - rest):
        helpers = min(clusters - rest, max(1, int(math.sqrt(steps / 1.5)) - 1) * rest)
        each = rest / helpers
        takes, gives = 1.5 * (1 + 1 / each), 2 * (1 + each)
        own = max(1, math.ceil((steps * each + gives - takes) / (1 + each)))
        if own + takes < steps - 1:
            of_pair, dealt = whole * steps + own + takes, 4.1
    body = 1024 * of_pair / CYCLES_PER_US * 1.155 + 2.25 * waves + dealt
    return 1.34 + _together(body, 0.99 * _megabytes(m, n, k) / 4 + 12)
