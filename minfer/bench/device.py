"""What a row says of the machine: the device, its last-level cache, versions, node."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from minfer.build.toolchain import arch_of

FALLBACK_CACHE = 32 << 20

IMAGE = os.environ.get("MINFER_IMAGE_DIGEST") or None  # set in what the Dockerfile builds
NO_GPU = (
    "no GPU was passed to this container; add --gpus all to docker run, or --nv to apptainer"
    if IMAGE
    else "this node has no CUDA GPU that PyTorch can use; ask for one with cluster.gres=gpu:1, or use device=cpu"
    if "SLURM_JOB_ID" in os.environ
    else "this machine has no CUDA GPU that PyTorch can use; use device=cpu or cluster=slurm"
)


def pick(kind: str) -> torch.device:
    """The device that cases of a kind, "cuda" or "cpu", run on: the first one visible."""
    return torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")


def no_gpu() -> str | None:
    """Why PyTorch can use no GPU here, in a sentence; None where it can. Takes a CUDA context."""
    try:
        torch.cuda.get_device_capability(0)
    except (RuntimeError, AssertionError) as error:
        return driver_too_old(str(error)) or f"device=cuda, and {NO_GPU}"
    return None


def driver_too_old(error: str) -> str | None:
    """What PyTorch's complaint about an old driver, somewhere in `error`, asks of the user, in a sentence."""
    found = re.search(r"driver on your system is too old \(found version (\d+)\)", error)
    if found is None:
        return None
    return _too_old(int(found[1]))


def old_driver(version: int) -> str | None:
    """Why a driver for CUDA `version` (12040 is 12.4) does not serve this PyTorch, in a sentence; None where it does."""
    return _too_old(version) if torch.version.cuda and version // 1000 < int(torch.version.cuda.split(".")[0]) else None


def _too_old(version: int) -> str:
    return (
        f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}, and this PyTorch needs CUDA "
        f"{torch.version.cuda}; update the driver, or install PyTorch for CUDA 12 with export UV_PROJECT=cuda12 "
        "(an image: docs/containers.md)"
    )


def name(device: torch.device) -> str:
    """The GPU's name, or the processor's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def cache_bytes(device: torch.device) -> int:
    """The size of the device's last-level cache: a GPU's L2, a processor's largest."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=FALLBACK_CACHE)


def uuid(device: torch.device) -> str | None:
    """What tells a GPU from every other, whatever its number is here; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def arch(device: torch.device) -> str:
    """What kernels for this device are compiled for, such as `sm_89`; empty for a CPU."""
    found = capability(device)
    return arch_of(found) if found else ""


def environment(device: torch.device) -> dict[str, Any]:
    """The columns of a row that say where it was made."""
    return {
        "device": name(device),
        "device_kind": device.type,
        "arch": arch(device) or platform.machine(),
        "l2_bytes": cache_bytes(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "driver": _driver() if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "node": node(),
        "job": job(),
        "image": IMAGE,
    }


def node() -> str:
    """The name of this machine; in a job SLURM's name for it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def job() -> str | None:
    """SLURM's job as squeue names it: `12_3` is the third task of an array, counted from 0."""
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    return os.environ.get("SLURM_JOB_ID")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
