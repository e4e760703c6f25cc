"""What each rung's header claims of its machine code, from the cubin, for both architectures.

Dynamic shared memory is no part of a cubin: that it fits 99 KB is asserted in the sources (`BlockTile`), and a launch that
asks for more fails on the emulator."""

from __future__ import annotations

import re
import subprocess
from collections import Counter

import pytest

from minfer import ops
from minfer.build import device_code, toolchain
from minfer.profilers import static
from minfer.profilers.sass import Function
from tests.tiers import COMPILED, archs, mostly_slow

pytestmark = pytest.mark.skipif(
    toolchain.toolkit() is None
    or not all((toolchain.toolkit() / "bin" / tool).exists() for tool in ("cuobjdump", "nvdisasm")),
    reason="no CUDA compiler and disassemblers that fit this PyTorch",
)

PIPELINED = {"HMMA", "LDSM", "LDGSTS.128"}
SHARED = PIPELINED | {"ATOMG", "LDG.128", "STG.128"}  # sums go to memory and back 16 bytes at a time
COLUMN = {"FFMA", "LDS.32"}

# What every function for a half type has, and what none has: kinds of instructions, or their first word.
CLAIMS: dict[str, tuple[set[str], set[str]]] = {
    "v02a_column": (COLUMN, {"HMMA"}),
    "v02b_padded": (COLUMN, {"HMMA"}),
    "v02c_swizzled": (COLUMN, {"HMMA"}),
    "v03_wmma": ({"HMMA"}, {"LDGSTS"}),
    "v04_mma": ({"HMMA", "LDSM", "LDG.128"}, {"LDGSTS"}),
    "v05_pipelined": (PIPELINED, {"LDG.128"}),
    "v06_swizzled": (PIPELINED, {"LDG.128"}),
    "v07_tuned": (PIPELINED | {"STG.128"}, {"LDG.128"}),
    "v08_split_k": (SHARED, set()),
    "v08_stream_k": (SHARED, set()),
    "v09_a_stationary": (PIPELINED | {"RED"}, set()),
    "v15_gemv": ({"HMMA", "LDG.128"}, {"LDSM", "LDGSTS"}),
    "v16_skinny": (SHARED, set()),
    "v23_mma_fitted": (SHARED, set()),
}


def kinds(function: Function) -> set[str]:
    found = set(function.mix())
    return found | {name.partition(".")[0].replace("REDG", "RED") for name in found}  # Hopper calls it REDG


@pytest.mark.parametrize(
    ("name", "arch"),
    mostly_slow(
        [(name, arch) for name in CLAIMS for arch in archs(ops.get("hgemm").kernels[name])],
        lambda pair: (f"hgemm-{pair[0]}", pair[1]) in COMPILED,
    ),
)
def test_the_code_is_what_the_header_says(name: str, arch: str) -> None:
    has, has_not = CLAIMS[name]
    functions = static.functions(ops.get("hgemm").kernels[name], arch, 600)
    ours = [f for f in functions if "minfer::" in f.name and "finish" not in f.name]
    assert len(ours) >= 2  # fp16 and bf16
    for function in ours:
        assert has <= kinds(function) and not has_not & kinds(function), (function.name, function.mix())
        assert function.stack_bytes == 0 and "STL" not in kinds(function), "it spills"
        assert function.shared_bytes <= 48 << 10


@pytest.mark.slow
def test_the_three_ways_differ_in_space_and_in_nothing_that_is_read() -> None:
    found = {}
    for name in ("v02a_column", "v02b_padded", "v02c_swizzled"):
        functions = static.functions(ops.get("hgemm").kernels[name], "sm_90a", 600)
        function = next(function for function in functions if "banks" in function.name)
        found[name] = function.shared_bytes, function.mix()["LDS.32"], function.mix()["FFMA"]
    assert found["v02a_column"] == found["v02c_swizzled"] == (8192, 32, 33)
    assert found["v02b_padded"] == (8192 + 32 * 4, 32, 33)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a"])
def test_gemv_has_its_loads_in_flight_before_it_multiplies(arch: str) -> None:
    """Of B 8 loads of 16 bytes a lane stand before the first product, and in TN 4 of A."""
    cubin = device_code.cached_cubin(ops.get("hgemm").kernels["v15_gemv"], arch)
    command = [toolchain.toolkit() / "bin" / "nvdisasm", "-c", cubin]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    codes = dict(re.findall(r"\.section\s+\.text\.(\S*gemv\S*),(.*?)(?=\.section\s|\Z)", text, re.DOTALL))
    assert len(codes) == 4
    for name, code in codes.items():
        before, _, rest = code.partition("HMMA.")
        assert len(re.findall(r"LDG\S*\.128", before)) == (12 if "LayoutE1" in name else 8) and rest


