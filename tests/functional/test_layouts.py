"""Wherever its tensors lie in memory, a function gives what the formula gives: any strides and offsets, sizes of 0, 1 and odd
ones, each dtype, drawn from fixed seeds. So does its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import minfer
from minfer.functional import best, library
from tests.functional.calls import FUNCTIONS
from tests.functional.draw import Draw, Tensor
from tests.functional.drawn import DRAWS

FEW, MANY = range(6), range(6, 150)
GPUS = {"NVIDIA A100-SXM4-80GB": (8, 0), "NVIDIA L40S": (8, 9), "NVIDIA H100 80GB HBM3": (9, 0), "NVIDIA B200": (10, 0)}
CONTIGUOUS = {name: {"k_cache", "v_cache"} for name in ("kv_append_", "rope_append")}  # what a function takes only so


def as_list(found: Any) -> list[Any]:
    return [] if found is None else list(found) if isinstance(found, tuple) else [found]


def check(name: str, seed: int, device: str = "cpu") -> None:
    at = Draw(f"{name} {seed}", device)
    given, reference = DRAWS[name](at)
    placed = {key: placed_at(at, x, key in CONTIGUOUS.get(name, ())) for key, x in given.items()}
    about = ", ".join(
        f"{key} {x.dtype} {tuple(x.shape)} {x.stride()} +{x.storage_offset()}"
        if isinstance(x, Tensor)
        else f"{key}={x}"
        for key, x in placed.items()
    )
    exact = {key: in_fp64(x) for key, x in given.items()}
    *wanted, last = as_list(reference(**exact))
    changed = last if isinstance(last, dict) else {}
    wanted += [] if isinstance(last, dict) else [last]
    found = as_list(getattr(minfer, name)(**placed))[: len(wanted)]
    for result, right in zip(found, wanted, strict=True):
        compare(result, right, given, f"{name} of {about}")
    for key, x in given.items():
        if isinstance(x, Tensor):
            compare(placed[key], changed.get(key, x.double()), given, f"{key} after {name} of {about}")


def placed_at(at: Draw, x: Any, contiguous: bool) -> Any:
    """A tensor, or each of a pair, on the device and elsewhere in its memory."""
    if isinstance(x, tuple):
        return tuple(placed_at(at, each, contiguous) for each in x)
    return x if not isinstance(x, Tensor) else x.to(at.device) if contiguous else at.laid_out(x)


def in_fp64(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.dtype.is_floating_point else x


def compare(result: Tensor, right: Tensor, given: Mapping[str, Any], about: str, factor: float = 4) -> None:
    """Within what sums of up to 1000 terms, rounded to the coarsest dtype of result and arguments, can differ."""
    result = result.cpu()
    floats = [x for x in (result, *given.values()) if isinstance(x, Tensor) and x.dtype.is_floating_point]
    coarse = factor * max([torch.finfo(x.dtype).eps for x in floats if x.itemsize > 1] or [0])
    assert result.shape == right.shape, about
    if result.numel():
        largest = max(1.0, right.double().nan_to_num(0, 0, 0).abs().max().item())
        torch.testing.assert_close(
            result.double(),
            right.double(),
            atol=coarse * largest,
            rtol=coarse,
            equal_nan=True,
            msg=lambda m: f"{about}: {m}",
        )


def test_every_function_is_drawn() -> None:
    assert sorted(DRAWS) == FUNCTIONS


@pytest.fixture
def every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What calls a kernel has one on each of GPUS, too: `best` raises if it has none."""
    real = library.call

    def call(op: str, tensors: Any, dtype: torch.dtype, shape: Any, params: Any = best.NONE, **scalars: Any) -> None:
        for device, capability in GPUS.items():
            best.best(op, library.NAMES[dtype], params, shape, capability, device)
        real(op, tensors, dtype, shape, params, **scalars)

    monkeypatch.setattr(library, "call", call)


@pytest.mark.usefixtures("every_gpu")
@pytest.mark.parametrize("seeds", (FEW, pytest.param(MANY, marks=pytest.mark.slow)), ids=("few", "many"))
@pytest.mark.parametrize("name", DRAWS)
def test_a_function_does_not_depend_on_where_its_tensors_lie(name: str, seeds: range) -> None:
    for seed in seeds:
        check(name, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DRAWS)
def test_nor_on_a_gpu_in_any_stream(name: str) -> None:
    """Of every GPU that there is, while another one is the current one."""
    for seed in FEW:
        device = f"cuda:{seed % torch.cuda.device_count()}"
        with torch.cuda.stream(torch.cuda.Stream(device) if seed % 3 else torch.cuda.current_stream(device)):
            torch.cuda.set_device(0)
            check(name, seed, device)


@pytest.mark.parametrize("seeds", (FEW, pytest.param(MANY, marks=pytest.mark.slow)), ids=("few", "many"))
@pytest.mark.parametrize("name", ("rms_norm", "rope", "silu_mul"))
def test_a_gradient_does_not_depend_on_where_its_tensors_lie(name: str, seeds: range) -> None:
    for seed in seeds:
        check_gradients(name, seed)


def check_gradients(name: str, seed: int) -> None:
    at = Draw(f"gradients of {name} {seed}")
    given, reference = DRAWS[name](at)
    given.pop("residual", None)
    learned = [key for key, x in given.items() if isinstance(x, Tensor) and key not in ("cos", "sin", "positions")]
    placed = {key: at.laid_out(x) if isinstance(x, Tensor) else x for key, x in given.items()}
    exact = {key: in_fp64(x) for key, x in given.items()}
    for key in learned:
        placed[key].requires_grad_()
        exact[key].requires_grad_()
    results, rights = as_list(getattr(minfer, name)(**placed)), as_list(reference(**exact))
    ups = [at.floats(result.dtype, *result.shape) for result in results]
    found = torch.autograd.grad(results, [placed[key] for key in learned], [at.laid_out(up) for up in ups])
    wanted = torch.autograd.grad(rights, [exact[key] for key in learned], [up.double() for up in ups])
    for key, result, right in zip(learned, found, wanted, strict=True):
        strides = {each: x.stride() for each, x in placed.items() if isinstance(x, Tensor)}
        compare(result, right, given, f"the gradient of {key} in {name}, {seed}, {strides}", 32)  # terms cancel
