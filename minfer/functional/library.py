"""How a function for users becomes a torch op, `torch.ops.minfer.<name>`, and how it calls the kernel that `best` chooses."""

from __future__ import annotations

import inspect
import numbers
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from minfer import build
from minfer.build import toolchain
from minfer.functional import prepared
from minfer.functional.best import NONE, Words, best, chooser, with_entries
from minfer.functional.contract import Contract
from minfer.ops import Kernel, get
from minfer.ops.tensors import NAMES

LIBRARY = torch.library.Library("minfer", "FRAGMENT")

P = ParamSpec("P")
R = TypeVar("R")
Choices = dict[tuple[str, str], str]  # by op and `Case.problem`: the kernel or what else was chosen, and why
chosen: Choices | None = None  # what was chosen since `note_choices`
MOST_PROBLEMS = 4096  # most problems whose kernels are remembered, about 1 kB each
NO_BACKWARD = "has no backward: call it under torch.no_grad(), or with detached tensors"
MISSING = object()  # an argument that was left out; Python itself checks that
# For each type of an annotation: the types that are accepted, and how an error names them. As in PyTorch's schemas, a tensor
# with one element is a number, and a bool may be a number or None.
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "Tensor": ((torch.Tensor,), "a tensor"),
    "torch.Tensor": ((torch.Tensor,), "a tensor"),
    "bool": ((bool, numbers.Number, type(None), torch.Tensor), "True or False"),
    "int": ((numbers.Integral, torch.Tensor), "a whole number"),
    "float": ((numbers.Real, torch.Tensor), "a number"),
    "str": ((str,), "a string"),
    "torch.dtype": ((torch.dtype,), "a torch.dtype"),
    "torch.Generator": ((torch.Generator,), "a torch.Generator"),
    "None": ((type(None),), "None"),
}


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Make the function raise a TypeError that names the argument if one has another type than its annotation."""
    places = [
        (place, x.name, *_kind(x.annotation))
        for place, x in enumerate(inspect.signature(function).parameters.values())
        if set(x.annotation.split(" | ")) <= KINDS.keys()
    ]
    tensors = [each for each in places if each[3] in ("a tensor", "a tensor or None")]

    def check(given: tuple[Any, ...], named: dict[str, Any], places: list[Any]) -> None:
        for place, name, types, takes in places:
            value = given[place] if place < len(given) else named.get(name, MISSING)
            has_many = isinstance(value, torch.Tensor) and "tensor" not in takes and value.numel() != 1
            if value is not MISSING and (has_many or not isinstance(value, types)):
                got = f"a tensor of {tuple(value.shape)}" if has_many else type(value).__name__
                raise TypeError(f"minfer.{function.__name__} takes {takes} as {name}, got {got}") from None

    def check_layouts(given: tuple[Any, ...], named: dict[str, Any]) -> None:
        for place, name, _, _ in places:
            value = given[place] if place < len(given) else named.get(name)
            if isinstance(value, torch.Tensor) and (value.is_nested or value.layout != torch.strided):
                got = "a nested tensor" if value.is_nested else f"the layout {value.layout}"
                raise TypeError(f"minfer.{function.__name__} takes a dense tensor as {name}, got {got}") from None

    @wraps(function)
    def checked(*given: P.args, **named: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            check(given, named, tensors)
            return function(*given, **named)
        try:
            return function(*given, **named)
        except Exception:  # only after an error: a wrong type always raises before a kernel is called
            check(given, named, places)
            check_layouts(given, named)
            raise

    return checked


def _kind(annotation: str) -> tuple[tuple[type, ...], str]:
    """The types that an annotation accepts, and how an error names them."""
    kinds = [KINDS[each] for each in annotation.split(" | ")]
    return tuple(x for types, _ in kinds for x in types), " or ".join(takes for _, takes in kinds)


def refuse_gradients(name: str, *tensors: torch.Tensor | None, why: str = NO_BACKWARD) -> None:
    """Raises RuntimeError, with the reason `why`, if autograd would record `minfer.<name>` because of one of these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(f"minfer.{name} {why}")


def refuse_second_derivatives(name: str) -> None:
    """Make the backward of `torch.ops.minfer.<name>_backward` raise RuntimeError. If the op had no backward, PyTorch would only
    warn, once in a process, and leave this part of a gradient out."""

    def refuse(context: Any, *gradients: torch.Tensor) -> None:
        raise RuntimeError(f"minfer.{name} has no second derivative: compute it with PyTorch's own functions")

    torch.library.register_autograd(f"minfer::{name}_backward", refuse, lib=LIBRARY)


