"""What the warps of gemm_bias_relu do when: Chrome traces of a Triton and of a CUDA kernel's inside. Needs a Hopper GPU.

    uv run python benchmarks/scopes.py       # about a minute; writes results/<device>/scopes/

At M, N, K = 1024, 256, 512 in float16 it keeps

    <kernel>.trace.json.gz   what each warp did when (ui.perfetto.dev), of triton_autotuned and v03_one_wave
    <case>.hatchet, .txt     the kernels of a call with FLOPs and bytes, as `proton-viewer -m time/ms,tflop/s` prints them

Both traces are of a call whose operands are in the L2 cache. Triton's is by the scopes that the kernel marks; v03_one_wave is
compiled a second time, with its scopes (`minfer/cuda/scopes.cuh`). A block's start is by the GPU's clock of nanoseconds, all
else by the cycles of its multiprocessor.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minfer import build, ops
from minfer.bench import device as devices
from minfer.ops import Kernel
from minfer.profilers import Job, proton
from minfer.profilers.calls import prepare_call
from minfer.rows import store
from minfer.run.start import commit_of_sources

ROOT = Path(__file__).resolve().parents[1]
OP, SHAPE, DTYPE = "gemm_bias_relu", {"m": 1024, "n": 256, "k": 512}, "float16"
TRITON, CUDA, TREES = "triton_autotuned", "v03_one_wave", ("torch_cublaslt", "v03_one_wave", "triton_autotuned")
NAMES = ("issue", "load", "product", "epilogue")  # OneWaveScope of cuda/gemm/one_wave.cuh, in its order
BLOCKS, TRACKS, SLOTS = 512, 9, 2 + 2 * 64  # at most, in a buffer of stamps; a warp has 2 in a step
SHOWN = ("device_us", "tflops", "gbps")
LAUNCHES = 500  # between the first and the last, whose stamps together give the frequency


@dataclass(frozen=True)
class Scope:
    """What a warp did from one cycle to another, counted from the first stamp of its block."""

    name: str
    block: int
    warp: int
    begin: int
    end: int
    tile: int = 0  # where the kernel says it


@dataclass(frozen=True)
class Trace:
    """The scopes of one launch, and when each block began, in nanoseconds from the first of them."""

    scopes: list[Scope]
    starts: dict[int, int]


def stamped(buffer: np.ndarray[Any, Any], names: Sequence[str] = NAMES) -> Trace:
    """What a kernel stamped into (blocks, tracks, slots, 3) of int64, as `minfer/cuda/scopes.cuh` says."""
    began = buffer[:, :, 0, :]
    used = {block: np.flatnonzero(began[block, :, 1]) for block in np.flatnonzero(began[:, :, 1].any(axis=1))}
    first = min((int(began[block, tracks, 0].min()) for block, tracks in used.items()), default=0)
    scopes, starts = [], {}
    for block, tracks in used.items():
        zero = int(began[block, tracks, 1].min())
        starts[int(block)] = int(began[block, tracks, 0].min()) - first
        for track in tracks:
            for scope, begin, end in buffer[block, track, 1:].tolist():
                if scope:
                    tile, name = divmod(scope - 1, len(names))  # the scopes of a tile follow those of the one before
                    scopes.append(Scope(names[name], int(block), int(track), begin - zero, end - zero, tile))
    return Trace(scopes, starts)


def megahertz(first: np.ndarray[Any, Any], last: np.ndarray[Any, Any]) -> float:
    """The frequency of the multiprocessors between two launches, from when the first warps of their blocks began."""
    clocks: list[dict[int, tuple[int, int]]] = []
    for buffer in (first, last):
        began = buffer[:, 0, 0, :].tolist()
        clocks.append({number: (ns, cycles) for ns, cycles, number in began if cycles})
    both = clocks[0].keys() & clocks[1].keys()
    pairs = [(clocks[0][number], clocks[1][number]) for number in both]
    return statistics.median(1e3 * (after[1] - before[1]) / (after[0] - before[0]) for before, after in pairs)


def of_proton(events: Iterable[dict[str, Any]], launches: int) -> Trace:
    """The last of some launches of one kernel in a trace of Triton's profiler: nanoseconds where a block begins, and in it a
    nanosecond for each cycle, all in microseconds. Raises ValueError for a trace of another form."""
    warps: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        cta, lane = re.search(r"CTA(\d+)$", str(event.get("pid"))), re.match(r"warp (\d+)", str(event.get("tid")))
        if event.get("ph") != "X" or not cta or not lane:
            raise ValueError(f"not a scope of a warp: {event}")
        warps.setdefault((int(cta[1]), int(lane[1])), []).append(event)
    kept = {}
    for place, found in warps.items():
        if len(found) % launches:
            raise ValueError(f"{len(found)} scopes of {launches} launches in block {place[0]}, warp {place[1]}")
        kept[place] = sorted(found, key=lambda event: event["ts"])[-len(found) // launches :]
    starts: dict[int, float] = {}
    for (block, _), found in kept.items():
        starts[block] = min(starts.get(block, found[0]["ts"]), found[0]["ts"])
    scopes = []
    for (block, warp), found in kept.items():
        for event in found:
            begin = round(1e3 * (event["ts"] - starts[block]))
            scopes.append(Scope(event["name"], block, warp, begin, begin + round(1e3 * event["dur"])))
    first = min(starts.values(), default=0)
    return Trace(scopes, {block: round(1e3 * (start - first)) for block, start in starts.items()})


def chrome(trace: Trace, mhz: float, about: dict[str, Any]) -> dict[str, Any]:
    """The trace in Chrome's format, in microseconds: a process for each block, a thread for each warp."""
    events = [
        {
            "ph": "X", "name": scope.name, "pid": f"block {scope.block}", "tid": f"warp {scope.warp}",
            "ts": round(trace.starts[scope.block] * 1e-3 + scope.begin / mhz, 4),
            "dur": round((scope.end - scope.begin) / mhz, 4),
            "args": {"begin_cycle": scope.begin, "cycles": scope.end - scope.begin},
        }
        for scope in sorted(trace.scopes, key=lambda scope: (scope.block, scope.warp, scope.begin))
    ]  # fmt: skip
    return {"displayTimeUnit": "ns", "otherData": about, "traceEvents": events}


