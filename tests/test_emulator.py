"""CUDA kernels on the emulator: those of the registry are right, and what is wrong is seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from minfer import build, ops
from minfer.bench.operands import Operands
from minfer.bench.verify import compared, oracle
from minfer.ops import Case, Kernel
from tests.emulator import Emulated, KernelError, compiled, switched
from tests.spaced import spaced
from tests.tiers import ALWAYS, mostly_slow

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(build.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch"),
]

HGEMM = ops.get("hgemm")
CPU = torch.device("cpu")
# Beside an op's odd shapes. hgemm: several tiles each way with an edge in each, and longer than a pipeline is deep. rmsnorm:
# lone elements, several rows of a block at once or in turn, rows in shared memory, wholly or in part.
SIZES = {
    "hgemm": [{"m": 131, "n": 264, "k": 72}, {"m": 40, "n": 16, "k": 424}],
    "rmsnorm": [
        {"tokens": tokens, "hidden": hidden}
        for tokens, hidden in [
            (3, 1),
            (130, 7),
            (3, 8),
            (3, 33),
            (130, 136),
            (1, 4096),
            (60, 8200),
            (3, 16384),
            (1, 20000),
            (2, 66000),
        ]
    ],
}
HOPPER = [file for file, kernel in HGEMM.kernels.items() if kernel.archs == "sm_90a"]

# What takes k apart, and each tile of the kernels that choose one by m.
LONG = {
    "v15_gemv": [(8, 88, 1416), (5, 24, 8)],
    "v07_tuned": [(520, 200, 264)],  # 5 tiles, or 3 of twice the size, for 3 blocks at once
    "v08_split_k": [(16, 64, 456)],
    "v08_stream_k": [(16, 1800, 40)],  # of 8 tiles, 3 blocks take one each, and 5 are dealt out
    **{file: [(257, 136, 456)] for file in HOPPER},  # several tiles for each of the emulator's two blocks
    "v14_stream_k": [(1040, 72, 1000), (1160, 40, 968), (1280, 16, 1032)],  # 5 tiles: one or two of them are shared
    # Each tile, on two multiprocessors, and longer than a ring is deep.
    "v14_small": [
        (100, 64, 968),
        (128, 88, 840),
        (200, 120, 520),
        (130, 190, 456),
        (100, 64, 2120),
        (100, 96, 2120),
        (130, 200, 712),
    ],
    "v16_skinny": [(8, 88, 1416), (20, 72, 712), (60, 136, 520), (100, 136, 584)],
    "v17_one_wave": [
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
}


def sizes(kernel: Kernel) -> list[dict[str, int]]:
    op = ops.get(kernel.op)
    longer = [
        dict(zip(op.axes, shape, strict=True)) for shape in LONG.get(kernel.source.stem, []) if kernel.op == "hgemm"
    ]
    return [*longer, *map(dict, op.odd_shapes), *SIZES.get(kernel.op, op.sizes.get("small", []))]


def worst(function: Callable[..., None], case: Case, seed: int = 1) -> float:
    """The largest error over its bound, of all calls, each under its own schedule; NaN if a result has one."""
    op, found = ops.get(case.op), []
    for called in op.under_each_call(case):
        operands, fresh = (Operands(op, called, seed, "normal", CPU) for _ in range(2))
        tensors = spaced(op, operands)
        function(*tensors.values(), **op.call(called))
        written = {name: tensors[name] for name in operands.named("out", "inout")}
        expected = oracle(op, called, fresh.tensors)
        found += [compared(op, called, name, fresh.tensors | written, expected).over_bound for name in written]
    return float(torch.tensor(found).max())


def emulated(kernel: Kernel) -> bool:
    """Whether the emulator has a version of its own of everything that the sources ask of the hardware."""
    known = {path.name for path in (Path(__file__).parent / "emulator" / "include" / "cuda").iterdir()}
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


def mistakes_of(file: str) -> dict[int, dict[str, str]]:
    """By the numbers that switch them on."""
    return dict(enumerate((edits for its, edits, _ in BROKEN.values() if its == file), 1))


@pytest.mark.parametrize("file", mostly_slow(FILES, ALWAYS.__contains__))
def test_kernels_agree_with_the_oracle_when_emulated(file: str, library: Callable[[str], Path]) -> None:
    if not emulated(FILES[file]):
        pytest.skip("not emulated: WMMA, whose fragments are the compiler's secret, PTX of its own, or other atomics")
    op = ops.get(FILES[file].op)
    for kernel in op.kernels.values():
        if kernel.source != FILES[file].source:
            continue
        function = Emulated(kernel, library(file))
        tried = [worst(function, case) for case in op.cases(kernel, sizes(kernel))]
        assert len(tried) >= 6 and max(tried) < 1, tried


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


# What is changed in a kernel's sources, and what is then seen: this error, or a wrong result. All mistakes of a file are
# compiled into its one library, and switched on one at a time.
WRONG = ""
SCHEDULES = 4  # of each case: not every order of blocks and threads shows a mistake
BROKEN = {
    "wrong index": ("hgemm-v02_tiled", {"sum += a_tile[y][k] * «b_tile[k][x]»": "b_tile[x][k]"}, WRONG),
    "no barrier after the load": ("hgemm-v02_tiled", {"«__syncthreads();»\n#pragma unroll": ""}, WRONG),
    "no barrier before the next load": ("hgemm-v02_tiled", {"[x];\n    «__syncthreads();»": ""}, WRONG),
    "edge in M not checked": (
        "hgemm-v02_tiled",
        {"«row0 + y < g.m» && k0": "true", "«row0 + y >= g.m» ||": "false"},
        "outside operand",
    ),
    "B not transposed": ("hgemm-v04_mma", {"«ldmatrix_x4_trans»(two": "ldmatrix_x4"}, WRONG),
    "rows of A beyond the edge": ("hgemm-v04_mma", {"row0 + r < rows": "true"}, "outside operand"),
    "waits for one group too few": (
        "hgemm-v05_pipelined",
        {"cp_async_wait<kStages - 2>()": "cp_async_wait<kStages - 1>()"},
        "in flight",
    ),
    "no barrier before a stage is read": ("hgemm-v05_pipelined", {"«__syncthreads();»  // all": ""}, WRONG),
    "copies beyond the edge": ("hgemm-v05_pipelined", {"rows_left && «cols_left > 0»": "true"}, "outside the operands"),
    "swizzled when written only": (
        "hgemm-v06_swizzled",
        {
            "(f.a[i], tile + «Place::at(row + i * 16 + lane % 16, k + lane / 16 * 8)»": (
                "Padded<24>::at(row + i * 16 + lane % 16, k + lane / 16 * 8)"
            )
        },
        WRONG,
    ),
    "no barrier before a stage is filled": (
        "hgemm-v06_swizzled",
        {"«__syncthreads();»\n          used": ""},
        WRONG,
    ),
    "a row of A that is not there": ("hgemm-v15_gemv", {"k < g.k && «lane / 4 < g.m»": "true"}, "outside operand"),
    "sums of warps not waited for": ("hgemm-v15_gemv", {"«__syncthreads();»\n  for": ""}, WRONG),
    "columns of a product swapped": ("hgemm-v15_gemv", {"+ 2 * product + «upper»": "1 - upper"}, WRONG),
    "added up before all have come": ("hgemm-v16_skinny", {"== «count - 1»;": "0"}, WRONG),
    "sums at another block's place": ("hgemm-v08_stream_k", {"(2LL * block + «second»)": "0"}, WRONG),
    "a step of another tile": ("hgemm-v08_stream_k", {"«step - dealt * k_tiles»,": "0"}, WRONG),
    "a tile twice": ("hgemm-v07_tuned", {"«within / rows»}": "within % rows"}, WRONG),
    "rows staged where another warp does": (
        "hgemm-v07_tuned",
        {"stages + threadIdx.x / 32 * Block::Warp::kStaged": "stages"},
        WRONG,
    ),
    "no wait for a full stage": (
        "hgemm-v10_wgmma",
        {"barrier_wait(full + ring.stage, ring.parity);": ""},
        "changed while wgmma read it",
    ),
    "a stage released while products read it": (
        "hgemm-v11_specialised",
        {"if (step > 0) release(before);": "release(ring.stage);"},
        "changed while wgmma read it",
    ),
    "no turns": (
        "hgemm-v12_pingpong",
        {"barrier_wait(turn + warpgroup, turn_parity);": ""},
        "changed while|more often",
    ),
    "the phases of the other's tile not skipped": (
        "hgemm-v12_pingpong",
        {"«ring.skip(steps);»  //": ""},
        "wait for ever",
    ),
    "no fence before a TMA store": ("hgemm-v13_cooperative", {"    «fence_async();»\n": ""}, "without a fence since"),
    "a box filled while TMA reads it": (
        "hgemm-v13_cooperative",
        {"tma_store_wait<kPending>()": "tma_store_wait<kPending + 1>()"},
        "changes while TMA stores it",
    ),
    "a box of two filled while TMA reads it": (
        "hgemm-v12_pingpong",
        {"tma_store_wait<kPending>()": "tma_store_wait<kPending + 1>()"},
        "changes while TMA stores it",
    ),
    "a stage released in one block of the cluster": (
        "hgemm-v13_cooperative",
        {"threadIdx.x % 32 < kCluster": "threadIdx.x % 32 == 0"},
        "wait for ever at an mbarrier",
    ),
    "a block that does not wait for its cluster": (
        "hgemm-v13_cooperative",
        {"«cluster_sync_relaxed();»  // no block": ""},
        "a block that has ended",
    ),
    "a stage shared by a cluster, released while products read it": (
        "hgemm-v12_pingpong",
        {"if (step > 0) release(before);": "release(ring.stage);", "      «release(before);»\n": ""},
        "changed while wgmma read it",
    ),
    "sums that are said to be there too early": (
        "hgemm-v14_stream_k",
        {"warps_sync<kWriters>();": ""},
        WRONG,
    ),
    "a helper's sums where another's are": (
        "hgemm-v14_stream_k",
        {"tile - deal.whole + «helper»": "0"},
        "nobody has taken down|wait for ever",
    ),
    "sums added before they have come": (
        "hgemm-v14_stream_k",
        {"          «stages.wait_full();»\n": ""},
        "changed while",
    ),
    "others' sums copied without a fence": (
        "hgemm-v14_stream_k",
        {"fence_async_global();": ""},
        "what others wrote without a fence",
    ),
    "half of B not copied to the other block": (
        "hgemm-v14_small",
        {"(1 << kCluster) - 1": "1 << rank"},
        "wait for ever at an mbarrier",
    ),
    "copies to a block whose barriers are not there": (
        "hgemm-v14_small",
        {"kCluster > 1 ? cluster_sync_relaxed() : __syncthreads();": "__syncthreads();"},
        "not initialised|has ended",
    ),
    "a tile that leaves through stages that are read": (
        "hgemm-v14_small",
        {"«warps_sync<kProducer>();»  // all stages": ""},
        "changed while wgmma read it",
    ),
    "boxes of two warpgroups at one place": (
        "hgemm-v14_small",
        {"stages + «warpgroup» * Tile::kAllBoxes": "1"},
        "changes while TMA stores it|without a fence since",
    ),
    "the columns of the other warpgroup": ("hgemm-v14_small", {"Tiles::kA + «col * kBlockK»": "0"}, WRONG),
    "rows waited for that are not copied": (
        "hgemm-v17_one_wave",
        {"step * kBlockK, «Shape::rows(g.m)»)": "Tiles::kA / kBlockK"},
        "wait for ever at an mbarrier",
    ),
    "a box that is not swizzled, written as if": (
        "hgemm-v17_one_wave",
        {"«kBoxN == 64» ? piece": "true"},
        "changes while TMA stores it|without a fence since",
    ),
    "a product beyond shared memory": (
        "hgemm-v17_one_wave",
        {"(kTN ? 2 : 128)": "4096"},
        "operand is outside shared memory",
    ),
    "steps of a transposed operand as of the other": ("hgemm-v17_one_wave", {"(kTN ? 2 : 128)": "2"}, WRONG),
    "an operand that is not transposed": (
        "hgemm-v17_one_wave",
        {
            "wgmma<T, !kTN>(sums[i], rows + i * (kSlab * sizeof(T) / 16) + step * 2, cols + step * (kTN ? 2 : 128),\n"
            "                       !first || step > 0);": (
                "wgmma<T, false>(sums[i], rows + i * (kSlab * sizeof(T) / 16) + step * 2, cols + step * 2, "
                "!first || step > 0);"
            )
        },
        WRONG,
    ),
    "a stage of a lone block, released while products read it": (
        "hgemm-v17_one_wave",
        {"if (step > 0) release(before);": "release(ring.stage);"},
        "changed while wgmma read it",
    ),
    "a row of y at the stride of x": (
        "rmsnorm-v02_vectors",
        {"p.y + row * «p.y_stride»": "p.x_stride"},
        "outside operand y",
    ),
    "eps forgotten": ("rmsnorm-v02_vectors", {" + «p.eps»": "0"}, WRONG),
    "sums of a row's warps not waited for": (
        "rmsnorm-v02_vectors",
        {"«__syncthreads();»\n  const int span": ""},
        WRONG,
    ),
}


def test_a_mistake_is_switched_where_it_is_marked_also_within_another() -> None:
    mistakes = {
        1: {"go(a + b)": "go(0)", "absent": ""},
        2: {"a + «b»": "c"},
        3: {"\n«stop();»": ""},
        4: {"go(a + b)": "no()"},
    }
    text, found = switched("stop();\nif (x) go(a + b);\nstop();\n", mistakes)
    assert text == (
        "stop();\n"
        "if (x) (emulator::mistake == 1 ? (go(0)) : emulator::mistake == 4 ? (no()) : "
        "(go(a + (emulator::mistake == 2 ? (c) : (b)))));\n"
        "{ if (emulator::mistake == 3) {  } else { stop(); } }\n"
    )
    assert found == {"go(a + b)", "a + «b»", "\n«stop();»"}
    with pytest.raises(AssertionError, match="mistakes overlap in 'a \\+ b'"):
        switched("f(a + b)", {1: {"a +": ""}, 2: {"+ b": ""}})


def number_of(how: str) -> int:
    """What switches a mistake on in the library of its file."""
    file = BROKEN[how][0]
    return [other for other, (its, *_) in BROKEN.items() if its == file].index(how) + 1


@pytest.mark.parametrize(
    ("file", "how"),
    mostly_slow([(file, how) for how, (file, *_) in BROKEN.items()], lambda pair: pair[0] in ALWAYS),
    ids=list(BROKEN),
)
def test_a_broken_kernel_is_seen(file: str, how: str, library: Callable[[str], Path]) -> None:
    kernel, error = FILES[file], BROKEN[how][2]
    op, function = ops.get(kernel.op), Emulated(kernel, library(file), number_of(how))
    cases = [case for case in op.cases(kernel, sizes(kernel)) if case.dtype == "float16"]
    tried = (worst(function, case) for _ in range(SCHEDULES) for case in cases)
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


FORBIDDEN = {
    1: "63 wait for ever at __syncthreads(), 1 have ended",
    2: "while lanes of its warp wait at",
    3: "ldmatrix: an address is no multiple of 16 bytes",
    4: "ldmatrix: an address is outside shared memory",
    5: "misaligned access at forbidden.cu:",
    6: "of an array at forbidden.cu:",
    7: "outside its dynamic shared memory",
    8: "outside operand out",
    9: "writes operand a, which is an input",
    10: "cp.async: an address is no multiple of 16 bytes",
    11: "cp.async: an address is outside the operands",
    12: "cp.async: an address is no multiple of 16 bytes",
    13: "ends while its cp.async are in flight",
    16: "65536 bytes of dynamic shared memory, 49152 are allowed",
}


@pytest.fixture(scope="module")
def forbidden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], torch.Tensor]:
    source = Path(__file__).parent / "emulator" / "forbidden.cu"
    kernel = Kernel("hgemm", "forbidden", "cuda", source)
    function = Emulated(kernel, compiled(kernel, tmp_path_factory.mktemp("forbidden")))

    def run(mistake: int) -> torch.Tensor:
        out = torch.zeros(8, 64, dtype=torch.float16)
        function(out, torch.ones(64, mistake, dtype=torch.float16)[:8], torch.ones(mistake, 64, dtype=torch.float16))
        return out.flatten()[:64]

    return run


@pytest.mark.parametrize("mistake", FORBIDDEN)
def test_what_a_gpu_does_not_allow_is_an_error(mistake: int, forbidden: Callable[[int], torch.Tensor]) -> None:
    with pytest.raises(KernelError) as caught:
        forbidden(mistake)
    assert FORBIDDEN[mistake] in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def anything(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    kernel = Kernel("test", "anything", "cuda", Path(__file__).parent / "emulator" / "anything.cu")
    return Emulated(kernel, compiled(kernel, tmp_path_factory.mktemp("anything")))


def anything_takes() -> dict[str, torch.Tensor]:
    return {
        "out": torch.empty(4),
        "state": torch.full((2, 6), 10)[:, :4],
        "bytes": torch.tensor([1, 2, 3, 200], dtype=torch.uint8).view(torch.float8_e4m3fn),
        "deep": torch.arange(8, dtype=torch.int32).reshape(1, 1, 1, 1, 1, 1, 1, 8)[..., ::2],
    }


def test_an_op_is_called_as_its_schema_says(anything: Emulated) -> None:
    tensors = anything_takes()
    anything(*tensors.values())
    assert tensors["out"].tolist() == [1, 3, 5, 203] and tensors["state"].tolist() == [[10] * 4, [11] * 4]
    anything(*tensors.values(), twice=True, scale=1.0)
    assert tensors["out"].tolist() == [1, 6, 11, 212] and tensors["state"].tolist() == [[10] * 4, [12] * 4]


@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        (1, "writes operand bytes, which is an input"),
        (2, "touches memory outside operand deep"),
        (3, "the kernel wrote outside operand state"),
    ],
)
def test_an_operand_is_called_as_in_the_schema(mistake: int, why: str, anything: Emulated) -> None:
    with pytest.raises(KernelError, match=why):
        anything(*anything_takes().values(), mistake=mistake)


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        ("out", torch.empty(4, 2)[:, 0], "anything: out must be contiguous, but dimension 0 has stride 2"),
        ("deep", torch.empty(4), "anything: deep must have 8 dimensions, got 1"),
        ("bytes", torch.empty(4), "anything: bytes must be float8_e4m3fn, got float32"),
    ],
)
def test_what_an_op_does_not_take_is_said(name: str, tensor: torch.Tensor, why: str, anything: Emulated) -> None:
    with pytest.raises(KernelError, match=why):
        anything(*(anything_takes() | {name: tensor}).values())


def test_an_asynchronous_copy_has_not_arrived_before_it_is_waited_for(forbidden) -> None:
    assert forbidden(14)[:3].isnan().tolist() == [False, True, False]


def test_shared_memory_is_nan_until_it_is_written(forbidden) -> None:
    out = forbidden(15)
    assert bool(out[:8].isnan().all()) and not bool(out[8:].isnan().any())


def test_a_missing_barrier_is_seen_and_one_that_is_there_suffices(forbidden) -> None:
    backwards = torch.arange(63, -1, -1, dtype=torch.float16)
    assert all(bool(torch.equal(forbidden(18), backwards)) for _ in range(10))
    assert not any(bool(torch.equal(forbidden(17), backwards)) for _ in range(10))
    assert len({tuple(forbidden(17).nan_to_num(-1).tolist()) for _ in range(10)}) > 5  # the schedules differ
