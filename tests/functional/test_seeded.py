"""`minfer.sample` on a GPU of Hopper: its kernel draws the numbers that `torch.rand` would draw, from PyTorch's generators."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minfer import ops, sample
from minfer.build import toolchain
from minfer.functional import library, prepared
from minfer.functional.sample import MOST_LOGITS, _reserve, _sample_seeded_op
from minfer.ops import PACKAGE
from minfer.ops.sample import choose
from tests.emulator import Emulated, compiled
from tests.emulator.mistakes import SEEDED
from tests.functional.test_sample import CHOICES, chi_square, kept_probabilities, logits

SOURCE = """
#include "ops/sample/philox.h"
extern "C" void words(uint32_t* x, uint32_t low, uint32_t high) {
  const minfer::Words found = minfer::philox({x[0], x[1], x[2], x[3]}, low, high);
  x[0] = found.x, x[1] = found.y, x[2] = found.z, x[3] = found.w;
}
extern "C" float uniform(uint64_t seed, uint64_t offset, uint32_t row) { return minfer::uniform_of(seed, offset, row); }
"""
# From the authors' known answers (Random123, kat_vectors): counter, key, result.
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.fixture(scope="module")
def philox(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("philox")
    (folder / "philox.cpp").write_text(SOURCE)
    command = ["g++", "-std=c++20", "-shared", "-fPIC", "-I", str(PACKAGE), "philox.cpp", "-o", "philox.so"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no g++")
    found = ctypes.CDLL(str(folder / "philox.so"))
    found.uniform.argtypes, found.uniform.restype = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32), ctypes.c_float
    return found


def test_its_numbers_are_those_that_the_authors_publish(philox: ctypes.CDLL) -> None:
    for counter, key, result in KNOWN:
        words = (ctypes.c_uint32 * 4)(*counter)
        philox.words(words, *map(ctypes.c_uint32, key))
        assert tuple(words) == result


def test_numbers_are_uniform_and_depend_on_seed_offset_and_row(philox: ctypes.CDLL) -> None:
    u = torch.tensor([philox.uniform(5, 0, row) for row in range(20000)])
    assert bool(((u >= 0) & (u < 1)).all())
    statistic, most = chi_square((u * 64).int(), torch.full((64,), 1 / 64))
    assert statistic < most
    seen = {
        philox.uniform(*place) for place in ((5, 0, 0), (6, 0, 0), (5 + (1 << 32), 0, 0), (5, 4, 0), (5, 1 << 34, 0))
    }
    assert len(seen | {philox.uniform(5, 0, 1)}) == 6


class Generator:
    """What `_reserve` calls of PyTorch's."""

    def __init__(self, seed: int) -> None:
        self.seed, self.offset = seed, 8

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def test_a_seed_is_handed_over_as_64_bits() -> None:
    for seed in (0, 7, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
        generator: Any = Generator(seed)
        found, offset = _reserve(generator)
        assert found % (1 << 64) == seed and -(1 << 63) <= found < 1 << 63
        assert (offset, generator.offset) == (8, 12)


def test_scalars_that_decide_nothing_are_handed_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is prepared once for all seeds."""
    seen: list[tuple[int, int]] = []

    def kernel(tokens: torch.Tensor, x: torch.Tensor, u: torch.Tensor, **scalars: Any) -> None:
        seen.append((scalars["seed"], scalars["offset"]))
        tokens.zero_()

    with pytest.raises(
        ValueError, match=r"^torch\.ops\.minfer\.sample_seeded takes logits on a GPU with sm_90, got cpu$"
    ):
        torch.ops.minfer.sample_seeded(logits(), 1, 0, 1.0, 0, 1.0, 0.0)
    monkeypatch.setattr(library, "_entry", lambda op, entry, device: kernel)
    monkeypatch.setattr(library, "capability_of", lambda tensor: (9, 0))
    prepared.forget()
    x = logits()
    for number in range(5):
        _sample_seeded_op(x, number, 4 * number, 1.0, 0, 1.0, 0.0)
    assert [x for x in seen if x[0]][-4:] == [(number, 4 * number) for number in range(1, 5)]
    runs = [run for of_op in prepared._remembered for runs in of_op.values() for run in runs]
    assert len(runs) == 1 and prepared._never not in runs
    prepared.forget()


def is_right(draw: Emulated, philox: ctypes.CDLL, seed: int, offset: int) -> bool:
    """Whether the kernel's entry draws the right numbers, and the tokens that belong to them."""
    x, tokens, u = logits(3, 700), torch.full((3,), -1, dtype=torch.int32), torch.full((3,), -1.0)
    settings = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.0}
    draw(tokens, x, u, seed=seed if seed < 1 << 63 else seed - (1 << 64), offset=offset, **settings)
    wanted = torch.tensor([philox.uniform(seed, offset, row) for row in range(3)])
    return u.equal(wanted) and tokens.equal(choose(x, wanted, **settings).int())


