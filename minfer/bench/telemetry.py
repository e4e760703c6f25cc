"""The GPU's clocks, power, temperature and reasons for throttling, read through NVML."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

INTERVAL_S = 0.1
METER_S = 0.01  # asking takes 4 ms on an H200, whose counter moves every 100 ms

# NVML's bits, by name; the idle bit is not a reason to distrust a number.
THROTTLE = {
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clock",
}


class Telemetry:
    """Reads one GPU. On a machine where NVML does not answer, `sample` is empty rather than an error."""

    def __init__(self, device: torch.device) -> None:
        self._handle = None
        if device.type != "cuda":
            return
        import pynvml

        try:
            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        except pynvml.NVMLError:
            pass

    def sample(self) -> dict[str, Any]:
        """The state now, as columns of a row; takes about a millisecond."""
        if self._handle is None:
            return {}
        import pynvml

        try:
            reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)
            return {
                "sm_mhz": pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM),
                "memory_mhz": pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_MEM),
                "power_w": pynvml.nvmlDeviceGetPowerUsage(self._handle) / 1000,
                "temperature_c": pynvml.nvmlDeviceGetTemperature(self._handle, pynvml.NVML_TEMPERATURE_GPU),
                "throttle": "+".join(name for bit, name in THROTTLE.items() if reasons & bit),
            }
        except pynvml.NVMLError:
            return {}

    @contextlib.contextmanager
    def meter(self) -> Iterator[list[tuple[float, float]]]:
        """While the block runs, the joules that the board has drawn, whenever the counter moves: `(perf_counter, joules)`.

        Empty where NVML has no such counter."""
        readings: list[tuple[float, float]] = []
        if self._handle is None:
            yield readings
            return
        import pynvml

        def read() -> None:
            with contextlib.suppress(pynvml.NVMLError):
                joules = pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000
                if not readings or readings[-1][1] != joules:
                    readings.append((time.perf_counter(), joules))

        with _repeating(read, METER_S):
            yield readings

    def max_sm_mhz(self) -> float | None:
        """The highest SM clock that the GPU can run at."""
        if self._handle is None:
            return None
        import pynvml

        try:
            return float(pynvml.nvmlDeviceGetMaxClockInfo(self._handle, pynvml.NVML_CLOCK_SM))
        except pynvml.NVMLError:
            return None

    @contextlib.contextmanager
    def watch(self) -> Iterator[dict[str, Any]]:
        """Sample ten times a second while the block runs; what is yielded then has the columns of a row."""
        columns: dict[str, Any] = {}
        if self._handle is None:
            yield columns
            return
        samples: list[dict[str, Any]] = []
        begin = time.perf_counter()
        with _repeating(lambda: samples.append({"s": time.perf_counter() - begin, **self.sample()}), INTERVAL_S):
            yield columns
        for name in ("s", "sm_mhz", "memory_mhz", "power_w", "temperature_c"):
            columns[f"watch_{name}"] = [float(sample[name]) for sample in samples if name in sample]
        reasons = {reason for sample in samples for reason in sample.get("throttle", "").split("+") if reason}
        columns["watch_throttle"] = "+".join(sorted(reasons))


@contextlib.contextmanager
def _repeating(call: Callable[[], object], seconds: float) -> Iterator[None]:
    """Call again and again, at this interval, in a thread of its own while the block runs."""
    done = threading.Event()

    def loop() -> None:
        call()
        while not done.wait(seconds):
            call()

    thread = threading.Thread(target=loop, name="telemetry", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def watts(readings: Sequence[tuple[float, float]], begin: float, end: float) -> float | None:
    """The mean power between the first and the last move of the energy counter from `begin` to `end`, in watts; None where
    it moved less than twice, or by less than a tick.

    The counter moves by a clock of its own, and is seen milliseconds late. So the time between two moves is a number of its
    ticks, and the tick is the mean over all readings."""
    if len(readings) < 3:
        return None
    times = [at for at, _ in readings]
    rough = statistics.median(b - a for a, b in itertools.pairwise(times))
    ticks = list(itertools.accumulate((round((b - a) / rough) for a, b in itertools.pairwise(times)), initial=0))
    tick = (times[-1] - times[0]) / ticks[-1]
    inside = [index for index, at in enumerate(times) if begin <= at <= end]
    # Two readings that follow at once may be one move, seen in two parts.
    if len(inside) < 2 or ticks[inside[0]] == ticks[inside[-1]]:
        return None
    first, last = inside[0], inside[-1]
    return (readings[last][1] - readings[first][1]) / ((ticks[last] - ticks[first]) * tick)
