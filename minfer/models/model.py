"""A decoder on minfer's functions: one forward pass over the tokens of a step, flat, with a paged cache.

`Decoder.forward` is the loop over layers. Families of models differ in the parts of their layers and in the sizes of these
parts. `weights.py` builds the parts from a `Config`; no code here depends on a model's name. Operations that minfer has no
kernel for are in `plain.py`. So are attention, products and experts in fp32, because their kernels take 16-bit types only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from minfer.functional.attention import HEAD_DIMS, attention
from minfer.functional.decode_attention import DIMS, v_dim_of
from minfer.functional.early import (
    decode_attention,
    matmul,
    quant_gemm,
    quant_swiglu,
    rms_norm,
    rope_append,
    swiglu,
    takes,
)
from minfer.functional.embedding import embedding
from minfer.functional.mla_decode import PAGE, mla_decode
from minfer.functional.moe_ffn import moe_ffn
from minfer.functional.moe_route import moe_route
from minfer.functional.rope import rope_
from minfer.functional.silu_mul import silu_mul
from minfer.models import plain
from minfer.models.batch import Batch
from minfer.models.config import Config
from minfer.ops.attention_reference import LATENT

Tensor = torch.Tensor
Map = Callable[[Tensor], Tensor]  # a Linear or a Stacked
HALVES = (torch.float16, torch.bfloat16)
# The sizes of a head that `attention` takes, the least first: of q and k, and of v.
SIZES = sorted([(dim, dim) for dim in HEAD_DIMS] + [LATENT])
ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"silu": silu_mul, "gelu_tanh": plain.gelu_mul}


@dataclass
class Linear:
    """x Wᵀ + bias. The weight is (out, in) or, with a format, as `quant_gemm` takes it."""

    weight: Tensor
    bias: Tensor | None = None
    format: str = ""
    scales: Tensor | None = None
    eights: Tensor | None = None  # int4's zeros, for kernels that read them; layers share them

    def __call__(self, x: Tensor) -> Tensor:
        if self.format:
            y = quant_gemm(x, self.weight, self.format, self.scales, self.eights)
        elif x.dtype in HALVES:
            y = matmul(x, self.weight.t())
        else:
            y = plain.linear(x, self.weight)
        return y if self.bias is None else y.add_(self.bias)


@dataclass
class Stacked:
    """Linear layers of the same input, with their results concatenated: for weights of different formats."""

    parts: list[Linear]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


@dataclass(frozen=True)
class Scores:
    """What attention does with scores: scale, a cap (0: none), the window of keys (0: all) and a sink of each head."""

    scale: float
    softcap: float = 0.0
    window: int = 0
    sinks: Tensor | None = None  # fp32

    def given(self) -> dict[str, Any]:
        """The same, as `attention` and `decode_attention` take it."""
        return vars(self) | {"softcap": self.softcap or None, "window": self.window or None}


def prefill(q: Tensor, k: Tensor, v: Tensor, batch: Batch, scores: Scores) -> Tensor:
    """Attention of the batch's longer pieces, (tokens, heads, dim), over all keys that they see, packed. Heads of 16-bit
    types are padded with zeros to the next size that `attention` takes. Those above 256, and fp32, are computed by PyTorch."""
    dim, value = q.shape[-1], v.shape[-1]
    fits = (each for each in SIZES if each[0] >= dim and each[1] >= value)
    if q.dtype in HALVES and (size := next(fits, None)):
        if (dim, value) != size:
            q, k, v = (F.pad(x, (0, to - x.shape[-1])) for x, to in ((q, size[0]), (k, size[0]), (v, size[1])))
        found = attention(q, k, v, causal=True, cu_seqlens=(batch.of_q, batch.of_kv), **scores.given())
        assert isinstance(found, Tensor)
        return found[..., :value]
    queries, keys = map(list, zip(*batch.spans, strict=True))
    made = []
    for one_q, one_k, one_v in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        lengths = torch.tensor([len(one_k)], device=q.device)
        made.append(plain.attention(one_q[None], one_k[None], one_v[None], lengths, **vars(scores))[0])
    return torch.cat(made)


def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scores: Scores) -> Tensor:
    """Attention of the batch's pieces of one token, (sequences, heads, dim), over their pages."""
    q = q[:, None]
    if q.dtype in HALVES and q.shape[-1] in DIMS and v_cache.shape[-1] == v_dim_of(q):
        found = decode_attention(q, k_cache, v_cache, batch.lengths, page_table=batch.table, **scores.given())
    else:
        k, v = (cache[batch.table.long()].flatten(1, 2) for cache in (k_cache, v_cache))
        found = plain.attention(q, k, v, batch.lengths, **vars(scores))
    return found[:, 0]