@pytest.mark.slow
@pytest.mark.skipif(toolchain.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch")
def test_the_kernel_draws_by_its_seed_when_emulated_and_mistakes_are_seen(philox: ctypes.CDLL, tmp_path: Path) -> None:
    kernel = ops.get("sample").kernels["v04_seeded"]
    library = compiled(kernel, tmp_path, {i: {name: edit} for i, (name, edit) in enumerate(SEEDED[1].items(), 1)})
    entry = replace(kernel, name="v04_seeded_draw")
    for seed, offset in ((0, 0), (7, 4), (1 << 40, 1 << 36), ((1 << 64) - 1, 8)):
        assert is_right(Emulated(entry, library), philox, seed, offset)
    for mistake in range(1, len(SEEDED[1]) + 1):
        assert not is_right(Emulated(entry, library, mistake), philox, 7, 4)


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a GPU of Hopper"
)


@pytest.mark.gpu
@needs_hopper
def test_tokens_are_those_of_the_numbers_that_torch_draws() -> None:
    for seed, rows, vocab in ((0, 1, 100), (1, 16, 32000), (1 << 40, 300, 7), ((1 << 64) - 1, 5000, 60)):
        x = torch.randn(rows, vocab, device="cuda")
        for generator in (None, torch.Generator("cuda")):
            (torch.cuda if generator is None else generator).manual_seed(seed)
            wanted = []
            for _ in range(4):
                u = torch.rand(rows, device="cuda", generator=generator)
                wanted.append(torch.ops.minfer.sample(x, u, 0.8, 20, 0.9, 0.0))
            after = torch.rand(3, device="cuda", generator=generator)
            (torch.cuda if generator is None else generator).manual_seed(seed)
            for tokens in wanted:
                assert sample(x, 0.8, 20, 0.9, generator=generator).equal(tokens)
            assert torch.rand(3, device="cuda", generator=generator).equal(after)


@pytest.mark.gpu
@needs_hopper
def test_the_kernel_draws_what_torch_rand_draws() -> None:
    for rows, offset in ((1, 0), (257, 8), (1 << 15, 4), (7, 1 << 34)):
        generator = torch.Generator("cuda").manual_seed(9)
        generator.set_offset(offset)
        _, u = torch.ops.minfer.sample_seeded(torch.zeros(rows, 8, device="cuda"), 9, offset, 1.0, 0, 1.0, 0.0)
        assert u.equal(torch.rand(rows, device="cuda", generator=generator))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("choice", CHOICES)
def test_tokens_come_as_often_as_they_should(choice: tuple[float, int, float, float]) -> None:
    row, draws = logits(1, 60), 20000
    assert row.numel() * draws <= MOST_LOGITS
    tokens = sample(row.cuda().expand(draws, -1), *choice, generator=torch.Generator("cuda").manual_seed(1))
    statistic, most = chi_square(tokens.cpu(), kept_probabilities(row[0], *choice))
    assert statistic < most


@pytest.mark.gpu
@needs_hopper
def test_each_replay_of_a_graph_draws_other_numbers() -> None:
    x = torch.zeros(64, 1000, device="cuda")
    for _ in range(3):
        sample(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(x)
    # Before a capture, PyTorch writes the seed to the GPU in the stream that captures, and nothing orders this before the first
    # replay in another stream. On a busy GPU that replay would draw with the old seed.
    torch.cuda.synchronize()
    torch.cuda.manual_seed(3)
    found = []
    for _ in range(4):
        graph.replay()
        found.append(tokens.clone())
    assert all(not found[i].equal(found[j]) for i in range(4) for j in range(i))
    torch.cuda.manual_seed(3)
    assert all(sample(x).equal(each) for each in found), "a seed has the same tokens with and without a graph"
    eager = [sample(x) for _ in range(4)]
    assert all(not eager[i].equal(eager[j]) for i in range(4) for j in range(i))


@pytest.mark.gpu
@needs_hopper
def test_who_has_to_see_the_draw_sees_it() -> None:
    x, seen = torch.zeros(4, 100, device="cuda"), []

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    for _ in range(3):
        sample(x)
    with Functions():
        sample(x)
    assert any("uniform_" in each for each in seen)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: sample(x))(x)
    assert "uniform" in graph.code and "sample_seeded" not in graph.code
    with pytest.raises(RuntimeError, match="generator"):
        sample(x, generator=torch.Generator("cpu"))
