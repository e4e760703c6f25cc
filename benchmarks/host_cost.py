"""What does a call cost the host? Microseconds of Python and C++ of each public function, beside those of `torch.mm`.

    uv run python benchmarks/host_cost.py       # half a minute on a GPU

Each round takes the functions in a shuffled order, and times several calls of `torch.mm` and then several of the
function. The clock stops when the calls have returned; on a GPU the script then waits for the kernels. On a CPU the
times include the kernels' work, so the tensors there are small. Written to
benchmarks/results/host-cost-<device>.parquet: for each function its median and least time, those of `torch.mm` in the
same rounds, and the median of the ratios. The goal: at most 1.3 times the host time of `torch.mm` for a call with up to
three tensors, 2 times for others. `--only` measures some, without writing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import minfer
from benchmarks.rows import write
from minfer.bench import device as devices
from minfer.ops.quantised import FORMATS

Tensor = torch.Tensor
Call = tuple[str, dict[str, Any]]  # a function's name, and its arguments
WARM_UP, CALLS, ROUNDS = 5, 20, 25
FEW_TENSORS, GOAL_OF_FEW, GOAL = 3, 1.3, 2.0


def cases(device: torch.device) -> dict[str, Call]:
    """A call of each function: on a GPU in the sizes of a model of 8B parameters and a batch of 16, on a CPU in small ones."""
    gpu = device.type == "cuda"
    tokens, hidden, heads, kv_heads, dim, length = (16, 4096, 32, 8, 128, 1024) if gpu else (2, 64, 2, 1, 64, 16)
    experts, ffn, vocab, seq, latents = (64, 256, 32000, 128, 64) if gpu else (8, 32, 100, 4, 1)
    torch.manual_seed(0)

    def half(*shape: int) -> Tensor:
        return (torch.rand(shape, device=device) - 0.5).to(torch.bfloat16)

    def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.as_tensor(values, device=device).to(dtype)

    x, weight, bias, square, up = half(tokens, hidden), half(hidden), half(hidden), *half(2, hidden, hidden)
    q, k, v = half(tokens, 1, heads, dim), half(tokens, 1, kv_heads, dim), half(tokens, 1, kv_heads, dim)
    angles = torch.rand(8 * length, dim // 2, device=device)
    at = {"cos": angles.cos(), "sin": angles.sin()}
    caches = dict(zip(("k_cache", "v_cache"), half(2, tokens * length // 16, 16, kv_heads, dim), strict=True))
    pages = ints(torch.randperm(tokens * length // 16).reshape(tokens, -1))
    weights, indices, _, offsets, order = minfer.moe_route(half(tokens, experts), 2)
    experts_of = {"x": x, "weights": weights, "indices": indices, "offsets": offsets, "order": order}
    experts_of |= {"gate_up": half(experts, 2 * ffn, hidden), "down": half(experts, hidden, ffn)}
    packed = torch.randint(256, (hidden, hidden // 2), dtype=torch.uint8, device=device)
    int4 = {"format": "int4_g64", "scales": half(hidden, hidden // 64), "zeros": half(hidden, hidden // 64)}
    blocks = torch.zeros(hidden, hidden // 32 * FORMATS["q8_0"].nbytes, dtype=torch.uint8, device=device)
    product, now = {"a": x, "b": square.t()}, {"positions": ints([[5]] * tokens)}
    decoded = {"q": q, "lengths": ints([length] * tokens), "page_table": pages} | caches
    latent = {"q": half(tokens, 1, 16, 576), "cache": half(tokens, 64, 576), "lengths": ints([latents] * tokens)}
    prompt = {"q": half(1, seq, heads, dim), "k": half(1, seq, kv_heads, dim), "v": half(1, seq, kv_heads, dim)}
    prefix = {"prefix_k": half(seq, kv_heads, dim), "prefix_v": half(seq, kv_heads, dim)}
    sums = torch.rand(2, 1, heads, seq, device=device)
    states = {"a": prompt["q"], "a_lse": sums[0], "b": half(1, seq, heads, dim), "b_lse": sums[1]}
    gated = {"x": x, "w1": square.t(), "b1": bias, "w2": up.t(), "b2": bias.clone()}
    where = ints(range(tokens), torch.int64)
    fused = caches | {"qkv": half(tokens, heads + 2 * kv_heads, dim), "positions": ints([5] * tokens), "where": where}
    return {
        "attention": ("attention", prompt | {"causal": True}),
        "axpby": ("axpby", {"a": x.float(), "b": x.float(), "alpha": 2.0}),
        "cascade_attention": ("cascade_attention", prompt | {"causal": True} | prefix),
        "decode_attention": ("decode_attention", decoded),
        "dequant": ("dequant", {"w": blocks, "format": "q8_0"}),
        "embedding": ("embedding", {"ids": where, "table": half(vocab, hidden)}),
        "gated_unit": ("gated_unit", gated),
        "gemm_bias_gelu": ("gemm_bias_gelu", product | {"bias": bias}),
        "gemm_bias_relu": ("gemm_bias_relu", product | {"bias": bias}),
        "kv_append_": ("kv_append_", caches | {"k": k[:, 0], "v": v[:, 0], "where": where}),
        "layer_norm": ("layer_norm", {"x": x, "weight": weight, "bias": bias}),
        "matmul": ("matmul", product),
        "merge_state": ("merge_state", states),
        "mla_decode": ("mla_decode", latent),
        "moe_ffn": ("moe_ffn", experts_of),
        "moe_route": ("moe_route", {"logits": half(tokens, experts), "k": 2}),
        "quant_gemm": ("quant_gemm", {"x": x, "w": packed} | int4),
        "rms_norm": ("rms_norm", {"x": x, "weight": weight}),
        "rms_norm, residual": ("rms_norm", {"x": x, "weight": weight, "residual": x.clone()}),
        "rms_norm_quant": ("rms_norm_quant", {"x": x, "weight": weight, "residual": x.clone()}),
        "rope": ("rope", {"q": q, "k": k} | at | now),
        "rope_": ("rope_", {"q": q.clone(), "k": k.clone()} | at | now),
        "rope_, no positions": ("rope_", {"q": half(77, heads, dim), "k": half(77, kv_heads, dim)} | at),
        "rope_append": ("rope_append", fused | at),
        "sample": ("sample", {"logits": half(tokens, vocab), "top_k": 50}),
        "seq_sum": ("seq_sum", {"x": torch.rand(tokens, length, device=device), "lengths": ints([length] * tokens)}),
        "silu_mul": ("silu_mul", dict(zip(("gate", "up"), half(tokens, 2 * hidden).chunk(2, -1), strict=True))),
        "silu_mul_quant": (
            "silu_mul_quant",
            dict(zip(("gate", "up"), half(tokens, 2 * hidden).chunk(2, -1), strict=True)),
        ),
        "softmax": ("softmax", {"x": half(tokens, vocab)}),
        "swiglu": ("swiglu", {"x": x, "wg": square.t(), "wu": up.t()}),
    }


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def microseconds(call: Callable[[], Any], device: torch.device) -> float:
    """The time of the host for one call, without waiting for the device."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent = time.perf_counter() - begin
    wait(device)
    return spent / CALLS * 1e6


