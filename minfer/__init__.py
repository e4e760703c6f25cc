"""minfer: GPU kernels for LLM inference, and the pipeline that measures them. Start at `docs/architecture.md`.

`minfer.matmul(a, b)` multiplies two matrices with the kernels that were measured fastest; `gated_unit` and `swiglu` do what
their names say in one kernel;
`minfer.results()` is what was measured as a pandas DataFrame."""

from __future__ import annotations

from typing import Any

# Imported when they are asked for: `import minfer` takes no PyTorch.
_WHERE = {
    "gated_unit": "minfer.functional.gated_unit",
    "matmul": "minfer.functional.hgemm",
    "results": "minfer.rows.frame",
    "swiglu": "minfer.functional.gated_unit",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'minfer' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)
