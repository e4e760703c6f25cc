"""What does padding cost, and what does each way to group requests save? `python benchmarks/batching.py`

    uv run python benchmarks/batching.py                  # minutes on a GPU; writes benchmarks/results/
    uv run python benchmarks/batching.py --device cpu     # some minutes with two cores
    uv run python benchmarks/batching.py --trace my.jsonl # your own trace, printed and not written

`minfer.attention` and `minfer.seq_sum` serve three traces, with uniform, Zipf's and lognormal lengths, under each policy of
`minfer.batching`. Policies that pad rows also run with kernels that are not told the lengths and compute the padding. Kernels
run for real and are timed from an idle GPU to an idle GPU; the clock of arrivals is simulated. Each trace is served twice.
For the padded share and tokens/s, all requests wait at the start. For latencies, they arrive at random, at LOAD times the rate
that the slowest way serves. All ways take turns in shuffled rounds. On a CPU only one thread computes, because on a busy
machine several threads would wait for each other longer than such small sizes take.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.rows import ROOT, write
from minfer import batching
from minfer.batching import Policy, Request
from minfer.bench import device as devices

LOAD, WARM = 0.8, 5  # WARM: passes from whose median the load is
Step = Callable[[batching.Batch], float]


@dataclass(frozen=True)
class Sizes:
    """The sizes for a device: how many requests a trace has, the longest one, and the parameters of policies and attention."""

    requests: int
    longest: int
    capacity: int
    most: int
    block: int
    heads: int
    head_dim: int


SIZES = {
    "cuda": Sizes(requests=1024, longest=4096, capacity=32768, most=256, block=64, heads=32, head_dim=128),
    "cpu": Sizes(requests=128, longest=256, capacity=2048, most=64, block=16, heads=2, head_dim=64),
}
FIGURES = ("batches", "padded_share", "busy_s", "busy_share", "tokens_per_s", "p50_ms", "p90_ms", "p99_ms")


@dataclass(frozen=True)
class Way:
    """A policy, and whether kernels are told the true lengths."""

    policy: Policy
    told: bool


def ways(sizes: Sizes) -> list[Way]:
    policies = [Policy(name, sizes.capacity, sizes.most, sizes.block) for name in batching.NAMES]
    return [Way(policy, told) for told in (False, True) for policy in policies if told or policy.name != "packed"]


def traces(sizes: Sizes) -> dict[str, Callable[[float], list[Request]]]:
    """By name: functions from an arrival rate to a trace."""
    count, longest = sizes.requests, sizes.longest
    return {
        "uniform": lambda rate: batching.uniform(count, longest=longest, rate=rate),
        "zipf": lambda rate: batching.zipf(count, longest=longest, rate=rate),
        "lognormal": lambda rate: batching.lognormal(count, median=longest / 8, longest=longest, rate=rate),
    }


def recorded(path: Path) -> dict[str, Callable[[float], list[Request]]]:
    """The user's trace: all requests at once if the rate is infinite, else with the recorded arrivals."""
    trace = batching.read(path)
    at_once = [replace(request, arrival=0.0) for request in trace]
    return {path.stem: lambda rate: at_once if rate == math.inf else trace}


def steps(kernel: str, sizes: Sizes, device: torch.device) -> dict[bool, Step]:
    """Functions that run a batch; by whether the kernel is told its lengths."""
    made: dict[bool, Step] = {}
    for told in (False, True):
        if kernel == "attention":
            heads, dim = sizes.heads, sizes.head_dim
            work: Any = batching.Attention(sizes.capacity, heads=heads, head_dim=dim, device=device, skip=told)
        else:
            work = batching.SeqSum(sizes.capacity, device=device, skip=told)
        made[told] = batching.timed(work)
    return made


def served(trace: list[Request], way: Way, step: dict[bool, Step]) -> batching.Result:
    (result,) = batching.compare(trace, [way.policy], step[way.told])
    return result


def measured(
    kernel: str, name: str, make: Callable[[float], list[Request]], sizes: Sizes, rounds: int, step: dict[bool, Step]
) -> list[dict[str, Any]]:
    """A row for each way and kind of arrival. A row has a list for each figure, with a value for each round."""
    all_ways, rng, rows = ways(sizes), random.Random(0), []
    for way in all_ways:
        served(make(math.inf), way, step)  # shapes are new
    slowest = max(median(served(make(math.inf), way, step).busy_s for _ in range(WARM)) for way in all_ways)
    for arrivals, rate in (("at once", math.inf), ("at random", LOAD * sizes.requests / slowest)):
        trace = make(rate)
        found: dict[Way, list[batching.Result]] = {way: [] for way in all_ways}
        for _ in range(rounds):
            for way in rng.sample(all_ways, len(all_ways)):
                found[way].append(served(trace, way, step))
        for way, results in found.items():
            policy = way.policy
            about = {"kernel": kernel, "trace": name, "arrivals": arrivals, "policy": policy.name, "told": way.told}
            about |= {"capacity": policy.capacity, "most": policy.most, "block": policy.block, "rate": rate}
            about |= {"requests": len(trace), "tokens": results[0].tokens, "longest": sizes.longest}
            rows.append(about | {figure: [float(getattr(each, figure)) for each in results] for figure in FIGURES})
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=tuple(SIZES))
    parser.add_argument("--rounds", type=int, default=15, help="in which each way serves each trace (default: 15)")
    parser.add_argument("--requests", type=int, help="of a trace")
    parser.add_argument("--trace", type=Path, help="a file of one's own, .jsonl or .csv")
    parser.add_argument("--root", type=Path, default=ROOT, help="where benchmarks/results is (default: the repository)")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and (why := devices.no_gpu()):
        sys.exit(f"batching.py needs a GPU, or --device cpu: {why}")
    if options.rounds < 1 or (options.requests or 1) < 1:
        sys.exit("batching.py takes --rounds and --requests of at least 1")
    device, sizes = devices.pick(options.device), SIZES[options.device]
    sizes = replace(sizes, requests=options.requests or sizes.requests)
    made = traces(sizes)
    if options.trace:
        try:
            made = recorded(options.trace)
        except (OSError, batching.TraceError) as error:
            sys.exit(f"batching.py: {error}")
        (trace,) = made.values()
        lengths = [request.length for request in trace(math.inf)]
        if not lengths:
            sys.exit(f"batching.py: {options.trace} has no requests")
        longest = max(lengths)
        capacity = max(sizes.capacity, -(-longest // sizes.block) * sizes.block)
        sizes = replace(sizes, requests=len(lengths), longest=longest, capacity=capacity)
    if options.device == "cpu":
        torch.set_num_threads(1)
    rows = []
    for kernel in ("attention", "seq_sum"):
        step = steps(kernel, sizes, device)
        for name, make in made.items():
            rows += measured(kernel, name, make, sizes, options.rounds, step)
            for row in rows[-2 * len(ways(sizes)) :]:
                figures = [
                    float(median(row[figure])) for figure in ("padded_share", "tokens_per_s", "p50_ms", "p99_ms")
                ]
                way = row["policy"] + ("" if row["told"] else ", padding computed")
                print(
                    f"{kernel:9} {name:9} {row['arrivals']:9} {way:26} {figures[0]:6.1%} padding {figures[1]:12,.0f} tokens/s "
                    f"p50 {figures[2]:9.3f} ms  p99 {figures[3]:9.3f} ms"
                )
    if options.trace:
        return 0
    write("batching", rows, device, options.root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