def measure(chosen: dict[str, Call], device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """A row for each function."""
    a, b = cases(device)["matmul"][1].values()
    calls = {name: partial(getattr(minfer, function), **given) for name, (function, given) in chosen.items()}
    product = partial(torch.mm, a, b)
    for call in (product, *calls.values()):
        for _ in range(WARM_UP):
            call()
    wait(device)
    shuffled, drawn = list(calls), random.Random(0)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        drawn.shuffle(shuffled)
        for name in shuffled:
            spent[name].append((microseconds(product, device), microseconds(calls[name], device)))
    rows = []
    for name, (function, given) in chosen.items():
        mm, own = zip(*spent[name], strict=True)
        tensors = sum(isinstance(x, Tensor) for x in given.values())
        rows.append({"case": name, "function": function, "tensors": tensors, "rounds": rounds, "calls": CALLS})
        rows[-1] |= {"host_us": statistics.median(own), "host_us_least": min(own)}
        rows[-1] |= {"mm_us": statistics.median(mm), "mm_us_least": min(mm)}
        rows[-1] |= {"ratio": statistics.median(o / m for m, o in spent[name])}
        rows[-1] |= {"goal": GOAL_OF_FEW if tensors <= FEW_TENSORS else GOAL}
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", help="measure these only, and write nothing")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and (why := devices.no_gpu()):
        sys.exit(f"host_cost.py needs a GPU, or --device cpu: {why}")
    device = devices.pick(options.device)
    chosen = cases(device)
    if unknown := set(options.only or ()) - chosen.keys():
        sys.exit(f"host_cost.py has no {', '.join(sorted(unknown))}; it has {', '.join(chosen)}")
    chosen = {name: call for name, call in chosen.items() if name in (options.only or chosen)}
    if device.type == "cpu":
        torch.set_num_threads(1)  # the others would wait for each other
    rows = measure(chosen, device, options.rounds)
    print(f"{'':20} {'tensors':>7} {'us':>7} {'least':>7} {'mm':>6} {'least':>6} {'ratio':>6} {'goal':>5}")
    for row in rows:
        print(
            f"{row['case']:20} {row['tensors']:7} {row['host_us']:7.1f} {row['host_us_least']:7.1f} {row['mm_us']:6.1f} "
            f"{row['mm_us_least']:6.1f} {row['ratio']:6.2f} {row['goal']:5}"
        )
    if not options.only:
        write("host-cost", rows, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
