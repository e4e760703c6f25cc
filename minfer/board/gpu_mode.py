"""Problems in the form of GPU MODE's competitions as ops: a folder with `task.yml`, `reference.py`, and what these need.

`generate_input(**sizes, seed=...)` makes the inputs, and `ref_kernel(data)` computes the output. `task.yml` lists the sizes:
those of `tests` are for a CPU, those of `benchmarks` for a GPU. The tensors of `data` become the op's inputs, in their order,
as `input0`, `input1`; numbers in it become scalars of the same names. The last tensor is the op's output if the reference does
not read it and it has the output's shape and dtype. Values come from `generate_input` with other seeds, so they keep its
structure.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from minfer import ops
from minfer.board.foreign import Foreign, Refused, Value, Workload, as_tuple, make_op
from minfer.ops import Draw, Fill, Op, Spec, Tensors
from minfer.ops.tensors import DTYPES, NAMES

TASK, REFERENCE, SIZES = "task.yml", "reference.py", "sizes.json"
NEEDED = ("generate_input", "ref_kernel")
THEIRS = ("submission.py", "eval.py")  # files of a problem that no op needs
MOST_SIZES = 64


class _Here(TorchFunctionMode):
    """Has what a task makes on `cuda` be made on this device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.cuda:
            return arguments[0].to(self.device)
        return function(*map(self._move, arguments), **{name: self._move(each) for name, each in (named or {}).items()})

    def _move(self, value: Any) -> Any:
        if isinstance(value, (str, torch.device)) and str(value).startswith("cuda"):
            return self.device
        return value


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """What a task makes on a GPU is made on this device."""
    made = torch.Generator
    with mock.patch.object(torch, "Generator", lambda *_, **__: made(device)), _Here(device):
        yield


