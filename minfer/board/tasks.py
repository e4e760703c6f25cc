"""Tasks of others as ops: a Python file in the form of KernelBench, with `Model`, `get_inputs` and `get_init_inputs`.

The file is trusted, like every file that defines an op. The module's inputs, parameters and buffers become tensors of the op,
in this order and after the outputs. So a kernel gets all that the module computes with. The reference runs the module in fp64.
Bounds come from the same run under Monte Carlo arithmetic (`minfer.board.montecarlo`).

A task has one size. Its only axis, `trial`, numbers the repetitions of the task, which differ only in their values.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minfer import ops
from minfer.board.adapt import initial, name_state
from minfer.board.montecarlo import spread
from minfer.ops import Case, Draw, Expected, Fill, Op, Spec, Tensors, floats, integers, made_by, size, within
from minfer.ops.bounds import DEVIATIONS
from minfer.ops.drawn import Problem, Source
from minfer.plan.config import UserError

TRIALS = 1 << 20
NEEDED = ("Model", "get_inputs", "get_init_inputs")
LEAST_SPREAD = 0.1  # deviation of parameters that are all equal in a new module, such as the weights of a norm
THEIR_TOLERANCE = 1e-2  # KernelBench's: if all values of an output are smaller, zeros pass there


class Refused(UserError):
    """A task that cannot tell a right kernel from a wrong one, or whose form no op can have."""


@dataclass(frozen=True)
class Task:
    """A task's module, and the tensors that it computes with, by the names that they have in the op."""

    name: str
    model: torch.nn.Module
    inputs: Sequence[Any]  # as `get_inputs` gives them: tensors, and constants
    outputs: Sequence[torch.Tensor]

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """The input tensors."""
        return {f"input{place}": value for place, value in enumerate(self.inputs) if isinstance(value, torch.Tensor)}

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, by their names in the module."""
        return dict(self.model.named_parameters()) | dict(self.model.named_buffers())

    def run(
        self, given: Sequence[torch.Tensor], state: Sequence[torch.Tensor], model: torch.nn.Module | None = None
    ) -> Any:
        """What the module computes with other inputs and parameters. It gets copies of its buffers, because it may change
        them."""
        tensors = iter(given)
        arguments = [next(tensors) if isinstance(value, torch.Tensor) else value for value in self.inputs]
        named = dict(zip(self.state, (tensor.clone() for tensor in state), strict=True))
        with torch.no_grad():
            found = torch.func.functional_call(model or self.model, named, tuple(arguments))
        return _as_tuple(self.name, found)


def _as_tuple(name: str, found: Any) -> tuple[torch.Tensor, ...]:
    outputs = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    if not outputs or not all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in outputs):
        raise Refused(f"task {name} returns {type(found).__name__}; an op's outputs are floating-point tensors")
    return outputs


def load_task(file: Path, name: str) -> Task:
    """A task from its file. Raises Refused."""
    try:
        module = ops.load_file(file)
        missing = [each for each in NEEDED if not hasattr(module, each)]
        if missing:
            raise Refused(f"{file.name} has no {missing[0]}; a task has {', '.join(NEEDED)}")
        torch.manual_seed(0)
        inputs = list(module.get_inputs())
        model = module.Model(*initial(module))
    except Refused:
        raise
    except Exception as error:  # the file may raise anything
        raise Refused(f"{file.name} cannot be imported as a task: {type(error).__name__}: {error}") from error
    for owner in model.modules():  # tensors that are neither parameters nor buffers, such as a first hidden state
        for attribute, value in list(vars(owner).items()):
            if isinstance(value, torch.Tensor):
                delattr(owner, attribute)
                owner.register_buffer(attribute, value)
    for place, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and value.dtype not in (torch.float32, torch.int64, torch.int32):
            raise Refused(f"input {place} of task {name} is {value.dtype}; it may be float32, int32 or int64")
    draft = Task(name, model, inputs, ())
    try:
        outputs = draft.run(list(draft.given.values()), list(draft.state.values()))
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"task {name} cannot be run: {type(error).__name__}: {error}") from error
    task = Task(name, model, inputs, outputs)
    check(task)
    return task


def check(task: Task) -> None:
    """Raises Refused for a degenerate task, with its name and the reason."""
    state = list(task.state.values())
    given = list(task.given.values())
    first, again = task.run(given, state), task.run(given, state)
    if not all(torch.equal(one, other) for one, other in zip(first, again, strict=True)):
        raise Refused(f"task {task.name} is degenerate: its output is random, so that no result is right")
    fresh = [_redraw(tensor) for tensor in given]
    other = task.run(fresh, state)
    for place, (one, two) in enumerate(zip(first, other, strict=True)):
        if not bool(one.any()) and not bool(two.any()):
            raise Refused(f"task {task.name} is degenerate: output {place} is zero, whatever the inputs")
        if not bool(torch.isfinite(one).all()):
            raise Refused(f"task {task.name} is degenerate: output {place} has a value that is not finite")
        if torch.equal(one, two):
            raise Refused(f"task {task.name} is degenerate: output {place} is constant, whatever the inputs")
    for place, name in enumerate(task.given):
        mixed = task.run([fresh[k] if k == place else tensor for k, tensor in enumerate(given)], state)
        if all(torch.equal(one, two) for one, two in zip(first, mixed, strict=True)):
            raise Refused(f"task {task.name} is degenerate: {name} does not matter")


def describe(task: Task) -> list[str]:
    """Notes about a task that is not refused, as sentences."""
    small = [k for k, output in enumerate(task.outputs) if float(output.abs().max()) < THEIR_TOLERANCE]
    return [
        f"output {k} is below {THEIR_TOLERANCE:g} everywhere: under an absolute tolerance zeros would pass"
        for k in small
    ]


def _redraw(tensor: torch.Tensor) -> torch.Tensor:
    """Other values of the same kind."""
    generator = torch.Generator().manual_seed(1)
    draw = Draw(generator, random.Random(1), "normal")
    made = torch.empty_like(tensor)
    _fill(tensor).make(made, {}, draw)
    return made


def _fill(tensor: torch.Tensor) -> Fill:
    """How values like those of an input or a parameter are made."""
    if not tensor.is_floating_point():
        low, high = (int(tensor.min()), int(tensor.max())) if tensor.numel() else (0, 0)
        return integers(low, high + 1)
    shape = tuple(tensor.shape)
    if shape and tensor.numel() and bool((tensor >= 0).all()) and bool((tensor > 0).any()):
        if torch.allclose(tensor.sum(-1), torch.ones(shape[:-1]), atol=1e-4) and shape[-1] > 1:
            return made_by(lambda made, draw, device: draw.floats(shape, device).softmax(-1))
        if float(tensor.std(unbiased=False)) > 0:
            return made_by(lambda made, draw, device: draw.floats(shape, device).abs())
    deviation = float(tensor.std(unbiased=False)) if tensor.numel() > 1 else 0.0
    return floats(deviation or LEAST_SPREAD, shift=float(tensor.mean()) if tensor.numel() else 0.0)


def register(file: Path, name: str, source: Path) -> Op:
    """Register a task as an op; `source` is the file for `extra=` that calls this function. Raises Refused."""
    task = load_task(file, name)
    state = {name_state(key): value for key, value in task.state.items()}
    read = task.given | state
    fills = {key: _fill(value.detach()) for key, value in read.items()}
    wide = copy.deepcopy(task.model).double()

    def tensors(case: Case) -> list[Spec]:
        outs = [ops.out(f"y{k}", *output.shape) for k, output in enumerate(task.outputs)]
        dtypes = {
            key: "" if value.is_floating_point() else str(value.dtype).removeprefix("torch.")
            for key, value in read.items()
        }
        return outs + [ops.given(key, *value.shape, dtype=dtypes[key], fill=fills[key]) for key, value in read.items()]

    def reference(case: Case, found: Tensors, **call: Any) -> Mapping[str, Expected]:
        given, of = [found[key] for key in task.given], [found[key] for key in state]
        model = wide.to(given[0].device if given else "cpu")

        def compute() -> tuple[torch.Tensor, ...]:
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)  # of tensors that the module makes
            try:
                return tuple(each.double() for each in task.run(given, of, model))
            finally:
                torch.set_default_dtype(before)

        values = compute()
        errors = spread(compute, values)
        return {f"y{k}": within(value, DEVIATIONS * errors[k]) for k, value in enumerate(values)}

    count = len(task.outputs)

    def eager(*found: torch.Tensor, **call: Any) -> tuple[torch.Tensor, ...]:
        """The task's module, on the tensors of the case."""
        given = found[count : count + len(task.given)]
        return task.run(given, found[count + len(task.given) :])

    op = Op(
        name, axes={"trial": size(TRIALS)}, tensors=tensors, reference=reference, metric=ops.GBPS, source=source,
        odd_shapes=({"trial": 1},),
    )  # fmt: skip
    op.torch("torch", eager, baseline=True, returns=tuple(range(count)), dtypes=("float32",))
    op.draws(_draw)
    return op


def _draw(source: Source) -> Problem:
    return Problem("float32", {"trial": source.rng.randint(1, TRIALS)})


EXTRA = '''"""The task {file} as an op; for `extra=` and `minfer board open-season --extra`."""

from pathlib import Path

from minfer.board.tasks import register

op = register(Path(__file__).with_name({task!r}), {name!r}, Path(__file__))
'''


def write_extra(file: Path, name: str, folder: Path) -> tuple[Path, list[str]]:
    """Check a task, and write the file that registers it. A copy of the task is written beside that file, where a sandbox may
    read it. Returns the file and the notes about the task. Raises Refused."""
    if not name.isidentifier():
        raise Refused(f"an op cannot be called {name!r}; its name must be a Python identifier")
    if name in ops.names():
        raise Refused(f"there is an op {name} already; choose another with --name")
    notes = describe(load_task(file, name))
    folder.mkdir(parents=True, exist_ok=True)
    target, own = folder / f"{name}.py", folder / f"{name}_task.py"
    target.write_text(EXTRA.format(file=file.name, task=own.name, name=name), "utf-8")
    own.write_bytes(file.read_bytes())
    return target, notes
