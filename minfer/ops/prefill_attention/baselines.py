"""What PyTorch and other projects have for `prefill_attention`.

None of them is told lengths on the host, as none of our kernels is: a captured CUDA graph must stay right when they change."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any

import torch

from minfer.ops.case import Case

if TYPE_CHECKING:
    from minfer.ops.op import Op

Tensor = torch.Tensor
LARGE = 128  # head_dim up to which FlashAttention's Hopper kernels go


def places(seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of packed tokens: which sequence each is of, its index there, and its sequence's length."""
    token = torch.arange(tokens, device=seqlens.device)
    sequence = torch.searchsorted(seqlens, token, right=True) - 1
    at = sequence.clamp_max(len(seqlens) - 2)
    return sequence, token - seqlens[at], (seqlens[1:] - seqlens[:-1])[at]


def visible(q: Tensor, k: Tensor, q_seqlens: Tensor, kv_seqlens: Tensor, causal: bool, window: int) -> Tensor:
    """Which keys each query sees, (batch or 1, queries, keys), computed on the device."""
    queries, keys = q.shape[-3], k.shape[-3]
    if q.dim() == 3:
        (of_q, i, count_q), (of_k, j, _) = places(q_seqlens, queries), places(kv_seqlens, keys)
        count_k = (kv_seqlens[1:] - kv_seqlens[:-1])[of_q.clamp_max(len(q_seqlens) - 2)]
        seen = of_q[:, None] == of_k
        distance = ((i + count_k - count_q)[:, None] - j)[None]
        seen = seen[None]
    else:
        i, j = (torch.arange(count, device=q.device) for count in (queries, keys))
        count_q = q_seqlens if len(q_seqlens) else torch.full((1,), queries, device=q.device)
        count_k = kv_seqlens if len(kv_seqlens) else torch.full((1,), keys, device=q.device)
        seen = (i < count_q[:, None])[:, :, None] & (j < count_k[:, None])[:, None]
        distance = (i + (count_k - count_q)[:, None])[:, :, None] - j
    if causal:
        seen = seen & (distance >= 0)
    if window:
        seen = seen & (distance.abs() < window)
    return seen


def unpoisoned(x: Tensor, seqlens: Tensor) -> Tensor:
    """With zeros behind the lengths: a probability of 0 times what may be NaN is no 0."""
    if not len(seqlens):
        return x
    token = torch.arange(x.shape[-3], device=x.device)
    unused = token >= (seqlens[-1:] if x.dim() == 3 else seqlens[:, None])
    return x.masked_fill(unused[..., None, None], 0.0)


