"""The model by which v23_mma_fitted chooses a tile, on GPUs that are described here."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import kernel_times
from minfer.build import host
from minfer.ops import Kernel
from tests import tiles
from tests.conftest import ROOT

SOURCE = Kernel("hgemm", "mma_choice", "cpp", Path(__file__).with_name("mma_choice.cpp"))
# Architecture, multiprocessors, shared memory of each, bytes of memory and cycles a microsecond.
L40S = (89, 142, 100 << 10, 0.864e6, 2520)
A100 = (80, 108, 164 << 10, 2.04e6, 1410)
H200 = (90, 132, 228 << 10, 4.8e6, 1980)
EMULATED = (0, 3, 100 << 10, 0.864e6, 2520)
LAYERS = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (1024, 4096), (2560, 9728), (5120, 1280))


class Chosen(NamedTuple):
    rows: int
    cols: int
    deep: int
    parts: int


class Model:
    def __init__(self) -> None:
        self.library = host.load(SOURCE)
        self.library.minfer_mma_us.restype = ctypes.c_double

    def tiles(self) -> set[tuple[int, int]]:
        found = (ctypes.c_int * 100)()
        count = self.library.minfer_mma_tiles(found)
        return {(found[2 * i], found[2 * i + 1]) for i in range(count)}

    def choose(self, gpu: tuple[float, ...], m: int, n: int, k: int) -> Chosen:
        found = (ctypes.c_int * 4)()
        self.library.minfer_choose_mma((ctypes.c_double * 5)(*gpu), m, n, k, found)
        return Chosen(*found)

    def us(self, gpu: tuple[float, ...], tile: tuple[int, ...], parts: int, m: int, n: int, k: int) -> float:
        found: float = self.library.minfer_mma_us(
            (ctypes.c_double * 5)(*gpu), (ctypes.c_int * 6)(*tile), parts, m, n, k
        )
        return found


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.mark.parametrize("gpu", [L40S, A100, H200], ids=["L40S", "A100", "H200"])
def test_each_tile_is_the_best_of_some_product(gpu: tuple[float, ...], model: Model) -> None:
    rng = random.Random(1)
    products = [
        (int(2 ** rng.uniform(0, 13)), 8 * rng.randrange(32, 2048), 8 * rng.randrange(32, 1024)) for _ in range(5000)
    ]
    assert {model.choose(gpu, *product)[:2] for product in products} == model.tiles()


def test_each_tile_is_tested_on_a_gpu_and_emulated(model: Model) -> None:
    assert {model.choose(H200, *shape)[:2] for shape in tiles.TILES_OF_V23} == model.tiles()
    assert {model.choose(EMULATED, *shape)[:2] for shape in tiles.EMULATED_TILES_OF_V23} == model.tiles()


def test_few_multiprocessors_of_an_l40s_are_idle(model: Model) -> None:
    """From 129 rows on and with long n and k, 95 % of them have a block in the mean, and more than half for any product. With
    v07_tuned's tile of 128 x 256, at 300 x 4096 x 4096 only 48 of 142 have one."""
    rng, busy = random.Random(2), []
    for _ in range(2000):
        m, (n, k) = int(2 ** rng.uniform(7.02, 13)), rng.choice(LAYERS)
        rows, cols, _, parts = model.choose(L40S, m, n, k)
        busy.append(min(1.0, -(-m // rows) * -(-n // cols) * parts / 142))
    assert sum(busy) / len(busy) > 0.95 and min(busy) > 0.5


def test_no_part_of_k_is_empty(model: Model) -> None:
    """The kernel rounds the stages of a part up, and leaves out parts that are then empty. Those left have 4 stages and more on
    average, but the last one may be shorter."""
    rng = random.Random(3)
    for _ in range(2000):
        m, n, k = (8 * int(2 ** rng.uniform(0, 9)) for _ in range(3))
        _, _, deep, parts = model.choose(L40S, m, n, k)
        stages = -(-k // deep)
        each = -(-stages // parts)
        assert 1 <= parts <= 16 and (parts == 1 or stages >= 4 * parts) and each * (-(-stages // each) - 1) < stages


def test_the_model_has_the_rates_and_the_latency_of_an_h200(model: Model) -> None:
    """At 3,213 random products, its times of v07_tuned, whose tiles wait for products, and of v16_skinny up to 32 rows, whose
    stages wait for copies, are right in the mean. Without latency it expected 16 % less of v07 and 40 % less of v23's tiles of
    three stages. v16 has tiles of four stages, as many blocks on an SM as the model expects, and its own rule of parts."""
    times = kernel_times.timed(kernel_times.TIMES_OF_MMA, 1)
    errors: dict[str, list[float]] = {"v07_tuned": [], "v16_skinny": []}
    for of in times.itertuples():
        m, n, k = of.m, of.n, of.k
        errors["v07_tuned"].append(np.log(model.us(H200, (128, 256, 64, 3, 64, 64), 1, m, n, k) / of.v07_tuned))
        if m <= 32:
            rows = 16 if m <= 16 else 32
            steps, tiles = -(-k // 64), -(-n // 64)
            parts = -(-steps // -(-steps // max(1, min(4 * 132 // tiles, steps // 4))))
            error = np.log(model.us(H200, (rows, 64, 64, 4, rows, 16), parts, m, n, k) / of.v16_skinny)
            errors["v16_skinny"].append(error)
    assert len(errors["v07_tuned"]) == 3213 and len(errors["v16_skinny"]) == 1026
    for kernel, found in errors.items():
        assert abs(np.mean(found)) < 0.03 and np.std(found) < 0.09, (kernel, np.mean(found), np.std(found))


def test_a_ring_of_few_stages_waits_for_its_copies(model: Model) -> None:
    """Where neither the products nor the bytes of a stage take long, a ring of three stages takes half as long again as one
    of four, because it has two copies in flight, and the other three."""
    three, four = (model.us(H200, (80, 128, 32, stages, 80, 32), 1, 80, 128, 1 << 20) for stages in (3, 4))
    assert 1.3 < three / four < 1.5


def test_measured_times_of_such_tiles_are_as_the_model_says(model: Model) -> None:
    """v07_tuned and v16_skinny have tiles of this form, and were timed on an H200. The model is within 25 % of each."""
    rows = pq.read_table(
        ROOT / "results" / "nvidia-h200" / "hgemm.parquet", columns=["kernel", "params", "shape", "status", "cold_us"]
    )
    v16 = {
        16: (16, 64, 64, 4, 16, 16),
        32: (32, 64, 64, 4, 32, 16),
        64: (64, 128, 64, 3, 32, 32),
        128: (128, 128, 64, 3, 64, 32),
    }
    ratios = []
    for row in rows.to_pylist():
        if row["status"] != "ok" or row["cold_us"] is None or dict(row["params"])["layout"] != "TN":
            continue
        m, n, k = (dict(row["shape"])[axis] for axis in "mnk")
        if row["kernel"] == "v07_tuned":
            ratios.append(model.us(H200, (128, 256, 64, 3, 64, 64), 1, m, n, k) / row["cold_us"])
        elif row["kernel"] == "v16_skinny" and n == 28672:  # its tiles are not divided there
            tile = next(tile for most, tile in v16.items() if m <= most)
            ratios.append(model.us(H200, tile, 1, m, n, k) / row["cold_us"])
    assert len(ratios) > 25 and min(ratios) > 0.75 and max(ratios) < 1.25, (min(ratios), max(ratios))