@dataclass
class Attention:
    """Grouped attention over a cache of keys and values."""

    qkv: Map
    out: Map
    heads: int
    kv_heads: int
    scores: Scores
    angles: tuple[Tensor, Tensor]  # cos and sin
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6

    def __call__(self, h: Tensor, batch: Batch, cache: tuple[Tensor, ...]) -> Tensor:
        k_cache, v_cache = cache
        heads = self.qkv(h).unflatten(1, (self.heads + 2 * self.kv_heads, -1))
        weights = self.q_norm, self.k_norm
        q = rope_append(heads, k_cache, v_cache, batch.positions, batch.where, *self.angles, *weights, self.eps)
        single, parts = batch.single, []
        if single:
            parts.append(decode(q[:single], k_cache, v_cache, batch, self.scores))
        if single < len(q):
            # Keys are copied out of their pages. `attention` can read them there, but more slowly: on an H200, with 32/8 heads
            # of 128 and pages of 16, a piece of 512 tokens takes 19 us longer over 4096 keys and 174 us over 32768; eight such
            # pieces over 1024 keys each take 21 us longer. The copy is two launches, and takes 2 us more for each 1024 keys:
            # the slope of the rows of `torch` with pages less those without. For pieces of fewer tokens neither was timed.
            k, v = (cache.flatten(0, 1)[batch.keys] for cache in (k_cache, v_cache))
            parts.append(prefill(q[single:], k, v, batch, self.scores))
        return self.out(torch.cat(parts).flatten(1) if parts[1:] else parts[0].flatten(1))


@dataclass
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024). The cache has one latent and one rotated key a token. Decoding works on
    latents, with each head's maps of keys and values absorbed into its query and its result; prefill expands the latents."""

    query: Map
    down: Map  # to the latent and the rotated key
    norm: Tensor  # of the latent
    up: Map  # the latent to each head's key and value
    key_up: Tensor  # (heads, nope, rank): of `up`, the part of keys
    value_up: Tensor  # (heads, rank, value)
    out: Map
    heads: int
    rotated: int
    scores: Scores
    angles: tuple[Tensor, Tensor]
    eps: float = 1e-6

    def __call__(self, h: Tensor, batch: Batch, cache: tuple[Tensor, ...]) -> Tensor:
        (latents,) = cache
        q, row = self.query(h).unflatten(1, (self.heads, -1)), self.down(h)
        latent, key = row.split((row.shape[1] - self.rotated, self.rotated), 1)
        latent = rms_norm(latent, self.norm, self.eps)
        rope_(q[..., -self.rotated :], key[:, None], *self.angles, batch.positions, interleaved=True)
        plain.append_latents(latents, torch.cat((latent, key), 1), batch.where)
        single, parts = batch.single, []
        if single:
            parts.append(self._decode(q[:single], latents, batch))
        if single < len(q):
            parts.append(self._prefill(q[single:], latents.flatten(0, 1)[batch.keys], batch))
        return self.out(torch.cat(parts).flatten(1))

    def _decode(self, q: Tensor, latents: Tensor, batch: Batch) -> Tensor:
        rank, width = self.key_up.shape[2], latents.shape[2]
        absorbed = plain.matmul_heads(q[..., : -self.rotated], self.key_up)
        q = torch.cat((absorbed, q[..., -self.rotated :]), -1)[:, None]
        if q.dtype in HALVES and (rank, width) == (512, 576) and latents.shape[1] == PAGE:
            mixed = mla_decode(q, latents, batch.lengths, page_table=batch.table, scale=self.scores.scale)
        else:
            rows = latents[batch.table.long()].flatten(1, 2)[:, :, None]
            mixed = plain.attention(q, rows, rows[..., :rank], batch.lengths, **vars(self.scores))
        return plain.matmul_heads(mixed[:, 0], self.value_up)

    def _prefill(self, q: Tensor, rows: Tensor, batch: Batch) -> Tensor:
        _, nope, rank = self.key_up.shape
        key, v = (
            self.up(rows[:, :rank].contiguous()).unflatten(1, (self.heads, -1)).split((nope, self.value_up.shape[2]), 2)
        )
        k = torch.cat((key, rows[:, None, rank:].expand(-1, self.heads, -1)), -1)
        return prefill(q, k, v, batch, self.scores)


