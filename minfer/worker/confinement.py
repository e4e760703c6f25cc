"""What the foreign code of a shard may see: its own sources, and what PyTorch and the compilers need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from minfer import ops
from minfer.build import cache, toolchain
from minfer.build.errors import BuildError
from minfer.ops import Case
from minfer.plan.shard import Shard, Unfit
from minfer.sandbox import HIDDEN, LEVELS, Sandbox, available, strongest


def make_sandbox(shard: Shard) -> Sandbox:
    """The sandbox for what this shard compiles, loads and runs, at the level that it asks for, else the strongest level. On a
    host with several GPUs, CUDA_VISIBLE_DEVICES names the shard's GPU by its UUID from then on. Raises Unfit."""
    own = [Path(shard.results), Path(shard.folder)]
    for folder in own:  # the sandbox can only hide and show what exists already
        folder.mkdir(parents=True, exist_ok=True)
    try:
        cache.make_folder(cache.root() / "sandboxed")
    except BuildError as error:
        raise Unfit(str(error)) from error
    hidden = {os.path.realpath(folder) for folder in (*own, *map(Path, (tempfile.gettempdir(), *HIDDEN)))}
    needed = sorted(_find_needed(shard, hidden))
    if shard.device != "cuda":
        return Sandbox(shard.sandbox or strongest(), sorted(hidden), needed)
    gpu, every, name = gpu_files()
    if gpu != every:
        os.environ["CUDA_VISIBLE_DEVICES"] = name  # an index would count the GPUs that CUDA can open
    # CUDA shares memory only between processes of one PID namespace: https://github.com/openucx/ucx/issues/11978
    level = shard.sandbox or strongest(LEVELS[1:], gpu)
    starts = level != LEVELS[-1] and available(level, tuple(gpu))
    if gpu != every and not starts:  # CUDA may ask for the files of all GPUs
        gpu, level = every, shard.sandbox or strongest(LEVELS[1:], every)
    return Sandbox(level, sorted(hidden), needed, gpu)


STARTS_S = 60.0  # CUDA may wait for ever
# Prints the PCI address and the UUID of the first GPU that CUDA shows. The driver makes some of its files when first used.
FIRST_GPU = """
import ctypes, uuid
cuda, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
address, name = ctypes.create_string_buffer(32), (ctypes.c_ubyte * 16)()
if not cuda.cuInit(0) and not cuda.cuDeviceGet(ctypes.byref(device), 0):
    cuda.cuDeviceGetPCIBusId(address, len(address), device)
    cuda.cuDeviceGetUuid(name, device)
    print(address.value.decode().lower(), f"GPU-{uuid.UUID(bytes=bytes(name))}")
"""


def gpu_files(dev: Path = Path("/dev"), driver: Path = Path("/proc/driver/nvidia")) -> tuple[list[str], list[str], str]:
    """The driver's device files that this process's GPU needs, those of all GPUs, and this GPU's name for CUDA_VISIBLE_DEVICES.
    Both lists are the same where the driver does not say which GPU is which."""
    command = [sys.executable, "-c", FIRST_GPU]
    try:
        said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=STARTS_S)
        address, name = said.stdout.split()
        about = (driver / "gpus" / address / "information").read_text()
    except (subprocess.TimeoutExpired, ValueError, OSError):
        about = name = ""
    every = sorted(map(str, dev.glob("nvidia*")))
    if not (minor := re.search(r"^Device Minor:\s*([0-9]+)", about, re.MULTILINE)):
        return every, every, ""
    others = [f for f in every if re.fullmatch("nvidia[0-9]+", Path(f).name) and Path(f).name != f"nvidia{minor[1]}"]
    return [file for file in every if file not in others], every, name


def is_ours(case: Case) -> bool:
    """Whether a case runs only this project's code."""
    return ops.get(case.op).kernels[case.kernel].source.is_relative_to(ops.PACKAGE)


def _find_needed(shard: Shard, hidden: set[str]) -> set[str]:
    """The paths that must be readable, even inside a hidden folder; never a whole hidden folder."""
    kernels = [ops.get(case.op).kernels[case.kernel] for case in shard.cases]
    files = {Path(name) for name in (*shard.extra, *shard.sources)} | {kernel.source for kernel in kernels}
    folders = {ops.PACKAGE.parent, cache.root(), *map(Path, (*sys.path, sys.prefix, sys.base_prefix))}
    if toolkit := toolchain.toolkit():
        folders.add(toolkit)
    needed = {os.path.realpath(path) for path in files | folders | {file.parent for file in files}}
    return {path for path in needed if path != "/" and path not in hidden}
