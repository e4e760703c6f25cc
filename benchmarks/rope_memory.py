"""What autograd keeps for RoPE: PyTorch's operator table and memory timeline of eager RoPE and of `minfer.rope`.

    uv run python benchmarks/rope_memory.py       # some seconds on a GPU

Forward and backward of one fp32 tensor of (batch, seq, heads, head_dim) = (1, 64, 32, 512), as models write it and fused. Kept
of each in results/<device>/rope_memory/: PyTorch's table of operators (`<name>.txt`) and its trace with every allocation
(`<name>.trace.json.gz`, ui.perfetto.dev); and in benchmarks/results/rope-memory-<device>.parquet the bytes that are allocated
after each, beyond the input, the incoming gradient and the tables. `--device cpu` does the same with a CPU's allocations.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.autograd.profiler import profile, record_function

import minfer
from minfer.bench import device as devices
from minfer.ops.rope import table, turned
from minfer.profilers.torch import keep_trace
from minfer.rows import store
from minfer.run.start import commit_of_sources

ROOT = Path(__file__).resolve().parents[1]
BATCH, SEQ, HEADS, DIM = 1, 64, 32, 512
PARTS = ("forward", "backward")
Tensor = torch.Tensor
Rotation = Callable[[Tensor], Tensor]


def rotations(device: torch.device) -> dict[str, Rotation]:
    """Both ways to rotate a tensor, with their tables made once."""
    angles = table(SEQ, DIM // 2, device)
    cos, sin = angles.cos(), angles.sin()
    no_k = torch.empty(BATCH, SEQ, 0, DIM, device=device)
    wide_cos, wide_sin = (torch.cat((half, half), -1)[None, :, None] for half in (cos, sin))

    def eager(x: Tensor) -> Tensor:
        return x * wide_cos + turned(x, False) * wide_sin

    def fused(x: Tensor) -> Tensor:
        return minfer.rope(x, no_k, cos, sin)[0]

    return {"eager": eager, "fused": fused}


def timeline(events: Iterable[dict[str, Any]], on_gpu: bool) -> list[dict[str, Any]]:
    """The allocations in a Chrome trace of PyTorch's, in order: microseconds, bytes, and in which part they are. Raises
    ValueError where a part or all allocations are missing."""
    events = list(events)
    parts = {
        event["name"]: (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("name") in PARTS and event.get("cat") == "user_annotation"
    }
    found = []
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == int(on_gpu):
            part = next((name for name, (begin, end) in parts.items() if begin <= event["ts"] <= end), "")
            found.append({"us": event["ts"], "part": part, "bytes": event["args"]["Bytes"]})
    if set(parts) != set(PARTS) or not found:
        raise ValueError(f"the trace has the parts {sorted(parts)} and {len(found)} allocations")
    first, total = parts[PARTS[0]][0], 0
    for row in found:
        total += row["bytes"]
        row["us"], row["allocated"] = row["us"] - first, total
    return found


def profiled(rotate: Rotation, x: Tensor, gradient: Tensor) -> Any:
    """PyTorch's profile of one forward and backward, after one that is not profiled."""
    on_gpu = x.is_cuda
    for recorded in (None, profile(use_device="cuda" if on_gpu else None, use_kineto=True, profile_memory=True)):
        x.grad = None
        if on_gpu:
            torch.cuda.synchronize()
        if recorded is None:
            rotate(x).backward(gradient)
            continue
        with recorded:
            with record_function("forward"):
                y = rotate(x)
            with record_function("backward"):
                y.backward(gradient)
            if on_gpu:
                torch.cuda.synchronize()
    return recorded


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--root", type=Path, default=ROOT, help="where both folders are (default: the repository)")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and (why := devices.no_gpu()):
        sys.exit(f"rope_memory.py needs a GPU, or --device cpu: {why}")
    device = devices.pick(options.device)
    environment = devices.environment(device)
    slug = store.slug(environment["device"])
    folder = options.root / "results" / slug / "rope_memory"
    path = options.root / "benchmarks" / "results" / f"rope-memory-{slug}.parquet"
    for made in (folder, path.parent):
        made.mkdir(parents=True, exist_ok=True)
    about = {key: environment[key] for key in ("device", "driver", "torch")} | {"commit": commit_of_sources()}
    x = torch.randn(BATCH, SEQ, HEADS, DIM, device=device, requires_grad=True)
    gradient, rows, gradients = torch.randn_like(x), [], {}
    for name, rotate in rotations(device).items():
        recorded = profiled(rotate, x, gradient)
        gradients[name] = x.grad
        order = "self_device_time_total" if x.is_cuda else "self_cpu_time_total"
        text = recorded.key_averages().table(sort_by=order, row_limit=-1, max_name_column_width=80)
        (folder / f"{name}.txt").write_text(f"{name}, forward and backward of {tuple(x.shape)}, float32\n{text}")
        trace = folder / f"{name}.trace.json.gz"
        keep_trace(recorded, trace)
        found = timeline(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"], x.is_cuda)
        rows += [{"name": name, **row} for row in found]
        peak = max(row["allocated"] for row in found) / x.nbytes
        print(f"{name}: at most {peak:.2f} tensors of {x.nbytes / 1e6:.1f} MB beyond what was there before")
    torch.testing.assert_close(gradients["fused"], gradients["eager"], rtol=1e-4, atol=1e-4)
    tensor = {"shape": list(x.shape), "tensor_bytes": x.nbytes}
    pq.write_table(pa.Table.from_pylist([row | tensor | about for row in rows]), path)
    print(f"written: {folder} and {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
