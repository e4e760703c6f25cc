"""Kernels of a test's own, which compile in a second."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from minfer import ops
from minfer.build import toolchain
from minfer.ops import Kernel
from minfer.process import forked

ROOT = Path(__file__).resolve().parents[1]
SOUND = '#include "tile.h"\nextern "C" int tile() { return TILE; }\n'
DEVICE = '#include "tile.h"\n__global__ void tile(int* out) { out[threadIdx.x] = TILE; }\n'

needs_nvcc = pytest.mark.skipif(toolchain.toolkit() is None, reason="no CUDA compiler that fits this PyTorch")


@dataclass
class Workshop:
    """Kernels of a test's own, registered under hgemm, and a cache of their own.

    They register no torch op and include nothing of PyTorch's, so they compile in a second."""

    folder: Path
    log: Path  # a line for each call of the C++ compiler, when it is `counting`
    kernels: list[str]

    def kernel(self, file: str = "sound.cpp", text: str = SOUND) -> Kernel:
        op = ops.get("hgemm")
        source = self.folder / file
        source.write_text(text)
        (op.cuda if source.suffix == ".cu" else op.cpp)(str(source))
        self.kernels.append(source.stem)
        return op.kernels[source.stem]

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def counting_compiler(self) -> str:
        """A C++ compiler that logs its calls, and takes a while as long as the file `slow` is there."""
        path = self.write(
            "cxx",
            f'#!/bin/sh\necho "$@" >> {self.log}\n'
            f'case "$*" in *.cpp*) test -e {self.folder}/slow && sleep 2;; esac\nexec {toolchain.compiler()} "$@"\n',
        )
        path.chmod(0o755)
        return str(path)

    def compilations(self) -> int:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return sum(".cpp" in line for line in lines)

    def start(self, kernel: Kernel, arch: str = "") -> forked.Started:
        """`python -m minfer.build` on one of the kernels."""
        adder = "cuda" if kernel.backend == "cuda" else "cpp"
        register = self.write(
            "register.py", f"from minfer import ops\nops.get('hgemm').{adder}({str(kernel.source)!r})\n"
        )
        return forked.Started("minfer.build", "hgemm", kernel.name, arch, str(register))
