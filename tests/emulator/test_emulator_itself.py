"""The emulator: what a GPU does not allow is an error, an op is called as its schema says, and mistakes are switched on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minfer.build import toolchain
from minfer.ops import Kernel
from tests.emulator import Emulated, KernelError, compiled, switched

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(toolchain.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch"),
]


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


@pytest.mark.parametrize("block", [20, 23])
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
