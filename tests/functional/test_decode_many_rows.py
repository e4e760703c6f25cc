"""`minfer.decode_attention` of many rows of queries that share keys, which it hands to kernels of prefill_attention."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from minfer import decode_attention, ops
from minfer.bench.device import pick
from minfer.build import toolchain
from tests.emulator import Emulated, compiled
from tests.functional.test_attention import definition, int32, near, random
from tests.functional.test_attention_pages import in_pages

OWN = sys.modules["minfer.functional.decode_attention"]
LENGTHS = [300, 0, 5, 261, 12]  # two are shorter than 12 new tokens, and one as long


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """On a CPU as on Hopper: its kernels of prefill_attention take the same problems."""
    if request.param == "cpu":
        monkeypatch.setattr(OWN, "_is_on_hopper", lambda q: True)
    return pick(request.param)


@pytest.fixture
def handed_over(monkeypatch):
    """The ops whose kernels were called."""
    called, call = [], OWN.library.call
    monkeypatch.setattr(OWN.library, "call", lambda op, *x, **y: called.append(op) or call(op, *x, **y))
    return called


def kept_in(slots: int, sequences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A cache with room for 256 keys or more of each sequence, and the page table; without slots, side by side."""
    if not slots:
        cache = torch.full((len(sequences), 320, *sequences[0].shape[1:]), torch.nan, dtype=sequences[0].dtype)
        for row, values in zip(cache, sequences, strict=True):
            row[: len(values)] = values
        return cache, None
    cache, table = in_pages(slots, *sequences)
    wider = torch.zeros(len(sequences), max(table.shape[1], -(-256 // slots)), dtype=torch.int32)
    wider[:, : table.shape[1]] = table
    return cache, wider


@pytest.mark.parametrize("slots", [0, 8, 16, 128])
@pytest.mark.parametrize(("new", "heads", "kv_heads", "dim"), [(12, 6, 2, 64), (5, 8, 1, 128)])
def test_many_rows_are_the_definition(new, heads, kv_heads, dim, slots, device, handed_over):
    q = random(len(LENGTHS), new, heads, dim)
    k, v = ([random(length, kv_heads, dim) for length in LENGTHS] for _ in range(2))
    (kept_k, table), (kept_v, _) = kept_in(slots, k), kept_in(slots, v)
    table = None if table is None else table.to(device)
    for scale in (None, 0.3):
        out = decode_attention(
            q.to(device), kept_k.to(device), kept_v.to(device), int32(LENGTHS).to(device), page_table=table, scale=scale
        )
        assert out.shape == q.shape and out.is_contiguous() and out.isfinite().all()
        for i in range(len(LENGTHS)):
            expected = definition(q[i], k[i], v[i], causal=True, **({"scale": scale} if scale else {}))[0]
            near(out[i].cpu(), expected)
    assert handed_over == ["prefill_attention"] * 2


@pytest.mark.parametrize(
    "other", ["few rows", "few keys", "window", "softcap", "sinks", "mask", "small pages", "heads of 96"]
)
def test_all_else_is_for_its_own_kernels(other, device, handed_over):
    new, keys, dim, slots, given = 12, 300, 64, 16, {}
    if other == "few rows":
        new = 5
    elif other == "few keys":
        keys = 200
    elif other == "small pages":
        slots = 4
    elif other == "heads of 96":
        dim = 96
    elif other in ("window", "softcap"):
        given[other] = 70
    elif other == "sinks":
        given[other] = torch.zeros(6, device=device)
    else:
        given[other] = torch.ones(1, new, new, dtype=torch.bool, device=device)
    q, k = random(1, new, 6, dim).to(device), random(keys, 2, dim)
    kept, table = in_pages(slots, k)
    kept, table = kept.to(device), table.to(device)
    decode_attention(q, kept, kept, int32([keys]).to(device), page_table=table, **given)
    assert "prefill_attention" not in handed_over


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(toolchain.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch")
@pytest.mark.parametrize(("name", "slots"), [("v08_compact", 0), ("v14_key_parts", 0), ("v18_paged_parts", 16)])
def test_kernels_for_hopper_take_the_lengths_of_keys_alone(name: str, slots: int, tmp_path: Path) -> None:
    """On the emulator, with 8 multiprocessors, so that keys are divided, and with as many as an H200 has."""
    kernel = ops.get("prefill_attention").kernels[name]
    function = Emulated(kernel, compiled(kernel, tmp_path, {}))
    q = random(len(LENGTHS), 12, 6, 64)
    k, v = ([random(length, 2, 64) for length in LENGTHS] for _ in range(2))
    (kept_k, table), (kept_v, _) = kept_in(slots, k), kept_in(slots, v)
    tables = () if table is None else (table,)
    for multiprocessors in (8, 132):
        function.run_on(multiprocessors)
        out = torch.full_like(q, torch.nan)
        tensors = (out, torch.empty(0), q, *tables, kept_k, kept_v, int32([]), int32(LENGTHS))
        function(*tensors, causal=True, window=0, softcap=0.0)
        for i in range(len(LENGTHS)):
            near(out[i], definition(q[i], k[i], v[i], causal=True)[0])
