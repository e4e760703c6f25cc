"""A kernel's fingerprint: rows carry it, so that `resume` and published figures know a kernel that is still the same."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

from minfer.build import toolchain
from minfer.ops import Kernel, get
from minfer.ops.kernel import read_source


def fingerprint(kernel: Kernel, arch: str, rules: int) -> str:
    """A hash of what decides this kernel's result and time: its sources and its op's, without comments, the flags and
    versions that it is compiled with, and `rules`, the version of the measuring rules. Registering another kernel of the op
    changes nothing."""
    digest = hashlib.sha256()
    op = get(kernel.op).source
    for path in sorted({*kernel.sources(), *([op] if op and op.is_file() else [])}):
        digest.update(_meaning(path).encode())
    about: list[Any] = [rules, torch.__version__]
    if kernel.needs_build:
        flags = (
            toolchain.flags_of(kernel, arch) if arch or kernel.backend == "cpp" else toolchain.NVCC_FLAGS
        )  # no GPU, and nothing runs
        about += [flags, toolchain.versions_of(kernel)]
    if kernel.backend == "triton":
        about.append(_triton_version())
    digest.update(json.dumps(about).encode())
    return digest.hexdigest()[:16]


# Where tests/emulator/planting.py plants a mistake: at the end of a line, or alone on the line before.
MARKER = re.compile(r"^[ \t]*//@ .*\n|[ \t]*//@ .*$", re.MULTILINE)
GENERATED = re.compile(r"^// (?:Measured \(|Why: ).*\n(?://   .*\n)*", re.MULTILINE)


@cache
def _meaning(path: Path) -> str:
    """A source without comments and, in an op's file, without the registration of kernels. A comment becomes a blank, but
    markers and the lines that `analysis/make.py headers` writes into a header leave nothing, so their number may change."""
    text = read_source(path)
    if path.suffix != ".py":
        text = GENERATED.sub("", MARKER.sub("", text))
        return re.sub(r"//[^\n]*|/\*.*?\*/|\s+", " ", text, flags=re.DOTALL)
    module = ast.parse(text)
    module.body = [statement for statement in module.body if not _registers(statement)]
    return ast.dump(module)


def _registers(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.For):
        return all(_registers(inner) for inner in statement.body)
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and getattr(call.func, "attr", "") in ("torch", "cuda", "triton", "cpp")


@cache
def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""
