"""CUDA kernels on the emulator: those of the registry are right, and a planted mistake is seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from minfer import build, ops
from minfer.bench.operands import Operands
from minfer.bench.verify import compared, run_reference
from minfer.ops import Case, Kernel
from tests.emulator import Emulated, KernelError, compiled
from tests.emulator.mistakes import BROKEN, WHOLE, mistakes_of, number_of
from tests.spaced import spaced
from tests.tiers import ALWAYS, mostly_slow

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(build.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch"),
]

HGEMM = ops.get("hgemm")
CPU = torch.device("cpu")
# Beside an op's odd shapes. hgemm: several tiles each way with an edge in each, and longer than a pipeline is deep. rmsnorm:
# lone elements, several rows of a lane, of a block at once or in turn, rows in shared memory, wholly or in part. softmax: the
# same, and rows of each number of blocks in a cluster and of each number of vectors a thread. rmsnorm_backward: blocks with
# several rows.
SIZES = {
    "hgemm": [{"m": 131, "n": 264, "k": 72}, {"m": 40, "n": 16, "k": 424}],
    "rmsnorm": [
        {"tokens": tokens, "hidden": hidden}
        for tokens, hidden in [
            (3, 1),
            (130, 7),
            (3, 8),
            (3, 33),
            (70, 32),
            (37, 128),
            (21, 256),
            (130, 136),
            (1, 4096),
            (3, 8192),
            (60, 8200),
            (3, 16384),
            (1, 20000),
            (2, 66000),
        ]
    ],
    "softmax": [
        {"rows": rows, "n": n}
        for rows, n in [
            (3, 1),
            (130, 7),
            (3, 8),
            (130, 136),
            (2, 4096),
            (7, 8200),
            (1, 20000),
            (2, 66000),
            (1, 140000),
            (1, 272000),
        ]
    ],
    "rmsnorm_backward": [
        {"tokens": tokens, "hidden": hidden}
        for tokens, hidden in [(3, 1), (130, 7), (3, 8), (70, 136), (1, 4096), (9, 8192), (2, 16384)]
    ],
}
SIZES["producer_consumer"] = [{"n": n} for n in (4, 2048, 9000, 60_000)]  # several tiles for each block
# rope: several tokens a block, with one left over; more heads than a block has threads for; a place in turn; a rest to copy.
SIZES["rope"] = [
    dict(zip(ops.get("rope").axes, shape, strict=True))
    for shape in [(1, 9, 1, 0, 16, 16), (2, 3, 33, 3, 160, 128), (3, 90, 2, 1, 72, 64), (1, 2, 2, 1, 8208, 8208)]
]
# Several tiles for each of the emulator's two blocks, more than a ring of stages is deep, and each width of a strip.
SIZES |= {
    "gated_unit": [
        {"m": m, "n": n, "k": k}
        for m, n, k in [
            (257, 264, 456),
            (600, 72, 128),
            (20, 64, 968),
            (100, 120, 840),
            (60, 180, 584),
            (128, 392, 328),
        ]
    ],
    "gemm_bias_relu": [
        {"m": m, "n": n, "k": k}
        for m, n, k in [(131, 264, 72), (100, 64, 968), (40, 16, 424), (100, 120, 840), (257, 136, 456)]
    ],
}
SIZES["gemm_bias_gelu"] = SIZES["gemm_bias_relu"]
# prefill_attention: several tiles of queries and of keys, with an edge in each, tiles that a warp does not see, more tiles of
# keys than a ring has stages, and a tile of queries that see no key.
SIZES["prefill_attention"] = [
    dict(zip(ops.get("prefill_attention").axes, shape, strict=True))
    for shape in [
        (2, 140, 170, 1, 1, 64),
        (1, 135, 135, 2, 1, 128),
        (1, 66, 90, 1, 1, 256),
        (1, 20, 420, 1, 1, 64),
        (1, 200, 5, 1, 1, 64),
    ]
]
# moe_ffn: several tiles of an expert's rows and of columns, with an edge in each, and longer than a pipeline is deep.
SIZES["moe_ffn"] = [
    dict(zip(ops.get("moe_ffn").axes, shape, strict=True))
    for shape in [(1, 4, 2, 8, 8), (20, 40, 4, 136, 24), (90, 3, 2, 72, 136), (150, 1, 1, 328, 264)]
]
# dequant: several pieces of a block, and a last one that is no multiple of 16 bytes. quant_gemm: several tiles for each block,
# k shared by warps and by blocks, more pieces than a ring has stages, and k that are no multiple of any tile.
SIZES["dequant"] = [{"n": n, "k": k} for n, k in [(33, 512), (1, 32), (3, 96), (9, 2304)]]
SIZES["quant_gemm"] = [
    {"m": m, "n": n, "k": k}
    for m, n, k in [(1, 130, 2048), (2, 40, 4096), (5, 17, 6144), (40, 136, 2048), (130, 272, 512)]
]
# decode_attention: more units than a ring has stages, parts of an item in several blocks, 32 rows, more rows than a tile.
SIZES["decode_attention"] = [
    dict(zip(ops.get("decode_attention").axes, shape, strict=True))
    for shape in [(2, 3, 170, 6, 1, 128), (1, 8, 300, 5, 1, 64), (3, 1, 400, 4, 1, 256)]
]
# mla_decode: more units than a ring has stages, parts of an item in several blocks, an odd number of a warpgroup's blocks of
# keys, and one, two and three tiles of rows, the last of them not whole.
SIZES["mla_decode"] = [
    dict(zip(ops.get("mla_decode").axes, shape, strict=True))
    for shape in [(3, 3, 200, 6), (1, 2, 460, 3), (3, 1, 130, 66), (1, 2, 460, 35), (1, 1, 70, 130)]
]
HOPPER = [file for file, kernel in HGEMM.kernels.items() if kernel.archs == "sm_90a"]

# What takes k apart, and each tile of the kernels that choose one by m.
LONG = {
    "hgemm-v15_gemv": [(8, 88, 1416), (5, 24, 8)],
    "hgemm-v07_tuned": [(520, 200, 264)],  # 5 tiles, or 3 of twice the size, for 3 blocks at once
    "hgemm-v08_split_k": [(16, 64, 456)],
    "hgemm-v08_stream_k": [(16, 1800, 40)],  # of 8 tiles, 3 blocks take one each, and 5 are dealt out
    **{f"hgemm-{file}": [(257, 136, 456)] for file in HOPPER},  # several tiles for each of the emulator's two blocks
    "hgemm-v14_stream_k": [
        (1040, 72, 1000),
        (1160, 40, 968),
        (1280, 16, 1032),
    ],  # 5 tiles: one or two of them are shared
    # Each tile, on two multiprocessors, and longer than a ring is deep.
    "hgemm-v14_small": [
        (100, 64, 968),
        (128, 88, 840),
        (200, 120, 520),
        (130, 190, 456),
        (100, 64, 2120),
        (100, 96, 2120),
        (130, 200, 712),
    ],
    "hgemm-v16_skinny": [(8, 88, 1416), (20, 72, 712), (60, 136, 520), (100, 136, 584)],
    "hgemm-v17_one_wave": [
        (5, 64, 2120),
        (8, 88, 1416),
        (20, 120, 1000),
        (60, 200, 968),
        (33, 264, 584),
        (100, 64, 968),
        (70, 96, 712),
        (128, 120, 840),
        (100, 200, 648),
        (100, 392, 584),
    ],
    # Several parts of an item, each of more keys than the least.
    "decode_attention-v03_packed": [(1, 2, 400, 4, 1, 128), (1, 1, 1600, 4, 1, 128)],
    # Widths of a tile from 48 to 160 columns, and several tiles of an expert's rows, the last of them not full.
    "moe_ffn-v05_pairs": [
        (94, 1, 1, 72, 24),
        (205, 1, 1, 72, 24),
        (237, 1, 1, 8, 136),
        (270, 1, 1, 40, 8),
        (300, 1, 1, 40, 8),
        (660, 3, 1, 328, 16),
    ],
    # One and two tiles of 8 rows of x, a unit of four groups for each warp and several, rows that end within a tile, and more x
    # than a block holds.
    "quant_gemm-v07_stream": [(1, 672, 512), (11, 130, 2048), (16, 40, 1024), (3, 250, 5120), (16, 24, 4096)],
    # Each width of N-slice, with an edge; a few rows, and more than 64 (k counts numbers of fp8, of which a step has 128).
    "quant_gemm-v06_fp8_one_wave": [
        (3, 64, 4352),
        (16, 120, 2048),
        (20, 200, 1280),
        (33, 264, 1280),
        (70, 88, 1536),
        (100, 392, 1024),
    ],
}


def sizes(kernel: Kernel) -> list[dict[str, int]]:
    op = ops.get(kernel.op)
    longer = [dict(zip(op.axes, shape, strict=True)) for shape in LONG.get(f"{op.name}-{kernel.source.stem}", [])]
    return [*longer, *map(dict, op.odd_shapes), *SIZES.get(kernel.op, op.sizes.get("small", []))]


LEAST = 6  # cases of a kernel


def cases(kernel: Kernel) -> list[Case]:
    """The cases of a kernel: all of a dtype of each width; of one with the same width, whose code differs in conversions
    only, those of the op's odd shapes. All of all dtypes where that leaves too few."""
    op = ops.get(kernel.op)
    first = {getattr(torch, dtype).itemsize: dtype for dtype in reversed(kernel.dtypes)}
    every = list(op.cases(kernel, sizes(kernel)))
    fewer = [case for case in every if case.dtype in first.values() or dict(case.shape) in op.odd_shapes]
    return fewer if len(fewer) >= LEAST else every