@contextmanager
def modules_of(folder: Path) -> Iterator[None]:
    """Modules such as `task` and `utils` are those in this folder, and are forgotten afterwards."""
    names = {path.stem for path in folder.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


@dataclass
class Problem:
    """A problem that is imported. sizes: the arguments of `generate_input`, without seeds; `tests` of them are tests."""

    name: str
    module: Any
    sizes: Sequence[Mapping[str, Any]]
    tests: int
    last: tuple[Any, list[Any]] | None = field(default=None, repr=False)

    def generate(self, number: int, seed: int, device: torch.device) -> Any:
        """The data for one size. Raises what the task raises."""
        seeded = "seed" in inspect.signature(self.module.generate_input).parameters
        with torch.random.fork_rng(), on_device(device):
            torch.manual_seed(seed)
            return self.module.generate_input(**self.sizes[number], **({"seed": seed} if seeded else {}))

    def leaves(self, number: int, seed: int, device: torch.device) -> list[Any]:
        """The tensors and numbers in the data."""
        return pytree.tree_leaves(self.generate(number, seed, device))


@dataclass(frozen=True)
class Generated(Fill):
    """A tensor of the data that the task generates; the first of a set of tensors chooses the seed."""

    problem: Problem = field(repr=False)
    number: int
    place: int
    first: bool

    def make(self, tensor: torch.Tensor, made: Tensors, draw: Draw) -> None:
        if self.first or self.problem.last is None:
            seed = draw.random.randrange(1 << 31)
            self.problem.last = None, self.problem.leaves(self.number, seed, tensor.device)
        tensor.copy_(self.problem.last[1][self.place])


def read_sizes(file: Path) -> tuple[list[dict[str, Any]], int]:
    """The sizes of a `task.yml`, without seeds, the tests first; and how many are tests. Raises Refused."""
    try:
        about = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise Refused(f"{file.parent.name}/{TASK} cannot be read: {' '.join(str(error).split())}") from error
    found: dict[str, dict[str, Any]] = {}
    tests = 0
    for kind in ("tests", "benchmarks"):
        listed = about.get(kind, []) if isinstance(about, dict) else []
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise Refused(f"{kind} of {file.parent.name}/{TASK} is no list of sizes")
        for each in listed:
            sizes = {str(name): value for name, value in each.items() if name != "seed"}
            found.setdefault(json.dumps(sizes, default=str), sizes)
        tests = tests or len(found)
    if not 0 < len(found) <= MOST_SIZES:
        raise Refused(
            f"{file.parent.name}/{TASK} has {len(found)} sizes in tests and benchmarks; keep 1 to {MOST_SIZES}"
        )
    return list(found.values()), tests


def find_sources(folder: Path) -> dict[str, Path]:
    """The Python files of a problem, by the names under which they import each other. Raises Refused."""
    about = yaml.safe_load((folder / TASK).read_text("utf-8"))
    found = {path.name: path for path in folder.glob("*.py")}
    for each in about.get("files") or []:
        name, source = str(each.get("name", "")), str(each.get("source", ""))
        if name.endswith(".py") and not source.startswith("@"):
            if Path(source).is_absolute() or Path(name).name != name:
                raise Refused(
                    f"{folder.name}/{TASK} names the file {source!r} as {name!r}; write a relative path and a plain name"
                )
            if (folder / source).is_file():
                found[name] = folder / source
            elif name not in THEIRS:
                raise Refused(f"{folder.name}/{TASK} names the file {source}, which is not there")
    if REFERENCE not in found:
        raise Refused(f"{folder.name} has no {REFERENCE}; a problem has {TASK} and {REFERENCE}")
    return {name: path for name, path in found.items() if name not in THEIRS}


def load_problem(folder: Path, name: str) -> Problem:
    """The problem in a folder where its Python files lie side by side. Raises Refused."""
    sizes, tests = read_sizes(folder / TASK)
    try:
        with modules_of(folder):
            module = ops.load_file(folder / REFERENCE)
    except Exception as error:  # the file may raise anything
        raise Refused(f"the reference of {name} cannot be imported: {type(error).__name__}: {error}") from error
    if missing := [each for each in NEEDED if not hasattr(module, each)]:
        raise Refused(f"{REFERENCE} of {name} has no {missing[0]}; a problem has {' and '.join(NEEDED)}")
    return Problem(name, module, sizes, tests)


def measure(problem: Problem) -> list[dict[str, Any]]:
    """What each size's data is: its leaves, each a tensor's dtype and shape or a number, and its outputs; and whether the last
    tensor is for the output. Runs the task once at each size. Raises Refused."""
    found: list[dict[str, Any]] = []
    into = False
    for number, sizes in enumerate(problem.sizes):
        said = ", ".join(f"{name}={value}" for name, value in sizes.items())
        try:
            data = problem.generate(number, 1, torch.device("cpu"))
            leaves = [_describe(problem.name, leaf) for leaf in pytree.tree_leaves(data)]
            with on_device(torch.device("cpu")), torch.no_grad():
                given = pytree.tree_map(_clone, data)
                outputs = as_tuple(problem.name, problem.module.ref_kernel(given))
        except Refused:
            raise
        except Exception as error:  # the task may raise anything
            why = " ".join(str(error).split())
            raise Refused(f"task {problem.name} cannot be run at {said}: {type(error).__name__}: {why}") from error
        if not number:
            into = _is_for_output(problem, data, outputs[0])
        if place := _find_changed(data, given, into):
            raise Refused(
                f"the reference of {problem.name} changes input{place[0]}; write it so that it changes the last one only"
            )
        if found and [type(leaf) for leaf in leaves] != [type(leaf) for leaf in found[0]["leaves"]]:
            raise Refused(f"the data of task {problem.name} has another form at {said}")
        found.append({"leaves": leaves, "outputs": [_describe(problem.name, each) for each in outputs], "into": into})
    return found


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _describe(name: str, leaf: Any) -> list[Any] | Value:
    if isinstance(leaf, torch.Tensor):
        if leaf.dtype not in NAMES:
            raise Refused(
                f"an input of task {name} is {leaf.dtype}, which minfer lacks; it has {', '.join(NAMES.values())}"
            )
        return [NAMES[leaf.dtype], list(leaf.shape)]
    if isinstance(leaf, (bool, int, float)) and math.isfinite(leaf):
        return leaf
    raise Refused(f"the data of task {name} has {str(leaf)[:60]!r} in it; an op has tensors and finite numbers")


def _find_changed(data: Any, given: Any, into: bool) -> list[int]:
    """The places of the tensors that a reference has changed, but for the output's."""
    pairs = enumerate(zip(pytree.tree_leaves(data), pytree.tree_leaves(given), strict=True))
    tensors = [(place, pair) for place, pair in pairs if isinstance(pair[0], torch.Tensor)]
    return [place for place, (one, two) in tensors[: -1 if into else None] if not torch.equal(one, two)]


def _is_for_output(problem: Problem, data: Any, output: torch.Tensor) -> bool:
    """Whether the last of several tensors is like the output, and the reference does not read it."""
    leaves, form = pytree.tree_flatten(data)
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    last = leaves[tensors[-1]]
    if len(tensors) < 2 or (last.shape, last.dtype) != (output.shape, output.dtype):
        return False
    changed = [_clone(leaf) for leaf in leaves]
    changed[tensors[-1]].fill_(3)
    with on_device(torch.device("cpu")), torch.no_grad():
        other = as_tuple(problem.name, problem.module.ref_kernel(pytree.tree_unflatten(changed, form)))[0]
    return torch.equal(output, other)


def make_task(folder: Path, name: str) -> Foreign:
    """The task of a folder that the importer wrote. Raises Refused."""
    problem = load_problem(folder, name)
    known = json.loads((folder / SIZES).read_text("utf-8"))
    form = pytree.tree_structure(problem.generate(0, 1, torch.device("cpu")))
    into = bool(known[0]["into"])
    workloads = [_make_workload(problem, number, about) for number, about in enumerate(known)]
    places = [place for place, leaf in enumerate(known[0]["leaves"]) if isinstance(leaf, list)]

    def assemble(arguments: Sequence[Any], output: torch.Tensor | None) -> Any:
        """The data, with the output's tensor where the task has one."""
        leaves = list(arguments)
        if into:
            leaves.insert(places[-1], output)
        return pytree.tree_unflatten(leaves, form)

    outputs = {_shapes(each.tensors): each.outputs[0] for each in workloads}

    def run(arguments: Sequence[Any]) -> Any:
        first = next(each for each in arguments if isinstance(each, torch.Tensor))
        output = None
        if into:
            spec = outputs[_shapes(arguments)]
            wide = torch.get_default_dtype() == torch.float64  # the op's reference runs
            output = first.new_empty(spec.shape, dtype=torch.float64 if wide else DTYPES[spec.dtype])
        with on_device(first.device):
            return problem.module.ref_kernel(assemble(arguments, output))

    def adapt(file: Path) -> Callable[..., Any]:
        count, names = len(workloads[0].outputs), list(workloads[0].inputs)
        with modules_of(folder):
            module = ops.load_file(file)
        if hasattr(module, name):
            return getattr(module, name)

        def call(*tensors: torch.Tensor, **scalars: Any) -> None:
            given = iter(tensors[count:])
            arguments = [scalars[key] if key in scalars else next(given) for key in names]
            found = module.custom_kernel(assemble(arguments, tensors[0]))
            for output, value in zip(tensors[:count], found if isinstance(found, tuple) else (found,), strict=True):
                if value.data_ptr() != output.data_ptr():
                    output.copy_(value)

        return call

    return Foreign(name, workloads, run, range(problem.tests), adapt)


def _shapes(tensors: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(each.shape) for each in tensors if isinstance(each, (torch.Tensor, Spec)))


def _make_workload(problem: Problem, number: int, about: Mapping[str, Any]) -> Workload:
    inputs: dict[str, Spec | Value] = {}
    tensors = [place for place, leaf in enumerate(about["leaves"]) if isinstance(leaf, list)]
    for place, leaf in enumerate(about["leaves"]):
        if not isinstance(leaf, list):
            inputs[f"input{place}"] = leaf
        elif not (about["into"] and place == tensors[-1]):
            fill = Generated(problem, number, place, first=place == tensors[0])
            inputs[f"input{place}"] = ops.given(f"input{place}", *leaf[1], dtype=leaf[0], fill=fill)
    outputs = [ops.out(f"y{place}", *shape, dtype=dtype) for place, (dtype, shape) in enumerate(about["outputs"])]
    return Workload(inputs, outputs)


def register(folder: Path, name: str, source: Path) -> Op:
    """Register the task of a folder that the importer wrote. Raises Refused."""
    return make_op(make_task(folder, name), source)
