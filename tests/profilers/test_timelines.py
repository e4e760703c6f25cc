"""Scopes that kernels mark in comments, and the rows that `benchmarks/timelines.py` makes of their stamps."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import timelines
from benchmarks.scopes import stamped
from benchmarks.timelines import TIMELINES
from minfer import fingerprint, ops
from minfer.bench.errors import compare_output, run_reference
from minfer.bench.operands import Operands
from minfer.build import toolchain
from tests.emulator import Emulated, KernelError, compiled

SIZES = ("1 200 300 1 1 64", "1 1 600 4 1 64", "1280 16 1000")  # on the emulator; of stream-K's 5 tiles one is shared


@pytest.mark.slow  # compiles a kernel for the emulator
@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(toolchain.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch")
@pytest.mark.parametrize(("timeline", "sizes"), [*zip(TIMELINES, SIZES, strict=True)])
def test_warps_stamp_their_scopes_in_order(timeline: timelines.Timeline, sizes: str, tmp_path: Path) -> None:
    case, op = timeline.case, ops.get(timeline.case.op)
    case = case.with_shape(dict(zip(op.axes, map(int, sizes.split()), strict=False)))
    kernel = timelines.with_scopes(timeline, tmp_path)
    library = compiled(kernel, tmp_path, None, f"-I{tmp_path / 'ops' / op.name}")
    function, move = Emulated(kernel, library), Emulated(replace(kernel, name=f"{kernel.name}_stamps"), library)
    function.run_on(6)
    operands, fresh = (Operands(op, case, 1, "normal", torch.device("cpu")) for _ in range(2))
    stamps = torch.zeros(8, 12, 200, 3, dtype=torch.int64)
    move(stamps)
    with pytest.raises(KernelError, match="a counter that is not zero"):  # it takes the stamps' memory for counters
        function(*operands.arguments, **op.call(case))
    move(stamps)
    out, expected = next(iter(operands.named("out"))), run_reference(op, case, fresh.tensors)
    assert compare_output(op, case, out, fresh.tensors | {out: operands.tensors[out]}, expected).over_bound < 1

    trace = stamped(stamps.numpy(), timeline.scopes)
    for block, warp in itertools.product(trace.starts, (0, 4)):
        mine = [scope for scope in trace.scopes if (scope.block, scope.warp) == (block, warp)]
        cycles = [cycle for scope in mine for cycle in (scope.begin, scope.end)]
        assert cycles == sorted(cycles) and (mine or warp)
    assert {scope.name for scope in trace.scopes} == set(timeline.scopes)
    assert {scope.tile for scope in trace.scopes if scope.name in ("give", "own", "add")} <= {4}


@pytest.mark.parametrize("timeline", TIMELINES)
def test_a_fingerprint_does_not_know_the_marks(timeline: timelines.Timeline, tmp_path: Path) -> None:
    source = ops.get(timeline.case.op).kernels[timeline.case.kernel].source
    without = tmp_path / source.name
    without.write_text(re.sub(r"^ *//@ .*;\n", "", source.read_text(), flags=re.MULTILINE))
    marks = re.findall(r"\n *scopes\.end\(k(\w+)", timelines.with_scopes(timeline, tmp_path).source.read_text())
    assert {mark.lower() for mark in marks} == set(timeline.scopes) and "scopes." not in without.read_text()
    assert fingerprint._meaning(without) == fingerprint._meaning(source)


def test_a_row_has_the_tile_and_the_nanoseconds_of_a_scope_that_is_kept() -> None:
    timeline = replace(TIMELINES[2], keep=lambda block, warp, blocks: block == blocks - 1 > warp)
    stamps = np.zeros((4, 2, 3, 3), dtype=np.int64)
    stamps[0, 0, :2] = (500, 10, 3), (1, 20, 30)
    stamps[1, :, 0] = (900, 1000, 4), (900, 1002, 4)
    stamps[1, :, 1] = (1 + timeline.scopes.index("give") + len(timeline.scopes) * 70, 1200, 1400)
    (row,) = timelines.rows_of(timeline, stamps, 2000.0)
    assert [*row.values()][-6:] == [1, 0, "give", 70, 500.0, 600.0]
