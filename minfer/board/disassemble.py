"""`python -m minfer.board.disassemble LIBRARY PROGRAM WORD...` prints the machine code of a library that was compiled from
foreign code, as a program such as objdump writes it. That runs in a sandbox."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from minfer.sandbox import Sandbox, strongest

MOST_S = 30.0
MOST_TEXT = 64 << 20


def disassemble(library: Path, program: str, words: Sequence[str]) -> str:
    """What a program prints of a library; empty if it fails."""
    command = [sys.executable, "-m", "minfer.board.disassemble", str(library), program, *words]
    try:
        done = subprocess.run(command, capture_output=True, timeout=MOST_S)
    except (subprocess.TimeoutExpired, OSError):
        return ""
    return done.stdout[:MOST_TEXT].decode(errors="replace") if done.returncode == 0 else ""


def main(library: str, program: str, *words: str) -> int:
    """Run the program in a sandbox, and return its exit status."""
    folder = str(Path(program).parent)
    sandbox = Sandbox(strongest(), visible=[os.path.realpath(library), folder])
    sandbox.separate()
    if (pid := os.fork()) == 0:
        try:
            sandbox.enter()
            os.environ["PATH"] = folder  # cuobjdump calls nvdisasm
            os.execv(program, [program, *words, os.path.realpath(library)])
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
