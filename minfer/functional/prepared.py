"""Prepared calls: a call that repeats an earlier one with tensors of the same shapes only allocates and launches.

The Python code of an op checks its arguments, makes views that a kernel can read, and chooses a kernel. None of this depends on
the elements of the arguments. So the second time that a call has the same shapes and scalars, it is *recorded*: the op's code
runs once more, on tensors without memory, and `library.call` notes the kernel and its tensors instead of calling it. From this
record we make a `run`: a function that tests whether its arguments are like the recorded ones, allocates the results and calls
the kernel. It tests, allocates and makes views with three functions of `torch._C._dynamo.guards`, which PyTorch's own compiler
uses for the same. A call that cannot be prepared, for example because a tensor has to be copied first, always goes through the
dispatcher.

A prepared call leaves out nothing that a user could see. Where something else must see or change the call, it goes through
PyTorch's dispatcher as `torch.ops.minfer.<name>`: under torch.compile, where autograd records, under a profiler, in a mode such
as FlopCounterMode, in a transform such as vmap, and for subclasses of tensors. A call with a tangent of forward-mode
differentiation raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from minfer.functional import triton_launch

Tensor = torch.Tensor
Run = Callable[..., Any]
MISS = object()  # what a `run` returns for arguments that it was not prepared for
MOST = 1024  # most combinations of shapes and scalars that are remembered for an op, some 3 kB each
MOST_ALIKE = 8  # most prepared calls for one combination, which differ in strides, dtypes or devices
ALIGNED = 16  # bytes; other tensors may have to be copied
SCALARS = (bool, float, int, str, torch.dtype, type(None))
# Ops that only make views or allocate: none of them computes or copies elements.
VIEWS = {
    getattr(torch.ops.aten, name).default
    for name in (
        "alias",
        "as_strided",
        "detach",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "t",
        "unsqueeze",
        "view",
    )
} | {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.transpose.int,
}
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
AVAILABLE = all(hasattr(_guards, name) for name in ("TensorGuards", "_empty_strided_cpu", "_reinterpret_tensor"))
_remembered: list[dict[Any, tuple[Run, ...]]] = []  # of each op


class UnpreparedError(Exception):
    """A call that cannot be prepared."""


class Recording(threading.local):
    """The kernels that `library.call` was asked to call in this thread while a call is recorded."""

    device: torch.device | None = None  # None: nothing is recorded
    calls: list[tuple[Any, tuple[Tensor, ...], dict[str, Any]]]


recording = Recording()


def forget() -> None:
    """Forget all prepared calls."""
    for plans in _remembered:
        plans.clear()


def new_vector(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty` in a fraction of its host time, where nobody has to see it and the device is the current one."""
    if AVAILABLE and is_seen_by_nobody():
        made: Tensor
        if device.type == "cpu":
            made = _guards._empty_strided_cpu((length,), (1,), dtype)
            return made
        if device.type == "cuda" and device.index == torch.cuda.current_device():
            made = _guards._empty_strided_cuda((length,), (1,), dtype)
            return made
    return torch.empty(length, dtype=dtype, device=device)


