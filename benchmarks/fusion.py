"""What does fusing gain in a decoder layer? `python benchmarks/fusion.py`

    uv run python benchmarks/fusion.py                                    # minutes on a GPU; prints the table
    uv run python benchmarks/fusion.py --write                            # and writes benchmarks/results/
    uv run python benchmarks/fusion.py --device cpu --unmeasured fuse     # small sizes, about a minute

Runs a Llama layer in plain PyTorch at decode and prefill shapes: eager, compiled by inductor, and by `minfer.fuse`. Of each:

- launches: how many kernels and copies a call ran on a GPU, as CUPTI recorded them; none on a CPU;
- calls and bytes: how many operators (eager), or kernels and operators (compiled), ran, without views, and the bytes that they
  move if each reads each of its tensors once and writes each result once. Bytes are computed, not measured, so they do not
  show what caches save;
- time: cold calls in shuffled rounds (`minfer.bench.clock`), and the paired speed-up over inductor, which runs twice in each
  round as its own control. The first call of a compiled layer, which compiles, is not timed.

On a CPU only one thread computes, because on a busy machine several threads would wait for each other longer than such small
sizes take.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import minfer
from benchmarks.rows import ROOT, write
from minfer.bench import device as devices
from minfer.bench import stats
from minfer.bench.clock import Hooks, clock_for


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model's layer, and its calls: name, batch, new tokens, tokens already in the cache."""

    dim: int
    heads: int
    kv_heads: int
    hidden: int
    dtype: torch.dtype
    shapes: tuple[tuple[str, int, int, int], ...]


