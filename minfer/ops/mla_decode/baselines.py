"""What PyTorch and other projects have for `mla_decode`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from minfer.ops.case import Case
from minfer.ops.decode_attention.baselines import gathered, no_queries_without_keys, seen_by, workspace

if TYPE_CHECKING:
    from minfer.ops.op import Op

Tensor = torch.Tensor
LATENT, ROPE = 512, 64
ROW = LATENT + ROPE
SCALE = (128 + ROPE) ** -0.5  # of DeepSeek-V2, whose keys have 128 elements that are not rotated


def eager(out: Tensor, q: Tensor, lengths: Tensor, page_table: Tensor, cache: Tensor, scale: float) -> None:
    """The definition in fp32, after a gather of the pages. One sequence at a time, so that its fp32 copies fit in memory."""
    for number in range(len(q)):
        table = page_table[number : number + 1]
        blocks = slice(None) if table.shape[1] else slice(number, number + 1)
        rows = gathered(cache[blocks], table)[0].float()
        seen = seen_by(q[number : number + 1], lengths[number : number + 1], len(rows))[0]
        rows = rows.masked_fill(~seen[-1][:, None], 0.0)
        scores = torch.einsum("ihd,jd->hij", q[number].float(), rows).mul_(scale).masked_fill_(~seen, -math.inf)
        p = scores.softmax(-1).masked_fill_(~seen, 0.0)  # NaN where a query sees no key
        out[number] = torch.einsum("hij,jd->ihd", p, rows[:, :LATENT])


def sdpa(out: Tensor, q: Tensor, lengths: Tensor, page_table: Tensor, cache: Tensor, scale: float) -> Tensor:
    """`scaled_dot_product_attention` over whole sequences, after a gather of the pages. All heads share the cache, so
    the heads of all new tokens are passed as the queries of one head."""
    rows = gathered(cache, page_table)[:, None]  # (batch, 1, slots, 576)
    mask: Any = None
    if q.shape[1] > 1:
        mask = seen_by(q, lengths, rows.shape[2]).repeat_interleave(q.shape[2], 1)[:, None]
    found = torch.nn.functional.scaled_dot_product_attention(
        q.flatten(1, 2)[:, None], rows, rows[..., :LATENT], attn_mask=mask, scale=scale
    )
    return found[:, 0].unflatten(1, q.shape[1:3])


def flashinfer(out: Tensor, q: Tensor, lengths: Tensor, page_table: Tensor, cache: Tensor, scale: float) -> Tensor:
    """FlashInfer's paged MLA, on Hopper its kernel in the style of FlashAttention-3. Each call makes a plan, which waits for
    the lengths on the host."""
    used = (lengths + cache.shape[1] - 1) // cache.shape[1]
    inside = torch.arange(page_table.shape[1], device=q.device) < used[:, None]
    return _planned(q, lengths, page_table[inside], cache, scale).run(*_apart(q), *_apart(cache)).view(out.shape)


PLANNED: dict[tuple[object, ...], Any] = {}


def flashinfer_run(out: Tensor, q: Tensor, lengths: Tensor, page_table: Tensor, cache: Tensor, scale: float) -> Tensor:
    """The same, but the plan is made once for each set of tensors. That is correct because full lengths do not change, and the
    plan refers to the page table itself, whose entries may change."""
    key = (q.shape, cache.shape, scale, *(x.data_ptr() for x in (q, lengths, page_table, cache)))
    if key not in PLANNED:
        PLANNED[key] = _planned(q, lengths, page_table.view(-1), cache, scale)
    return PLANNED[key].run(*_apart(q), *_apart(cache)).view(out.shape)


def _apart(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Splits rows into latents and rotated keys. Queries become (tokens, heads, elements)."""
    rows = rows.flatten(0, 1) if rows.dim() == 4 else rows
    return rows[..., :LATENT], rows[..., LATENT:]


def _planned(q: Tensor, lengths: Tensor, indices: Tensor, cache: Tensor, scale: float) -> Any:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    wrapper = BatchMLAPagedAttentionWrapper(workspace(q.device))
    counts, new, slots = lengths.cpu(), q.shape[1], cache.shape[1]
    queries = torch.arange(len(q) + 1, dtype=torch.int32) * new
    pages = torch.nn.functional.pad(((counts + slots - 1) // slots).cumsum(0), (1, 0)).int()
    sizes = (q.shape[2], LATENT, ROPE, slots)
    wrapper.plan(queries, pages, indices, counts, *sizes, new > 1, scale, q.dtype, cache.dtype)
    return wrapper


def flash_mla(out: Tensor, q: Tensor, lengths: Tensor, page_table: Tensor, cache: Tensor, scale: float) -> Tensor:
    """DeepSeek's FlashMLA, including the kernel of its own that makes the schedule on the device."""
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    metadata, splits = get_mla_metadata(lengths, q.shape[1] * q.shape[2], 1)
    found: Tensor = flash_mla_with_kvcache(
        q, cache[:, :, None], page_table, lengths, LATENT, metadata, splits, scale, q.shape[1] > 1
    )[0]
    return found


def whole_pages(case: Case) -> str | None:
    """SDPA reads all slots of a sequence's pages, so the last page must be full."""
    if case.params["page"] != "none" and case["longest"] % int(case.params["page"]):
        return f"needs a multiple of {case.params['page']} keys in pages, got longest={case['longest']}"
    return no_queries_without_keys(case)


def wide(case: Case) -> str | None:
    return None if case["heads"] % 16 == 0 else f"takes a multiple of 16 heads, got {case['heads']}"


def register(op: Op) -> None:
    """Ratios are against PyTorch's SDPA, which comes first. Where it does not support a case, `torch_eager` is the baseline."""
    op.torch("torch", sdpa, baseline=True, returns=(0,), params={"lengths": ("full",)}, requires=whole_pages)
    op.torch("torch_eager", eager, baseline=True)
    paged = {"page": ("64",)}
    op.peer("flashinfer", flashinfer, "flashinfer", returns=(0,), params=paged, requires=wide)
    full = paged | {"lengths": ("full",)}
    op.peer("flashinfer_run", flashinfer_run, "flashinfer", returns=(0,), params=full, requires=wide)
    op.peer("flash_mla", flash_mla, "flash_mla", returns=(0,), params=paged, requires=wide)
