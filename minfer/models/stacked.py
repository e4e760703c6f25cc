"""A decoder of Llama's kind whose weights are stacked by layer, as in the op `decoder`. `+sweep=decoder` times it."""

from __future__ import annotations

import torch

from minfer.models.batch import Batch
from minfer.models.config import Config
from minfer.models.model import Attention, Decoder, Dense, Layer, Linear, Scores
from minfer.models.rotary import Rotary

Tensor = torch.Tensor
EPS = 1e-5


def logits(
    out: Tensor, ids: Tensor, positions: Tensor, where: Tensor, lengths: Tensor, table: Tensor, last: Tensor, keys: Tensor,
    of_q: Tensor, of_kv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, embedding: Tensor,
    norms: Tensor, qkv: Tensor, o: Tensor, gate_up: Tensor, down: Tensor, head: Tensor,
    *scales: Tensor,
) -> Tensor:  # fmt: skip
    """The logits of a step, new float32 (batch, vocab), by `Decoder.forward`. The tensors are those of `minfer.ops.decoder`;
    k_cache and v_cache are (layers, batch, slots, kv_heads, dim); their slots make whole pages."""
    _, batch, slots, kv_heads, dim = k_cache.shape
    new, context = len(ids) // batch, len(cos)
    step = Batch(
        ids, positions, where, lengths, table, last, keys, of_q, of_kv, [(new, context)] * (len(of_q) - 1)
    )  # fmt: skip
    page = slots // table.shape[1] if len(table) else slots
    cache = [tuple(each.view(-1, page, kv_heads, dim) for each in pair) for pair in zip(k_cache, v_cache, strict=True)]
    stacks = [linears(*each) for each in zip((qkv, o, gate_up, down), scales, strict=True)]
    return decoder(embedding, norms, stacks, head, (cos, sin), kv_heads, dim).forward(step, cache)


def linears(weights: Tensor, scales: Tensor) -> list[Linear]:
    """The product of each layer, from weights (layers, out, in); in int4 also from scales (layers, out, in / 128)."""
    if weights.dtype == torch.uint8:
        eights = torch.full_like(scales[0], 8.0)
        return [Linear(weight, None, "int4_g128", scale, eights) for weight, scale in zip(weights, scales, strict=True)]
    return [Linear(weight) for weight in weights]


def decoder(
    embedding: Tensor, norms: Tensor, stacks: list[list[Linear]], head: Tensor, angles: tuple[Tensor, Tensor],
    kv_heads: int, dim: int,
) -> Decoder:  # fmt: skip
    """A decoder of these tensors: norms (2 layers + 1, hidden), and of each layer the products qkv, o, gate_up and down."""
    qkv, o, gate_up, down = stacks
    layers, heads = len(qkv), len(qkv[0].weight) // dim - 2 * kv_heads
    config = Config(
        "llama", len(embedding), embedding.shape[1], len(gate_up[0].weight) // 2, heads, kv_heads, dim, len(angles[0]),
        Rotary(dim), (0,) * layers, (False,) * layers, EPS,
    )  # fmt: skip
    scores = Scores(dim**-0.5)
    made = [
        Layer(
            Attention(qkv[i], o[i], heads, kv_heads, scores, angles, eps=EPS),
            Dense(gate_up[i], down[i], config.activation),
            (norms[2 * i], norms[2 * i + 1]),
        )
        for i in range(layers)
    ]
    return Decoder(config, embedding, made, norms[-1], Linear(head))