def define(
    schema: str, function: Callable[..., Any], fake: Callable[..., Any], others: Sequence[str] = ()
) -> Callable[..., Any]:
    """Register `torch.ops.minfer.<name>` for every device. Returns the op as a function of the schema's arguments, by
    place, which prepares repeated calls (`prepared`, which also says what `others` are).

    `schema` starts with the name, as in `"silu_mul(Tensor gate, Tensor up) -> Tensor"`. `fake` has the same arguments and
    returns empty tensors of the right shapes, for torch.compile. Both must raise for arguments that do not fit. Each call
    increments the version of the tensors that the schema marks as written, such as `Tensor(a!) x`. So autograd notices that
    values it saved are overwritten, as after PyTorch's own in-place functions. A call with a dual tensor raises RuntimeError.

    `torch.library.custom_op` is not used: it takes longer at each call, and imports all of torch.compile at the first."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, _without_tangents(name, _renewing(schema, function)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"minfer::{name}", fake, lib=LIBRARY)
    return prepared.op(schema, getattr(torch.ops.minfer, name).default, function, others)


def define_with_out(
    schema: str, write: Callable[..., None], contract: Callable[..., Contract]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Register the op of the schema, which returns one new tensor, and `<name>_out`, whose last argument is written instead.
    `write(result, *arguments)` computes both, `contract(*arguments)` says what they take. Returns both as `define` does. If a
    kernel may not write to a caller's tensor, the result is computed elsewhere and copied."""

    def make(*given: Any) -> Any:
        return contract(*given).make(*given)

    def compute(*given: Any) -> torch.Tensor:
        made: torch.Tensor = make(*given)
        write(made, *given)
        return made

    def compute_into(*given: Any) -> None:
        *arguments, out = given
        check_into(*given)
        if is_writable(out, *(x for x in arguments if isinstance(x, torch.Tensor))):
            write(out, *arguments)
        else:
            out.copy_(compute(*arguments))

    def check_into(*given: Any) -> None:
        *arguments, out = given
        contract(*arguments).check_out(out, *arguments)

    name, takes = schema.removesuffix(") -> Tensor").split("(", 1)
    into = f"{name}_out({re.sub('=[^,]*', '', takes)}, Tensor(a!) out) -> ()"
    return define(schema, compute, make), define(into, compute_into, check_into)


