"""Computes how much slower the tile that v18_fitted chooses is than the fastest tile. Its cold times on an H200 are in
`benchmarks/results/tiles-nvidia-h200.parquet`, from `tile_times.py`: at 889 products, which were drawn from the layers of
24 models, in bfloat16, TN and NN. 85 kinds of tiles were timed at 274 products of any size, and 58 kinds, most of 64
columns, at 615 products that have at most 220 tiles of 160 x 64. The constants of the model
(minfer/cuda/gemm/fitted_choice.h) were fitted to other products. `tiles-fp8-nvidia-h200.parquet` has the times
of v12_fp8_fitted's 26 tiles at 465 products with fp8, from `tile_times.py --fp8`.

    uv run python benchmarks/choice.py                                                  # needs no GPU
    uv run --with nvidia-matmul-heuristics==0.1.0.27 python benchmarks/choice.py        # NVIDIA's model beside it

The loss of a choice is its time over the fastest tile's, minus one. Each time is the median of seven runs, in a new order of
the tiles each time. The least of up to 310 such medians is biased low, so losses are overstated. A product whose chosen tile
was not timed is left out. NVIDIA's model rates only tiles whose sides are multiples of 64. The last lines compare its choice
with the fastest of these tiles.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from minfer.build import host
from minfer.build.errors import BuildError
from minfer.ops import Kernel

HERE = Path(__file__).resolve().parent
TIMES, TIMES_FP8 = (HERE / "results" / f"{name}-nvidia-h200.parquet" for name in ("tiles", "tiles-fp8"))
SOURCE = Kernel("hgemm", "choice", "cpp", HERE / "choice.cpp")
RANGES = ((33, 128), (129, 256), (257, 512), (513, 1024), (1025, 4096), (4097, 8192), (33, 8192))  # of m


class Tile(NamedTuple):
    rows: int
    cols: int
    sharing: int  # blocks that share an operand
    parts: int  # of k
    beside: bool  # whether the blocks of a group are side by side, and so share rows of A


def group_of(sharing: int, beside: bool) -> tuple[int, int]:
    """How many of the blocks are side by side, and how many below each other, as the header's function of this name."""
    return (sharing, 1) if beside else (2, 2) if sharing == 4 else (1, sharing)


class Product(NamedTuple):
    m: int
    n: int
    k: int
    layout: str


Times = dict[Product, dict[Tile, float]]


def timed(path: Path = TIMES) -> Times:
    """The times of the tiles in microseconds, for each product; the median where a tile was timed twice."""
    rows = pd.read_parquet(path).query("kernel == 'tile'").astype(dict.fromkeys(Tile._fields[:4], "int64"))
    medians = rows.groupby([*Product._fields, *Tile._fields]).us.median().reset_index()
    found: Times = {}
    for m, n, k, layout, high, wide, sharing, parts, beside, us in medians.itertuples(index=False):
        found.setdefault(Product(m, n, k, layout), {})[Tile(high, wide, sharing, parts, bool(beside))] = us
    return found


def chosen(fp8: bool = False) -> Callable[[Product], Tile]:
    """What v18_fitted or, for fp8, v12_fp8_fitted takes. Raises BuildError without a C++ compiler."""
    library = host.load(SOURCE)

    def choose(of: Product) -> Tile:
        tile = (ctypes.c_int * 5)()
        library.minfer_choose_tile(of.m, of.n, of.k, int(of.layout == "TN"), int(fp8), tile)
        rows, cols, sharing, parts, beside = tile
        return Tile(rows, cols, sharing, parts, bool(beside))

    return choose


def losses(times: Times, choose: Callable[[Product], Tile | None]) -> dict[Product, float]:
    """The losses at the products at which the chosen tile was timed."""
    return {
        product: of[tile] / min(of.values()) - 1
        for product, of in times.items()
        if (tile := choose(product)) is not None and tile in of
    }


def estimates(times: Times) -> dict[Product, dict[Tile, float]]:
    """The times that NVIDIA's model expects, of the tiles that it knows."""
    nv: Any = importlib.import_module("nvMatmulHeuristics")
    model = nv.NvMatmulHeuristicsInterface(nv.NvMatmulHeuristicsTarget.CUTLASS3, "TST")  # bfloat16, sums in float32
    gpu = model.createHardwareDescriptor()
    model.setHardwarePredefinedGpu(gpu, nv.NvMatmulHeuristicsNvidiaGpu.H200_SXM)
    layouts = {
        "TN": nv.NvMatmulHeuristicsMatmulLayout.TN_ROW_MAJOR,
        "NN": nv.NvMatmulHeuristicsMatmulLayout.NN_ROW_MAJOR,
    }
    for layout in layouts.values():
        model.loadInternalDiscoverySet(layout, gpu)

    def expected(product: Product, tile: Tile) -> float:
        problem = model.makeNvMatmulHeuristicsProblem(product.m, product.n, product.k, layouts[product.layout])
        stages = max(2, min(12, (220 << 10) // (128 * (tile.rows + tile.cols))))
        of = model.nvmmhKernelConfiguration(splitK=tile.parts, loadStages=stages, gridSwizzle=1)
        of.cta[:], of.warp[:] = (tile.rows, tile.cols, 64), (tile.rows, tile.cols, 64)
        of.instr[:] = (64, tile.cols, 16)
        of.cluster[:] = (1, tile.sharing) if tile.beside else (tile.sharing, 1)
        return model.nvMatmulHeuristicsEstimateRuntime(
            model.handle, b"TST", ctypes.c_int(model.target), ctypes.byref(problem), ctypes.byref(of), gpu
        )

    found = {
        product: {tile: us for tile in of if tile.sharing <= 2 and (us := expected(product, tile)) > 0}
        for product, of in times.items()
    }
    model.handle = None  # else its __del__ ends the process with a signal (0.1.0.27)
    return found


def lines(name: str, of: dict[Product, float]) -> Iterator[str]:
    for low, high in RANGES:
        some = pd.Series([loss for product, loss in of.items() if low <= product.m <= high])
        if some.empty:
            continue
        figures = " ".join(f"{100 * x:7.1f}" for x in (some.mean(), some.median(), some.quantile(0.95), some.max()))
        yield f"{name:34} {low:5}-{high:<5} {len(some):8} {figures}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.parse_args()
    times = timed()
    print(f"{'loss in %':34} {'rows':>11} {'products':>8} {'mean':>7} {'median':>7} {'95 %':>7} {'most':>7}")
    try:
        print(*lines("v18_fitted's model", losses(times, chosen())), sep="\n")
        print(*lines("v12_fp8_fitted's", losses(timed(TIMES_FP8), chosen(fp8=True))), sep="\n")
    except BuildError as error:
        sys.exit(f"choice.py: {error}")
    if importlib.util.find_spec("nvMatmulHeuristics") is None:
        return
    known = {product: of for product, of in estimates(times).items() if of}
    choose = {product: min(of, key=lambda tile: of[tile]) for product, of in known.items()}.get
    print(*lines("nvidia-matmul-heuristics", losses(times, choose)), sep="\n")
    narrowed = {product: {tile: times[product][tile] for tile in of} for product, of in known.items()}
    print(*lines("  against the tiles that it knows", losses(narrowed, choose)), sep="\n")


if __name__ == "__main__":
    main()
