"""Fits the models by which `attention` chooses a kernel (minfer/functional/attention_times.py) to the times that
attention_times.py took, and says how good the choice is at problems to which they were not fitted.

    uv run python benchmarks/fit_attention.py                # needs no GPU
    uv run python benchmarks/fit_attention.py --write        # fits to all seeds of FITTED, and writes attention_times.json

For each way to keep keys and values, each kernel and heads, the constants are not negative, and the squares of the relative
errors are least. A loss is the time of the kernel with the least time by the models, over that of the fastest kernel, minus
one. The first table is of a 5-fold cross-validation over the problems of FITTED. The constants of attention_times.json were
fitted to all of these. The other tables have the choice by them at problems of LATER: the speeds of the chosen and of the
fastest kernel relative to the better of cuDNN and FlashAttention-2, in the geometric mean; the share of problems at which the
chosen one has less than 0.95 of its speed; and the loss.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pandas as pd

from benchmarks.attention_times import MOST_TOKENS, OURS, RESULTS, Prompts, as_called, read, summary, with_choice
from minfer.functional import attention_times
from minfer.functional.attention_times import DATA, DECODE, DIVIDED, GATHERED

PROMPTS, CACHED, PAGED = (f"attention{kind}-nvidia-h200.parquet" for kind in ("", "-cached", "-paged"))
FITTED = (3, 4, 6, 9, 11)  # seeds
LATER = {PROMPTS: 5, CACHED: 8, PAGED: 10}
LEAST = 6  # problems that a fit needs
STARTS = (1, 17, 65, 129, 257, 513, 1025, 8193)  # of the ranges of tokens
Constants = dict[str, dict[tuple[int, int], dict[str, tuple[float, ...]]]]
NAMES = (*OURS, *(f"{name}{DIVIDED}" for name in GATHERED))  # of constants


def timed() -> pd.DataFrame:
    """A line for each problem to which the models were fitted, with the time of each kernel, else NaN; the mean where it was
    timed twice."""
    found = as_called(pd.concat([read(RESULTS / name) for name in LATER]))
    return (
        found[found.seed.isin(FITTED)]
        .pivot_table(index=[*Prompts._fields], columns="kernel", values="us")
        .reset_index()
    )


def problems(times: pd.DataFrame) -> list[Prompts]:
    return [Prompts(*fields) for fields in times[[*Prompts._fields]].itertuples(index=False)]


def terms_of(name: str, of: Prompts) -> tuple[float, ...]:
    if name == DECODE:
        return attention_times.terms_of_decode(of.problem())
    return attention_times.terms_of_time(of.problem(), name)


def has_times(name: str, of: Prompts) -> bool:
    return of.is_for_decode() if name == DECODE else attention_times.has_times(of.problem(), name)


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


def fitted(times: pd.DataFrame) -> Constants:
    found: Constants = {}
    times = times.assign(how_kept=[of.how_kept() for of in problems(times)])
    for (how, dim, v_dim), of_heads in times.groupby(["how_kept", "head_dim", "v_dim"]):
        constants = found.setdefault(str(how), {})[dim, v_dim] = {}  # type: ignore[index]
        for name in NAMES:
            kernel = name.removesuffix(DIVIDED)
            some = of_heads[of_heads[kernel].notna()] if kernel in of_heads else of_heads[:0]
            some = some[[has_times(name, of) for of in problems(some)]]
            if len(some) >= LEAST:
                parts = np.array([terms_of(name, of) for of in problems(some)])
                constants[name] = without_negative(parts, some[kernel].to_numpy())
    return found


def losses(times: pd.DataFrame, constants: Constants) -> pd.DataFrame:
    """How keys and values are kept, the heads, tokens and loss of each problem for which there are constants, and at which all
    of their kernels were timed."""
    kernels = [name for name in OURS if name in times]
    expected = pd.DataFrame(np.inf, index=times.index, columns=kernels)
    for place, of in zip(times.index, problems(times), strict=True):
        for name, each in constants[of.how_kept()].get((of.head_dim, of.v_dim), {}).items():
            if has_times(name, of) and of.tokens <= MOST_TOKENS.get(name, of.tokens):
                expected.loc[place, name.removesuffix(DIVIDED)] = float(np.dot(each, terms_of(name, of)))
    is_timed = (times[kernels].notna() | (expected == np.inf)).all(axis=1)
    times = times[is_timed & (expected.min(axis=1) < np.inf)]
    expected, measured = expected.loc[times.index], times[kernels]
    chosen = measured.to_numpy()[np.arange(len(times)), expected.to_numpy().argmin(axis=1)]
    return times[["kept", "head_dim", "v_dim", "tokens"]].assign(loss=chosen / measured.min(axis=1) - 1)


def losses_at_left_out(times: pd.DataFrame, folds: int = 5) -> pd.DataFrame:
    """`losses` in a cross-validation: at each random fifth of the problems, by constants fitted to the others."""
    fold = np.random.default_rng(0).integers(folds, size=len(times))
    return pd.concat([losses(times[fold == i], fitted(times[fold != i])) for i in range(folds)])


def lines_of_later(name: str) -> Iterator[str]:
    """The table of a file's problems of LATER."""
    found = read(RESULTS / name)
    times = with_choice(found[found.seed == LATER[name]])
    yield f"{name}, seed {LATER[name]}"
    yield f"{'tokens':>11} {'problems':>9} {'chosen':>8} {'fastest':>8} {'< 0.95':>7} {'mean loss':>10} {'most':>7}"
    for low, after in [*pairwise(STARTS), (1, STARTS[-1])]:
        if (is_in := (low <= times.tokens) & (times.tokens < after)).any():
            yield f"{low:5}-{after - 1:<5} {summary(times[is_in])}"


def written(constants: Constants) -> str:
    """As attention_times.json has them, a line for each kernel."""
    by_dims = {
        how: {"/".join(map(str, dims)): of for dims, of in of_dims.items()} for how, of_dims in constants.items()
    }
    lines = json.dumps(by_dims, indent=1)
    while (shorter := lines.replace(",\n    ", ", ").replace("[\n    ", "[")) != lines:
        lines = shorter
    return lines.replace("\n   ]", "]") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--write", action="store_true", help="fit to all seeds of FITTED, and write attention_times.json"
    )
    arguments = parser.parse_args()
    times = timed()
    if arguments.write:
        DATA.write_text(written(fitted(times)))
        print(f"written: {DATA}")
        return
    found = losses_at_left_out(times)
    print(f"{'keys and values':>18} {'heads':>9} {'problems':>9} {'mean loss':>10} {'most':>7}")
    for (kept, dim, v_dim), some in [*found.groupby(["kept", "head_dim", "v_dim"]), (("all", "", ""), found)]:
        heads = f"{dim}" if dim == v_dim else f"{dim}/{v_dim}"
        loss = 100 * some.loss
        print(f"{kept:>18} {heads:>9} {len(some):9} {loss.mean():8.2f} % {loss.max():5.1f} %")
    for name in LATER:
        print(*lines_of_later(name), sep="\n")


if __name__ == "__main__":
    main()
