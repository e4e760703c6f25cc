"""Fits the models by which `attention` chooses a kernel (minfer/functional/attention_times.py) to the times that
attention_times.py took, and says how good the choice is at problems to which they were not fitted.

    uv run python benchmarks/fit_attention.py                # needs no GPU
    uv run python benchmarks/fit_attention.py --constants    # fits to seeds 3 and 4, and prints the constants as in the module

For each kernel and heads the constants are not negative, and the squares of the relative errors are least. A loss is the time
of the kernel with the least time by the models, over that of the fastest kernel, minus one. The first table is of constants
that were fitted to a random half of the problems of seeds 3 and 4, at the other half. Those of the module were fitted to all
of these. The second table has the choice by them at prompts of seed 5: the speeds of the chosen
and of the fastest kernel relative to the better of cuDNN and FlashAttention-2, in the geometric mean; the share of prompts at
which the chosen one has less than 0.95 of its speed; and the loss.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd

from benchmarks.attention_times import OURS, RESULTS, Prompts, as_called, with_choice
from minfer.functional import attention_times
from minfer.functional.attention_times import DECODE, TILES, Problem

FILES = ("attention-nvidia-h200.parquet", "attention-cached-nvidia-h200.parquet")
FITTED, LATER = (3, 4), 5  # seeds
LEAST = 10  # problems that a fit needs
STARTS = (1, 17, 65, 129, 257, 513, 1025, 8193)  # of the ranges of tokens
Constants = dict[tuple[int, int], dict[str, tuple[float, ...]]]


def timed() -> pd.DataFrame:
    """A line for each problem to which the models were fitted, with the time of each kernel, else NaN; the mean where it was
    timed twice."""
    found = as_called(pd.concat([pd.read_parquet(RESULTS / name) for name in FILES]))
    return (
        found[found.seed.isin(FITTED)]
        .pivot_table(index=[*Prompts._fields], columns="kernel", values="us")
        .reset_index()
    )


def problems(times: pd.DataFrame) -> list[Problem]:
    return [Prompts(*fields).problem() for fields in times[[*Prompts._fields]].itertuples(index=False)]


def parts_of(kernel: str, of: Problem) -> tuple[float, ...]:
    return attention_times.terms_of_decode(of) if kernel == DECODE else attention_times.terms_of_time(of, TILES[kernel])


def without_negative(parts: np.ndarray, us: np.ndarray) -> tuple[float, ...]:
    """The constants, none negative, whose products with the parts are about `us`: where one would be negative, the most
    negative one becomes 0, and the others are fitted again."""
    kept = list(range(parts.shape[1]))
    while True:
        found = np.linalg.lstsq(parts[:, kept] / us[:, None], np.ones(len(us)), rcond=None)[0]
        if found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    constants = np.zeros(parts.shape[1])
    constants[kept] = found
    return tuple(float(f"{each:.4g}") for each in constants)


def fitted(times: pd.DataFrame, kernels: Sequence[str]) -> Constants:
    found: Constants = {}
    for dims, of_heads in times.groupby(["head_dim", "v_dim"]):
        constants = found[tuple(dims)] = {}  # type: ignore[index]
        for kernel in kernels:
            some = of_heads[of_heads[kernel].notna()]
            if len(some) >= LEAST:
                parts = np.array([parts_of(kernel, of) for of in problems(some)])
                constants[kernel] = without_negative(parts, some[kernel].to_numpy())
    return found


def losses(times: pd.DataFrame, kernels: Sequence[str], constants: Constants) -> pd.DataFrame:
    """The heads, tokens and loss of each problem."""
    expected = pd.DataFrame(np.inf, index=times.index, columns=list(kernels))
    for place, of in zip(times.index, problems(times), strict=True):
        for kernel, each in constants[of.head_dim, of.v_dim].items():
            if not np.isnan(times.loc[place, kernel]):
                expected.loc[place, kernel] = float(np.dot(each, parts_of(kernel, of)))
    measured = times[list(kernels)]
    chosen = measured.to_numpy()[np.arange(len(times)), expected.to_numpy().argmin(axis=1)]
    return times[["head_dim", "v_dim", "tokens"]].assign(loss=chosen / measured.min(axis=1) - 1)


def lines_of_later() -> Iterator[str]:
    """The second table."""
    found = pd.read_parquet(RESULTS / FILES[0])
    times = with_choice(found[found.seed == LATER])
    yield f"{'tokens':>11} {'problems':>9} {'chosen':>8} {'fastest':>8} {'< 0.95':>7} {'mean loss':>10} {'most':>7}"
    for low, after in [*pairwise(STARTS), (1, STARTS[-1])]:
        some = times[(low <= times.tokens) & (times.tokens < after)]
        ratios = [some.other_us / some[name] for name in ("chosen_us", "fastest_us")]
        means = " ".join(f"{math.exp(np.log(x).mean()):8.3f}" for x in ratios)
        under, loss = 100 * (ratios[0] < 0.95).mean(), 100 * (some.chosen_us / some.fastest_us - 1)
        yield f"{low:5}-{after - 1:<5} {len(some):9} {means} {under:5.1f} % {loss.mean():8.2f} % {loss.max():5.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--constants", action="store_true", help="fit to seeds 3 and 4, and print the constants")
    arguments = parser.parse_args()
    times = timed()
    kernels = [kernel for kernel in OURS if kernel in times]
    if arguments.constants:
        for dims, of_heads in fitted(times, kernels).items():
            print(
                f"    {dims}: {{",
                *(f'        "{name}": {each},' for name, each in of_heads.items()),
                "    },",
                sep="\n",
            )
        return
    is_fitted = np.random.default_rng(0).random(len(times)) < 0.5
    found = losses(times[~is_fitted], kernels, fitted(times[is_fitted], kernels))
    print(f"{'heads':>9} {'problems':>9} {'mean loss':>10} {'most':>7}")
    for name, some in [*found.groupby(["head_dim", "v_dim"]), ("all", found)]:
        title = name if isinstance(name, str) else "/".join(map(str, dict.fromkeys(name)))
        print(f"{title:>9} {len(some):9} {100 * some.loss.mean():8.2f} % {100 * some.loss.max():5.1f} %")
    print(*lines_of_later(), sep="\n")


if __name__ == "__main__":
    main()
