"""Times tiles of hgemm's v18_fitted (minfer/cuda/gemm/fitted.cuh) at products of public models, on an H100 or H200.

    uv run python benchmarks/tile_times.py --seconds 120       # writes benchmarks/results/, after a minute of compiling
    uv run python benchmarks/tile_times.py --fp8               # tiles of quant_gemm's v12_fp8_fitted, beside _scaled_mm

Each tile is compiled alone. Products have 33 to 4096 rows, in bfloat16 and both layouts; N and K are layers of the 24 models
of `minfer/ops/models.csv`. At each product `torch` and the tiles of `tiles_for` are timed cold (256 MiB are read before each
call), in a new order in each round. A time is the median of the rounds, in microseconds. `tiles_for` leaves out tiles of which
whole blocks would lie outside of the product, and those that `expected_us`, a rough model, puts over 1.6 times the fastest.
A tile whose result is wrong ends the program. With --fp8, products have 129 to 8192 rows, x and W are in e4m3 with a scale for
each row, and only the tiles of minfer/cuda/gemm/fp8_tiles.h are timed.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import cold, rows
from benchmarks.choice import Product, Tile, group_of
from benchmarks.fit_tiles import AT_ONCE
from minfer.build import toolchain
from minfer.ops import Kernel, drawn

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 7
SLOW, FEW = 1.6, 220


class Size(NamedTuple):
    rows: int
    cols: int
    sharing: int


SIZES = [
    *(Size(high, 64, 1) for high in range(64, 161, 8)),
    *(Size(high, 64, 2) for high in range(64, 161, 8)),
    *(Size(high, 64, 4) for high in range(64, 161, 8)),
    *(Size(high, 128, 1) for high in (64, 80, 96, 112, 128, 160)),
    *(Size(high, 128, 2) for high in range(64, 257, 8)),
    *(Size(high, 128, 4) for high in range(80, 161, 8)),
    *(Size(high, 192, 2) for high in range(64, 193, 8)),
    *(Size(high, 256, 2) for high in range(80, 161, 8)),
]
SOURCE = """#include <cstdio>
#include "cuda/gemm/fitted.cuh"
using namespace minfer;
extern "C" int run_tile(int tn, int parts, int beside, int m, int n, int k, void* c, const void* a, const void* b,
                        void* stream) {{
  using T = __nv_bfloat16;
  const int64_t ldb = tn ? k : n;
  const Gemm<T> g{{(T*)c, (const T*)a, (const T*)b, m, n, k, k, ldb, n, tn ? Layout::TN : Layout::NN, 1.0f, 0.0f,
                  (cudaStream_t)stream}};
  try {{
    tn ? launch_fitted<{0}, {1}, Layout::TN, false, AsItIs, {2}>(g, parts, beside)
       : launch_fitted<{0}, {1}, Layout::NN, false, AsItIs, {2}>(g, parts, beside);
    return cudaGetLastError();
  }} catch (const std::exception& error) {{
    std::fprintf(stderr, "%s\\n", error.what());
    return -1;
  }}
}}
"""
SOURCE_FP8 = """#include <cstdio>
#include "cuda/gemm/fitted.cuh"
#include "quant_gemm/fp8.cuh"
using namespace minfer;
extern "C" int run_tile(int parts, int beside, int m, int n, int k, void* y, const void* x, const void* w,
                        const void* x_scales, const void* w_scales, void* stream) {{
  using T = __nv_bfloat16;
  Product<Fp8Both, T> p{{(T*)y, (const uint8_t*)x, (const float*)x_scales}};
  p.weights.w = (const uint8_t*)w, p.weights.scales = (const float*)w_scales;
  p.m = m, p.n = n, p.k = k, p.stream = (cudaStream_t)stream;
  try {{
    launch_fitted<{0}, {1}, Layout::TN, false, ScaleOfColumns, {2}>(make_scaled(p), parts, beside);
    return cudaGetLastError();
  }} catch (const std::exception& error) {{
    std::fprintf(stderr, "%s\\n", error.what());
    return -1;
  }}
}}
"""
Run = Callable[..., int]


def sizes_of_fp8() -> list[Size]:
    """The tiles of v12_fp8_fitted."""
    text = (ROOT / "minfer" / "cuda" / "gemm" / "fp8_tiles.h").read_text()
    return [Size(*map(int, each)) for each in re.findall(r"F\((\d+), (\d+), (\d), ", text)]


def compile_tile(folder: Path, fp8: bool, size: Size) -> Run:
    """Raises CalledProcessError with what nvcc printed."""
    home, of_torch = toolchain.toolkit(), Path(torch.__file__).parent
    library = folder / f"{'fp8' if fp8 else 'tile'}_{size.rows}_{size.cols}_{size.sharing}.so"
    if library.exists():
        return ctypes.CDLL(str(library)).run_tile
    source = library.with_suffix(".cu")
    source.write_text((SOURCE_FP8 if fp8 else SOURCE).format(*size))
    flags = [*toolchain.flags_of(Kernel("hgemm", library.stem, "cuda", source), "sm_90a"), "-shared"]
    flags += ["-Xcompiler=-fPIC", "-cudart=none", f"-I{ROOT / 'minfer'}", f"-I{ROOT / 'minfer' / 'ops'}"]
    flags += [f"-I{of_torch / 'include'}", f"-L{of_torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10"]
    flags += [f"-L{home}/lib64", f"-L{home}/lib", f"-l:libcudart.so.{str(torch.version.cuda).split('.')[0]}"]
    subprocess.run([f"{home}/bin/nvcc", *flags, source, "-o", library], check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(library)).run_tile


def blocks_of(product: Product, tile: Tile) -> tuple[int, int]:
    """How many groups of blocks a product has, and their size with all parts of k."""
    across, down = group_of(tile.sharing, tile.beside)
    groups = math.ceil(product.m / (tile.rows * down)) * math.ceil(product.n / (tile.cols * across))
    return groups, tile.sharing * tile.parts


def expected_us(product: Product, tile: Tile) -> float:
    """A rough time, to leave out tiles that are slow. For fp8, k is half of the product's."""
    groups, size = blocks_of(product, tile)
    step = ((tile.rows * tile.cols / 32) ** 4 + ((tile.rows + tile.cols) * 128 / 90) ** 4) ** 0.25 + 47
    body = math.ceil(groups / AT_ONCE[size]) * (math.ceil(product.k / 64 / tile.parts) * step + 1000) / 1755
    memory = 2 * (product.m * product.k + product.n * product.k + product.m * product.n) / 3.5e6 + 6
    return 3.6 + (body**3 + memory**3) ** (1 / 3)


