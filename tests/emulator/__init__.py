"""CUDA kernels on the CPU: slow, strict, and for tests only. What is emulated, and how: `runtime.h`.

A kernel's source, and what it includes of ours, is rewritten where CUDA is not C++ (launches, shared memory), and
compiled by g++ against `runtime.h`. Headers in `include/` stand in for those of the same path in `minfer/`: what PTX
does, written a second time. WMMA is not emulated.
"""

from __future__ import annotations

import ctypes
import fcntl
import inspect
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from minfer.build import toolchain
from minfer.build.errors import BuildError, first_error
from minfer.ops import PACKAGE, Kernel
from tests.emulator.planting import Edit, check_markers, find_closing, plant

HERE = Path(__file__).parent
INCLUDE = HERE / "include"
# Level -Og compiles a kernel in three quarters of the time of -O1 and runs it about as fast: the runtime, which takes most of
# that time, has a level of its own.
FLAGS = ["-Og", "-std=c++20", "-fPIC", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
FLAGS += ["-fno-gnu-unique"]  # of those a process has one for all libraries: each has its own number of multiprocessors
FLAGS += ["-fsanitize=alignment,bounds", "-fno-sanitize-recover=all"]  # compiled in, and not linked: see runtime.h

RUNTIME = ["runtime", "call"]

LAUNCH = re.compile(r"([\w:]+(?:<[^;{}()]*>)?)\s*<<<(.*?)>>>\s*(\([^;]*\));", re.DOTALL)
DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:(?:alignas|__align__)\(\w+\)\s+)?([\w: ]+?)\s+(\w+)\s*\[\s*\]\s*;")
STATIC = re.compile(
    r"__shared__\s+(?:(?:alignas|__align__)\(\w+\)\s+)?([\w:]+(?:<[^;]*?>)?)\s+(\w+)((?:\[[^\]]*\])*)\s*;"
)
KERNEL = re.compile(r"__global__\s+void\s+(?:(__launch_bounds__|__maxnreg__)\s*(?=\())?")
FOREIGN = re.compile(r"^\s*#\s*include\s+<(?:torch/|cuda_|mma\.h).*$", re.MULTILINE)


# As `torch.h` numbers them.
DTYPES = {torch.uint8: 0, torch.int8: 1, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6}
DTYPES |= {torch.bool: 11, torch.bfloat16: 15, torch.float8_e5m2: 23, torch.float8_e4m3fn: 24}
KINDS = {"TensorType": 0, "FloatType": 1, "IntType": 2, "BoolType": 3}
MOST_DIMS = 8


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * MOST_DIMS),
        ("strides", ctypes.c_int64 * MOST_DIMS),
        ("rank", ctypes.c_int),
        ("dtype", ctypes.c_int),
    ]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Tensor:
        shape, strides = tuple(tensor.shape), tensor.stride()
        return cls(tensor.data_ptr(), shape, strides, tensor.dim(), DTYPES[tensor.dtype])


class Argument(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_int),
        ("is_written", ctypes.c_int),
        ("number", ctypes.c_double),
        ("integer", ctypes.c_int64),
        ("tensor", Tensor),
    ]


class KernelError(Exception):
    """What the kernel did that a GPU does not allow, or leaves undefined, in a sentence."""


def rewrite(text: str) -> str:
    """CUDA as C++: the launches, the shared memory, and no headers of PyTorch's and of the toolkit's."""
    text = FOREIGN.sub("", text)
    text = DYNAMIC.sub(r"\1* \2 = reinterpret_cast<\1*>(emulator::dynamic_shared());", text)
    text = STATIC.sub(lambda m: f'auto& {m[2]} = emulator::shared<{m[1]}{m[3]}>(__COUNTER__, "{m[2]}");', text)
    call = (
        r"emulator::launch_with(emulator::Launch(\2), [&](const auto&... given) { \1(given...); }, std::make_tuple\3);"
    )
    return LAUNCH.sub(call, with_checked_blocks(text))


def with_checked_blocks(text: str) -> str:
    """The text whose kernels first check that a block of as many threads has registers: see `runtime.h`."""

    def behind(start: int) -> int:
        """The place behind the parentheses that open at the first `(` from `start` on."""
        return find_closing(text, text.index("(", start)) + 1

    parts, done = [], 0
    for kernel in KERNEL.finditer(text):
        declared = behind(kernel.end()) if kernel[1] else kernel.end()
        body = re.compile(r"\s*\{").match(text, behind(declared))
        if body:
            check = {"__launch_bounds__": "within_bounds", "__maxnreg__": "has_registers"}.get(
                kernel[1], "has_registers"
            )
            numbers = text[kernel.end() : declared] if kernel[1] else "(255)"
            parts += [text[done : body.end()], f" emulator::{check}{numbers};"]
            done = body.end()
    return "".join([*parts, text[done:]])


def planted(kernel: Kernel, mistakes: Mapping[int, Mapping[str, Edit]]) -> dict[Path, str]:
    """The sources of a kernel that the emulator has no version of its own of, with mistakes to switch on."""
    texts = {path: path.read_text() for path in kernel.sources() if not (INCLUDE / _relative(path)).is_file()}
    check_markers(texts.values(), {name for edits in mistakes.values() for name in edits}, kernel.source.name)
    return {path: plant(text, mistakes) for path, text in texts.items()}


