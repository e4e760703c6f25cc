"""One kernel's source file -> a loaded torch op, cached by content.

Each kernel is one extension, compiled by `torch.utils.cpp_extension` with ninja, for one architecture, into
`TORCH_EXTENSIONS_DIR` (default `~/.cache/torch_extensions`). The cache key hashes the source, the headers of ours that
it includes, the flags, and the versions of torch and of the compiler. `python -m minfer.build OP KERNEL [ARCH]`
builds one kernel in a process of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from minfer.ops import PACKAGE, Kernel, Returning, get, load_file, names

# Extensions are compiled against the oldest PyTorch that we support, so that one binary serves all newer ones.
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"
CXX_FLAGS = ["-O3", "-std=c++20", "-march=native", "-fno-math-errno", STABLE_ABI]
NVCC_FLAGS = ["-O3", "-std=c++20", "-lineinfo", "--expt-relaxed-constexpr", "-DUSE_CUDA", STABLE_ABI]
# cpp_extension takes the half types' conversions and operators away; kernels are written with them.
NVCC_FLAGS += [
    f"-U__CUDA_NO_{what}__"
    for what in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
]


DISK_FULL = re.compile("No space left on device|Disk quota exceeded")


class BuildError(Exception):
    """A kernel that does not compile; the message is the compiler's first error, `log` all that it said."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True)
class Built:
    """A compiled kernel. Resources are per thread (registers, local memory) and per block (shared memory), and are the
    largest over the file's functions; None where no disassembler was found or the kernel runs on a CPU."""

    library: str
    seconds: float
    registers: int | None = None
    shared_bytes: int | None = None  # static; dynamic shared memory is chosen at launch
    local_bytes: int | None = None  # stack and spills


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
    """The C++ compiler, and `CXX` wins."""
    return os.environ.get("CXX", "c++")


