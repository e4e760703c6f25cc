"""The decoder in plain PyTorch, in a loop over layers, each of which may be compiled; and as the package transformers has it.
All read the op's own tensors."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from minfer.ops import Case, compiled

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


class Last:
    """The tensors of the last call, which it does not keep alive."""

    def __init__(self) -> None:
        self.tensors: list[weakref.ref[Tensor]] = []

    def are(self, tensors: Sequence[Tensor], freed: Callable[[], object] = lambda: None) -> bool:
        """Whether these are the same as the time before. `freed` is called when one of them is freed."""
        known = len(self.tensors) == len(tensors)
        if known and all(of() is tensor for of, tensor in zip(self.tensors, tensors, strict=True)):
            return True
        self.tensors = [weakref.ref(tensor, lambda _: freed()) for tensor in tensors]
        return False


def graphed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, replayed as a CUDA graph when it is called on a GPU with the same tensors as the time before. Steps are
    served in this way, too, because the host takes longer to launch a step's hundreds of kernels than the GPU takes to run
    them. The next call then overwrites the result."""
    captured: list[tuple[torch.cuda.CUDAGraph, Tensor]] = []
    last = Last()

    def call(*tensors: Tensor) -> Tensor:
        is_seen = torch._C._autograd._profiler_enabled()  # by code that counts launches or records PyTorch's calls
        if is_seen or not tensors[0].is_cuda or torch.cuda.is_current_stream_capturing():
            return function(*tensors)
        if not last.are(tensors):
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
    cos: Tensor, sin: Tensor, where: Tensor, batch: int, context: int,
) -> Tensor:  # fmt: skip
    """x (tokens, hidden) after one layer. The caches are (batch * slots, kv_heads, dim); the first `context` slots of a
    sequence have keys. cos and sin have a row for each token.

    The caches are written as they are given, and not through a view. torch.compile of PyTorch 2.11 writes to a tensor in place
    only if it is an input of the graph itself. Through a view, it copied the whole cache, twice, in each layer."""
    _, kv_heads, dim = k_cache.shape
    new = len(x) // batch
    qkv, o, gate_up, down = map(unpacked, weights, scales)
    h = F.rms_norm(x, x.shape[-1:], norms[0], EPS)
    q, k, v = F.linear(h, qkv).unflatten(1, (-1, dim)).split((o.shape[1] // dim, kv_heads, kv_heads), 1)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    for cache, rows in ((k_cache, k), (v_cache, v)):
        cache.index_copy_(0, where, rows)
    keys, values = (each.unflatten(0, (batch, -1))[:, :context].transpose(1, 2) for each in (k_cache, v_cache))
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
                caches = (cache[i].flatten(0, 1) for cache in (k_cache, v_cache))
                x = of_layer(x, norms[2 * i : 2 * i + 2], weights, factors, *caches, cos, sin, where, batch, context)
        h = F.rms_norm(x[last], x.shape[-1:], norms[-1], EPS)
        return F.linear(h, head).float()

    return forward


def worth_tuning(case: Case) -> str | None:
    """The rule that keeps max-autotune, which takes long for each shape, from the small shapes of verification."""
    return None if case["hidden"] >= 1024 else f"needs hidden to be at least 1024, got {case['hidden']}"


def in_llama(case: Case) -> str | None:
    """The rule of what transformers computes. New tokens are single ones or whole prompts: for those in between it asks the GPU
    for the number of keys, which a CUDA graph cannot contain."""
    new, context, hidden, heads = (case[axis] for axis in ("new", "context", "hidden", "heads"))
    if new not in (1, context):
        return f"needs new to be 1 or context, got new={new} and context={context}"
    return f"needs hidden to be a multiple of heads, got {hidden} and {heads}" if hidden % heads else None


def run(layer: torch.nn.Module, x: Tensor, given: dict[str, Any]) -> Tensor:
    found: Tensor = layer(x, **given)
    return found


class InPlace(torch.nn.Module):
    """A layer in its place in the model. It has a cache of its own, in which it is the first layer. So torch.compile finds that
    all layers have the same code, and compiles one."""

    def __init__(self, layer: torch.nn.Module, cache: Any, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.cache, self.run = layer, cache, run

    def forward(self, x: Tensor, past_key_values: Any = None, **given: Any) -> Tensor:
        return self.run(self.layer, x, {**given, "past_key_values": self.cache})


class Model:
    """`LlamaForCausalLM` of transformers with a `StaticCache`, on the op's tensors. Its layers are called by `run`."""

    def __init__(
        self, theta: float, caches: tuple[Tensor, Tensor], weights: tuple[Tensor, ...], context: int,
        run: Callable[..., Tensor],
    ) -> None:  # fmt: skip
        transformers: Any = importlib.import_module("transformers")
        embedding, _, qkv, o, _, down, _ = weights
        kv_heads, dim = caches[0].shape[3:]
        config = transformers.LlamaConfig(
            vocab_size=len(embedding), hidden_size=embedding.shape[1], intermediate_size=down.shape[2],
            num_hidden_layers=len(qkv), num_attention_heads=o.shape[2] // dim, num_key_value_heads=kv_heads,
            head_dim=dim, max_position_embeddings=context, rms_norm_eps=EPS, dtype=embedding.dtype,
            rope_parameters={"rope_type": "default", "rope_theta": theta}, attn_implementation="sdpa",
        )  # fmt: skip
        with torch.device("meta"):
            self.model = transformers.LlamaForCausalLM(config).eval()
        self.model.load_state_dict(parameters(kv_heads * dim, *weights), assign=True)
        self.model.requires_grad_(False)
        decoder = self.model.model
        decoder.rotary_emb = type(decoder.rotary_emb)(config).to(embedding.device)
        self.lengths = torch.zeros(len(qkv), dtype=torch.int64, device=embedding.device)
        self.cache = transformers.StaticCache(config, context)
        for i, each in enumerate(self.cache.layers):
            keys, values = (of[i].transpose(1, 2)[:, :, :context] for of in caches)
            each.lazy_initialization(keys[:, :, :1], values[:, :, :1])
            each.keys, each.values, each.cumulative_length = keys, values, self.lengths[i]
            layer = decoder.layers[i]
            layer.self_attn.layer_idx = 0
            decoder.layers[i] = InPlace(layer, transformers.Cache(layers=[each]), run)

    def __call__(self, ids: Tensor, positions: Tensor, new: int, context: int) -> Tensor:
        """The logits (batch, vocab) of each sequence's last token."""
        self.lengths.fill_(context - new)
        found = self.model(
            input_ids=ids.view(-1, new), position_ids=positions.view(-1, new), past_key_values=self.cache,
            use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        logits: Tensor = found.logits[:, -1].float()
        return logits


def parameters(
    kv: int, embedding: Tensor, norms: Tensor, qkv: Tensor, o: Tensor, gate_up: Tensor, down: Tensor, head: Tensor
) -> dict[str, Tensor]:
    """Views of the stacked weights, by transformers' names. `kv` is the number of rows of k, and of v."""
    found = {"model.embed_tokens.weight": embedding, "model.norm.weight": norms[-1], "lm_head.weight": head}
    for i in range(len(qkv)):
        q, k, v = qkv[i].split((qkv.shape[1] - 2 * kv, kv, kv))
        gate, up = gate_up[i].chunk(2)
        layer = {
            "input_layernorm": norms[2 * i], "post_attention_layernorm": norms[2 * i + 1], "self_attn.q_proj": q,
            "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": o[i], "mlp.gate_proj": gate,
            "mlp.up_proj": up, "mlp.down_proj": down[i],
        }  # fmt: skip
        found |= {f"model.layers.{i}.{name}.weight": value for name, value in layer.items()}
    return found


def by_transformers(theta: float, compile_layers: bool = True) -> Callable[..., Tensor]:
    """A function from the op's tensors to new logits (batch, vocab). As transformers' `generate` does with a static cache, it
    compiles the steps of decoding and not the prefill of a prompt; it compiles a layer, not the whole model, which would take
    minutes. The model is made at the first call with these tensors and freed with them."""
    decode = compiled(run) if compile_layers else run
    made: list[Model] = []
    last = Last()

    @torch.no_grad()
    def forward(
        logits: Tensor, ids: Tensor, positions: Tensor, where: Tensor, lengths: Tensor, table: Tensor, last_row: Tensor,
        keys: Tensor, of_q: Tensor, of_kv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
        embedding: Tensor, norms: Tensor, qkv: Tensor, o: Tensor, gate_up: Tensor, down: Tensor, head: Tensor,
        *scales: Tensor,
    ) -> Tensor:  # fmt: skip
        new, context = len(ids) // k_cache.shape[1], len(cos)
        caches, weights = (k_cache, v_cache), (embedding, norms, qkv, o, gate_up, down, head)
        if not last.are(caches + weights, made.clear):
            made[:] = [Model(theta, caches, weights, context, decode if new == 1 else run)]
        return made[0](ids, positions, new, context)

    return forward
