"""Which kernels the functions can choose, so that they can be built before a function is called."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from minfer.build import toolchain
from minfer.functional.best import ladder, rule_of, table, with_entries
from minfer.ops import DTYPES, Kernel, Op, Ragged, get

# The ops whose kernels the functions call.
OPS = (
    "add_rmsnorm", "add_rmsnorm_quant", "axpby", "decode_attention", "dequant", "embedding", "gated_unit",
    "gemm_bias_gelu", "gemm_bias_relu", "hgemm", "kv_append", "layernorm", "merge_state", "mla_decode", "moe_ffn",
    "moe_route", "prefill_attention", "quant_gemm", "rmsnorm", "rmsnorm_backward", "rope", "rope_append", "sample",
    "sample_rows", "seq_sum", "silu_mul", "silu_mul_quant", "softmax",
)  # fmt: skip


def choosable(name: str, arch: str) -> list[Kernel]:
    """The kernels of an op that `best` chooses for some shape on an architecture (`"sm_90a"`, or empty for the CPU), in the
    op's order; Triton's are among them. For each measurement, these are the fastest kernel and the next ones, up to the first
    that supports every shape; the kernels that are preferred at some shape; and those that have an entry of their own."""
    op, found = get(name), set[str]()
    capability = divmod(toolchain.arch_number(arch), 10) if arch else None
    orders = [entry["kernels"] for entry in table().get(name, ()) if (entry["arch"] == "cpu") == (not arch)]
    for dtype, params in itertools.product(DTYPES, _settings(op)):
        able = {x.name: x for x in ladder(op, op.case("", dtype, dict.fromkeys(op.axes, 1), params), capability)}
        chosen = {
            kernel.name for order in orders for kernel in _up_to_general([able[each] for each in order if each in able])
        }
        if all(able[each].requires for each in chosen):  # then a function may have to take one that was not measured
            chosen |= {kernel.name for kernel in _up_to_general([*able.values()][::-1])}
        found |= chosen | {each for each, kernel in able.items() if rule_of(kernel, capability)}
    found |= {kernel.name for kernel in with_entries(name, arch)}
    return [kernel for kernel in op.kernels.values() if kernel.name in found]


def _settings(op: Op) -> Iterable[dict[str, str]]:
    """Every combination of the op's parameters, with each of its calls."""
    values = [valid.examples if isinstance(valid, Ragged) else valid for valid in op.params.values()]
    for chosen in itertools.product(*values, op.calls):
        yield dict(zip([*op.params, "call"], chosen, strict=True))


def _up_to_general(kernels: list[Kernel]) -> list[Kernel]:
    """The kernels up to the first that supports every shape."""
    general = (place for place, kernel in enumerate(kernels, 1) if kernel.requires is None)
    return kernels[: next(general, len(kernels))]