def gathered(
    k: Tensor, v: Tensor, kv_seqlens: Tensor, page_table: Tensor, packed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values out of their pages, in a padded batch, or one sequence after the other; and kv_seqlens for these. The
    host does not know the lengths: the tensors have room for all that the table has."""
    pages, slots = k.shape[:2]
    most = page_table.shape[1] * slots
    if packed:
        kv_seqlens = torch.nn.functional.pad(kv_seqlens.cumsum(0), (1, 0)).int()
        sequence, place, _ = places(kv_seqlens, len(page_table) * most)
        sequence, place = sequence.clamp_max(len(page_table) - 1), place.clamp_max(most - 1)
    else:
        sequence, place = (torch.arange(count, device=k.device) for count in (len(page_table), most))
        sequence = sequence[:, None]
    page = page_table[sequence, place // slots].clamp(0, pages - 1)  # the tails of the table are of no page
    rows = page.long() * slots + place % slots

    def taken(x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        return x.view(torch.uint8)[rows].view(x.dtype) if x.element_size() == 1 else x[rows]  # PyTorch indexes no fp8

    return taken(k), taken(v), kv_seqlens


Named = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, tuple[Tensor, Tensor], Tensor | None]


def named(out: Tensor, lse: Tensor, q: Tensor, *given: Tensor) -> Named:
    """The tensors of a case. The page table is None without pages, the scales are None without fp8."""
    quantised = given[-1].is_floating_point()
    *table, k, v, q_seqlens, kv_seqlens = given[:-1] if quantised else given
    paged = table and table[0].shape[1]
    return out, lse, q, table[0] if paged else None, k, v, (q_seqlens, kv_seqlens), given[-1] if quantised else None


def of_caches(function: Callable[..., Any], widened: torch.dtype | None = None) -> Callable[..., Any]:
    """The same function, which first gathers keys and values from pages, and dequantises those in fp8 to `widened`, or to the
    dtype of q."""

    @wraps(function)
    def call(*tensors: Tensor, **scalars: Any) -> Any:
        out, lse, q, table, k, v, (q_seqlens, kv_seqlens), scales = named(*tensors)
        if table is not None:
            k, v, kv_seqlens = gathered(k, v, kv_seqlens, table, q.dim() == 3)
        if scales is not None:
            k, v = (x.to(widened or q.dtype) * scale for x, scale in zip((k, v), scales, strict=True))
        return function(out, lse, q, k, v, q_seqlens, kv_seqlens, **scalars)

    return call


def eager(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, q_seqlens: Tensor, kv_seqlens: Tensor,
    causal: bool, window: int, softcap: float,
) -> None:  # fmt: skip
    """The definition in fp32, a batch entry and a key-value head at a time, so that the scores fit."""
    seen = visible(q, k, q_seqlens, kv_seqlens, causal, window)
    if q.dim() == 3:
        q, k, v, out, lse = (x.unsqueeze(0) for x in (q, k, v, out, lse))
    group = q.shape[2] // k.shape[2]
    for entry, head in ((entry, head) for entry in range(len(q)) for head in range(k.shape[2])):
        heads, mask = slice(head * group, (head + 1) * group), seen[entry if len(seen) > 1 else 0]
        scores = q[entry, :, heads].transpose(0, 1).float() @ k[entry, :, head].float().t()
        scores *= q.shape[3] ** -0.5
        if softcap:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        scores.masked_fill_(~mask, -math.inf)
        if lse.numel():
            lse[entry, heads] = scores.logsumexp(-1)
        p = scores.softmax(-1).masked_fill_(~mask, 0.0)  # NaN where a query sees no key
        values = v[entry, :, head].float().masked_fill(~mask.any(0)[:, None], 0.0)
        out[entry, :, heads] = (p @ values).transpose(0, 1)


def sdpa(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, q_seqlens: Tensor, kv_seqlens: Tensor,
    causal: bool, window: int, softcap: float,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention`, and `varlen_attn` for packed sequences, with the backend that PyTorch chooses.

    Of ragged lengths in a padded batch it needs a mask, and zeros in the place of what is not used."""
    if q.dim() == 3:
        return (packed if q.is_cuda else one_by_one)(q, k, v, q_seqlens, kv_seqlens, causal)
    mask: Any = None
    if len(q_seqlens):
        k, v = (unpoisoned(x, kv_seqlens) for x in (k, v))
        mask = visible(q, k, q_seqlens, kv_seqlens, causal, 0)[:, None]
    elif causal and q.shape[1] != k.shape[1]:  # is_causal aligns the first query with the first key
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(q.shape[1], k.shape[1])
    found = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal and mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)
    return found.masked_fill(~mask.any(-1)[:, 0, :, None, None], 0.0) if len(q_seqlens) else found


@cache
def varlen_gqa() -> dict[str, Any]:
    """What `varlen_attn` must be told to share key-value heads: PyTorch 2.11 has no such argument, and shares them."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def packed(q: Tensor, k: Tensor, v: Tensor, q_seqlens: Tensor, kv_seqlens: Tensor, causal: bool) -> Tensor:
    """The host does not know the longest sequence: it gives the bound that it has, and blocks without work end at once."""
    from torch.nn.attention.varlen import varlen_attn

    sides = (-1, 0) if causal else (-1, -1)
    gqa = varlen_gqa() if q.shape[1] != k.shape[1] else {}
    found = varlen_attn(q, k, v, q_seqlens, kv_seqlens, len(q), len(k), window_size=sides, **gqa)
    assert isinstance(found, Tensor)
    return found


def one_by_one(q: Tensor, k: Tensor, v: Tensor, q_seqlens: Tensor, kv_seqlens: Tensor, causal: bool) -> Tensor:
    """On a CPU, where lengths are at hand: a call for each sequence."""
    found, nothing = torch.zeros_like(q), q.new_empty(0, dtype=torch.int32)
    ends = zip(q_seqlens.tolist(), q_seqlens[1:].tolist(), kv_seqlens.tolist(), kv_seqlens[1:].tolist(), strict=False)
    for first, end, first_kv, end_kv in ends:
        if end > first and end_kv > first_kv:
            rows, keys, values = (x[None] for x in (q[first:end], k[first_kv:end_kv], v[first_kv:end_kv]))
            found[first:end] = sdpa(rows, nothing, rows, keys, values, nothing, nothing, causal, 0, 0.0)[0]
    return found


def by_backend(name: str, function: Callable[..., Tensor] = sdpa) -> Callable[..., Tensor]:
    """A function that calls SDPA, with one backend of PyTorch's alone; RuntimeError where it does not take a case."""

    def call(*tensors: Any, **scalars: Any) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, name)):
            return function(*tensors, **scalars)

    return call


