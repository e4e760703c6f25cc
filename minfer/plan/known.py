"""Reports a misspelt op, kernel or dtype before PyTorch is imported, which takes seconds. It parses the sources of the ops and
does not run them. A name that it cannot judge is left to the plan, which imports the ops."""

from __future__ import annotations

import ast
import difflib
from functools import cache
from pathlib import Path

from minfer.plan.config import Config, UserError, choose, names

OPS = Path(__file__).resolve().parents[1] / "ops"
DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32", "int64")
PREFIXES = ("v0", "v1", "cpu_", "triton_", "torch")  # how names of kernels begin that it may suggest


def check_op(op: str) -> None:
    """Raise UserError for an op that does not exist. Not for a request with `extra`, whose files may register any op."""
    ops = sorted(path.parent.name for path in OPS.glob("*/__init__.py"))
    choose("op", op, ops)


def check_kernels(config: Config) -> None:
    """Raise UserError for a dtype or a kernel that cannot exist. Files of `extra` may register any kernel."""
    for dtype in names(config.dtype):
        choose("dtype", dtype, DTYPES)
    if config.extra or config.sweeps:
        return
    words, composed = words_of(config.op)
    for wanted in names(config.kernel):
        likely = [word for word in words if word.startswith(PREFIXES)]
        near = difflib.get_close_matches(wanted, likely, n=3, cutoff=0.55)
        if wanted != "all" and wanted not in words | composed and near:
            raise UserError(f"unknown {config.op} kernel {wanted!r}; did you mean {' or '.join(near)}?")


@cache
def words_of(op: str) -> tuple[set[str], set[str]]:
    """Two sets that together have the names of an op's kernels: all strings in its Python sources with the stems of the files
    that they name, and each of these with each ending, such as the `_acc16` of f"{stem}_acc16"."""
    words, stems, endings = set[str](), set[str](), set[str]()
    for path in (OPS / op).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            stem, _, ending = node.value.rpartition(".")
            if ending in ("cu", "cpp", "py"):
                stems.add(stem)
            else:
                words.add(node.value)
                endings |= {node.value} if node.value.startswith("_") else set()
    return words | stems, {word + ending for word in words | stems for ending in endings}


@cache
def parameters() -> list[str]:
    """The parameters of all ops: the keys of each `params={...}` in their sources, and `call`."""
    found = {"call"}
    for path in OPS.glob("*/__init__.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "params" and isinstance(node.value, ast.Dict):
                found |= {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
    return sorted(found)
