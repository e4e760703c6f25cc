"""Measured peaks: the machine code of the probes, the formulas that use them, and what a device must show."""

from __future__ import annotations

import math
import re
import subprocess

import pytest
import torch

from minfer.bench import peaks
from minfer.bench.clock import clock_for
from minfer.bench.device import capability, pick
from minfer.bench.telemetry import Telemetry
from minfer.build import device_code, toolchain
from minfer.ops import DTYPES
from minfer.rows import roofs
from minfer.rows.rules import HEADROOM

needs_nvcc = pytest.mark.skipif(toolchain.toolkit() is None, reason="no CUDA compiler that fits this PyTorch")


@pytest.fixture(scope="module", params=[pytest.param("sm_89", marks=pytest.mark.slow), "sm_90a"])
def compiled(request, tmp_path_factory):
    """The architecture, the binary, and the instructions of each function: pairs of address and text."""
    binary = device_code.compile_cubin(peaks.KERNEL, request.param, tmp_path_factory.mktemp("peaks"))
    tool = toolchain.toolkit() / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-sass", binary], capture_output=True, text=True, check=True).stdout
    functions = {}
    for part in text.split("Function : ")[1:]:
        lines = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*;", part)
        functions[part.split("\n")[0].strip()] = [(int(address, 16), words) for address, words in lines]
    return request.param, binary, functions


def last_loop(instructions: list[tuple[int, str]]) -> list[str]:
    """The body of the last loop: what lies between a backward branch and its target."""
    found = []
    for address, words in instructions:
        jump = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", words)
        if jump and int(jump[1], 16) < address:
            found = [text for place, text in instructions if int(jump[1], 16) <= place <= address]
    return found


def functions_of(functions, kernel: str) -> dict[str, list[str]]:
    """The loops of a kernel's instantiations, by the tensor core's instruction in them; "" of one that only traps."""
    loops = [last_loop(code) for name, code in functions.items() if kernel in name]
    return {next(iter(re.findall(r"[HQ]G?MMA[\w.]*", " ".join(loop))), ""): loop for loop in loops}


@needs_nvcc
def test_probes_keep_everything_in_registers(compiled):
    arch, binary, _ = compiled
    used = device_code.resources(binary, arch, toolchain.toolkit())
    assert used["local_bytes"] == 0
    assert used["registers"] <= (160 if arch == "sm_90a" else 128)  # two blocks of 256 threads an SM without wgmma


@needs_nvcc
def test_mma_loop_does_nothing_but_multiply(compiled):
    arch, _, functions = compiled
    loops = functions_of(functions, "8mma_loop")
    fp8 = "QMMA.16832.F32.E4M3.E4M3" if arch == "sm_89" else ""
    assert set(loops) == {"HMMA.16816.F32", "HMMA.16816.F16", "HMMA.16816.F32.BF16", fp8}
    assert not loops.pop("", [])  # Hopper has no such instruction of fp8: the kernel traps
    for name, loop in loops.items():
        count = sum(name in words for words in loop)
        deep, dtype = (32, peaks.FP8) if name == fp8 else (16, "float16")
        assert peaks.block_flops("mma", dtype) == 2 * 16 * 8 * deep * count * peaks.THREADS // 32
        assert len(loop) - count <= 5, f"{name}: {loop}"  # counter, comparison, branch


