"""The recipes of this project: the files that they generate are right at any length, and compile for GPUs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minfer import build, ops
from minfer.bench.verify import verify
from minfer.specialise import exact, recipes
from tests import forked
from tests.emulator import Emulated, compiled

LENGTHS = [1, 5, 77, 600, 1536, 2047, 2560, 4095, 9000, 40_000]
needs_toolkit = pytest.mark.skipif(build.toolkit() is None, reason="no CUDA toolkit that fits this PyTorch")


# seq_sum in CUDA


@pytest.mark.slow
@needs_toolkit
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("length", [5, 77, 2047, 40_000])
def test_a_cuda_variant_is_right_for_full_and_ragged_sequences(length: int, tmp_path: Path) -> None:
    """At its length, shorter and longer; as the template says, it computes them all."""
    op, made = ops.get("seq_sum"), recipes.SEQ_SUM_CUDA.kernel(exact(length))
    kernel = replace(op.kernels["v02_block"], name=made.name, source=made.source)
    function = Emulated(kernel, compiled(kernel, tmp_path, {}))
    for case in op.cases(kernel, [{"batch": 3, "longest": longest} for longest in (length, length + 9)]):
        verify(op, case, kernel, function, torch.device("cpu"), None, seed=1)


@pytest.mark.slow
@needs_toolkit
@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
@pytest.mark.parametrize("length", [1, 600, 2047, 9000, 40_000])
def test_a_cuda_variant_compiles_at_any_length(length: int, arch: str, tmp_path: Path) -> None:
    kernel = recipes.SEQ_SUM_CUDA.kernel(exact(length))
    used = build.resources(build.cubin(kernel, arch, tmp_path), arch, build.toolkit())
    assert not used or (used["local_bytes"] == 0 and 0 < used["registers"] <= 128)  # 512 threads have 128 each


# seq_sum in Triton


@pytest.mark.slow
def test_a_triton_variant_is_right_when_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # is read when Triton is imported
    done = forked.run("tests.specialise.interpreted", *map(str, LENGTHS), timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2 * len(LENGTHS)


class Recorded:
    """In the place of a kernel: keeps what it is launched with."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *tensors, **constants: self.given.update(constants)


@pytest.mark.slow
@needs_toolkit
@pytest.mark.parametrize("length", LENGTHS)
def test_a_triton_variant_compiles_with_what_it_is_launched_with(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module = recipes.SEQ_SUM_TRITON.kernel(exact(length)).module()
    kernel, recorded = module.kernel, Recorded()
    monkeypatch.setattr(module, "kernel", recorded)
    x = torch.empty(3, length)
    module.seq_sum(torch.empty_like(x), x, torch.empty(0, dtype=torch.int32))
    warps = recorded.given.pop("num_warps")
    types = {"y_ptr": "*fp32", "x_ptr": "*fp32"} | dict.fromkeys(recorded.given, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, recorded.given)
    for capability in (89, 90):
        binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        assert binary.metadata.num_warps == warps and binary.asm["cubin"]


def test_a_triton_variant_takes_its_length_alone() -> None:
    pytest.importorskip("triton")
    function = build.function(recipes.SEQ_SUM_TRITON.kernel(exact(77)))
    full = torch.empty(0, dtype=torch.int32)
    for x, seqlens in ((torch.empty(3, 76), full), (torch.empty(3, 77), torch.ones(3, dtype=torch.int32))):
        said = re.escape(f"this variant takes full sequences of 77, got {tuple(x.shape)}")
        with pytest.raises(ValueError, match=said):
            function(torch.empty_like(x), x, seqlens)


def test_a_triton_variant_holds_what_was_compiled_for_it() -> None:
    pytest.importorskip("triton")
    recipe, key = recipes.SEQ_SUM_TRITON, exact(77)
    assert recipe.held_bytes(key) == 0
    kernel = recipe.kernel(key).module().kernel
    kernel.device_caches[0] = ({"one": SimpleNamespace(asm={"cubin": b"1234"})}, {})
    assert recipe.held_bytes(key) == 4
