"""What does specialising cost, and when has it paid off? `python benchmarks/specialise.py`

    uv run python benchmarks/specialise.py                    # some minutes on a CPU; writes benchmarks/results/
    uv run python benchmarks/specialise.py --device cuda      # on a GPU

Three kinds of rows, each written as soon as it is there:

- cost: nanoseconds of a call that does nothing, of `monitor`, of the table, and of `execute` of that call, in
  shuffled rounds. Monitoring and dispatch cost the difference of `execute` and the call, round by round. It is host time;
- gain: the trial of the variants of `seq_sum` by length and of `hgemm` by its sizes. Nothing else runs meanwhile;
- trace: a process that adapts while it serves `seq_sum`. Lengths are uniform, or of Zipf's law, or of Zipf's law with other
  favourites from half-way on. Each round serves the same calls by the generic kernel, by it again, which is the control,
  and by `Specialiser.execute`, in shuffled order; the times of one round are kept every so many seconds. A round ends when
  the device is done. The background process shares the machine, and the GPU, with all three. If a trial has no verdict
  because of that, the row counts it as undecided.

On a CPU the build cache is empty at the start of each trace, whose lengths are 1 to 128. nvcc takes seconds for a variant. So
on a GPU a trace has ten lengths, and the cache keeps what was found before: a row's `known` lengths had their verdict when
its trace began, as after `minfer warm`, and the others are compiled and tried while it serves.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rows import ROOT, write
from minfer.bench import device as devices
from minfer.bench.stats import compare
from minfer.bench.verify import synchronize
from minfer.specialise import Outcome, Policy, Recipe, Specialiser, exact
from minfer.specialise.buckets import Size
from minfer.specialise.recipes import HGEMM_CPP, HGEMM_CUDA, SEQ_SUM_CPP, SEQ_SUM_CUDA, SEQ_SUM_LLVM, SEQ_SUM_TRITON
from minfer.specialise.trial import known

CALLS, ROUNDS = 500, 501  # of a cost row. A sample is short, so that a busy machine interrupts few of them
ATTEMPTS = 3  # at a trial that the machine was too busy for
MINUTES, GAINS_SHARE = 6.0, 0.6  # of the run, and which part of it has passed when gains stop
KEPT_EVERY_S = 0.02  # seconds between two rounds whose times are kept; the others are like them

Row = dict[str, Any]
Weights = Sequence[float]


@dataclass(frozen=True)
class Setup:
    """What is measured on a kind of device.

    gains: recipes and the sizes of their variants. They are tried in this order until the time is over.
    serves, lengths, calls: the recipe of a trace, its lengths, and the calls of a round.
    traces: the weights of the lengths in the first half of a trace, and in the second.
    policy: of the specialiser that serves a trace.
    fresh: whether each part starts with an empty build cache.
    """

    gains: Sequence[tuple[Recipe, Sequence[Size]]]
    serves: Recipe
    lengths: Sequence[int]
    calls: int
    traces: dict[str, tuple[Weights, Weights]]
    policy: Policy
    fresh: bool

    @property
    def batch(self) -> int:
        """Sequences of a call of a trace: as many as in the trial of a length."""
        return self.serves.rest["batch"]


def zipf(ranks: Sequence[int]) -> Weights:
    """The weights of as many lengths by Zipf's law: `ranks` has the rank of each, from 1."""
    return [1 / rank for rank in ranks]


def shuffled(seed: int) -> Sequence[int]:
    """Ranks of 128 lengths, in random order."""
    return random.Random(seed).sample(range(1, 129), 128)


SHORT = (20, 48, 77, 100, 250, 1000)
TRIED, OTHERS = (
    (1000, 333, 2500, 64, 4096),
    (2000, 700, 1536, 200, 128),
)  # lengths of a GPU's gains, and more of its traces
FIRST, SECOND = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10), (3, 4, 5, 6, 7, 1, 2, 8, 9, 10)  # their ranks
SETUPS = {
    "cpu": Setup(
        gains=[(SEQ_SUM_CPP, SHORT), (SEQ_SUM_LLVM, SHORT), (HGEMM_CPP, [(1, 4096), (3, 1024), (5, 4096), (8, 4096)])],
        serves=SEQ_SUM_LLVM,
        lengths=range(1, 129),
        calls=128,
        traces={
            "uniform": ([1.0] * 128,) * 2,
            "zipf": (zipf(shuffled(1)),) * 2,
            "drift": (zipf(shuffled(1)), zipf(shuffled(2))),
        },
        policy=Policy(threshold=2000, every_calls=0, every_s=0.5, budget=16),
        fresh=True,
    ),
    "cuda": Setup(
        gains=[
            (SEQ_SUM_CUDA, TRIED),
            (HGEMM_CUDA, [(8, 4096, 4096), (1, 4096, 4096)]),
            (SEQ_SUM_TRITON, (1000, 64)),
        ],
        serves=SEQ_SUM_CUDA,
        lengths=(*TRIED, *OTHERS),
        calls=64,
        traces={
            "drift": (zipf(FIRST), zipf(SECOND)),  # first, while most lengths are new
            "zipf": (zipf(FIRST),) * 2,
            "uniform": ([1.0] * 10,) * 2,
        },
        policy=Policy(threshold=20_000, every_calls=0, every_s=0.5, budget=16),
        fresh=False,
    ),
}


def costs(recipe: Recipe, rounds: int) -> Iterator[Row]:
    """Nanoseconds of each part of a call, a sample for each round."""
    specialiser = Specialiser(recipe, Policy(every_calls=0))
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


