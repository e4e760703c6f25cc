"""decoder: the logits of a whole decoder of Llama's kind (Touvron et al., 2023; Grattafiori et al., The Llama 3 herd of models,
2024), with random weights of a given size.

Each of `batch` sequences has `context` tokens, of which the last `new` are computed. With new=1 this is a step of decoding, and
with new=context the prefill of a prompt. logits is (batch, vocab), float32, for the token after each sequence's last one. In
each layer:

    q, k, v = rope(rmsnorm(x) Wqkvᵀ), and k and v are written to their slots of the caches
    x += attention(q, all keys up to each token's own, all values) Woᵀ
    x += (silu(h Wgᵀ) * (h Wuᵀ)) Wdᵀ        with h = rmsnorm(x)

k_cache and v_cache are (layers, batch, slots, kv_heads, head_dim). slots is `context`, rounded up to pages of 64. The pages of
a sequence lie one after the other, so that an implementation without pages reads the same memory. The tensors of
`minfer.models.batch.Batch` say what kernels need to know of a step's tokens: positions, where, lengths, table, last, keys,
of_q, of_kv.

With `params.quant` int4_g128 the weights of the layers are bytes of two 4-bit values, w = (value - 8) scale, with a scale for
each 128 values of a row. This is the format of `minfer.quant_gemm`. The last four tensors are the scales; without int4 they are
empty.

Weights and caches are shared (`minfer.ops.tensors.Spec`), because two copies of an 8B model do not fit into a GPU's memory.
Every call writes the keys and values of its new tokens to the same slots, and the logits depend on these keys and values.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from minfer.ops import (
    DTYPES,
    Case,
    Expected,
    Op,
    Spec,
    Tensors,
    compiled,
    divides,
    fixed,
    given,
    integers,
    multiple_of,
    one_of,
    out,
    size,
    tokens_per_second,
    up_to,
    within,
)  # fmt: skip
from minfer.ops.decoder import baselines
from minfer.ops.decoder.seeded import Angles, Seeded

Tensor = torch.Tensor
PAGE, THETA = 64, 5e5
# Weights of q, k and v, and the cache, are larger by this factor, so that a query attends to some keys and not to the mean of
# all. Those of o and down are smaller by the root of the number of layers, as when GPT-2's training began (Radford et al.,
# 2019). With 32 layers, rounding to bfloat16 then changes the logits by 1.5 %. Without the attention of one layer they change
# by 5 %.
SHARPER = 1.6
# How far a logit may be off, relative to the root mean square of its sequence's logits. Of 100,000 to 10,000,000 elements, the
# largest error is 4.5 to 5.5 standard deviations.
ELEMENT = 0.12


SCORES = 1 << 27  # scores that the reference's attention has in memory at once, 1 GiB
SPREAD = ((16**2 - 1) / 12) ** 0.5  # the standard deviation of 4-bit values


def is_quantised(case: Case) -> bool:
    return case.params["quant"] != "none"


def tensors(case: Case) -> list[Spec]:
    layers, hidden, heads, kv_heads = (case[axis] for axis in ("layers", "hidden", "heads", "kv_heads"))
    dim, ffn, vocab = (case[axis] for axis in ("head_dim", "ffn", "vocab"))
    batch, new, context = (case[axis] for axis in ("batch", "new", "context"))
    pages = -(-context // PAGE)
    slots, tokens, single = pages * PAGE, batch * new, batch if new == 1 else 0
    sequences, positions = range(batch), range(context - new, context)
    of_keys = [b * slots + j for b in sequences for j in range(context)] if new > 1 else []
    pieces = batch if new > 1 else 0

    def ints(name: str, *shape: int, values: Any, dtype: str = "int32") -> Spec:
        return given(name, *shape, dtype=dtype, fill=fixed(tuple(values)))

    def weights(name: str, *shape: int, scale: float, **fill: Any) -> Spec:
        return given(name, *shape, fill=Seeded(name, scale, **fill), shared=True)

    def stack(name: str, rows: int, columns: int, scale: float) -> list[Spec]:
        """The weights of each layer, and their scales."""
        if not is_quantised(case):
            return [weights(name, layers, rows, columns, scale=scale), weights(f"{name}_scales", layers, 0, scale=1.0)]
        packed = given(name, layers, rows, columns // 2, dtype="uint8", fill=Seeded(name, 1.0), shared=True)
        factor = scale / SPREAD
        of = weights(f"{name}_scales", layers, rows, -(-columns // baselines.GROUP), scale=0.1 * factor, shift=factor)
        return [packed, of]

    cache = layers, batch, slots, kv_heads, dim
    to_q, to_x = SHARPER * hidden**-0.5, layers**-0.5
    stacks = [
        stack("qkv", (heads + 2 * kv_heads) * dim, hidden, to_q),
        stack("o", hidden, heads * dim, to_x * (heads * dim) ** -0.5),
        stack("gate_up", 2 * ffn, hidden, hidden**-0.5),
        stack("down", hidden, ffn, to_x * ffn**-0.5),
    ]
    return [
        out("logits", batch, vocab, dtype="float32"),
        given("ids", tokens, dtype="int64", fill=integers(0, vocab)),
        ints("positions", tokens, values=[j for _ in sequences for j in positions]),
        ints("where", tokens, values=[b * slots + j for b in sequences for j in positions], dtype="int64"),
        ints("lengths", single, values=[context] * single),
        ints("table", single, pages if single else 0, values=range(single * pages)),
        ints("last", batch, values=range(new - 1, tokens, new), dtype="int64"),
        ints("keys", len(of_keys), values=of_keys, dtype="int64"),
        ints("of_q", pieces + 1, values=[new * b for b in range(pieces + 1)]),
        ints("of_kv", pieces + 1, values=[context * b for b in range(pieces + 1)]),
        given("cos", context, dim // 2, dtype="float32", fill=Angles("cos", THETA), shared=True),
        given("sin", context, dim // 2, dtype="float32", fill=Angles("sin", THETA), shared=True),
        weights("k_cache", *cache, scale=SHARPER, kept=context - new),
        weights("v_cache", *cache, scale=SHARPER, kept=context - new),
        weights("embedding", vocab, hidden, scale=1.0, whole=True),
        weights("norms", 2 * layers + 1, hidden, scale=0.1, shift=1.0),
        *(each[0] for each in stacks),
        weights("head", vocab, hidden, scale=hidden**-0.5, whole=True),
        *(each[1] for each in stacks),
    ]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + baselines.EPS).rsqrt() * weight


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope of x (batch, new, heads, dim) by cos and sin (new, dim / 2)."""
    one, other = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q (batch, new, heads, dim) over k and v (batch, context, kv_heads, dim)."""
    new, context, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    hidden = torch.ones(new, context, dtype=torch.bool, device=q.device).triu(context - new + 1)
    found, some = torch.empty_like(q), max(1, SCORES // (group * new * context))
    for head in range(k.shape[2]):
        part = slice(head * group, (head + 1) * group)
        for first in range(0, len(q), some):
            of = slice(first, first + some)
            scores = torch.einsum("bngd,bkd->bgnk", q[of, :, part], k[of, :, head]) * q.shape[-1] ** -0.5
            p = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
            found[of, :, part] = torch.einsum("bgnk,bkd->bngd", p, v[of, :, head])
    return found


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    """The logits in fp64, computed a layer at a time. Each layer's weights and keys are drawn again from their names."""
    batch, new, context = case["batch"], case["new"], case["context"]
    heads, kv_heads, dim = case["heads"], case["kv_heads"], case["head_dim"]
    device, by_name = t["ids"].device, {spec.name: spec for spec in op.specs(case)}

    def drawn(name: str, layer: int = 0) -> Tensor:
        spec = by_name[name]
        assert isinstance(spec.fill, Seeded)
        part = torch.empty(spec.shape if spec.fill.whole else spec.shape[1:], dtype=DTYPES[spec.dtype], device=device)
        spec.fill.write(part, layer)
        return baselines.unpacked(part, drawn(f"{name}_scales", layer)) if part.dtype == torch.uint8 else part.double()

    angles = [Angles(name, THETA).values(context, dim // 2, device)[context - new :] for name in ("cos", "sin")]
    x = drawn("embedding")[t["ids"]].view(batch, new, -1)
    for layer in range(case["layers"]):
        h = norm(x, drawn("norms", 2 * layer)) @ drawn("qkv", layer).t()
        q, k, v = h.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), 2)
        q, k = turn(q, *angles), turn(k, *angles)
        if new < context:
            before = [drawn(name, layer)[:, : context - new] for name in ("k_cache", "v_cache")]
            k, v = torch.cat((before[0], k), 1), torch.cat((before[1], v), 1)
        x = x + attend(q, k, v).flatten(2) @ drawn("o", layer).t()
        gate, up = (norm(x, drawn("norms", 2 * layer + 1)) @ drawn("gate_up", layer).t()).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ drawn("down", layer).t()
    logits = norm(x[:, -1], drawn("norms", 2 * case["layers"])) @ drawn("head").t()
    bound = ELEMENT * logits.square().mean(1, keepdim=True).sqrt()
    return {"logits": within(logits, bound.expand_as(logits).contiguous())}


