"""Links between the calls of a block (`minfer.worker.links`): what they change, and that the judge notices a block without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minfer import ops
from minfer.bench.arena import Arena, guarded_bytes
from minfer.bench.integrity import Dishonest
from minfer.ops import DTYPES, Case, given, out
from minfer.ops.tensors import Spec, integers
from minfer.worker.isolated import Runner, nothing
from minfer.worker.links import Link
from minfer.worker.shared_operands import SharedOperands

CPU = torch.device("cpu")
CASE = ops.get("hgemm").case("torch", "float16", {"m": 8, "n": 24, "k": 16})
LOWEST_OF_EXPONENT = {
    "float16": 10,
    "bfloat16": 7,
    "float32": 23,
    "float8_e4m3fn": 3,
    "float8_e5m2": 2,
}  # number of the bit
SHAPES = [((3, 5), (3, 5)), ((4, 6), (7, 9)), ((8, 16), (2, 3)), ((2, 2), (11, 10)), ((300, 7), (1, 1))]
DTYPES_OF = [
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float32", "float32"),
    ("float16", "float32"),
    ("float32", "bfloat16"),
    ("bfloat16", "float8_e4m3fn"),
]


def some(spec: Spec, seed: int) -> torch.Tensor:
    """Values of many sizes and both signs."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(spec.shape, generator=generator) * torch.randn(spec.shape, generator=generator).exp2()
    return values.to(DTYPES[spec.dtype])


def counting_bits(value: torch.Tensor, dtype: str) -> list[int]:
    """Of each element: 1 if its sign differs from the lowest bit of its exponent."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[value.element_size()]
    raw = value.reshape(-1).view(whole).long()
    return ((raw >> LOWEST_OF_EXPONENT[dtype] ^ raw >> 8 * value.element_size() - 1) & 1).tolist()


def make(
    shape: tuple[int, ...], dtype: str, of_result: tuple[int, ...], dtype_of_result: str
) -> tuple[Link, Spec, Spec]:
    y, x = out("y", *of_result, dtype=dtype_of_result), given("x", *shape, dtype=dtype)
    link = between(y, x)
    assert link
    return link, x, y


def between(*specs: Spec, traffic: int = 1 << 30) -> Link | None:
    op: Any = SimpleNamespace(specs=lambda case: specs, bytes=lambda case: traffic)
    return Link.between(op, CASE)


@pytest.mark.parametrize(("dtype", "of_result"), DTYPES_OF)
@pytest.mark.parametrize(("shape", "result_shape"), SHAPES)
def test_signs_change_by_the_bits_of_the_result(
    shape: tuple[int, ...], result_shape: tuple[int, ...], dtype: str, of_result: str
) -> None:
    link, *specs = make(shape, dtype, result_shape, of_result)
    x, y = some(specs[0], 1), some(specs[1], 2)
    before, n = x.clone(), x.numel()
    link.prepare({"x": x}, {"y": y})()
    bits = counting_bits(y, of_result)
    wanted = [sum(bits[j::n]) % 2 if j < len(bits) else bits[j % len(bits)] for j in range(n)]
    assert (torch.signbit(x) != torch.signbit(before)).reshape(-1).int().tolist() == wanted
    assert torch.equal(x.float().abs(), before.float().abs())


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "of_result"), [*DTYPES_OF, ("float16", "int64"), ("float8_e4m3fn", "float32")])
@pytest.mark.parametrize(("shape", "result_shape"), [*SHAPES, ((100, 1000), (300, 999)), ((3, 1), (1000, 1001))])
def test_a_gpu_changes_the_same(
    shape: tuple[int, ...], result_shape: tuple[int, ...], dtype: str, of_result: str
) -> None:
    link, *specs = make(shape, dtype, result_shape, of_result)
    x, y = some(specs[0], 1), some(specs[1], 2)
    on_gpu = x.cuda()
    link.prepare({"x": x}, {"y": y})()
    link.prepare({"x": on_gpu}, {"y": y.cuda()})()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    assert torch.equal(on_gpu.cpu().view(whole), x.view(whole))


def test_the_activations_are_linked() -> None:
    for name, shape, input in (
        ("hgemm", {"m": 8, "n": 512, "k": 256}, "a"),
        ("gemm_bias_gelu", {"m": 8, "n": 512, "k": 256}, "a"),
        ("rmsnorm", {"tokens": 4, "hidden": 64}, "x"),
        ("softmax", {"rows": 4, "n": 64}, "x"),
        ("layernorm", {"tokens": 4, "hidden": 64}, "x"),
        ("add_rmsnorm", {"tokens": 4, "hidden": 64}, "residual"),
    ):
        op = ops.get(name)
        kernel = next(iter(op.kernels.values()))
        link = Link.between(op, op.case(kernel.name, kernel.dtypes[0], shape))
        assert link and link.input == input, name


def test_what_has_no_signs_no_result_or_a_large_table_has_no_link() -> None:
    y, x = out("y", 3, dtype="float16"), given("x", 3, dtype="float16")
    assert between(y, x) and between(y, x, traffic=5) is None
    assert between(y, given("x", 3, dtype="int32", fill=integers(0, 9))) is None
    assert between(out("y", 0, dtype="float16"), x) is None


class Block:
    """A linked block of three calls, of a runner and the judge's operands in this process."""

    def __init__(self, case: Case = CASE) -> None:
        op = ops.get(case.op)
        arena = Arena(3 * guarded_bytes(op.operand_bytes(case), len(op.specs(case))), CPU)
        self.operands, self.call = SharedOperands(case, 3, arena, CPU), op.call(case)
        self.runner = Runner("cpu", case.to_dict(), arena.handle, [], {})

    def run_and_check(self) -> None:
        self.runner.prepare(self.operands.described, self.call, linked=True)
        self.operands.draw()
        self.operands.write()
        self.operands.choose_pieces(3)
        self.runner.run(3, linked=True)
        self.operands.take_snapshot(3, linked=True)
        self.operands.check(3, linked=True)


@pytest.mark.parametrize("goes_on", [False, True])
def test_the_judge_computes_the_inputs_of_a_linked_block(goes_on: bool) -> None:
    block = Block()
    block.operands.goes_on = goes_on
    drawn = block.operands.originals
    block.run_and_check()
    changed = [
        not torch.equal(shared["a"], own.tensors["a"]) for shared, own in zip(block.operands.sets, drawn, strict=True)
    ]
    assert changed == [False, True, True]


@pytest.mark.parametrize("name", ops.names())
def test_the_baseline_of_each_op_is_right_in_a_linked_block(name: str) -> None:
    """Inputs with other signs are within what the op's bounds hold for."""
    op = ops.get(name)
    cases = (case for kernel in op.baselines for case in op.cases(op.kernels[kernel], op.sizes["small"]))
    case = next((case for case in cases if Link.between(op, case)), None)
    if case is None:
        pytest.skip("has no linked blocks")
    block = Block(case)
    function = block.runner.function
    block.runner.function = lambda *tensors, **call: function(
        *tensors, **call
    )  # whose results are copied to the outputs
    block.run_and_check()


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_block_that_leaves_out_a_link_is_wrong(goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block()
    block.operands.goes_on = goes_on
    links = Runner._link
    monkeypatch.setattr(Runner, "_link", lambda *about: [links(*about)[0], nothing, nothing])
    with pytest.raises(Dishonest, match="in calls that depend on each other"):
        block.run_and_check()
