"""Times the kernels among which `attention` chooses, at random prompts of public models, and says how good the choice is.

    uv run python benchmarks/attention_times.py --time --seconds 120         # on an H100 or H200: overwrites its times
    uv run python benchmarks/attention_times.py --time --tokens 1 64         # prompts of so many tokens
    uv run python benchmarks/attention_times.py --time --tokens 1 16 --keys 256 65536    # new tokens over a cache
    uv run python benchmarks/attention_times.py FILE                         # the tables of its times; needs no GPU

Heads are those of the models of `minfer/ops/models.csv`. The tokens of a prompt and the number of prompts are log-uniform, and
a batch has at most 8192 tokens. Sequences are padded and full, and three quarters of the problems are causal. With --keys the
tokens are the last ones of a cache, whose length is log-uniform too; the caches of a batch have at most 262,144 keys. A third
of the problems are in float16. Each kernel is timed at each problem that it supports, v03_mma only up to 2048 tokens, because
others are far faster beyond. So is `decode_attention`, which `attention` calls for few queries. It needs their lengths on the
GPU; the tables and the models count 2 us more for the launch that writes these. cuDNN and FlashAttention-2 are those of
PyTorch's `scaled_dot_product_attention`.

The committed times have a column `seed`: 3 and 5 of prompts, 4 and 6 with `--keys 256 65536` and `--tokens 1 2048` (6:
`1 1024`). The models were fitted to seeds 3 and 4 (benchmarks/fit_attention.py).

A time is the median of seven cold calls, in microseconds: 256 MiB are read before each, and each round has a new order of the
kernels. A kernel whose result is wrong ends the program. The tables compare the kernel that `attention` takes (`chosen`) and
the fastest one with the better of cuDNN and FlashAttention-2: the ratio of speeds in the geometric mean, and the share of
problems under 0.95. A loss is the chosen kernel's time over that of the fastest, minus one. The least of several medians is
biased low, so losses are overstated.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from benchmarks import cold, rows
from minfer import ops
from minfer.functional import best, decode_attention, library
from minfer.functional.attention_times import DECODE, Problem, fastest
from minfer.functional.decode_attention import DIMS, MOST_NEW
from minfer.ops import Case, drawn
from minfer.ops.prefill_attention import baselines

RESULTS = Path(__file__).resolve().parent / "results"
KERNELS = ("v03_mma", "v05_pingpong", "v06_no_maximum", "v07_short", "v08_compact", "v13_wide_heads", "v14_key_parts")
OURS = (*KERNELS, DECODE)
OTHERS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}
MOST_TOKENS = {"v03_mma": 2048}
ROUNDS, MOST, MOST_CACHED = 7, 8192, 1 << 18
FILL = 2.0  # microseconds that one launch more takes, about
STARTS = (1, 2, 17, 65, 129, 257, 513, 1025, 2049, MOST + 1)  # of the ranges of tokens


class Prompts(NamedTuple):
    dtype: str
    batch: int
    tokens: int
    keys: int  # the tokens among them
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    causal: bool

    def case(self) -> Case:
        op = ops.get("prefill_attention")
        shape = {"batch": self.batch, "seq_q": self.tokens, "seq_kv": self.keys}
        shape |= {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        shape |= {"v_dim": self.v_dim} if self.v_dim != self.head_dim else {}
        return op.case("", self.dtype, shape, {"call": "causal" if self.causal else "full"})

    def problem(self) -> Problem:
        return Problem(*self[1:])

    def is_for_decode(self) -> bool:
        """Whether decode_attention takes it."""
        return self.tokens <= MOST_NEW and self.head_dim in DIMS and (self.causal or self.tokens == 1)


def prompts(seed: int, tokens_range: tuple[int, int], keys_range: tuple[int, int] | None) -> Iterator[Prompts]:
    rng, models = random.Random(seed), [model for model in drawn.models() if model.head_dim in drawn.PREFILLED]

    def log_uniform(low: int, high: int) -> int:
        return int(math.exp(rng.uniform(math.log(low), math.log(high + 1))))

    while True:
        model, tokens = rng.choice(models), log_uniform(*tokens_range)
        keys = tokens if keys_range is None else max(tokens, log_uniform(*keys_range))
        batch = log_uniform(1, max(1, min(MOST // tokens, MOST_CACHED // keys)))
        v_dim = drawn.V_DIM.get(model.head_dim) or model.head_dim
        dtype = rng.choice(["bfloat16", "bfloat16", "float16"])
        causal = rng.random() < 0.75
        yield Prompts(dtype, batch, tokens, keys, model.heads, model.kv_heads, model.head_dim, v_dim, causal)


def kernels_for(of: Prompts) -> list[str]:
    registered, case = ops.get("prefill_attention").kernels, of.case()
    return [
        name
        for name in KERNELS
        if of.tokens <= MOST_TOKENS.get(name, of.tokens) and registered[name].unsupported(case, (9, 0)) is None
    ]


def time_prompts(of: Prompts, run: Mapping[str, Callable[..., object]], flushed: torch.Tensor) -> list[dict[str, Any]]:
    make = {"device": flushed.device, "dtype": getattr(torch, of.dtype)}
    q = torch.randn(of.batch, of.tokens, of.heads, of.head_dim, **make)
    k = torch.randn(of.batch, of.keys, of.kv_heads, of.head_dim, **make)
    v = torch.randn(of.batch, of.keys, of.kv_heads, of.v_dim, **make)
    out = torch.empty(of.batch, of.tokens, of.heads, of.v_dim, **make)
    lse, nothing = torch.empty(0, device=flushed.device), torch.empty(0, dtype=torch.int32, device=flushed.device)
    tensors = (out, lse, q, k, v, nothing, nothing)
    scalars: dict[str, Any] = {"causal": of.causal, "window": 0, "softcap": 0.0}
    expected: torch.Tensor | None = None
    calls: dict[str, Callable[[], object]] = {}
    for name, backend in OTHERS.items():
        call = baselines.by_backend(backend)
        try:
            expected = call(*tensors, **scalars).float()
        except RuntimeError:
            continue  # it does not take these heads
        calls[name] = lambda call=call: call(*tensors, **scalars)  # type: ignore[misc]
    if expected is None:
        expected = baselines.sdpa(*tensors, **scalars).float()
    for kernel in kernels_for(of):
        calls[kernel] = lambda call=run[kernel]: call(*tensors, of.causal, 0, 0.0, 0.0)  # type: ignore[misc]
        out.fill_(math.nan)
        calls[kernel]()
        check(of, kernel, out, expected)
    if of.is_for_decode():
        lengths = torch.full((of.batch,), of.keys, dtype=torch.int32, device=flushed.device)
        calls[DECODE] = lambda: decode_attention.decode_attention(q, k, v, lengths)
        check(of, DECODE, calls[DECODE](), expected)
    return [of._asdict() | {"kernel": kernel, "us": us} for kernel, us in cold.medians(calls, flushed, ROUNDS).items()]


def check(of: Prompts, kernel: str, out: Any, expected: torch.Tensor) -> None:
    if not (error := float((out.float() - expected).abs().max())) <= 0.05:
        sys.exit(f"attention_times.py: {kernel} at {of} is wrong: error {error:.3g}, allowed 0.05")


def as_called(found: pd.DataFrame) -> pd.DataFrame:
    """The same times, but FILL more for decode_attention: `attention` fills a tensor with the lengths before it calls that."""
    return found.assign(us=found.us + FILL * (found.kernel == DECODE))


def with_choice(found: pd.DataFrame) -> pd.DataFrame:
    """A line for each problem: the time of each kernel that was timed, else NaN; `chosen`, the kernel that `attention` takes
    where nothing was measured, or decode_attention, its time `chosen_us`; `fastest_us` of ours, and `other_us` of the others. A
    problem whose chosen kernel was not timed is left out, and so is one that no other takes."""
    times = as_called(found).pivot_table(index=[*Prompts._fields], columns="kernel", values="us").reset_index()
    kernels = [name for name in times.columns if name in OURS]
    chosen = []
    for fields in times[[*Prompts._fields]].itertuples(index=False):
        of, case = Prompts(*fields), Prompts(*fields).case()
        named = best.best("prefill_attention", case.dtype, case.params, case.shape, (9, 0), "").kernel
        chosen.append(DECODE if fastest(of.problem(), of.is_for_decode()) == DECODE else named)
    at = [kernels.index(name) if name in kernels else -1 for name in chosen]
    values = np.column_stack([times[kernels].to_numpy(), np.full(len(times), np.nan)])
    others = [name for name in OTHERS if name in times.columns]
    times = times.assign(
        chosen=chosen,
        chosen_us=values[np.arange(len(times)), at],
        fastest_us=times[kernels].min(axis=1),
        other_us=times[others].min(axis=1),
    )
    return times[times.chosen_us.notna() & times.other_us.notna()]


def lines(of: pd.DataFrame) -> Iterator[str]:
    titles = f"{'problems':>9} {'chosen':>8} {'fastest':>8} {'< 0.95':>7} {'mean loss':>10} {'most':>7}"
    yield f"{'heads':>9} {'tokens':>11} {titles}"
    for (dim, v_dim), heads in of.groupby(["head_dim", "v_dim"]):
        for low, after in pairwise(STARTS):
            some = heads[(low <= heads.tokens) & (heads.tokens < after)]
            if some.empty:
                continue
            ratios = [some.other_us / some[name] for name in ("chosen_us", "fastest_us")]
            means = " ".join(f"{math.exp(np.log(x).mean()):8.3f}" for x in ratios)
            loss = 100 * (some.chosen_us / some.fastest_us - 1)
            under = f"{100 * (ratios[0] < 0.95).mean():5.1f} %"
            of_heads = f"{dim}" if dim == v_dim else f"{dim}/{v_dim}"
            yield (
                f"{of_heads:>9} {low:5}-{after - 1:<5} {len(some):9} {means} {under} {loss.mean():8.2f} % {loss.max():5.1f} %"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("file", nargs="?", type=Path, help="print the tables of these times")
    parser.add_argument("--time", action="store_true", help="overwrite this GPU's times with those of new problems")
    parser.add_argument("--seconds", type=float, default=60, help="how long to time")
    parser.add_argument("--seed", type=int, default=1, help="for drawing problems")
    span = ("LEAST", "MOST")
    parser.add_argument("--tokens", type=int, nargs=2, default=(1, MOST), metavar=span, help="of a prompt")
    parser.add_argument("--keys", type=int, nargs=2, metavar=span, help="of a cache that ends with the tokens")
    arguments = parser.parse_args()
    for name, given, limit in (("tokens", arguments.tokens, MOST), ("keys", arguments.keys, MOST_CACHED)):
        if given and not 1 <= given[0] <= given[1] <= limit:
            least, most = given
            sys.exit(f"attention_times.py: --{name} {least} {most} is no range of 1 to {limit}: give the least first")
    if arguments.time == bool(arguments.file):
        sys.exit("attention_times.py takes either --time, on a GPU, or a file of times")
    if arguments.file:
        path = next((path for path in (arguments.file, RESULTS / arguments.file) if path.is_file()), None)
        if path is None:
            sys.exit(f"attention_times.py: there is no {arguments.file}: name a file that --time wrote")
        try:
            times = pd.read_parquet(path, columns=[*Prompts._fields, "kernel", "us"])
        except ValueError:  # of pyarrow, which reads it
            sys.exit(f"attention_times.py: {path} is not a file that --time wrote")
        print(*lines(with_choice(times)), sep="\n")
        return
    device = cold.find_hopper("attention_times.py --time")
    registered = ops.get("prefill_attention").kernels
    run = {name: library.registered(registered[name], device) for name in KERNELS}
    flushed, found, begin = cold.to_flush(device), [], time.monotonic()
    for number, of in enumerate(prompts(arguments.seed, arguments.tokens, arguments.keys)):
        if time.monotonic() - begin > arguments.seconds:
            break
        found += time_prompts(of, run, flushed)
        if number % 50 == 0:
            print(f"{number} problems after {time.monotonic() - begin:.0f} s", flush=True)
    if not found:
        sys.exit(f"attention_times.py: nothing was timed in {arguments.seconds:g} s; give it more --seconds")
    rows.write("attention-cached" if arguments.keys else "attention", found, device)
    print(*lines(with_choice(pd.DataFrame(found))), sep="\n")


if __name__ == "__main__":
    main()