def linear_weights(case: Case) -> float:
    """Elements of the weights that each token is multiplied with, without the head."""
    heads, kv_heads, dim = case["heads"], case["kv_heads"], case["head_dim"]
    return float(case["layers"] * case["hidden"] * (2 * (heads + kv_heads) * dim + 3 * case["ffn"]))


def packs(case: Case) -> str | None:
    """The rule that a row of int4 weights has whole groups."""
    if not is_quantised(case):
        return None
    sizes = {"hidden": case["hidden"], "ffn": case["ffn"], "heads * head_dim": case["heads"] * case["head_dim"]}
    wrong = next((name for name, value in sizes.items() if value % baselines.GROUP), None)
    return f"needs {wrong} to be a multiple of {baselines.GROUP}, got {sizes[wrong]}" if wrong else None


def flops(case: Case) -> float:
    """Those of the products; in attention, those of the scores that are not masked, and of their products with the values."""
    batch, new, context = case["batch"], case["new"], case["context"]
    scores = batch * case["heads"] * sum(range(context - new + 1, context + 1))
    attention = 4.0 * case["layers"] * case["head_dim"] * scores
    return 2.0 * (batch * new * linear_weights(case) + batch * case["hidden"] * case["vocab"]) + attention


def traffic(case: Case) -> tuple[float, float]:
    """Bytes that are read, and bytes that are written. Read: all weights, the embeddings of the tokens, and the earlier keys
    and values. Written: the new keys and values, and the logits. What lies between two products need not leave the chip."""
    batch, new, context, item = case["batch"], case["new"], case["context"], DTYPES[case.dtype].itemsize
    kv = 2.0 * case["layers"] * batch * case["kv_heads"] * case["head_dim"]
    rows = batch * new + case["vocab"] + 2 * case["layers"] + 1
    of_weight = 0.5 + item / baselines.GROUP if is_quantised(case) else item
    read = of_weight * linear_weights(case) + item * (rows * case["hidden"] + kv * (context - new))
    return read, item * kv * new + 4.0 * batch * case["vocab"]


