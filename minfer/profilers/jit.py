"""What Triton compiled for a call, from the caches of its functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


def jit_functions(module: ModuleType) -> list[Any]:
    """The `triton.JITFunction`s that a module names, out of what wraps them, such as `@triton.autotune`."""
    found = {id(function): function for value in vars(module).values() for function in _inside(value)}
    return list(found.values())


def _inside(value: Any) -> Iterator[Any]:
    """A JITFunction has caches; an Autotuner and Heuristics have none, and what they wrap as `fn`."""
    for _ in range(8):  # decorators on top of each other
        if isinstance(getattr(value, "device_caches", None), dict):
            yield value
            return
        value = getattr(value, "fn", None)


def find_launched(module: ModuleType, call: Callable[[], object]) -> list[Any]:
    """The `CompiledKernel`s that one call of a module's functions launches.

    The caches are emptied before it (Triton then finds the binaries again on disk), so that they hold what this call
    used, and nothing of other shapes or of what autotuning tried: a call must have gone before."""
    functions = jit_functions(module)
    for function in functions:
        function.device_caches.clear()
    call()
    return [
        kernel for function in functions for cache in function.device_caches.values() for kernel in cache[0].values()
    ]