@dataclass
class Dense:
    """A gated feed-forward layer. gate_up has the rows of the gate, and then those of what the gate multiplies."""

    gate_up: Map
    down: Map
    activation: str

    def __call__(self, h: Tensor) -> Tensor:
        both = self.gate_up
        if self.activation == "silu" and isinstance(both, Linear) and both.bias is None:
            if both.format:
                return self.down(quant_swiglu(h, both.weight, both.format, both.scales, both.eights))
            if takes(h):
                return self.down(swiglu(h, *(half.t() for half in both.weight.chunk(2))))
        gate, up = both(h).chunk(2, -1)
        return self.down(ACTIVATIONS[self.activation](gate, up))


@dataclass
class Mixture:
    """A mixture of experts, and the experts that every token has."""

    router: Map
    gate_up: Tensor  # (experts, 2 ffn, hidden)
    down: Tensor  # (experts, hidden, ffn)
    per_token: int
    normalize: bool
    factor: float = 1.0
    shared: Dense | None = None
    biases: tuple[Tensor, Tensor] | None = None  # (experts, 2 ffn) and (experts, hidden)
    limit: float = 0.0
    alpha: float = 0.0

    def __call__(self, h: Tensor) -> Tensor:
        logits = self.router(h)
        logits = logits.float() if logits.dtype == torch.float16 else logits  # which moe_route does not take
        weights, *routing = moe_route(logits, self.per_token, self.normalize)
        weights = weights * self.factor if self.factor != 1 else weights
        indices, _, offsets, order = routing
        if h.dtype in HALVES and self.biases is None:
            y = moe_ffn(h, weights, indices, self.gate_up, self.down, offsets=offsets, order=order)
        else:
            y = plain.experts(h, (weights, *routing), self.gate_up, self.down, self.biases, self.limit, self.alpha)
        return y if self.shared is None else y.add_(self.shared(h))


@dataclass
class Layer:
    attention: Attention | LatentAttention
    feed: Dense | Mixture
    norms: tuple[Tensor, Tensor]  # of the inputs of attention and of the feed-forward layer
    post_norms: tuple[Tensor, Tensor] | None = None  # of their outputs


@dataclass
class Decoder:
    """A whole model. Its tensors are on one device and, but for quantised weights, of one dtype."""

    config: Config
    table: Tensor  # the embedding, (vocab, hidden)
    layers: list[Layer]
    norm: Tensor
    head: Map

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    @torch.no_grad()
    def forward(self, batch: Batch, cache: list[tuple[Tensor, ...]]) -> Tensor:
        """Logits for the token after each piece's last one, float32 (pieces, vocab). Keys and values are added to the cache.

        x is the residual stream: `rms_norm` adds the output of the last part to it in place, and returns it normalised."""
        eps = self.config.eps
        x = embedding(batch.ids, self.table)
        if self.config.embedding_scale != 1:
            x.mul_(torch.tensor(self.config.embedding_scale, dtype=x.dtype).item())  # rounded, as when it was trained
        h = rms_norm(x, self.layers[0].norms[0], eps)
        following = [layer.norms[0] for layer in self.layers[1:]] + [self.norm]
        for layer, kept, next_norm in zip(self.layers, cache, following, strict=True):
            y = layer.attention(h, batch, kept)
            if layer.post_norms is not None:
                y = rms_norm(y, layer.post_norms[0], eps)
            h = rms_norm(y, layer.norms[1], eps, residual=x)
            y = layer.feed(h)
            if layer.post_norms is not None:
                y = rms_norm(y, layer.post_norms[1], eps)
            h = rms_norm(y, next_norm, eps, residual=x)
        logits = self.head(h[batch.last]).float()
        return plain.softcap(logits, self.config.final_softcap) if self.config.final_softcap else logits