@needs_nvcc
def test_wgmma_loop_exists_on_hopper_alone_and_does_nothing_but_multiply(compiled):
    arch, _, functions = compiled
    if arch != "sm_90a":
        assert not any("GMMA" in words for code in functions.values() for _, words in code)
        return
    loops = functions_of(functions, "wgmma_loop")
    fp8 = "QGMMA.64x256x32.F32.E4M3.E4M3"
    assert set(loops) == {"HGMMA.64x256x16.F32", "HGMMA.64x256x16.F16", "HGMMA.64x256x16.F32.BF16", fp8}
    for name, loop in loops.items():
        count = sum(name in words for words in loop)
        deep, dtype = (32, peaks.FP8) if name == fp8 else (16, "float16")
        assert peaks.block_flops("wgmma", dtype) == 2 * 64 * 256 * deep * count * peaks.THREADS // 128
        # The scalar unit makes descriptors; vector registers move only in the comparison.
        rest = [words for words in loop if not re.match(r"([HQ]GMMA|WARPGROUP|U\w+|@!?U?P\d+ BRA|BRA|ISETP)\b", words)]
        assert not rest and len(loop) <= 30, f"{name}: {loop}"
        # A group stays in flight while the next is issued; the compiler did not wait for each instruction.
        waits = [words for words in loop if "DEPBAR" in words]
        assert len(waits) == 2 and all(words.endswith("0x1") for words in waits)


@needs_nvcc
def test_bandwidth_probes_load_before_they_store_and_16_bytes_at_a_time(compiled):
    _, _, functions = compiled
    reading = last_loop(next(code for name, code in functions.items() if "read_chunks" in name))
    assert accesses(reading) == ["LDG"] * 4
    copying = {name: [words for _, words in code] for name, code in functions.items() if "copy_chunk" in name}
    assert sorted(accesses(code) for code in copying.values()) == [["LDG"] * 4 + ["STG"] * 4, ["LDG", "STG"]]


def accesses(code: list[str]) -> list[str]:
    """The accesses to global memory, in order. Each takes 16 bytes."""
    kinds = [word for words in code for word in re.findall(r"\b(?:LDG|STG)[\w.]*", words)]
    assert all(kind.endswith(".128") for kind in kinds)
    return [kind[:3] for kind in kinds]


PEAKS = {
    "copy_gbps": 4200.0,
    "read_gbps": 4000.0,
    "mma_float16_float32": 600.0,
    "mma_float16_float32_mhz": 1800.0,
    "wgmma_float16_float32": 800.0,
    "wgmma_float16_float32_mhz": 1600.0,
    "mma_bfloat16_float32": 600.0,
}


def floor(flops: float, input_bytes: float, dtype: str = "float16", measured=PEAKS, mhz: float = 2000.0) -> float:
    return peaks.floor_seconds(measured, flops, input_bytes, (dtype, "float32"), mhz) * HEADROOM


def test_floor_is_the_longer_of_reading_and_computing():
    # wgmma at 2000 MHz: 800 * 2000 / 1600 = 1000 TFLOP/s; mma would be 600 * 2000 / 1800 = 667.
    assert floor(2e12, 4.2e9) == pytest.approx(2e-3)
    assert floor(2e12, 12.6e9) == pytest.approx(3e-3)  # over the copy's 4200 GB/s, the better of the two
    assert floor(0, 4e9, measured={"read_gbps": 5000.0, "copy_gbps": 4000.0}) == pytest.approx(0.8e-3)


def test_floor_never_scales_down_and_bounds_nothing_that_is_unknown():
    assert floor(8e11, 0, mhz=1000.0) == pytest.approx(1e-3)
    assert floor(2e12, 0, mhz=math.inf) == 0.0
    assert floor(2e12, 0, "bfloat16") == 0.0  # its clock was not seen
    assert floor(2e12, 0, "float32") == 0.0
    assert floor(2e12, 4.2e9, "float32") == pytest.approx(1e-3)
    assert floor(2e12, 4.2e9, measured={}) == 0.0


def test_percent_is_of_the_nearer_roof():
    half = (1.05e9, 1.05e9)
    assert peaks.percent(PEAKS, 4e11, half, ("float16", "float32"), 1e-3, cold=False) == pytest.approx(
        50.0
    )  # both 0.5 ms
    assert peaks.percent(PEAKS, 8e11, half, ("float16", "float32"), 2e-3, cold=False) == pytest.approx(
        50.0
    )  # 1 ms of wgmma
    assert peaks.percent(PEAKS, 4e11, (2.1e9, 2.1e9), ("float16", "float32"), 2e-3, cold=False) == pytest.approx(
        50.0
    )  # 1 ms of copying
    assert peaks.percent(PEAKS, 3e11, (0, 0), ("bfloat16", "float32"), 1e-3, cold=False) == pytest.approx(
        50.0
    )  # mma alone is known
    assert peaks.percent(PEAKS, 1e15, half, ("float32", "float32"), 1e-3, cold=False) == pytest.approx(50.0)
    assert peaks.percent({}, 1e12, half, ("float16", "float32"), 1e-3, cold=False) == 0.0


