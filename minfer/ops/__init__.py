"""Problems and the kernels that solve them.

An `Op` states a problem: its tensors by name and how each is made, its axes, an fp64 reference with an error bound for each
output, and what a call costs. A `Kernel` is one implementation, in one file. A `Case` is one cell of the matrix: op x kernel
x dtype x parameters x shape. Nothing here knows how kernels are built or timed.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

from minfer.ops.axes import Ragged, divides, lengths, multiple_of, offsets, one_of, size, up_to
from minfer.ops.bounds import Expected, dot, exact, rounded, within
from minfer.ops.case import Case, Rule, at_most, both, multiples
from minfer.ops.kernel import PACKAGE, Kernel, Returning, is_loaded, load_file
from minfer.ops.op import GBPS, REGISTERED, TFLOPS, Metric, Op, default, tokens_per_second
from minfer.ops.sources import SourceError
from minfer.ops.tensors import (
    DTYPES,
    Draw,
    Fill,
    Spec,
    Tensors,
    fixed,
    floats,
    given,
    inout,
    integers,
    made_by,
    out,
    page_table,
)  # fmt: skip

__all__ = [
    "DTYPES", "GBPS", "PACKAGE", "TFLOPS", "Case", "Draw", "Expected", "Fill", "Kernel", "Metric", "Op", "Ragged",
    "Returning", "Rule", "SourceError", "Spec", "Tensors", "at_most", "both", "compiled", "default", "divides", "dot",
    "every_kernel", "exact", "fixed", "floats", "get", "given", "inout", "integers", "is_loaded", "lengths", "load_file",
    "made_by", "multiple_of", "multiples", "names", "offsets", "one_of", "out", "page_table", "rounded", "size",
    "tokens_per_second", "up_to", "within",
]  # fmt: skip


def names() -> list[str]:
    """The ops there are: the packages in this folder, and what `load_file` brought."""
    return sorted({info.name for info in pkgutil.iter_modules([str(PACKAGE / "ops")]) if info.ispkg} | set(REGISTERED))


def get(name: str) -> Op:
    """The op of that name; KeyError if there is none."""
    if name not in REGISTERED and name in names():
        importlib.import_module(f"minfer.ops.{name}")
    if name not in REGISTERED:
        raise KeyError(f"there is no op {name}; there are {', '.join(names())}")
    return REGISTERED[name]


def every_kernel(backends: Iterable[str] = ("torch", "cuda", "triton", "cpp")) -> list[Kernel]:
    """Every registered kernel of the given backends, in ladder order; what the tests are parametrised over."""
    wanted = set(backends)
    return [k for name in names() for k in get(name).kernels.values() if k.backend in wanted]


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`function` under `torch.compile` with these options, compiled anew for every shape, when it is first called with it.

    torch.compile refuses to write one of several tensors that lie in one storage and have different dtypes, as those of a
    case do: such a function must return its results (`returns=(0,)`)."""
    made: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*tensors: Any, **scalars: Any) -> Any:
        nonlocal made
        if made is None:
            import torch  # and torch.compile's own modules, which take seconds to import

            torch._dynamo.config.recompile_limit = 1 << 20  # verification brings many shapes
            torch._dynamo.config.accumulated_recompile_limit = 1 << 20
            torch._inductor.config.compile_threads = 1  # a pool of processes would outlive the kernel
            made = torch.compile(function, dynamic=False, fullgraph=True, **options)
        return made(*tensors, **scalars)

    return call
