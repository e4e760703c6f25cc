"""Operations that minfer has no kernel for yet, in plain PyTorch. Each function says what is missing. None but `experts` waits
for the device, so that a step can be captured in a CUDA graph (`graphs.can_be_captured`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ in fp32: `matmul` takes float16 and bfloat16."""
    return F.linear(x, weight)


def matmul_heads(x: Tensor, weights: Tensor) -> Tensor:
    """A product for each head, (tokens, heads, n) of x (tokens, heads, k) and weights (heads, k, n): `matmul` has no batch."""
    return torch.bmm(x.transpose(0, 1), weights).transpose(0, 1)


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """GeGLU's gelu(gate) * up, with tanh's approximation (Shazeer, 2020): minfer has `silu_mul` only."""
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """gpt-oss's (up + 1) * gate * sigmoid(alpha gate), with gate at most `limit` and up within it: minfer has no such
    activation."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): minfer caps scores, not logits."""
    return cap * torch.tanh(x / cap)


def experts(
    x: Tensor, routed: tuple[Tensor, ...], gate_up: Tensor, down: Tensor, biases: tuple[Tensor, Tensor] | None,
    limit: float, alpha: float,
) -> Tensor:  # fmt: skip
    """`moe_ffn` in fp32, or with gpt-oss's biases (experts, 2 ffn) and (experts, hidden) and its clamped activation, neither
    of which `moe_ffn` takes. routed is what `moe_route` returns."""
    weights, indices, _, offsets, order = routed
    order, k = order.long(), weights.shape[1]
    expert = indices.flatten()[order].long()
    both = F.grouped_mm(x[order // k], gate_up.transpose(1, 2), offs=offsets)
    if biases is not None:
        both = both + biases[0][expert]
    gate, up = both.chunk(2, -1)
    inner = clamped_swiglu(gate, up, limit, alpha) if limit else F.silu(gate) * up
    out = F.grouped_mm(inner.contiguous(), down.transpose(1, 2), offs=offsets)
    if biases is not None:
        out = out + biases[1][expert]
    slots = torch.empty_like(out).index_copy_(0, order, out).unflatten(0, (len(x), k))
    return (slots.float() * weights[..., None]).sum(1).to(x.dtype)


def append_latents(cache: Tensor, rows: Tensor, where: Tensor) -> None:
    """Write rows (tokens, width) to the slots `where` of a cache (pages, slots, width): `kv_append_` writes keys and values."""
    cache.view(-1, cache.shape[-1])[where] = rows


def attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Causal attention in fp32 of (batch, new, heads, dim) over keys (batch, most, kv_heads, dim) and values. Of a sequence's
    keys `lengths` are used, and the last of these are the new ones. Each head has one sink: a score without a value.
    `attention`, `decode_attention` and `mla_decode` take no fp32. `attention` takes no heads above 256; `decode_attention` only
    those of 64, 96, 128 and 256; `mla_decode` only pages of 64."""
    new, heads, most = q.shape[1], q.shape[2], k.shape[1]
    position = lengths[:, None] - new + torch.arange(new, device=q.device)  # (batch, new)
    apart = position[..., None] - torch.arange(most, device=q.device)  # (batch, new, most)
    seen = (apart >= 0) & (apart < window) if window else apart >= 0
    q = q.unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bnhgd,bkhd->bhgnk", q.float(), k.float()) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(1, k.shape[2], -1, 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat((scores, sink), -1)
    p = scores.softmax(-1).nan_to_num(0.0)[..., :most]  # a query that sees no key gives 0
    out = torch.einsum("bhgnk,bkhd->bnhgd", p, v.float())
    return out.reshape(len(q), new, heads, v.shape[-1]).to(q.dtype)