SIZES = {
    "cuda": Sizes(
        *(4096, 32, 8, 14336, torch.bfloat16),
        shapes=(("decode", 1, 1, 2047), ("decode", 16, 1, 2047), ("decode", 64, 1, 2047), ("prefill", 1, 2048, 0)),
    ),
    "cpu": Sizes(*(64, 4, 2, 96, torch.float32), shapes=(("decode", 2, 1, 15), ("prefill", 2, 16, 0))),
}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def turned(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


class Layer(nn.Module):
    """A Llama decoder layer for x (batch, seq, dim). It writes keys and values to a cache, behind `past` earlier ones."""

    def __init__(self, sizes: Sizes, batch: int, seq: int, past: int) -> None:
        super().__init__()
        dim, hidden = sizes.dim, sizes.hidden
        self.heads, self.kv_heads, self.past, self.head_dim = sizes.heads, sizes.kv_heads, past, dim // sizes.heads
        self.q, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k, self.v = (nn.Linear(dim, self.kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)
        self.before, self.after = (nn.Parameter(torch.rand(dim) + 0.5) for _ in range(2))
        cache = (batch, self.kv_heads, past + seq, self.head_dim)
        self.keys: Tensor
        self.values: Tensor
        self.register_buffer("keys", torch.randn(cache))
        self.register_buffer("values", torch.randn(cache))

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        frequencies = 10000.0 ** (torch.arange(self.head_dim // 2, device=x.device) * (-2 / self.head_dim))
        angles = (self.past + torch.arange(seq, device=x.device))[:, None] * frequencies
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        y = norm(x, self.before)
        q = self.q(y).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        k, v = (each(y).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2) for each in (self.k, self.v))
        q, k = q * cos + turned(q) * sin, k * cos + turned(k) * sin
        self.keys[:, :, self.past :], self.values[:, :, self.past :] = k, v
        y = F.scaled_dot_product_attention(q, self.keys, self.values, is_causal=self.past == 0, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, seq, -1))
        y = norm(x, self.after)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@dataclass
class Count:
    calls: int = 0
    bytes: int = 0


class Eager(TorchDispatchMode):
    """Counts the operators that are not views, and the bytes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        held = {each.untyped_storage()._cdata for each in given}
        view = not func._schema.is_mutable and all(each.untyped_storage()._cdata in held for each in made)
        if not view and not func._schema.name.startswith("aten::empty"):
            read = given[1:] if func is torch.ops.aten.copy_.default else given
            self.count.calls += 1
            self.count.bytes += sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in read + made)
        return result


@contextlib.contextmanager
def compiled() -> Iterator[Count]:
    """Counts the kernels and operators in what inductor compiles in the `with` block, and inductor's figure for their bytes."""
    from torch._inductor.ir import MultiOutput
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
    from torch._inductor.virtualized import V

    count = Count()

    def add(nodes: list[Any]) -> list[Any]:
        for node in nodes:
            if isinstance(node, ExternKernelSchedulerNode) and isinstance(node.node, MultiOutput):
                # One of an operator's several results, whose bytes inductor does not count for the operator.
                count.bytes += int(V.graph.get_numel(node.node.get_name())) * node.node.get_dtype().itemsize
            elif not isinstance(node, NopKernelSchedulerNode):
                count.calls += 1
                count.bytes += int(node.get_read_write_buffers_sizes())
        return nodes

    with torch._inductor.config.patch(_post_fusion_custom_pass=add, force_disable_caches=True):
        yield count


@dataclass
class Way:
    """A way to run a layer, and what was counted of it."""

    name: str
    call: Callable[[Tensor], Tensor]
    count: Count = field(default_factory=Count)
    launches: int | None = None
    fused: tuple[str, ...] = ()


def ways(layer: Layer, x: Tensor, unmeasured: str) -> list[Way]:
    """The ways to run a layer. Each was called once, and its result compared with eager PyTorch's."""
    want, made = layer(x), [Way("eager", layer)]
    with Eager() as eager:
        layer(x)
    made[0].count = eager.count
    fuse = lambda: minfer.fuse(layer, unmeasured=unmeasured, dynamic=False, fullgraph=True)
    for name, make in (("inductor", lambda: torch.compile(layer, dynamic=False, fullgraph=True)), ("minfer", fuse)):
        torch._dynamo.reset()  # else torch.compile sees another shape, and compiles for all shapes
        way, said = Way(name, make()), io.StringIO()
        with compiled() as way.count, contextlib.redirect_stderr(said):
            got = way.call(x)
        close = 1e-4 if x.dtype == torch.float32 else 5e-2
        torch.testing.assert_close(got, want, rtol=close, atol=close)
        way.fused = tuple(sorted(re.findall(r"minfer\.fuse: (\w+) at .*: fused, ", said.getvalue())))
        made.append(way)
    if x.is_cuda:
        for way in made:
            way.call(x)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as recorded:
                way.call(x)
                torch.cuda.synchronize()
            way.launches = sum(event.device_type.name == "CUDA" for event in recorded.events() or ())
    return made


def measured(sizes: Sizes, device: torch.device, unmeasured: str, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each shape and way."""
    rng, clock = np.random.default_rng(0), clock_for(device)
    for shape, batch, seq, past in sizes.shapes:
        torch.manual_seed(0)
        with torch.device(device):
            layer = Layer(sizes, batch, seq, past).to(sizes.dtype)
            x = torch.randn(batch, seq, sizes.dim, dtype=sizes.dtype)
        made = ways(layer, x, unmeasured)
        by_name = {way.name: way for way in made}
        timed = [*made, by_name["inductor"]]  # its duplicate, last
        candidates = [lambda _, call=way.call, x=x: call(x) for way in timed]
        order = rng.permuted(np.tile(np.arange(len(timed)), (rounds, 1)), axis=1)
        clock.cold(candidates, order[:3], Hooks())  # warms up
        times = clock.cold(candidates, order, Hooks())
        against, duplicate = times[:, [way.name for way in made].index("inductor")], times[:, -1]
        for way, taken in zip(made, times.T, strict=False):
            ratio = stats.compare(taken, against, duplicate)
            yield {
                **{"shape": shape, "batch": batch, "seq": seq, "past": past, "way": way.name, "fused": list(way.fused)},
                **{"launches": way.launches, "calls": way.count.calls, "bytes": way.count.bytes},
                **{"us": float(np.median(taken)) * 1e6, "samples_us": (taken * 1e6).tolist()},
                **{"speedup": ratio.speedup, "low": ratio.low, "high": ratio.high, "aa_spread": ratio.aa_spread},
                **{"verdict": ratio.verdict if way.name != "inductor" else None, "unmeasured": unmeasured},
                **{"dim": sizes.dim, "heads": sizes.heads, "kv_heads": sizes.kv_heads, "hidden": sizes.hidden},
                "dtype": str(sizes.dtype).removeprefix("torch."),
            }


def line(row: dict[str, Any]) -> str:
    launches = "-" if row["launches"] is None else row["launches"]
    shape = f"{row['shape']} {row['batch']}x{row['seq']}+{row['past']}"
    ratio = f"{row['speedup']:.3f} [{row['low']:.3f}, {row['high']:.3f}] {row['verdict'] or ''}".strip()
    figures = f"{launches} | {row['calls']} | {row['bytes'] / 1e6:.3f} | {row['us']:.1f} | {ratio}"
    return f"| {shape} | {row['way']} | {figures} | {', '.join(row['fused'])} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=tuple(SIZES))
    parser.add_argument("--rounds", type=int, default=60, help="in which each way runs once (default: 60)")
    parser.add_argument("--unmeasured", default="refuse", choices=("refuse", "fuse"), help="as minfer.fuse has it")
    parser.add_argument("--write", action="store_true", help="write the rows to benchmarks/results/ too")
    parser.add_argument("--root", type=Path, default=ROOT, help="where benchmarks/results is (default: the repository)")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and (why := devices.no_gpu()):
        sys.exit(f"fusion.py needs a GPU, or --device cpu: {why}")
    if options.rounds < 6:
        sys.exit("fusion.py takes --rounds of at least 6, which an interval needs")
    os.environ["MINFER_EXPLAIN"] = "1"  # says what is fused
    device, rows = devices.pick(options.device), []
    if options.device == "cpu":
        torch.set_num_threads(1)
    print("| batch x new + cached | way | launches | calls | MB | us | speed-up over inductor | fused |")
    print("| :-- | :-- | --: | --: | --: | --: | :-- | :-- |")
    with torch.no_grad():
        for row in measured(SIZES[options.device], device, options.unmeasured, options.rounds):
            print(line(row), flush=True)
            rows.append(row)
    if not options.write:
        return 0
    write("fusion", rows, device, options.root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
