"""Tasks in the form of flashinfer-bench as ops: a definition (JSON), and its workloads (JSON lines).

Constant axes are sizes of the op's tensors, and variable ones have the sizes that a workload gives them. Inputs of the type
`random` get new values each time. The integers of a `safetensors` input are those of the file, because page tables and offsets
cannot be drawn. Its floats are drawn with the mean and deviation of those in the file. Scalars become the op's scalars.

The importer reads the files once. It writes what the op needs of them to one JSON file beside the file that registers the op.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minfer import ops
from minfer.board.foreign import Foreign, Refused, Value, Workload, make_op
from minfer.ops import Fill, Op, Spec, fixed, floats, integers
from minfer.ops.tensors import DTYPES, NAMES

KEYS = ("name", "axes", "inputs", "outputs", "reference")
RENAMED = {"float8_e4m3": "float8_e4m3fn"}
RANDOM, SCALAR, SAFETENSORS = "random", "scalar", "safetensors"
RANGES = {"int8": (-128, 128), "uint8": (0, 256)}  # of random integers
RANGE = (-1024, 1024)
MOST_KEPT = 1 << 20  # integers of a safetensors input, which the op's file has


@dataclass(frozen=True)
class Definition:
    """A definition. fixed: the sizes of its constant axes. variable: the names of the others. inputs, outputs: shape and
    dtype; the shape of a scalar is None."""

    name: str
    fixed: Mapping[str, int]
    variable: tuple[str, ...]
    inputs: Mapping[str, tuple[tuple[str, ...] | None, str]]
    outputs: Mapping[str, tuple[tuple[str, ...] | None, str]]
    reference: str
    constraints: tuple[str, ...] = ()


def read_json(file: Path) -> Any:
    """The content of a JSON file. Raises Refused."""
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{file.name} cannot be read as JSON: {error}") from error


def read_definition(about: Any, file: str) -> Definition:
    """A definition from its JSON. Raises Refused."""
    if not isinstance(about, dict):
        raise Refused(f"{file} is no definition; a definition is a JSON object with {', '.join(KEYS)}")
    if missing := [key for key in KEYS if not about.get(key)]:
        raise Refused(f"{file} has no {missing[0]}; a definition has {', '.join(KEYS)}")
    for key in ("axes", "inputs", "outputs"):
        if not isinstance(about[key], dict) or not all(isinstance(each, dict) for each in about[key].values()):
            raise Refused(f"{key} of {file} is no object of objects; write a name and what it is for each")
    sizes, variable = {}, []
    for name, axis in about["axes"].items():
        match axis.get("type"):
            case "var":
                variable.append(name)
            case "const" if _is_size(axis.get("value")):
                sizes[name] = int(axis["value"])
            case "const":
                raise Refused(
                    f"axis {name} of {file} has the value {axis.get('value')!r}; a size is a whole number from 1"
                )
            case other:
                raise Refused(f"axis {name} of {file} is of the type {other!r}; an axis is const or var")
    read = lambda key: {
        name: _read_tensor(f"{name} of {file}", each, about["axes"]) for name, each in about[key].items()
    }
    inputs, outputs = read("inputs"), read("outputs")
    for name, (shape, dtype) in outputs.items():
        if shape is None or not DTYPES[dtype].is_floating_point:
            raise Refused(
                f"{name} of {file} is {'a scalar' if shape is None else dtype}; an op's outputs are floating-point tensors"
            )
    if both := inputs.keys() & outputs.keys():
        raise Refused(f"{min(both)} is an input and an output of {file}; rename one")
    if not isinstance(about["reference"], str):
        raise Refused(f"the reference of {file} is no text; it is Python source with a function run")
    constraints = tuple(map(str, about.get("constraints") or ()))
    return Definition(str(about["name"]), sizes, tuple(variable), inputs, outputs, about["reference"], constraints)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _read_tensor(what: str, about: Mapping[str, Any], axes: Mapping[str, Any]) -> tuple[tuple[str, ...] | None, str]:
    dtype = RENAMED.get(str(about.get("dtype")), str(about.get("dtype")))
    shape = about.get("shape")
    if shape is not None and (not isinstance(shape, list) or (unknown := [axis for axis in shape if axis not in axes])):
        raise Refused(
            f"{what} has the shape {shape!r}, and there is no axis {unknown[0] if isinstance(shape, list) else shape!r}"
        )
    if shape is not None and dtype not in DTYPES:
        raise Refused(f"{what} is {dtype}, which minfer lacks; it has {', '.join(DTYPES)}")
    return (None if shape is None else tuple(shape)), dtype


def read_workloads(file: Path, definition: Definition) -> list[dict[str, Any]]:
    """The workloads of a definition, each once: `axes`, and for each input `random`, a scalar, or what is known of a tensor.
    Raises Refused with the line."""
    found: dict[str, dict[str, Any]] = {}
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise Refused(f"{file.name} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"line {number} of {file.name}"
        try:
            about = json.loads(line)
        except ValueError as error:
            raise Refused(f"{where} is no JSON: {error}") from error
        if isinstance(about, dict) and about.get("definition", definition.name) != definition.name:
            raise Refused(f"{where} is for {about['definition']}; this is {definition.name}")
        workload = about.get("workload", about) if isinstance(about, dict) else None
        if not isinstance(workload, dict) or not isinstance(workload.get("axes"), dict):
            raise Refused(f"{where} has no axes; a workload is an object with axes and inputs")
        read = _read_workload(where, workload, definition, file.parent)
        found.setdefault(json.dumps(read), read)
    if not found:
        raise Refused(f"{file.name} has no workload")
    return list(found.values())


def _read_workload(where: str, about: Mapping[str, Any], definition: Definition, folder: Path) -> dict[str, Any]:
    axes = about["axes"]
    if missing := [name for name in definition.variable if name not in axes]:
        raise Refused(f"{where} gives the axis {missing[0]} no size")
    if unknown := [name for name in axes if name not in definition.variable]:
        raise Refused(f"{where} gives {unknown[0]} a size, which is no variable axis of {definition.name}")
    if wrong := [name for name, value in axes.items() if not _is_size(value)]:
        raise Refused(f"{where}: {wrong[0]} is {axes[wrong[0]]!r}; a size is a whole number from 1")
    sizes = {**definition.fixed, **axes}
    for constraint in definition.constraints:
        try:
            kept = eval(
                constraint, {"__builtins__": {}}, dict(sizes)
            )  # the definition is trusted, and so is its reference
        except Exception as error:
            raise Refused(f"the constraint {constraint!r} of {definition.name} cannot be computed: {error}") from error
        if not kept:
            raise Refused(f"{where} does not keep the constraint {constraint}")
    given = about.get("inputs") or {}
    inputs: dict[str, Any] = {}
    for name, (shape, dtype) in definition.inputs.items():
        of = given.get(name, {"type": RANDOM}) if isinstance(given, dict) else {}
        kind = of.get("type") if isinstance(of, dict) else of
        if shape is None:
            inputs[name] = _read_scalar(f"{where}: {name}", of)
        elif kind == RANDOM:
            inputs[name] = {}
        elif kind == SAFETENSORS:
            inputs[name] = _read_values(f"{where}: {name}", of, tuple(sizes[axis] for axis in shape), dtype, folder)
        else:
            raise Refused(f"{where}: {name} is of the type {kind!r}; a tensor is random or safetensors")
    return {"axes": dict(axes), "inputs": inputs}


def _read_scalar(what: str, about: Any) -> Value:
    value = about.get("value") if isinstance(about, dict) else None
    if about.get("type") != SCALAR or not isinstance(value, (int, float)):
        raise Refused(f"{what} is a scalar and has no value; write {{'type': 'scalar', 'value': 1e-6}}")
    if not math.isfinite(value):
        raise Refused(f"{what} is {value}; a scalar is a finite number")
    return value


def _read_values(
    what: str, about: Mapping[str, Any], shape: tuple[int, ...], dtype: str, folder: Path
) -> dict[str, Any]:
    """What the op needs of a tensor in a safetensors file: all integers, or the mean and deviation of floats."""
    path = Path(str(about.get("path", "")))
    if path.is_absolute() or ".." in path.parts or not path.name:
        raise Refused(f"{what} is in {str(path)!r}; write a path relative to the data set's folder")
    root = next((above for above in (folder, *folder.absolute().parents) if (above / path).is_file()), None)
    if root is None:
        raise Refused(f"{what} is in {path}, and there is no such file in the folder of the workloads or above it")
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise Refused(f"{what} needs the package safetensors: pip install 'minfer[models]'") from error
    try:
        with safe_open(root / path, framework="pt") as opened:
            tensor = opened.get_tensor(str(about.get("tensor_key")))
    except (SafetensorError, OSError) as error:
        raise Refused(f"{what} cannot be read from {path}: {' '.join(str(error).split())}") from error
    if tuple(tensor.shape) != shape or tensor.dtype != DTYPES[dtype]:
        said = f"{NAMES.get(tensor.dtype, tensor.dtype)} {tuple(tensor.shape)}"
        raise Refused(f"{what} is {said} in {path}; its definition says {dtype} {shape}")
    if tensor.is_floating_point():
        wide = tensor.double()
        if not bool(torch.isfinite(wide).all()):
            raise Refused(f"{what} has a value in {path} that is not finite")
        return {"mean": float(wide.mean()), "deviation": float(wide.std(unbiased=False))} if wide.numel() else {}
    if tensor.numel() > MOST_KEPT:
        raise Refused(f"{what} has {tensor.numel():,} integers; at most {MOST_KEPT:,} are kept")
    return {"values": tensor.flatten().tolist()}


def _fill(of: Mapping[str, Any], dtype: str) -> Fill:
    if "values" in of:
        return fixed(of["values"])
    if not DTYPES[dtype].is_floating_point:
        return integers(*RANGES.get(dtype, RANGE))
    return floats(of.get("deviation", 1.0), shift=of.get("mean", 0.0))


def make_workload(definition: Definition, about: Mapping[str, Any]) -> Workload:
    """A workload as `read_workloads` gives it, with the specs of its tensors."""
    sizes = {**definition.fixed, **about["axes"]}
    inputs: dict[str, Spec | Value] = {}
    for name, (shape, dtype) in definition.inputs.items():
        of = about["inputs"][name]
        if shape is None:
            inputs[name] = of
        else:
            inputs[name] = ops.given(name, *(sizes[axis] for axis in shape), dtype=dtype, fill=_fill(of, dtype))
    outputs = [
        ops.out(name, *(sizes[axis] for axis in shape or ()), dtype=dtype)
        for name, (shape, dtype) in definition.outputs.items()
    ]
    return Workload(inputs, outputs)


def make_task(about: Mapping[str, Any], name: str) -> Foreign:
    """The task of a file that `write_task` wrote. Runs the reference's source. Raises Refused."""
    definition = read_definition(about["definition"], name)
    module: dict[str, Any] = {"__name__": f"{name}_reference"}
    try:
        exec(compile(definition.reference, f"<reference of {name}>", "exec"), module)
    except Exception as error:  # it may raise anything
        raise Refused(f"the reference of {name} cannot be imported: {type(error).__name__}: {error}") from error
    run = module.get("run")
    if not callable(run):
        raise Refused(f"the reference of {name} has no function run")
    workloads = [make_workload(definition, each) for each in about["workloads"]]
    return Foreign(name, workloads, lambda arguments: run(*arguments))


def read_task(file: Path, workloads: Path) -> dict[str, Any]:
    """What the op needs of a definition and its workloads, as JSON. Raises Refused."""
    about = read_json(file)
    return {"definition": about, "workloads": read_workloads(workloads, read_definition(about, file.name))}


def register(file: Path, name: str, source: Path) -> Op:
    """Register the task of a file that the importer wrote. Raises Refused."""
    return make_op(make_task(read_json(file), name), source)
