"""A small call of each public function, and more where dimensions of size 1 lie elsewhere; for tests that are about all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import minfer

Tensor = torch.Tensor
FUNCTIONS = sorted(name for name, where in minfer._WHERE.items() if where.startswith("minfer.functional."))


def half(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape) - 0.5).to(dtype)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@dataclass
class Call:
    """Arguments by name, of which tensors are made on the CPU."""

    function: str
    given: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.given.items() if isinstance(value, Tensor)}

    def __call__(self, device: str = "cpu", **changed: Any) -> list[Tensor]:
        """What it returns, then what its tensors contain afterwards. Tensors of `changed` are used as they are."""
        given = {name: x.to(device).clone() if isinstance(x, Tensor) else x for name, x in self.given.items()} | changed
        found = getattr(minfer, self.function)(**given)
        results = [] if found is None else [found] if isinstance(found, Tensor) else list(found)
        return [x.detach().clone() for x in (*results, *(x for x in given.values() if isinstance(x, Tensor)))]


def product(name: str, m: int, n: int, k: int, transposed: bool, **more: Callable[[int], Tensor]) -> Call:
    """Of x (m, k) and weights (k, n), which are stored (n, k) if transposed."""
    weight = partial(half, n, k) if transposed else partial(half, k, n)
    names = {"matmul": ("a", "b"), "swiglu": ("x", "wg", "wu"), "gated_unit": ("x", "w1", "w2")}.get(name, ("a", "b"))
    given = {names[0]: half(m, k)} | {w: weight().t() if transposed else weight() for w in names[1:]}
    return Call(name, given | {key: make(n) for key, make in more.items()})


def products(name: str, **more: Callable[[int], Tensor]) -> dict[str, Call]:
    sizes = ((1, 16, 32), (8, 1, 32), (1, 1, 32), (8, 16, 1), (8, 1, 1))
    return {
        f"{name} {m}x{n}x{k} {'TN' if transposed else 'NN'}": product(name, m, n, k, transposed, **more)
        for m, n, k in sizes
        for transposed in (False, True)
    }


def calls() -> dict[str, Call]:
    torch.manual_seed(0)
    one, rope = ints(1), {"q": half(1, 1, 1, 64), "k": half(1, 1, 1, 64), "cos": torch.rand(1, 32)}
    rope |= {"sin": torch.rand(1, 32), "positions": ints(0).reshape(1, 1)}
    attention = {"q": half(1, 1, 1, 64), "k": half(1, 1, 1, 64), "v": half(1, 1, 1, 64), "lengths": one}
    decode = {"q": half(1, 1, 1, 64), "k_cache": half(1, 16, 1, 64), "v_cache": half(1, 16, 1, 64), "lengths": ints(5)}
    append = {"k_cache": torch.zeros(1, 16, 1, 64), "v_cache": torch.zeros(1, 16, 1, 64)}
    append |= {"k": torch.rand(1, 1, 1, 64), "v": torch.rand(1, 1, 1, 64), "where": ints(3, dtype=torch.int64)}
    fused = {"qkv": torch.rand(1, 3, 64), "k_cache": torch.zeros(1, 16, 1, 64), "v_cache": torch.zeros(1, 16, 1, 64)}
    fused |= {
        "positions": ints(0),
        "where": ints(3, dtype=torch.int64),
        "cos": torch.rand(1, 32),
        "sin": torch.rand(1, 32),
    }
    route = {"x": half(1, 64), "weights": torch.ones(1, 1), "indices": ints(0).reshape(1, 1)}
    route |= {"gate_up": half(1, 64, 64), "down": half(1, 64, 32), "offsets": one, "order": ints(0)}
    state = {"a_lse": torch.rand(1, 1, 1), "b_lse": torch.rand(1, 1, 1)}
    packed = {name: half(1, 1, 64) for name in ("q", "k", "v")} | {"cu_seqlens": ints(0, 1)}
    pages = {"lengths": ints(5), "page_table": ints(0).reshape(1, 1)}
    int4 = {"w": torch.randint(256, (1, 32), dtype=torch.uint8), "format": "int4_g64", "scales": half(1, 1)}
    return {
        **products("matmul"),
        **products("gemm_bias_relu", bias=half),
        **products("gemm_bias_gelu", bias=half),
        **products("gated_unit", b1=half, b2=half),
        **products("swiglu"),
        "attention": Call("attention", attention),
        "attention of packed": Call("attention", packed),
        "attention of pages": Call("attention", packed | {name: half(1, 16, 1, 64) for name in "kv"} | pages),
        "axpby": Call("axpby", {"a": torch.rand(1, 1, 8), "b": torch.rand(1, 1, 8)}),
        "cascade_attention": Call(
            "cascade_attention",
            {name: half(1, 1, 1, 64) for name in "qkv"} | {name: half(3, 1, 64) for name in ("prefix_k", "prefix_v")},
        ),
        "decode_attention": Call("decode_attention", decode),
        "decode_attention of pages": Call("decode_attention", decode | {"page_table": ints(0).reshape(1, 1)}),
        "dequant": Call("dequant", int4 | {"zeros": half(1, 1)}),
        "embedding": Call("embedding", {"ids": ints(0), "table": half(1, 64)}),
        "embedding of a column": Call("embedding", {"ids": ints(2, 0, 1), "table": half(4, 1)}),
        "kv_append_": Call("kv_append_", append),
        "kv_append_ of pages": Call("kv_append_", append | {"k": torch.rand(1, 1, 64), "v": torch.rand(1, 1, 64)}),
        "layer_norm": Call("layer_norm", {"x": half(1, 1, 64), "weight": half(64), "bias": half(64)}),
        "layer_norm of one": Call("layer_norm", {"x": half(3, 1), "weight": half(1), "bias": half(1)}),
        "merge_state": Call("merge_state", state | {"a": half(1, 1, 1, 64), "b": half(1, 1, 1, 64)}),
        "mla_decode": Call("mla_decode", {"q": half(1, 1, 1, 576), "cache": half(1, 64, 576), "lengths": ints(7)}),
        "moe_ffn": Call("moe_ffn", route),
        "moe_route": Call("moe_route", {"logits": half(1, 8, dtype=torch.bfloat16), "k": 1}),
        "quant_gemm": Call("quant_gemm", {"x": half(1, 64)} | int4),
        "rms_norm": Call("rms_norm", {"x": half(1, 1, 64), "weight": half(64)}),
        "rms_norm with a residual": Call("rms_norm", {"x": half(1, 64), "weight": half(64), "residual": half(1, 64)}),
        "rms_norm_quant": Call("rms_norm_quant", {"x": half(1, 1, 64), "weight": half(64), "dtype": torch.int8}),
        "rms_norm_quant with a residual": Call(
            "rms_norm_quant", {"x": half(1, 64), "weight": half(64), "residual": half(1, 64)}
        ),
        "rope": Call("rope", rope),
        "rope_append": Call("rope_append", fused),
        "rope_append with norms": Call("rope_append", fused | {"q_weight": torch.rand(64), "k_weight": torch.rand(64)}),
        "rope_": Call("rope_", rope),
        "sample of rows": Call(
            "sample",
            {"logits": torch.rand(1, 100), "temperature": torch.zeros(1), "top_k": ints(9), "min_p": torch.zeros(1)},
        ),
        "sample": Call("sample", {"logits": torch.rand(1, 100), "temperature": 0.0}),
        "seq_sum": Call("seq_sum", {"x": torch.rand(1, 64), "lengths": ints(9)}),
        "silu_mul_quant": Call("silu_mul_quant", {"gate": half(1, 1, 64), "up": half(1, 1, 64)}),
        "silu_mul": Call("silu_mul", {"gate": half(1, 1, 64), "up": half(1, 1, 64)}),
        "softmax": Call("softmax", {"x": half(1, 1, 64), "mask": ints(9).reshape(1, 1)}),
        "softmax of one": Call("softmax", {"x": half(3, 1), "mask": half(1)}),
    }
