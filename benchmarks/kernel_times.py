"""Times the kernels among which `matmul` chooses, at random products of public models, and says how good the choice is.

    uv run python benchmarks/kernel_times.py                                    # from the committed times; needs no GPU
    uv run python benchmarks/kernel_times.py --time --seconds 60 --rows 1 64    # on an H100 or H200: overwrites its times
    uv run python benchmarks/kernel_times.py --time --sizes short               # the same, of products with a short N or K
    uv run python benchmarks/kernel_times.py --time --sizes unaligned                 # with an N or K that is no multiple of 8
    uv run python benchmarks/kernel_times.py --time --mma         # of kernels that older GPUs have too, which use mma.sync

The committed times, benchmarks/results/products-nvidia-h200.parquet, are of 17,483 products, in bfloat16 and both layouts, some
of them timed twice. M is log-uniform and not rounded. There are five sets. In four, with 1 to 32 rows, 33 to 4096, 1024 to
8192, and 65 to 512, N and K are layers of the 24 models of `minfer/ops/models.csv`. In another, of any rows, N or K or both are
8 to 504 instead, as in routers and LoRA. The models of `minfer/functional/product_times.cpp` for up to 64 rows were fitted to a
random half of the first set, that of v14_stream_k to a random half of the third, its constant for up to 512 rows to random
halves of those with 33 to 4096 and 65 to 512 rows, and that of v14_small to all of its times in one wave there. The rules for
short N or K were made from all products that have one. When the second set was timed, v18_fitted had 48 of its 59 kinds of
tiles. v14_small was timed where N or K is short, and in the set with 65 to 512 rows, which was drawn with `--seed 41`. The sets
were timed in five runs like `--time`, and put together; their column `seed` tells them apart. A sixth set is in
products-unaligned-nvidia-h200.parquet, as one run with `--sizes unaligned` wrote it: of products with an N or K that is no
multiple of 8, both from 16 to 8192. The limits in the rules for these were fitted to other products.

With --mma it times v23_mma_fitted, which chooses a tile by a model, and the kernels before it, and prints their tables, where
`chosen` is v23_mma_fitted. benchmarks/results/products-mma-nvidia-h200.parquet has two such runs, which its column `seed` tells
apart. v23's model (`minfer/cuda/gemm/mma_choice.h`) was fitted to a half of the first, of 3,213 products, also with v23's own
times; the file does not have these, because a former model chose its tiles. The second, with `--seed 43`, is of 1,622 products
with the present choice of tiles. The choice for GPUs before Hopper was made from both; no such GPU was timed. In the last
table, `chosen` is that choice.

A time is the median of nine cold calls, in microseconds: 256 MiB are read before each, and each round has a new order of the
kernels. A kernel whose result is wrong ends the program. The tables are of products whose N and K are at least 512, of those
with a shorter one, of the sixth set, and of the kernels with mma.sync. They compare the kernel that `matmul` takes (`chosen`)
and the fastest one with `torch.mm`: the ratio of speeds in the geometric mean, and the share of products under 0.95. A loss is
the chosen kernel's time over that of the fastest, minus one. The least of several medians is biased low, so losses are
overstated.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks import cold, rows
from benchmarks.choice import Product
from minfer import ops
from minfer.functional import library
from minfer.functional.preferred import SHORT, mma_product_kernel, product_kernel
from minfer.ops import drawn

RESULTS = Path(__file__).resolve().parent / "results"
TIMES, TIMES_UNALIGNED = RESULTS / "products-nvidia-h200.parquet", RESULTS / "products-unaligned-nvidia-h200.parquet"
TIMES_OF_MMA = RESULTS / "products-mma-nvidia-h200.parquet"
MOST_ROWS = {"v15_gemv": 8, "v16_skinny": 128, "v17_one_wave": 128, "v20_any_columns": 64, "v21_row_pairs": 1024}
KERNELS_FOR_ANY = ("v15_gemv", "v17_one_wave", "v18_fitted", "v21_row_pairs")
KERNELS_FOR_LONG = (*KERNELS_FOR_ANY, "v14_stream_k", "v14_small")
KERNELS_FOR_SHORT = (*KERNELS_FOR_ANY, "v12_pingpong", "v14_small", "v16_skinny")
KERNELS_FOR_UNALIGNED = ("v18_fitted", "v20_any_columns", "v22_any_size")
KERNELS_OF_MMA = ("v07_tuned", "v08_split_k", "v15_gemv", "v16_skinny", "v23_mma_fitted")
KERNELS = {*KERNELS_FOR_LONG, *KERNELS_FOR_SHORT, *KERNELS_FOR_UNALIGNED}
SIZES = ("long", "short", "unaligned")  # kinds of products
MANY = 10**10  # from so many multiply-adds on, v22_any_size is far from the fastest, and is not timed
ROUNDS = 9
STARTS = (1, 9, 33, 65, 129, 257, 513, 1025, 2049, 8193)  # of the ranges of rows


def is_short(of: Product) -> bool:
    return min(of.n, of.k) < SHORT


def is_unaligned(of: Product) -> bool:
    return of.n % 8 != 0 or of.k % 8 != 0


def kernels_for(of: Product) -> list[str]:
    """The kernels that are timed: those that take a product, and are not far from the fastest there."""
    if is_unaligned(of):
        takes = {"v18_fitted": True, "v22_any_size": of.m * of.n * of.k < MANY}
        takes["v20_any_columns"] = of.layout == "NN" and of.m <= MOST_ROWS["v20_any_columns"]
        return [name for name in KERNELS_FOR_UNALIGNED if takes[name]]
    of_any_rows = KERNELS_FOR_SHORT if is_short(of) else KERNELS_FOR_LONG
    kernels = [name for name in of_any_rows if of.m <= MOST_ROWS.get(name, of.m)]
    if of.m <= 128:
        kernels = [name for name in kernels if name not in ("v12_pingpong", "v14_stream_k", "v21_row_pairs")]
    if not is_short(of) and not 64 < of.m <= 1024:
        kernels = [name for name in kernels if name != "v14_small"]
    return [name for name in kernels if name != "v15_gemv" or of.layout == "TN"]


def log_uniform(rng: random.Random, least: int, most: int) -> int:
    return int(math.exp(rng.uniform(math.log(least), math.log(most + 1))))


def products(seed: int, least: int, most: int, sizes: str) -> Iterator[Product]:
    """`least` and `most`: of the rows. Of `short` products n (45 %), k (35 %) or both are multiples of 8 under SHORT. Of
    `unaligned` ones n and k are log-uniform from 16 to 8192; half of the odd values are reduced by one; and products of which
    both are multiples of 8 are left out."""
    rng, models = random.Random(seed), drawn.models()
    while True:
        n, k = rng.choice(drawn.linear_layers(rng.choice(models))[:-1])
        if sizes == "short":
            sides = [max(8, log_uniform(rng, 8, SHORT - 1) // 8 * 8) for _ in range(2)]
            n, k = rng.choices([(sides[0], k), (n, sides[1]), (sides[0], sides[1])], [0.45, 0.35, 0.2])[0]
        if sizes == "unaligned":
            n, k = (
                side - side % 2 * rng.randrange(2) for side in (log_uniform(rng, 16, 8192), log_uniform(rng, 16, 8192))
            )
        product = Product(log_uniform(rng, least, most), n, k, "TN" if rng.random() < 2 / 3 else "NN")
        if is_unaligned(product) == (sizes == "unaligned") and (sizes != "long" or not is_short(product)):
            yield product


def kernels_of_mma(of: Product) -> list[str]:
    """The same of the kernels that use mma.sync."""
    kernels = [name for name in KERNELS_OF_MMA if of.m <= MOST_ROWS.get(name, of.m)]
    return [name for name in kernels if name != "v15_gemv" or of.layout == "TN"]


def time_product(
    of: Product, kernels: list[str], run: Mapping[str, Callable[..., object]], flushed: torch.Tensor
) -> list[dict[str, Any]]:
    device = flushed.device
    a = torch.randn(of.m, of.k, device=device).bfloat16()
    b = torch.randn(*((of.n, of.k) if of.layout == "TN" else (of.k, of.n)), device=device).bfloat16()
    right = b.t() if of.layout == "TN" else b
    c, expected = (torch.empty(of.m, of.n, device=device, dtype=torch.bfloat16) for _ in range(2))
    calls: dict[str, Callable[[], object]] = {"torch": lambda: torch.mm(a, right, out=expected)}
    calls["torch"]()
    allowed = 0.02 * float(expected.float().std()) + 2**-7 * float(expected.float().abs().max())
    for kernel in kernels:
        calls[kernel] = lambda call=run[kernel]: call(c, a, right, 1.0, 0.0)  # type: ignore[misc]
        c.fill_(math.nan)
        calls[kernel]()
        if not (error := float((c.float() - expected.float()).abs().max())) <= allowed:
            sys.exit(f"kernel_times.py: {kernel} at {of} is wrong: error {error:.3g}, allowed {allowed:.3g}")
    return [of._asdict() | {"kernel": kernel, "us": us} for kernel, us in cold.medians(calls, flushed, ROUNDS).items()]


def timed(path: Path = TIMES, seed: int | None = None) -> pd.DataFrame:
    """A line for each product, with the time of each kernel that was timed, else NaN; the mean where it was timed twice. With
    `seed`, only of the set that was drawn with it."""
    times = pd.read_parquet(path)
    times = times if seed is None else times[times.seed == seed]
    return times.pivot_table(index=[*Product._fields], columns="kernel", values="us").reset_index()


def with_choice(times: pd.DataFrame, choose: Callable[[int, int, int, bool], str] = product_kernel) -> pd.DataFrame:
    """The same with `chosen_us`, the time of the kernel that `choose` names, by default the one that `matmul` takes, and
    `fastest_us`. A product whose chosen kernel was not timed is left out."""
    kernels = [name for name in times.columns if name in {*KERNELS, *KERNELS_OF_MMA}]
    named = [
        choose(m, n, k, layout == "TN") for m, n, k, layout in zip(times.m, times.n, times.k, times.layout, strict=True)
    ]
    at = [kernels.index(name) if name in kernels else -1 for name in named]
    values = np.column_stack([times[kernels].to_numpy(), np.full(len(times), np.nan)])
    found = times.assign(chosen_us=values[np.arange(len(times)), at], fastest_us=times[kernels].min(axis=1))
    return found[found.chosen_us.notna()]


def committed() -> dict[str, pd.DataFrame]:
    """The committed times, by the kind of products."""
    times = with_choice(timed())
    is_long = times[["n", "k"]].min(axis=1) >= SHORT
    return dict(zip(SIZES, (times[is_long], times[~is_long], with_choice(timed(TIMES_UNALIGNED))), strict=True))


def committed_of_mma() -> pd.DataFrame:
    """Those of the kernels that use mma.sync, with the choice of GPUs before Hopper, from the run that timed v23_mma_fitted."""
    return with_choice(timed(TIMES_OF_MMA, 43), mma_product_kernel)


def lines(of: pd.DataFrame) -> Iterator[str]:
    yield f"{'rows':>11} {'products':>9} {'chosen':>8} {'fastest':>8} {'< 0.95':>7} {'mean loss':>10} {'most':>7}"
    for low, after in [*pairwise(STARTS), (1, STARTS[-1])]:
        some = of[(low <= of.m) & (of.m < after)]
        if some.empty:
            continue
        chosen, fastest = (some.torch / some[name] for name in ("chosen_us", "fastest_us"))
        loss = 100 * (some.chosen_us / some.fastest_us - 1)
        means = " ".join(f"{math.exp(np.log(x).mean()):8.3f}" for x in (chosen, fastest))
        under = f"{100 * (chosen < 0.95).mean():5.1f} %"
        yield f"{low:5}-{after - 1:<5} {len(some):9} {means} {under} {loss.mean():8.2f} % {loss.max():5.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--time", action="store_true", help="overwrite this GPU's times with those of new products")
    parser.add_argument("--seconds", type=float, default=60, help="how long to time")
    parser.add_argument("--seed", type=int, default=1, help="for drawing products")
    parser.add_argument(
        "--rows", type=int, nargs=2, default=(1, 8192), metavar=("LEAST", "MOST"), help="the range of M"
    )
    parser.add_argument("--sizes", choices=SIZES, default="long", help="what N and K are like, see above")
    parser.add_argument("--mma", action="store_true", help="time the kernels that use mma.sync")
    arguments = parser.parse_args()
    if arguments.mma and (not arguments.time or arguments.sizes != "long"):
        sys.exit("kernel_times.py: --mma goes with --time, and without --sizes")
    if not arguments.time:
        titles = f"N and K at least {SHORT}", f"N or K under {SHORT}", "N or K is no multiple of 8"
        for title, times in zip(titles, committed().values(), strict=True):
            print(title, *lines(times), sep="\n")
        print("Kernels with mma.sync, the choice for GPUs before Hopper", *lines(committed_of_mma()), sep="\n")
        return
    device = cold.find_hopper("kernel_times.py --time")
    least, most = arguments.rows
    if not 1 <= least <= most:
        sys.exit(f"kernel_times.py: --rows {least} {most} is no range: give at least 1, and the least first")
    registered = ops.get("hgemm").kernels
    run = {
        name: library.registered(registered[name], device) for name in (KERNELS_OF_MMA if arguments.mma else KERNELS)
    }
    choose_kernels = kernels_of_mma if arguments.mma else kernels_for
    flushed, found, begin = cold.to_flush(device), [], time.monotonic()
    for number, product in enumerate(products(arguments.seed, least, most, arguments.sizes)):
        if time.monotonic() - begin > arguments.seconds:
            break
        found += time_product(product, choose_kernels(product), run, flushed)
        if number % 200 == 0:
            print(f"{number} products after {time.monotonic() - begin:.0f} s", flush=True)
    kind = "-mma" if arguments.mma else "-unaligned" if arguments.sizes == "unaligned" else ""
    rows.write(f"products{kind}", found, device)
    if arguments.mma:
        times = pd.DataFrame(found).pivot_table(index=[*Product._fields], columns="kernel", values="us").reset_index()
        of_ours = [name for name in KERNELS_OF_MMA if name in times.columns]
        print(*lines(times.assign(chosen_us=times.v23_mma_fitted, fastest_us=times[of_ours].min(axis=1))), sep="\n")


if __name__ == "__main__":
    main()
