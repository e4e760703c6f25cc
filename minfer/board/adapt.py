"""Makes a Python submission a function of its op. This runs in the kernel's process, which imports no more of a board than the
op's own file does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from minfer import ops
from minfer.board.foreign import FOREIGN


def initial(module: ModuleType) -> list[Any]:
    """The arguments with which a task's module is made."""
    found = module.get_init_inputs() if hasattr(module, "get_init_inputs") else []
    return list(found) if isinstance(found, (list, tuple)) else [found]


def find_support(op: str) -> dict[str, Any]:
    """What a submission is registered for: all dtypes, and those of the op's calls that have the same tensors as the first one.
    A call with other tensors, such as a backward pass, is another problem, and no season draws it."""
    stated, supports = ops.get(op), dict[str, Any](dtypes=tuple(ops.DTYPES))
    first, *others = stated.under_each_call(stated.case("torch", "float32", dict.fromkeys(stated.axes, 1)))
    alike = [case for case in others if _name_tensors(stated, case) == _name_tensors(stated, first)]
    if len(alike) < len(others):
        supports["params"] = {"call": tuple(map(stated.call_name, (first, *alike)))}
    return supports


def _name_tensors(op: ops.Op, case: ops.Case) -> list[str]:
    return [spec.name for spec in op.specs(case)]


def name_state(name: str) -> str:
    """The name of the op's tensor for a parameter or buffer of a task's module."""
    return f"p_{name.replace('.', '_')}"


@cache
def adapt(op: str, file: str) -> Callable[..., Any]:
    """The function of the op's name in a file. If the file has the form of the op's task instead, the function calls what the
    file defines: `custom_kernel` for GPU MODE, and for KernelBench the class `ModelNew`. That is made with the arguments of
    `Model`, and gets those of the case's parameters and buffers that have the names of its own."""
    if (task := FOREIGN.get(op)) and task.adapt:
        return task.adapt(Path(file))
    module = ops.load_file(Path(file))
    if hasattr(module, op):
        return getattr(module, op)
    torch.manual_seed(0)
    model = module.ModelNew(*initial(module))
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    stated = ops.get(op)
    specs = stated.specs(stated.case("torch", "float32", dict.fromkeys(stated.axes, 1)))
    outputs = sum(spec.role == "out" for spec in specs)

    def call(*tensors: torch.Tensor, **scalars: Any) -> None:
        named = {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)}
        state = {key: named[name_state(key)] for key in own if name_state(key) in named}
        given = tuple(tensor for name, tensor in named.items() if name.startswith("input"))
        with torch.no_grad():
            found = torch.func.functional_call(model, state, given)
        for output, value in zip(tensors[:outputs], found if isinstance(found, tuple) else (found,), strict=True):
            output.copy_(value)

    return call
