"""Memory that two processes share: what the one puts there is what the other sees, and nothing beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from minfer.bench.arena import Arena, attach, copy_bits, guarded_bytes, view
from minfer.bench.verify import same_bits
from minfer.process import fork_server

CPU = torch.device("cpu")
TENSORS = [
    torch.arange(12, dtype=torch.float32).view(3, 4),
    torch.arange(12, dtype=torch.float32).view(4, 3).t(),
    torch.randn(5, 7).to(torch.bfloat16),
    torch.randn(1, 1).to(torch.float16),
]


def arena() -> Arena:
    size = sum(tensor.numel() * tensor.element_size() for tensor in TENSORS)
    return Arena(guarded_bytes(size, len(TENSORS)), CPU)


def test_a_copy_has_the_values_and_strides_and_is_found_by_its_description() -> None:
    shared = arena()
    copies = [shared.copy(tensor) for tensor in TENSORS]
    memory = attach(shared.handle)
    for tensor, copy in zip(TENSORS, copies, strict=True):
        seen = view(memory, json.loads(json.dumps(shared.describe(copy))))
        assert torch.equal(seen, tensor) and seen.stride() == tensor.stride() and seen.dtype == tensor.dtype
        seen.zero_()
        assert not copy.any() and copy.data_ptr() != seen.data_ptr()
    assert not shared.is_breached()


def test_another_process_writes_into_it(log: Path) -> None:
    shared = arena()
    copy = shared.copy(TENSORS[0])
    words = json.dumps([shared.handle, shared.describe(copy)])
    with log.open("w") as file:
        assert fork_server.start("tests.answering.fills", [words], shared.fds, file.fileno()).wait() == 0, (
            log.read_text()
        )
    assert bool((copy == 7).all()) and not shared.is_breached()
    shared.close()
    assert bool((copy == 7).all())  # the memory outlives its file descriptor
    with pytest.raises(OSError):
        os.fstat(shared.fds[0])


@pytest.mark.parametrize("place", [-1, 12])
def test_what_is_written_beside_a_tensor_shows(place: int) -> None:
    shared = arena()
    copy = shared.copy(TENSORS[0])
    copy.as_strided((1,), (1,), copy.storage_offset() + place).fill_(1)
    assert shared.is_breached()
    shared.clear()
    assert not shared.is_breached()


@pytest.mark.parametrize("place", [-1, 5])
def test_a_byte_beside_a_tensor_of_odd_size_shows(place: int) -> None:
    shared = Arena(1 << 20, CPU)
    copies = [shared.copy(torch.zeros(5, dtype=torch.uint8)) for _ in range(3)]
    assert not shared.is_breached()
    copies[1].as_strided((1,), (1,), copies[1].storage_offset() + place).fill_(1)
    assert shared.is_breached()


def test_an_image_brings_everything_back() -> None:
    shared = arena()
    copy = shared.copy(TENSORS[0])
    image = shared.image()
    view(image, shared.describe(copy)).fill_(3)
    copy.as_strided((1,), (1,), copy.storage_offset() - 1).fill_(1)
    shared.restore(image)
    assert bool((copy == 3).all()) and not shared.is_breached()


@pytest.mark.parametrize("nbytes", [0, 1 << 30])
def test_its_memory_keeps_its_size(nbytes: int) -> None:
    arena = Arena(1 << 20, torch.device("cpu"))
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fds[0], nbytes)
    arena.close()


def test_what_does_not_fit_is_refused() -> None:
    shared = arena()
    with pytest.raises(MemoryError, match="do not fit"):
        for _ in range(100):
            shared.copy(TENSORS[0])


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]
)
def test_copies_have_the_same_bits_and_strides(dtype: torch.dtype) -> None:
    """Those of NaN too, of which there are many."""
    size = dtype.itemsize * 6 * 10
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    values[values > 127] = 255  # in the last two bytes of a float: NaN
    made = values.view(dtype).view(6, 10).t()
    found = copy_bits(made)
    assert found.stride() == made.stride() and same_bits(found, made)
    to = torch.zeros(10, 6, dtype=dtype)
    assert copy_bits(made, to) is to and same_bits(to, made)
