"""`minfer.merge_state` and `minfer.cascade_attention`: attention over parts of the keys that gives attention over all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from minfer import attention, cascade_attention, merge_state, ops
from minfer.bench.verify import WrongResult, verify
from minfer.ops.merge_state import eager

pytestmark = pytest.mark.usefixtures("one_thread")
OP = ops.get("merge_state")
CPU = torch.device("cpu")
INF = math.inf
Tensor = torch.Tensor


def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape).to(dtype)


def near(found: Tensor, wanted: Tensor, tolerance: float = 3e-3) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("cut", [0, 1, 20, 41])
@pytest.mark.parametrize("packed", [False, True])
def test_states_of_two_parts_of_the_keys_are_that_of_all(cut: int, packed: bool) -> None:
    torch.manual_seed(cut)
    q, k, v = random(2, 7, 4, 64), random(2, 41, 2, 64), random(2, 41, 2, 64)
    whole = attention(q, k, v, return_lse=True)
    parts = [attention(q, k[:, at], v[:, at], return_lse=True) for at in (slice(cut), slice(cut, None))]
    (a, a_lse), (b, b_lse) = parts
    if packed:
        for found, wanted in zip(merge_state(a[1], a_lse[1], b[1], b_lse[1]), whole, strict=True):
            near(found, wanted[1])
    else:
        for found, wanted in zip(merge_state(a, a_lse, b, b_lse), whole, strict=True):
            near(found, wanted)


def test_a_state_without_keys_changes_nothing_even_if_its_values_are_nan() -> None:
    a, a_lse = random(1, 3, 2, 8), torch.randn(1, 2, 3)
    nothing, never = torch.full_like(a, torch.nan), torch.full_like(a_lse, -INF)
    for given in ((a, a_lse, nothing, never), (nothing, never, a, a_lse)):
        out, lse = merge_state(*given)
        assert torch.equal(out, a) and torch.equal(lse, a_lse)
    out, lse = merge_state(nothing, never, nothing, never)
    assert not out.any() and bool((lse == -INF).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_sum_exps_of_hundreds_do_not_overflow(dtype: torch.dtype) -> None:
    a, b = random(1, 4, 1, 5, dtype=dtype), random(1, 4, 1, 5, dtype=dtype)
    a_lse = torch.tensor([500.0, -500.0, 3.0, 90.0]).view(1, 1, 4)
    b_lse = torch.tensor([-500.0, 500.0, 3.0, 500.0]).view(1, 1, 4)
    out, lse = merge_state(a, a_lse, b, b_lse)
    near(out[0, :, 0], torch.stack([a[0, 0, 0], b[0, 1, 0], (a + b)[0, 2, 0] / 2, b[0, 3, 0]]), 1e-2)
    near(lse.flatten(), torch.tensor([500.0, 500.0, 3 + math.log(2), 500.0]), 1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_cascade_is_attention_over_the_prefix_and_the_own_keys(causal: bool, kv_heads: int) -> None:
    q, k, v = random(3, 5, 4, 64), random(3, 9, kv_heads, 64), random(3, 9, kv_heads, 64)
    prefix = [random(17, kv_heads, 64) for _ in range(2)]
    keys, values = (torch.cat((p.expand(3, -1, -1, -1), own), 1) for p, own in zip(prefix, (k, v), strict=True))
    wanted, wanted_lse = attention(q, keys, values, causal=causal, softcap=20.0, return_lse=True)
    out, lse = cascade_attention(q, k, v, *prefix, causal=causal, softcap=20.0, return_lse=True)
    near(out, wanted)
    near(lse, wanted_lse, 1e-4)
    assert out.is_contiguous() and lse.shape == wanted_lse.shape


def test_a_cascade_of_packed_requests_of_different_lengths() -> None:
    new, own = [0, 3, 4, 9], [0, 5, 12, 17]
    q, k, v = random(9, 2, 64), random(17, 2, 64), random(17, 2, 64)
    prefix_k, prefix_v = random(8, 2, 64), random(8, 2, 64)
    ends = (torch.tensor(new).int(), torch.tensor(own).int())
    out = cascade_attention(q, k, v, prefix_k, prefix_v, causal=True, cu_seqlens=ends)
    for (a, b), (c, d) in zip(itertools.pairwise(new), itertools.pairwise(own), strict=True):
        keys, values = torch.cat((prefix_k, k[c:d])), torch.cat((prefix_v, v[c:d]))
        near(out[a:b], attention(q[None, a:b], keys[None], values[None], causal=True)[0])


def test_a_prefix_and_own_keys_may_be_empty() -> None:
    q, k, v = random(2, 4, 2, 64), random(2, 4, 2, 64), random(2, 4, 2, 64)
    none = k[0, :0]
    near(cascade_attention(q, k, v, none, none, causal=True), attention(q, k, v, causal=True))
    alone = cascade_attention(q, k[:, :0], v[:, :0], k[0], v[0])
    near(alone, attention(q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)))


def paged(slots: int, keys: list[int], shared: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values in pages, NaN where a page has none, and a table in which all sequences begin with the same pages."""
    needed = [-(-count // slots) for count in keys]
    first = shared // slots
    free = torch.randperm(first + sum(count - first for count in needed) + 2)
    table = torch.full((len(keys), max(needed) + 1), 2**30)  # an entry behind a sequence's last page is not read
    next_free = first
    for row, count in zip(table, needed, strict=True):
        row[:first] = free[:first]
        row[first:count] = free[next_free : next_free + count - first]
        next_free += count - first
    both = torch.full((2, len(free), slots, 2, 64), torch.nan, dtype=torch.float16)
    for row, count in zip(table, keys, strict=True):
        for at in range(count):
            page = both[:, row[at // slots], at % slots]
            page[:] = torch.where(page.isnan(), random(2, 2, 64), page)
    return both[0], both[1], table.int()


@pytest.mark.parametrize("shared", [0, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_a_cascade_over_pages_is_attention_over_pages(shared: int, causal: bool) -> None:
    torch.manual_seed(shared)
    new, keys = [0, 3, 4, 9], [21, 17, 40]
    q, sinks = random(9, 4, 64), torch.randn(4)
    k, v, table = paged(8, keys, shared)
    how = {
        "causal": causal,
        "softcap": 20.0,
        "cu_seqlens": torch.tensor(new).int(),
        "lengths": torch.tensor(keys).int(),
    }
    how |= {"page_table": table, "return_lse": True}
    for given in ({}, {"sinks": sinks}):
        wanted, wanted_lse = attention(q, k, v, **how, **given)
        out, lse = cascade_attention(q, k, v, shared, **how, **given)
        near(out, wanted)
        near(lse, wanted_lse, 1e-4)


def attend_within(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, softcap: float, sinks: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, in fp64, of (tokens, heads, head_dim), without sinks and with them: out of both, and the log-sum-exp."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    apart = (torch.arange(len(q)) + len(k) - len(q))[:, None] - torch.arange(len(k))
    seen = (apart.abs() < window) & ((apart >= 0) | (not causal))
    scores = softcap * torch.tanh(torch.einsum("qhd,khd->hqk", q, k) / 8 / softcap)
    lse = scores.masked_fill_(~seen, -INF).logsumexp(-1)
    out = torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), v)
    kept = (lse - torch.logaddexp(lse, sinks.double()[:, None])).exp().t()[..., None]
    return torch.stack((out, kept * out)), lse


# The requests have 5, 1 and 24 keys of their own behind 16 of the prefix, and 3, 1 and 5 queries.
@pytest.mark.parametrize("window", [1, 4, 12, 30, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [0, 16])
def test_each_query_of_a_cascade_over_pages_sees_its_window(shared: int, causal: bool, window: int) -> None:
    torch.manual_seed(window)
    new, keys = [0, 3, 4, 9], [21, 17, 40]
    q, sinks = random(9, 4, 64), torch.randn(4)
    k, v, table = paged(8, keys, shared)
    how = {"cu_seqlens": torch.tensor(new).int(), "lengths": torch.tensor(keys).int(), "page_table": table}
    how |= {"causal": causal, "window": window, "softcap": 3.0}
    wanted, wanted_lse = [], []
    for row, count, a, b in zip(table, keys, new, new[1:], strict=False):
        own = (x[row[: -(-count // 8)].long()].flatten(0, 1)[:count] for x in (k, v))
        out, lse = attend_within(q[a:b], *own, causal, window, 3.0, sinks)
        wanted.append(out)
        wanted_lse.append(lse)
    plain, with_sinks = torch.cat(wanted, 1)
    for given, expected in (({}, plain), ({"sinks": sinks}, with_sinks)):
        out, lse = cascade_attention(q, k, v, shared, **how, **given, return_lse=True)
        near(out, expected)
        near(lse, torch.cat(wanted_lse, 1), 1e-4)
        assert torch.equal(cascade_attention(q, k, v, shared, **how, **given), out)


def test_sinks_add_to_the_denominator_of_the_whole_cascade() -> None:
    q, k, v, prefix = random(2, 5, 4, 64), random(2, 9, 4, 64), random(2, 9, 4, 64), random(2, 11, 4, 64)
    sinks = torch.randn(4)
    keys, values = (torch.cat((p.expand(2, -1, -1, -1), own), 1) for p, own in zip(prefix, (k, v), strict=True))
    near(cascade_attention(q, k, v, *prefix, sinks=sinks), attention(q, keys, values, sinks=sinks))


def test_pages_that_do_not_fit_a_prefix_are_refused_in_a_sentence() -> None:
    q, (k, v, table), ends, keys = (
        random(2, 4, 64),
        paged(8, [20, 30], 16),
        torch.tensor([0, 1, 2]).int(),
        torch.tensor([20, 30]),
    )
    how = {"cu_seqlens": ends, "lengths": keys.int(), "page_table": table}
    for prefix, message in (
        (12, "a prefix of whole pages .*, got 12 keys in pages of 8"),
        (80, r"got 80 keys .* \(2, 5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            cascade_attention(q, k, v, prefix, **how)
    with pytest.raises(TypeError, match="takes the number of shared keys as prefix_k beside a page_table"):
        cascade_attention(q, k, v, k[0], **how)
    with pytest.raises(
        ValueError, match=r"takes, beside a page_table, q of .* cu_seqlens of the queries and lengths of the keys"
    ):
        cascade_attention(q, k, v, 16, cu_seqlens=ends, page_table=table)
    with pytest.raises(
        TypeError, match="takes tensors as prefix_k and prefix_v, or a number as prefix_k beside a page_table"
    ):
        cascade_attention(q, k, v, 16)
    with pytest.raises(ValueError, match=r"takes float32 sinks of \(4,\), got torch.float32 of \(3,\)"):
        cascade_attention(q, k, v, 16, **how, sinks=torch.randn(3))
    with pytest.raises(ValueError, match=r"a prefix of whole pages .*, got 12 keys in pages of 8"):
        cascade_attention(q, k, v, 12, **how, window=4)
    with pytest.raises(ValueError, match="takes a window above 0, or None, got 0"):
        cascade_attention(q, k, v, 16, **how, window=0)
    with pytest.raises(ValueError, match="takes a window beside a page_table only, got a window of 4: put"):
        cascade_attention(q[None], q[None], q[None], q, q, window=4)


def test_arguments_that_do_not_fit_are_refused_in_a_sentence() -> None:
    q, k, p = random(2, 4, 2, 64), random(2, 3, 2, 64), random(5, 2, 64)
    state, lse = random(1, 3, 2, 8), torch.randn(1, 2, 3)
    for call, message in (
        (
            lambda: cascade_attention(q, q, q, p[0], p),
            r"takes prefix_k of \(prefix, kv_heads, head_dim\), got \(2, 64\)",
        ),
        (
            lambda: cascade_attention(q, q, q, p, p[1:]),
            r"takes prefix_v of prefix_k's shape, \(5, 2, 64\), got \(4, 2, 64\)",
        ),
        (
            lambda: cascade_attention(q, q, q, p.float(), p),
            "takes prefix_k of the dtype of q, torch.float16, got torch.float32",
        ),
        (
            lambda: cascade_attention(q, k, k, p, p, causal=True),
            "at least as many keys of a request as its 4 queries, got 3",
        ),
        (lambda: merge_state(state, lse, state[:, 1:], lse), r"takes b of \(1, 3, 2, 8\), got \(1, 2, 2, 8\)"),
        (lambda: merge_state(state, lse.half(), state, lse), "takes a_lse of float32"),
        (
            lambda: merge_state(state.double(), lse, state, lse),
            "takes a of float32, float16 or bfloat16, got torch.float64",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(RuntimeError, match="merge_state has no backward"):
        merge_state(state.requires_grad_(), lse, state, lse)


def wrong(how: str) -> Callable[..., None]:
    """`torch` with a mistake."""

    def kernel(out: Tensor, lse: Tensor, a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> None:
        for to, found in zip((out, lse), eager(out, lse, a, a_lse, b, b_lse), strict=True):
            to.copy_(found)
        if how == "the mean":
            out.copy_((a + b) / 2)
        elif how == "the log-sum-exp of one":
            lse.copy_(a_lse)
        elif how == "values of a state without keys":
            out.copy_((a_lse - lse).exp().nan_to_num(0).transpose(1, 2)[..., None] * a.float() + 0 * out)
        elif how == "not normalised":
            out.mul_(1.01)

    return kernel


@pytest.mark.parametrize(
    "how", ["right", "the mean", "the log-sum-exp of one", "values of a state without keys", "not normalised"]
)
def test_a_wrong_kernel_is_found(how: str) -> None:
    case = OP.case("torch", "bfloat16", dict(zip(OP.axes, (2, 9, 3, 64), strict=True)), {})
    kernel = OP.kernels["v01_naive"]
    if how == "right":
        verify(OP, case, kernel, wrong(how), CPU, None, seed=1)
    else:
        with pytest.raises(WrongResult):
            verify(OP, case, kernel, wrong(how), CPU, None, seed=1)
