"""What does specialising cost, and when has it paid off? `python benchmarks/specialise.py`

    uv run python benchmarks/specialise.py       # some minutes on a CPU; writes benchmarks/results/

Three kinds of rows, of `seq_sum` on this CPU:

- cost: nanoseconds of a call that does nothing, of `monitor`, of the table, and of `execute` with what does nothing, in
  shuffled rounds; what monitoring and dispatch add is `execute` less the call, round by round;
- gain: the trial of each length's variant, by the C++ compiler and by LLVM, and after how many calls the time that it saves
  has paid for its compile;
- trace: a process that adapts while it serves. Lengths are uniform, or of Zipf's law, or of Zipf's law with other favourites
  from half-way on. Each round serves the same calls by the generic kernel, by it again, which is the control, and by
  `Specialiser.execute`, in shuffled order; the times of some are kept, one in so many seconds. The build cache is empty at
  first, and the background process shares the machine with all three.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
import timeit
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rows import ROOT, write
from minfer.bench import device as devices
from minfer.bench.stats import compare
from minfer.specialise import Outcome, Policy, Recipe, Specialiser, exact
from minfer.specialise.recipes import SEQ_SUM_CPP, SEQ_SUM_LLVM

CALLS, ROUNDS = 500, 501  # of a cost row. A sample is short, so that a busy machine interrupts few of them
LENGTHS = (20, 48, 77, 100, 250, 1000)
ATTEMPTS = 3  # at a trial that the machine was too busy for
LONGEST, BATCH, CALLS_A_ROUND = 128, 256, 128  # of a trace
KEPT_EVERY_S = 0.02  # seconds between two rounds whose times are kept, which all others are like
ADAPT = Policy(threshold=2000, every_calls=0, every_s=0.5, budget=16)

Row = dict[str, Any]


def costs(rounds: int) -> Iterator[Row]:
    """Nanoseconds of each part of a call, a sample for each round."""
    specialiser = Specialiser(SEQ_SUM_CPP, Policy(every_calls=0))
    specialiser.fallback = nothing = lambda: None
    specialiser._replace()  # the table now has `nothing`
    parts: dict[str, tuple[str, dict[str, Any]]] = {
        "call": ("nothing()", {"nothing": nothing}),
        "monitor": ("monitor(128)", {"monitor": specialiser.monitor}),
        "table": ("table[128]", {"table": specialiser._table}),
        "execute": ("execute(128)", {"execute": specialiser.execute}),
    }
    rng, found = random.Random(0), dict[str, list[float]]()
    for _ in range(rounds):
        for name in rng.sample(sorted(parts), len(parts)):
            code, names = parts[name]
            found.setdefault(name, []).append(1e9 / CALLS * timeit.timeit(code, globals=names, number=CALLS))
    specialiser.close()
    yield from ({"kind": "cost", "what": name, "ns": found[name]} for name in parts)


def gains(recipe: Recipe) -> Iterator[Row]:
    """A row for each length: the outcome of its variant's trial."""
    specialiser = Specialiser(recipe)
    for length in LENGTHS:
        outcome, attempts = specialiser.compile(exact(length)).result(), 1
        while outcome.status == "undecided" and attempts < ATTEMPTS:
            outcome, attempts = specialiser.compile(exact(length)).result(), attempts + 1
        yield {
            **{"kind": "gain", "recipe": recipe.name, "length": length, "attempts": attempts, **vars(outcome)},
            **{"paid_after_calls": paid(outcome), "bytes": recipe.held_bytes(exact(length))},
        }
    specialiser.close()


def paid(outcome: Outcome) -> float | None:
    """Calls after which a variant has saved the time that its compile took."""
    return 1e6 * outcome.compile_s / (outcome.generic_us - outcome.variant_us) if outcome.faster else None


def zipf(seed: int) -> list[float]:
    """Weights of the lengths from 1 to LONGEST by Zipf's law, with ranks in random order."""
    return [1 / rank for rank in random.Random(seed).sample(range(1, LONGEST + 1), LONGEST)]


# The weights of lengths in the first half of a trace, and in the second.
TRACES = {
    "uniform": ([1.0] * LONGEST,) * 2,
    "zipf": (zipf(1),) * 2,
    "drift": (zipf(1), zipf(2)),
}