@cache
def compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 1 << 20
    torch._inductor.config.compile_threads = 1
    return torch.compile(flex_attention, dynamic=False)


def cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(score / softcap)


@cache
def block_mask(queries: int, keys: int, causal: bool, window: int, device: torch.device) -> Any:
    """Which blocks are computed, which a user makes once for a shape; its time is not taken."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = i + (keys - queries) - j
        seen = distance >= 0 if causal else distance > -window
        return seen & (distance < window) if window else seen

    return create_block_mask(sees, None, None, queries, keys, device=str(device))


def flex(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, q_seqlens: Tensor, kv_seqlens: Tensor,
    causal: bool, window: int, softcap: float,
) -> Tensor:  # fmt: skip
    """FlexAttention, compiled for each shape."""
    queries, keys = q.shape[1], k.shape[1]
    mask = block_mask(queries, keys, causal, window, q.device) if causal or window else None
    score = partial(cap, softcap=softcap) if softcap else None
    found = compiled_flex()(
        *(x.transpose(1, 2) for x in (q, k, v)), score_mod=score, block_mask=mask, enable_gqa=q.shape[2] != k.shape[2]
    )
    return found.transpose(1, 2)


def flash_attn_4(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, q_seqlens: Tensor, kv_seqlens: Tensor,
    causal: bool, window: int, softcap: float,
) -> Tensor:  # fmt: skip
    """FlashAttention-4, whose Hopper kernels are those of FlashAttention-3 in CuTe's DSL; with a window both sides are one
    less than ours, which counts the query's own position."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    sides = (window - 1, 0 if causal else window - 1) if window else (None, None)
    scalars = {"causal": causal and not window, "window_size": sides, "softcap": softcap}
    if q.dim() == 3:
        return flash_attn_varlen_func(q, k, v, cu_seqlens_q=q_seqlens, cu_seqlens_k=kv_seqlens, **scalars)[0]
    return flash_attn_func(q, k, v, **scalars)[0]


def full_if_padded(case: Case) -> str | None:
    if case.params["layout"] == "padded" and case.params["lengths"] != "full":
        return "takes lengths of packed sequences only (params.layout=packed)"
    return None


def hopper_sizes(case: Case) -> str | None:
    if case["head_dim"] > LARGE:
        return f"takes a head_dim up to {LARGE}"
    return full_if_padded(case)


def torch_sizes(case: Case) -> str | None:
    if case.params["layout"] == "packed" and "v_dim" in case.shape:
        return "takes packed v with the head_dim of q, as varlen_attn does"
    return without_empty_rows(case)


def without_empty_rows(case: Case) -> str | None:
    """FlexAttention and SDPA leave rows that see no key undefined."""
    return f"needs seq_kv >= seq_q={case['seq_q']}" if case["seq_kv"] < case["seq_q"] else None


def full_without_empty_rows(case: Case) -> str | None:
    return full_if_padded(case) or without_empty_rows(case)


def flash_sizes(case: Case) -> str | None:
    return "takes v with the head_dim of q" if "v_dim" in case.shape else full_without_empty_rows(case)


def cudnn_sizes(case: Case) -> str | None:
    """Why cuDNN cannot run a case. PyTorch 2.11 says "No available kernel" if there is one key."""
    return "needs seq_kv > 1" if case["seq_kv"] == 1 else full_if_padded(case) or torch_sizes(case)


def register(op: Op) -> None:
    """PyTorch's first, which ratios are against; the definition is the baseline where that does not support a case."""
    plain = {"call": ("causal", "full"), "lse": ("no",)}
    side_by_side = {"page": ("none",), "quant": ("none",)}
    backend_of = plain | side_by_side
    whole = {"layout": ("padded",), "lengths": ("full",), "lse": ("no",)} | side_by_side
    op.torch("torch", of_caches(sdpa), baseline=True, returns=(0,), params=plain, requires=torch_sizes)
    op.torch("torch_eager", of_caches(eager, torch.float32), baseline=True)
    for name, backend, requires in (
        ("torch_flash", "FLASH_ATTENTION", flash_sizes),
        ("torch_cudnn", "CUDNN_ATTENTION", cudnn_sizes),
    ):
        op.peer(name, by_backend(backend), "torch.nn.attention", returns=(0,), params=backend_of, requires=requires)
    op.peer(
        "torch_flex", flex, "torch.nn.attention.flex_attention", returns=(0,), params=whole, requires=without_empty_rows
    )
    op.peer(
        "flash_attn_4",
        flash_attn_4,
        "flash_attn",
        returns=(0,),
        params={"lse": ("no",)} | side_by_side,
        requires=hopper_sizes,
    )
