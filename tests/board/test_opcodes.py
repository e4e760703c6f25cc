"""The mix of instructions, from what objdump and cuobjdump print."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from minfer.board.opcodes import opcode_mix, read_mix, sass_mix
from minfer.build.device_code import cached_cubin
from tests.workshop import Workshop, needs_nvcc

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


SASS = """
		Function : _Z6kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;                     /* 0x00000a00ff017b82 */
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;           /* 0x0000000402047981 */
        /*0020*/              @!P0 LDG.E.U16 R8, desc[UR4][R2.64] ;           /* 0x0000000402087981 */
        /*0030*/                   HGMMA.64x8x16.F32 R24, gdesc[UR4], R24 ;   /* 0x0060000004187df0 */
        /*0040*/                   FFMA R0, R4, R5, RZ ;                      /* 0x0000000504007223 */
        /*0050*/                   FMUL R0, R0, R5 ;                          /* 0x0000000500007220 */
        /*0060*/                   MUFU.EX2 R0, R0 ;                          /* 0x0000000000007308 */
        /*0070*/                   EXIT ;                                     /* 0x000000000000794d */
"""


def test_the_shares_of_a_gpus_instructions() -> None:
    assert sass_mix(SASS.splitlines()) == {"tensor": 25.0, "fma": 25.0, "moves16": 50.0} and sass_mix([]) == {}


@pytest.mark.slow  # starts Python, which enters a sandbox
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump here")
def test_a_library_is_read_in_a_sandbox(tmp_path: Path) -> None:
    import math

    library = Path(math.__file__) if hasattr(math, "__file__") else Path(sys.executable)
    assert read_mix(library, "cpp")["calls"] > 0
    (tmp_path / "none.so").write_text("no library")
    assert read_mix(tmp_path / "none.so", "cpp") == {} == read_mix(tmp_path / "none.so", "cuda")


@pytest.mark.slow  # compiles
@needs_nvcc
def test_the_machine_code_of_a_gpu_is_read_in_a_sandbox(workshop: Workshop) -> None:
    scale = "__global__ void scale(float4* x, float by) { float4 v = *x; v.x = v.x * by + by, *x = v; }\n"
    found = read_mix(cached_cubin(workshop.kernel("scale.cu", scale), "sm_90a"), "cuda")
    assert found == {"tensor": 0.0, "fma": 100.0, "moves16": 100.0}