def worst(function: Callable[..., None], case: Case, seed: int = 1) -> float:
    """The largest error over its bound, of all calls that the kernel supports, each under its own schedule; NaN if a
    result has one."""
    op, found = ops.get(case.op), []
    # Normal scores are too near each other for the base of these ops' sums to move.
    values = "uniform" if case.op in ("prefill_attention", "decode_attention", "mla_decode") else "normal"
    for called in op.under_each_call(case):
        if op.kernels[case.kernel].unsupported(called, None):
            continue
        operands, fresh = (Operands(op, called, seed, values, CPU) for _ in range(2))
        tensors = spaced(op, operands)
        function(*tensors.values(), **op.call(called))
        written = {name: tensors[name] for name in operands.named("out", "inout")}
        expected = run_reference(op, called, fresh.tensors)
        found += [compared(op, called, name, fresh.tensors | written, expected).over_bound for name in written]
    return float(torch.tensor(found).max())


def emulated(kernel: Kernel) -> bool:
    """Whether the emulator has a version of its own of everything that the sources ask of the hardware."""
    known = {path.name for path in (Path(__file__).resolve().parents[1] / "emulator" / "include" / "cuda").iterdir()}
    sources = [path.read_text() for path in kernel.sources() if path.name not in known]
    foreign = (
        r"<mma\.h>|\basm\b(?! volatile\(\"\")|\batomic(?!Inc|Add)[A-Z]|cooperative_groups"  # g++ knows the empty asm
    )
    return not any(re.search(foreign, text) for text in sources)


