"""Times the kernels among which `attention` chooses, at random prompts of public models, and says how good the choice is.

    uv run python benchmarks/attention_times.py --time --seconds 120         # on an H100 or H200: overwrites its times
    uv run python benchmarks/attention_times.py --time --tokens 1 64         # prompts of so many tokens
    uv run python benchmarks/attention_times.py --time --tokens 1 16 --keys 256 65536    # new tokens over a cache
    uv run python benchmarks/attention_times.py --time --paged --keys 256 65536          # in pages, and in fp8
    uv run python benchmarks/attention_times.py FILE                         # the tables of its times; needs no GPU

Heads are those of the models of `minfer/ops/models.csv`. The tokens of a prompt and the number of prompts are log-uniform, and
a batch has at most 8192 tokens. Sequences are padded and full, and three quarters of the problems are causal. With --keys the
tokens are the last ones of a cache, whose length is log-uniform too; the caches of a batch have at most 262,144 keys. A third
of the problems are in float16. Each kernel is timed at each problem that it supports, v03_mma only up to 2048 tokens, because
others are far faster beyond. So is `decode_attention`, which `attention` calls for few queries, but not where that would call a
kernel of prefill_attention. It needs their lengths on the GPU; the tables and the models count 2 us more for the launch that
writes these. cuDNN and FlashAttention-2 are those of PyTorch's `scaled_dot_product_attention`. With --paged keys and values are
in pages of 16 or of 1, or in fp8 with or without pages of 16, and no other implementation is timed.

The committed times have a column `seed`: 3 and 5 of prompts; 4 with `--keys 256 65536 --tokens 1 2048`; 6 and 8 the same with
`--tokens 1 1024`; 9 to 11 as 4, with --paged. The models were fitted to all but 5, 8 and 10 (benchmarks/fit_attention.py).

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from benchmarks import cold, rows
from minfer import ops
from minfer.functional import best, decode_attention, library
from minfer.functional.attention_times import DECODE, TOGETHER, Problem, fastest, how_kept
from minfer.functional.decode_attention import DIMS, MOST_NEW, is_for_prefill
from minfer.ops import Case, Kernel, drawn
from minfer.ops.prefill_attention import baselines

RESULTS = Path(__file__).resolve().parent / "results"
KERNELS = (
    "v03_mma", "v05_pingpong", "v06_no_maximum", "v07_short", "v08_compact", "v09_paged", "v10_paged_boxes", "v11_paged_short",
    "v12_fp8", "v13_wide_heads", "v14_key_parts", "v15_gathered", "v16_fp8_gathered", "v17_wide_parts", "v18_paged_parts",
)  # fmt: skip
OURS = (*KERNELS, DECODE)
OTHERS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}
MOST_TOKENS = {"v03_mma": 2048}
ROUNDS, MOST, MOST_CACHED = 7, 8192, 1 << 18
FILL = 2.0  # microseconds that one launch more takes, about
# How keys and values may be kept: the op's parameters `page` and `quant`.
KEPT = {
    TOGETHER: ("none", "none"),
    "pages of 16": ("16", "none"),
    "pages of 1": ("1", "none"),
    "fp8": ("none", "fp8"),
    "fp8 in pages of 16": ("16", "fp8"),
}
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
    kept: str = TOGETHER  # of KEPT

    def params(self) -> dict[str, str]:
        page, quant = KEPT[self.kept]
        return {"page": page, "quant": quant, "call": "causal" if self.causal else "full"}

    def case(self) -> Case:
        op = ops.get("prefill_attention")
        shape = {"batch": self.batch, "seq_q": self.tokens, "seq_kv": self.keys}
        shape |= {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        shape |= {"v_dim": self.v_dim} if self.v_dim != self.head_dim else {}
        return op.case("", self.dtype, shape, self.params())

    def problem(self) -> Problem:
        return Problem(*self[1:-1])

    def how_kept(self) -> str:
        """As the models name it."""
        return how_kept(self.params())

    def is_for_decode(self) -> bool:
        """Whether decode_attention takes it, with a kernel of its own."""
        return (
            self.kept == TOGETHER
            and self.tokens <= MOST_NEW
            and not is_for_prefill(self.tokens, self.keys, self.heads, self.kv_heads, self.head_dim)
            and self.head_dim in DIMS
            and (self.causal or self.tokens == 1)
        )


def prompts(
    seed: int, tokens_range: tuple[int, int], keys_range: tuple[int, int] | None, paged: bool = False
) -> Iterator[Prompts]:
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
        kept = rng.choice(list(KEPT)[1:]) if paged else TOGETHER
        yield Prompts(dtype, batch, tokens, keys, model.heads, model.kv_heads, model.head_dim, v_dim, causal, kept)


def takes(kernel: Kernel, kept: Sequence[str]) -> bool:
    """Whether the kernel reads keys and values in any of these ways. The others need not be compiled."""
    pages, quants = (kernel.params.get(name) for name in ("page", "quant"))
    return any(
        (not pages or page in pages) and (not quants or quant in quants) for page, quant in map(KEPT.__getitem__, kept)
    )


def kernels_for(of: Prompts) -> list[str]:
    registered, case = ops.get("prefill_attention").kernels, of.case()
    return [
        name
        for name in KERNELS
        if of.tokens <= MOST_TOKENS.get(name, of.tokens) and registered[name].unsupported(case, (9, 0)) is None
    ]


def operands(
    of: Prompts, k: torch.Tensor, v: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """What a kernel takes between q and the lengths: the page table, if there is one, and k and v as they are kept; k and v
    as they are read; and what it takes behind the lengths."""
    page, quant = KEPT[of.kept]
    table, scales = torch.empty(of.batch, 0, dtype=torch.int32, device=k.device), []
    if quant == "fp8":
        scales = [torch.tensor([0.75, 1.25], device=k.device)]
        kept = [(x.float() / scale).to(torch.float8_e4m3fn) for x, scale in zip((k, v), scales[0], strict=True)]
        k, v = ((x.float() * scale).to(k.dtype) for x, scale in zip(kept, scales[0], strict=True))
    else:
        kept = [k, v]
    if page != "none":
        slots, pages = int(page), math.ceil(of.keys / int(page))
        numbers = torch.randperm(of.batch * pages, device=k.device)
        table = numbers.view(of.batch, pages).int()
        kept = [in_pages(x.view(torch.uint8), numbers, slots).view(x.dtype) for x in kept]
    return ([] if of.kept == TOGETHER else [table]) + kept, k, v, scales


def in_pages(rows: torch.Tensor, numbers: torch.Tensor, slots: int) -> torch.Tensor:
    """Rows of (batch, keys, …) as pages of so many slots, the i-th at numbers[i]."""
    batch, keys, *rest = rows.shape
    padded = rows.new_zeros(batch, len(numbers) // batch * slots, *rest)
    padded[:, :keys] = rows
    found = torch.empty_like(padded).view(-1, slots, *rest)
    found[numbers] = padded.view(-1, slots, *rest)
    return found


def time_prompts(of: Prompts, run: Mapping[str, Callable[..., object]], flushed: torch.Tensor) -> list[dict[str, Any]]:
    make = {"device": flushed.device, "dtype": getattr(torch, of.dtype)}
    q = torch.randn(of.batch, of.tokens, of.heads, of.head_dim, **make)
    kept, k, v, scales = operands(
        of,
        torch.randn(of.batch, of.keys, of.kv_heads, of.head_dim, **make),
        torch.randn(of.batch, of.keys, of.kv_heads, of.v_dim, **make),
    )
    out = torch.empty(of.batch, of.tokens, of.heads, of.v_dim, **make)
    lse, nothing = torch.empty(0, device=flushed.device), torch.empty(0, dtype=torch.int32, device=flushed.device)
    seqlens = [nothing] * 2
    if KEPT[of.kept][0] != "none":
        seqlens = [torch.full((of.batch,), n, dtype=torch.int32, device=flushed.device) for n in (of.tokens, of.keys)]
    tensors, together = (out, lse, q, *kept, *seqlens, *scales), (out, lse, q, k, v, nothing, nothing)
    scalars: dict[str, Any] = {"causal": of.causal, "window": 0, "softcap": 0.0}
    expected: torch.Tensor | None = None
    calls: dict[str, Callable[[], object]] = {}
    for name, backend in OTHERS.items():
        call = baselines.by_backend(backend)
        try:
            expected = call(*together, **scalars).float()
        except RuntimeError:
            continue  # it does not take these heads
        if of.kept == TOGETHER:
            calls[name] = lambda call=call: call(*together, **scalars)  # type: ignore[misc]
    if expected is None:
        expected = baselines.sdpa(*together, **scalars).float()
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


def read(path: Path) -> pd.DataFrame:
    """The times of a file, with a column `kept`."""
    found = pd.read_parquet(path)
    return found.assign(kept=found["kept"].fillna(TOGETHER) if "kept" in found else TOGETHER)


def as_called(found: pd.DataFrame) -> pd.DataFrame:
    """The same times, but FILL more for decode_attention: `attention` fills a tensor with the lengths before it calls that."""
    return found.assign(us=found.us + FILL * (found.kernel == DECODE))


def with_choice(found: pd.DataFrame) -> pd.DataFrame:
    """A line for each problem: the time of each kernel that was timed, else NaN; `chosen`, the kernel that `attention` takes
    where nothing was measured, or decode_attention, its time `chosen_us`; `fastest_us` of ours, and `other_us` of the others. A
    problem whose chosen kernel was not timed is left out, and so is one with keys and values together that no other takes."""
    times = as_called(found).pivot_table(index=[*Prompts._fields], columns="kernel", values="us").reset_index()
    kernels = [name for name in times.columns if name in OURS]
    chosen = []
    for fields in times[[*Prompts._fields]].itertuples(index=False):
        of, case = Prompts(*fields), Prompts(*fields).case()
        named = best.best("prefill_attention", case.dtype, case.params, case.shape, (9, 0), "").kernel
        is_decode = of.is_for_decode() and fastest(of.problem(), True) == DECODE
        chosen.append(DECODE if is_decode else named)
    at = [kernels.index(name) if name in kernels else -1 for name in chosen]
    values = np.column_stack([times[kernels].to_numpy(), np.full(len(times), np.nan)])
    others = [name for name in OTHERS if name in times.columns]
    times = times.assign(
        chosen=chosen,
        chosen_us=values[np.arange(len(times)), at],
        fastest_us=times[kernels].min(axis=1),
        other_us=times[others].min(axis=1) if others else math.nan,
    )
    return times[times.chosen_us.notna() & (times.other_us.notna() | (times.kept != TOGETHER))]


def lines(of: pd.DataFrame) -> Iterator[str]:
    titles = f"{'problems':>9} {'chosen':>8} {'fastest':>8} {'< 0.95':>7} {'mean loss':>10} {'most':>7}"
    for kept, of_kept in of.groupby("kept"):
        yield f"{kept}"
        yield f"{'heads':>9} {'tokens':>11} {titles}"
        for (dim, v_dim), heads in of_kept.groupby(["head_dim", "v_dim"]):
            for low, after in pairwise(STARTS):
                some = heads[(low <= heads.tokens) & (heads.tokens < after)]
                if some.empty:
                    continue
                of_heads = f"{dim}" if dim == v_dim else f"{dim}/{v_dim}"
                yield f"{of_heads:>9} {low:5}-{after - 1:<5} {summary(some)}"


def summary(some: pd.DataFrame) -> str:
    """How many problems; the speeds of the chosen and of the fastest kernel over that of the others, and the share under 0.95,
    nan where no other was timed; the loss."""
    ratios = [some.other_us / some[name] for name in ("chosen_us", "fastest_us")]
    means = " ".join(f"{math.exp(np.log(x).mean()):8.3f}" for x in ratios)
    loss = 100 * (some.chosen_us / some.fastest_us - 1)
    under = 100 * (ratios[0] < 0.95).mean() if some.other_us.notna().any() else math.nan
    return f"{len(some):9} {means} {under:5.1f} % {loss.mean():8.2f} % {loss.max():5.1f} %"


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
    parser.add_argument("--paged", action="store_true", help="keys and values in pages, and in fp8")
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
            times = read(path)[[*Prompts._fields, "kernel", "us"]]
        except (ValueError, KeyError):  # pyarrow cannot read it, or it has other columns
            sys.exit(f"attention_times.py: {path} is not a file that --time wrote")
        print(*lines(with_choice(times)), sep="\n")
        return
    device = cold.find_hopper("attention_times.py --time")
    registered = ops.get("prefill_attention").kernels
    kept = [name for name in KEPT if (name == TOGETHER) != arguments.paged]
    run = {name: library.registered(registered[name], device) for name in KERNELS if takes(registered[name], kept)}
    flushed, found, begin = cold.to_flush(device), [], time.monotonic()
    for number, of in enumerate(prompts(arguments.seed, arguments.tokens, arguments.keys, arguments.paged)):
        if time.monotonic() - begin > arguments.seconds:
            break
        found += time_prompts(of, run, flushed)
        if number % 50 == 0:
            print(f"{number} problems after {time.monotonic() - begin:.0f} s", flush=True)
    if not found:
        sys.exit(f"attention_times.py: nothing was timed in {arguments.seconds:g} s; give it more --seconds")
    kind = "attention-paged" if arguments.paged else "attention-cached" if arguments.keys else "attention"
    rows.write(kind, found, device)
    print(*lines(with_choice(pd.DataFrame(found))), sep="\n")


if __name__ == "__main__":
    main()