def shape(sizes: str, batch: int, new: int, context: int) -> dict[str, int]:
    """`sizes`: layers, hidden, heads, kv_heads, head_dim, ffn and vocab."""
    found = dict(zip(op.axes, map(int, sizes.split()), strict=False))
    return found | {"batch": batch, "new": new, "context": context}


op = Op(
    "decoder",
    axes={
        "layers": size(2),
        "hidden": multiple_of(8, 128),
        "heads": size(4),
        "kv_heads": divides("heads"),
        "head_dim": one_of(64, 128),
        "ffn": multiple_of(8, 128),
        "vocab": multiple_of(8, 256),
        "batch": size(3),
        "context": size(80),
        "new": up_to("context"),
    },
    params={"quant": ("none", "int4_g128")},
    tensors=tensors,
    reference=reference,
    flops=flops,
    traffic=traffic,
    arithmetic=lambda case: (case.dtype, "float32"),
    metric=tokens_per_second(lambda case: case["batch"] * case["new"]),
)
op.odd_shapes = (shape("2 64 4 2 64 96 200", 3, 1, 70), shape("2 64 3 1 64 104 136", 2, 33, 33))
op.sizes = {
    "small": [shape("1 64 2 2 64 64 64", 1, 1, 1), shape("2 128 4 1 128 128 72", 2, 5, 70)],
    "large": [shape("2 1024 16 4 64 2816 4096", 4, 1, 300), shape("2 1024 8 8 128 2816 4096", 2, 200, 200)],
}