def is_seen_by_nobody() -> bool:
    """Whether no mode, transform or tracer has to see what is called."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._is_torch_function_mode_enabled()
        and torch._C._dispatch_tls_local_include_set().raw_repr() in _usual()
    )


def refuse_tangents(name: str, *given: Any) -> None:
    """Raises RuntimeError if one of these arguments is a dual tensor of forward-mode differentiation, as in `torch.func.jvp`:
    kernels would drop its tangent."""
    for x in given:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(
                f"minfer.{name} has no forward-mode derivative: call it with tensors that have no tangent"
            )


def op(schema: str, overload: Any, function: Callable[..., Any], others: Sequence[str] = ()) -> Callable[..., Any]:
    """A Python function that calls the op with the schema's arguments, by place, and prepares repeated calls. `function` is
    the op's Python code. `others` are scalars that it hands to the kernel and that decide nothing else."""
    about = torch._C.parse_schema(f"minfer::{schema}").arguments
    if not AVAILABLE:
        return overload
    plans: dict[Any, tuple[Run, ...]] = {}
    _remembered.append(plans)

    def unprepared(key: Any, given: tuple[Any, ...]) -> Any:
        found = overload(*given)  # which raises if the arguments do not fit
        if _is_ordinary(about, given):
            known = plans.get(key)
            if known is None:  # recorded only at the next such call: most shapes of a server's prefill come once
                if len(plans) >= MOST:
                    plans.clear()
                plans[key] = ()
            elif len(known) < MOST_ALIKE:
                plans[key] = (*known, _record(about, function, given))
        return found

    # Each tensor's shape, each scalar's value and type: 1, 1.0 and True are equal.
    names = [x.name for x in about]
    parts = [
        f"{x.name}.shape"
        if str(x.type) == "Tensor"
        else f"None if {x.name} is None else {x.name}.shape"
        if str(x.type) == "Optional[Tensor]"
        else f"{x.name}, {x.name}.__class__"
        for x in about
        if x.name not in others
    ]
    text = f"""
def make(overload, unprepared, plans, MISS, compiles, is_mode, is_profiled, fills, forward_ad, refuse_tangents):
    def {schema.partition("(")[0]}({", ".join(names)}):
        if compiles() or is_mode() or is_profiled() or fills():
            return overload({", ".join(names)})
        if forward_ad._current_level >= 0:
            refuse_tangents("{schema.partition("(")[0]}", {", ".join(names)})
            return overload({", ".join(names)})
        key = ({", ".join(parts)},)
        for run in plans.get(key, ()):
            found = run({", ".join(names)})
            if found is not MISS:
                return found
        return unprepared(key, ({", ".join(names)},))
    return {schema.partition("(")[0]}
"""
    made: Callable[..., Any] = _compiled(text)(
        overload,
        unprepared,
        plans,
        MISS,
        torch.compiler.is_compiling,
        torch._C._is_torch_function_mode_enabled,
        torch._C._autograd._profiler_enabled,
        torch._C._get_deterministic_algorithms,  # then PyTorch fills what it allocates
        forward_ad,
        refuse_tangents,
    )
    return made


@lru_cache(maxsize=512)
def _compiled(text: str) -> Callable[..., Any]:
    """The function `make` of a Python source."""
    space: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, "<a prepared call of minfer>", "exec"), space)
    made: Callable[..., Any] = space["make"]
    return made


def _is_ordinary(about: Sequence[Any], given: Sequence[Any]) -> bool:
    """Whether only the op's own code has to see the call, and its tensors are plain ones that kernels can read, on a CPU or on
    the current GPU."""
    if torch._C._dispatch_tls_local_include_set().raw_repr() not in _usual():
        return False
    for argument, x in zip(about, given, strict=True):
        if type(x) in SCALARS:
            continue
        if (
            "Tensor" not in str(argument.type)
            or type(x) not in (Tensor, torch.nn.Parameter)
            or x.device.type not in ("cpu", "cuda")
            or torch._C._dispatch_keys(x).raw_repr() not in _plain(x.device, x.dtype)
            or (torch.is_grad_enabled() and x.requires_grad)
            or x.data_ptr() % ALIGNED
            or (x.is_cuda and x.device.index != torch.cuda.current_device())
        ):
            return False
    return True


@lru_cache(maxsize=1)
def _usual() -> frozenset[int]:
    """The keys that PyTorch's dispatcher adds to those of tensors if no mode is active, without and with inference mode."""
    always = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    return frozenset((always.raw_repr(), always.add(torch._C.DispatchKey.ADInplaceOrView).raw_repr()))


@lru_cache(maxsize=256)
def _plain(device: torch.device, dtype: torch.dtype) -> frozenset[int]:
    """The dispatch keys of a plain tensor in memory, without and with inference mode."""
    found = set()
    for inference in (False, True):
        with torch.inference_mode(inference):
            found.add(torch._C._dispatch_keys(torch.empty(0, device=device, dtype=dtype)).raw_repr())
    return frozenset(found)


