"""A CUDA kernel's device code: compiled alone for any architecture, and the resources that its functions use."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from minfer.build import reads, toolchain
from minfer.build.cache import directory, lock, make_folder, read_record, write_whole
from minfer.build.errors import BuildError, first_error
from minfer.build.toolchain import arch_number, flags_of
from minfer.ops import PACKAGE, Kernel

RESERVED_SHARED = 1024  # bytes of shared memory a block that CUDA takes for itself


def parse_usage(text: str, arch: str) -> dict[str, tuple[int, int, int]]:
    """Registers, stack and static shared memory of each function, from `cuobjdump -res-usage`.

    From Hopper on the tool includes the shared memory that CUDA reserves; this subtracts it."""
    found = {}
    pattern = r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    for name, *numbers in re.findall(pattern, text):
        registers, stack, shared, local = map(int, numbers)
        if arch_number(arch) >= 90:
            shared = max(0, shared - RESERVED_SHARED)
        found[name] = (registers, stack + local, shared)
    return found


def resources(binary: Path, arch: str, home: Path | None) -> dict[str, int]:
    """Registers, static shared memory and local memory of a library's or cubin's device functions, the largest of each."""
    tool = home / "bin" / "cuobjdump" if home else None
    if tool is None or not tool.exists():
        return {}
    text = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True).stdout
    largest = [max(numbers) for numbers in zip(*parse_usage(text, arch).values(), strict=True)]
    return dict(zip(("registers", "local_bytes", "shared_bytes"), largest, strict=True)) if largest else {}


def compile_cubin(kernel: Kernel, arch: str, folder: Path, timeout_s: float | None = None) -> Path:
    """Compile a CUDA kernel's device code alone, for any architecture, with no GPU. The file `.d` beside the cubin lists what
    was read. Raises BuildError.

    For minfer's own kernels, headers in `device_only` replace PyTorch's, which take longer to compile than a small kernel."""
    home = toolchain.toolkit()
    if home is None:
        raise BuildError("no CUDA compiler that fits this PyTorch; set CUDA_HOME")
    from torch.utils.cpp_extension import include_paths

    target = folder / f"{kernel.op}_{kernel.name}.{arch}.cubin"
    replaced = [PACKAGE / "device_only"] if kernel.source.is_relative_to(PACKAGE) else []
    folders = [*replaced, *kernel.include_paths, *map(Path, include_paths("cpu"))]
    flags = [*flags_of(kernel, arch), *(f"-I{path.absolute()}" for path in folders)]
    # The list is the preprocessor's own: nvcc's -MD would run it once more, for the host. The file is named without its folder,
    # in which a comma would end the argument.
    command = [str(home / "bin" / "nvcc"), "-cubin", *flags, "-Xcompiler", f"-MD,-MF,{target.with_suffix('.d').name}"]
    command += ["-o", target.name, str(kernel.source.absolute())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=folder)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"the compiler was killed after {timeout_s:g} s") from error
    if done.returncode:
        raise BuildError(first_error(done.stderr), done.stderr)
    return target


def cached_cubin(kernel: Kernel, arch: str, timeout_s: float | None = None) -> Path:
    """The cubin of exactly these sources, flags and versions: found in the cache, or compiled. Raises BuildError."""
    folder = directory(kernel, arch)
    found, record = folder / "device.cubin", folder / "cubin.json"
    make_folder(folder)
    with lock(folder / "cubin.lock"):
        if not found.is_file() or not reads.are_current(kernel, read_record(record)):
            made = compile_cubin(kernel, arch, folder, timeout_s)
            write_whole(record, reads.record(kernel, reads.listed_by_make(kernel, made.with_suffix(".d"))))
            made.replace(found)
    return found
