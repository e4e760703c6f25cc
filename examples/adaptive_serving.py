"""A server that groups its requests, and whose kernels adapt: `python examples/adaptive_serving.py`; about a minute.

Short requests come with lengths of a Zipf distribution, whose favourites change half-way, and pass LAYERS times through
`seq_sum`. Each round serves the same requests in four ways, in shuffled order: in batches as they arrived, padded to the
longest; in batches of one length each, without padding, by the generic kernel, and by it again, which shows what chance does;
and in the same batches by `minfer.specialise`, which compiles variants for the lengths that come most while all this goes on.

Times are those of the kernels' calls: batches are grouped before, and their data is in place, in the cache. The background
process shares the machine with all four ways. A second run finds the variants in the build cache. Prints two tables, and
writes adaptive-serving.svg.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from importlib.util import find_spec
from itertools import pairwise

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from minfer.batching import Batch, Policy, Request
from minfer.bench.stats import compare
from minfer.specialise import Policy as Adapt
from minfer.specialise import Recipe, Specialiser
from minfer.specialise.recipes import SEQ_SUM_CPP, SEQ_SUM_CUDA, SEQ_SUM_LLVM

SECONDS, REQUESTS, LAYERS = 45.0, 2048, 16  # requests of a round
WAYS = ("padded, generic", "unpadded, generic", "unpadded, generic again", "unpadded, adaptive")
ADAPTIVE = 3


MOST, ROOM = 256, 1 << 14  # requests of a batch, and tokens, padding included
PADDED = Policy("none", capacity=ROOM, most=MOST)
UNPADDED = Policy(
    "bucketed", capacity=ROOM, most=MOST, buckets=tuple(range(1, 64))
)  # each length is a bucket of its own
LENGTHS = ((20, 44, 12), (21, 52, 13))  # in both halves, the most frequent first


def chosen() -> Recipe:
    """CUDA on a GPU, else LLVM where llvmlite is installed, else the C++ compiler."""
    if torch.cuda.is_available():
        return SEQ_SUM_CUDA
    return SEQ_SUM_LLVM if find_spec("llvmlite") else SEQ_SUM_CPP


class Work:
    """`seq_sum` over the rows of a batch, padding included, on data that is there already."""

    def __init__(self, device: torch.device) -> None:
        self.x = torch.randn(ROOM, device=device)
        self.y, self.full = torch.empty_like(self.x), torch.empty(0, dtype=torch.int32, device=device)

    def arguments(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        y, x = (values[: batch.slots].view(-1, batch.width) for values in (self.y, self.x))
        return y, x, self.full

    def check(self, y: torch.Tensor, x: torch.Tensor, full: torch.Tensor) -> None:
        torch.testing.assert_close(y, x.sum(1, keepdim=True).expand_as(x), rtol=1e-4, atol=1e-4)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # a core is left to the background process
    specialiser = Specialiser(chosen(), Adapt(threshold=1000, every_calls=0, every_s=0.5, budget=6))
    work = Work(specialiser.device)
    rng, rounds, starts = random.Random(2), 0, time.perf_counter()
    at: list[float] = []
    seconds: list[list[float]] = []
    tokens: list[int] = []
    slots = [0] * len(WAYS)
    events: list[tuple[float, int]] = [(0.0, 0)]  # when the number of variants in use changed
    while (now := time.perf_counter() - starts) < SECONDS:
        drawn = rng.choices(LENGTHS[now > SECONDS / 2], [1 / rank for rank in range(1, 4)], k=REQUESTS)  # Zipf's law
        trace = [Request(number, 0.0, length) for number, length in enumerate(drawn)]
        padded, unpadded = PADDED.batches(trace), UNPADDED.batches(trace)
        taken = [0.0] * len(WAYS)
        for way in rng.sample(range(len(WAYS)), len(WAYS)):
            batches = unpadded if way else padded
            calls = [(batch.width, work.arguments(batch)) for _ in range(LAYERS) for batch in batches]
            begin = time.perf_counter()
            for width, tensors in calls:
                if way == ADAPTIVE:
                    specialiser.execute(width, *tensors)
                else:
                    specialiser.fallback(*tensors)
            if specialiser.device.type == "cuda":
                torch.cuda.synchronize()
            taken[way] = time.perf_counter() - begin
            slots[way] += LAYERS * sum(batch.slots for batch in batches)
            if rounds % 100 == 0:
                work.check(*calls[-1][1])
        at.append(now)
        seconds.append(taken)
        tokens.append(LAYERS * sum(drawn))
        rounds += 1
        if (used := len(specialiser.variants)) != events[-1][1]:
            events.append((now, used))
    report(specialiser, np.array(at), np.array(seconds), np.array(tokens), slots)
    plot(np.array(at), np.array(tokens)[:, None] / np.array(seconds), events)
    specialiser.close()
    return 0


def report(specialiser: Specialiser, at: np.ndarray, seconds: np.ndarray, tokens: np.ndarray, slots: list[int]) -> None:
    """Two tables: each way, and each variant that was tried."""
    late = at > 0.75 * SECONDS
    print("\n| way | padding | tokens/s, first half | second half |\n| :-- | --: | --: | --: |")
    for way, name in enumerate(WAYS):
        rates = [np.median((tokens / seconds[:, way])[half]) for half in (at <= SECONDS / 2, at > SECONDS / 2)]
        print(f"| {name} | {1 - tokens.sum() / slots[way]:.1%} | {rates[0]:.4g} | {rates[1]:.4g} |")
    print("\n| variant | outcome | times as fast in its trial | compile and trial, s | calls until they have paid |")
    print("| :-- | :-- | --: | --: | --: |")
    for key, outcome in sorted(specialiser.outcomes.items()):
        saved = 1e-6 * (outcome.generic_us - outcome.variant_us)
        took = outcome.compile_s + outcome.trial_s
        paid = f"{took / saved:.0f}" if outcome.faster else ""
        print(f"| {specialiser.recipe.named(key)} | {outcome.status} | {outcome.speedup:.2f} | {took:.1f} | {paid} |")
    found = compare(seconds[late, 3], seconds[late, 1], seconds[late, 2])
    print(f"\nvariants in use: {len(specialiser.variants)}, {specialiser.held_bytes()} bytes")
    print(
        f"In the last quarter adaptive was {found.speedup:.3f} times as fast as generic ({found.low:.3f} to {found.high:.3f}), "
        f"and generic differed from itself by {found.aa_spread:.1%}: {found.verdict}."
    )
    if found.verdict != "faster":
        print("Adapting does not pay on this machine, or not yet.")


def plot(at: np.ndarray, rates: np.ndarray, events: list[tuple[float, int]]) -> None:
    """Tokens a second over time, medians of a second, and when variants came into use."""
    figure, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    edges = np.arange(0.0, SECONDS + 0.5, 1.0)
    for way, style in ((0, "C7"), (1, "C0"), (3, "C1")):
        windows = [(a, rates[(at >= a) & (at < b), way]) for a, b in pairwise(edges)]
        ax.plot(*zip(*((a + 0.5, np.median(w)) for a, w in windows if len(w)), strict=True), style, label=WAYS[way])
    for number, (when, used) in enumerate(events[1:]):
        ax.axvline(
            when,
            color="C1",
            linewidth=0.6,
            alpha=0.6,
            label=None if number else "variants in use: how many, from here on",
        )
        ax.annotate(
            str(used), (when, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom", color="C1", size=8
        )
    ax.axvline(SECONDS / 2, color="gray", linestyle=":", label="other lengths come most")
    ax.set(xlabel="seconds", ylabel="tokens a second", ylim=(0, None), xlim=(0, SECONDS))
    ax.legend(loc="lower right", fontsize=8)
    figure.savefig("adaptive-serving.svg")
    print("written: adaptive-serving.svg")


if __name__ == "__main__":
    sys.exit(main())