def test_what_is_read_and_not_written_counts_at_the_peak_of_reading():
    faster = {"copy_gbps": 4000.0, "read_gbps": 5000.0}
    for traffic, ms, roof in (
        ((5e9, 0), 1.0, "read_gbps"),
        ((7e9, 2e9), 2.0, "copy_gbps"),  # 4 GB are copied, 5 read
        ((12e9, 2e9), 3.0, "read_gbps"),
        ((0, 4e9), 1.0, "copy_gbps"),
    ):
        assert peaks.percent(faster, 0, traffic, None, ms * 1e-3, cold=False) == pytest.approx(100.0)
        assert peaks.roof(faster, 0, traffic, None) == roof
    assert peaks.percent({"copy_gbps": 4000.0}, 0, (4e9, 0), None, 1e-3, cold=False) == pytest.approx(100.0)
    assert peaks.roof({"copy_gbps": 4000.0}, 0, (4e9, 0), None) == "copy_gbps"


def test_a_cold_call_is_compared_with_cold_copies_of_as_many_bytes():
    """Interpolated over the logarithm of the size, never below the rate of a long copy, which also holds outside."""
    known = {
        "copy_gbps": 3000.0,
        "cold_copy_16mib_gbps": 2500.0,
        "cold_copy_64mib_gbps": 3300.0,
        "cold_copy_256mib_gbps": 3100.0,
    }
    mib = 2.0**20
    for size, rate in ((8, 3000), (16, 3000), (32, 3000), (64, 3300), (128, 3200), (256, 3100), (257, 3000)):
        traffic = (size * mib / 2, size * mib / 2)
        seconds = size * mib / rate / 1e9
        assert peaks.percent(known, 0, traffic, None, seconds, cold=True) == pytest.approx(100.0)
        assert peaks.percent(known, 0, traffic, None, seconds, cold=False) == pytest.approx(100.0 * rate / 3000)
        assert peaks.roof(known, 0, traffic, None) == "copy_gbps"
    assert roofs.copy_rate({}, mib) == 0.0