HOPPER = {  # the shapes of wgmma, threads, and products between two waits at least
    "v10_wgmma": ({"64x128x16"}, {128}, 8),
    "v11_specialised": ({"64x256x16"}, {384}, 4),
    "v12_pingpong": ({"64x128x16"}, {384}, 8),
    "v13_cooperative": ({"64x256x16"}, {384}, 4),
    "v14_small": ({f"64x{n}x16" for n in (64, 96, 128, 192)}, {160, 288}, 4),
    "v14_stream_k": ({"64x256x16"}, {384}, 4),
    "v17_one_wave": ({f"64x{n}x16" for n in (32, 48, 64, 112, 128, 224, 256)}, {160, 288}, 4),
    "v21_row_pairs": ({f"64x{n}x16" for n in (64, 80, 96, 112, 128, 144, 160, 192, 224, 256)}, {288}, 4),
    "v18_fitted": (
        {f"64x{n}x16" for n in (*range(64, 193, 8), 200, 208, 216, 224, 248)},
        {256, 384, 512},
        4,
    ),
}
# Dtypes, layouts and tiles; 4 of others.
FUNCTIONS = {"v14_small": 26, "v17_one_wave": 36, "v18_fitted": 248, "v21_row_pairs": 52}
# How many of them copy an operand once for a cluster.
SHARED_B = {
    "v12_pingpong": 4,
    "v13_cooperative": 4,
    "v14_small": 10,
    "v14_stream_k": 4,
    "v18_fitted": 204,
    "v21_row_pairs": 26,
}
STORED = {"v18_fitted": 236}  # from v12 on TMA stores the tiles, but not those of v18_fitted whose rows start anywhere


@pytest.mark.parametrize("name", mostly_slow(HOPPER, lambda name: (f"hgemm-{name}", "sm_90a") in COMPILED))
def test_what_the_rungs_for_hopper_claim(name):
    """The copy engine and wgmma alone, asynchronously, in as many registers as a block of that size may have."""
    shapes, threads, products = HOPPER[name]
    functions = [f for f in static.functions(ops.get("hgemm").kernels[name], "sm_90a", 300) if f.rank[0] > 0]
    assert len(functions) == FUNCTIONS.get(name, 4)
    multiplied, sharing, stored = set(), 0, 0
    for function in functions:
        found = function.opcodes
        roots = Counter(opcode.partition(".")[0] for opcode, n in found.items() for _ in range(n))
        (multiply,) = (opcode for opcode in found if opcode.startswith("HGMMA."))
        _, shape, sums, *dtype = multiply.split(".")
        multiplied.add(shape)
        assert sums == "F32" and dtype == (["BF16"] if "bfloat16" in function.name else [])
        assert roots["HGMMA"] >= products and not {"HMMA", "LDSM", "LDGSTS"} & set(roots)
        # Where the compiler cannot prove the sums untouched, it puts a wait behind each product (its warning C7510).
        waits = found["WARPGROUP.DEPBAR.LE"]
        loops = 3 if name == "v14_stream_k" else 1  # whole tiles, shares and slices; behind each loop is a wait
        assert 0 < waits - loops <= roots["HGMMA"] / products
        specialised = function.max_threads >= 384
        assert function.max_threads in threads and function.stack_bytes == 0 and not {"STL", "LDL"} & set(roots)
        assert function.registers <= {384: 168, 512: 128}.get(function.max_threads, 255)
        assert found["MEMBAR.ALL.GPU"] == 0 or name in ("v14_stream_k", "v18_fitted")  # which read others' sums
        # One branch gives registers, the other takes them.
        assert roots["USETMAXREG"] == (2 if specialised else 0)
        assert roots["UTMALDG"] > 0
        sharing += found["UTMALDG.2D.MULTICAST"] > 0
        assert (roots["STSM"] > 0) == (name >= "v12")
        stored += roots["UTMASTG"] > 0
    assert multiplied == shapes and sharing == SHARED_B.get(name, 0)
    assert stored == (name >= "v12") * STORED.get(name, len(functions))
