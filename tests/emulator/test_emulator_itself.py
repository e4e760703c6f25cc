"""The emulator: what a GPU does not allow is an error, an op is called as its schema says, and mistakes are switched on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from minfer import ops
from minfer.build import toolchain
from minfer.fingerprint import _meaning
from minfer.ops import PACKAGE, Kernel
from tests.emulator import Emulated, KernelError, compiled, planted
from tests.emulator.mistakes import (
    BROKEN,
    FP8_PARTS,
    GATED,
    KEY_PARTS,
    SCORED,
    SEEDED,
    SINKS,
    WHOLE,
    WIDE,
    WIDE_PARTS,
    WIDER,
)
from tests.emulator.planting import IF_FALSE, IF_TRUE, MARKER, Edit, check_markers, plant

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(toolchain.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch"),
]


KERNEL = """stop();  // all have come  //@ stopped
if (x(1) && y) go(a + b);  //@ sum
//@ alone
call(first,  // of two
     second);
"""


def test_a_mistake_is_switched_on_where_its_marker_is() -> None:
    mistakes: dict[int, dict[str, Edit]] = {
        1: {"sum": "go(0);", "elsewhere": ""},
        2: {"sum": ("a + b", "c")},
        3: {"stopped": ""},
        4: {"sum": IF_FALSE, "alone": "call(2);"},
    }
    assert plant(KERNEL, mistakes) == (
        "{ if (emulator::mistake == 3) {  } else { stop(); } }  // all have come  //@ stopped\n"
        "{ if (emulator::mistake == 1) { go(0); } else { if ((emulator::mistake == 4 ? (false) : (x(1) && y))) "
        "go((emulator::mistake == 2 ? (c) : (a + b))); } }  //@ sum\n"
        "//@ alone\n"
        "{ if (emulator::mistake == 4) { call(2); } else { call(first,  // of two\n     second); } }\n"
    )


@pytest.mark.parametrize(
    ("edits", "why"),
    [
        ({1: {"sum": ("a +", "")}, 2: {"sum": ("+ b", "")}}, r"mistakes overlap in 'a \+ b'"),
        ({1: {"sum": ("c", "d")}}, "the line of the marker //@ sum must have 'c' once: if"),
        ({1: {"sum": ("a + b", "a + b")}}, "the mistake at the marker //@ sum changes nothing"),
        ({1: {"stopped": IF_TRUE}}, "the line of the marker //@ stopped has no condition: stop"),
    ],
)
def test_a_mistake_that_does_not_fit_its_line_fails(edits: dict[int, dict[str, Edit]], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        plant(KERNEL, edits)


def test_a_marker_that_is_missing_or_twice_there_fails() -> None:
    check_markers([KERNEL, "//@ twice\n"], ["sum", "alone", "twice"], "v01.cu")
    for name, times, text in [("gone", 0, ""), ("sum", 2, "go();  //@ sum\n")]:
        with pytest.raises(
            AssertionError, match=f"of v01.cu is at the marker //@ {name}, which is {times} times there"
        ):
            check_markers([KERNEL, text], [name], "v01.cu")


def test_all_mistakes_find_their_markers_and_all_markers_have_mistakes() -> None:
    kernels = {f"{kernel.op}-{kernel.source.stem}": kernel for kernel in ops.every_kernel(["cuda"])}
    used = set()
    for file, edits in [(file, edits) for file, edits, _ in BROKEN.values()] + [
        WHOLE,
        KEY_PARTS,
        FP8_PARTS,
        SCORED,
        SEEDED,
        SINKS,
        GATED,
        WIDE,
        WIDE_PARTS,
        WIDER,
    ]:
        before, after = planted(kernels[file], {}), planted(kernels[file], {1: edits})
        assert before != after
        for path, text in before.items():
            used |= {(path, marker[1]) for marker in MARKER.finditer(text) if marker[1] in edits}
    sources = [path for pattern in ("*.cu", "*.cuh", "*.h") for path in PACKAGE.rglob(pattern)]
    assert {(path, marker[1]) for path in sources for marker in MARKER.finditer(path.read_text())} == used


def test_a_marker_is_no_part_of_a_fingerprint(tmp_path: Path) -> None:
    with_markers, without = tmp_path / "with.cu", tmp_path / "without.cu"
    with_markers.write_text(KERNEL)
    without.write_text("stop();  // all have come\nif (x(1) && y) go(a + b);\ncall(first,  // of two\n     second);\n")
    assert _meaning(with_markers) == _meaning(without)


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
    19: "a block of 257 threads, which may have 255 registers each",
    21: "a block of 320 threads, its __launch_bounds__ allow 256",
    22: "a block of 416 threads, which may have 144 registers each",  # 13 warps: one scheduler has four of 18 times 256
    32: "TMA: a box starts at no multiple of 16 bytes in global memory",
    24: "the registers per thread that the block's warpgroups request add up to 512, those of the launch to 504",
}


@pytest.fixture(scope="module")
def forbidden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], torch.Tensor]:
    source = Path(__file__).resolve().parents[1] / "emulator" / "forbidden.cu"
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


@pytest.mark.parametrize("block", [20, 23, 25])
def test_a_block_that_has_registers_runs(block: int, forbidden: Callable[[int], torch.Tensor]) -> None:
    forbidden(block)


@pytest.fixture(scope="module")
def anything(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    kernel = Kernel("test", "anything", "cuda", Path(__file__).resolve().parents[1] / "emulator" / "anything.cu")
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


@pytest.fixture(scope="module")
def counters(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[int]]:
    kernel = Kernel("test", "counters", "cuda", Path(__file__).resolve().parents[1] / "emulator" / "counters.cu")
    library = compiled(kernel, tmp_path_factory.mktemp("counters"))

    def run(launches: Sequence[tuple[int, int]], mistake: int = 0) -> list[int]:
        """Which counters launches by (capture, stream) have: those that come first are number 0, the next others 1."""
        addresses = torch.empty(len(launches), dtype=torch.int64)
        Emulated(kernel, library, mistake)(addresses, *torch.tensor(launches).t().contiguous())
        found: dict[int, int] = {}
        return [found.setdefault(address, len(found)) for address in addresses.tolist()]

    return run


def test_each_stream_and_capture_has_counters_of_its_own(counters: Callable[..., list[int]]) -> None:
    assert counters([(0, 1), (0, 2), (5, 1), (5, 2), (6, 1), (0, 1), (5, 1)]) == [0, 1, 2, 3, 4, 0, 2]
    assert counters([(-1, 0), (7, 1), (0, 0)]) == [0, 1, 0]  # -1: CUDA does not say whether the stream is captured
    assert counters([(0, stream) for stream in range(200)]) == list(range(200))


def test_after_4096_captures_the_oldest_counters_are_used_again(counters: Callable[..., list[int]]) -> None:
    launches = [(capture, 1) for capture in range(4098)] + [(4096, 1), (2, 1), (0, 1), (4098, 1)]
    # 3: no mistake, but a library of its own, without the streams of other tests
    assert counters(launches, 3) == [*range(4097), 1, 4096, 2, 0, 2]


@pytest.mark.parametrize(
    ("mistake", "why"),
    [(1, "the kernel left a counter that is not zero"), (2, "touches memory outside its counters")],
)
def test_what_a_kernel_must_not_do_with_counters(mistake: int, why: str, counters: Callable[..., list[int]]) -> None:
    with pytest.raises(KernelError, match=why):
        counters([(0, 1)], mistake)
