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
from minfer.build import device_code, toolchain
from minfer.process import forked
from minfer.specialise import Policy, Specialiser, exact, powers_of_two, recipes, trial
from minfer.specialise.background import Background
from tests.emulator import Emulated, compiled
from tests.specialise.adapting import QUIET_FASTER, steady, until

LENGTHS = [1, 5, 77, 600, 1536, 2047, 2560, 4095, 9000, 40_000]
needs_toolkit = pytest.mark.skipif(toolchain.toolkit() is None, reason="no CUDA toolkit that fits this PyTorch")


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
    used = device_code.resources(device_code.compile_cubin(kernel, arch, tmp_path), arch, toolchain.toolkit())
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


# hgemm


def product(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, a and b of a product in TN."""
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    return torch.full((m, n), float("nan")).bfloat16(), a, b.t()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_product_with_few_rows_is_counted_compiled_tried_and_then_dispatched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the times of the trial are not real."""
    steady(monkeypatch, QUIET_FASTER)
    monkeypatch.setattr(Background, "outcome", lambda self, key: trial.tried(self.recipe, key))
    products, generic = Specialiser(recipes.HGEMM_CPP, Policy(threshold=3, every_calls=4)), []
    fallback = products.fallback
    products.fallback = lambda *tensors: generic.append(1) or fallback(*tensors)
    products._replace()

    def right(size: tuple[int, int], m: int, n: int, k: int) -> int:
        """How many calls of the generic kernel a product takes, whose result is checked."""
        before, (out, a, b) = len(generic), product(m, n, k)
        products.execute(size, out, a, b)
        torch.testing.assert_close(out.float(), a.float() @ b.float(), rtol=1e-2, atol=1e-1)
        return len(generic) - before

    assert [right((5, 256), 5, 64, 256) for _ in range(4)] == [1] * 4
    until(lambda: products.outcomes, 300)
    outcome = products.outcomes[exact((5, 256))]
    assert outcome.faster and outcome.compile_s > 0, outcome.why
    until(lambda: products.variants == [exact((5, 256))])
    assert right((5, 256), 5, 64, 256) == right((5, 256), 5, 33, 256) == 0  # any n
    assert right((4, 256), 4, 64, 256) == right((5, 128), 5, 64, 128) == 1
    assert right((5, 256), 4, 64, 256) == 1  # the variant refuses what it is not for
    products.close()


@pytest.mark.slow
@needs_toolkit
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("m", "n", "k"), [(1, 88, 1416), (8, 64, 2048), (5, 24, 8)])
def test_a_product_of_constant_sizes_is_right_in_cuda(m: int, n: int, k: int, tmp_path: Path) -> None:
    op, kernel = ops.get("hgemm"), recipes.HGEMM_CUDA.kernel(exact((m, n, k)))
    function = Emulated(kernel, compiled(kernel, tmp_path, {}))
    for call in op.calls:
        case = op.case(kernel.name, "bfloat16", {"m": m, "n": n, "k": k}, {**recipes.TN, "call": call})
        verify(op, case, kernel, function, torch.device("cpu"), None, seed=1)
    with pytest.raises(Exception, match=f"takes m, n, k = {m}, {n}, {k}, got {m}, {n}, {k + 8}"):
        function(*product(m, n, k + 8))


@pytest.mark.slow
@needs_toolkit
@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
def test_a_product_of_constant_sizes_compiles(arch: str, tmp_path: Path) -> None:
    kernel = recipes.HGEMM_CUDA.kernel(exact((8, 4096, 4096)))
    used = device_code.resources(device_code.compile_cubin(kernel, arch, tmp_path), arch, toolchain.toolkit())
    assert not used or (used["local_bytes"] == 0 and 0 < used["registers"] <= 255)


def test_a_product_that_a_recipe_is_not_for_is_a_sentence() -> None:
    for recipe, key, said in (
        (recipes.HGEMM_CUDA, exact((9, 64, 64)), "takes m up to 8, and n and k that are multiples of 8, got 9x64x64"),
        (recipes.HGEMM_CPP, powers_of_two((5, 256)), "is for one size on each axis, not for 5-8x129-256"),
        (recipes.SEQ_SUM_TRITON, powers_of_two(100), "is for one size on each axis, not for 65-128"),
    ):
        with pytest.raises(ValueError, match=f"^this variant {said}$"):
            recipe.kernel(key)
