"""When the warps of three kernels are in which part of their work. Needs a Hopper GPU.

    uv run python benchmarks/timelines.py      # about two minutes; writes benchmarks/results/timelines-<device>.parquet

Comments of these kernels that begin with `//@` and end with `;` mark scopes; here they are compiled as code. A row is a scope
of a warp in the last of many launches, whose operands come from memory, in nanoseconds since its first block began.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import write
from benchmarks.scopes import LAUNCHES, megahertz, stamped
from minfer import build, ops
from minfer.bench import device as devices
from minfer.bench.operands import Operands
from minfer.ops import Case, Kernel

BEFORE = """\
#include "cuda/counters.cuh"
#include "cuda/scopes.cuh"
namespace minfer {
enum TimelineScope { %s, kScopes };
__device__ struct Timeline { ScopeBuffer scopes; } timeline;
static __global__ void move_stamps(ScopeBuffer from, int64_t* to, int words) {
  if (threadIdx.x == 0) timeline.scopes = from;
  for (int i = threadIdx.x; i < words; i += blockDim.x) to[i] = from.data[i], from.data[i] = 0;
}
}  // namespace minfer
"""
AFTER = """
static void %s_stamps(minfer::Tensor to) {
  static int64_t* const data = reinterpret_cast<int64_t*>(minfer::zeroed_words(2 * to.numel()));
  const minfer::ScopeBuffer from{data, int(to.size(0)), int(to.size(1)), int(to.size(2))};
  minfer::move_stamps<<<1, 256, 0, minfer::stream_of(to)>>>(from, minfer::output<int64_t>(to, "stamps"), int(to.numel()));
}
MINFER_OP(%s_stamps, "(Tensor(a!) to) -> ()")
"""


@dataclass(frozen=True)
class Timeline:
    """A case, the scopes that its kernel marks, and a filter: `keep(block, warp, blocks)` says whether to record that warp."""

    case: Case
    scopes: tuple[str, ...]  # the mark s + kScopes * n means scope s of tile n
    keep: Callable[[int, int, int], bool]


def case(op: str, kernel: str, sizes: str, **params: str) -> Case:
    shape = dict(zip(ops.get(op).axes, map(int, sizes.split()), strict=False))  # the last axes may have defaults
    return ops.get(op).case(kernel, "bfloat16", shape, params)


TIMELINES = (
    Timeline(case("prefill_attention", "v05_pingpong", "1 2048 2048 32 8 128", call="full"),
             ("turn", "scores", "softmax", "out"), lambda block, warp, _: block == 0 and warp in (0, 4)),
    Timeline(case("decode_attention", "v03_packed", "1 1 8192 32 8 128"),
             ("keys", "merge", "combine"), lambda block, warp, blocks: 8 * block < blocks and warp == 0),  # one head
    Timeline(case("hgemm", "v14_stream_k", "2560 2560 4096"),
             ("whole", "help", "give", "own", "wait", "add"), lambda block, warp, _: block % 2 == warp == 0),  # of a cluster
)  # fmt: skip


def with_scopes(timeline: Timeline, folder: Path) -> Kernel:
    """The kernel with its scopes as code, written into a folder. Its second op, `<symbol>_stamps`, moves the stamps into a
    tensor; the first call makes room for as much."""
    kernel = ops.get(timeline.case.op).kernels[timeline.case.kernel]
    named = replace(kernel, name=f"{kernel.name}_scopes", source=folder / f"{kernel.name}_scopes.cu")
    text = re.sub(r"(?m)//@ (?=.*;$)", "", kernel.source.read_text()).replace(kernel.symbol, named.symbol)
    enumerators = ", ".join(f"k{scope.capitalize()}" for scope in timeline.scopes)
    named.source.write_text(BEFORE % enumerators + text + AFTER % (named.symbol, named.symbol))
    return named


def rows_of(timeline: Timeline, stamps: Any, mhz: float) -> list[dict[str, Any]]:
    """A row for each scope that is kept of what a launch stamped."""
    trace, case = stamped(stamps, timeline.scopes), timeline.case
    about = {"op": case.op, "kernel": case.kernel, "dtype": case.dtype, "shape": case.shape_name, "sm_mhz": mhz}
    kept = [each for each in trace.scopes if timeline.keep(each.block, each.warp, len(trace.starts))]
    rows = [about | {"block": each.block, "warp": each.warp, "scope": each.name, "tile": each.tile} for each in kept]
    for row, each in zip(rows, kept, strict=True):
        row["begin"], row["end"] = (trace.starts[each.block] + 1e3 * at / mhz for at in (each.begin, each.end))
    return rows


def record(timeline: Timeline, kernel: Kernel, device: torch.device) -> list[dict[str, Any]]:
    """The rows of the last of many calls of the kernel with scopes. Raises RuntimeError if it computes something else."""
    case, arch = timeline.case, devices.arch(device)
    op = ops.get(case.op)
    operands, function = Operands(op, case, 0, "normal", device), build.function(kernel, arch)
    build.function(op.kernels[case.kernel], arch)(*operands.arguments, **op.call(case))
    out = next(iter(operands.named("out").values()))
    right = out.clone()
    stamps = getattr(torch.ops.minfer, f"{kernel.symbol}_stamps")
    first, last = (torch.empty(256, 16, 1024, 3, dtype=torch.int64, device=device) for _ in range(2))
    stamps(first)
    for launch in range(LAUNCHES):
        function(*operands.arguments, **op.call(case))
        if launch == 1:  # the first one loads the kernel
            stamps(first)
    stamps(last)
    torch.zeros(1 << 28, dtype=torch.uint8, device=device).sum()  # more than an L2 has
    function(*operands.arguments, **op.call(case))
    stamps(last)
    if not torch.allclose(out.float(), right.float(), rtol=2e-2, atol=2e-2):
        raise RuntimeError(f"{case.kernel} with scopes computes something else")
    rows = rows_of(timeline, last.cpu().numpy(), megahertz(first.cpu().numpy(), last.cpu().numpy()))
    if missing := set(timeline.scopes) - {row["scope"] for row in rows}:
        raise RuntimeError(f"{case.kernel} has no scope {min(missing)} on this GPU: choose another shape in TIMELINES")
    return rows


def main() -> None:
    device = devices.pick("cuda")
    if why := devices.no_gpu() or (devices.arch(device) != "sm_90a" and f"this one is {devices.arch(device)}"):
        sys.exit(f"timelines.py needs a Hopper GPU (sm_90a): {why}")
    with tempfile.TemporaryDirectory(prefix="minfer-timelines-") as folder:
        kernels = [with_scopes(timeline, Path(folder)) for timeline in TIMELINES]
        plain = [ops.get(timeline.case.op).kernels[timeline.case.kernel] for timeline in TIMELINES]
        with ThreadPoolExecutor() as pool:
            for _ in pool.map(lambda kernel: build.function(kernel, devices.arch(device)), [*kernels, *plain]):
                pass
        rows = [row for pair in zip(TIMELINES, kernels, strict=True) for row in record(*pair, device)]
        write("timelines", rows, device)


if __name__ == "__main__":
    main()