def compiled(
    kernel: Kernel, folder: Path, mistakes: Mapping[int, Mapping[str, Edit]] | None = None, *flags: str
) -> Path:
    """The library of a kernel's file for the CPU, with mistakes to switch on, whose markers must be there. `flags` are more of
    the compiler's. Raises BuildError when the compiler does."""
    for path, text in planted(kernel, mistakes or {}).items():
        target = folder / _relative(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        first = '#include "torch.h"\n' if path == kernel.source else ""  # a precompiled header must come first
        target.write_text(f'{first}#line 1 "{path.name}"\n{rewrite(text)}')
    return _compile(folder / _relative(kernel.source), folder, *flags)


class Emulated:
    """A kernel that runs on the CPU, called as every kernel: the tensors in their order, on the CPU, of 8 dimensions at
    most, and the scalars, `(*tensors, **call)`; what is left out is as the schema says.

    Each call draws another schedule, the same ones in every process. `mistake` is the number of one that the library was
    compiled with. Raises KernelError."""

    def __init__(self, kernel: Kernel, library: Path, mistake: int = 0) -> None:
        self.symbol, self.seed, self.mistake = kernel.symbol, 0, mistake
        # Of each mistake a library of its own: one that ends a launch leaves flags and counters of the kernel's as they are.
        own = library.with_name(f"{library.stem}-{mistake}{library.suffix}")
        if mistake and not own.exists():
            shutil.copy(library, own)
        self._library = ctypes.CDLL(str(own if mistake else library))
        self._library.emulator_schema.restype = ctypes.c_char_p
        schema = self._library.emulator_schema(self.symbol.encode())
        if schema is None:
            raise KernelError(f"{kernel.source.name} registers no op {self.symbol}")
        self._arguments = torch._C.parse_schema(schema.decode()).arguments
        kind, required = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        self.signature = inspect.Signature(
            inspect.Parameter(a.name, kind, default=a.default_value if a.has_default_value() else required)
            for a in self._arguments
        )

    def run_on(self, multiprocessors: int) -> None:
        """Changes how many multiprocessors this library's kernels find. At most 8 blocks that wait for each other can run."""
        ctypes.c_int.in_dll(self._library, "_ZN8emulator15multiprocessorsE").value = multiprocessors

    def allow_shared(self, most: int) -> None:
        """Changes how many bytes of shared memory a block of this library's kernels may have."""
        ctypes.c_size_t.in_dll(self._library, "_ZN8emulator11most_sharedE").value = most

    def __call__(self, *tensors: torch.Tensor, **call: float | bool) -> None:
        self.seed += 1
        bound = self.signature.bind(*tensors, **call)
        bound.apply_defaults()
        arguments = (Argument * len(self._arguments))(
            *(self._argument(about, bound.arguments[about.name]) for about in self._arguments)
        )
        error = ctypes.create_string_buffer(1000)
        self._library.emulator_call(
            self.symbol.encode(), arguments, len(arguments), self.seed, self.mistake, error, ctypes.c_size_t(1000)
        )
        if error.value:
            raise KernelError(error.value.decode())

    def _argument(self, about: torch._C.Argument, value: torch.Tensor | float | bool) -> Argument:
        name, kind = about.name.encode(), KINDS[about.type.kind()]
        if isinstance(value, torch.Tensor) != (kind == 0):
            raise TypeError(f"{self.symbol}: {about.name} is a {about.type}, got {type(value).__name__}")
        if isinstance(value, torch.Tensor):
            return Argument(name, kind, about.is_write, 0, 0, Tensor.of(value))
        return Argument(name, kind, 0, float(value), int(value) if kind > 1 else 0)


def _relative(path: Path) -> Path:
    """Where a source lies among those of a kernel, as its includes name it."""
    return path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else Path(path.name)


def _run(*words: str | Path) -> None:
    done = subprocess.run([toolchain.compiler(), *words], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(first_error(done.stderr), done.stderr)


@cache
def precompiled() -> Path:
    """A folder with the runtime and the header, which take longer than a kernel: compiled once for all processes of a test
    run."""
    folder = Path(os.environ["MINFER_TESTS_SHARED"])
    ready = folder / "emulator"
    with open(folder / "emulator.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            made = Path(tempfile.mkdtemp(dir=folder))
            _run(*FLAGS, *_includes(), "-x", "c++-header", HERE / "torch.h", "-o", made / "torch.h.gch")
            for name in RUNTIME:
                _run(*FLAGS, *_includes(made), "-c", HERE / f"{name}.cpp", "-o", made / f"{name}.o")
            made.rename(ready)
    return ready


def _includes(*folders: Path) -> list[str]:
    home = toolchain.toolkit()
    assert home is not None
    return [*(f"-I{path}" for path in (*folders, INCLUDE, HERE)), "-isystem", str(home / "include")]


def _compile(source: Path, folder: Path, *flags: str) -> Path:
    made, library = folder / "kernel.o", folder / "kernel.so"
    _run(*FLAGS, *flags, *_includes(precompiled(), folder), "-x", "c++", "-c", source, "-o", made)
    _run("-shared", "-Wl,-Bsymbolic", made, *(precompiled() / f"{name}.o" for name in RUNTIME), "-o", library)
    return library
