"""Where does the time of a decoder's step go? Microseconds of each operation in a step, beside the floor that memory sets.

    python benchmarks/decoder_split.py       # half a minute on a GPU

The tensors are those of the op `decoder` (`minfer/ops/decoder`): random weights of a model's size, one step of decoding. A step
of `minfer.models` is run once, and all calls of minfer's functions in it are recorded with their arguments. Each operation then
gets a CUDA graph with its calls in all layers, so that each layer's weights come from memory. The graphs of the operations and
that of the whole step are replayed in shuffled order; the times are medians. The row `rest` is the time of the whole step minus
the sum over the operations: casts, and copies of a few rows.

The floor of an operation is the bytes of weights and of the cache that it reads, divided by the rate at which this device reads
memory. The results are written to benchmarks/results/decoder-split-<device>.parquet."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.rows import write
from minfer import ops
from minfer.bench import device as devices
from minfer.bench import peaks
from minfer.bench.operands import Operands
from minfer.bench.telemetry import Telemetry
from minfer.functional import early
from minfer.functional.silu_mul import silu_mul
from minfer.models import model, stacked
from minfer.models.named import named
from minfer.ops import Case

Tensor = torch.Tensor
Calls = dict[str, list[Callable[[], Any]]]
FUNCTIONS = ("embedding", "rms_norm", "rope_append", "decode_attention", "attention")
ROUNDS, FLUSH = 25, 256 << 20
STEPS = {"cuda": (("llama-3.1-8b", 1, 1024), ("llama-3.1-8b", 64, 1024)), "cpu": (("tiny", 2, 64),)}


def case_of(name: str, batch: int, context: int) -> Case:
    """A step of decoding of a named model."""
    c = named(name)
    sizes = {"layers": c.layers, "hidden": c.hidden, "heads": c.heads, "kv_heads": c.kv_heads, "head_dim": c.head_dim}
    sizes |= {"ffn": c.ffn, "vocab": c.vocab, "batch": batch, "context": context, "new": 1}
    return ops.get("decoder").case("minfer", "bfloat16", sizes)


def record(operands: Operands) -> Calls:
    """The calls of a step, by operation, with the arguments that they had."""
    calls: Calls = {}
    product, names = model.Linear.__call__, products(operands)

    def recorded(name: str, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        calls.setdefault(name, []).append(partial(function, *given, **named))
        return function(*given, **named)

    def multiply(self: model.Linear, x: Tensor) -> Tensor:
        return recorded(names[self.weight.data_ptr()], partial(product, self), x)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(model.Linear, "__call__", multiply))
        for name in FUNCTIONS:
            stack.enter_context(mock.patch.object(model, name, partial(recorded, name, getattr(model, name))))
        stack.enter_context(mock.patch.object(model, "swiglu", partial(recorded, "gate_up", early.swiglu)))
        stack.enter_context(mock.patch.dict(model.ACTIVATIONS, silu=partial(recorded, "silu_mul", silu_mul)))
        stacked.logits(*operands.arguments)
    return calls


def products(operands: Operands) -> dict[int, str]:
    """The name of each product, by the address of its weight."""
    stacks = {"qkv": "qkv", "out": "o", "gate_up": "gate_up", "down": "down"}
    found = {layer.data_ptr(): name for name, stack in stacks.items() for layer in operands.tensors[stack]}
    return found | {operands.tensors["head"].data_ptr(): "head"}


def floors(case: Case, operands: Operands) -> dict[str, int]:
    """The bytes of weights and of the cache that each operation reads."""
    t = operands.tensors
    found = {"qkv": t["qkv"].nbytes, "out": t["o"].nbytes, "gate_up": t["gate_up"].nbytes, "down": t["down"].nbytes}
    found["head"] = t["head"].nbytes
    row = case["kv_heads"] * case["head_dim"] * t["k_cache"].element_size()
    found["decode_attention"] = 2 * case["layers"] * case["batch"] * case["context"] * row
    return found


def replays(calls: Calls, operands: Operands, device: torch.device) -> dict[str, Callable[[], Any]]:
    """A function for each operation, and one for the whole step. On a GPU they replay graphs."""

    def run(each: list[Callable[[], Any]]) -> None:
        with torch.no_grad():
            for call in each:
                call()

    found = {name: partial(run, each) for name, each in calls.items()}
    found["step"] = partial(run, [partial(stacked.logits, *operands.arguments)])
    return {name: captured(each) for name, each in found.items()} if device.type == "cuda" else dict(found)


def captured(function: Callable[[], Any]) -> Callable[[], Any]:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def microseconds(call: Callable[[], Any], flush: Tensor) -> float:
    """The device's time of one call, after the device's cache was flushed."""
    if flush.device.type == "cpu":
        begin_s = time.perf_counter()
        call()
        return (time.perf_counter() - begin_s) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def measure(
    name: str, batch: int, context: int, device: torch.device, read_gbps: float, rounds: int
) -> list[dict[str, Any]]:
    """A row for each operation of a step, for the rest, and for the whole step."""
    case = case_of(name, batch, context)
    operands = Operands(ops.get("decoder"), case, 0, "normal", device)
    calls = record(operands)
    functions, drawn = replays(calls, operands, device), random.Random(0)
    flush = torch.empty(FLUSH if device.type == "cuda" else 1, dtype=torch.uint8, device=device)
    spent: dict[str, list[float]] = {each: [] for each in functions}
    for _ in range(rounds):
        for each in drawn.sample(list(functions), len(functions)):
            spent[each].append(microseconds(functions[each], flush))
    times = {each: statistics.median(taken) for each, taken in spent.items()}
    times["rest"] = 2 * times["step"] - sum(times.values())
    reads = floors(case, operands)
    reads["step"] = sum(reads.values())
    about = {"model": name, "batch": batch, "context": context, "rounds": rounds, "read_gbps": read_gbps}
    return [
        about | {"operation": each, "calls": len(calls.get(each, ())), "us": us, "least_us": min(spent.get(each, [us])),
                 "read_bytes": reads.get(each, 0), "floor_us": reads.get(each, 0) / read_gbps * 1e-3}
        for each, us in sorted(times.items(), key=lambda item: (item[0] == "step", -item[1]))
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds takes a whole number from 1, got {options.rounds}")
    if options.device == "cuda" and (why := devices.no_gpu()):
        sys.exit(f"decoder_split.py needs a GPU, or --device cpu: {why}")
    device, rows = devices.pick(options.device), list[dict[str, Any]]()
    read_gbps = peaks.measure(device, Telemetry(device))["read_gbps"]
    for name, batch, context in STEPS[device.type]:
        found = measure(name, batch, context, device, read_gbps, options.rounds)
        print(f"{name}, batch {batch}, context {context}; memory is read at {read_gbps:.0f} GB/s")
        print(f"{'':18} {'calls':>5} {'us':>9} {'floor':>9} {'of the floor':>12} {'of the step':>12}")
        for row in found:
            share = f"{row['floor_us'] / row['us']:.0%}" if row["read_bytes"] else ""
            print(
                f"{row['operation']:18} {row['calls']:5} {row['us']:9.1f} {row['floor_us']:9.1f} {share:>12} "
                f"{row['us'] / found[-1]['us']:12.1%}"
            )
        rows += found
    if not options.dry:
        write("decoder-split", rows, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
