"""The GPU's clocks, power, temperature and reasons for throttling, read through NVML."""

from __future__ import annotations

from typing import Any

import torch

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
