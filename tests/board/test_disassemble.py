"""The mix of instructions, from what objdump prints."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from minfer.board.disassemble import disassemble, opcode_mix

TEXT = """
0000000000003000 <kernel>:
    3000:\tvfmadd231ps %ymm1,%ymm2,%ymm3
    3004:\tvaddps %xmm1,%xmm2,%xmm3
    300b:\tvmulss %xmm1,%xmm2,%xmm3
    300e:\tmulsd  %xmm1,%xmm0
    3010:\tcall   *%rax
    3012:\trepz ret
    3016:\tadd    $0x8,%rsp
    3017:\tmov    %rax,%rbx
"""


def test_the_shares_of_instructions() -> None:
    assert opcode_mix(TEXT.splitlines()) == {"vector": 50.0, "wide": 25.0, "fma": 25.0, "calls": 12.5}


def test_code_that_computes_nothing_has_no_shares() -> None:
    assert opcode_mix(["    3016:\tadd    $0x8,%rsp"]) == {} and opcode_mix([]) == {}


@pytest.mark.slow  # starts Python, which enters a sandbox
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump here")
def test_a_library_is_read_in_a_sandbox(tmp_path: Path) -> None:
    import math

    library = Path(math.__file__) if hasattr(math, "__file__") else Path(sys.executable)
    text = disassemble(library)
    assert text and "call" in text
    (tmp_path / "none.so").write_text("no library")
    assert disassemble(tmp_path / "none.so") is None
