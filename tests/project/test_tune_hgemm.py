"""`benchmarks/tune_hgemm.py`: variants are what was asked for, and are kernels like others."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import tune_hgemm
from minfer import ops
from minfer.build import toolchain
from minfer.profilers import static

KERNEL = ops.get("hgemm").kernels["v13_cooperative"]


def test_a_variant_differs_in_its_constants_and_its_name():
    name, text = tune_hgemm.variant(KERNEL, {"kStages": "3", "kGroup": "4"})
    assert name == "v13_cooperative_kStages3_kGroup4" and f"MINFER_HGEMM(hgemm_{name}, " in text
    assert "kBlockN = 256, kStages = 3;" in text and "constexpr int kGroup = 4;" in text
    assert '#include "cuda/gemm/warpgroup_tile.cuh"' in text and '#include "cuda/gemm/cooperative.cuh"' not in text


def test_what_is_not_changed_is_included_and_not_copied():
    _, text = tune_hgemm.variant(ops.get("hgemm").kernels["v12_pingpong"], {"kStages": "3"})
    assert '#include "cuda/gemm/warpgroup_tile.cuh"' in text and "struct WarpgroupTile" not in text


def test_a_constant_that_is_not_there_is_a_sentence():
    with pytest.raises(ValueError, match=r"^v13_cooperative.cu has no constant kRows = a number; "):
        tune_hgemm.variant(KERNEL, {"kRows": "64"})


@pytest.mark.slow
@pytest.mark.skipif(toolchain.toolkit() is None, reason="no CUDA compiler that fits this PyTorch")
def test_a_grid_is_registered_and_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.get("hgemm"), "kernels", dict(ops.get("hgemm").kernels))
    register, names = tune_hgemm.write(KERNEL, {"kCluster": ["1", "2"], "kGroup": ["4", "16"]}, tmp_path)
    assert len(names) == len(set(names)) == 4
    ops.load_file(register)
    assert set(names) < set(ops.get("hgemm").kernels)
    kernel = ops.get("hgemm").kernels["v13_cooperative_kCluster1_kGroup4"]
    assert kernel.archs == "sm_90a" and {path.name for path in kernel.sources()} >= {"hopper.cuh", "hgemm.h"}
    functions = static.functions(kernel, "sm_90a", 300)
    assert any(function.opcodes["UTMALDG.2D.MULTICAST"] for function in functions)
