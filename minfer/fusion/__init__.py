"""Fusing: a model's own PyTorch code, with minfer's kernels in the places where they were measured to be no slower.

`minfer.fuse(module)` or `torch.compile(module, backend="minfer")`; docs/fusion.md says what is recognised, what is refused and
why."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch._dynamo.backends.registry import list_backends, register_backend

from minfer.fusion.backend import NAMES, Options, minfer

# Where minfer is on the path but not installed, PyTorch finds no entry point. Where it finds one, it registers what that
# names itself, perhaps while this module is being imported, and takes no name twice.
if "minfer" not in list_backends(exclude_tags=()):
    register_backend(compiler_fn=minfer, name="minfer")


def fuse(
    module: Callable[..., Any],
    *,
    rest: str = "inductor",
    patterns: Collection[str] = NAMES,
    unmeasured: str = "refuse",
    svg: str | os.PathLike[str] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> Callable[..., Any]:
    """`torch.compile(module, backend="minfer")`: the module, or function, with minfer's ops for what they do faster.

    rest: what runs all that is not fused: "inductor", or "eager", which needs no compiler but minfer's own.
    patterns: which to look for; all of `minfer.fusion.NAMES` unless given.
    unmeasured: "refuse" leaves as it is what was not measured on this device, "fuse" replaces that too.
    svg: a folder for a picture of each graph before and after, named after what is in it.
    dynamic, fullgraph: torch.compile's own.

    Compiled at the first call. The parameters are the module's own, and training works: what a backward needs is not fused.
    With MINFER_EXPLAIN=1 each match is printed to stderr with what became of it. Raises ValueError for options that there
    are not, TypeError for what cannot be called."""
    if isinstance(module, type) or not callable(module):
        what = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise TypeError(f"minfer.fuse takes a module or a function, got {what}")
    given: Any = {"rest": rest, "patterns": patterns, "unmeasured": unmeasured, "svg": svg}
    Options(**given)  # raises here what would else be raised at the first call
    given["patterns"] = tuple(patterns)
    return torch.compile(module, backend="minfer", dynamic=dynamic, fullgraph=fullgraph, options=given)
