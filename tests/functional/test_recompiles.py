"""A setting that is a number becomes an input of the graph at its second value: a third compiles nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
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


def test_a_generator_is_drawn_from_outside_of_the_graph() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter, generator, x = CompileCounterWithBackend("aot_eager"), torch.Generator(), torch.rand(5, 50)
    compiled = torch.compile(lambda x: minfer.sample(2 * x, top_k=9, generator=generator) + 1, backend=counter)
    graphs = set()
    for seed in (1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = [compiled(x) for _ in range(2) if generator.manual_seed(seed)]
        generator.manual_seed(seed)
        assert found[0].equal(found[1]) and found[0].equal(minfer.sample(2 * x, top_k=9, generator=generator) + 1)
        graphs.add(counter.frame_count)
    assert len(graphs) == 1  # the parts before the draw and behind it are compiled once


def of_all(x: torch.Tensor, setting: float) -> torch.Tensor:
    return minfer.sample(x, 0.5 + setting, 9, 1 - setting / 2, setting / 100)


ONE_SETTING: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "temperature": lambda x, setting: minfer.sample(x, temperature=setting),
    "top_p": lambda x, setting: minfer.sample(x, top_p=setting),
    "min_p": lambda x, setting: minfer.sample(x, min_p=setting),
    "all": of_all,
}


@pytest.mark.slow
@pytest.mark.parametrize("which", ONE_SETTING)
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_a_third_setting_of_sample_compiles_nothing(which: str, backend: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(ONE_SETTING[which], backend=counter, fullgraph=True)
    x = torch.zeros(400, 12)
    x[:, 0] = 4.0
    for setting in (0.5, 0.6, 0.31, 0.9, 0.45, 0.77):
        found = compiled(x, setting)
        share = float((found == 0).float().mean())
        given = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
        given |= (
            {"temperature": 0.5 + setting, "top_p": 1 - setting / 2, "min_p": setting / 100}
            if which == "all"
            else {which: setting}
        )
        p = choose_probabilities(x[0], **given)
        assert abs(share - float(p[0])) < 6 * (float(p[0] * (1 - p[0])) / 400) ** 0.5 + 1e-6, (setting, share, p[0])
    assert counter.frame_count <= 2


def choose_probabilities(x: torch.Tensor, temperature: float, top_p: float, min_p: float) -> torch.Tensor:
    p = (x / temperature).softmax(0)
    if p[0] >= top_p:
        p[1:] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()
