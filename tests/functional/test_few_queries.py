"""`minfer.attention` of few queries over many keys, which it hands to decode_attention."""

from __future__ import annotations

import sys

import pytest
import torch

from minfer import attention
from minfer.functional.attention_times import DECODE
from tests.functional.test_attention import definition, near, random


@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("queries", [1, 9, 16, 17])
def test_few_queries_over_many_keys_are_of_decode_attention(queries, dim, v_dim, monkeypatch):
    """As on a GPU: the result is the definition, also over a part of a longer cache. The first call and three repeats agree on
    whether decode_attention computes it."""
    own, counted = sys.modules["minfer.functional.attention"], []
    monkeypatch.setattr(own, "DEVICES_THAT_DIVIDE", ("cpu",))
    monkeypatch.setattr(own, "fastest", lambda of, *_, **__: DECODE if of.seq_kv > 60 else "")
    divided = own.decode_attention
    monkeypatch.setattr(own, "decode_attention", lambda *x, **y: counted.append(1) or divided(*x, **y))
    q, k, v = random(2, queries, 6, dim), random(2, 90, 2, dim)[:, :70], random(2, 70, 2, v_dim)
    causal = {"causal": True}
    for scalars in (
        {},
        causal,
        causal | {"window": 65},
        causal | {"window": 5},
        causal | {"softcap": 3.0, "scale": 0.3},
    ):
        sees_many = min(70, scalars.get("window", 70) + queries) > 60
        is_divided = sees_many and v_dim != 192 and queries <= 16 and (queries == 1 or "causal" in scalars)
        for _ in range(4):  # a call that repeats an earlier one may be prepared
            counted.clear()
            out = attention(q, k, v, **scalars)
            assert bool(counted) == is_divided
        assert out.shape == (*q.shape[:3], v_dim) and out.is_contiguous()
        for i in range(2):
            near(out[i], definition(q[i], k[i], v[i], **scalars)[0])
    counted.clear()
    attention(q, k, v, causal=True, sinks=torch.zeros(6))
    attention(q, k, v, causal=True, return_lse=True)
    attention(q, k[:, :60], v[:, :60], causal=True)
    assert not counted


@pytest.mark.parametrize(("window", "counted"), [(None, 900), (50, 67), (1000, 900)])
def test_the_choice_counts_the_keys_that_a_window_leaves(window, counted, monkeypatch):
    own, chosen = sys.modules["minfer.functional.attention"], []
    call = own.library.call
    monkeypatch.setattr(
        own.library,
        "call",
        lambda op, x, dtype, shape, *y, **z: chosen.append(shape) or call(op, x, dtype, shape, *y, **z),
    )
    q, k = random(1, 17, 4, 64), random(1, 900, 2, 64)
    near(
        attention(q, k, k, causal=True, window=window)[0],
        definition(q[0], k[0], k[0], causal=True, window=window or 0)[0],
    )
    assert [shape["seq_kv"] for shape in chosen] == [counted]
