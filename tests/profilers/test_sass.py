"""Reading machine code, as CUDA 13.2's tools print it of tests/data/sample.cu."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from minfer.build.device_code import parse_usage
from minfer.profilers import sass
from minfer.profilers.sass import Function

DATA = Path(__file__).resolve().parents[1] / "data"
PRODUCT = "_ZN6sample7productI6__halfLi3EEEvPT_PK5uint4i"


def listing(name: str) -> str:
    return (DATA / f"sample.sm_90a.{name}.txt").read_text()


def test_resources_are_read_without_what_hopper_reserves():
    assert parse_usage(listing("usage"), "sm_90a") == {PRODUCT: (18, 0, 1024), "copy": (12, 0, 0)}
    assert parse_usage(listing("usage"), "sm_89")[PRODUCT] == (18, 0, 2048)  # there the tool does not count it


def test_launch_bounds_are_read():
    assert sass.launch_bounds(listing("elf")) == {PRODUCT: 64}  # copy states none


def test_launch_bounds_in_three_dimensions_are_multiplied():
    text = ".nv.info.f\n\t<0x1>\n\tAttribute:\tEIATTR_REQNTID\n\tFormat:\tEIFMT_SVAL\n\tValue:\t0x20 0x4 0x2 \n"
    assert sass.launch_bounds(text) == {"f": 256}


def test_opcodes_are_counted_without_padding():
    found = sass.opcodes(listing("nvdisasm"))
    assert set(found) == {PRODUCT, "copy"}
    assert found["copy"] == Counter(
        {"LDC": 1, "S2R": 1, "LDC.64": 2, "ULDC.64": 1, "IMAD.WIDE.U32": 2, "LDG.E.128": 1, "STG.E.128": 1, "EXIT": 1}
    )
    code = found[PRODUCT]
    assert code["HMMA.16816.F32"] == 3 and code["LDGSTS.E.BYPASS.128"] == 1 and code["BAR.SYNC.DEFER_BLOCKING"] == 1
    assert not {"NOP", "BRA", "LDS", "UIADD3"} & set(code)  # the end's padding, and six under @!PT or @!UPT


def test_a_branch_that_goes_elsewhere_counts():
    text = '.section .text.f,"ax"\n.L_x_1:\n /*0010*/ FADD R1, R1, R1 ;\n /*0020*/ @P0 BRA `(.L_x_1) ;\n.L_x_2:\n'
    assert sass.opcodes(text + " /*0030*/ BRA `(.L_x_2);\n")["f"] == Counter({"FADD": 1, "BRA": 1})


def test_the_mix_of_the_sample():
    found = sass.opcodes(listing("nvdisasm"))[PRODUCT]
    mix = Function("product", 18, 0, 1024, 64, found).mix()
    assert mix == {"HMMA.16816.F32": 3, "LDGSTS.128": 1, "LDSM.M88.4": 1, "LDSM.MT88.2": 1, "BAR": 1, "STG.16": 1}


@pytest.mark.parametrize(
    ("opcode", "name"),
    {
        "LDG.E.128.CONSTANT": "LDG.128", "LDG.E.U16": "LDG.16", "LDG.E": "LDG.32", "LDG.E.LTC128B.64": "LDG.64",
        "LDG.E.S8": "LDG.8", "LDGSTS.E.BYPASS.LTC128B.128": "LDGSTS.128", "LDS.U.128": "LDS.128", "STS": "STS.32",
        "STG.E.EF.64": "STG.64", "STL.64": "STL.64", "LDL.LU": "LDL.32", "LDSM.16.M88": "LDSM.M88.1",
        "LDSM.16.MT88.4": "LDSM.MT88.4", "HMMA.16816.F16": "HMMA.16816.F16", "HGMMA.64x128x16.F32": "HGMMA.64x128x16.F32",
        "UTMALDG.2D.MULTICAST": "UTMALDG.2D.MULTICAST", "MUFU.EX2": "MUFU", "FFMA.FTZ": "FFMA", "HFMA2.MMA": "HFMA2",
        "BAR.SYNC.DEFER_BLOCKING": "BAR", "LDGDEPBAR": None, "IMAD.MOV.U32": None, "LDC.64": None,
    }.items(),
)  # fmt: skip
def test_kinds_of_opcodes(opcode, name):
    assert sass.kind(opcode) == name


@pytest.mark.parametrize(
    ("symbol", "text"),
    [
        (PRODUCT, "void sample::product<__half, 3>(__half*, uint4 const*, int)"),
        ("copy", "copy"),
        ("kernel", "kernel"),
        ("_ZN12_GLOBAL__N_11kE", "(anonymous namespace)::k"),
    ],
)
def test_names_are_demangled(symbol, text):
    assert sass.demangle(symbol) == text
