"""Occupancy, by hand and by NVIDIA's own calculator."""

from __future__ import annotations

import subprocess
from itertools import product

import pytest

from minfer.build import toolchain
from minfer.profilers import occupancy


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks", "percent"),
    [
        # 64 K registers: 2048 threads of 32, 1024 of 64, 512 of 128 (CUDA C++ Best Practices Guide, "Calculating
        # Occupancy": at most 65,536 / 2,048 = 32 registers a thread for all 2048 threads)
        ("sm_90a", 256, 32, 0, 8, 100.0),
        ("sm_90a", 256, 33, 0, 6, 75.0),  # 33 are given as 40: 12 warps a partition, 48 in all
        ("sm_80", 256, 64, 0, 4, 50.0),
        ("sm_80", 128, 128, 0, 4, 25.0),
        ("sm_80", 1024, 65, 0, 0, 0.0),  # 1024 threads of 72 registers are more than there are
        # 48 KiB and 1 KiB reserved: 49 KiB go into 164 three times, into 100 twice, into 228 four times
        ("sm_80", 256, 32, 48 << 10, 3, 37.5),
        ("sm_89", 256, 32, 48 << 10, 2, 2 * 8 / 48 * 100),
        ("sm_90a", 256, 32, 48 << 10, 4, 50.0),
        # blocks: 32, 16, 24 and 32 of them, of one warp
        ("sm_80", 32, 16, 0, 32, 50.0),
        ("sm_86", 32, 16, 0, 16, 100 / 3),
        ("sm_89", 32, 16, 0, 24, 50.0),
        ("sm_89", 1024, 32, 0, 1, 200 / 3),
        ("sm_89", 33, 32, 0, 24, 100.0),  # 33 threads are two warps
        # the most that a block can have: 99 KiB, and 227
        ("sm_89", 256, 128, 99 << 10, 1, 8 / 48 * 100),
        ("sm_90a", 384, 168, 227 << 10, 1, 12 / 64 * 100),
        ("sm_90a", 384, 168, 228 << 10, 0, 0.0),
    ],
)
def test_occupancy_by_hand(arch, threads, registers, shared, blocks, percent):
    assert occupancy.blocks(arch, threads, registers, shared) == blocks
    assert occupancy.percent(arch, threads, registers, shared) == pytest.approx(percent)


CALCULATOR = """
#include <cstdio>
#include <cuda_occupancy.h>
int main() {
  int major, minor, per_sm, per_sm_shared, threads, registers, shared;
  while (scanf("%d %d %d %d %d %d %d", &major, &minor, &per_sm, &per_sm_shared, &threads, &registers, &shared) == 7) {
    cudaOccDeviceProp device{};
    device.computeMajor = major, device.computeMinor = minor, device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiprocessor = per_sm, device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.warpSize = 32, device.sharedMemPerBlock = 49152, device.sharedMemPerMultiprocessor = per_sm_shared;
    device.numSms = 1, device.sharedMemPerBlockOptin = per_sm_shared - 1024, device.reservedSharedMemPerBlock = 1024;
    cudaOccFuncAttributes function{};
    function.maxThreadsPerBlock = 1024, function.numRegs = registers, function.sharedSizeBytes = 0;
    function.maxDynamicSharedSizeBytes = per_sm_shared, function.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    function.numBlockBarriers = 1;
    cudaOccDeviceState state{};
    state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult result{};
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &function, &state, threads, shared)) printf("-1\\n");
    else printf("%d\\n", result.activeBlocksPerMultiprocessor);
  }
}
"""


@pytest.mark.skipif(
    toolchain.toolkit() is None or not (toolchain.toolkit() / "include" / "cuda_occupancy.h").exists(),
    reason="no header",
)
def test_occupancy_is_that_of_nvidias_own_calculator(tmp_path):
    """`cuda_occupancy.h` compiled here, over a grid of kernels."""
    source = tmp_path / "calculator.cpp"
    source.write_text(CALCULATOR)
    include = toolchain.toolkit() / "include"
    subprocess.run([toolchain.compiler(), "-w", f"-I{include}", source, "-o", tmp_path / "calculator"], check=True)
    archs = ("sm_80", "sm_86", "sm_89", "sm_90a")
    threads, registers = (
        (1, 32, 96, 128, 160, 256, 384, 512, 800, 1024),
        (1, 8, 24, 32, 33, 40, 64, 72, 96, 128, 168, 255),
    )
    grid = list(product(archs, threads, registers, (0, 1, 1024, 6784, 6785, 8448, 28672, 49152, 65536, 101376, 166912)))
    lines = []
    for arch, *kernel in grid:
        limits = occupancy.LIMITS[arch]
        number = toolchain.arch_number(arch)
        lines.append(" ".join(map(str, (number // 10, number % 10, 32 * limits.warps, limits.shared_bytes, *kernel))))
    done = subprocess.run([tmp_path / "calculator"], input="\n".join(lines), capture_output=True, text=True, check=True)
    expected = [int(word) for word in done.stdout.split()]
    assert len(expected) == len(grid) and max(expected) == 32 and len(set(expected)) > 10 and -1 not in expected
    wrong = [(kernel, want, got) for kernel, want in zip(grid, expected, strict=True)
             if (got := occupancy.blocks(*kernel)) != want]  # fmt: skip
    assert not wrong, f"{len(wrong)} of {len(grid)}, such as {wrong[:5]}"