def with_scopes() -> Kernel:
    """v03_one_wave with its scopes compiled in."""
    kernel = ops.get(OP).kernels[CUDA]
    return replace(kernel, name=f"{CUDA}_scopes", source=ROOT / "benchmarks" / "scopes.cu")


def traced_cuda(device: torch.device) -> tuple[Trace, float]:
    """The last of many calls of v03_one_wave, and the multiprocessors' MHz over them."""
    function = build.function(with_scopes(), devices.arch(device))
    m, n, k = SHAPE.values()
    a, b = torch.randn(m, k, device=device).half(), torch.randn(n, k, device=device).half().t() * k**-0.5
    bias, y = torch.randn(n, device=device).half(), torch.empty(m, n, device=device, dtype=torch.float16)
    empty = torch.zeros(BLOCKS, TRACKS, SLOTS, 3, dtype=torch.int64, device=device)
    first, between, last = (empty.clone() for _ in range(3))
    for buffer in (between, first, *[between] * LAUNCHES, last):  # the first call of all loads the kernel
        function(y, a, b, bias, buffer)
    right = torch.relu(a.double() @ b.double() + bias.double())
    if not torch.allclose(y.double(), right, rtol=1e-2, atol=1e-2):
        raise RuntimeError("v03_one_wave with scopes computes something else")
    stamps = last.cpu().numpy()
    return stamped(stamps), megahertz(first.cpu().numpy(), stamps)


def traced_triton(folder: Path) -> Trace:
    """The second of two calls of triton_autotuned with its scopes: the first one compiles and loads them."""
    call = prepare_call(ops.get(OP).case(TRITON, DTYPE, SHAPE), "cuda")
    path = folder / "triton.chrome_trace"
    with proton.session(path, backend="instrumentation", data="trace"):
        call()
        call()
    return of_proton(json.loads(path.read_text())["traceEvents"], launches=2)


def keep(path: Path, trace: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(trace).encode(), mtime=0))
    print(f"written: {path}, {len(trace['traceEvents'])} scopes")


def main() -> int:
    if why := devices.no_gpu():
        sys.exit(f"scopes.py needs a Hopper GPU: {why}")
    device = devices.pick("cuda")
    if devices.arch(device) != "sm_90a":
        sys.exit(f"scopes.py needs a Hopper GPU (sm_90a), and this one is {devices.arch(device)}")
    import triton

    environment = devices.environment(device)
    folder = ROOT / "results" / store.slug(environment["device"]) / "scopes"
    cuda, mhz = traced_cuda(device)
    about = {key: environment[key] for key in ("device", "driver", "torch")} | {"triton": triton.__version__}
    about |= {"commit": commit_of_sources(), "op": OP, "dtype": DTYPE, "shape": SHAPE, "sm_mhz": round(mhz, 1)}
    keep(folder / f"{CUDA}.trace.json.gz", chrome(cuda, mhz, about | {"kernel": CUDA}))

    op = ops.get(OP)
    cases = [op.case(kernel, DTYPE, SHAPE) for kernel in TREES]
    job = Job(cases, {"calls": 20, "instrument": False}, "cuda", folder, 600.0)
    problems = 0
    for case, finding in zip(cases, proton.profile(job), strict=True):
        found = " ".join(f"{name} {value:.2f}" for name, value in finding.metrics.items() if name in SHOWN)
        print(f"{case.kernel}: {found or finding.why}")
        problems += finding.why != "ok"

    with tempfile.TemporaryDirectory(prefix="minfer-scopes-") as temporary:
        try:
            inside = traced_triton(Path(temporary))
        except (RuntimeError, ValueError, OSError) as error:  # no session, or a trace of another form
            print(f"{TRITON} has no trace: {error}", file=sys.stderr)
            for path in Path(temporary).glob("*.chrome_trace"):  # another version's form, to be looked at
                shutil.copy(path, folder)
            return 1
    keep(folder / f"{TRITON}.trace.json.gz", chrome(inside, mhz, about | {"kernel": TRITON}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
