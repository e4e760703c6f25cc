"""An op: a problem of an LLM, stated once, so that everything that measures kernels need know no problem."""

from __future__ import annotations

import importlib
import inspect
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from minfer.ops import drawn
from minfer.ops.axes import Axis, Ragged
from minfer.ops.bounds import Expected
from minfer.ops.case import Case
from minfer.ops.drawn import Draw as DrawProblem
from minfer.ops.kernel import PACKAGE, Kernel, check_name
from minfer.ops.tensors import Draw, Spec, Tensors, Undo

REGISTERED: dict[str, Op] = {}

Call = Mapping[str, Any]
DRAWS = 64  # tries to draw a shape that a kernel supports


@dataclass(frozen=True)
class Metric:
    """The figure of merit of an op's tables: so much `work(op, case)` a call, in `unit` when divided by seconds."""

    unit: str
    work: Callable[[Op, Case], float]


TFLOPS = Metric("TFLOP/s", lambda op, case: op.flops(case) * 1e-12)
GBPS = Metric("GB/s", lambda op, case: sum(op.traffic_of(case)) * 1e-9)


def tokens_per_second(count: Callable[[Case], float]) -> Metric:
    """Tokens a second, for ops that people know by it."""
    return Metric("tokens/s", lambda op, case: count(case))


