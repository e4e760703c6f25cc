"""Lists the kernels that cuBLAS takes for products of 17 to 1024 rows in bfloat16, TN. Their names state the tile, the stages
and the cluster: `nvjet_sm90_tst_128x96_64x7_4x1_v_bz_TNT` has tiles of 128 columns and 96 rows, 7 stages of 64 values of k, and
clusters of 4 x 1 blocks.

    uv run python benchmarks/cublas_tiles.py       # half a minute on a GPU; writes benchmarks/results/

The times are of the profiler, without the launch, each after 200 MiB were written: the median of 5 calls. A product that cuBLAS
computes in several kernels has a row for each.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import rows
from minfer.bench.device import pick

# Sizes at which `matmul` was slower than cuBLAS: drawn problems of docs/hgemm.md, and others of tuning runs.
SLOWEST = [
    (465, 3072, 8192), (400, 2048, 4096), (33, 2560, 9728), (99, 3072, 3072), (29, 1024, 3072), (563, 2048, 2048),
    (549, 5120, 2048), (76, 3072, 2048), (260, 4096, 14336), (315, 2048, 4096), (319, 2048, 4096), (256, 3072, 23040),
    (147, 6144, 4096), (281, 3072, 8192),
]  # fmt: skip
# n and k of layers of public models. `main` draws m for these.
LAYERS = [
    (2048, 2048), (2048, 4096), (4096, 4096), (3072, 3072), (3072, 8192), (5120, 2048), (5120, 5120), (4096, 14336),
    (6144, 4096), (2560, 9728), (28672, 4096), (7168, 2048),
]  # fmt: skip
CALLS = 5


def kernels(m: int, n: int, k: int, device: torch.device, flushed: torch.Tensor) -> list[dict[str, Any]]:
    """The kernels of one product in bfloat16, TN, and their times."""
    a, b = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    for _ in range(2):
        a @ b.t()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(CALLS):
            flushed.zero_()
            a @ b.t()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in found.events():
        if not any(word in event.name.lower() for word in ("fill", "memset")):
            times.setdefault(event.name, []).append(event.device_time)
    return [
        {"m": m, "n": n, "k": k, "kernel": name, "us": sorted(us)[len(us) // 2]}
        for name, us in times.items()
        if len(us) >= CALLS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--drawn", type=int, default=90, help="products of 17 to 1024 rows beside the slowest ones")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("cublas_tiles.py needs a CUDA GPU, and this machine has none")
    device = pick("cuda")
    drawn = random.Random(5)
    problems = SLOWEST + [(drawn.randrange(17, 1025), *drawn.choice(LAYERS)) for _ in range(arguments.drawn)]
    flushed = torch.empty(200 << 20, dtype=torch.uint8, device=device)
    rows.write("cublas-tiles", [row for problem in problems for row in kernels(*problem, device, flushed)], device)


if __name__ == "__main__":
    main()
