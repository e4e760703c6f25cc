"""The models of the times of attention's kernels, and the choice by them."""

from __future__ import annotations

import itertools
import json
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
from minfer.ops.prefill_attention import MOST_COPIED

OP = ops.get("prefill_attention")
PROMPTS = {"layout": "padded", "lengths": "full", "lse": "no", "page": "none", "quant": "none"}
HOPPER = (9, 0)
PAGED = ("v09", "v10", "v11", "v12", "v15", "v16", "v18")  # kernels over pages or fp8


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
    found = fit.fitted(fit.timed())
    assert json.loads(fit.written(found)) == json.loads(fit.written(models.CONSTANTS))
    for how, of_dims in found.items():
        assert {dims: of.keys() for dims, of in of_dims.items()} == {
            dims: of.keys() for dims, of in models.CONSTANTS[how].items()
        }
        for dims, kernels in of_dims.items():
            for kernel, constants in kernels.items():
                expected = models.CONSTANTS[how][dims][kernel]
                assert constants == pytest.approx(expected, rel=0.01, abs=1e-3), (how, dims, kernel)


def test_at_other_problems_the_choice_loses_little():
    times = fit.timed()
    is_fitted = np.random.default_rng(0).random(len(times)) < 0.5
    found = fit.losses(times[~is_fitted], fit.fitted(times[is_fitted]))
    for kept, some in found.groupby("kept"):
        loss = some.loss
        assert len(loss) > 50, kept
        assert 0 <= loss.min() <= loss.mean() < 0.03, kept
    together = found[found.kept == models.TOGETHER].loss
    assert len(together) > 500 and together.mean() < 0.012 and together.max() < 0.6
    rest = times.loc[together.index]
    always = (
        rest.v06_no_maximum / rest[[x for x in timed.OURS if x in rest and not x.startswith(PAGED)]].min(axis=1) - 1
    )
    assert always.mean() > 0.5  # the choice matters


def test_at_problems_that_were_not_fitted_the_choice_loses_little():
    """The page of prefill_attention has the tables."""
    page = (Path(__file__).parents[2] / "docs" / "prefill_attention.md").read_text()
    for name in fit.LATER:
        *ranges, total = [line.split() for line in fit.lines_of_later(name)][2:]
        for tokens, count, chosen_speed, fastest, under, _, loss, *_ in ranges:
            speeds = [] if name == fit.PAGED else [chosen_speed, fastest, f"{under} %"]
            assert f"| {' | '.join([tokens.replace('-', '–'), count, *speeds, f'{loss} %'])} |\n" in page
        assert f"{total[1]} other random" in page and int(total[1]) > 100
        assert float(total[6]) < 3
        if name != fit.PAGED:
            assert float(total[2]) > 0.97 * float(total[3]) > 1


@pytest.mark.parametrize(
    "params", [{}, {"page": "16"}, {"page": "1"}, {"quant": "fp8"}, {"page": "16", "quant": "fp8"}]
)
def test_best_takes_the_kernel_of_the_models_whose_heads_it_supports(params: dict[str, str]):
    rng, taken, how = random.Random(5), set(), models.how_kept(params)
    for (head_dim, v_dim), causal in itertools.product([*models.CONSTANTS[how], (192, 192)], (True, False)):
        for _ in range(60):
            seq_q, cached, group, kv_heads = (int(2 ** rng.uniform(0, most)) for most in (13, 16, 4, 4))
            of = problem(rng.randint(1, 40), seq_q, seq_q + cached, group * kv_heads, kv_heads, head_dim, v_dim, causal)
            expected, choice = models.fastest(of, kept=how), chosen(of, **params)
            if not expected:  # heads of 192 over pages
                assert how != models.TOGETHER
                continue
            assert choice.kernel == expected and "by models of the times" in choice.why
            assert min(models.times(of, how).values()) > 0
            taken.add(expected)
    assert taken == {x.removesuffix(models.DIVIDED) for of in models.CONSTANTS[how].values() for x in of} - {DECODE}


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


def test_a_cache_that_grows_by_a_token_is_chosen_for_once_in_64_times():
    models._fastest.cache_clear()
    for keys in range(40_000, 40_640):
        assert models.fastest(problem(1, 17, keys)) == "v14_key_parts"
        assert models.explained(problem(1, 17, keys)).startswith("v14_key_parts")
    assert models._fastest.cache_info().misses <= 11
    for keys in range(600, 700):  # the queries' own keys are counted one by one
        models.fastest(problem(1, keys, keys))
    assert models._fastest.cache_info().misses > 100


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
    # v06: 3 tiles of 128 queries for each of 16 heads, which see 128, 256 and 300 keys: blocks of 128. The last tile has 44
    # rows, which one warpgroup multiplies.
    megabytes = models.megabytes(of)
    assert models.terms_of_time(of, "v06_no_maximum") == pytest.approx((1, 3, 1, 16 * 5.5 / 132, megabytes, 3))
    # v07: 4 heads together, so 10 tiles of 32 queries for 4 groups, the first sees 32 keys: blocks of 64. The last has 48 rows.
    assert models.terms_of_time(of, "v07_short") == pytest.approx((1, 5, 1, 4 * 29.5 / 132, megabytes, 5))
    full = of._replace(causal=False)
    assert models.terms_of_time(full, "v07_short")[3] == pytest.approx(4 * 47.5 / 132)
    assert megabytes == pytest.approx(2 * 2 * 300 * (8 + 2) * 256 / 1e6)
    # decode: 2 x 2 key-value heads, each with 16 x 4 rows
    parts = models.terms_of_decode(problem(2, 16, 640, 8, 2))
    assert parts == pytest.approx((1, 8, 4 * 8 * 10 / 132, 4 * 640 * 512 / 1e6, 2 * 16 * 8 * 512 / 1e6))


def test_the_multiprocessor_with_the_most_blocks():
    # 160 tiles that see the same 100 blocks: two waves, and one multiprocessor takes two tiles
    assert models.terms_of_time(problem(5, 128, 12800, causal=False), "v06_no_maximum")[5] == 200
    # 256 tiles of 1 to 8 blocks, longest first: the one with the most takes one of 8 and one of 4 or 5
    assert 12 < models.terms_of_time(problem(1, 1024, 1024), "v06_no_maximum")[5] < 13
    # 64 queries of each of 12 heads: one warpgroup, in 11 parts
    assert models.terms_of_time(problem(1, 64, 64 * 1100, 12, 12), "v14_key_parts")[1:4] == (50, 1, 12 * 1100 / 2 / 132)


def test_kernels_that_divide_keys_have_times_where_they_divide():
    long, short = problem(1, 32, 32768), problem(4, 512, 512)
    for kernel in ("v14_key_parts", "v18_paged_parts", f"v15_gathered{models.DIVIDED}"):
        assert models.has_times(long, kernel) and not models.has_times(short, kernel)
    assert models.has_times(short, "v15_gathered") and not models.has_times(long, "v15_gathered")
    assert models.has_times(long._replace(head_dim=96, v_dim=96), "v15_gathered")
    assert models.MOST_COPIED * 1e6 == MOST_COPIED
    much = problem(1, 32, 1 << 18)  # a copy of 1 GiB
    assert not models.has_times(much, "v15_gathered") and not models.has_times(much, f"v15_gathered{models.DIVIDED}")
