"""`minfer.kv_append_`: an op like PyTorch's own, which writes what it is told to and nothing else."""

from __future__ import annotations

import pytest
import torch

from minfer import kv_append_

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8 = torch.float8_e4m3fn


def caches(blocks: int, slots: int, heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(blocks, slots, heads, dim).to(dtype) for _ in range(2)]


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for _ in range(2)]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("slots", "heads", "dim"), [(16, 2, 8), (5, 3, 5), (1, 1, 64)])
def test_paged_writes_each_place_and_no_other(slots, heads, dim, dtype, quantised):
    scales = torch.tensor([0.01, 0.5]) if quantised else None
    to = caches(40 // slots + 8, slots, heads, dim, FP8 if quantised else dtype)
    given = rows(6, heads, dim, dtype=dtype)
    where = torch.tensor([7, -1, 3, to[0].shape[0] * slots, 0, 2**62])
    wanted = [cache.clone() for cache in to]
    for number, (cache, new) in enumerate(zip(wanted, given, strict=True)):
        for token in (0, 2, 4):
            value = new[token]
            if scales is not None:
                value = (value.float() * (1.0 / scales[number])).clamp(-448, 448)
            cache.view(-1, heads, dim)[int(where[token])] = value.to(cache.dtype)
    kv_append_(*to, *given, where, scales)
    for mine, theirs in zip(to, wanted, strict=True):
        assert torch.equal(raw(mine), raw(theirs))


@pytest.mark.parametrize("new", [1, 3])
def test_contiguous_starts_at_the_positions(new):
    to, given = caches(5, 7, 2, 8, torch.float32), rows(5, new, 2, 8)
    where = torch.tensor([0, 4, 6, -2, 2**62])  # the third ends behind the cache, the others are not in it
    wanted = [cache.clone() for cache in to]
    for cache, rows_ in zip(wanted, given, strict=True):
        for sequence, first in ((0, 0), (1, 4), (2, 6)):
            count = min(new, 7 - first)
            cache[sequence, first : first + count] = rows_[sequence, :count]
    kv_append_(*to, *given, where)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(to, wanted, strict=True))


def test_parts_of_a_projection_and_what_lies_badly():
    projection = torch.randn(6, 48).half()
    k, v = projection[:, 8:24].view(6, 2, 8), projection[:, 25:41].view(6, 2, 8)
    for mine in ((k, v), (k.flip(0), v), (k[:1].expand(6, -1, -1), v)):
        to = caches(3, 4, 2, 8, torch.float16)
        kv_append_(*to, *mine, torch.arange(6))
        assert all(torch.equal(cache.flatten(0, 1)[:6], new) for cache, new in zip(to, mine, strict=True))


def test_no_token_is_no_work():
    to = caches(3, 4, 2, 8, torch.float32)
    kv_append_(*to, *rows(0, 2, 8), torch.empty(0, dtype=torch.int64))


@pytest.mark.parametrize("quantised", [False, True])
def test_it_is_an_op_like_pytorchs_own(quantised):
    to, given = caches(3, 4, 2, 8, FP8 if quantised else torch.float32), rows(6, 2, 8)
    scales = torch.tensor([0.01, 0.5]) if quantised else None
    # opcheck's other checks multiply the caches, and PyTorch multiplies no fp8.
    more = {"test_utils": ["test_autograd_registration", "test_faketensor"]} if quantised else {}
    torch.library.opcheck(torch.ops.minfer.kv_append_.default, (*to, *given, torch.arange(6), scales), **more)


def test_it_compiles_whole_and_for_any_shape():
    def step(k_cache, v_cache, k, v, where):
        kv_append_(k_cache, v_cache, k, v, where)
        return k_cache.sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (6, 7):
        to, given = caches(3, 4, 2, 8, torch.float32), rows(tokens, 2, 8)
        total = compiled(*to, *given, torch.arange(tokens))
        assert torch.equal(to[1].flatten(0, 1)[:tokens], given[1])
        torch.testing.assert_close(total, to[0].sum())


def test_mistakes_are_a_sentence_each():
    (k_cache, v_cache), (k, v), where = caches(3, 4, 2, 8, torch.float32), rows(6, 2, 8), torch.arange(6)
    for arguments, said in (
        ((k_cache, v_cache[:2], k, v, where), r"takes v_cache of \(3, 4, 2, 8\), got \(2, 4, 2, 8\)$"),
        ((k_cache, v_cache, k[:, :1], v, where), r"takes v of \(6, 1, 8\), got \(6, 2, 8\)$"),
        ((k_cache, v_cache, k[None], v[None], where[:1]), r"takes k_cache of \(1, slots, 2, 8\), got \(3, 4, 2, 8\)$"),
        ((k_cache, v_cache, k, v, where.int()), r"takes where of int64 and the shape \(6,\), got torch.int32, \(6,\)$"),
        ((k_cache, v_cache, k, v.half(), where), "takes v of the dtype of k, torch.float32, got torch.float16$"),
        ((k_cache, v_cache.half(), k, v, where), "takes v_cache of the dtype of k, torch.float32, got torch.float16$"),
        ((k_cache, v_cache, k, v, where, torch.ones(2)), "takes k_cache of float8_e4m3fn and the shape .blocks, slots, 2, 8.,"),
        ((k_cache.to(FP8), v_cache.to(FP8), k, v, where, torch.ones(1)), r"takes scales of float32 and the shape \(2,\)"),
        ((k_cache, k_cache, k, v, where), "takes two caches that share no elements, got one tensor as both$"),
        ((k_cache, v_cache, k, v, where.to("meta")), "takes where on the device of k, cpu, got meta$"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^minfer.kv_append_ {said}"):
            kv_append_(*arguments)
    with pytest.raises(
        ValueError, match=r"^minfer.kv_append_ takes a contiguous k_cache, which it changes in place, got strides"
    ):
        kv_append_(*(torch.randn(3, 4, 2, 16)[..., :8] for _ in range(2)), k, v, where)
    with pytest.raises(RuntimeError, match=r"^minfer.kv_append_ has no backward: call it under torch.no_grad\(\)"):
        kv_append_(k_cache, v_cache, k.requires_grad_(), v, where)
