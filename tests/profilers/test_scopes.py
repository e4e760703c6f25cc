"""Scopes within kernels: what a kernel stamps, on the emulator, and the traces that `benchmarks/scopes.py` makes of it."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import scopes
from benchmarks.scopes import Scope, Trace
from minfer.build import device_code, toolchain
from minfer.ops import PACKAGE
from tests.emulator import Emulated, compiled

M, N, K, STEPS, WARPS = 100, 64, 200, 4, 4  # 2 x 2 tiles of 64 x 32, on more multiprocessors than those


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    if toolchain.toolkit() is None:
        pytest.skip("no headers of a CUDA toolkit that fits this PyTorch")
    kernel = scopes.with_scopes()
    return Emulated(kernel, compiled(kernel, tmp_path_factory.mktemp("scopes")))


def called(function: Emulated, slots: int, blocks: int = 4) -> np.ndarray:
    """The stamps of a call whose result is right."""
    torch.manual_seed(0)
    a, b = torch.randn(M, K).half(), torch.randn(N, K).half().t()
    bias, y = torch.randn(N).half(), torch.empty(M, N, dtype=torch.float16)
    buffer = torch.zeros(blocks, WARPS + 1, slots, 3, dtype=torch.int64)
    function(y, a, b, bias, buffer)
    torch.testing.assert_close(y.double(), torch.relu(a.double() @ b.double() + bias.double()), rtol=2e-3, atol=2e-2)
    return buffer.numpy()


@pytest.mark.slow  # compiles a kernel for the emulator
@pytest.mark.usefixtures("one_thread")
def test_each_warp_stamps_its_steps_in_order(emulated: Emulated) -> None:
    stamps = called(emulated, slots=2 + 2 * STEPS)
    trace = scopes.stamped(stamps)
    blocks = sorted(trace.starts)
    assert len(blocks) >= 2 and min(trace.starts.values()) == 0
    for block in blocks:
        for warp in range(WARPS + 1):
            found = [scope for scope in trace.scopes if (scope.block, scope.warp) == (block, warp)]
            expected = ["issue"] * STEPS if warp == WARPS else ["load", "product"] * STEPS + ["epilogue"]
            assert [scope.name for scope in found] == expected
            cycles = [cycle for scope in found for cycle in (scope.begin, scope.end)]
            assert cycles == sorted(cycles) and cycles[0] > 0


@pytest.mark.slow  # compiles a kernel for the emulator
@pytest.mark.usefixtures("one_thread")
def test_what_a_buffer_has_no_room_for_is_left_out(emulated: Emulated) -> None:
    few = scopes.stamped(called(emulated, slots=3, blocks=1))  # it would write outside of its operand else
    assert {scope.block for scope in few.scopes} == {0}
    assert [scope.name for scope in few.scopes if scope.warp == 0] == ["load", "product"]


MARKED = """
#include "cuda/scopes.cuh"
struct Problem { float* y; MEMBER };
__global__ void twice(Problem g) {
#ifdef MARKED
  minfer::Scopes<Problem> scopes(g);
  scopes.begin();
#endif
  g.y[threadIdx.x] *= 2.0f;
#ifdef MARKED
  scopes.end(0);
#endif
}
"""


def ptx(folder: Path, *flags: str) -> str:
    home = toolchain.toolkit()
    assert home is not None
    (folder / "marked.cu").write_text(MARKED)
    command = [home / "bin" / "nvcc", "-ptx", "-std=c++20", "-arch=sm_90a", f"-I{PACKAGE}", *flags, "marked.cu"]
    subprocess.run([*command, "-o", "marked.ptx"], cwd=folder, check=True)
    return (folder / "marked.ptx").read_text()


@pytest.mark.skipif(toolchain.toolkit() is None, reason="no CUDA toolkit that fits this PyTorch")
def test_scopes_of_a_problem_without_a_buffer_are_no_code(tmp_path: Path) -> None:
    assert ptx(tmp_path, "-DMEMBER=", "-DMARKED") == ptx(tmp_path, "-DMEMBER=")
    stamped = ptx(tmp_path, "-DMEMBER=minfer::ScopeBuffer scopes;", "-DMARKED")
    assert stamped.count("%clock64") == 3 and stamped.count("%globaltimer") == 1


@pytest.mark.slow
@pytest.mark.skipif(toolchain.toolkit() is None, reason="no CUDA toolkit that fits this PyTorch")
def test_the_kernel_with_its_scopes_compiles(tmp_path: Path) -> None:
    assert device_code.compile_cubin(scopes.with_scopes(), "sm_90a", tmp_path).stat().st_size


def test_the_frequency_is_that_of_multiprocessors_which_both_launches_had() -> None:
    first, last = np.zeros((2, 3, 1, 2, 3), dtype=np.int64)
    first[0, 0, 0], last[1, 0, 0] = (1000, 50, 7), (11_000, 50 + 19_800, 7)
    first[1, 0, 0] = (1000, 9, 8)
    assert scopes.megahertz(first, last) == pytest.approx(1980)


def event(launch: int, cta: int, name: str, begin: int, end: int, start: int = 0) -> dict:
    """A scope as Triton's profiler writes it; a launch is 5 ms after the one before."""
    ts = (5e6 * launch + start + begin) / 1e3
    place = {"pid": f"kernel Core{cta + 3} CTA{cta}", "tid": "warp 0 (line 0)", "cat": "kernel", "cname": "olive"}
    return place | {"name": name, "ph": "X", "ts": ts, "dur": (end - begin) / 1e3, "args": {"call_stack": ["kernel"]}}


def test_of_a_trace_of_triton_the_last_launch_is_kept() -> None:
    slow = [event(0, cta, name, 100 * i, 100 * i + 99) for cta in (0, 1) for i, name in enumerate(("load", "product"))]
    fast = [
        event(1, cta, name, 10 * i, 10 * i + 9, 64 * cta)
        for cta in (0, 1)
        for i, name in enumerate(("load", "product"))
    ]
    trace = scopes.of_proton([*slow, *reversed(fast)], launches=2)
    assert trace.starts == {0: 0, 1: 64}
    assert trace.scopes == [
        Scope(name, block, 0, begin, begin + 9) for block in (0, 1) for name, begin in (("load", 0), ("product", 10))
    ]


@pytest.mark.parametrize(
    "events",
    [[event(0, 0, "load", 0, 9)], [{"ph": "X", "pid": 1, "tid": 2}], [event(0, 0, "load", 0, 9) | {"ph": "B"}] * 2],
)
def test_another_trace_is_refused(events: list) -> None:
    with pytest.raises(ValueError, match=r"not a scope of a warp|1 scopes of 2 launches"):
        scopes.of_proton(events, launches=2)


def test_a_trace_is_in_microseconds_a_thread_for_each_warp(tmp_path: Path) -> None:
    trace = Trace([Scope("product", 1, 2, 990, 1980), Scope("load", 1, 2, 0, 990)], {1: 500})
    scopes.keep(tmp_path / "kernel.trace.json.gz", scopes.chrome(trace, 1980, {"device": "none"}))
    kept = json.loads(gzip.decompress((tmp_path / "kernel.trace.json.gz").read_bytes()))
    assert kept["otherData"] == {"device": "none"}
    assert [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in kept["traceEvents"]] == [
        ("load", "block 1", "warp 2", 0.5, 0.5), ("product", "block 1", "warp 2", 1.0, 0.5)
    ]  # fmt: skip
    assert {e["ph"] for e in kept["traceEvents"]} == {"X"} and kept["traceEvents"][1]["args"]["cycles"] == 990
