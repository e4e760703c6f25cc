"""The models by which `matmul` chooses: v18_fitted's is that of its C++ code."""

from __future__ import annotations

import ctypes
import random
import subprocess
from pathlib import Path

import pytest

from minfer import ops
from minfer.ops import PACKAGE, preferred, product_times

SOURCE = """
#include "ops/hgemm/fitted_choice.h"
extern "C" double us(int m, int n, int k, int is_tn) {
  return minfer::choose_fitted(m, n, k, is_tn, {66, 31, 15}).us;
}
"""


def test_the_model_of_v18_is_that_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "model.cpp").write_text(SOURCE)
    command = ["g++", "-std=c++20", "-shared", "-fPIC", "-I", str(PACKAGE), "model.cpp", "-o", "model.so"]
    try:
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no g++")
    us = ctypes.CDLL(str(tmp_path / "model.so")).us
    us.restype = ctypes.c_double
    rng = random.Random(1)
    for _ in range(40):
        m, n, k = (8 * int(2 ** rng.uniform(5, 10)) for _ in range(3))
        is_tn = rng.random() < 0.5
        assert product_times.fitted_us(m + 1, n, k, is_tn) == pytest.approx(us(m + 1, n, k, is_tn), rel=1e-9)


def test_each_kernel_is_chosen_somewhere_and_only_one() -> None:
    found, kernels = set(), [kernel for kernel in ops.get("hgemm").kernels.values() if kernel.preferred]
    for m, n, k in [(100, 4096, 4096), (100, 32000, 4096), (300, 4096, 4096), (4096, 28672, 8192), (1024, 512, 512)]:
        shape, params = {"m": m, "n": n, "k": k}, {"layout": "TN", "accumulate": "float32"}
        chosen = [kernel.name for kernel in kernels if getattr(preferred, kernel.preferred)(shape, params)]
        found.add(chosen[0])  # of the kernels whose rules hold, the first in the op's order is taken
    assert found == {kernel.name for kernel in kernels}


def test_fused_products_of_many_rows_have_kernels_with_tiles() -> None:
    for op, kernel in (("gated_unit", "v03_wgmma"), ("gemm_bias_relu", "v05_fitted")):
        rule = getattr(preferred, ops.get(op).kernels[kernel].preferred)
        assert rule({"m": 129, "n": 4096, "k": 4096}, {}) and not rule({"m": 128, "n": 4096, "k": 4096}, {})
