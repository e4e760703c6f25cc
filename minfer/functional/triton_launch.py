"""Finds out what a Triton kernel's Python function launches, so that prepared calls can launch it without Triton's
Python code.

A Triton kernel is called through Python: its own function computes a grid and scalars, and Triton's `JITFunction.run`
looks up the compiled kernel for the types, the alignments and the divisibility of the arguments. In a prepared call
these are always the same. So we ask Triton once, when the call is prepared. `note` calls the kernel's function with
stand-ins for its tensors. The function then sees a copy of its module's names, in which each `JITFunction` is replaced
by an object that only notes the launch. Next, Triton returns the compiled kernel, and a copy of its launcher notes what
it would hand to C (`Launches`). The prepared call hands the same to C, with the addresses of its own tensors.

`Launches.ordinary` is false if a hook of Triton's has to see the launch, or if a setting that Triton reads at each
launch has changed. Environment variables that change how Triton compiles are not read again.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

# Settings in `triton.knobs.runtime` that a launch reads. A version of Triton may lack some of them.
SETTINGS = ("launch_enter_hook", "launch_exit_hook", "debug", "add_stages_inspection_hook")


class UnknownLaunchError(Exception):
    """We cannot tell what a Triton kernel's function launches: it does something other than launch kernels on its
    tensors."""


class StandIn:
    """What a Triton kernel's function gets in place of a tensor: its shape, strides, dtype and device, but no
    memory."""

    def __init__(self, number: int, like: torch.Tensor, device: torch.device) -> None:
        self.number = number
        self.shape, self.dtype, self.device, self.is_cuda = like.shape, like.dtype, device, device.type == "cuda"
        self._like = like  # on no device

    def stride(self, *dim: int) -> Any:
        return self._like.stride(*dim)

    def dim(self) -> int:
        return self._like.dim()

    def numel(self) -> int:
        return self._like.numel()

    def __len__(self) -> int:
        return len(self._like)


@dataclass(frozen=True)
class _Address:
    """What Triton must know of a tensor to choose a compiled kernel: its type, and whether its address is aligned."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True)
class Place:
    """An argument that each call fills in before it hands it to C: a tensor's address, a scalar, or the stream."""

    what: Any


STREAM = Place("stream")


@dataclass(frozen=True)
class Launches:
    """What a Triton kernel's function launches: `function(*arguments)` for each of `calls`, with each `Place` filled."""

    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]
    stream: Callable[[int], int]  # the current stream of a device
    ordinary: Callable[[], bool]  # whether no hook is set, and Triton's settings are as before
    kernels: list[Any]  # keeps the compiled kernels loaded


def note(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    addresses: Sequence[int],
    scalars: dict[str, Any],
    device: torch.device,
) -> Launches:
    """What a Triton kernel's function launches for these tensors on `device`, which is the current one. `tensors` have
    no memory. `addresses` has an address for each, with the alignment that the tensors of later calls will have. A
    `Place` in the result holds a `StandIn` or a scalar that the function passed on. Raises UnknownLaunchError if we
    cannot tell."""
    triton = sys.modules.get("triton")
    if triton is None or not isinstance(function, FunctionType):
        raise UnknownLaunchError("not a function of Triton's")
    noted: list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = []
    stand_ins = [StandIn(number, x, device) for number, x in enumerate(tensors)]
    try:
        _noting(function, triton.runtime.JITFunction, noted)(*stand_ins, **scalars)
        compiled = [_compiled(*each, addresses) for each in noted]
        active = triton.runtime.driver.active
        ordinary = _ordinary(triton.knobs.runtime, [jit for jit, *_ in noted])
    except UnknownLaunchError:
        raise
    except Exception as error:  # a StandIn lacks what the function needs, or we do not know this Triton
        raise UnknownLaunchError(f"{type(error).__name__}: {error}") from error
    kernels = [kernel for _, kernel in compiled]
    return Launches([call for call, _ in compiled], active.get_current_stream, ordinary, kernels)


def _noting(function: FunctionType, kind: type, noted: list[Any]) -> FunctionType:
    """The same function, but the `JITFunction`s that it sees in its module only note their launches."""

    class Noting:
        def __init__(self, jit: Any) -> None:
            self.jit = jit

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **options: noted.append((self.jit, grid, args, options))

    names = dict(function.__globals__)
    for name, value in function.__globals__.items():
        if isinstance(value, kind):
            names[name] = Noting(value)
        elif type(value).__module__.startswith("triton.") and hasattr(value, "run"):  # such as the autotuner
            names[name] = None
        elif isinstance(value, FunctionType) and value.__globals__ is function.__globals__:
            names[name] = _with_names(value, names)
    return _with_names(function, names)


def _with_names(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _compiled(
    jit: Any, grid: Any, args: tuple[Any, ...], options: dict[str, Any], addresses: Sequence[int]
) -> tuple[tuple[Callable[..., Any], tuple[Any, ...]], Any]:
    """What Triton hands to C for a launch, as in `Launches.calls`, and the compiled kernel."""
    bound = jit.signature.bind(*args, **{name: x for name, x in options.items() if name in jit.signature.parameters})
    bound.apply_defaults()
    if callable(grid):
        grid = grid(dict(bound.arguments))
    if any(isinstance(x, torch.Tensor) for x in bound.arguments.values()) or jit.pre_run_hooks:
        raise UnknownLaunchError("memory of its own, or a hook that must not see stand-ins")

    def typed(x: Any) -> Any:
        return _Address(x.dtype, addresses[x.number]) if isinstance(x, StandIn) else x

    typed_options = {name: typed(x) for name, x in options.items()}
    kernel = jit.run(*map(typed, args), grid=grid, warmup=True, **typed_options)
    if hasattr(kernel, "result"):  # another thread compiles it
        kernel = kernel.result()
    launcher = kernel.run  # loads the kernel
    if launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False):
        raise UnknownLaunchError("memory that Triton allocates")
    places = [Place(x) if isinstance(x, StandIn | float) else x for x in bound.arguments.values()]
    handed: list[tuple[Any, ...]] = []
    noting = copy.copy(launcher)
    noting.launch = lambda *handing: handed.append(handing)
    x, y, z = (*grid, 1, 1)[:3]
    noting(x, y, z, STREAM, kernel.function, kernel.packed_metadata, None, None, None, *places)
    (arguments,) = handed
    return (launcher.launch, arguments), kernel


def _ordinary(runtime: Any, jits: Sequence[Any]) -> Callable[[], bool]:
    """A function that tests whether Triton's settings are still as they are now, and no hook is set."""
    settings = [(name, getattr(runtime, name)) for name in SETTINGS if hasattr(runtime, name)]
    hooks = [runtime.launch_enter_hook.calls, runtime.launch_exit_hook.calls, *(jit.pre_run_hooks for jit in jits)]

    def ordinary() -> bool:
        for each in hooks:
            if each:
                return False
        for name, value in settings:  # noqa: SIM110 - `all` takes twice as long
            if getattr(runtime, name) is not value:
                return False
        return True

    return ordinary
