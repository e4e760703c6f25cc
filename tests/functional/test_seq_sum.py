"""`seq_sum`: what the parametrised tests of all kernels do not see, and `minfer.seq_sum`."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minfer import build, ops, seq_sum
from minfer.bench.verify import verify
from minfer.build import toolchain
from minfer.ops import offsets
from tests.emulator import Emulated, compiled

OP = ops.get("seq_sum")
ON_CPU = [kernel for kernel in OP.kernels.values() if kernel.backend == "cpp"]
DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [0, 1, 5, 31, 32, 33, 0, 64, 100, 0]


def by_definition(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Of a padded batch, in fp64."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for row, length in enumerate(lengths):
        y[row, :length] = x[row, :length].double().sum()
    return y.to(x.dtype)


def batch(lengths: list[int], dtype: torch.dtype, room: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """A padded x, with NaN behind the lengths, and these."""
    longest = max(lengths) + room
    x = torch.randn(len(lengths), longest).to(dtype)
    used = torch.tensor(lengths, dtype=torch.int32)
    return x.masked_fill(torch.arange(longest) >= used[:, None], math.nan), used


def pack(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_and_packed_give_the_definition(dtype):
    x, used = batch(LENGTHS, dtype)
    expected = by_definition(x, LENGTHS)
    torch.testing.assert_close(seq_sum(x, lengths=used), expected)
    cu_seqlens = torch.tensor(offsets(LENGTHS), dtype=torch.int32)
    torch.testing.assert_close(seq_sum(pack(x, LENGTHS), cu_seqlens=cu_seqlens), pack(expected, LENGTHS))
    tail = torch.cat((pack(x, LENGTHS), x.new_full((5,), math.nan)))
    assert torch.equal(seq_sum(tail, cu_seqlens=cu_seqlens)[-5:], x.new_zeros(5))
    whole = torch.randn(4, 50).to(dtype)
    torch.testing.assert_close(seq_sum(whole), by_definition(whole, [50] * 4))


@pytest.mark.parametrize("kernel", ON_CPU, ids=lambda kernel: kernel.name)
def test_lengths_that_contradict_the_tensor_are_brought_back(kernel):
    function = build.function(kernel)
    x, y = torch.ones(3, 4), torch.full((3, 4), math.nan)
    function(y, x, torch.tensor([-7, 2**31 - 1, -(2**31)], dtype=torch.int32))
    assert y.tolist() == [[0.0] * 4, [4.0] * 4, [0.0] * 4]
    x, y = torch.ones(6), torch.full((6,), math.nan)
    function(y, x, torch.tensor([3, 2, 2**31 - 1, 4], dtype=torch.int32))
    assert not y.isnan().any()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,)])
def test_nothing_to_sum(shape):
    of = {"cu_seqlens": torch.zeros(3, dtype=torch.int32)} if len(shape) == 1 else {}
    assert seq_sum(torch.empty(shape), **of).shape == shape
    assert seq_sum(torch.ones(4), cu_seqlens=torch.zeros(1, dtype=torch.int32)).tolist() == [0.0] * 4


def test_tensors_that_lie_badly():
    wide = torch.randn(9, 40)
    for x in (wide[1:7, 3:19], wide[:, ::2], wide.t(), wide[:1].expand(4, -1), wide.flip(0)):
        torch.testing.assert_close(seq_sum(x), by_definition(x, [x.shape[1]] * len(x)))
    step = torch.tensor([0, 9, 2, 9, 7, 9], dtype=torch.int32)[::2]
    torch.testing.assert_close(seq_sum(torch.ones(7), cu_seqlens=step), torch.tensor([2.0] * 2 + [5.0] * 5))


def test_it_is_an_op_like_pytorchs_own():
    used = torch.tensor([3, 0, 24], dtype=torch.int32)
    torch.library.opcheck(torch.ops.minfer.seq_sum.default, (torch.randn(3, 24), used))
    torch.library.opcheck(torch.ops.minfer.seq_sum.default, (torch.randn(24), used.sort().values))


def test_mistakes_are_a_sentence_each():
    x, used = torch.randn(3, 24), torch.tensor([3, 0, 24], dtype=torch.int32)
    for call, said in (
        (lambda: seq_sum(x, lengths=used, cu_seqlens=used), "cu_seqlens, for packed sequences, or lengths, for padded"),
        (lambda: seq_sum(x, cu_seqlens=used), r"x of \(tokens,\) with cu_seqlens, got \(3, 24\)"),
        (lambda: seq_sum(x[0]), r"x of \(batch, longest\), got \(24,\)"),
        (lambda: seq_sum(x.half()), "x of float32 or bfloat16, got torch.float16"),
        (lambda: seq_sum(x, lengths=used[:2]), r"lengths of int32 and the shape \(3,\), got torch.int32, \(2,\)"),
        (lambda: seq_sum(x, lengths=used.long()), r"lengths of int32 and the shape \(3,\), got torch.int64"),
        (lambda: seq_sum(x[0], cu_seqlens=used[:0]), "cu_seqlens whose ends is at least 1, got 0$"),
        (lambda: seq_sum(x, lengths=used.to("meta")), "lengths on the device of x, cpu, got meta"),
    ):
        with pytest.raises(ValueError, match=f"^minfer.seq_sum takes {said}"):
            call()
    with pytest.raises(RuntimeError, match=r"^minfer.seq_sum has no backward"):
        seq_sum(x.requires_grad_())


# A kernel with a length compiled in, in a file of its own: what a specialiser writes.
def specialised(folder: Path, file: str, include: str, launch: str) -> ops.Kernel:
    source = folder / file
    source.write_text(f'#include "ops/seq_sum/{include}"\nMINFER_SEQ_SUM(seq_sum_{source.stem}, minfer::{launch})\n')
    like = OP.kernels["v02_block" if source.suffix == ".cu" else "cpu_linear"]
    return replace(like, name=source.stem, source=source)


def shapes_around(length: int) -> list[dict[str, int]]:
    """As long as what is compiled in, shorter, and longer."""
    return [{"batch": 5, "longest": longest} for longest in (length, length // 2 + 3, 2 * length + 5)]


@pytest.mark.slow  # compiles it; tests/specialise/test_recipes.py has another that is compiled so
def test_a_length_compiled_into_a_cpu_kernel(tmp_path):
    kernel = specialised(tmp_path, "cpu_of_100.cpp", "linear.h", "launch_linear<100>")
    function = build.function(kernel)
    for case in OP.cases(kernel, shapes_around(100)):
        verify(OP, case, kernel, function, torch.device("cpu"), None, seed=1)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(toolchain.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch")
@pytest.mark.parametrize(("threads", "longest"), [(32, 64), (64, 600), (256, 2048)])
def test_a_length_compiled_into_a_cuda_kernel(tmp_path, threads, longest):
    launch = f"launch_block<{threads}, {longest}>"
    kernel = specialised(tmp_path, f"v02_of_{longest}.cu", "block.cuh", launch)
    function = Emulated(kernel, compiled(kernel, tmp_path, {}))
    for case in OP.cases(kernel, shapes_around(longest)):
        verify(OP, case, kernel, function, torch.device("cpu"), None, seed=1)
