"""Which instructions the machine code of a library has: shares that tell why one kernel is faster than another."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from minfer.board.disassemble import disassemble
from minfer.build import toolchain
from minfer.plan.counters import TENSOR
from minfer.profilers import sass

LINE = re.compile(r"^\s+[0-9a-f]+:\t(?:[a-z]+ )*?(v?[a-z][a-z0-9]*)\s*(.*)$")
MULTIPLIES_ADDS = re.compile(r"vf(n?m)(add|sub)")
FLOATING = re.compile(r"v?(add|sub|mul|div|sqrt|max|min|rcp|rsqrt)([sp])[sd]$|vfn?m(?:add|sub)\d*([sp])[sd]$")
SASS = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
GLOBAL = ("LDG", "STG", "LDGSTS")
COMPUTES = (*TENSOR, *sass.FMA, "FADD", "FADD2", "FMUL", "FMUL2", "HADD2", "HMUL2", "DADD", "DMUL", "MUFU")


def opcode_mix(lines: Iterable[str]) -> dict[str, float]:
    """Shares of x86 instructions, in percent. `vector` (several elements at once) and `fma` (a product and a sum at once) are
    shares of the instructions that compute with floating point. `calls` is a share of all. Empty if no instruction computes
    with floating point."""
    counts: Counter[str] = Counter()
    for line in lines:
        if not (found := LINE.match(line)):
            continue
        name, operands = found[1], found[2]
        counts["all"] += 1
        counts["calls"] += name.startswith("call")
        if floating := FLOATING.match(name):
            counts["floating"] += 1
            counts["vector"] += (floating[2] or floating[3]) == "p"
            counts["fma"] += MULTIPLIES_ADDS.match(name) is not None
            counts["wide"] += "ymm" in operands or "zmm" in operands
    if not counts["floating"]:
        return {}
    of = {"vector": "floating", "wide": "floating", "fma": "floating", "calls": "all"}
    return {name: round(100 * counts[name] / counts[total], 2) for name, total in of.items()}


def sass_mix(lines: Iterable[str]) -> dict[str, float]:
    """Shares of a GPU's instructions, in percent, over all functions of a library. `tensor` (tensor cores) and `fma` are shares
    of the instructions that compute with floating point, `moves16` (16 bytes a thread) of the loads and stores of global
    memory. Empty if no instruction computes with floating point."""
    counts: Counter[str] = Counter()
    for opcode in (found[1] for line in lines if (found := SASS.match(line))):
        root = opcode.partition(".")[0]
        counts["computes"] += root in COMPUTES
        counts["tensor"] += root in TENSOR
        counts["fma"] += root in sass.FMA
        counts["moves"] += root in GLOBAL
        counts["moves16"] += root in GLOBAL and sass.width(opcode) == 128
    if not counts["computes"]:
        return {}
    of = {"tensor": "computes", "fma": "computes"} | ({"moves16": "moves"} if counts["moves"] else {})
    return {name: round(100 * counts[name] / counts[total], 2) for name, total in of.items()}


def read_mix(library: Path, backend: str) -> dict[str, float]:
    """The mix of a library that was built from a C++ (`cpp`) or CUDA (`cuda`) source; empty where no tool reads it."""
    if backend == "cuda":
        home = toolchain.toolkit()
        program = shutil.which("cuobjdump", path=str(home / "bin")) if home else None
        return sass_mix(disassemble(library, program, ["-sass"]).splitlines()) if program else {}
    program = shutil.which("objdump")
    return (
        opcode_mix(disassemble(library, program, ["-d", "--no-show-raw-insn", "-M", "att"]).splitlines())
        if program
        else {}
    )
