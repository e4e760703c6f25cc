"""Scopes that kernels mark in comments, and the rows that `benchmarks/timelines.py` makes of their stamps."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import timelines
from benchmarks.scopes import Trace, stamped
from benchmarks.timelines import TIMELINES, Timeline
from minfer import fingerprint, ops
from minfer.bench.errors import compare_output, run_reference
from minfer.bench.operands import Operands
from minfer.build import device_code, toolchain
from tests.emulator import Emulated, KernelError, compiled

SMALL = {  # on the emulator: a shape, and multiprocessors
    "v05_pingpong": ((1, 200, 300, 1, 1, 64), 2),
    "v03_packed": ((1, 1, 600, 4, 1, 64), 4),
    "v14_stream_k": ((1280, 16, 1000), 6),  # 5 tiles for 3 clusters: one helps with two tiles of the others
}
NAMES = [timeline.kernel for timeline in TIMELINES]
has_toolkit = pytest.mark.skipif(toolchain.toolkit() is None, reason="no CUDA toolkit that fits this PyTorch")


def traced(name: str, folder: Path) -> Trace:
    """What a kernel stamps on the emulator in a call whose result is right."""
    shape, multiprocessors = SMALL[name]
    (found,) = [timeline for timeline in TIMELINES if timeline.kernel == name]
    op = ops.get(found.op)
    timeline = replace(found, shape=dict(zip(op.axes, shape, strict=True)))
    kernel = timelines.with_scopes(timeline, folder)
    library = compiled(kernel, folder, None, f"-I{folder / 'ops' / op.name}")
    function, stamps = Emulated(kernel, library), Emulated(replace(kernel, name=f"{kernel.name}_stamps"), library)
    function.run_on(multiprocessors)
    operands, fresh = (Operands(op, timeline.case, 1, "normal", torch.device("cpu")) for _ in range(2))
    buffer = torch.zeros(8, 12, 200, 3, dtype=torch.int64)
    stamps(buffer)
    assert not buffer.any()
    with pytest.raises(
        KernelError, match="left a counter that is not zero"
    ):  # it takes the stamps' memory for counters
        function(*operands.arguments, **op.call(timeline.case))
    stamps(buffer)
    expected = run_reference(op, timeline.case, fresh.tensors)
    (out,) = [each for each in operands.named("out") if operands.tensors[each].numel()]
    results = fresh.tensors | {out: operands.tensors[out]}
    assert compare_output(op, timeline.case, out, results, expected).over_bound < 1
    return stamped(buffer.numpy(), timeline.scopes)


def in_order(trace: Trace, warp: int) -> dict[int, str]:
    """The scopes of a warp of each block, a word for each."""
    found = {}
    for block in trace.starts:
        mine = [scope for scope in trace.scopes if (scope.block, scope.warp) == (block, warp)]
        cycles = [cycle for scope in mine for cycle in (scope.begin, scope.end)]
        assert cycles == sorted(cycles) and all(scope.begin < scope.end for scope in mine)
        found[block] = " ".join(scope.name for scope in mine)
    return found


@pytest.mark.slow  # compiles a kernel for the emulator
@pytest.mark.usefixtures("one_thread")
@has_toolkit
@pytest.mark.parametrize("name", NAMES)
def test_the_warps_of_a_kernel_stamp_their_parts_in_order(name: str, tmp_path: Path) -> None:
    trace = traced(name, tmp_path)
    if name == "v05_pingpong":
        tile = "turn scores softmax( turn scores( softmax out)? softmax)+ turn out store"
        for warp in (0, 4):
            found = in_order(trace, warp).values()
            assert found and all(re.fullmatch(f"{tile}( {tile})*", scopes) for scopes in found), found
    elif name == "v03_packed":
        assert set(in_order(trace, 0).values()) == {"keys merge combine"} and len(trace.starts) > 1
    else:
        given, found = (
            [scope.tile for scope in trace.scopes if scope.name == "give" and scope.warp == 0],
            in_order(trace, 0),
        )
        owners = [scopes for scopes in found.values() if "own" in scopes]
        helpers = len(given) // 2  # in each of a cluster's two blocks
        assert set(given) == {4} and len(owners) == 2 and helpers > 1
        assert set(owners) == {f"whole own{' wait add' * 4 * helpers} store"}
        assert set(found.values()) - set(owners) == {"help give whole store", "whole store"}


def test_marks_are_comments_that_a_kernels_fingerprint_does_not_know(tmp_path: Path) -> None:
    for timeline in TIMELINES:
        source = ops.get(timeline.op).kernels[timeline.kernel].source
        marks = re.findall(r"^ *//@ (.*;)$", source.read_text(), re.MULTILINE)
        used = {name.lower() for name in re.findall(r"end\(k(\w+)", " ".join(marks))}
        assert used == set(timeline.scopes)
        without = tmp_path / source.name
        without.write_text(re.sub(r"^ *//@ .*;\n", "", source.read_text(), flags=re.MULTILINE))
        assert fingerprint._meaning(without) == fingerprint._meaning(source)
        with_code = timelines.with_scopes(timeline, tmp_path).source.read_text()
        assert all(f"\n{mark}" in re.sub(r"\n +", "\n", with_code) for mark in marks)


@pytest.mark.slow
@has_toolkit
@pytest.mark.parametrize("timeline", TIMELINES, ids=NAMES)
def test_a_kernel_with_its_scopes_compiles(timeline: Timeline, tmp_path: Path) -> None:
    kernel = timelines.with_scopes(timeline, tmp_path)
    assert device_code.compile_cubin(kernel, "sm_90a", tmp_path).stat().st_size


def test_a_row_has_the_tile_and_the_nanoseconds_of_a_scope_that_is_kept() -> None:
    timeline = replace(TIMELINES[2], blocks=lambda blocks: [blocks - 1])
    stamps = np.zeros((4, 2, 3, 3), dtype=np.int64)
    stamps[0, 0, 0], stamps[1, 0, 0], stamps[1, 1, 0] = (500, 10, 3), (900, 1000, 4), (900, 1002, 4)
    kinds = len(timeline.scopes)
    for warp in (0, 1):
        stamps[1, warp, 1] = (1 + timeline.scopes.index("give") + kinds * 70, 1200, 1400)
    stamps[0, 0, 1] = (1, 20, 30)
    (row,) = timelines.rows_of(timeline, stamps, 2000.0)
    assert (row["block"], row["warp"], row["scope"], row["tile"]) == (1, 0, "give", 70)
    assert (row["begin"], row["end"], row["kernel"]) == (500.0, 600.0, "v14_stream_k")
