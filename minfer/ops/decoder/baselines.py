"""The decoder in plain PyTorch, in a loop over layers; as it is, and with each layer compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Tensor = torch.Tensor
EPS = 1e-5


GROUP = 128  # values of an int4 weight that share a scale


def unpacked(weight: Tensor, scales: Tensor) -> Tensor:
    """A weight (out, in). Bytes are unpacked: each has two 4-bit values, the first one in the lower half. These are multiplied
    with scales (out, in / GROUP), and the weight has the scales' dtype. A weight of another dtype is returned as it is."""
    if weight.dtype != torch.uint8:
        return weight
    values = torch.stack((weight & 15, weight >> 4), -1).flatten(-2).to(scales.dtype) - 8
    if values.shape[-1] % GROUP:
        return values * scales.repeat_interleave(GROUP, -1)[..., : values.shape[-1]]
    return (values.unflatten(-1, (-1, GROUP)) * scales[..., None]).flatten(-2)


def graphed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, replayed as a CUDA graph when it is called on a GPU with the same tensors as the time before. Steps are
    served in this way, too, because the host takes longer to launch a step's hundreds of kernels than the GPU takes to run
    them. The next call then overwrites the result."""
    last: list[weakref.ref[Tensor]] = []  # the tensors of the last call
    captured: list[tuple[torch.cuda.CUDAGraph, Tensor]] = []

    def call(*tensors: Tensor) -> Tensor:
        is_seen = torch._C._autograd._profiler_enabled()  # by code that counts launches or records PyTorch's calls
        if is_seen or not tensors[0].is_cuda or torch.cuda.is_current_stream_capturing():
            return function(*tensors)
        if len(last) != len(tensors) or any(of() is not tensor for of, tensor in zip(last, tensors, strict=True)):
            last[:] = map(weakref.ref, tensors)
            captured.clear()
            return function(*tensors)
        if not captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured.append((graph, function(*tensors)))
        graph, result = captured[0]
        graph.replay()
        return result

    return call


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (tokens, heads, dim), in which pairs (i, i + dim / 2) are rotated by cos and sin (tokens, dim / 2)."""
    one, other = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1).to(x.dtype)


def layer(
    x: Tensor, norms: Tensor, weights: tuple[Tensor, ...], scales: tuple[Tensor, ...], k_cache: Tensor, v_cache: Tensor,
    cos: Tensor, sin: Tensor, where: Tensor, context: int,
) -> Tensor:  # fmt: skip
    """x (tokens, hidden) after one layer. The caches are (batch, slots, kv_heads, dim); their first `context` slots have keys.
    cos and sin have a row for each token."""
    batch, _, kv_heads, dim = k_cache.shape
    new = len(x) // batch
    qkv, o, gate_up, down = map(unpacked, weights, scales)
    h = F.rms_norm(x, x.shape[-1:], norms[0], EPS)
    q, k, v = F.linear(h, qkv).unflatten(1, (-1, dim)).split((o.shape[1] // dim, kv_heads, kv_heads), 1)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    for cache, rows in ((k_cache, k), (v_cache, v)):
        cache.view(-1, kv_heads, dim).index_copy_(0, where, rows)
    keys, values = (cache[:, :context].transpose(1, 2) for cache in (k_cache, v_cache))
    mask, whole = None, 1 < new == context
    if 1 < new < context:
        mask = torch.ones(new, context, dtype=torch.bool, device=x.device).tril(context - new)
    if new == 1:  # the query heads of a key-value head are the queries of one head: none is masked
        q = q.unflatten(1, (kv_heads, -1))
        mixed = F.scaled_dot_product_attention(q, keys, values)
    else:
        q = q.unflatten(0, (batch, new)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, keys, values, mask, is_causal=whole, enable_gqa=True).transpose(1, 2)
    x = x + F.linear(mixed.reshape(len(x), -1), o)
    gate, up = F.linear(F.rms_norm(x, x.shape[-1:], norms[1], EPS), gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down)


def deterministic(new: int, batch: int, device: torch.device) -> AbstractContextManager[None]:
    """The backend of SDPA that is fastest of those that give the same bits again. In steps of decoding on an H100, cuDNN's
    attention with a query for each head did not; with the heads of a group as queries (`layer`) it does, and is as fast. At
    batch 1 flash attention is faster than that."""
    if new > 1 or batch > 1 or device.type == "cpu":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])  # the second takes other heads


def whole(of_layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The whole decoder, from the op's tensors to new logits (batch, vocab)."""

    def forward(
        logits: Tensor, ids: Tensor, positions: Tensor, where: Tensor, lengths: Tensor, table: Tensor, last: Tensor,
        keys: Tensor, of_q: Tensor, of_kv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
        embedding: Tensor, norms: Tensor, qkv: Tensor, o: Tensor, gate_up: Tensor, down: Tensor, head: Tensor,
        *scales: Tensor,
    ) -> Tensor:  # fmt: skip
        x, context, batch = F.embedding(ids, embedding), len(cos), k_cache.shape[1]
        cos, sin = cos[positions], sin[positions]
        with deterministic(len(ids) // batch, batch, ids.device):
            for i in range(len(qkv)):
                weights = qkv[i], o[i], gate_up[i], down[i]
                factors = tuple(each[i] for each in scales)
                x = of_layer(
                    x, norms[2 * i : 2 * i + 2], weights, factors, k_cache[i], v_cache[i], cos, sin, where, context
                )
        h = F.rms_norm(x[last], x.shape[-1:], norms[-1], EPS)
        return F.linear(h, head).float()

    return forward
