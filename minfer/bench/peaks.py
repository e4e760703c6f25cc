"""The measured peaks of this device: the roofs of its roofline, and the floor under every time.

A roofline bounds a kernel's rate by the memory bandwidth times its FLOPs a byte, and by the peak rate of its
arithmetic (Williams, Waterman and Patterson, Roofline: an insightful visual performance model for multicore
architectures, CACM 52(4), 2009). `python -m minfer.bench.peaks` prints the peaks of this machine. They are a flat
mapping from name to number:

- `copy_gbps` (bytes read plus bytes written), `read_gbps`: GB/s of buffers far larger than the last-level cache;
- `cold_copy_64mib_gbps`, ...: GB/s of single copies that read and write 64 MiB together, timed like cold calls, which
  are compared with them (`copy_rate` of `minfer.rows.roofs`);
- `mma_float16_float32`, `wgmma_bfloat16_float32`, ...: TFLOP/s of dense products, by the tensor cores' instruction
  class, the dtype of the inputs (float16, bfloat16 or float8_e4m3fn) and that of the accumulator. FLOPs count a
  multiply-add as two;
- `fma_float32`: TFLOP/s of the CUDA cores' fp32 multiply-adds;
- `copy_mhz`, `mma_float16_float32_mhz`, ...: the SM clock seen while that rate ran, where NVML answers;
- `max_sm_mhz`: the highest SM clock that the GPU can run at.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from minfer import build
from minfer.bench import device as devices
from minfer.bench.clock import Candidate, Clock, Hooks, clock_for
from minfer.bench.telemetry import Telemetry
from minfer.build.errors import BuildError
from minfer.ops import DTYPES, Kernel
from minfer.rows.roofs import copy_rate, name_cold_copy
from minfer.rows.rules import HEADROOM

KERNEL = Kernel("bench", "peaks", "cuda", Path(__file__).with_suffix(".cu"), archs="sm_80+")

# Of one iteration of a block in peaks.cu: an instruction's FLOPs x instructions in the loop x warps or warpgroups. Of a
# tensor core's with operands of 16 bits; with 8 bits an instruction does twice as many.
THREADS = 256
BLOCK_FLOPS = {"mma": 2 * 16 * 8 * 16 * 32 * 8, "wgmma": 2 * 64 * 256 * 16 * 8 * 2, "fma": 2 * 16 * 8 * THREADS}
BLOCKS_PER_SM = {"mma": 2, "wgmma": 1, "fma": 4}
ITERATIONS = 4096  # 2 ms of mma and 5 ms of wgmma on an H200: starting a launch is then below 0.2 % of it
OPERANDS = 1 << 16

FP8 = "float8_e4m3fn"
ACCUMULATORS = (("float16", "float32"), ("float16", "float16"), ("bfloat16", "float32"), (FP8, "float32"))
CLASSES = ("wgmma", "mma")

# By the peak's name: a call that measures it, and the bytes or FLOPs of that call. Several calls may measure the same
# peak in different ways, under names `peak:way`. The best of them counts.
Probes = dict[str, tuple[Candidate, float]]

WARMUP_S = 0.2
CUDA_WINDOW_S = 0.2
# How often the SM clock is read for a probe, and the pause after each reading. The first one is at 3/4 of the window, and the
# last one must be before its end.
CLOCKS, CLOCKS_S = 9, 0.002
CPU_WINDOW_S = 0.1
GRAIN = 16 << 10  # bytes that a block of peaks.cu moves at a time
CUDA_CACHES = 64  # a buffer's size: going over it again and again then finds at most 1.6 % still in the cache
LEAST_CUDA_BUFFER, MOST_CPU_BUFFER = 1 << 30, 1 << 30
WORDS = (1, 4)  # 16-byte words that a thread of peak_copy moves
COLD_COPIES_MIB = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # read plus written
COLD_ROUNDS = 11


def measure(device: torch.device, telemetry: Telemetry) -> dict[str, float]:
    """Measure every peak of a device: a few seconds on a GPU, under 1 s on a CPU (where FLOPs are left out).

    Bandwidth is the best window, because nothing but disturbance changes it. A tensor core's rate is the median of the
    second half of a block, because at first the card has not yet noticed that it is over its power limit. That of a cold
    copy is the median of single calls, as a kernel's is. Raises BuildError where a GPU's kernels cannot be compiled.
    """
    clock = clock_for(device)
    if device.type != "cuda":
        probes = _cpu_probes(device)
        for probe, _ in probes.values():  # touch every page
            probe(0)
        return _rates(probes, clock, telemetry, CPU_WINDOW_S)
    bandwidth, products = _bandwidth_probes(device), _product_probes(device)
    end = time.perf_counter() + WARMUP_S
    while time.perf_counter() < end:  # compile lazily, touch every page, and leave the idle clocks
        for probe, _ in itertools.chain(bandwidth.values(), products.values()):
            probe(0)
        torch.cuda.synchronize(device)
    peaks = _rates(bandwidth, clock, telemetry, CUDA_WINDOW_S)
    peaks |= _cold_copies(device, clock)  # before the products, which heat the card and so lower its clock
    peaks |= _rates(products, clock, telemetry, CUDA_WINDOW_S)
    if fastest := telemetry.max_sm_mhz():
        peaks["max_sm_mhz"] = fastest
    return peaks


def _rates(probes: Probes, clock: Clock, telemetry: Telemetry, window_s: float) -> dict[str, float]:
    """GB/s or TFLOP/s of each peak, and the SM clock at which it was reached."""
    peaks: dict[str, float] = {}
    seen: list[float] = []

    def see_clock() -> None:
        """Read the SM clock several times, because a card at its power limit changes it every few milliseconds."""
        seen.clear()
        for _ in range(CLOCKS):
            if not (mhz := telemetry.sample().get("sm_mhz")):
                break
            seen.append(float(mhz))
            time.sleep(CLOCKS_S)

    for name, (probe, work) in probes.items():
        times = clock.steady(probe, 1, window_s, see_clock)
        name = name.partition(":")[0]
        bandwidth = name.endswith("_gbps")
        rate = work / float(times.min()) / 1e9 if bandwidth else work / float(np.median(times)) / 1e12
        if rate <= peaks.get(name, 0.0):  # another way to the same peak was better
            continue
        peaks[name] = rate
        if seen:
            peaks[f"{name.removesuffix('_gbps')}_mhz"] = float(np.median(seen))
    return peaks


def _cold_copies(device: torch.device, clock: Clock) -> dict[str, float]:
    """GB/s of single copies, by size. The fastest way to copy counts, by its median time. Sizes of more than half of the free
    memory are left out."""
    free, _ = torch.cuda.mem_get_info(device)
    sizes = [size for size in COLD_COPIES_MIB if size << 20 <= free // 2]
    source = torch.zeros(max(sizes, default=0) << 17, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    found = {}
    for size in sizes:
        ways = [way for _, way in _copies(target[: size << 17], source[: size << 17])]
        times = clock.cold(ways, np.tile(np.arange(len(ways)), (COLD_ROUNDS, 1)), Hooks())
        found[name_cold_copy(size)] = (size << 20) / float(np.median(times, axis=0).min()) / 1e9
    return found


def _copies(target: torch.Tensor, source: torch.Tensor) -> list[tuple[str, Candidate]]:
    """The ways to copy on a GPU, each with a name: the driver's own, and those of peaks.cu."""
    ways: list[tuple[str, Candidate]] = [("driver", lambda index: target.copy_(source))]
    return ways + [(f"words{words}", _own_copy(target, source, words)) for words in WORDS]


