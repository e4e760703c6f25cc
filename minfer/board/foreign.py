"""Tasks that others stated in PyTorch, as ops: what the importers of all forms share.

A task has a reference in PyTorch and one or more workloads: sizes, and where the values of inputs come from. Its file is
trusted, like every file that defines an op. The op's axes are `workload`, which numbers the workloads, and `trial`, which
numbers the repetitions of one workload with other values. The op's reference runs the task's reference in fp64 (`Wide`), and
its bounds come from Monte Carlo arithmetic (`minfer.board.montecarlo`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minfer import ops
from minfer.board.montecarlo import spread
from minfer.ops import Case, Expected, Op, Spec, Tensors, size, within
from minfer.ops.bounds import DEVIATIONS
from minfer.ops.drawn import MOST_TOKENS, Problem, Source
from minfer.plan.config import UserError

TRIALS = 1 << 20
MOST_CALLS = 16
THEIR_TOLERANCE = 1e-2  # KernelBench's: if all values of an output are smaller, zeros pass there
# The rounding of a value to these types, relative to it. What a reference rounds, a kernel may round.
UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
NARROW = (torch.float32, *UNITS)
OUTPUTS = (torch.float32, torch.float16, torch.bfloat16)

Value = int | float | bool
Run = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]


class Refused(UserError):
    """A task that cannot tell a right kernel from a wrong one, or whose form no op can have."""


@dataclass(frozen=True)
class Workload:
    """A task at one of its sizes. inputs: in the order of the reference's arguments, a tensor is given by its `Spec`, a
    number by itself. outputs: their specs."""

    inputs: Mapping[str, Spec | Value]
    outputs: Sequence[Spec]

    @property
    def tensors(self) -> list[Spec]:
        """The input tensors."""
        return [each for each in self.inputs.values() if isinstance(each, Spec)]

    @property
    def scalars(self) -> dict[str, Value]:
        return {name: each for name, each in self.inputs.items() if not isinstance(each, Spec)}


@dataclass(frozen=True)
class Foreign:
    """A task.

    workloads: at least one. run: what the reference returns for arguments in the order of a workload's inputs; it must not
    change them. small: the numbers of the workloads for a CPU; if there are none, all. adapt: makes a submission's file, in the
    task's own form, a function that is called as the op's kernels are."""

    name: str
    workloads: Sequence[Workload]
    run: Callable[[Sequence[Any]], Any]
    small: Sequence[int] = ()
    adapt: Callable[[Path], Callable[..., Any]] | None = field(default=None, compare=False)

    def compute(
        self, workload: Workload, tensors: Sequence[torch.Tensor], scalars: Mapping[str, Value]
    ) -> tuple[torch.Tensor, ...]:
        """The outputs for these tensors and scalars. Raises Refused if they are no tensors or have other shapes."""
        left = iter(tensors)
        arguments = [next(left) if isinstance(each, Spec) else scalars[name] for name, each in workload.inputs.items()]
        with torch.no_grad():
            found = as_tuple(self.name, self.run(arguments))
        wanted = [spec.shape for spec in workload.outputs]
        if [tuple(each.shape) for each in found] != wanted:
            shapes = ", ".join(str(tuple(each.shape)) for each in found)
            raise Refused(f"task {self.name} returns {shapes}; its outputs are {', '.join(map(str, wanted))}")
        return found


FOREIGN: dict[str, Foreign] = {}  # by the op's name


def as_tuple(name: str, found: Any) -> tuple[torch.Tensor, ...]:
    """What a reference returned, as a tuple. Raises Refused if it is something other than floating-point tensors."""
    if isinstance(found, Mapping):
        found = tuple(found.values())
    outputs = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    if not outputs or not all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in outputs):
        said = ", ".join(str(each.dtype) if isinstance(each, torch.Tensor) else type(each).__name__ for each in outputs)
        raise Refused(f"task {name} returns {said or 'nothing'}; an op's outputs are floating-point tensors")
    return outputs


class Wide(TorchDispatchMode):
    """Has a computation stay in fp64 where it asks for a narrower type. `noisy`: where it asks for a type of fewer than 24
    bits, the result gets a random error as large as that rounding's."""

    def __init__(self, noisy: bool) -> None:
        super().__init__()
        self.noisy = noisy
        self.exact: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # what was rounded: the result, and the value before

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(named or {})
        asked = named.get("dtype")
        if asked in NARROW:
            named["dtype"] = torch.float64
        found = function(*arguments, **named)
        if self.noisy and asked in UNITS and function.overloadpacket.__name__ == "_to_copy":
            noise = UNITS[asked] / 3**0.5 * found.abs() * torch.randn_like(found)
            rounded = found + noise
            self.exact[id(rounded)] = rounded, found
            return rounded
        return found

    def unround(self, output: torch.Tensor) -> torch.Tensor:
        """An output, without its own last rounding: verification allows that one in any case."""
        return self.exact[id(output)][1] if id(output) in self.exact else output


@contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    """The dtype of the floating-point tensors for which a reference states none."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def compute_wide(run: Callable[[], Sequence[torch.Tensor]], noisy: bool) -> tuple[torch.Tensor, ...]:
    """The outputs of a computation on fp64 tensors, in fp64."""
    with default_dtype(torch.float64), Wide(noisy) as mode:
        return tuple(mode.unround(each).double() for each in run())


def expect(run: Callable[[], Sequence[torch.Tensor]], names: Sequence[str]) -> dict[str, Expected]:
    """What a computation on fp64 tensors returns, with bounds of a computation in fp32."""
    values = compute_wide(run, noisy=False)
    errors = spread(lambda: compute_wide(run, noisy=True), values)
    return {name: within(value, DEVIATIONS * error) for name, value, error in zip(names, values, errors, strict=True)}


def check_outputs(
    name: str, given: Mapping[str, torch.Tensor], fresh: Sequence[torch.Tensor], run: Run
) -> tuple[torch.Tensor, ...]:
    """What a task returns for `given`. Raises Refused, with the reason, for a task that is degenerate; `fresh` are other values
    of the same inputs."""
    values = list(given.values())

    def compute(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [each.double() for each in run(tensors)]  # PyTorch compares no fp8

    first, again, other = compute(values), compute(values), compute(fresh)
    if not all(torch.equal(one, two) or not _finite(one) for one, two in zip(first, again, strict=True)):
        raise Refused(f"task {name} is degenerate: its output is random, so that no result is right")
    for place, (one, two) in enumerate(zip(first, other, strict=True)):
        if not bool(one.any()) and not bool(two.any()):
            raise Refused(f"task {name} is degenerate: output {place} is zero, whatever the inputs")
        if not _finite(one):
            raise Refused(f"task {name} is degenerate: output {place} has a value that is not finite")
        if torch.equal(one, two):
            raise Refused(f"task {name} is degenerate: output {place} is constant, whatever the inputs")
    for place, key in enumerate(given):
        if not torch.equal(values[place].double(), fresh[place].double()):
            mixed = compute([fresh[k] if k == place else value for k, value in enumerate(values)])
            if all(torch.equal(one, two) for one, two in zip(first, mixed, strict=True)):
                raise Refused(f"task {name} is degenerate: {key} does not matter")
    return tuple(first)


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def describe_outputs(outputs: Sequence[torch.Tensor]) -> list[str]:
    """Notes about outputs, as sentences."""
    small = [k for k, output in enumerate(outputs) if float(output.abs().max()) < THEIR_TOLERANCE]
    return [
        f"output {k} is below {THEIR_TOLERANCE:g} everywhere: under an absolute tolerance zeros would pass"
        for k in small
    ]


def make_op(task: Foreign, source: Path) -> Op:
    """Register a task as an op; `source` is the file for `extra=`. Raises Refused."""
    calls = name_calls(task)
    names = [spec.name for spec in task.workloads[0].outputs]
    count = len(names)
    by_shapes = {
        tuple(spec.shape for spec in (*each.outputs, *each.tensors)): each for each in reversed(task.workloads)
    }  # looked up in the baseline's time

    def workload(case: Case) -> Workload:
        return task.workloads[case.shape["workload"] - 1]

    def tensors(case: Case) -> list[Spec]:
        of = workload(case)
        return [*of.outputs, *of.tensors]

    def reference(case: Case, found: Tensors, **call: Any) -> Mapping[str, Expected]:
        of = workload(case)
        given = [found[spec.name] for spec in of.tensors]
        return expect(lambda: task.compute(of, given, call), names)

    def eager(*found: torch.Tensor, **call: Any) -> tuple[torch.Tensor, ...]:
        """The task's reference, on the tensors of the case."""
        of = by_shapes[tuple(tuple(each.shape) for each in found)]
        outputs = task.compute(of, found[count:], call)
        return tuple(each.to(spec.dtype) for each, spec in zip(outputs, found, strict=False))

    def draw(drawn: Source) -> Problem:
        small = task.small if drawn.most_tokens == MOST_TOKENS["cpu"] else ()
        number = drawn.rng.choice(small or range(len(task.workloads)))
        params = {} if calls[number] == "call" else {"call": calls[number]}
        return Problem("float32", {"workload": 1 + number, "trial": drawn.rng.randint(1, TRIALS)}, params)

    op = Op(
        task.name, axes={"workload": size(len(task.workloads)), "trial": size(TRIALS)}, tensors=tensors,
        reference=reference, calls={calls[k]: each.scalars for k, each in enumerate(task.workloads)}, metric=ops.GBPS,
        source=source, odd_shapes=({"workload": 1, "trial": 1},),
    )  # fmt: skip
    op.torch("torch", eager, baseline=True, returns=tuple(range(count)), dtypes=("float32",))
    op.draws(draw)
    FOREIGN[task.name] = task
    return op


def name_calls(task: Foreign) -> list[str]:
    """The name of each workload's scalars among the op's `calls`; workloads with the same scalars share one. Raises Refused."""
    known: dict[str, str] = {}
    for each in task.workloads:
        known.setdefault(json.dumps(each.scalars), f"scalars{len(known)}" if known else "call")
    if len(known) > MOST_CALLS:
        raise Refused(f"the workloads of task {task.name} have {len(known)} sets of scalars; keep at most {MOST_CALLS}")
    return [known[json.dumps(each.scalars)] for each in task.workloads]


EXTRA = '''"""The task {file} as an op; for `extra=` and `minfer board open-season --extra`."""

from pathlib import Path

from minfer.board.{module} import register

op = register(Path(__file__).with_name({task!r}), {name!r}, Path(__file__))
'''


def check_op_name(name: str) -> None:
    """Raises Refused if no op can have this name."""
    if not name.isidentifier():
        raise Refused(f"an op cannot be called {name!r}; its name must be a Python identifier")
    if name in ops.names():
        raise Refused(f"there is an op {name} already; choose another with --name")


def write_files(module: str, name: str, folder: Path, file: str, own: str, content: bytes | Path) -> Path:
    """Write the file that registers a task, and beside it the task itself, where a sandbox may read it. Returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}.py"
    target.write_text(EXTRA.format(file=file, task=own, name=name, module=module), "utf-8")
    if isinstance(content, Path):
        shutil.rmtree(folder / own, ignore_errors=True)
        shutil.copytree(content, folder / own)
    else:
        (folder / own).write_bytes(content)
    return target
