"""`minfer.embedding`: an op like PyTorch's own, and what becomes of ids that are out of range."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minfer import build, embedding, ops
from minfer.build import toolchain
from tests.emulator import Emulated, compiled

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ABSURD = [-1, 50, -(2**31), 2**31 - 1]


@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (2, 3), (), (0,)])
def test_it_gathers(shape, dtype, ids_dtype):
    table, ids = torch.randn(50, 24).to(dtype), torch.randint(0, 50, shape).to(ids_dtype)
    assert torch.equal(embedding(ids, table), torch.nn.functional.embedding(ids, table))


def test_tensors_that_lie_badly():
    wide, ids = torch.randn(50, 40).half(), torch.tensor([[3, 0, 49], [7, 7, 1]])
    for table in (wide[:, 8:32], wide[:, 3:27], wide[:, ::2], wide.flip(0)[:, :7], wide[:1].expand(50, -1)):
        for where in (ids, ids.t(), ids[:, ::2], ids[:1].expand(4, -1)):
            assert torch.equal(embedding(where, table), table[where])


@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
def test_an_id_out_of_range_gives_nan(ids_dtype):
    absurd = [*ABSURD, 2**62] if ids_dtype == torch.int64 else ABSURD
    ids, table = torch.tensor([0, *absurd, 49], dtype=ids_dtype), torch.randn(50, 24)
    found = embedding(ids, table)
    assert bool(found[1:-1].isnan().all()) and torch.equal(found[[0, -1]], table[[0, -1]])
    assert bool(embedding(ids, table[:0]).isnan().all())


@pytest.mark.skipif(toolchain.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch")
@pytest.mark.parametrize("name", ["v01_naive", "v02_vectors"])
def test_no_kernel_reads_beyond_the_table(name: str, tmp_path: Path):
    """The emulator's guards would see it."""
    kernel = ops.get("embedding").kernels[name]
    function, table = Emulated(kernel, compiled(kernel, tmp_path)), torch.randn(50, 24).half()
    for ids in (torch.tensor([0, *ABSURD, 49, 2**62]), torch.tensor([0, *ABSURD, 49], dtype=torch.int32)):
        y = torch.zeros(len(ids), 24, dtype=torch.float16)
        function(y, ids, table)
        right = (ids >= 0) & (ids < 50)
        assert torch.equal(y[right], table[[0, 49]]) and bool(y[~right].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["v01_naive", "v02_vectors", "triton_rows"])
def test_gpu_kernels_give_nan_for_an_id_out_of_range(name: str):
    device = torch.device("cuda")
    function = build.function(
        ops.get("embedding").kernels[name], toolchain.arch_of(torch.cuda.get_device_capability(device))
    )
    table, ids = torch.randn(50, 24, device=device), torch.tensor([0, *ABSURD, 49, 2**62], device=device)
    y = torch.zeros(len(ids), 24, device=device)
    function(y, ids, table)
    right = (ids >= 0) & (ids < 50)
    assert torch.equal(y[right], table[[0, 49]]) and bool(y[~right].isnan().all())


def test_it_is_an_op_like_pytorchs_own():
    torch.library.opcheck(torch.ops.minfer.embedding.default, (torch.tensor([3, 4]), torch.randn(6, 24)))


def test_it_compiles_whole_and_for_any_shape():
    compiled = torch.compile(
        lambda ids, table: embedding(ids, table) + 1, backend="aot_eager", fullgraph=True, dynamic=True
    )
    table = torch.randn(50, 24)
    for count in (6, 7):
        ids = torch.randint(0, 50, (count,))
        assert torch.equal(compiled(ids, table), table[ids] + 1)


def test_mistakes_are_a_sentence_each():
    ids, table = torch.tensor([1, 2]), torch.randn(6, 24)
    for mine, theirs, said in (
        (ids, table[0], r"takes table of \(vocab, hidden\), got \(24,\)"),
        (ids, table.double(), "takes table of float32, float16 or bfloat16, got torch.float64"),
        (ids.float(), table, "takes ids of int64 or int32, got torch.float32"),
        (ids, table.to("meta"), "takes ids on the device of table, meta, got cpu"),
    ):
        with pytest.raises(ValueError, match=f"^minfer.embedding {said}$"):
            embedding(mine, theirs)
    with pytest.raises(RuntimeError, match=r"^minfer.embedding has no backward: call it under torch.no_grad\(\)"):
        embedding(ids, table.requires_grad_())
