"""What PyTorch and other projects have for `decode_attention`."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from minfer.ops.attention_reference import heads_of
from minfer.ops.case import Case, both
from minfer.ops.prefill_attention.baselines import by_backend

if TYPE_CHECKING:
    from minfer.ops.op import Op

Tensor = torch.Tensor
WORKSPACE = 256 << 20  # bytes that FlashInfer asks for


def gathered(cache: Tensor, page_table: Tensor) -> Tensor:
    """The cache of each sequence side by side, (batch, slots, kv_heads, head_dim); a copy where it is paged."""
    if not page_table.shape[1]:
        return cache
    pages = page_table.clamp(0, len(cache) - 1).long()  # the tails of the table are of no page
    if cache.element_size() == 1:  # PyTorch indexes no fp8
        return cache.view(torch.uint8)[pages].view(cache.dtype).flatten(1, 2)
    return cache[pages].flatten(1, 2)


def seen_by(q: Tensor, lengths: Tensor, slots: int) -> Tensor:
    """Which slots each query sees, (batch, new, slots), computed on the device."""
    new = q.shape[1]
    position = lengths[:, None] - new + torch.arange(new, device=q.device)
    return torch.arange(slots, device=q.device) <= position[:, :, None]


def eager(
    out: Tensor, q: Tensor, lengths: Tensor, page_table: Tensor, k_cache: Tensor, v_cache: Tensor, scales: Tensor
) -> None:
    """The definition in fp32, after a gather of the pages; a sequence at a time, so that fp32 copies fit."""
    group = q.shape[2] // k_cache.shape[2]
    for number in range(len(q)):
        table = page_table[number : number + 1]
        blocks = slice(None) if table.shape[1] else slice(number, number + 1)
        k, v = (gathered(cache[blocks], table)[0].float() for cache in (k_cache, v_cache))
        if len(scales):
            k, v = k * scales[0], v * scales[1]
        seen = seen_by(q[number : number + 1], lengths[number : number + 1], len(k))[0]
        rows = q[number].float().unflatten(1, (-1, group))  # (new, kv_heads, group, dim)
        scores = torch.einsum("ihgd,jhd->hgij", rows, k).mul_(q.shape[3] ** -0.5)
        scores.masked_fill_(~seen, -math.inf)
        p = scores.softmax(-1).masked_fill_(~seen, 0.0)  # NaN where a query sees no key
        v = v.masked_fill(~seen[-1][:, None, None], 0.0)
        out[number] = torch.einsum("hgij,jhd->ihgd", p, v).flatten(1, 2)


def sdpa(
    out: Tensor, q: Tensor, lengths: Tensor, page_table: Tensor, k_cache: Tensor, v_cache: Tensor, scales: Tensor
) -> Tensor:
    """`scaled_dot_product_attention` over whole sequences: it has no pages, no lengths and no fp8."""
    mask: Any = None
    if q.shape[1] > 1:  # is_causal aligns the first query with the first key
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(q.shape[1], k_cache.shape[1])
    return torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k_cache.transpose(1, 2),
        v_cache.transpose(1, 2),
        attn_mask=mask,
        enable_gqa=q.shape[2] != k_cache.shape[2],
    ).transpose(1, 2)


def flash_attn_4(
    out: Tensor, q: Tensor, lengths: Tensor, page_table: Tensor, k_cache: Tensor, v_cache: Tensor, scales: Tensor
) -> Tensor:
    """FlashAttention-4's Hopper kernel, of whole sequences."""
    from flash_attn.cute import flash_attn_func

    found: Tensor = flash_attn_func(q, k_cache, v_cache, causal=True)[0]
    return found


