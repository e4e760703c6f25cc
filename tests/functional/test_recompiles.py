"""A setting that is an integer becomes a size of the graph at its second value: a third compiles nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minfer
from tests.functional.calls import half


def attend(x: torch.Tensor, window: int) -> Any:
    return minfer.attention(x, x, x, causal=True, window=window)


def draw(x: torch.Tensor, top_k: int) -> Any:
    return minfer.sample(x, top_k=top_k)


@pytest.mark.parametrize("backend", ("aot_eager", pytest.param("inductor", marks=pytest.mark.slow)))
@pytest.mark.parametrize("function, shape", ((attend, (1, 8, 2, 64)), (draw, (2, 50))))
def test_a_third_value_compiles_nothing(function: Any, shape: tuple[int, ...], backend: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # takes seconds, which collecting need not wait for

    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    x = half(*shape) if function is attend else torch.rand(shape)
    for value in (2, 3, 5, 4, 7):
        found = compiled(x, value)
        if function is attend:
            torch.testing.assert_close(found, function(x, value))
    assert counter.frame_count <= 2
