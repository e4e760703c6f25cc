"""Kernels of prefill_attention that divide keys: into how many parts, and what comes of them on the emulator."""

from __future__ import annotations

import ctypes
import itertools
import random
from pathlib import Path

import pytest
import torch

from minfer import ops
from minfer.bench.errors import compare_output, run_reference
from minfer.bench.operands import Operands
from minfer.build import host, toolchain
from minfer.functional import attention_times
from minfer.ops import Case, Kernel, prefill_attention
from tests.emulator import Emulated, compiled
from tests.emulator.mistakes import FP8_PARTS, KEY_PARTS, WIDE_PARTS
from tests.spaced import spaced

SOURCE = Kernel("prefill_attention", "key_parts", "cpp", Path(__file__).with_name("key_parts.cpp"))
OP = ops.get("prefill_attention")
H200 = 132  # multiprocessors
KERNELS = "v14_key_parts", "v17_wide_parts"


@pytest.fixture(scope="module")
def model() -> ctypes.CDLL:
    found = host.load(SOURCE)
    found.minfer_count_parts.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_bool)
    found.minfer_least_blocks.argtypes = (ctypes.c_bool,)
    return found


def test_keys_are_divided_where_multiprocessors_would_be_idle(model: ctypes.CDLL) -> None:
    """16 items: 1 x 47 queries over 55343 keys, 1 x 110 over 29456, 1 x 25 over 9584. One item of a very long sequence has
    almost as many parts as there are multiprocessors for it, up to 64. 144 whole items would take two waves."""

    def count(items: int, blocks: int) -> int:
        return int(model.minfer_count_parts(items, blocks, H200, False))

    assert [count(16, -(-keys // 64)) for keys in (55343, 29456, 9584)] == [8, 8, 8]
    assert count(1, 1000) in range(60, 65) and count(2, 1000) in range(60, 65)
    assert count(66, 1000) == 2 and count(44, 1000) == 3
    assert count(144, 483) in (6, 7)  # 6 x 73 queries over 30882 keys, 24 heads
    assert [count(items, 1000) for items in (132, 264, 1320, 10**9)] == [1] * 4
    assert [count(16, blocks) for blocks in (0, 1, 7, 8, 12)] == [1, 1, 1, 2, 3]
    assert count(0, 1000) == 1


def test_keys_of_wide_heads_are_divided_in_longer_blocks(model: ctypes.CDLL) -> None:
    """16 tiles: 1 x 33 queries over 6352 keys, which are 50 blocks of 128."""

    def count(items: int, blocks: int) -> int:
        return int(model.minfer_count_parts(items, blocks, H200, True))

    assert count(16, -(-6352 // 128)) == 8
    assert [count(16, blocks) for blocks in (0, 1, 3, 4, 6)] == [1, 1, 1, 2, 3]
    assert [count(items, 1000) for items in (0, 132, 264)] == [1] * 3


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_model_of_its_time_counts_the_same_parts(model: ctypes.CDLL, kernel: str) -> None:
    rng, parts = random.Random(2), attention_times.TILES[kernel].parts
    assert parts is not None
    for _ in range(1000):
        items, blocks = rng.randint(1, 400), int(2 ** rng.uniform(0, 14))
        found = model.minfer_count_parts(items, blocks, H200, kernel == "v17_wide_parts")
        assert attention_times.count_parts(items, blocks, *parts) == found


@pytest.mark.parametrize("wide", [False, True])
def test_no_other_number_of_parts_ends_sooner_and_none_is_too_short(model: ctypes.CDLL, wide: bool) -> None:
    count, least, rng = model.minfer_count_parts, model.minfer_least_blocks(wide), random.Random(1)
    for _ in range(2000):
        items, blocks, sms = rng.randint(1, 400), int(2 ** rng.uniform(0, 14)), rng.choice((1, 78, 114, 132))
        parts = count(items, blocks, sms, wide)

        def longest(parts: int, items: int = items, blocks: int = blocks, sms: int = sms) -> int:
            """The blocks of keys that follow each other on a multiprocessor."""
            return -(-items * parts // sms) * -(-blocks // parts)

        assert 1 <= parts <= 64 and (parts == 1 or blocks // parts >= least)
        assert parts == 1 or (items * parts <= 8 * sms and longest(parts) < longest(1))
        at_once = min(sms // items, blocks // least, 64)  # so many parts all run at once
        assert at_once < 2 or longest(parts) <= longest(at_once)


# Windows of some blocks of keys, which begin behind the first.
CALLS = {
    "causal": {"causal": True, "window": 0, "softcap": 0.0},
    "window": {"causal": True, "window": 600, "softcap": 0.0},
    "full": {"causal": False, "window": 300, "softcap": 20.0},
}
# Multiprocessors, queries and keys of each sequence, and heads, key-value heads, head_dim and v_dim.
Problem = tuple[int, list[tuple[int, int]], tuple[int, ...]]
OF_KEY_PARTS: dict[str, Problem] = {
    "two items in four parts": (8, [(9, 1500)], (16, 1, 64)),
    "four items for three multiprocessors": (3, [(9, 1500)], (4, 2, 64)),
    "three heads that share keys": (8, [(70, 900)], (3, 1, 128)),
    "short sequences and none": (8, [(40, 1100), (0, 0), (3, 30)], (1, 1, 128)),
    # A warpgroup sees no key of the second sequence, and had rows that are NaN before.
    "more queries than keys": (3, [(5, 1300), (100, 20)], (1, 1, 64)),
}
OF_WIDE_PARTS: dict[str, Problem] = {
    "two tiles in four parts": (8, [(9, 1100)], (2, 1, 256)),
    "four tiles for three multiprocessors": (3, [(9, 1500)], (4, 2, 192, 128)),
    "both warpgroups": (8, [(70, 700)], (1, 1, 192)),
    "tiles of four and of five blocks": (8, [(140, 520)], (1, 1, 192, 128)),
    "short sequences and none, in wide heads": (8, [(40, 900), (0, 0), (3, 30)], (1, 1, 256)),
    "more queries than keys, in wide heads": (8, [(5, 900), (100, 20)], (1, 1, 192, 128)),
}
# The kernels, and where keys lie.
PLACES: dict[str, list[dict[str, str]]] = {
    "v14_key_parts": [{}],
    "v15_gathered": [{"page": "1"}],
    "v16_fp8_gathered": [{"quant": "fp8"}, {"page": "16", "quant": "fp8"}],
    "v17_wide_parts": [{}],
    "v18_paged_parts": [{"page": "16"}, {"page": "8"}],
}


def tried(
    function: Emulated,
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    problem: Problem,
    layout: str,
    call: str,
    place: dict[str, str],
) -> tuple[float, bytes]:
    """The largest error over its bound, NaN if there is one; and the bits of out."""
    multiprocessors, lengths, heads = problem
    monkeypatch.setattr(OP, "calls", CALLS)
    monkeypatch.setattr(prefill_attention, "lengths_of", lambda case: lengths)
    sizes = (len(lengths), *map(max, zip(*lengths, strict=True)), *heads)
    shape = dict(zip(OP.axes, sizes, strict=False))
    params = (
        {"layout": layout, "lengths": "gaps:1", "lse": "yes"} | place | ({"call": call} if call != "causal" else {})
    )
    case: Case = OP.case(kernel, "float16", shape, params)
    operands, fresh = (Operands(OP, case, 1, "uniform", torch.device("cpu")) for _ in range(2))
    tensors = spaced(OP, operands)
    function.run_on(multiprocessors)
    function(*tensors.values(), **OP.call(case))
    expected, results = (
        run_reference(OP, case, fresh.tensors),
        fresh.tensors | {name: tensors[name] for name in ("out", "lse")},
    )
    found = [compare_output(OP, case, name, results, expected).over_bound for name in ("out", "lse")]
    return float(torch.tensor(found).max()), tensors["out"].numpy().tobytes()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(toolchain.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch")
@pytest.mark.parametrize("name", PLACES)
def test_parts_add_up_to_the_same_bits_in_any_order_and_mistakes_are_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted mistakes change divided keys only. If a kernel divided none, no mistake would be seen, and the test would
    fail."""
    is_wide = name == "v17_wide_parts"
    edits = WIDE_PARTS[1] if is_wide else KEY_PARTS[1] | (FP8_PARTS[1] if "fp8" in name else {})
    kernel, mistakes = OP.kernels[name], list(edits.items())
    problems = (OF_WIDE_PARTS if is_wide else OF_KEY_PARTS).values()
    compiled_to = compiled(kernel, tmp_path, {i: dict([mistake]) for i, mistake in enumerate(mistakes, 1)})
    function = Emulated(kernel, compiled_to)
    each = list(itertools.product([name], problems, ("padded", "packed"), CALLS, PLACES[name]))
    for problem in each:
        bits = set()
        for _ in range(3):  # each in another order of blocks
            worst, found = tried(function, monkeypatch, *problem)
            assert worst < 1, problem
            bits.add(found)
        assert len(bits) == 1, problem
    for number, (marker, _) in enumerate(mistakes, 1):
        broken = Emulated(kernel, compiled_to, number)
        assert not all(tried(broken, monkeypatch, *problem)[0] < 1 for problem in each), marker
