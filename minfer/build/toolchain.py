"""Finds compilers and tools, names architectures, and lists the flags that a kernel is compiled with."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import torch

from minfer.ops import PACKAGE, Kernel

# Extensions are compiled against the oldest PyTorch that we support, so that one binary serves all newer ones.
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"
CXX_FLAGS = ["-O3", "-std=c++20", "-march=native", "-fno-math-errno", STABLE_ABI]
NVCC_FLAGS = ["-O3", "-std=c++20", "-lineinfo", "--expt-relaxed-constexpr", "-DUSE_CUDA", STABLE_ABI]
# cpp_extension disables the conversions and operators of the half types; kernels use them.
NVCC_FLAGS += [
    f"-U__CUDA_NO_{what}__"
    for what in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
]


@cache
def toolkit() -> Path | None:
    """The CUDA toolkit that fits this torch: `CUDA_HOME`, else the one from PyPI, else the system's; None if none fits."""
    if torch.version.cuda is None:
        return None
    major = torch.version.cuda.split(".")[0]
    candidates = [Path(home) for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    candidates.append(Path(sysconfig.get_path("purelib")) / "nvidia" / f"cu{major}")
    candidates.append(Path("/usr/local/cuda"))
    if nvcc := shutil.which("nvcc"):
        candidates.append(Path(nvcc).resolve().parents[1])
    return next((home for home in candidates if _nvcc_version(home).split(".")[0] == major), None)


def tool(name: str) -> Path | None:
    """A program of NVIDIA's such as ncu: on the PATH, in a CUDA toolkit, or where NVIDIA's packages put Nsight's; None
    if it is in none of these."""
    homes = [os.environ.get("CUDA_HOME"), toolkit(), "/usr/local/cuda"]
    places = [Path(home) / "bin" for home in homes if home]
    places += sorted(Path("/opt/nvidia").glob("nsight-*/*"), reverse=True)
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, places)))
    return Path(found) if found else None


@cache
def _nvcc_version(home: Path) -> str:
    """The version of the nvcc in a toolkit, such as "13.2"; empty when it has none that runs, or no headers."""
    if not (home / "include" / "cuda_runtime.h").is_file():
        return ""
    try:
        text = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True, timeout=60).stdout
    except OSError:
        return ""
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found else ""


def compiler() -> str:
    """The command of the C++ compiler: `CXX`, else c++. It may have several words, such as `ccache g++`."""
    return os.environ.get("CXX", "c++")


def no_compiler() -> str:
    """The text of an error if `compiler()` cannot be run."""
    return f"no C++ compiler {compiler()!r}: load one (module load gcc), install one, or set CXX to its path"


@cache
def compiler_version(command: str) -> str:
    return _answer(command, "--version").split("\n")[0]


def _answer(command: str, question: str) -> str:
    """What a compiler prints; empty if there is no compiler."""
    try:
        return subprocess.run([*shlex.split(command), question], capture_output=True, text=True).stdout
    except (OSError, ValueError):  # ValueError: a quotation mark is not closed
        return ""


@cache
def link_flags(command: str) -> tuple[str, ...]:
    """Flags that make a compiler link the C++ library that PyTorch has loaded, and not a second copy from libstdc++.a.

    A compiler whose folder lacks the shared library links the archive without a warning. The kernel's streams then use the
    tables of the wrong copy: with PyTorch 2.11 a failing check crashes when it writes a number, or its message ends there."""
    library = "libstdc++.so.6"
    found = _answer(command, f"-print-file-name={library}").strip()
    return (f"-l:{library}",) if found != library and Path(found).is_file() else ()


def put_ninja_on_path() -> None:
    """Append this Python's folder to the PATH if ninja is only there. PyTorch needs ninja on the PATH, where it is missing if
    the environment was not activated."""
    folder = Path(sys.executable).parent
    if not shutil.which("ninja") and (folder / "ninja").exists():
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH") or os.defpath, str(folder)])


def arch_of(capability: tuple[int, int]) -> str:
    """The architecture to compile for, such as `sm_89`; from Hopper on with the suffix a, for its own instructions."""
    return f"sm_{capability[0]}{capability[1]}{'a' if capability[0] >= 9 else ''}"


def arch_number(arch: str) -> int:
    """The number of an architecture's name: `sm_90a` -> 90."""
    return int(re.sub(r"\D", "", arch))


def flags_of(kernel: Kernel, arch: str) -> list[str]:
    """The flags that a kernel is compiled with."""
    apart = [] if _is_ours(kernel) or "clang" in compiler_version(compiler()) else ["-fno-gnu-unique"]
    if kernel.backend == "cuda":
        number = arch.removeprefix("sm_")
        about = [f"-DMINFER_SM={arch_number(arch)}"]  # for host code that lays out shared memory
        about += [f"-Xcompiler={flag}" for flag in apart]
        return [*NVCC_FLAGS, *about, f"-gencode=arch=compute_{number},code=sm_{number}"]
    return [*CXX_FLAGS, *apart]


def _is_ours(kernel: Kernel) -> bool:
    """Whether a kernel is one of this revision's. Others get -fno-gnu-unique: two revisions of a kernel, or two kernels that
    began as copies of one, would otherwise share the static variables of their templates and inline functions in one process,
    though the sizes may differ."""
    return kernel.root == PACKAGE and kernel.source.is_relative_to(PACKAGE)


def versions_of(kernel: Kernel) -> list[str]:
    """The versions of the compilers that build a kernel; for C++ also the processor, because of -march=native."""
    if kernel.backend == "cuda":
        home = toolkit()
        return [compiler_version(compiler()), _nvcc_version(home) if home else ""]
    return [compiler_version(compiler()), processor()]


@cache
def processor() -> str:
    """What -march=native depends on: the instruction sets of this processor, as Linux names them."""
    try:
        return next(
            line for line in Path("/proc/cpuinfo").read_text().split("\n") if line.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        return platform.machine()