def gains(recipe: Recipe, sizes: Sequence[Size], left: Callable[[], float]) -> Iterator[Row]:
    """A row for each size: the outcome of its variant's trial. `left` says how many seconds there are."""
    if left() <= 0:
        print(f"no time for {recipe.name}", flush=True)
        return
    specialiser = Specialiser(recipe)
    for number, size in enumerate(sizes):
        key, attempts = exact(size), 0
        outcome = Outcome("undecided")
        try:
            while outcome.status == "undecided" and attempts < ATTEMPTS:
                outcome, attempts = specialiser.compile(key).result(max(0.0, left())), attempts + 1
        except TimeoutError:
            if not attempts:
                print(f"no time for {recipe.name} of {', '.join(map(str, sizes[number:]))}", flush=True)
                break
        shape = recipe.case(key).shape
        yield {
            **{"kind": "gain", "recipe": recipe.name, "length": shape.get("longest"), "attempts": attempts},
            **{"sizes": ", ".join(f"{axis} {n}" for axis, n in shape.items()), **vars(outcome)},
            **{"bytes": recipe.held_bytes(key, specialiser.arch)},
        }
    specialiser.close()


def served(setup: Setup, name: str, seconds: float) -> Iterator[Row]:
    """A row with the seconds of each round of a trace: by the generic kernel, by it again, and by the specialiser."""
    recipe, batch, longest = setup.serves, setup.batch, max(setup.lengths)
    specialiser = Specialiser(recipe, setup.policy)
    device = specialiser.device
    before = [n for n in setup.lengths if known(recipe, exact(n), specialiser.arch, devices.name(device))]
    buffers = torch.randn(2, batch * longest, device=device)
    full = torch.empty(0, dtype=torch.int32, device=device)
    data = {
        n: (*(part[: batch * n].view(batch, n) for part in buffers), full) for n in setup.lengths
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
        synchronize(device)
        return time.perf_counter() - begin

    for _ in range(3):  # what is lazy, and a GPU's idle clock
        serve("generic", list(setup.lengths))
    starts = time.perf_counter()
    while (now := time.perf_counter() - starts) < seconds:
        sizes = rng.choices(setup.lengths, setup.traces[name][now > seconds / 2], k=setup.calls)
        found = {way: serve(way, sizes) for way in rng.sample(sorted(taken), len(taken))}
        if not at or now - at[-1] >= KEPT_EVERY_S:
            for way, passed in found.items():
                taken[way].append(passed)
            at.append(now)
            tokens.append(batch * sum(sizes))
            variants.append(len(specialiser.variants))
    late = np.array(at) > 0.75 * seconds
    generic, again, adaptive = (np.array(taken[way])[late] for way in ("generic", "again", "adaptive"))
    ratio = compare(adaptive, generic, again)
    came = Counter(outcome.status for outcome in specialiser.outcomes.values())
    why = next((outcome.why for outcome in specialiser.outcomes.values() if outcome.status == "undecided"), "")
    loaded, held = len(specialiser._made), specialiser.held_bytes()
    specialiser.close()
    yield {
        **{"kind": "trace", "trace": name, "recipe": recipe.name, "seconds": seconds, "at": at, "tokens": tokens},
        **{f"{way}_s": each for way, each in taken.items()},
        **{"variants": variants, "loaded": loaded, "bytes": held, "why": why, "known": len(before)},
        **{"batch": batch, "lengths": list(setup.lengths)},
        **{status.replace(" ", "_"): came[status] for status in ("faster", "not faster", "undecided", "failed")},
        **{"speedup": ratio.speedup, "low": ratio.low, "high": ratio.high, "aa_spread": ratio.aa_spread},
        **{"verdict": ratio.verdict, "threshold": setup.policy.threshold, "budget": setup.policy.budget},
        "every_s": setup.policy.every_s,
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
    parser.add_argument("--device", default="cpu", choices=tuple(SETUPS))
    about = (
        f"for the whole run: gains stop after {GAINS_SHARE:.0%} of them, traces share the rest (default: {MINUTES:g})"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help=about.replace("%", "%%"))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of the costs of a call (default: {ROUNDS})")
    parser.add_argument("--root", type=Path, default=ROOT, help="where benchmarks/results is (default: the repository)")
    options = parser.parse_args(arguments)
    if not 0 < options.minutes < 1e4 or options.rounds < 1:
        sys.exit("specialise.py takes --minutes above 0 and --rounds of at least 1")
    if options.device == "cuda" and (why := devices.no_gpu()):
        sys.exit(f"specialise.py --device cuda needs a GPU: {why}")
    setup, device = SETUPS[options.device], devices.pick(options.device)
    starts, total = time.perf_counter(), 60 * options.minutes
    left = lambda share: starts + share * total - time.perf_counter()
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # a core is left to the background process
    rows: list[Row] = []

    def parts() -> Iterator[Iterator[Row]]:
        """Each is begun when those before it have ended: how long a trace is depends on how long they took."""
        yield costs(setup.serves, options.rounds)
        for recipe, sizes in setup.gains:
            yield gains(recipe, sizes, lambda: left(GAINS_SHARE))
        for number, name in enumerate(setup.traces):
            yield served(setup, name, max(1.0, left(1.0) / (len(setup.traces) - number)))

    with nullcontext() if setup.fresh else empty_cache():
        for part in parts():
            with empty_cache() if setup.fresh else nullcontext():
                for row in part:
                    rows.append(row | {"load": os.getloadavg()[0]})
                    print(f"{time.perf_counter() - starts:.0f} s: {shown(rows[-1])}", flush=True)
                    write("specialise", rows, device, options.root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