@cache
def _compiler_version(command: str) -> str:
    try:
        return subprocess.run([command, "--version"], capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        return ""


def arch_of(capability: tuple[int, int]) -> str:
    """The name to compile for, such as `sm_89`; from Hopper on with the suffix that unlocks its own instructions."""
    return f"sm_{capability[0]}{capability[1]}{'a' if capability[0] >= 9 else ''}"


def arch_number(arch: str) -> int:
    """The number of an architecture's name: `sm_90a` -> 90."""
    return int(re.sub(r"\D", "", arch))


def flags_of(kernel: Kernel, arch: str) -> list[str]:
    """What a kernel's compiler is called with."""
    if kernel.backend == "cuda":
        number = arch.removeprefix("sm_")
        about = [f"-DMINFER_SM={arch_number(arch)}"]  # host code that lays out shared memory asks for it
        return [*NVCC_FLAGS, *about, f"-gencode=arch=compute_{number},code=sm_{number}"]
    if kernel.root != PACKAGE and "clang" not in _compiler_version(compiler()):
        # A static variable of a template would be one for two revisions in a process, though their sizes may differ.
        return [*CXX_FLAGS, "-fno-gnu-unique"]
    return CXX_FLAGS


def directory(kernel: Kernel, arch: str) -> Path:
    """Where this kernel's build is or would be: named by everything that decides its content."""
    digest = hashlib.sha256()
    for path in kernel.sources():
        digest.update(path.read_bytes())
    about: list[Any] = [flags_of(kernel, arch), torch.__version__, *versions_of(kernel)]
    digest.update(json.dumps(about).encode())
    return cache_folder() / f"{kernel.op}_{kernel.source.stem}_{digest.hexdigest()[:16]}"


def cache_folder() -> Path:
    """Where builds are kept."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    return Path(root).expanduser().absolute() / "minfer"


def make_folder(path: Path) -> None:
    """Make a folder in the cache, and see that the folder above it takes new files. Raises BuildError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        remedy = "set TORCH_EXTENSIONS_DIR to a folder that you can write to"
        raise BuildError(f"cannot keep compiled kernels in {cache_folder()}: {error.strerror}; {remedy}") from error


def versions_of(kernel: Kernel) -> list[str]:
    """Of what compiles a kernel."""
    if kernel.backend == "cuda":
        home = toolkit()
        return [_compiler_version(compiler()), _nvcc_version(home) if home else ""]
    return [_compiler_version(compiler()), _processor()]  # -march=native


@cache
def _processor() -> str:
    try:
        return next(
            line for line in Path("/proc/cpuinfo").read_text().split("\n") if line.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        return platform.machine()


_given: dict[str, Built] = {}


def give(libraries: Mapping[str, str]) -> None:
    """Have this process use these libraries for `op/kernel`, and build and look for none."""
    _given.update({name: Built(library, 0.0) for name, library in libraries.items()})


def cached(kernel: Kernel, arch: str = "") -> Built | None:
    """The finished build of exactly these sources, flags and versions, if there is one."""
    if found := _given.get(f"{kernel.op}/{kernel.name}"):
        return found
    try:
        built = Built(**json.loads((directory(kernel, arch) / "built.json").read_text()))
    except (OSError, ValueError, TypeError):  # none yet, or half of one
        return None
    return built if Path(built.library).is_file() else None


def build(kernel: Kernel, arch: str = "") -> Built:
    """Compile a kernel (and load it into this process), or find it in the cache. Raises BuildError."""
    if found := cached(kernel, arch):
        return found
    home = toolkit() if kernel.backend == "cuda" else None
    if kernel.backend == "cuda" and home is None:
        major = str(torch.version.cuda).split(".")[0]
        remedy = "" if major == "12" else ", or install minfer's own dependencies (uv sync)"  # PyPI has no nvcc for 12
        raise BuildError(f"no nvcc for CUDA {major}: set CUDA_HOME to a CUDA {major} toolkit{remedy}")
    if not _compiler_version(compiler()):
        raise BuildError(f"no C++ compiler {compiler()!r}: install one (apt install g++) or set CXX")

    folder = directory(kernel, arch)
    make_folder(folder)
    with _lock(folder.with_suffix(".lock")):
        if found := cached(kernel, arch):
            return found
        # Older PyTorch locks by a file's existence, and waits for ever on one that a killed build left behind. The
        # lock that we hold dies with its process, so any such file is stale.
        (folder / "lock").unlink(missing_ok=True)
        start = time.perf_counter()
        library = _compile(kernel, arch, folder, home)
        built = Built(str(library), round(time.perf_counter() - start, 3), **resources(library, arch, home))
        partial = folder / "built.json.tmp"
        partial.write_text(json.dumps(asdict(built)))
        partial.replace(folder / "built.json")
    return built


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def put_ninja_on_path() -> None:
    """Append this Python's folder to the PATH if only that has ninja: PyTorch looks for it on the PATH, where it is not if the
    environment was not activated."""
    folder = Path(sys.executable).parent
    if not shutil.which("ninja") and (folder / "ninja").exists():
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH") or os.defpath, str(folder)])


def _compile(kernel: Kernel, arch: str, folder: Path, home: Path | None) -> Path:
    from torch.utils import cpp_extension

    put_ninja_on_path()
    flags, link = flags_of(kernel, arch), []
    if home:
        cpp_extension.CUDA_HOME = str(home)
        link.append(f"-L{_cudart_folder(folder, home)}")
    name = folder.name.rpartition("_")[0]
    # PyTorch numbers the builds of a name within a process, and skips one that it tried before; ours differ by folder.
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)
    try:
        cpp_extension.load(
            name=name,
            sources=[str(kernel.source)],
            extra_cflags=flags if home is None else [],
            extra_cuda_cflags=flags,
            extra_ldflags=link,
            extra_include_paths=[str(path) for path in kernel.include_paths],
            build_directory=str(folder),
            is_python_module=False,
        )
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise BuildError(first_error(str(error)), str(error)) from error
    return folder / f"{name}.so"


def _cudart_folder(folder: Path, home: Path) -> Path:
    """A folder where `-lcudart` finds its library: PyPI's toolkit has only `libcudart.so.13`, without the link."""
    for name in ("lib64", "lib"):
        if (home / name / "libcudart.so").exists():
            return home / name
    versioned = sorted((home / "lib").glob("libcudart.so.*"))
    if not versioned:
        raise BuildError(f"{home} has no libcudart.so; set CUDA_HOME to a complete CUDA toolkit")
    link = folder / "libcudart.so"
    link.unlink(missing_ok=True)
    link.symlink_to(versioned[-1])
    return folder


def first_error(log: str) -> str:
    """The line of a compiler's output that says what is wrong, without the folders in front of the file name."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    patterns = (
        r"^(?!collect2).*(:|\)|ptxas|nvcc|ld).*\b(fatal )?error\b\s*:|^nvcc fatal\s*:",
        r"undefined reference|cannot find|No space left|Killed",
    )
    for pattern in patterns:
        if found := next((line for line in lines if re.search(pattern, line)), None):
            return re.sub(r"(^|\s)/\S*/", r"\1", found)
    return lines[0] if lines else "the compiler failed and said nothing"


RESERVED_SHARED = 1024  # bytes of shared memory a block that CUDA takes for itself


def usage(text: str, arch: str) -> dict[str, tuple[int, int, int]]:
    """Registers, stack and static shared memory of each function, from `cuobjdump -res-usage`.

    From Hopper on the tool counts the shared memory that CUDA reserves; here it is not counted for any."""
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
    largest = [max(numbers) for numbers in zip(*usage(text, arch).values(), strict=True)]
    return dict(zip(("registers", "local_bytes", "shared_bytes"), largest, strict=True)) if largest else {}


def cubin(kernel: Kernel, arch: str, folder: Path, timeout_s: float | None = None) -> Path:
    """Compile a CUDA kernel's device code alone, for any architecture, with no GPU. Raises BuildError.

    For minfer's own kernels, a stub in `device_only` replaces CCCL's thrust/complex.h: PyTorch includes it and no kernel uses
    it."""
    home = toolkit()
    if home is None:
        raise BuildError("no CUDA compiler that fits this PyTorch; set CUDA_HOME")
    from torch.utils.cpp_extension import include_paths

    target = folder / f"{kernel.op}_{kernel.name}.{arch}.cubin"
    replaced = [PACKAGE / "device_only"] if kernel.source.is_relative_to(PACKAGE) else []
    folders = (*replaced, *kernel.include_paths, *include_paths("cpu"))
    flags = [*flags_of(kernel, arch), *(f"-I{path}" for path in folders)]
    command = [str(home / "bin" / "nvcc"), "-cubin", *flags, "-o", str(target), str(kernel.source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"the compiler was killed after {timeout_s:g} s") from error
    if done.returncode:
        raise BuildError(first_error(done.stderr), done.stderr)
    return target


def cached_cubin(kernel: Kernel, arch: str, timeout_s: float | None = None) -> Path:
    """The cubin of exactly these sources, flags and versions: found in the cache, or compiled. Raises BuildError."""
    folder = directory(kernel, arch)
    found = folder / "device.cubin"
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / "cubin.lock"):
        if not found.is_file():
            cubin(kernel, arch, folder, timeout_s).replace(found)
    return found


def function(kernel: Kernel, arch: str = "") -> Callable[..., None]:
    """The kernel as a callable `(*tensors, **call)`. A built kernel must be in the cache, or is built now. Raises
    BuildError, also if its library does not register it."""
    if kernel.function is not None:
        return Returning(kernel.function, kernel.returns) if kernel.returns else kernel.function
    if kernel.backend == "triton":
        return getattr(kernel.module(), kernel.symbol)
    if not hasattr(torch.ops.minfer, kernel.symbol):
        built = build(kernel, arch)
        torch.ops.load_library(built.library)
        if not hasattr(torch.ops.minfer, kernel.symbol):
            raise BuildError(
                f"{kernel.source.name} registers no {kernel.symbol}; end it with {_macro(kernel)}({kernel.symbol}, ...)"
            )
    return getattr(torch.ops.minfer, kernel.symbol).default


def _macro(kernel: Kernel) -> str:
    """What registers a kernel of this op: the op's own macro (`MINFER_HGEMM`) if its header defines one, else `MINFER_OP`."""
    own, header = f"MINFER_{kernel.op.upper()}", kernel.root / "ops" / kernel.op / f"{kernel.op}.h"
    return own if header.is_file() and f"#define {own}(" in header.read_text() else "MINFER_OP"


def _named(op: str, name: str) -> Kernel:
    """Raises SystemExit where there is no such kernel."""
    try:
        kernels = get(op).kernels
    except KeyError:
        sys.exit(f"there is no op {op}; there are {', '.join(names())}")
    if name not in kernels:
        sys.exit(f"{op} has no kernel {name}; it has {', '.join(kernels)}")
    return kernels[name]


def main() -> None:
    """`python -m minfer.build OP KERNEL [ARCH] [FILE ...]`: prints the build as JSON, or exits 1 with the first error.

    FILEs are Python files that register kernels of their own."""
    if len(sys.argv) < 3:
        sys.exit("name what to build: python -m minfer.build OP KERNEL [ARCH] [FILE ...]")
    op, name, arch, *extra = sys.argv[1:] + [""] * (len(sys.argv) < 4)
    reply = os.fdopen(os.dup(1), "w")  # the files and the library, once loaded, may print whatever they like
    os.dup2(2, 1)
    for path in extra:
        load_file(Path(path))
    try:
        built = build(_named(op, name), arch)
        with reply:
            print(json.dumps(asdict(built)), file=reply)
    except BuildError as error:
        print(error.log, file=sys.stderr)
        sys.exit(str(error))


if __name__ == "__main__":
    main()