def test_a_peaks_clock_is_the_median_of_its_own_readings(monkeypatch):
    """One reading may be far off, and those of an earlier probe do not count."""
    monkeypatch.setattr(peaks, "CLOCKS_S", 0.0)
    telemetry, device = Telemetry(torch.device("cpu")), torch.device("cpu")
    readings = iter([*[900] * peaks.CLOCKS, *[1500] * (peaks.CLOCKS // 2 + 1), *[1200] * (peaks.CLOCKS // 2)])
    monkeypatch.setattr(telemetry, "sample", lambda: {"sm_mhz": next(readings)})
    probes = {"first_gbps": (lambda i: None, 1.0), "second": (lambda i: None, 1.0)}
    measured = peaks._rates(probes, clock_for(device), telemetry, 0.0)
    assert (measured["first_mhz"], measured["second_mhz"]) == (900.0, 1500.0)


@pytest.mark.timing
def test_cpu_peaks_are_plausible():
    device = pick("cpu")
    measured = peaks.measure(device, Telemetry(device))
    assert set(measured) == {"copy_gbps", "read_gbps"}
    assert all(0.5 < value < 5000 for value in measured.values())


@pytest.mark.timing
@pytest.mark.gpu
def test_gpu_peaks_are_plausible():
    device = pick("cuda")
    telemetry = Telemetry(device)
    peaks.load(device)
    measured = peaks.measure(device, telemetry)
    print(measured)
    assert all(math.isfinite(value) and value > 0 for value in measured.values())
    assert measured["read_gbps"] >= 0.8 * measured["copy_gbps"]
    assert measured[roofs.name_cold_copy(1024)] >= 0.8 * measured["copy_gbps"]
    rates = {name for name in measured if name.startswith(("mma", "wgmma")) and not name.endswith("_mhz")}
    assert rates or capability(device)[0] in (10, 11)
    if rates:
        assert measured["mma_float16_float16"] >= 0.95 * measured["mma_float16_float32"]
    if telemetry.sample():
        assert all(measured[f"{name.removesuffix('_gbps')}_mhz"] > 0 for name in rates | {"copy_gbps", "read_gbps"})
    if capability(device) == (9, 0):
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        for name in rates:
            # An SM of Hopper does 4096 dense FLOPs a cycle: 989 TFLOP/s at the datasheet's 1830 MHz with 132 SMs.
            per_cycle = measured[name] * 1e6 / sms / measured[f"{name}_mhz"]
            # Of e4m3 it does twice as many.
            per_cycle /= 2 if peaks.FP8 in name else 1
            least = 3300 if name.startswith("wgmma") else 2000  # below it, the probe does not fill the tensor cores
            assert least < per_cycle < 4096 * 1.06, f"{name}: {per_cycle:.0f} FLOPs a cycle"
        assert f"wgmma_{peaks.FP8}_float32" in rates and f"mma_{peaks.FP8}_float32" not in rates
        for dtype, accumulate in (pair for pair in peaks.ACCUMULATORS if pair[0] != peaks.FP8):
            assert measured[f"wgmma_{dtype}_{accumulate}"] > measured[f"mma_{dtype}_{accumulate}"]
    elif rates:
        assert not any(name.startswith("wgmma") for name in rates)


@pytest.mark.gpu
@pytest.mark.parametrize("instruction", ["mma", "wgmma"])
@pytest.mark.parametrize("dtype, accumulate", peaks.ACCUMULATORS)
def test_gpu_products_stay_in_range(instruction, dtype, accumulate):
    """Power depends on the data: after any number of iterations the sums are still of a real product's size."""
    device = pick("cuda")
    peaks.load(device)
    operands = torch.randn(peaks.OPERANDS, device=device).to(DTYPES[dtype])
    sums = torch.full((4, peaks.THREADS), math.nan, dtype=DTYPES[accumulate], device=device)
    function = getattr(torch.ops.minfer, f"peak_{instruction}")
    if instruction == "wgmma" and capability(device) != (9, 0):
        with pytest.raises(RuntimeError, match="sm_90a"):
            function(sums, operands, 1)
        return
    if not peaks.multiplies(capability(device), instruction, dtype):
        with pytest.raises(RuntimeError, match="sm_89"):
            function(sums, operands, 1)
        return
    for iterations in (1, 10_000):
        function(sums, operands, iterations)
        assert bool(sums.isfinite().all())
        assert 1e-2 < float(sums.float().std()) < 1e3
        assert torch.equal(sums[0], sums[3])  # every block did the same


@pytest.mark.gpu
def test_gpu_copy_copies_and_read_leaves_the_sink_alone():
    device = pick("cuda")
    peaks.load(device)
    source = torch.arange(3 * peaks.GRAIN // 4, dtype=torch.int32, device=device)
    sink = torch.zeros(1, dtype=torch.int32, device=device)
    for words in peaks.WORDS:
        target = torch.zeros_like(source)
        torch.ops.minfer.peak_copy(target, source, words)
        assert torch.equal(target, source)
    torch.ops.minfer.peak_read(sink, source)
    assert int(sink) == 0
    if torch.__version__ >= "2.12":  # in 2.11 an exception that leaves an op of the stable ABI ends the process
        with pytest.raises(RuntimeError, match="multiple of"):
            torch.ops.minfer.peak_copy(target[:5], source[:5], 1)