@dataclass
class Op:
    """A problem and its registered kernels.

    A kernel is called as `kernel(*tensors, **call)`, with the tensors of `tensors(case)` in that order.

    name: what it is called in configs and keys; a Python identifier.
    axes: the sizes of a shape, in order, each after those that it depends on. An axis that an op gets later has
        a default (`Axis`), so that older keys stay as they are.
    tensors: the tensors of a case. `op.call(case)` tells under which scalars.
    reference: `reference(case, tensors, **call)` gets the tensors that are read, by name: floats of any width as fp64,
        integers in their own dtype. It returns an `Expected` for each written one, by name; those that have a check may be
        left out. It must not change what it gets.
    params: every value that a case may state; the first is the default. A `Ragged` stands for lengths.
    later: parameters that were added when there were rows already. A case leaves them out at their default, so that keys of
        older rows stay valid.
    calls: scalar arguments, by a name for each set. A kernel is verified under all that it supports; the first one is timed,
        and the others where a sweep asks for `params.call`.
    checks: for outputs that have several right answers, such as indices among ties: `check(case, tensors)` gets all tensors
        by name, outputs among them, and returns a bool tensor of the output's shape, on its device: which elements are right.
        It must not wait for the device, and indices may be out of bounds: clamp them before they index.
    flops: of one call; a multiply-add counts as two. 0 where nobody would count them.
    traffic: the fewest bytes that device memory must move, read and written; None: every input read once, every output
        written once, and both of what is changed in place.
    arithmetic: which measured peak bounds the FLOPs: the dtypes of a tensor core's inputs and accumulator, or
        ("fma", "float32") for CUDA cores; None: memory is the only roof.
    metric: what its tables show.
    strided: the tensors whose rows may lie farther apart than they are long; tests run every kernel on such.
    change: `change(case, tensors, draw)` changes the inputs of a timed round, in place, and returns what takes it back;
        None: one of the tensors' fills does.
    odd_shapes: small and awkward ones, verified besides the case's own shape and one that is drawn.
    sizes: further shapes for tests: "small" ones that a CPU runs in seconds, "large" ones for a GPU, and "nan" ones of at
        least 2 rows, where a NaN or an infinity in a row of the first input must give a row of the first output alike.
    drawn: how a problem is drawn at random (`draws`); None: no problem can be drawn.
    drawn_without: the kernels that `kernel=functions` leaves out at drawn problems, and why.
    source: the file that states it, beside which its kernels' files lie; None: the one that makes the `Op`.
    """

    name: str
    axes: Mapping[str, Axis]
    tensors: Callable[[Case], Sequence[Spec]]
    reference: Callable[..., Mapping[str, Expected]]
    params: Mapping[str, tuple[str, ...] | Ragged] = field(default_factory=dict)
    later: tuple[str, ...] = ()
    calls: Mapping[str, Call] = field(default_factory=lambda: {"call": {}})
    checks: Mapping[str, Callable[[Case, Tensors], torch.Tensor]] = field(default_factory=dict)
    flops: Callable[[Case], float] = lambda case: 0.0
    traffic: Callable[[Case], tuple[float, float]] | None = None
    arithmetic: Callable[[Case], tuple[str, str] | None] = lambda case: None
    metric: Metric = GBPS
    strided: tuple[str, ...] = ()
    change: Callable[[Case, Tensors, Draw], Undo] | None = None
    odd_shapes: tuple[Mapping[str, int], ...] = ()
    sizes: Mapping[str, Sequence[Mapping[str, int]]] = field(default_factory=dict)
    source: Path | None = None
    drawn: DrawProblem | None = None
    drawn_without: Mapping[str, str] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    baselines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"an op cannot be called {self.name!r}; its name must be a Python identifier")
        check_name("an op", self.name)
        if "call" in self.params:
            raise ValueError(
                f"{self.name} has a parameter `call`, which says which of its calls a case is of; rename it"
            )
        if self.source is None:  # two frames up: below is the __init__ that dataclass wrote
            self.source = Path(sys._getframe(2).f_globals.get("__file__", "unknown.py")).absolute()
        ours = PACKAGE / "ops" / self.name / "__init__.py"
        if self.name in REGISTERED or (ours.is_file() and self.source != ours):
            raise ValueError(f"there is an op {self.name} already; give this one another name")
        REGISTERED[self.name] = self

    @property
    def folder(self) -> Path:
        assert self.source is not None
        return self.source.parent

    # Registering kernels.

    def torch(self, name: str, function: Callable[..., Any], *, baseline: bool = False, **supports: Any) -> None:
        """Register a PyTorch implementation. Ratios are against a `baseline`; of several, the first that supports the case.

        `returns=(0,)`: the function returns a new tensor, which minfer copies to the kernel's first argument after the timed
        window, because PyTorch's users make no such copy."""
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is None:
            raise ValueError(
                f"kernel {name} is a {type(function).__name__}, which has no source file; register a def that calls it"
            )
        self._add(Kernel(self.name, name, "torch", Path(code.co_filename), function, **supports))
        if baseline:
            self.baselines.append(name)

    def peer(self, name: str, function: Callable[..., Any], package: str, **supports: Any) -> None:
        """Register what another project has for this op, to stand in the same rounds: a function that imports the module
        `package` when it is called. It runs on a GPU only. Where the module is not installed, its rows say so."""
        self.torch(name, function, package=package, **supports)

    def cuda(self, file: str, *, name: str = "", archs: str = "sm_80+", **supports: Any) -> None:
        """Register a CUDA kernel, a `.cu` file that defines the torch op `minfer::<op>_<name>`, by default the file's
        name. A file may define several, which are registered one by one and built once."""
        self._add(Kernel(self.name, name or Path(file).stem, "cuda", self.folder / file, archs=archs, **supports))

    def triton(self, file: str, *, archs: str = "sm_80+", **supports: Any) -> None:
        """Register a Triton kernel, one `.py` file with a function named as the op."""
        self._add(Kernel(self.name, Path(file).stem, "triton", self.folder / file, archs=archs, **supports))

    def cpp(self, file: str, *, name: str = "", **supports: Any) -> None:
        """Register a C++ kernel for the CPU, a `.cpp` file that defines the torch op `minfer::<op>_<name>`; as `cuda` does,
        perhaps several."""
        self._add(Kernel(self.name, name or Path(file).stem, "cpp", self.folder / file, **supports))

    def function(self, name: str, call: Callable[..., Any], **supports: Any) -> None:
        """Register one of minfer's functions for users, `minfer.<name>`, which chooses among the op's kernels and compiles the
        one that it chooses. `call` gets the module `minfer` before the tensors, because ops cannot import the functions:
        `lambda minfer, out, a, b, **call: minfer.matmul(a, b)`. `kernel=all` leaves it out.

        With `composes`, the function is made of the functions of these ops, by the code in `modules`."""
        source = Path(call.__code__.co_filename)

        def function(*tensors: torch.Tensor, **scalars: Any) -> Any:
            return call(importlib.import_module("minfer"), *tensors, **scalars)

        self._add(Kernel(self.name, name, "function", source, function, **supports))

    def draws(self, draw: str | DrawProblem, *, without: Mapping[str, str] | None = None) -> None:
        """State how problems are drawn at random: the name of a function of `minfer/ops/drawn.py`, or a function like these.
        `without` maps each kernel that `kernel=functions` leaves out of drawn sweeps to the reason, such as "compiles for many
        seconds"."""
        self.drawn = getattr(drawn, draw) if isinstance(draw, str) else draw
        self.drawn_without = without or {}

    def revision(self, name: str, label: str, root: Path, *, against: str = "") -> None:
        """Register a kernel as `name@label`, from the folder `minfer` of another revision, which must register it under that
        name's `symbol`; ratios are against the kernel `against`. What it supports is what it supports here."""
        kernel = self.kernels[name]
        source = root / kernel.source.relative_to(PACKAGE)
        self._add(replace(kernel, name=f"{name}@{label}", source=source, root=root, against=against))

    def _add(self, kernel: Kernel) -> None:
        check_name(f"a kernel of {self.name}", kernel.name)
        if kernel.name in self.kernels:
            raise ValueError(f"{self.name} already has a kernel {kernel.name}; give {kernel.source.name} another name")
        kernel.check({**self.params, "call": tuple(self.calls)})
        left_out = {name: default(self.params[name]) for name in self.later} | {"call": next(iter(self.calls))}
        self.kernels[kernel.name] = replace(kernel, left_out=left_out)

    def baseline(self, case: Case) -> str:
        """The name of the kernel that this case's ratios are against: the one that its kernel names, else the first baseline
        that supports it, or the first one where none does. Raises IndexError for an op without a baseline."""
        if (kernel := self.kernels.get(case.kernel)) and kernel.against:
            return kernel.against
        runs = (name for name in self.baselines if self.kernels[name].unsupported(case, None) is None)
        return next(runs, self.baselines[0])

    # Cases.

    def case(self, kernel: str, dtype: str, shape: Mapping[str, int], params: Mapping[str, str] | None = None) -> Case:
        """A case of this op, its parameters completed by the defaults and put in order."""
        chosen = {name: (params or {}).get(name, default(valid)) for name, valid in self.params.items()}
        for name in self.later:
            if chosen[name] == default(self.params[name]):
                del chosen[name]
        if call := (params or {}).get("call"):
            chosen |= self._call_param(call)
        return Case(self.name, kernel, dtype, chosen, self.without_defaults(shape))

    def without_defaults(self, shape: Mapping[str, int]) -> dict[str, int]:
        """The shape in the op's order, without the axes that have their default size."""
        same = {
            name for name, axis in self.axes.items() if axis.default and shape.get(name) in (None, shape[axis.default])
        }
        return {name: shape[name] for name in self.axes if name not in same}

    def _call_param(self, name: str) -> dict[str, str]:
        return {} if name == next(iter(self.calls)) else {"call": name}

    def call_name(self, case: Case) -> str:
        """Which of `calls` a case is of."""
        return case.params.get("call", next(iter(self.calls)))

    def call(self, case: Case) -> Call:
        """The scalar arguments of a case."""
        return self.calls[self.call_name(case)]

    def under_each_call(self, case: Case) -> list[Case]:
        """The case under its own call, and then under the others."""
        others = [replace(case, params=_without_call(case) | self._call_param(name)) for name in self.calls]
        return [case, *(other for other in others if other.params != case.params)]

    def cases(self, kernel: Kernel, shapes: Iterable[Mapping[str, int]]) -> Iterator[Case]:
        """Every case of these shapes that a kernel states to support, over dtypes and parameters, under the first call
        that it supports."""
        values = [valid.examples if isinstance(valid, Ragged) else valid for valid in self.params.values()]
        for shape, dtype, chosen in itertools.product(shapes, kernel.dtypes, itertools.product(*values)):
            case = self.case(kernel.name, dtype, shape, dict(zip(self.params, chosen, strict=True)))
            under = self.under_each_call(case)
            yield from [each for each in under if kernel.unsupported(each, None) is None][:1]

    def wrong_shape(self, shape: Mapping[str, int]) -> str | None:
        """Why an axis cannot have its size, in half a sentence, or None."""
        known: dict[str, int] = {}
        for name, axis in self.axes.items():
            size = known[axis.default] if axis.default and name not in shape else shape[name]
            if why := axis.check(size, known):
                return f"{name}={size} {why}"
            known[name] = size
        return None

    def drawn_shapes(self, rng: random.Random) -> Iterator[dict[str, int]]:
        """Small shapes that keep every constraint, drawn at random."""
        for _ in range(DRAWS):
            shape: dict[str, int] = {}
            for name, axis in self.axes.items():
                shape[name] = axis.draw(rng, shape)
            yield self.without_defaults(shape)

    def specs(self, case: Case) -> list[Spec]:
        """The tensors of a case, their dtypes filled in."""
        return [spec if spec.dtype else replace(spec, dtype=case.dtype) for spec in self.tensors(case)]

    # What a call costs.

    def traffic_of(self, case: Case) -> tuple[float, float]:
        """The bytes that device memory must at least move, read and written."""
        if self.traffic is not None:
            return self.traffic(case)
        specs = self.specs(case)
        read = sum(spec.nbytes for spec in specs if spec.role != "out")
        return float(read), float(sum(spec.nbytes for spec in specs if spec.role != "in"))

    def bytes(self, case: Case) -> float:
        """Both together."""
        return sum(self.traffic_of(case))

    def operand_bytes(self, case: Case) -> int:
        """What all tensors of a case take; 1 where all are empty."""
        return max(1, sum(spec.nbytes for spec in self.specs(case)))


def default(valid: tuple[str, ...] | Ragged) -> str:
    """The value of a parameter where nothing is said."""
    return valid.default if isinstance(valid, Ragged) else valid[0]


def _without_call(case: Case) -> dict[str, str]:
    return {name: value for name, value in case.params.items() if name != "call"}
