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
from minfer.board.foreign import (
    TRIALS,
    Refused,
    as_tuple,
    check_op_name,
    check_outputs,
    describe_outputs,
    expect,
    write_files,
)
from minfer.ops import Case, Draw, Expected, Fill, Op, Spec, Tensors, floats, integers, made_by, size
from minfer.ops.drawn import Problem, Source

NEEDED = ("Model", "get_inputs", "get_init_inputs")
LEAST_SPREAD = 0.1  # deviation of parameters that are all equal in a new module, such as the weights of a norm


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
        return as_tuple(self.name, found)


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
    fresh = [_redraw(tensor) for tensor in task.given.values()]
    check_outputs(task.name, task.given, fresh, lambda given: task.run(given, state))


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
    count = len(task.outputs)

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

        return expect(lambda: task.run(given, of, model), [f"y{k}" for k in range(count)])

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


def write_extra(file: Path, name: str, folder: Path) -> tuple[Path, list[str]]:
    """Check a task, and write the file that registers it. Returns that file and the notes about the task. Raises Refused."""
    check_op_name(name)
    notes = describe_outputs(load_task(file, name).outputs)
    return write_files("tasks", name, folder, file.name, f"{name}_task.py", file.read_bytes()), notes
