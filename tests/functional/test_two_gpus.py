"""Each function runs on the device of its tensors, whichever device is the current one, also from two threads at once. What is
on another device is refused in one sentence."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import minfer
from benchmarks import host_cost
from minfer.functional import early, library
from tests.functional.calls import FUNCTIONS

Tensor = torch.Tensor
TWO = torch.cuda.is_available() and torch.cuda.device_count() > 1
CPU = torch.device("cpu")
NAMES = list(host_cost.cases(CPU))
WITH_OUT = [name for name in FUNCTIONS if "out" in inspect.signature(getattr(minfer, name)).parameters]


def on_two_gpus(test: Callable[..., None]) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not TWO, reason="needs two GPUs")(test))


@cache
def given(device: str) -> dict[str, host_cost.Call]:
    return host_cost.cases(torch.device(device))


def moved(name: str, device: str, of: str = "cuda:0") -> dict[str, Any]:
    """The arguments of a call, copied to a device."""
    return {key: x.to(device, copy=True) if isinstance(x, Tensor) else x for key, x in given(of)[name][1].items()}


def call(name: str, arguments: dict[str, Any]) -> list[Tensor]:
    """What a function returns, and then its tensors, which it may have changed."""
    torch.cuda.manual_seed_all(1)  # for `sample`
    found = getattr(minfer, given("cpu")[name][0])(**arguments)
    results = [] if found is None else [found] if isinstance(found, Tensor) else list(found)
    return [*results, *(x for x in arguments.values() if isinstance(x, Tensor))]


def wanted_of(name: str) -> list[Tensor]:
    """What the first GPU gives, on the CPU."""
    return [x.cpu() for x in call(name, moved(name, "cuda:0"))]


def compare(found: list[Tensor], wanted: list[Tensor], device: str) -> None:
    assert {str(x.device) for x in found} == {device}
    for x, right in zip(found, wanted, strict=True):
        right = right.double()
        atol = 0.02 * right.abs().max().item()  # kernels may add in another order
        torch.testing.assert_close(x.cpu().double(), right, rtol=0, atol=atol)


def test_every_function_has_a_call() -> None:
    assert {function for function, _ in given("cpu").values()} == set(FUNCTIONS)


def refuse_other_devices(name: str, here: str, there: str) -> None:
    """Each tensor in turn is on another device than the rest."""
    function, arguments = given(here)[name]
    tensors = [key for key, x in arguments.items() if isinstance(x, Tensor)]
    for key in tensors[:-1] if len(tensors) == 1 else tensors:
        changed = arguments | {key: arguments[key].to(there)}
        with pytest.raises(ValueError, match=rf"^minfer\.{function} takes [^.]* the device of \w+, [^.]*, got [\w:]+$"):
            getattr(minfer, function)(**changed)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_two_devices_are_refused(name: str) -> None:
    refuse_other_devices(name, "cpu", "meta")


@on_two_gpus
@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_two_gpus_are_refused(name: str) -> None:
    refuse_other_devices(name, "cuda:0", "cuda:1")


def refuse_out(name: str, here: str, there: str) -> None:
    arguments = given(here)[name][1]
    found = getattr(minfer, name)(**arguments)
    takes = rf"^minfer\.{name} takes an out of .* on {here}, got .* on {there}$"
    for _ in range(3):
        with pytest.raises(ValueError, match=takes):
            getattr(minfer, name)(**arguments, out=torch.empty_like(found, device=there))
        getattr(minfer, name)(**arguments, out=torch.empty_like(found))


@pytest.mark.parametrize("name", WITH_OUT)
def test_an_out_elsewhere_is_refused(name: str) -> None:
    refuse_out(name, "cpu", "meta")


@on_two_gpus
@pytest.mark.parametrize("name", WITH_OUT)
def test_an_out_on_another_gpu_is_refused(name: str) -> None:
    refuse_out(name, "cuda:0", "cuda:1")


@on_two_gpus
@pytest.mark.parametrize("name", NAMES)
def test_a_function_runs_where_its_tensors_are(name: str) -> None:
    """The first calls of a shape are unprepared, the later ones prepared."""
    library.forget()
    torch.cuda.set_device(0)
    wanted = wanted_of(name)
    for current in (0, 1, 0):
        with torch.cuda.device(current):
            for device in ("cuda:1", "cuda:0") * 3:
                with torch.cuda.stream(torch.cuda.Stream(device)):  # makes the stream's device the current one
                    torch.cuda.set_device(current)
                    arguments = moved(name, device)
                    compare(call(name, arguments), wanted, device)
                assert torch.cuda.current_device() == current


@on_two_gpus
def test_two_threads_have_a_gpu_each() -> None:
    library.forget()
    wanted = {name: wanted_of(name) for name in NAMES}
    torch.cuda.synchronize()
    barrier, wrong = threading.Barrier(2), list[BaseException]()

    def work(device: str) -> None:
        try:
            torch.cuda.set_device(device)
            with torch.cuda.stream(torch.cuda.Stream()):
                for name in NAMES:
                    if given("cpu")[name][0] == "sample":  # the threads would share the seeds
                        continue
                    arguments = [moved(name, device) for _ in range(6)]
                    barrier.wait(60)
                    found = [call(name, each) for each in arguments]
                    for each in found:
                        compare(each, wanted[name], device)
        except BaseException as error:
            barrier.abort()
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(f"cuda:{i}",)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@on_two_gpus
def test_early_launches_go_where_their_tensors_are() -> None:
    torch.cuda.set_device(0)
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        x, residual = (torch.rand(4, 512, device=device).bfloat16() for _ in range(2))
        weight, square = torch.rand(512, device=device).bfloat16(), torch.rand(512, 512, device=device).bfloat16()
        torch.testing.assert_close(early.matmul(x, square.t()), x @ square.t(), rtol=0.02, atol=0.5)
        y = torch.nn.functional.silu(x @ square.t()) * (x @ square.t())
        torch.testing.assert_close(early.swiglu(x, square.t(), square.t()), y, rtol=0.03, atol=1.0)
        total = residual + x
        torch.testing.assert_close(
            early.rms_norm(x, weight, residual=residual),
            torch.nn.functional.rms_norm(total, (512,), weight, 1e-6),
            rtol=0.02,
            atol=0.05,
        )
        torch.cuda.synchronize(device)


@on_two_gpus
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_of_the_second_gpu(name: str) -> None:
    wanted = wanted_of(name)
    with torch.cuda.device(1):
        arguments = moved(name, "cuda:1")
        for _ in range(3):
            call(name, {key: x.clone() if isinstance(x, Tensor) else x for key, x in arguments.items()})
        graph = torch.cuda.CUDAGraph()
        function = getattr(minfer, given("cpu")[name][0])
        with torch.cuda.graph(graph):
            found = function(**arguments)
        torch.cuda.manual_seed_all(1)
        graph.replay()
        results = [] if found is None else [found] if isinstance(found, Tensor) else list(found)
        compare([*results, *(x for x in arguments.values() if isinstance(x, Tensor))], wanted, "cuda:1")
