"""All functions under torch.export, in a new process, in AOTInductor, and under `torch.compile(dynamic=True)`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import minfer
from tests.conftest import ROOT
from tests.functional.calls import FUNCTIONS, calls, half, ints

Tensor = torch.Tensor
CALLS = calls()
FIRST = {call.function: name for name, call in reversed(CALLS.items())}
# A call of each function, and of the ops that it calls only with other arguments.
NAMES = sorted({*FIRST.values(), "rms_norm with a residual", "sample", "sample of rows"})
OTHER_OPS = {FIRST["matmul"]: "hgemm", "rms_norm with a residual": "add_rms_norm", "sample of rows": "sample_rows"}
CALLS_OTHERS = "minfer::cascade_attention"  # a function that is no op
OPS = {f"minfer::{OTHER_OPS.get(name, CALLS[name].function)}" for name in NAMES} - {CALLS_OTHERS}
Named = dict[str, dict[str, Tensor]]


class All(torch.nn.Module):
    """All these calls, with the tensors that `tensors_of_all` has."""

    def forward(self, given: Named) -> dict[str, list[Tensor]]:
        found = {}
        for name in NAMES:
            scalars = {key: x for key, x in CALLS[name].given.items() if not isinstance(x, Tensor)}
            out = getattr(minfer, CALLS[name].function)(**given[name], **scalars)
            found[name] = [] if out is None else [out] if isinstance(out, Tensor) else list(out)
        return found


def tensors_of_all() -> Named:
    return {name: {key: x.clone() for key, x in CALLS[name].tensors().items()} for name in NAMES}


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(scope="module")
def exported() -> torch.export.ExportedProgram:
    return torch.export.export(All(), (tensors_of_all(),), strict=False)


@pytest.mark.slow
def test_each_function_is_exported_as_its_op(exported: torch.export.ExportedProgram) -> None:
    ops = {node.target for node in exported.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert {op.name() for op in ops if op.namespace == "minfer"} == OPS
    given, wanted = tensors_of_all(), tensors_of_all()
    same(exported.module()(given), All()(wanted))
    same(given, wanted)  # what a function changes in place


@pytest.mark.slow
def test_an_exported_call_of_each_function_is_loaded_in_a_new_process(
    exported: torch.export.ExportedProgram, tmp_path: Path
) -> None:
    torch.export.save(exported, tmp_path / "all.pt2")
    given = tensors_of_all()
    torch.save((tensors_of_all(), All()(given), given), tmp_path / "wanted.pt")
    text = (
        "import sys, torch, minfer\n"
        "given, found, after = torch.load(sys.argv[2])\n"
        "model = torch.export.load(sys.argv[1]).module()\n"
        "torch.testing.assert_close(model(given), found, rtol=0, atol=0, equal_nan=True)\n"
        "torch.testing.assert_close(given, after, rtol=0, atol=0, equal_nan=True)\n"
    )
    arguments = [sys.executable, "-c", text, str(tmp_path / "all.pt2"), str(tmp_path / "wanted.pt")]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_aot_inductor_compiles_all_functions(exported: torch.export.ExportedProgram, tmp_path: Path) -> None:
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "all.pt2"))
    model = torch._inductor.aoti_load_package(package)
    given, wanted = tensors_of_all(), tensors_of_all()
    same(model(given), All()(wanted))
    same(given, wanted)


def weights(n: int) -> dict[str, Any]:
    return {"w": torch.full((n, 32), 0x42, dtype=torch.uint8), "format": "int4_g64", "scales": half(n, 1)}


def rotated(n: int) -> dict[str, Any]:
    return {"q": half(2, n, 2, 64), "k": half(2, n, 3, 64), "cos": torch.rand(9, 32), "sin": torch.rand(9, 32)}


def experts(n: int) -> dict[str, Any]:
    given = {"x": half(n, 64), "weights": torch.ones(n, 1), "indices": ints(*[1] * n).reshape(n, 1)}
    given |= {"gate_up": half(2, 64, 64), "down": half(2, 64, 32), "offsets": ints(0, n), "order": ints(*range(n))}
    return given


def product(*names: str, biases: tuple[str, ...] = ()) -> Callable[[int], dict[str, Any]]:
    x, *ws = names
    return lambda n: {x: half(n, 32)} | {w: half(32, 16) for w in ws} | {bias: half(16) for bias in biases}


# Of each function a call with n tokens, rows or sequences.
SIZED: dict[str, Callable[[int], dict[str, Any]]] = {
    "attention": lambda n: {name: half(2, n, 2, 64) for name in "qkv"} | {"causal": True},
    "axpby": lambda n: {"a": torch.rand(n, 8), "b": torch.rand(n, 8)},
    "cascade_attention": lambda n: {name: half(2, n, 2, 64) for name in "qkv"}
    | {name: half(3 + n, 2, 64) for name in ("prefix_k", "prefix_v")},
    "decode_attention": lambda n: {
        "q": half(n, 1, 2, 64), "k_cache": half(n, 16, 2, 64), "v_cache": half(n, 16, 2, 64), "lengths": ints(*[5] * n),
    },
    "dequant": lambda n: weights(n) | {"zeros": half(n, 1)},
    "embedding": lambda n: {"ids": ints(*range(n)), "table": half(9, 64)},
    "gated_unit": product("x", "w1", "w2", biases=("b1", "b2")),
    "gemm_bias_gelu": product("a", "b", biases=("bias",)),
    "gemm_bias_relu": product("a", "b", biases=("bias",)),
    "kv_append_": lambda n: {
        "k_cache": torch.zeros(4, 16, 2, 64), "v_cache": torch.zeros(4, 16, 2, 64), "k": torch.rand(n, 2, 64),
        "v": torch.rand(n, 2, 64), "where": ints(*range(n), dtype=torch.int64),
    },
    "layer_norm": lambda n: {"x": half(n, 64), "weight": half(64), "bias": half(64)},
    "matmul": product("a", "b"),
    "mla_decode": lambda n: {"q": half(n, 1, 2, 576), "cache": half(n, 64, 576), "lengths": ints(*[7] * n)},
    "moe_ffn": experts,
    "merge_state": lambda n: {name: half(2, n, 2, 64) for name in "ab"}
    | {name: torch.rand(2, 2, n) for name in ("a_lse", "b_lse")},
    "moe_route": lambda n: {"logits": half(n, 8, dtype=torch.bfloat16), "k": 2},
    "quant_gemm": lambda n: {"x": half(n, 64)} | weights(16),
    "rms_norm": lambda n: {"x": half(n, 64), "weight": half(64)},
    "rope": rotated,
    "rope_": rotated,
    "rope_append": lambda n: {
        "qkv": torch.rand(n, 4, 64), "k_cache": torch.zeros(4, 16, 1, 64), "v_cache": torch.zeros(4, 16, 1, 64),
        "positions": ints(*range(n)), "where": ints(*range(n), dtype=torch.int64), "cos": torch.rand(9, 32),
        "sin": torch.rand(9, 32),
    },
    "sample": lambda n: {"logits": torch.rand(n, 100), "temperature": torch.zeros(n), "top_p": torch.ones(n)},
    "seq_sum": lambda n: {"x": torch.rand(n, 64), "lengths": ints(*[9] * n)},
    "rms_norm_quant": lambda n: {"x": half(n, 64), "weight": half(64)},
    "silu_mul_quant": lambda n: {"gate": half(n, 64), "up": half(n, 64)},
    "silu_mul": lambda n: {"gate": half(n, 64), "up": half(n, 64)},
    "softmax": lambda n: {"x": half(n, 64)},
    "swiglu": product("x", "wg", "wu"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_graph_serves_all_sizes(function: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(getattr(minfer, function), backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for n in (5, 7, 6):
        given = SIZED[function](n)
        other = {key: x.clone() if isinstance(x, Tensor) else x for key, x in given.items()}
        same(compiled(**given), getattr(minfer, function)(**other))
        same(*({key: x for key, x in each.items() if isinstance(x, Tensor)} for each in (given, other)))
        graphs.append(counter.frame_count)
    assert graphs == [graphs[0]] * 3  # a number such as eps may have taken a second one


class Seen(TorchDispatchMode):
    """Collects the calls of minfer's ops, with the tensors as they were before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "minfer":
            self.calls.append((func, tuple(x.clone() if isinstance(x, Tensor) else x for x in args)))
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_opcheck_finds_nothing_in_any_op() -> None:
    checked = set()
    for name in NAMES:
        with Seen() as seen:
            CALLS[name]()
        for op, arguments in seen.calls:
            if not any(isinstance(x, Tensor) and x.dtype.itemsize == 1 and x.is_floating_point() for x in arguments):
                torch.library.opcheck(op, arguments)
            checked.add(op)
    assert {op.name() for op in checked} == OPS
