"""The models of the times of attention's kernels, and the choice by them."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks import attention_times as timed
from benchmarks import fit_attention as fit
from minfer import ops
from minfer.functional import attention_times as models
from minfer.functional.attention_times import DECODE, Problem
from minfer.functional.best import best

OP = ops.get("prefill_attention")
PROMPTS = {"layout": "padded", "lengths": "full", "lse": "no", "page": "none", "quant": "none"}
HOPPER = (9, 0)


def problem(batch=1, seq_q=512, seq_kv=512, heads=32, kv_heads=8, head_dim=128, v_dim=128, causal=True):
    return Problem(batch, seq_q, seq_kv, heads, kv_heads, head_dim, v_dim, causal)


def chosen(of: Problem, device: str = "", **params: str):
    shape = (
        dict(zip(OP.axes, of[:-1], strict=True))
        if of.v_dim != of.head_dim
        else dict(zip(OP.axes, of[:6], strict=False))
    )
    call = "causal" if of.causal else "full"
    return best("prefill_attention", "bfloat16", PROMPTS | {"call": call} | params, shape, HOPPER, device)


def test_the_constants_are_those_that_the_committed_times_give():
    times = fit.timed()
    found = fit.fitted(times, [kernel for kernel in timed.OURS if kernel in times])
    assert {dims: of.keys() for dims, of in found.items()} == {dims: of.keys() for dims, of in models.CONSTANTS.items()}
    for dims, kernels in found.items():
        for kernel, constants in kernels.items():
            assert constants == pytest.approx(models.CONSTANTS[dims][kernel], rel=0.01, abs=1e-3), (dims, kernel)


def test_at_other_problems_the_choice_loses_little():
    times = fit.timed()
    kernels = [kernel for kernel in timed.OURS if kernel in times]
    is_fitted = np.random.default_rng(0).random(len(times)) < 0.5
    found = fit.losses(times[~is_fitted], kernels, fit.fitted(times[is_fitted], kernels)).loss
    assert len(found) > 500
    assert 0 <= found.min() <= found.mean() < 0.02 < found.max() < 0.6
    always = times.loc[~is_fitted, "v06_no_maximum"] / times.loc[~is_fitted, kernels].min(axis=1) - 1
    assert always.mean() > 0.5  # the choice matters


def test_at_prompts_that_were_timed_after_the_fit_the_choice_loses_little():
    """The page of prefill_attention has the table."""
    page = (Path(__file__).parents[2] / "docs" / "prefill_attention.md").read_text()
    *ranges, total = [line.split() for line in fit.lines_of_later()][1:]
    for tokens, count, chosen_speed, fastest, under, _, loss, *_ in ranges:
        cells = tokens.replace("-", "–"), count, chosen_speed, fastest, f"{under} %", f"{loss} %"
        assert f"| {' | '.join(cells)} |\n" in page
    assert f"{total[1]} other random prompts" in page and int(total[1]) > 250
    assert float(total[6]) < 2 and float(total[2]) > 0.97 * float(total[3]) > 1


def test_best_takes_the_kernel_of_the_models_whose_heads_it_supports():
    rng, taken = random.Random(5), set()
    for (head_dim, v_dim), causal in itertools.product([*models.CONSTANTS, (192, 192)], (True, False)):
        for _ in range(60):
            seq_q, group, kv_heads = (int(2 ** rng.uniform(0, most)) for most in (13, 4, 4))
            of = problem(
                rng.randint(1, 40),
                seq_q,
                seq_q + rng.randint(0, 1000),
                group * kv_heads,
                kv_heads,
                head_dim,
                v_dim,
                causal,
            )
            expected, choice = models.fastest(of), chosen(of)
            assert choice.kernel == expected and "by models of the times" in choice.why
            assert min(models.times(of).values()) > 0
            taken.add(expected)
    assert taken == models.TILES.keys() - {"v14_key_parts"}  # which has no constants yet


@pytest.mark.parametrize(("of", "kernel"), [
    (problem(13, 60, 60, 8, 4, 256, 256), "v03_mma"),
    (problem(2, 239, 239, 128, 128, 192, 128), "v08_compact"),
    (problem(29, 40, 40, 32, 32, 96, 96), "v08_compact"),
    (problem(1, 8192, 8192), "v06_no_maximum"),
    (problem(1, 8192, 8192, 16, 16, 256, 256), "v13_wide_heads"),
    (problem(8, 600, 600), "v07_short"),
])  # fmt: skip
def test_the_choice_at_some_problems(of: Problem, kernel: str):
    assert models.fastest(of) == kernel
    assert models.explained(of).startswith(kernel)


def test_few_queries_over_many_keys_are_of_decode_attention():
    few = problem(1, 1, 60000)
    assert models.fastest(few, True) == models.fastest(few, True, hopper=False) == DECODE
    assert models.fastest(few) not in (DECODE, "") and DECODE not in models.explained(few)
    assert models.fastest(few, hopper=False) == "v03_mma"
    assert models.fastest(problem(64, 16, 16, 32, 4), True) != DECODE  # whose keys are few


@pytest.mark.parametrize("zero", ["batch", "seq_q", "seq_kv", "heads", "kv_heads"])
def test_a_size_of_0_and_heads_that_do_not_fit_have_times(zero: str):
    for of in (problem()._replace(**{zero: 0}), problem(heads=16, kv_heads=64)):
        assert all(us > 0 for us in models.times(of).values()) and models.fastest(of, True)
        assert chosen(of).kernel in models.TILES


def test_other_heads_have_no_model():
    of = problem(head_dim=32, v_dim=32)
    assert models.fastest(of, True) == models.explained(of) == ""


@pytest.mark.parametrize(("group", "together"), [(1, 1), (2, 2), (3, 1), (6, 2), (12, 4), (16, 16), (32, 16), (48, 16)])
def test_a_tile_has_as_many_heads_as_the_kernels_pack(group: int, together: int):
    assert models.heads_in_tile(group) == together


def test_the_parts_of_the_time_count_tiles_and_blocks():
    of = problem(2, 300, 300, 8, 2)
    # v06: 3 tiles of 128 queries for each of 16 heads, which see 128, 256 and 300 keys: blocks of 128
    assert models.terms_of_time(of, models.TILES["v06_no_maximum"]) == (1, 3, 1, 48 * 2 / 132, models.megabytes(of))
    # v07: 4 heads together, so 10 tiles of 32 queries for 4 groups, the first sees 32 keys: blocks of 64
    assert models.terms_of_time(of, models.TILES["v07_short"]) == (1, 5, 1, 40 * 3 / 132, models.megabytes(of))
    full = of._replace(causal=False)
    assert models.terms_of_time(full, models.TILES["v07_short"])[3] == 40 * 5 / 132
    assert models.megabytes(of) == pytest.approx(2 * 2 * 300 * (8 + 2) * 256 / 1e6)
    # decode: 2 x 2 key-value heads, each with 16 x 4 rows
    parts = models.terms_of_decode(problem(2, 16, 640, 8, 2))
    assert parts == pytest.approx((1, 8, 4 * 8 * 10 / 132, 4 * 640 * 512 / 1e6, 2 * 16 * 8 * 512 / 1e6))
