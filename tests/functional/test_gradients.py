"""A gradient is never dropped without a word: each floating-point argument that requires one gets a backward, or is refused."""

from __future__ import annotations

import re

import pytest
import torch

import minfer
from tests.functional.calls import Call, calls, half, ints

E4M3 = torch.float8_e4m3fn
SCALES = torch.tensor([0.5, 2.0])
CACHE = half(1, 16, 2, 64).to(E4M3)
# Those with scales, besides the calls of all functions.
SCALED = (
    Call("attention", {"q": half(1, 4, 4, 64), "k": CACHE, "v": CACHE, "scales": SCALES}),
    Call("decode_attention", {
        "q": half(1, 1, 4, 64), "k_cache": CACHE, "v_cache": CACHE, "lengths": ints(9), "scales": SCALES,
    }),
    Call("quant_gemm", {
        "x": half(2, 128).to(E4M3), "w": half(8, 128).to(E4M3), "format": "fp8", "scales": torch.ones(8),
        "x_scales": torch.ones(2),
    }),
    Call("quant_gemm", {
        "x": half(2, 128), "w": torch.zeros(8, 64, dtype=torch.uint8), "format": "int4_g128", "scales": half(8, 1),
        "zeros": half(8, 1),
    }),
)  # fmt: skip
# A call for each function and arguments that are tensors.
CALLS = {(call.function, *sorted(call.tensors())): call for call in (*calls().values(), *SCALED)}


@pytest.mark.parametrize("about", CALLS, ids=lambda about: f"{about[0]}({', '.join(about[1:])})")
def test_an_argument_that_requires_a_gradient_has_a_backward_or_is_refused(about: tuple[str, ...]) -> None:
    call = CALLS[about]
    for name, x in call.tensors().items():
        if not x.is_floating_point() or x.element_size() == 1:
            continue
        given = {key: value.clone() for key, value in call.tensors().items()}
        given[name] = x.clone().requires_grad_()
        try:
            found = getattr(minfer, call.function)(**(call.given | given))
        except RuntimeError as error:
            assert re.search(r"minfer\.\w+ .*(backward|gradient)", str(error)), name
            continue
        results = [result for result in (found if isinstance(found, tuple) else (found,)) if result.is_floating_point()]
        # `sample` has no such result. Where a function has no backward, PyTorch records one that only warns.
        assert all("Backward" in type(result.grad_fn).__name__ for result in results), name


@pytest.mark.parametrize("function", ("rms_norm", "silu_mul"))
def test_a_second_derivative_is_refused_where_there_is_none(function: str) -> None:
    """The gradients are those of PyTorch, also if autograd records them; only what needs a second derivative raises."""
    a, b = torch.randn(3, 16, requires_grad=True), torch.randn(3, 16)[0 if function == "rms_norm" else slice(None)]
    (gradient,) = torch.autograd.grad(getattr(minfer, function)(a, b).square().sum(), a, create_graph=True)
    eager = (
        torch.nn.functional.rms_norm(a, (16,), b, 1e-6) if function == "rms_norm" else torch.nn.functional.silu(a) * b
    )
    torch.testing.assert_close(gradient, torch.autograd.grad(eager.square().sum(), a)[0])
    with pytest.raises(RuntimeError, match=f"^minfer.{function} has no second derivative: compute it with PyTorch"):
        gradient.square().sum().backward()
