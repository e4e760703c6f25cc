"""`python -m minfer.board.disassemble LIBRARY` prints the machine code of a library that was compiled from foreign code, as
objdump writes it. objdump runs in a sandbox. `opcode_mix` counts the instructions in its text."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from minfer.sandbox import Sandbox, strongest

MOST_S = 30.0
MOST_TEXT = 64 << 20
LINE = re.compile(r"^\s+[0-9a-f]+:\t(?:[a-z]+ )*?(v?[a-z][a-z0-9]*)\s*(.*)$")
PREFIXES = ("lock", "rep", "repz", "repnz", "notrack", "bnd", "data16")
MULTIPLIES_ADDS = re.compile(r"vf(n?m)(add|sub)")
FLOATING = re.compile(r"v?(add|sub|mul|div|sqrt|max|min|rcp|rsqrt)([sp])[sd]$|vfn?m(?:add|sub)\d*([sp])[sd]$")


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


def disassemble(library: Path) -> str | None:
    """What objdump prints of a library; None where there is no objdump, or it fails."""
    command = [sys.executable, "-m", "minfer.board.disassemble", str(library)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=MOST_S)
    except (subprocess.TimeoutExpired, OSError):
        return None
    return done.stdout[:MOST_TEXT].decode(errors="replace") if done.returncode == 0 else None


def main(library: str) -> int:
    """Run objdump in a sandbox. Returns its exit status, or 1 if there is no objdump."""
    if (program := shutil.which("objdump")) is None:
        return 1
    sandbox = Sandbox(strongest(), visible=[os.path.realpath(library)])
    sandbox.separate()
    if (pid := os.fork()) == 0:
        try:
            sandbox.enter()
            os.execv(program, [program, "-d", "--no-show-raw-insn", "-M", "att", os.path.realpath(library)])
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
