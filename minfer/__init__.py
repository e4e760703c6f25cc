"""minfer: GPU kernels for LLM inference, and the pipeline that measures them. Start at `docs/architecture.md`.

`minfer.matmul(a, b)` multiplies two matrices with the kernels that were measured fastest, and so do the other functions below
what their names say; `minfer.results()` is what was measured as a pandas DataFrame. Once both PyTorch and minfer are imported,
in either order, they are also ops: `torch.ops.minfer.<name>`."""

from __future__ import annotations

import sys
from typing import Any

# Imported when they are asked for: `import minfer` takes no PyTorch.
_WHERE = {
    "attention": "minfer.functional.attention",
    "axpby": "minfer.functional.axpby",
    "cascade_attention": "minfer.functional.cascade",
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
    "merge_state": "minfer.functional.cascade",
    "mla_decode": "minfer.functional.mla_decode",
    "moe_ffn": "minfer.functional.moe_ffn",
    "moe_route": "minfer.functional.moe_route",
    "quant_gemm": "minfer.functional.quantised",
    "results": "minfer.rows.frame",
    "rms_norm": "minfer.functional.norms",
    "rms_norm_quant": "minfer.functional.row_quant",
    "rope": "minfer.functional.rope",
    "rope_": "minfer.functional.rope",
    "rope_append": "minfer.functional.rope_append",
    "sample": "minfer.functional.sample",
    "seq_sum": "minfer.functional.seq_sum",
    "silu_mul": "minfer.functional.silu_mul",
    "silu_mul_quant": "minfer.functional.row_quant",
    "softmax": "minfer.functional.softmax",
    "swiglu": "minfer.functional.gated_unit",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'minfer' has no attribute {name!r}")
    import importlib

    found = globals()[name] = getattr(importlib.import_module(_WHERE[name]), name)  # the next access does not come here
    return found


def _register() -> None:
    import importlib

    importlib.import_module("minfer.functional")


class _AfterTorch:
    """An import hook that registers the ops when PyTorch is imported.

    It does nothing if a module of minfer imports PyTorch: commands and workers import themselves what they call."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != "torch":
            return None
        import importlib.util

        sys.meta_path.remove(self)  # else find_spec below would call this method again
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None or _is_called_by_minfer():
            return spec
        sys.meta_path.insert(0, self)  # a caller may look for torch without importing it
        loader, load = spec.loader, spec.loader.exec_module

        def load_and_register(module: Any) -> None:
            sys.meta_path.remove(self)
            load(module)
            del loader.exec_module  # uncovers the method of the class
            _register()

        loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def _is_called_by_minfer() -> bool:
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if getattr(frame.f_globals.get("__spec__"), "name", "").startswith("minfer."):
            return True
    return False


if "torch" in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _AfterTorch())
