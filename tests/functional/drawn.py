"""Draws arguments for each public function, with a formula in PyTorch that says what is right, in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from tests.functional.draw import FLOATS, HALVES, Draw, Drawn, Reference, Tensor
from tests.functional.drawn_attention import (
    draw_append,
    draw_attention,
    draw_cascade,
    draw_decode,
    draw_merge,
    draw_mla,
    draw_rope,
    draw_rope_append,
    rope_,
)


def with_out(draw: Callable[[Draw], Drawn]) -> Callable[[Draw], Drawn]:
    """Half of the draws have an `out` for the result."""

    def drawn(at: Draw) -> Drawn:
        given, formula = draw(at)
        if at.choice(True, False):
            return given, formula

        def into(*, out: Tensor, **others: Any) -> Any:
            found = formula(**others)
            return found, {"out": found}

        like = next(iter(given.values()))
        return given | {"out": torch.zeros_like(formula(**given), dtype=like.dtype)}, into

    return drawn


def product(
    names: tuple[str, ...], biases: tuple[str, ...], formula: Reference, rows: bool = False
) -> Callable[[Draw], Drawn]:
    def draw(at: Draw) -> Drawn:
        dtype, m, n, k = at.choice(*HALVES), at.size(), at.size(), at.size()
        x, *weights = names
        lead = (at.size(), m) if rows and at.choice(True, False) else (m,)
        given = {x: at.floats(dtype, *lead, k)} | {name: at.floats(dtype, k, n) for name in weights}
        return given | {name: at.floats(dtype, n) for name in biases}, formula

    return draw


def rows_of(
    names: tuple[str, ...], lasts: tuple[str, ...], formula: Reference, dtypes: tuple[torch.dtype, ...] = FLOATS
):
    def draw(at: Draw) -> Drawn:
        dtype, shape = at.choice(*dtypes), [at.size() for _ in range(at.choice(1, 2, 3))]
        given = {name: at.floats(dtype, *shape) for name in names}
        return given | {name: at.floats(dtype, shape[-1]) for name in lasts}, formula

    return draw


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None) -> Any:
    total = x if residual is None else x + residual
    y = total / (total.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return y if residual is None else (y, {"residual": total})


def draw_rms(at: Draw) -> Drawn:
    given, formula = rows_of(("x", "residual") if at.choice(True, False) else ("x",), ("weight",), rms)(at)
    return given, formula


def quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    if not values.numel():
        return values, values.new_zeros(values.shape[:-1])
    scales = values.abs().amax(-1) / 127
    return (values / scales.clamp_min(1e-30)[..., None]).round(), scales


def draw_rms_quant(at: Draw) -> Drawn:
    """In int8, of bfloat16: their tolerance is more than a step, and a value between two bytes may become either."""

    def reference(x: Tensor, weight: Tensor, residual: Tensor | None = None, **others: Any) -> Any:
        y, *changed = (rms(x, weight, 1e-6, residual),) if residual is None else rms(x, weight, 1e-6, residual)
        return (*quantised(y), *changed)

    names = ("x", "residual") if at.choice(True, False) else ("x",)
    given, formula = rows_of(names, ("weight",), reference, (torch.bfloat16,))(at)
    return given | {"dtype": torch.int8}, formula


def draw_silu_mul_quant(at: Draw) -> Drawn:
    """As `draw_rms_quant`."""

    def reference(gate: Tensor, up: Tensor, **others: Any) -> Any:
        return quantised(F.silu(gate) * up)

    given, formula = rows_of(("gate", "up"), (), reference, (torch.bfloat16,))(at)
    return given | {"dtype": torch.int8}, formula


def softmax(x: Tensor, mask: Tensor | None = None) -> Tensor:
    if mask is None:
        return x.softmax(-1)
    if mask.dtype.is_floating_point:
        return (x + mask).softmax(-1)
    outside = torch.arange(x.shape[-1]) >= mask[..., None]
    return x.masked_fill(outside, -torch.inf).softmax(-1).masked_fill(outside & (mask > 0)[..., None], 0)


def draw_softmax(at: Draw) -> Drawn:
    given, formula = rows_of(("x",), (), softmax)(at)
    shape, kind = given["x"].shape, at.choice("none", "added", "lengths")
    if kind == "added":
        given["mask"] = at.floats(given["x"].dtype, shape[-1])
    elif kind == "lengths":
        given["mask"] = at.ints(1, shape[-1] + 2, *shape[:-1])
    return given, formula


def gelu(a: Tensor, b: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return F.gelu(a @ b + bias, approximate=approximate)


def draw_gelu(at: Draw) -> Drawn:
    given, formula = product(("a", "b"), ("bias",), gelu)(at)
    return given | {"approximate": at.choice("none", "tanh")}, formula


def draw_axpby(at: Draw) -> Drawn:
    given, formula = rows_of(("a", "b"), (), lambda a, b, alpha, beta: alpha * a + beta * b, (torch.float32,))(at)
    return given | {"alpha": at.choice(1.0, -0.5), "beta": at.choice(1.0, 0.0, 3.0)}, formula


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    found = (
        table[ids.long().clamp(0, max(0, len(table) - 1))]
        if len(table)
        else table.new_zeros(*ids.shape, table.shape[1])
    )
    return found.masked_fill(((ids < 0) | (ids >= len(table)))[..., None], torch.nan)


def draw_embedding(at: Draw) -> Drawn:
    vocab, shape = at.size(1), [at.size() for _ in range(at.choice(0, 1, 2))]
    ids = at.ints(-1, vocab + 1, *shape, dtype=at.choice(torch.int32, torch.int64))
    return {"ids": ids, "table": at.floats(at.choice(*FLOATS), vocab, at.size())}, embedding


def sums(x: Tensor, lengths: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    found = torch.zeros_like(x)
    if lengths is not None:
        for b, length in enumerate(lengths.tolist()):
            found[b, :length] = x[b, :length].sum()
    else:
        ends = cu_seqlens.tolist() if cu_seqlens is not None else []
        for begin, end in itertools.pairwise(ends):
            found[begin:end] = x[begin:end].sum()
    return found


def draw_sums(at: Draw) -> Drawn:
    dtype = at.choice(torch.float32, torch.bfloat16)
    if at.choice(True, False):
        batch, longest = at.size(), at.size()
        return {"x": at.floats(dtype, batch, longest), "lengths": at.ints(0, longest + 1, batch)}, sums
    lengths = [at.size() for _ in range(at.choice(1, 2, 5))]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return {"x": at.floats(dtype, sum(lengths) + at.choice(0, 3)), "cu_seqlens": ends}, sums


def route(logits: Tensor, k: int, normalize: bool) -> Any:
    weights, _ = logits.softmax(-1).topk(k, -1)
    return (weights / weights.sum(-1, keepdim=True) if normalize else weights,)


def draw_route(at: Draw) -> Drawn:
    experts = at.size(1)
    given = {"logits": at.floats(at.choice(torch.float32, torch.bfloat16), at.size(), experts)}
    return given | {"k": at.rng.randint(1, min(experts, 8)), "normalize": at.choice(True, False)}, route


def experts(
    x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor,
    offsets: Tensor | None = None, order: Tensor | None = None,
) -> Tensor:  # fmt: skip
    y = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for weight, expert in zip(weights[t], indices[t].tolist(), strict=True):
            if 0 <= expert < len(down):
                gate, up = (gate_up[expert] @ x[t]).chunk(2)
                y[t] += weight * (down[expert] @ (F.silu(gate) * up))
    return y


def draw_experts(at: Draw) -> Drawn:
    dtype, tokens, hidden, ffn, count, k = at.choice(*HALVES), at.size(), at.size(1), at.size(1), at.choice(1, 3, 8), 2
    given = {"x": at.floats(dtype, tokens, hidden), "weights": at.floats(torch.float32, tokens, k)}
    given |= {"indices": at.ints(-1, count + 1, tokens, k), "gate_up": at.floats(dtype, count, 2 * ffn, hidden)}
    if at.choice(True, False):
        flat = given["indices"].flatten()
        inside = flat.clamp(-1, count) % (count + 1)  # those of no expert come last
        given["order"] = inside.sort(stable=True).indices.int()
        given["offsets"] = torch.stack([(inside == i).sum() for i in range(count)]).cumsum(0).int()
    return given | {"down": at.floats(dtype, count, hidden, ffn)}, experts


def weights_of(w: Tensor, format: str, scales: Tensor | None = None, zeros: Tensor | None = None, **_: Any) -> Tensor:
    """What quantised weights stand for, (n, k)."""
    if scales is None:  # a block of 32: its scale, then its values
        scale, values = w.unflatten(1, (-1, 34 if format == "q8_0" else 18)).split(
            [2, 32 if format == "q8_0" else 16], -1
        )
        if format == "q8_0":
            values = values.view(torch.int8).double()
        else:
            values = torch.cat((values & 15, values >> 4), -1).double() - 8
        return (scale.contiguous().view(torch.float16).double() * values).flatten(1)
    if format == "fp8":
        return w.double() * scales[:, None]
    each = lambda x: x.repeat_interleave(int(format.removeprefix("int4_g")), 1)
    return (torch.stack((w & 15, w >> 4), -1).flatten(-2).double() - (8 if zeros is None else each(zeros))) * each(
        scales
    )


def draw_weights(at: Draw) -> Drawn:
    n, blocks, dtype = at.size(), at.choice(1, 2, 3), at.choice(*HALVES)
    format = at.choice("int4_g64", "int4_g128", "fp8", "q8_0", "q4_0")
    given: dict[str, Any] = {"format": format, "dtype": dtype}
    if format == "fp8":
        k = at.choice(32, 64, 160)
        return given | {"w": at.floats(torch.float8_e4m3fn, n, k), "scales": at.floats(torch.float32, n)}, weights_of
    if format.startswith("q"):
        scale = at.floats(torch.float16, n, blocks, 1).view(torch.uint8).reshape(n, blocks, 2)
        values = at.ints(0, 256, n, blocks, 32 if format == "q8_0" else 16, dtype=torch.uint8)
        return given | {"w": torch.cat((scale, values), -1).flatten(1)}, weights_of
    group = int(format.removeprefix("int4_g"))
    given["w"] = at.ints(0, 256, n, group * blocks // 2, dtype=torch.uint8)
    names = ("scales", "zeros") if at.choice(True, False) else ("scales",)
    return given | {name: at.floats(dtype, n, blocks) for name in names}, weights_of


def draw_quant(at: Draw) -> Drawn:
    given, _ = draw_weights(at)
    k = weights_of(**given).shape[1]
    given["x"] = at.floats(given["dtype"], *[at.size() for _ in range(at.choice(1, 2))], k)
    if given["format"] == "fp8" and at.choice(True, False):
        given["x_scales"] = at.floats(torch.float32, *given["x"].shape[:-1])
        given["x"] = given["x"].to(torch.float8_e4m3fn)
    return given, quant


def quant(x: Tensor, x_scales: Tensor | None = None, **others: Any) -> Tensor:
    return (x if x_scales is None else x * x_scales[..., None]) @ weights_of(**others).t()


def draw_sample(at: Draw) -> Drawn:
    """Settings, numbers or one for each row, that leave the largest logit alone. Equal ones need a temperature of 0."""
    rows, vocab = at.size(), at.size(1)
    logits = at.floats(at.choice(torch.float32, torch.bfloat16), rows, vocab)
    tied = (logits == logits.amax(-1, keepdim=True)).sum(-1) > 1
    given: dict[str, Any] = {"logits": logits}
    if at.choice(True, False):
        given["temperature"] = 0.0
    else:
        given["temperature"] = torch.where(tied, 0.0, at.floats(torch.float32, rows).abs())
        given["top_k"] = at.choice(1, at.ints(1, 2, rows, dtype=at.choice(torch.int32, torch.int64)))
    given |= {"top_p": at.choice(1.0, 0.5), "min_p": at.choice(0.0, at.floats(torch.float32, rows).abs())}
    return given, lambda logits, **settings: logits.argmax(-1)


DRAWS: Mapping[str, Callable[[Draw], Drawn]] = {
    "attention": draw_attention,
    "axpby": with_out(draw_axpby),
    "cascade_attention": draw_cascade,
    "decode_attention": draw_decode,
    "dequant": draw_weights,
    "embedding": draw_embedding,
    "gated_unit": product(
        ("x", "w1", "w2"), ("b1", "b2"), lambda x, w1, b1, w2, b2: (x @ w1 + b1).sigmoid() * (x @ w2 + b2), True
    ),
    "gemm_bias_gelu": draw_gelu,
    "gemm_bias_relu": product(("a", "b"), ("bias",), lambda a, b, bias: (a @ b + bias).relu()),
    "kv_append_": draw_append,
    "layer_norm": rows_of(
        ("x",), ("weight", "bias"), lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias)
    ),
    "matmul": with_out(product(("a", "b"), (), lambda a, b: a @ b)),
    "merge_state": draw_merge,
    "mla_decode": draw_mla,
    "moe_ffn": draw_experts,
    "moe_route": draw_route,
    "quant_gemm": draw_quant,
    "rms_norm": draw_rms,
    "rms_norm_quant": draw_rms_quant,
    "rope": draw_rope,
    "rope_": lambda at: (draw_rope(at)[0], rope_),
    "rope_append": draw_rope_append,
    "sample": draw_sample,
    "seq_sum": draw_sums,
    "silu_mul_quant": draw_silu_mul_quant,
    "silu_mul": rows_of(("gate", "up"), (), lambda gate, up: F.silu(gate) * up),
    "softmax": with_out(draw_softmax),
    "swiglu": product(("x", "wg", "wu"), (), lambda x, wg, wu: F.silu(x @ wg) * (x @ wu), True),
}
