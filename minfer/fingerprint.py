"""A kernel's fingerprint: rows carry it, so that `resume` and published figures know a kernel that is still the same."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import json
import re
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from minfer.build import cache, reads, toolchain
from minfer.ops import PACKAGE, Kernel, get, python_source
from minfer.ops.sources import SourceError, read_source, split

# The code by which functions choose a kernel. The hash of an op is of CHOOSING, of the rules of PREFERRED that its kernels
# name, and of the MODELS that these rules import.
FUNCTIONAL = PACKAGE / "functional"
CHOOSING, PREFERRED = FUNCTIONAL / "best.py", FUNCTIONAL / "preferred.py"
MODELS = {
    "product_times": [
        FUNCTIONAL / "product_times.py",
        FUNCTIONAL / "product_times.cpp",
        PACKAGE / "cuda" / "gemm" / "fitted_choice.h",
    ],
    "attention_times": [FUNCTIONAL / "attention_times.py", FUNCTIONAL / "attention_times.json"],
}


def fingerprint(kernel: Kernel, arch: str, rules: int) -> str:
    """A hash of what decides this kernel's result and time: its sources and its op's, without comments; the other files
    that its last build read; the flags and versions that it is compiled with; and `rules`, the version of the measuring rules.
    Registering another kernel of the op changes nothing. That of a function is of all kernels that it chooses among, of
    their measurements, of the code of the choice (`_choices`), and of the modules that it names; that of a PyTorch
    implementation that calls functions is of these, too. If a source cannot be read, for example because it is too large, the
    error message is hashed instead."""
    digest = hashlib.sha256()
    if kernel.backend == "function" or kernel.composes:
        for name in kernel.composes or (kernel.op,):
            kernels = get(name).kernels.values()
            rules_of = {rule for each in kernels for rule in (each.preferred, each.before_hopper) if rule}
            digest.update(_choices(name, tuple(sorted(rules_of))))
            for each in kernels:
                if each.backend in ("cuda", "triton", "cpp"):
                    digest.update(fingerprint(each, arch, rules).encode())
        for path in kernel.modules:
            digest.update(_meaning(path).encode("utf-8", "surrogateescape"))
    if kernel.backend == "function":
        return digest.hexdigest()[:16]
    op = get(kernel.op).source
    try:
        for path in sorted({*kernel.sources(), *([op] if op and op.is_file() else [])}):
            digest.update(_meaning(path).encode("utf-8", "surrogateescape"))
        if named := reads.named_by_python(kernel):
            digest.update("".join(sorted(named.values())).encode())
        if kernel.needs_build and (arch or kernel.backend == "cpp"):
            digest.update("".join(reads.identity(kernel, cache.recorded(kernel, arch))).encode())
    except (SourceError, OSError) as error:
        digest.update(str(error).encode("utf-8", "surrogateescape"))
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


@functools.cache
def _choices(op: str, preferred: tuple[str, ...]) -> bytes:
    """The measurements by which functions choose a kernel of this op, and the code of the choice. `preferred` are the rules
    that its kernels name. The code has these, all that they use, and which of them hold on Hopper only, but no rules of other
    ops."""
    table = json.loads((PACKAGE / "functional" / "best.json").read_text())
    text = read_source(PREFERRED)
    rules, on_hopper = python_source.used(text, preferred), python_source.used(text, ["HOPPER_ONLY"])
    names = {str(node.value) for each in on_hopper for node in ast.walk(each) if isinstance(node, ast.Constant)}
    imports = [each for each in rules if isinstance(each, ast.ImportFrom)]
    modules = {str(each.module).rpartition(".")[2] for each in imports}
    modules |= {alias.name for each in imports for alias in each.names}
    code = [CHOOSING, *(path for name in sorted(modules & MODELS.keys()) for path in MODELS[name])]
    parts = [json.dumps(table.get(op, [])), *sorted(map(ast.dump, rules)), *sorted(names.intersection(preferred))]
    return "".join([*parts, *map(_meaning, code)]).encode()


# Where tests/emulator/planting.py plants a mistake: at the end of a line, or alone on the line before.
MARKER = "//@ "
GENERATED, CONTINUED = ("// Measured (", "// Why: "), "//   "  # what `analysis/make.py headers` writes into a header


@functools.cache
def _meaning(path: Path) -> str:
    """A source without comments and, in an op's file, without the registration of kernels. A comment becomes a blank, but
    markers and the lines that `analysis/make.py headers` writes into a header leave nothing, so their number may change.
    A separate process, which may die, parses Python files from outside this project; a file that Python cannot parse is used as
    it is. Raises SourceError and OSError."""
    text = read_source(path)
    if path.suffix != ".py":
        return _cpp_meaning(text)
    if path.is_relative_to(PACKAGE):
        return python_source.meaning(text)
    return python_source.meaning_apart(text) or text


def _cpp_meaning(text: str) -> str:
    parts: list[tuple[bool, str]] = []  # each with whether it is code
    generated = swallow = False  # whether the last comment was generated; whether its newline is left out, too
    for kind, part in split(text):
        if kind == "code":
            generated = generated and part == "\n"
            if part := part[1:] if swallow and part[0] == "\n" else part:
                parts.append((True, part))
            swallow = False
            continue
        generated = _begins_line(parts) and part.startswith((*GENERATED, *([CONTINUED] if generated else [])))
        if kind == "line" and (generated or part.startswith(MARKER)):
            if parts and parts[-1][0] and not generated:
                before = parts.pop()[1].rstrip(" \t")
                parts += [(True, before)] if before else []
            swallow = _begins_line(parts)
        else:
            parts.append((False, part if kind == "literal" else " "))
    groups = ((code, "".join(part for _, part in group)) for code, group in groupby(parts, key=itemgetter(0)))
    return "".join(re.sub(r"\s+", " ", whole) if code else whole for code, whole in groups)


def _begins_line(parts: list[tuple[bool, str]]) -> bool:
    return not parts or (parts[-1][0] and parts[-1][1].endswith("\n"))


@functools.cache
def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""
