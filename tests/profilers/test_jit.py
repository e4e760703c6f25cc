"""What Triton compiled is found in the caches of its functions, without a GPU: real functions, and binaries played."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from minfer import ops
from minfer.profilers import Finding, Job, host, jit, static

SOURCE = """
import torch
import triton
import triton.language as tl

@triton.jit
def plain(x):
    tl.store(x, 1)

@triton.autotune(configs=[triton.Config({"B": 1}), triton.Config({"B": 2})], key=["n"])
@triton.heuristics({"EVEN": lambda arguments: True})
@triton.jit
def tuned(x, n, B: tl.constexpr, EVEN: tl.constexpr):
    tl.store(x, B)

again = plain

def hgemm(out, a, b):
    pass
"""


def test_the_jit_functions_of_a_module_are_found_once_and_unwrapped(tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "kernels.py").write_text(SOURCE)
    module = ops.load_file(tmp_path / "kernels.py")
    found = jit.jit_functions(module)
    assert [function.__name__ for function in found] == ["plain", "tuned"]
    assert found[0] is module.plain and found[1] is module.tuned.fn.fn


def test_every_triton_kernel_of_ours_names_its_function():
    pytest.importorskip("triton")
    for kernel in ops.every_kernel(["triton"]):
        assert jit.jit_functions(kernel.module()), kernel.name


def module_of(**values: Any) -> ModuleType:
    module = ModuleType("kernels")
    vars(module).update(values)
    return module


def function(**caches: str) -> Any:
    """A JITFunction as far as its caches go: device -> (binaries by key, and more that does not matter)."""
    return SimpleNamespace(device_caches={0: (caches, {}, "target")})


def test_only_what_the_call_used_is_taken():
    first, second, idle = function(old="first for another shape"), function(), function(old="never called")

    def call() -> None:
        first.device_caches.setdefault(0, ({}, {}))[0]["new"] = "first"
        second.device_caches.setdefault(0, ({}, {}))[0]["a"] = "second"

    module = module_of(first=first, wrapped=SimpleNamespace(fn=SimpleNamespace(fn=second)), idle=idle, number=1)
    assert jit.find_launched(module, call) == ["first", "second"]


# In the profiler


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Finding]:
    """What `static` finds for a Triton case on a GPU that is played, given what a call launches there."""

    def run(launched: list[Any], arch: str = "sm_90a", measured: bool = True, device: str = "cuda") -> Finding:
        op = ops.get("hgemm")
        monkeypatch.setattr(static, "prepare_call", lambda case, device: None)
        monkeypatch.setattr(static, "find_launched", lambda module, call: launched)
        monkeypatch.setattr(static.devices, "arch", lambda device: arch)
        case = op.case("triton_tiled", "float16", dict.fromkeys(op.axes, 128))
        keys = frozenset({case.key}) if measured else frozenset()
        (finding,) = host.findings(static, Job([case], {"archs": ["sm_89"]}, device, tmp_path, 60, keys))
        return finding

    return run


def binary(name: str, shared: int) -> Any:
    return SimpleNamespace(asm={"cubin": name.encode()}, metadata=SimpleNamespace(shared=shared))


def test_the_binary_that_works_most_is_described_for_this_gpu_alone(find, monkeypatch):
    pytest.importorskip("triton")

    def read(path: Path, arch: str, toolkit: Any) -> list[Any]:
        opcodes = {"gemm": {"HMMA.16816.F32": 8, "EXIT": 1}, "reduce": {"FADD": 90, "EXIT": 1}}
        name = path.read_bytes().decode()
        counted = static.sass.Counter(opcodes[name])
        return [static.Function(name, 128, 0, 0, 256, counted)]

    monkeypatch.setattr(static.sass, "read", read)
    monkeypatch.setattr(static.toolchain, "toolkit", lambda: Path("/cuda"))
    finding = find([binary("reduce", 0), binary("gemm", 98304)])
    assert finding.why == "ok" and finding.functions == {"sm_90a": "gemm"}
    assert {name.split(".", 1)[0] for name in finding.metrics} == {"sm_90a"}
    assert finding.metrics["sm_90a.dynamic_shared_bytes"] == 98304 and finding.metrics["sm_90a.HMMA.16816.F32"] == 8
    assert finding.metrics["sm_90a.occupancy_percent"] == 25  # two blocks of 8 warps, by registers and shared memory


def test_a_call_that_launches_nothing_of_the_module_says_so(find):
    pytest.importorskip("triton")
    assert find([]).why == "triton_tiled.py launched no @triton.jit function that it names itself"


def test_a_gpu_whose_limits_are_not_known_says_so(find):
    pytest.importorskip("triton")
    assert find([binary("gemm", 0)], arch="sm_70").why.startswith("knows no sm_70; known: sm_80")


@pytest.mark.parametrize(("measured", "device"), [(False, "cuda"), (True, "cpu"), (False, "cpu")])
def test_a_case_that_was_not_measured_is_not_called(find, monkeypatch, measured, device):
    finding = find([binary("gemm", 0)], measured=measured, device=device)
    assert finding.why == "a Triton kernel has machine code only after a call on a GPU"