def _without_tangents(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function: it raises if an argument has a tangent, even if it is called as `torch.ops.minfer.<name>`."""

    @wraps(function)
    def checked(*given: Any) -> Any:
        if forward_ad._current_level >= 0:
            prepared.refuse_tangents(name, *given)
        return function(*given)

    return checked


def _renewing(schema: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, followed by an increment of the version of each tensor that it writes by its schema."""
    arguments = torch._C.parse_schema(f"minfer::{schema}").arguments
    places = [place for place, x in enumerate(arguments) if x.alias_info is not None and x.alias_info.is_write]
    if not places:
        return function

    @wraps(function)
    def renewing(*given: Any) -> Any:
        found = function(*given)
        torch.autograd.graph.increment_version([given[place] for place in places])
        return found

    return renewing


def call(
    op: str,
    tensors: tuple[torch.Tensor, ...],
    dtype: torch.dtype,
    shape: Mapping[str, int],
    params: Mapping[str, str] = NONE,
    **scalars: Any,
) -> None:
    """Call the kernel of `op` that `best` chooses for a problem, with the op's tensors in its order.

    It is compiled at its first call. With MINFER_EXPLAIN=1 each choice is printed to stderr once. `shape` and `params` have
    all of the op's axes and parameters; `scalars` are the arguments of a call. Raises ValueError where no kernel supports
    the problem."""
    device = device_of(tensors[0])
    kernel = _kernel(op, NAMES[dtype], tuple(params.items()), tuple(shape.items()), device)
    _launch(kernel, tensors, scalars)


def call_entry(op: str, entry: str, tensors: tuple[torch.Tensor, ...], **scalars: Any) -> None:
    """Call the second torch op of a kernel of `op`, for arguments that the op does not have. Its name is the kernel's
    with `_<entry>` behind it. The kernel for this device whose registration has the entry is called."""
    _launch(_entry(op, entry, device_of(tensors[0])), tensors, scalars)


def _launch(kernel: Callable[..., None], tensors: tuple[torch.Tensor, ...], scalars: dict[str, Any]) -> None:
    if prepared.recording.device:
        prepared.recording.calls.append((kernel, tensors, scalars))
        return
    with torch.cuda.device_of(tensors[0]):
        kernel(*tensors, **scalars)


def note_choices() -> Choices:
    """From now on, note which kernel is chosen for each problem. Take no kernel from the wheel, because the rows of functions
    that are measured name the compiler."""
    global chosen
    chosen = {} if chosen is None else chosen
    return chosen


def note(op: str, dtype: torch.dtype, shape: Mapping[str, int], params: Mapping[str, str], what: str) -> None:
    """Note what a function does for a problem of `op` in place of one of its kernels."""
    if chosen is not None:
        chosen[op, get(op).case("", NAMES[dtype], shape, params).problem] = what


def forget() -> None:
    """Forget which kernels were chosen."""
    _kernel.cache_clear()
    _entry.cache_clear()
    prepared.forget()


@lru_cache(maxsize=MOST_PROBLEMS)
def _kernel(
    op: str, dtype: str, params: Words, shape: tuple[tuple[str, int], ...], device: torch.device
) -> Callable[..., None]:
    capability, name, arch = _about(device)
    axes, sizes = zip(*shape, strict=True)
    kernel, _ = chooser(op, dtype, params, axes, capability, name).find(sizes)
    explain = os.environ.get("MINFER_EXPLAIN") == "1"
    if explain or chosen is not None:
        why = best(op, dtype, dict(params), dict(shape), capability, name).why
        if chosen is not None:
            chosen[op, get(op).case("", dtype, dict(shape), dict(params)).problem] = f"{kernel}, {why}"
    if explain:
        problem = " ".join([f"{axis}={size}" for axis, size in shape] + [dtype] + [value for _, value in params])
        print(f"minfer.{op} {problem}: {kernel}, {why}", file=sys.stderr)
    return build.function(get(op).kernels[kernel], arch, from_wheel=chosen is None)


@cache
def _entry(op: str, entry: str, device: torch.device) -> Callable[..., None]:
    kernel = next(kernel for kernel in with_entries(op, _about(device)[2]) if entry in kernel.entries)
    return registered(kernel, device, entry)


def registered(kernel: Kernel, device: torch.device, *entry: str) -> Callable[..., None]:
    """The torch op of a kernel or of its entry. Builds the kernel for the device if it was not built yet."""
    build.function(kernel, _about(device)[2], from_wheel=chosen is None)
    found: Callable[..., None] = getattr(torch.ops.minfer, "_".join((kernel.symbol, *entry))).default
    return found


def device_of(tensor: torch.Tensor) -> torch.device:
    """The device that a call with this tensor runs on. While a call is recorded, the tensor itself is on another one."""
    return prepared.recording.device or tensor.device


def capability_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The capability of the GPU that a call with this tensor runs on; None on a CPU."""
    return _about(device_of(tensor))[0]


@cache
def _about(device: torch.device) -> tuple[tuple[int, int] | None, str, str]:
    """A device's capability and name, as `best` takes them, and the architecture to compile for."""
    if device.type != "cuda":
        return None, "", ""
    capability = torch.cuda.get_device_capability(device)
    return capability, torch.cuda.get_device_name(device), toolchain.arch_of(capability)


def is_writable(out: torch.Tensor, *read: torch.Tensor | None) -> bool:
    """Whether a kernel may write to `out` while it reads the others. If not, it writes to a new tensor, which the
    caller copies to `out`."""
    storages = [x.untyped_storage()._cdata for x in read if x is not None]
    return out.is_contiguous() and out.data_ptr() % 16 == 0 and out.untyped_storage()._cdata not in storages


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its last dimension is contiguous and its rows start at multiples of 16 bytes, else a copy.

    Rows that cannot start there, because of their length, stay as they are: `best` then finds a kernel that needs no
    alignment. Rows that overlap, as those of `expand` do, are copied."""
    *sizes, length = tensor.shape
    *strides, last = tensor.stride()
    strides = [stride for stride, size in zip(strides, sizes, strict=True) if size > 1]
    if (last != 1 and length > 1) or any(stride < length for stride in strides):
        return tensor.clone(memory_format=torch.contiguous_format)
    piece = 16 // tensor.element_size()
    aligned = tensor.data_ptr() % 16 == 0 and all(stride % piece == 0 for stride in strides)
    return tensor if aligned or length % piece else tensor.clone(memory_format=torch.contiguous_format)


def layout(weight: torch.Tensor) -> str:
    """How a weight (K, N) lies in memory: "TN" if its columns are contiguous, as those of `weight.t()` of an `nn.Linear`,
    else "NN". A symbolic size counts as unknown."""
    (k, n), columns = weight.stride(), weight.shape[1]
    return "TN" if _is_one(k) and not (_is_one(n) and _is_one(columns)) else "NN"


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def readable_weights(*weights: torch.Tensor) -> tuple[str, list[torch.Tensor]]:
    """The layout of the first weight, and all weights in this layout, copied where kernels cannot read them."""
    if layout(weights[0]) == "TN":
        return "TN", [readable(x.t()).t() for x in weights]
    return "NN", [readable(x) for x in weights]
