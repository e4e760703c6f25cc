"""When the warps of three kernels are in which part of their work. Needs a Hopper GPU.

    uv run python benchmarks/timelines.py      # about three minutes; writes benchmarks/results/timelines-<device>.parquet

In v05_pingpong of prefill_attention, v03_packed of decode_attention and v14_stream_k of hgemm, comments that begin with `//@`
and end with `;` mark scopes. Here each kernel is compiled a second time with these comments as code, so that its own machine
code and its fingerprint know nothing of them. A row is a scope of a warp, in nanoseconds since the first block of the launch
began: a block's start is by the GPU's clock, all else by the cycles of its multiprocessor. What is recorded is the last of many
calls, whose operands come from memory.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
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

BLOCKS, TRACKS, SLOTS = 256, 16, 1024  # at most, in a buffer of stamps
MARK = re.compile(r"//@ (?=.*;$)", re.MULTILINE)
BEFORE = """\
#include "cuda/counters.cuh"
#include "cuda/scopes.cuh"
namespace minfer {
enum TimelineScope { %s, kScopes };
struct Timeline { ScopeBuffer scopes; };
__device__ Timeline timeline;
static __global__ void move_stamps(ScopeBuffer from, int64_t* to, int words) {
  if (blockIdx.x + threadIdx.x == 0) timeline.scopes = from;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x)
    to[i] = from.data[i], from.data[i] = 0;
}
}  // namespace minfer
"""
AFTER = """
static void %s_stamps(minfer::Tensor to) {
  static int64_t* const data = reinterpret_cast<int64_t*>(minfer::zeroed_words(2 * to.numel()));
  const minfer::ScopeBuffer from{data, int(to.size(0)), int(to.size(1)), int(to.size(2))};
  minfer::move_stamps<<<64, 256, 0, minfer::stream_of(to)>>>(from, minfer::output<int64_t>(to, "stamps"), int(to.numel()));
}
MINFER_OP(%s_stamps, "(Tensor(a!) to) -> ()")
"""


@dataclass(frozen=True)
class Timeline:
    """A case, the scopes that its kernel marks, and the blocks, of so many, and warps that are kept. A mark of scope s plus
    `kScopes` times n is of the tile n."""

    op: str
    kernel: str
    shape: Mapping[str, int]
    scopes: tuple[str, ...]
    blocks: Callable[[int], Collection[int]]
    warps: tuple[int, ...] = (0,)
    params: Mapping[str, str] | None = None

    @property
    def case(self) -> Case:
        return ops.get(self.op).case(self.kernel, "bfloat16", self.shape, self.params)


HEADS = {"heads": 32, "kv_heads": 8, "head_dim": 128}
TIMELINES = (
    Timeline(
        "prefill_attention", "v05_pingpong", {"batch": 1, "seq_q": 2048, "seq_kv": 2048, **HEADS},
        ("turn", "scores", "softmax", "out", "store"), lambda _: [0], warps=(0, 4), params={"call": "full"},
    ),
    Timeline(
        "decode_attention", "v03_packed", {"batch": 1, "new": 1, "longest": 8192, **HEADS},
        ("keys", "merge", "combine"), lambda blocks: range(blocks // HEADS["kv_heads"]),  # those of one head
    ),
    Timeline(
        "hgemm", "v14_stream_k", {"m": 2560, "n": 2560, "k": 4096},
        ("whole", "help", "give", "own", "wait", "add", "store"), lambda blocks: range(0, blocks, 2),  # one of a cluster
    ),
)  # fmt: skip


def with_scopes(timeline: Timeline, folder: Path) -> Kernel:
    """The kernel with its scopes as code, written into a folder. Its second op, `<symbol>_stamps`, moves the stamps into a
    tensor; the first call makes room for as much."""
    kernel = ops.get(timeline.op).kernels[timeline.kernel]
    named = replace(kernel, name=f"{kernel.name}_scopes", source=folder / f"{kernel.name}_scopes.cu")
    text = MARK.sub("", kernel.source.read_text()).replace(kernel.symbol, named.symbol)
    enumerators = ", ".join(f"k{scope.capitalize()}" for scope in timeline.scopes)
    named.source.write_text(BEFORE % enumerators + text + AFTER % (named.symbol, named.symbol))
    return named


def rows_of(timeline: Timeline, stamps: Any, mhz: float) -> list[dict[str, Any]]:
    """A row for each scope that is kept of what a launch stamped."""
    trace, case = stamped(stamps, timeline.scopes), timeline.case
    about = {"op": case.op, "kernel": case.kernel, "dtype": case.dtype, "sm_mhz": mhz}
    about |= {"shape": json.dumps(dict(case.shape)), "params": json.dumps(dict(case.params))}
    kept = timeline.blocks(len(trace.starts))
    return [
        about | {"block": each.block, "warp": each.warp, "scope": each.name, "tile": each.tile}
        | {name: trace.starts[each.block] + 1e3 * cycle / mhz for name, cycle in (("begin", each.begin), ("end", each.end))}
        for each in trace.scopes
        if each.block in kept and each.warp in timeline.warps
    ]  # fmt: skip


def record(timeline: Timeline, folder: Path, device: torch.device) -> list[dict[str, Any]]:
    """The rows of the last of many calls. Raises RuntimeError if the kernel computes something else with its scopes."""
    op, case, kernel = ops.get(timeline.op), timeline.case, with_scopes(timeline, folder)
    operands = Operands(op, case, 0, "normal", device)
    out = next(iter(operands.named("out").values()))
    build.function(op.kernels[timeline.kernel], devices.arch(device))(*operands.arguments, **op.call(case))
    right = out.clone()
    call = build.function(kernel, devices.arch(device))
    stamps = getattr(torch.ops.minfer, f"{kernel.symbol}_stamps")
    unused, first, last = (torch.zeros(BLOCKS, TRACKS, SLOTS, 3, dtype=torch.int64, device=device) for _ in range(3))
    others = torch.zeros(1 << 28, dtype=torch.uint8, device=device)  # more than an L2 has
    stamps(unused)
    for launch in range(LAUNCHES + 2):
        if launch > LAUNCHES:
            stamps(unused)
            others.sum()
        call(*operands.arguments, **op.call(case))
        if launch in (1, LAUNCHES + 1):  # the first launch of all loads the kernel
            stamps(first if launch == 1 else last)
    if not torch.allclose(out.float(), right.float(), rtol=2e-2, atol=2e-2):
        raise RuntimeError(f"{timeline.kernel} with scopes computes something else")
    launched = last.cpu().numpy()
    rows = rows_of(timeline, launched, megahertz(first.cpu().numpy(), launched))
    if missing := set(timeline.scopes) - {row["scope"] for row in rows}:
        raise RuntimeError(
            f"{timeline.kernel} has no scope {min(missing)} on this GPU: choose another shape in TIMELINES"
        )
    return rows


def main() -> int:
    if why := devices.no_gpu():
        sys.exit(f"timelines.py needs a Hopper GPU: {why}")
    device = devices.pick("cuda")
    if devices.arch(device) != "sm_90a":
        sys.exit(f"timelines.py needs a Hopper GPU (sm_90a), and this one is {devices.arch(device)}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="minfer-timelines-") as folder:
        for timeline in TIMELINES:
            found = record(timeline, Path(folder), device)
            print(f"{timeline.kernel}: {len(found)} scopes")
            rows += found
    write("timelines", rows, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
