"""What changes a tensor in place says so: autograd then refuses to compute a gradient from values that are gone."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import minfer
from minfer.functional import library
from tests.functional.calls import half, ints

Given = dict[str, Any]

# For each op that writes to arguments, what it is called with in the order of its schema, and the function that calls it.
table = torch.rand(8, 32)
ROPE = {
    "q": half(1, 2, 1, 64),
    "k": half(1, 2, 1, 64),
    "cos": table,
    "sin": table,
    "positions": None,
    "interleaved": False,
}
APPEND = {"k_cache": torch.zeros(1, 16, 1, 64), "v_cache": torch.zeros(1, 16, 1, 64)}
APPEND |= {"k": torch.rand(1, 1, 64), "v": torch.rand(1, 1, 64), "where": ints(3, dtype=torch.int64)}
FUSED = {"qkv": half(1, 3, 64), "k_cache": half(1, 16, 1, 64), "v_cache": half(1, 16, 1, 64), "positions": ints(0)}
FUSED |= {
    "where": ints(3, dtype=torch.int64),
    "cos": table,
    "sin": table,
    "q_weight": None,
    "k_weight": None,
    "eps": 1e-6,
}
NORM = {"x": half(2, 64), "residual": half(2, 64), "weight": half(64), "eps": 1e-6}
PRODUCT = {"a": half(16, 16), "b": half(16, 16), "out": half(16, 16)}
SOFTMAX = {"x": half(2, 64), "mask": None, "out": half(2, 64)}
SUM = {"a": torch.rand(8), "b": torch.rand(8), "alpha": 2.0, "beta": 1.0, "out": torch.rand(8)}
WRITERS: dict[str, tuple[Given, Any]] = {
    "rope_": (ROPE, lambda q, k, cos, sin, positions, interleaved: minfer.rope_(q, k, cos, sin)),
    "kv_append_": (APPEND, minfer.kv_append_),
    "rope_append": (FUSED, minfer.rope_append),
    "add_rms_norm": (NORM, lambda x, residual, weight, eps: minfer.rms_norm(x, weight, eps, residual)),
    "add_rms_norm_quant": (
        NORM | {"dtype": torch.int8},
        lambda x, residual, weight, eps, dtype: minfer.rms_norm_quant(x, weight, eps, residual, dtype=dtype),
    ),
    "hgemm_out": (PRODUCT, lambda a, b, out: minfer.matmul(a, b, out=out)),
    "softmax_out": (SOFTMAX, lambda x, mask, out: minfer.softmax(x, mask, out=out)),
    "axpby_out": (SUM, lambda a, b, alpha, beta, out: minfer.axpby(a, b, alpha, beta, out=out)),
}


def written(name: str) -> list[str]:
    arguments = getattr(torch.ops.minfer, name).default._schema.arguments
    return [x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write]


def ways(name: str) -> dict[str, Any]:
    """How an op is called: by its function, as an op, and compiled."""
    function = WRITERS[name][1]
    return {
        "function": function,
        "op": getattr(torch.ops.minfer, name).default,
        "aot": torch.compile(function, backend="aot_eager", fullgraph=True),
        "inductor": torch.compile(function, fullgraph=True),
        "reduce-overhead": torch.compile(function, mode="reduce-overhead", fullgraph=True),
    }


def refuses_a_backward(name: str, way: str, device: str) -> None:
    # torch.compiler.reset() imports it while it goes through the backends, and the import may add one: a RuntimeError.
    importlib.import_module("torch._inductor.cudagraph_trees")
    made, _ = WRITERS[name]
    for which in written(name):
        given = {key: x.to(device).clone() if isinstance(x, torch.Tensor) else x for key, x in made.items()}
        torch.compiler.reset()
        for _ in range(3 if way == "reduce-overhead" else 1):  # the first call of it captures nothing, the second does
            weight = torch.ones(given[which].shape, device=device, dtype=given[which].dtype, requires_grad=True)
            loss = (weight * given[which]).sum()
            before = given[which]._version
            with torch.no_grad():
                ways(name)[way](*given.values())
            assert given[which]._version > before, f"{which} has no new version"
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_every_op_that_writes_is_here() -> None:
    names = [name.partition("::")[2] for name in library.LIBRARY._op_defs]
    assert {name for name in names if written(name)} == set(WRITERS)


@pytest.mark.parametrize("way", ("function", "op", "aot", "inductor"))
@pytest.mark.parametrize("name", WRITERS)
def test_a_backward_that_needs_the_old_values_raises(name: str, way: str) -> None:
    refuses_a_backward(name, way, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("way", ("function", "op", "inductor", "reduce-overhead"))
@pytest.mark.parametrize("name", WRITERS)
def test_a_backward_that_needs_the_old_values_raises_on_a_gpu(name: str, way: str) -> None:
    refuses_a_backward(name, way, "cuda")


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_made_in_inference_mode_has_no_version_and_is_changed(name: str) -> None:
    with torch.inference_mode():
        given = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in WRITERS[name][0].items()}
        before = {which: given[which].clone() for which in written(name)}
        WRITERS[name][1](*given.values())
    assert all(not torch.equal(given[which], old) for which, old in before.items())
