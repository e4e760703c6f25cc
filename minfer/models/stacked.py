"""A decoder of Llama's kind whose weights are stacked by layer, as the op `decoder` states it: what `+sweep=decoder` times."""

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
) -> Tensor:  # fmt: skip
    """The logits of a step, new float32 (batch, vocab), by `Decoder.forward`. The tensors are those of `minfer.ops.decoder`;
    k_cache and v_cache are (layers, batch, slots, kv_heads, dim), whose slots make whole pages."""
    _, batch, slots, kv_heads, dim = k_cache.shape
    new, context = len(ids) // batch, len(cos)
    step = Batch(
        ids, positions, where, lengths, table, last, keys, of_q, of_kv, [(new, context)] * (len(of_q) - 1)
    )  # fmt: skip
    page = slots // table.shape[1] if len(table) else slots
    cache = [tuple(each.view(-1, page, kv_heads, dim) for each in pair) for pair in zip(k_cache, v_cache, strict=True)]
    return decoder(embedding, norms, qkv, o, gate_up, down, head, (cos, sin), kv_heads, dim).forward(step, cache)


def decoder(
    embedding: Tensor, norms: Tensor, qkv: Tensor, o: Tensor, gate_up: Tensor, down: Tensor, head: Tensor,
    angles: tuple[Tensor, Tensor], kv_heads: int, dim: int,
) -> Decoder:  # fmt: skip
    """A decoder whose weights are views of these: norms (2 layers + 1, hidden), and the others but embedding and head
    (layers, out, in)."""
    layers, hidden, width = o.shape
    config = Config(
        "llama", len(embedding), hidden, down.shape[2], width // dim, kv_heads, dim, len(angles[0]),
        Rotary(dim), (0,) * layers, (False,) * layers, EPS,
    )  # fmt: skip
    scores = Scores(dim**-0.5)
    made = [
        Layer(
            Attention(Linear(qkv[i]), Linear(o[i]), config.heads, kv_heads, scores, angles, eps=EPS),
            Dense(Linear(gate_up[i]), Linear(down[i]), config.activation),
            (norms[2 * i], norms[2 * i + 1]),
        )
        for i in range(layers)
    ]
    return Decoder(config, embedding, made, norms[-1], Linear(head))
