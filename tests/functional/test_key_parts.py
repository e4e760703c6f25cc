"""v14_key_parts of prefill_attention: into how many parts it divides keys, and what comes of them on the emulator."""

from __future__ import annotations

import ctypes
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
from tests.emulator.mistakes import KEY_PARTS
from tests.spaced import spaced

SOURCE = Kernel("prefill_attention", "key_parts", "cpp", Path(__file__).with_name("key_parts.cpp"))
OP = ops.get("prefill_attention")
H200 = 132  # multiprocessors


@pytest.fixture(scope="module")
def model() -> ctypes.CDLL:
    found = host.load(SOURCE)
    found.minfer_count_parts.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
    return found


def test_keys_are_divided_where_multiprocessors_would_be_idle(model: ctypes.CDLL) -> None:
    """16 items: 1 x 47 queries over 55343 keys, 1 x 110 over 29456, 1 x 25 over 9584. One item of a very long sequence has
    almost as many parts as there are multiprocessors for it, up to 64. 144 whole items would take two waves."""
    count = model.minfer_count_parts
    assert [count(16, -(-keys // 64), H200) for keys in (55343, 29456, 9584)] == [8, 8, 8]
    assert count(1, 1000, H200) in range(60, 65) and count(2, 1000, H200) in range(60, 65)
    assert count(66, 1000, H200) == 2 and count(44, 1000, H200) == 3
    assert count(144, 483, H200) in (6, 7)  # 6 x 73 queries over 30882 keys, 24 heads
    assert [count(items, 1000, H200) for items in (132, 264, 1320, 10**9)] == [1] * 4
    assert [count(16, blocks, H200) for blocks in (0, 1, 7, 8, 12)] == [1, 1, 1, 2, 3]
    assert count(0, 1000, H200) == 1


def test_the_model_of_its_time_counts_the_same_parts(model: ctypes.CDLL) -> None:
    rng = random.Random(2)
    for _ in range(1000):
        items, blocks = rng.randint(1, 400), int(2 ** rng.uniform(0, 14))
        assert attention_times.count_parts(items, blocks) == model.minfer_count_parts(items, blocks, H200)


def test_no_other_number_of_parts_ends_sooner_and_none_is_too_short(model: ctypes.CDLL) -> None:
    count, least, rng = model.minfer_count_parts, model.minfer_least_blocks(), random.Random(1)
    for _ in range(2000):
        items, blocks, sms = rng.randint(1, 400), int(2 ** rng.uniform(0, 14)), rng.choice((1, 78, 114, 132))
        parts = count(items, blocks, sms)

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
# Multiprocessors, queries and keys of each sequence, and heads, key-value heads and head_dim.
PROBLEMS = {
    "two items in four parts": (8, [(9, 1500)], (16, 1, 64)),
    "four items for three multiprocessors": (3, [(9, 1500)], (4, 2, 64)),
    "three heads that share keys": (8, [(70, 900)], (3, 1, 128)),
    "short sequences and none": (8, [(40, 1100), (0, 0), (3, 30)], (1, 1, 128)),
    # A warpgroup sees no key of the second sequence, and had rows that are NaN before.
    "more queries than keys": (3, [(5, 1300), (100, 20)], (1, 1, 64)),
}


def tried(
    function: Emulated, monkeypatch: pytest.MonkeyPatch, problem: str, layout: str, call: str
) -> tuple[float, bytes]:
    """The largest error over its bound, NaN if there is one; and the bits of out."""
    multiprocessors, lengths, heads = PROBLEMS[problem]
    monkeypatch.setattr(OP, "calls", CALLS)
    monkeypatch.setattr(prefill_attention, "lengths_of", lambda case: lengths)
    sizes = (len(lengths), *map(max, zip(*lengths, strict=True)), *heads)
    shape = dict(zip(OP.axes, sizes, strict=False))
    params = {"layout": layout, "lengths": "gaps:1", "lse": "yes"} | ({"call": call} if call != "causal" else {})
    case: Case = OP.case("v14_key_parts", "float16", shape, params)
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
def test_parts_add_up_to_the_same_bits_in_any_order_and_mistakes_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, mistakes = OP.kernels["v14_key_parts"], list(KEY_PARTS[1].items())
    compiled_to = compiled(kernel, tmp_path, {i: dict([mistake]) for i, mistake in enumerate(mistakes, 1)})
    function = Emulated(kernel, compiled_to)
    each = [(problem, layout, call) for problem in PROBLEMS for layout in ("padded", "packed") for call in CALLS]
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