def _own_copy(target: torch.Tensor, source: torch.Tensor, words: int) -> Candidate:
    return lambda index: torch.ops.minfer.peak_copy(target, source, words)


def load(device: torch.device) -> None:
    """Compile peaks.cu, or find it in the cache, and register `torch.ops.minfer.peak_*`. Raises BuildError."""
    if not hasattr(torch.ops.minfer, "peak_copy"):
        torch.ops.load_library(build.build(KERNEL, devices.arch(device)).library)


def _bandwidth_probes(device: torch.device) -> Probes:
    load(device)
    random = torch.Generator(device).manual_seed(0)
    free, _ = torch.cuda.mem_get_info(device)
    size = min(max(CUDA_CACHES * devices.cache_bytes(device), LEAST_CUDA_BUFFER), free // 4) // GRAIN * GRAIN
    source = torch.empty(size // 4, dtype=torch.int32, device=device).random_(generator=random)
    target, sink = torch.empty_like(source), torch.zeros(1, dtype=torch.int32, device=device)
    copies: Probes = {f"copy_gbps:{name}": (way, 2.0 * size) for name, way in _copies(target, source)}
    return copies | {"read_gbps": (lambda index: torch.ops.minfer.peak_read(sink, source), float(size))}


def _product_probes(device: torch.device) -> Probes:
    load(device)
    random = torch.Generator(device).manual_seed(0)
    probes: Probes = {}
    capability = devices.capability(device) or (0, 0)
    # Data-centre Blackwell multiplies with tcgen05, and mma.sync there is no roof. A rate that is missing bounds
    # nothing; one that is too low would call good kernels impossible.
    classes = {9: ("mma", "wgmma"), 10: (), 11: ()}.get(capability[0], ("mma",))
    for instruction in (*classes, "fma"):
        blocks = BLOCKS_PER_SM[instruction] * torch.cuda.get_device_properties(device).multi_processor_count
        for dtype, accumulate in ACCUMULATORS if instruction != "fma" else (("", "float32"),):
            if not multiplies(capability, instruction, dtype):
                continue
            operands = torch.randn(OPERANDS, generator=random, device=device).to(DTYPES[dtype or accumulate])
            sums = torch.zeros((blocks, THREADS), dtype=DTYPES[accumulate], device=device)
            work = block_flops(instruction, dtype) * blocks * ITERATIONS
            probes["_".join(filter(None, (instruction, dtype, accumulate)))] = (
                _product(instruction, sums, operands),
                work,
            )
    return probes


def block_flops(instruction: str, dtype: str) -> float:
    """What a block of peaks.cu does in an iteration with operands of this dtype."""
    return float(BLOCK_FLOPS[instruction]) * (2 if dtype == FP8 else 1)


def multiplies(capability: tuple[int, int], instruction: str, dtype: str) -> bool:
    """Whether the GPU has the instruction for operands of this dtype. Hopper multiplies e4m3 with wgmma alone; where Ada
    and consumer Blackwell have an instruction of mma.sync, its compiler puts conversions and fp16 products."""
    return dtype != FP8 or instruction == "wgmma" or capability == (8, 9) or capability[0] >= 12


def _product(instruction: str, sums: torch.Tensor, operands: torch.Tensor) -> Candidate:
    function = getattr(torch.ops.minfer, f"peak_{instruction}").default
    return lambda index: function(sums, operands, ITERATIONS)


def _cpu_probes(device: torch.device) -> Probes:
    """Copies one half of a buffer to the other, and reads all of it. What a store reads first is not counted."""
    size = min(4 * devices.cache_bytes(device), MOST_CPU_BUFFER) // 8 * 8
    buffer, sink = torch.ones(size // 4, dtype=torch.float32), torch.zeros(())
    source, target = buffer.chunk(2)
    return {
        "copy_gbps": (lambda index: target.copy_(source), float(size)),
        "read_gbps": (lambda index: torch.sum(buffer, dim=0, out=sink), float(size)),
    }


Traffic = tuple[float, float]  # bytes read and bytes written
Arithmetic = (
    tuple[str, str] | None
)  # of an op: dtypes of a tensor core's inputs and accumulator, ("fma", "float32"), none


def floor_seconds(
    peaks: Mapping[str, float], flops: float, input_bytes: float, arithmetic: Arithmetic, max_sm_mhz: float
) -> float:
    """The least time that the device allows a kernel whose caches are cold; a shorter time is a measuring error.

    It is the longer of reading the inputs once and of doing the FLOPs. Outputs do not count, because they may still be
    in the cache when the clock stops. What is physical of an arithmetic unit is its FLOPs a cycle: its peak rate was seen
    at the clock that the power limit left, but a short kernel on a cool card may run at the highest, `max_sm_mhz`
    (`math.inf` where it is unknown: then FLOPs bound nothing). Both are taken with HEADROOM. 0.0 where nothing is
    known.
    """
    bandwidth = max(peaks.get("read_gbps", 0.0), peaks.get("copy_gbps", 0.0)) * 1e9
    names = _names(peaks, arithmetic)
    clocks = {name: peaks.get(f"{name}_mhz", 0.0) for name in names}
    scale = {name: max(1.0, max_sm_mhz / mhz) if mhz > 0 else math.inf for name, mhz in clocks.items()}
    rate = max((peaks[name] * scale[name] for name in names), default=0.0) * 1e12
    reading = input_bytes / bandwidth if bandwidth > 0 else 0.0
    computing = flops / rate if rate > 0 else 0.0
    return max(reading, computing) / HEADROOM


def percent(
    peaks: Mapping[str, float], flops: float, traffic: Traffic, arithmetic: Arithmetic, seconds: float, *, cold: bool
) -> float:
    """How much of the roofline a kernel reaches, in percent: the least time that the measured peaks allow for `flops`
    and `traffic`, over the time it took. Rates are as seen, at the clock that they ran at.

    Memory reads faster than it copies. So what a kernel reads beyond what it writes counts at the peak of reading.

    A `cold` call is compared with cold copies of as many bytes, steady calls with a long copy. A roof that was not measured
    is left out: on a CPU, it is the share of the bandwidth alone."""
    return 100 * max(_limits(peaks, flops, traffic, arithmetic, cold).values(), default=0.0) / seconds


def roof(peaks: Mapping[str, float], flops: float, traffic: Traffic, arithmetic: Arithmetic) -> str | None:
    """The name of the peak that bounds the work, of memory's two the one that takes the larger part of the time; None where
    none was measured."""
    limits = _limits(peaks, flops, traffic, arithmetic, cold=True)
    return max(limits, key=lambda name: limits[name], default=None)


def _limits(
    peaks: Mapping[str, float], flops: float, traffic: Traffic, arithmetic: Arithmetic, cold: bool
) -> dict[str, float]:
    """The least seconds that the work takes by each of the measured peaks that bound it: of several classes of
    instructions for the same arithmetic, by the fastest."""
    found = {}
    read, written = traffic
    if copy := copy_rate(peaks, read + written) if cold else peaks.get("copy_gbps", 0.0):
        copying = (min(read, written) + written) / (copy * 1e9)
        reading = (read - min(read, written)) / (max(copy, peaks.get("read_gbps", 0.0)) * 1e9)
        found["read_gbps" if reading > copying and peaks.get("read_gbps") else "copy_gbps"] = copying + reading
    if fastest := max(_names(peaks, arithmetic), key=lambda name: peaks[name], default=None):
        found[fastest] = flops / (peaks[fastest] * 1e12)
    return found


def _names(peaks: Mapping[str, float], arithmetic: Arithmetic) -> list[str]:
    """The rates that were measured for this arithmetic."""
    if arithmetic is None:
        return []
    inputs, accumulator = arithmetic
    names = ["fma_float32"] if inputs == "fma" else [f"{kind}_{inputs}_{accumulator}" for kind in CLASSES]
    return [name for name in names if peaks.get(name, 0.0) > 0]


def main() -> None:
    if len(sys.argv) > 1:  # an architecture: compile only
        try:
            build.build(KERNEL, sys.argv[1])
        except BuildError as error:
            sys.exit(str(error))
        return
    device = devices.pick("cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(measure(device, Telemetry(device)), indent=1))


if __name__ == "__main__":
    main()