def tiles_for(product: Product, sizes: Iterable[Size]) -> list[Tile]:
    """The tiles, and divisions of k, that are timed. For fp8, k is half of the product's."""
    found = {}
    for rows_, cols, sharing in sizes:
        if rows_ > 64 and rows_ >= 2 * product.m:
            continue
        for beside in (False, True)[: 1 if sharing == 1 else 2]:
            for parts in (1, 2, 4):
                tile = Tile(rows_, cols, sharing, parts, beside)
                groups, size = blocks_of(product, tile)
                if size not in AT_ONCE or (parts > 1 and (groups > AT_ONCE[size] or product.k < parts * 256)):
                    continue
                if group_of(sharing, beside)[1] > 1 and product.m <= rows_:
                    continue  # some blocks would have nothing to do
                found[tile] = expected_us(product, tile)
    least = min(found.values())
    return [tile for tile, us in found.items() if us <= SLOW * least]


def products(seed: int, small: bool, fp8: bool) -> Iterator[Product]:
    """small: only those with at most `FEW` tiles of 160 x 64."""
    source, models = random.Random(seed), drawn.models()
    least, most = (129, 8192) if fp8 else (33, 4096)
    while True:
        n, k = source.choice(drawn.linear_layers(source.choice(models))[:-1])
        if min(n, k) >= 512 and n % 8 == k % (16 if fp8 else 8) == 0:
            m = round(math.exp(source.uniform(math.log(least), math.log(most))))
            layout = "TN" if fp8 else source.choice(["TN", "NN"])
            if not small or math.ceil(m / 160) * math.ceil(n / 64) <= FEW:
                yield Product(m, n, k, layout)


