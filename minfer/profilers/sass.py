"""What a cubin says of its device functions, by the CUDA toolkit's own `cuobjdump` and `nvdisasm`."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from minfer.build.device_code import parse_usage
from minfer.plan.counters import TENSOR

FMA = ("FFMA", "FFMA2", "HFMA2", "DFMA")
BY_WIDTH = ("LDG", "LDGSTS", "LD", "LDS", "LDL", "STG", "ST", "STS", "STL")
MATRICES = ("LDSM", "STSM")
WHOLE = (*TENSOR, "UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP")  # counted by their whole opcode
BY_NAME = (*FMA, "BAR", "SYNCS", "MUFU", "BRA", "BRX", "CALL", "MOVM", "SHFL", "ATOM", "ATOMG", "ATOMS", "RED", "REDG")


@dataclass(frozen=True)
class Function:
    """A device function. `registers`, `stack_bytes` a thread; `shared_bytes`, static, and `max_threads` a block.

    `stack_bytes` holds what registers do not: spills, and arrays that are indexed at run time. `max_threads` is the
    launch bound, None where the source states none. `opcodes` counts the instructions by their whole opcode, as they
    stand in the code and not as they are run, without padding.
    """

    name: str  # demangled
    registers: int
    stack_bytes: int
    shared_bytes: int
    max_threads: int | None
    opcodes: Counter[str]

    @property
    def rank(self) -> tuple[int, int, int]:
        """How much it looks like the function that does the work: tensor-core instructions, multiply-adds, all."""

        def count(roots: tuple[str, ...]) -> int:
            return sum(n for opcode, n in self.opcodes.items() if opcode.partition(".")[0] in roots)

        return count(TENSOR), count(FMA), self.opcodes.total()

    def local_bytes(self, root: str) -> int:
        """Bytes of the stores to (`STL`) or loads from (`LDL`) the stack: for spills, what ptxas -v calls its spills."""
        return sum(n * width(op) // 8 for op, n in self.opcodes.items() if op.partition(".")[0] == root)

    def mix(self) -> dict[str, int]:
        """The instructions that matter, by `kind` of opcode; one that is not in it does not occur."""
        found: Counter[str] = Counter()
        for opcode, n in self.opcodes.items():
            if name := kind(opcode):
                found[name] += n
        return dict(sorted(found.items()))


def kind(opcode: str) -> str | None:
    """The name to count an opcode under: the width in bits for what moves data (`LDG.E.128.CONSTANT` is `LDG.128`), the
    number of matrices for LDSM (`LDSM.16.MT88.4` is `LDSM.MT88.4`), shape and types for the tensor cores
    (`HMMA.16816.F32`); None for what does not matter."""
    root, *modifiers = opcode.split(".")
    if root in WHOLE:
        return opcode
    if root in BY_WIDTH:
        return f"{root}.{width(opcode)}"
    if root in MATRICES:
        layout = next((word for word in modifiers if word.startswith("M")), "M88")
        return f"{root}.{layout}.{modifiers[-1] if modifiers[-1] in ('2', '4') else '1'}"
    return root if root in BY_NAME else None


def width(opcode: str) -> int:
    """Bits that a load or store moves for each thread."""
    widths = {"U8": 8, "S8": 8, "8": 8, "U16": 16, "S16": 16, "16": 16, "64": 64, "128": 128, "256": 256}
    return next((widths[word] for word in opcode.split(".")[1:] if word in widths), 32)


def read(cubin: Path, arch: str, toolkit: Path) -> list[Function]:
    """The device functions of a cubin. Raises OSError or CalledProcessError when the tools are absent or refuse it."""

    def tool(name: str, *words: str) -> str:
        command = [str(toolkit / "bin" / name), *words, str(cubin)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    usage = parse_usage(tool("cuobjdump", "-res-usage"), arch)
    bounds = launch_bounds(tool("cuobjdump", "-elf"))
    code = opcodes(tool("nvdisasm", "-c"))
    return [
        Function(demangle(name), *numbers, bounds.get(name), code[name])
        for name, numbers in usage.items()
        if name in code
    ]


def launch_bounds(text: str) -> dict[str, int]:
    """The most threads of a block of each function that has a bound, from `cuobjdump -elf`."""
    found = {}
    for section in re.split(r"^\.nv\.info\.", text, flags=re.MULTILINE)[1:]:
        attribute = re.search(r"EIATTR_(?:MAX_THREADS|REQNTID)\n.*\n\s*Value:\s*((?:0x[0-9a-f]+ *)+)", section)
        if attribute:
            found[section.split(None, 1)[0]] = math.prod(int(size, 16) for size in attribute[1].split())
    return found


def opcodes(text: str) -> dict[str, Counter[str]]:
    """How often each opcode stands in each function, from `nvdisasm -c`.

    What never does anything is left out: the endless loop and the NOPs that pad a function's end, and instructions under
    a predicate that is never true (`@!PT`), which the compiler puts in as distance between others."""
    found: dict[str, Counter[str]] = {}
    counter: Counter[str] = Counter()
    label = ""
    for line in text.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.([^\s,\"]+)", line):
            counter = found.setdefault(section[1], Counter())
        elif line.startswith(".L_"):
            label = line.rstrip(":")
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)(.*)", line):
            predicate, opcode, operands = instruction.groups()
            padding = opcode == "NOP" or (opcode == "BRA" and label and f"({label})" in operands)
            if not padding and predicate not in ("!PT", "!UPT"):
                counter[opcode] += 1
            label = ""
    return found


@cache
def _cxx() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    runtime, libc = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
    runtime.__cxa_demangle.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    return runtime, libc


def demangle(name: str) -> str:
    """A C++ symbol as it is written in the source, by the C++ runtime that PyTorch brings in; others as they are."""
    runtime, libc = _cxx()
    pointer = runtime.__cxa_demangle(name.encode(), None, None, None)
    if not pointer:
        return name
    text = ctypes.string_at(pointer).decode()
    libc.free(pointer)
    return text
