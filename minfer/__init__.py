"""minfer: GPU kernels for LLM inference, and the pipeline that measures them. Start at `docs/architecture.md`.

`minfer.matmul(a, b)` multiplies two matrices with the kernels that were measured fastest, and so do the other functions below
what their names say; `minfer.results()` is what was measured as a pandas DataFrame."""

from __future__ import annotations

from typing import Any

# Imported when they are asked for: `import minfer` takes no PyTorch.
_WHERE = {
    "attention": "minfer.functional.attention",
    "axpby": "minfer.functional.axpby",
    "decode_attention": "minfer.functional.decode_attention",
    "dequant": "minfer.functional.quantised",
    "embedding": "minfer.functional.embedding",
    "fuse": "minfer.fusion",
    "gated_unit": "minfer.functional.gated_unit",
    "gemm_bias_gelu": "minfer.functional.gemm_bias",
    "gemm_bias_relu": "minfer.functional.gemm_bias",
    "kv_append_": "minfer.functional.kv_append",
    "layer_norm": "minfer.functional.norms",
    "matmul": "minfer.functional.hgemm",
    "mla_decode": "minfer.functional.mla_decode",
    "moe_ffn": "minfer.functional.moe_ffn",
    "moe_route": "minfer.functional.moe_route",
    "quant_gemm": "minfer.functional.quantised",
    "results": "minfer.rows.frame",
    "rms_norm": "minfer.functional.norms",
    "rope": "minfer.functional.rope",
    "rope_": "minfer.functional.rope",
    "sample": "minfer.functional.sample",
    "seq_sum": "minfer.functional.seq_sum",
    "silu_mul": "minfer.functional.silu_mul",
    "softmax": "minfer.functional.softmax",
    "swiglu": "minfer.functional.gated_unit",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'minfer' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)