def operands(product: Product, device: torch.device) -> tuple[list[torch.Tensor], Callable[[], torch.Tensor]]:
    """c, a and b, and what computes the product with PyTorch."""
    m, n, k, layout = product
    a = torch.randn(m, k, device=device).to(torch.bfloat16)
    b = torch.randn(*((n, k) if layout == "TN" else (k, n)), device=device).to(torch.bfloat16)
    c, right = torch.empty(m, n, device=device, dtype=torch.bfloat16), b.t() if layout == "TN" else b
    expected = torch.empty_like(c)
    return [c, a, b], lambda: torch.mm(a, right, out=expected)


def operands_of_fp8(product: Product, device: torch.device) -> tuple[list[torch.Tensor], Callable[[], torch.Tensor]]:
    """y, x, W and the scales of their rows, and what computes the product with PyTorch."""
    m, n, k, _ = product
    x, w = (torch.randn(rows_, k, device=device).to(torch.float8_e4m3fn) for rows_ in (m, n))
    of_x, of_w = (torch.rand(rows_, device=device) + 0.5 for rows_ in (m, n))
    y = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    return [y, x, w, of_x, of_w], lambda: torch._scaled_mm(
        x, w.t(), scale_a=of_x[:, None], scale_b=of_w[None], out_dtype=torch.bfloat16
    )


def time_product(product: Product, runs: dict[Size, Run], fp8: bool, flushed: torch.Tensor) -> list[dict[str, Any]]:
    tensors, of_torch = (operands_of_fp8 if fp8 else operands)(product, flushed.device)
    expected, c = of_torch(), tensors[0]
    calls: dict[Tile | None, Callable[[], object]] = {None: of_torch}
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in tensors]
    layout = [] if fp8 else [int(product.layout == "TN")]
    for of in tiles_for(product._replace(k=product.k // 2) if fp8 else product, runs):
        calls[of] = partial(runs[Size(*of[:3])], *layout, of.parts, int(of.beside), *product[:3], *pointers, stream)
    allowed = 0.02 * float(expected.float().std()) + 2**-7 * float(expected.float().abs().max())
    for tile, call in calls.items():
        if tile is None:
            continue
        c.fill_(math.nan)
        status = call()
        error = float((c.float() - expected.float()).abs().max())
        if status != 0 or not error <= allowed:
            sys.exit(f"tile_times.py: {tile} at {product} is wrong: status {status}, error {error}")
    about = product._asdict()
    return [
        {**about, "kernel": "torch" if tile is None else "tile", **(tile._asdict() if tile else {}), "us": us}
        for tile, us in cold.medians(calls, flushed, ROUNDS).items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seconds", type=float, default=120, help="how long to time, compiling apart")
    parser.add_argument("--seed", type=int, default=100, help="of the products")
    parser.add_argument(
        "--small", action="store_true", help="only products with few tiles, where narrow tiles are fast"
    )
    parser.add_argument("--fp8", action="store_true", help="the tiles of quant_gemm's v12_fp8_fitted")
    parser.add_argument("--folder", type=Path, help="keeps the compiled tiles, and uses those of an earlier run")
    arguments = parser.parse_args()
    device = cold.find_hopper("tile_times.py")
    if toolchain.toolkit() is None:
        sys.exit("tile_times.py needs a CUDA toolkit that fits this PyTorch, and found none; set CUDA_HOME to one")
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(os.cpu_count()) as pool:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            sizes = sizes_of_fp8() if arguments.fp8 else SIZES
            runs = dict(zip(sizes, pool.map(partial(compile_tile, folder, arguments.fp8), sizes), strict=True))
        except subprocess.CalledProcessError as error:
            sys.exit(f"tile_times.py: nvcc failed: {error.stderr}")
        flushed, found, begin = cold.to_flush(device), [], time.monotonic()
        for number, product in enumerate(products(arguments.seed, arguments.small, arguments.fp8)):
            if time.monotonic() - begin > arguments.seconds:
                break
            found += time_product(product, runs, arguments.fp8, flushed)
            if number % 50 == 0:
                print(f"{number} products after {time.monotonic() - begin:.0f} s", flush=True)
    if found:
        rows.write("tiles-fp8" if arguments.fp8 else "tiles", found, device)


if __name__ == "__main__":
    main()