FILES = {f"{kernel.op}-{kernel.source.stem}": kernel for kernel in ops.every_kernel(["cuda"])}  # any of a file's


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The library of a file, with its mistakes: one for all tests of it."""
    return cache(lambda file: compiled(FILES[file], tmp_path_factory.mktemp("emulated"), mistakes_of(file)))


@pytest.mark.parametrize("file", mostly_slow(FILES, ALWAYS.__contains__))
def test_kernels_agree_with_the_reference_when_emulated(file: str, library: Callable[[str], Path]) -> None:
    if not emulated(FILES[file]):
        pytest.skip("not emulated: WMMA, whose fragments are the compiler's secret, PTX of its own, or other atomics")
    op = ops.get(FILES[file].op)
    for kernel in op.kernels.values():
        if kernel.source != FILES[file].source:
            continue
        function = Emulated(kernel, library(file))
        tried = [worst(function, case) for case in cases(kernel)]
        assert len(tried) >= LEAST and max(tried) < 1, tried


@pytest.mark.slow
def test_few_long_items_of_decode_attention_take_a_whole_multiprocessor(tmp_path) -> None:
    file, edits = WHOLE
    kernel = FILES[file]
    library = compiled(kernel, tmp_path, {1: edits}, "-DMINFER_SM=90")
    function, without = Emulated(kernel, library), Emulated(kernel, library, 1)
    for each in (function, without):
        each.allow_shared(227 << 10)
    op = ops.get(kernel.op)
    long = [dict(zip(op.axes, shape, strict=True)) for shape in [(1, 1, 1600, 4, 1, 128), (1, 8, 300, 5, 1, 64)]]
    for case in op.cases(kernel, long):
        if case.dtype == "bfloat16" and case.params["page"] == "16":
            assert worst(function, case) < 1
            assert not worst(without, case) < 1, "no block had a whole multiprocessor"


# Sums of many blocks, long enough for their bits to depend on the order.
SHARED_SUMS = {
    "hgemm-v08_split_k": (128, 256, 392),
    "hgemm-v08_stream_k": (128, 512, 264),
    "hgemm-v09_a_stationary": (128, 128, 1672),
    "hgemm-v16_skinny": (128, 128, 776),
    "hgemm-v14_stream_k": (1280, 16, 1000),
}


@pytest.mark.parametrize("file", mostly_slow(SHARED_SUMS, ALWAYS.__contains__))
def test_sums_of_several_blocks_have_the_same_bits_in_any_order_or_say_that_they_do_not(file, library) -> None:
    kernel = FILES[file]
    function = Emulated(kernel, library(file))
    case = HGEMM.case(kernel.name, "float16", dict(zip(HGEMM.axes, SHARED_SUMS[file], strict=True)))
    out, *inputs = Operands(HGEMM, case, 1, "normal", CPU).arguments
    found = set()
    for _ in range(4):  # each in another order of blocks, and with as many clusters at once
        function.seed += 3
        function(out, *inputs)
        found.add(out.numpy().tobytes())
    assert (len(found) == 1) == kernel.deterministic


SCHEDULES = 4  # of each case: not every order of blocks and threads shows a mistake


@pytest.mark.parametrize(
    ("file", "how"),
    mostly_slow([(file, how) for how, (file, *_) in BROKEN.items()], lambda pair: pair[0] in ALWAYS),
    ids=[f"{file}, {how}" for how, (file, *_) in BROKEN.items()],
)
def test_a_broken_kernel_is_seen(file: str, how: str, library: Callable[[str], Path]) -> None:
    kernel, error = FILES[file], BROKEN[how][2]
    op, function = ops.get(kernel.op), Emulated(kernel, library(file), number_of(how))
    dtype = "float16" if "float16" in kernel.dtypes else kernel.dtypes[0]
    of_dtype = [case for case in op.cases(kernel, sizes(kernel)) if case.dtype == dtype]
    tried = (worst(function, case) for _ in range(SCHEDULES) for case in of_dtype)
    if error:
        with pytest.raises(KernelError, match=error):
            list(tried)
    else:
        assert not all(found < 1 for found in tried), "nothing was seen"


@pytest.mark.parametrize("file", ["rmsnorm-v02_vectors"])
def test_rmsnorm_says_what_it_does_not_take(file: str, library: Callable[[str], Path]) -> None:
    function, x = Emulated(FILES[file], library(file)), torch.zeros(4, 24)
    refused = {
        "rmsnorm: y must have size 4 in dimension 0, got 3": (x[:3].clone(), x, x[0]),
        "rmsnorm: weight must have 1 dimensions, got 2": (x.clone(), x, x),
        "rmsnorm: weight must be float32, got float16": (x.clone(), x, x[0].half()),
        "rmsnorm: x must be float32 or float16 or bfloat16, got int32": (x.int(), x.int(), x[0].int()),
        "rmsnorm: x must be contiguous in its last dimension, which has stride 4": (
            x.clone(),
            x.t().contiguous().t(),
            x[0],
        ),
        "rmsnorm: y must have a multiple of 4 elements in a row, got 22": (x[:, :22], x[:, :22], x[0, :22]),
        "rmsnorm: x must have rows that start at multiples of 16 bytes": (x[:, :8].clone(), x[:, 2:10], x[0, :8]),
    }
    for why, tensors in refused.items():
        with pytest.raises(KernelError, match=why):
            function(*tensors)