class _OnlyViews(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in VIEWS:
            raise UnpreparedError(str(func))
        return func(*args, **(kwargs or {}))


def _never(*given: Any) -> Any:
    return MISS


def _record(about: Sequence[Any], function: Callable[..., Any], given: tuple[Any, ...]) -> Run:
    """The prepared call for these arguments; `_never` if it cannot be prepared."""
    tensors = {x.name: value for x, value in zip(about, given, strict=True) if isinstance(value, Tensor)}
    recording.device, recording.calls = next(iter(tensors.values())).device, []
    try:
        with torch.inference_mode(False), torch.no_grad():
            stands = {name: _without_memory(x) for name, x in tensors.items()}
            with _OnlyViews():
                found = function(*(stands.get(x.name, value) for x, value in zip(about, given, strict=True)))
        scalars = {x.name: value for x, value in zip(about, given, strict=True) if not isinstance(value, Tensor)}
        written = [x.name for x in about if x.alias_info is not None and x.alias_info.is_write]
        return _Writer(tensors, stands, scalars).run([x.name for x in about], written, found)
    except UnpreparedError:
        return _never
    finally:
        recording.device, recording.calls = None, []


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class _Writer:
    """Writes the source of a `run` from what was recorded."""

    def __init__(self, tensors: dict[str, Tensor], stands: dict[str, Tensor], scalars: dict[str, Any]) -> None:
        self.tensors, self.scalars = tensors, scalars
        device = next(iter(tensors.values())).device
        empty = _guards._empty_strided_cpu if device.type == "cpu" else _guards._empty_strided_cuda
        once = {
            id(x): (name, x) for name, x in reversed(tensors.items())
        }  # the guards refuse a tensor that is given twice
        checked = [x for _, x in once.values()]
        check = _guards.TensorGuards(
            *checked,
            dynamic_dims_sizes=[list(x.shape) for x in checked],
            dynamic_dims_strides=[list(x.stride()) for x in checked],
        ).check
        self.constants: dict[str, Any] = {"MISS": MISS, "check": check, "empty": empty, "ALIGNED": ALIGNED - 1}
        addresses = " | ".join(f"{name}.data_ptr()" for name, _ in once.values())
        self.condition = f"not check({', '.join(name for name, _ in once.values())}) or ({addresses}) & ALIGNED"
        for name, x in tensors.items():
            if (first := once[id(x)][0]) != name:
                self.condition = f"{name} is not {first} or {self.condition}"
        if "out" in tensors:  # a kernel reads the others while it writes to `out`
            for name, x in tensors.items():
                if name != "out":
                    self.condition += f" or -{_span(tensors['out'])} < out.data_ptr() - {name}.data_ptr() < {_span(x)}"
        if any(x.requires_grad for x in tensors.values()):
            self.condition += " or records()"
            self.constants["records"] = torch.is_grad_enabled
        if device.type == "cuda" and torch.cuda.device_count() > 1:  # it allocates and launches on the current device
            self.condition += f" or current() != {self.constant(device.index)}"
            self.constants["current"] = torch.cuda.current_device
        self.lines: list[str] = []
        self.kernels: list[Any] = []  # compiled by Triton
        # By storage: the name that a tensor has in the source, and the tensor that was recorded.
        self.named = {_storage(x): (name, x) for name, x in stands.items()}

    def constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def run(self, names: list[str], written: list[str], found: Any) -> Run:
        results = [] if found is None else [found] if isinstance(found, Tensor) else list(found)
        for place, x in enumerate(results):
            if _storage(x) in self.named or not x.is_contiguous() or x.storage_offset():
                raise UnpreparedError("a result that is not a new contiguous tensor")
            self.named[_storage(x)] = f"r{place}", x
            size, stride, dtype = map(self.constant, (tuple(x.shape), x.stride(), x.dtype))
            self.lines.append(f"r{place} = empty({size}, {stride}, {dtype})")
        if not recording.calls:
            raise UnpreparedError("no kernel is called")
        for kernel, tensors, scalars in recording.calls:
            called = self.call(kernel, [self.operand(x) for x in tensors], scalars)
            self.lines += self.launches(kernel, tensors, scalars, called) or [called]
        if written:
            self.constants["renew"] = torch.autograd.graph.increment_version
            self.lines.append(f"renew(({', '.join(written)},))")
        made = ", ".join(f"r{place}" for place in range(len(results)))
        self.lines.append(f"return ({made},)" if isinstance(found, tuple) else f"return {made or None}")
        body = "".join(f"\n        {line}" for line in self.lines)
        text = f"""
def make({", ".join(self.constants)}):
    def run({", ".join(names)}):
        if {self.condition}:
            return MISS{body}
    return run
"""
        run: Run = _compiled(text)(**self.constants)
        run.__dict__["kernels"] = self.kernels  # a reference keeps them loaded
        return run

    def operand(self, x: Tensor) -> str:
        """The source of a tensor that a kernel gets: an argument, a result, a view of either, or a tensor without elements."""
        if (found := self.named.get(_storage(x))) is None:
            if x.numel():
                raise UnpreparedError("a copy, or memory for intermediate results")
            device = next(iter(self.tensors.values())).device
            with torch.inference_mode(False):
                return self.constant(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device))
        name, base = found
        if x.dtype != base.dtype:
            raise UnpreparedError("a view of another dtype")
        if (x.shape, x.stride(), x.storage_offset()) == (base.shape, base.stride(), 0):
            return name
        self.constants["view"] = _guards._reinterpret_tensor
        size, stride, offset = map(self.constant, (tuple(x.shape), x.stride(), x.storage_offset()))
        return f"view({name}, {size}, {stride}, {offset})"

    def call(self, kernel: Any, operands: list[str], scalars: dict[str, Any]) -> str:
        if not isinstance(kernel, torch._ops.OpOverload):
            words = [f"{name}={self.scalar(name, value)}" for name, value in scalars.items()]
            return f"{self.constant(kernel)}({', '.join([*operands, *words])})"
        rest = kernel._schema.arguments[len(operands) :]
        if scalars.keys() - {x.name for x in rest}:
            raise UnpreparedError("a scalar that the kernel does not have")
        places = [self.scalar(x.name, scalars.get(x.name, x.default_value)) for x in rest]
        return f"{self.constant(kernel._op)}({', '.join([*operands, *places])})"

    def launches(
        self, kernel: Any, tensors: tuple[Tensor, ...], scalars: dict[str, Any], otherwise: str
    ) -> list[str] | None:
        """Lines that launch a Triton kernel without Triton's Python code. If a hook of Triton's has to see the launch,
        they run the line `otherwise` instead. None if we do not know what the kernel's function launches."""
        one = next(iter(self.tensors.values()))
        found = [self.address(x) for x in tensors]
        try:
            with torch.cuda.device_of(one):
                launches = triton_launch.note(kernel, tensors, [aligned for _, aligned in found], scalars, one.device)
        except triton_launch.UnknownLaunchError:
            return None

        def source(x: Any) -> str:
            if type(x) is tuple and any(type(each) is triton_launch.Place for each in x):
                return f"({''.join(f'{source(each)}, ' for each in x)})"
            what = x.what if type(x) is triton_launch.Place else x
            if x is triton_launch.STREAM:
                return "stream"
            if type(what) is triton_launch.StandIn:
                return found[what.number][0]
            names = [name for name, value in scalars.items() if value is what]
            return self.scalar(names[0], what) if names else self.constant(what)

        ordinary, stream = self.constant(launches.ordinary), self.constant(launches.stream)
        self.kernels += launches.kernels
        calls = [
            f"    {self.constant(function)}({', '.join(map(source, arguments))})"
            for function, arguments in launches.calls
        ]
        device = f"    stream = {stream}({self.constant(one.device.index or 0)})"
        return [f"if {ordinary}():", device, *calls, "else:", f"    {otherwise}"] if calls else None

    def address(self, x: Tensor) -> tuple[str, int]:
        """The source of a tensor's address, and a number with the alignment of that address."""
        if (found := self.named.get(_storage(x))) is None:
            return "0", 0
        offset = int(x.storage_offset()) * x.element_size()
        return f"{found[0]}.data_ptr()" + f" + {offset}" * (offset > 0), ALIGNED + offset

    def scalar(self, name: str, value: Any) -> str:
        """The source of a scalar: the name of the argument that it is (so -0.0 does not become 0.0), else a constant."""
        return name if name in self.scalars and self.scalars[name] is value else self.constant(value)


def _span(x: Tensor) -> int:
    """The bytes from a tensor's first element to the end of its last one."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) * x.element_size() + (
        x.element_size()
    )


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
