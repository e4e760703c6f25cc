"""Writes minfer's ops in the form of flashinfer-bench, and makes submissions of solutions in that form."""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minfer import ops
from minfer.board.flashinfer import SCALAR, Definition
from minfer.board.foreign import Refused, Value
from minfer.plan.config import UserError

# The references, in plain PyTorch. They compute in fp32 and round once.
REFERENCES = {
    "softmax": "return torch.softmax(x.float(), dim=-1).to(x.dtype)",
    "rmsnorm": """wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)""",
    "layernorm": """wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * scale * weight.float() + bias.float()).to(x.dtype)""",
    "silu_mul": """wide = gate.float()
    return (wide / (1 + torch.exp(-wide)) * up.float()).to(gate.dtype)""",
    "hgemm": "return (a.float() @ b.float()).to(a.dtype)",
}
# Parameters under which the references hold, and the size that a workload chooses.
PARAMS = {"hgemm": {"layout": "NN"}}
VARIABLE = {"softmax": "rows", "rmsnorm": "tokens", "layernorm": "tokens", "silu_mul": "tokens", "hgemm": "m"}
SIZES = (1, 7, 16, 64, 333, 1024, 4096)
LANGUAGES = ("python", "triton")


def write_definition(op: str, dtype: str, sizes: Mapping[str, int], folder: Path) -> tuple[Path, Path]:
    """Write the definition of an op and its workloads. `sizes`: those of all axes but the first. Returns both files. Raises
    UserError."""
    if op not in REFERENCES:
        raise UserError(f"{op} has no reference in plain PyTorch; choose {' or '.join(REFERENCES)}")
    stated, variable = ops.get(op), VARIABLE[op]
    constant = [axis for axis in stated.axes if axis != variable]
    if sorted(sizes) != sorted(constant):
        raise UserError(
            f"{op} needs the sizes of {' and '.join(constant)}; write --shape {','.join(f'{a}=4096' for a in constant)}"
        )
    if dtype not in ("float16", "bfloat16", "float32"):
        raise UserError(f"{op} cannot be written for {dtype}; choose float16, bfloat16 or float32")
    # A size that no other axis has tells which axis a tensor's dimension is.
    marks = {axis: 1009 + 2 * number for number, axis in enumerate(stated.axes)}
    case = stated.case("any", dtype, marks, PARAMS.get(op))
    names = {size: axis for axis, size in marks.items()}
    specs = [spec for spec in stated.specs(case) if spec.numel]
    scalars: dict[str, Value] = {} if op == "hgemm" else dict(stated.call(case))

    def tensors(role: str) -> dict[str, Any]:
        chosen = [spec for spec in specs if spec.role == role]
        return {spec.name: {"shape": [names[size] for size in spec.shape], "dtype": spec.dtype} for spec in chosen}

    inputs = tensors("in") | {name: {"shape": None, "dtype": "float32"} for name in scalars}
    name = "_".join([op, dtype, *(f"{axis}{sizes[axis]}" for axis in constant)])
    about = {
        "name": name,
        "op_type": op,
        "description": f"minfer's op {op}",
        "axes": {a: {"type": "var"} if a == variable else {"type": "const", "value": sizes[a]} for a in stated.axes},
        "inputs": inputs,
        "outputs": tensors("out"),
        "reference": f"import torch\n\n\ndef run({', '.join(inputs)}):\n    {REFERENCES[op]}\n",
    }
    given = {key: {"type": SCALAR, "value": scalars[key]} if key in scalars else {"type": "random"} for key in inputs}
    lines = []
    for size in SIZES:
        workload = {
            "uuid": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{name}/{size}")),
            "axes": {variable: size},
            "inputs": given,
        }
        lines.append(json.dumps({"definition": name, "workload": workload, "solution": None, "evaluation": None}))
    definition, workloads = folder / "definitions" / op / f"{name}.json", folder / "workloads" / op / f"{name}.jsonl"
    for file, text in ((definition, json.dumps(about, indent=2)), (workloads, "\n".join(lines))):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", "utf-8")
    return definition, workloads


def convert_solution(about: Any, definition: Definition, op: str) -> str:
    """The source of a submission for the op of a definition, made of a solution's JSON. Raises Refused."""
    if (
        not isinstance(about, dict)
        or not isinstance(about.get("spec"), dict)
        or not isinstance(about.get("sources"), list)
    ):
        raise Refused(
            "this is no solution; a solution is a JSON object with name, definition, author, spec and sources"
        )
    name = about.get("name")
    if about.get("definition") != definition.name:
        raise Refused(f"solution {name} is for {about.get('definition')}; this is {definition.name}")
    spec = about["spec"]
    language = str(spec.get("language", "")).lower()
    if language not in LANGUAGES:
        raise Refused(
            f"solution {name} is in {language or 'no language'}; only those in {' and '.join(LANGUAGES)} are converted"
        )
    sources = {str(each.get("path")): str(each.get("content")) for each in about["sources"] if isinstance(each, dict)}
    file, _, function = str(spec.get("entry_point", "")).partition("::")
    if file not in sources or not function.isidentifier():
        raise Refused(
            f"solution {name} has the entry point {spec.get('entry_point')!r}; it is a file of its sources, :: and a function"
        )
    if others := [path for path in sources if path != file]:
        raise Refused(f"solution {name} has the file {others[0]} beside {file}; put all into one file")
    try:
        defined = {node.name for node in ast.parse(sources[file]).body if isinstance(node, ast.FunctionDef)}
    except SyntaxError as error:
        raise Refused(f"{file} of solution {name} is no Python: {error.msg} in line {error.lineno}") from error
    if function not in defined:
        raise Refused(f"{file} of solution {name} defines no function {function}")
    into = bool(spec.get("destination_passing_style", True))
    return sources[file].rstrip("\n") + _adapter(op, function, list(definition.inputs), len(definition.outputs), into)


def _adapter(op: str, function: str, names: list[str], outputs: int, into: bool) -> str:
    """The function of the op's name, which calls a solution's. `into`: it writes to its last arguments."""
    call = (
        "_solution(*arguments, *outputs)"
        if into
        else """found = _solution(*arguments)
    found = tuple(found.values()) if isinstance(found, dict) else found if isinstance(found, (tuple, list)) else (found,)
    for output, value in zip(outputs, found, strict=True):
        output.copy_(value)"""
    )
    assert re.fullmatch(r"\w+", op)
    return f"""


_solution = {function}


def {op}(*tensors, **scalars):
    outputs, given = tensors[:{outputs}], iter(tensors[{outputs}:])
    arguments = [scalars[name] if name in scalars else next(given) for name in {names!r}]
    {call}
"""
