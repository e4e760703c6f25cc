"""The kernels as functions for users of PyTorch. Importing any of them registers all as ops, `torch.ops.minfer.<name>`."""

from __future__ import annotations

import importlib

import minfer

for _module in sorted(set(minfer._WHERE.values())):
    if _module.startswith(f"{__name__}."):
        importlib.import_module(_module)