def served(recipe: Recipe, name: str, seconds: float) -> Iterator[Row]:
    """A row with the seconds of each round of a trace: by the generic kernel, by it again, and by the specialiser."""
    specialiser = Specialiser(recipe, ADAPT)
    buffers = torch.randn(2, BATCH * LONGEST)
    full = torch.empty(0, dtype=torch.int32)
    data = {
        n: (*(part[: BATCH * n].view(BATCH, n) for part in buffers), full) for n in range(1, LONGEST + 1)
    }  # y, x, and no lengths: all elements count
    rng, at, tokens, variants = random.Random(3), list[float](), list[int](), list[int]()
    taken: dict[str, list[float]] = {way: [] for way in ("generic", "again", "adaptive")}

    def serve(way: str, sizes: list[int]) -> float:
        begin = time.perf_counter()
        if way == "adaptive":
            for size in sizes:
                specialiser.execute(size, *data[size])
        else:
            for size in sizes:
                specialiser.fallback(*data[size])
        return time.perf_counter() - begin

    starts = time.perf_counter()
    while (now := time.perf_counter() - starts) < seconds:
        sizes = rng.choices(range(1, LONGEST + 1), TRACES[name][now > seconds / 2], k=CALLS_A_ROUND)
        found = {way: serve(way, sizes) for way in rng.sample(sorted(taken), len(taken))}
        if not at or now - at[-1] >= KEPT_EVERY_S:
            for way, passed in found.items():
                taken[way].append(passed)
            at.append(now)
            tokens.append(BATCH * sum(sizes))
            variants.append(len(specialiser.variants))
    late = np.array(at) > 0.75 * seconds
    generic, again, adaptive = (np.array(taken[way])[late] for way in ("generic", "again", "adaptive"))
    ratio = compare(adaptive, generic, again)
    came = Counter(outcome.status for outcome in specialiser.outcomes.values())
    loaded, held = len(specialiser._made), specialiser.held_bytes()
    specialiser.close()
    yield {
        **{"kind": "trace", "trace": name, "recipe": recipe.name, "seconds": seconds, "at": at, "tokens": tokens},
        **{f"{way}_s": each for way, each in taken.items()},
        **{"variants": variants, "loaded": loaded, "bytes": held},
        **{status.replace(" ", "_"): came[status] for status in ("faster", "not faster", "undecided", "failed")},
        **{"speedup": ratio.speedup, "low": ratio.low, "high": ratio.high, "aa_spread": ratio.aa_spread},
        **{"verdict": ratio.verdict, "threshold": ADAPT.threshold, "budget": ADAPT.budget, "every_s": ADAPT.every_s},
    }


@contextmanager
def empty_cache() -> Iterator[None]:
    """An empty build cache inside the `with` block."""
    before = os.environ.get("TORCH_EXTENSIONS_DIR")
    with tempfile.TemporaryDirectory(prefix="minfer-specialise-") as folder:
        os.environ["TORCH_EXTENSIONS_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["TORCH_EXTENSIONS_DIR"]
            if before is not None:
                os.environ["TORCH_EXTENSIONS_DIR"] = before


def shown(row: Row) -> str:
    """A row in a line, without its samples."""
    figures = {name: value for name, value in row.items() if value not in (None, "") and not isinstance(value, list)}
    if row["kind"] == "cost":
        figures["median_ns"] = float(np.median(row["ns"]))
    return str({name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each trace (default: 60)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of the costs of a call (default: {ROUNDS})")
    parser.add_argument("--root", type=Path, default=ROOT, help="where benchmarks/results is (default: the repository)")
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or options.rounds < 1:
        sys.exit("specialise.py takes --seconds above 0 and --rounds of at least 1")
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # a core is left to the background process
    rows: list[Row] = []
    parts = [costs(options.rounds), *map(gains, (SEQ_SUM_CPP, SEQ_SUM_LLVM))]
    for part in (*parts, *(served(SEQ_SUM_LLVM, name, options.seconds) for name in TRACES)):
        with empty_cache():
            for row in part:
                rows.append(row | {"load": os.getloadavg()[0]})
                print(shown(rows[-1]), flush=True)
    write("specialise", rows, devices.pick("cpu"), options.root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