@cache
def workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def plan(q: Tensor, lengths: Tensor, indices: Tensor, k_cache: Tensor) -> Any:
    """FlashInfer's plan, made on the host, which waits for the lengths. `indices`: the pages, one sequence after the other."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    page, counts = k_cache.shape[1], lengths.cpu()
    starts = torch.nn.functional.pad(((counts + page - 1) // page).cumsum(0), (1, 0)).int()
    last = (counts - 1).clamp_min(0) % page + 1
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(q.device), "NHD", use_tensor_cores=True)
    heads = (q.shape[2], k_cache.shape[2], q.shape[3])
    wrapper.plan(starts, indices, last, *heads, page, q_data_type=q.dtype, kv_data_type=k_cache.dtype)
    return wrapper


def flashinfer(
    out: Tensor, q: Tensor, lengths: Tensor, page_table: Tensor, k_cache: Tensor, v_cache: Tensor, scales: Tensor
) -> Tensor:
    """FlashInfer's paged decode for lengths and pages as they are, which is what ours takes: its plan and its kernels."""
    used = (lengths + k_cache.shape[1] - 1) // k_cache.shape[1]
    inside = torch.arange(page_table.shape[1], device=q.device) < used[:, None]
    return plan(q, lengths, page_table[inside], k_cache).run(q[:, 0], (k_cache, v_cache))[:, None]


PLANNED: dict[tuple[object, ...], Any] = {}


def flashinfer_run(
    out: Tensor, q: Tensor, lengths: Tensor, page_table: Tensor, k_cache: Tensor, v_cache: Tensor, scales: Tensor
) -> Tensor:
    """The same without its plan, which is made once for each set of tensors: full lengths do not change, and the plan names
    the table itself, whose pages may."""
    key = (q.shape, k_cache.shape, *(x.data_ptr() for x in (q, lengths, page_table, k_cache)))
    if key not in PLANNED:
        PLANNED[key] = plan(q, lengths, page_table.view(-1), k_cache)
    return PLANNED[key].run(q[:, 0], (k_cache, v_cache))[:, None]


def no_queries_without_keys(case: Case) -> str | None:
    """SDPA leaves rows that see no key undefined."""
    return f"needs longest >= new={case['new']}" if case["longest"] < case["new"] else None


def cudnn_sizes(case: Case) -> str | None:
    """Why cuDNN cannot run a case. PyTorch 2.11 says "No available kernel" if there is one key."""
    return "needs longest > 1" if case["longest"] == 1 else no_queries_without_keys(case)


def flash_sizes(case: Case) -> str | None:
    return "takes v with the head_dim of q" if "v_dim" in case.shape else no_queries_without_keys(case)


def narrow(case: Case) -> str | None:
    if case["head_dim"] > 128:
        return "takes a head_dim up to 128"
    return no_queries_without_keys(case)


def one_token(case: Case) -> str | None:
    return "takes one new token a sequence" if case["new"] > 1 else None


def register(op: Op) -> None:
    """PyTorch's first, which ratios are against; the definition is the baseline where that does not support a case."""
    whole = {"page": ("none",), "lengths": ("full",), "quant": ("none",)}
    paged = {"page": ("16", "64", "256"), "quant": ("none",)}
    sdpa_about: dict[str, Any] = {"returns": (0,), "params": whole, "requires": no_queries_without_keys}
    # On an H200 cuDNN's gave other bits when it was called again, at batches of 16 and 64.
    sdpa_about["deterministic"] = False
    op.torch("torch", sdpa, baseline=True, **sdpa_about)
    op.torch("torch_eager", eager, baseline=True)
    for name, backend, requires in (
        ("torch_flash", "FLASH_ATTENTION", flash_sizes),
        ("torch_cudnn", "CUDNN_ATTENTION", cudnn_sizes),
    ):
        op.peer(name, by_backend(backend, sdpa), "torch.nn.attention", **sdpa_about | {"requires": requires})
    op.peer("flash_attn_4", flash_attn_4, "flash_attn", returns=(0,), params=whole, requires=narrow)
    planned = both(one_token, heads_of(64, 128, 256))
    op.peer("flashinfer", flashinfer, "flashinfer", returns=(0,), params=paged, requires=planned)
    full = paged | {"lengths": ("full",)}
    op.peer("flashinfer_run", flashinfer_run, "flashinfer", returns=(0,), params=full, requires=planned)