# The ops whose functions `minfer.models.model` calls for a decoder of this kind.
COMPOSES = (
    "add_rmsnorm", "decode_attention", "embedding", "gated_unit", "hgemm", "prefill_attention", "quant_gemm", "rmsnorm",
    "rope_append", "silu_mul",
)  # fmt: skip
# Those that `minfer.fuse` may put into a layer of the plain model.
FUSES = ("add_rmsnorm", "rmsnorm", "silu_mul")
PACKAGE = Path(__file__).parents[2]
MODELS, FUSION = PACKAGE / "models", PACKAGE / "fusion"


def minfers(*tensors: Tensor) -> Tensor:
    """The logits by `minfer.models`, which ops cannot import."""
    found: Tensor = importlib.import_module("minfer.models.stacked").logits(*tensors)
    return found


def fused(*tensors: Tensor) -> Tensor:
    """The logits by `minfer.fuse` on each layer of the plain model."""
    importlib.import_module("minfer.fusion")  # which brings the backend
    return FUSED(*tensors)


BY_MINFER, BY_FUSE = baselines.graphed(minfers), baselines.graphed(fused)
PLAIN, COMPILED = baselines.whole(baselines.layer), baselines.whole(compiled(baselines.layer))
FUSED = baselines.whole(compiled(baselines.layer, backend="minfer"))
TUNED = baselines.whole(compiled(baselines.layer, mode="max-autotune-no-cudagraphs"))  # `graphed` captures the graph
UNPACKED = {"quant": ("none",)}

op.torch("torch", baselines.graphed(PLAIN), baseline=True, returns=(0,), requires=packs)
# what compiles, only on a GPU: on a CPU the C++ compiler takes a minute for each shape
op.peer("torch_compile", baselines.graphed(COMPILED), package="triton", returns=(0,), requires=packs)
op.peer(
    "torch_max_autotune",
    baselines.graphed(TUNED),
    package="triton",
    returns=(0,),
    params=UNPACKED,
    requires=baselines.worth_tuning,
)
op.peer(
    "transformers",
    baselines.graphed(baselines.by_transformers(THETA)),
    package="transformers",
    returns=(0,),
    params=UNPACKED,
    requires=baselines.in_llama,
    deterministic=False,
)
op.peer(
    "fuse",
    BY_FUSE,
    package="triton",
    returns=(0,),
    requires=packs,
    composes=FUSES,
    modules=(*sorted(FUSION.glob("*.py")), FUSION / "measured.json"),
)
op.function(
    "minfer",
    lambda minfer, *tensors: BY_MINFER(*tensors),
    returns=(0,),
    requires=packs,
    composes=COMPOSES,
    modules=(MODELS / "model.py", MODELS / "stacked.py", PACKAGE / "functional" / "early.py"),
)
