"""CUDA kernels on the CPU: slow, strict, and for tests only. What is emulated, and how: `runtime.h`.

A kernel's source, and what it includes of ours, is rewritten where CUDA is not C++ (launches, shared memory), and
compiled by g++ against `runtime.h`. Headers in `include/` stand in for those of the same path in `minfer/`: what PTX
does, written a second time. WMMA is not emulated.
"""

from __future__ import annotations

import ctypes
import inspect
import re
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from minfer import build
from minfer.ops import PACKAGE, Kernel

HERE = Path(__file__).parent
INCLUDE = HERE / "include"
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
FLAGS += ["-fsanitize=alignment,bounds", "-fno-sanitize-recover=all"]  # compiled in, and not linked: see runtime.h

RUNTIME = ["runtime", "call"]

LAUNCH = re.compile(r"([\w:]+(?:<[^;{}()]*>)?)\s*<<<(.*?)>>>\s*(\([^;]*\));", re.DOTALL)
DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:(?:alignas|__align__)\(\w+\)\s+)?([\w: ]+?)\s+(\w+)\s*\[\s*\]\s*;")
STATIC = re.compile(
    r"__shared__\s+(?:(?:alignas|__align__)\(\w+\)\s+)?([\w:]+(?:<[^;]*?>)?)\s+(\w+)((?:\[[^\]]*\])*)\s*;"
)
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
    return LAUNCH.sub(call, text)


def compiled(kernel: Kernel, folder: Path, edits: Mapping[str, str] | None = None) -> Path:
    """The library of a kernel's file for the CPU. `edits` are replaced in the kernel's sources first, to break it; each
    must occur. Raises BuildError when the compiler does."""
    unseen = dict(edits or {})
    for path in kernel.sources():
        relative = _relative(path)
        if (INCLUDE / relative).is_file():
            continue
        text = path.read_text()
        for old, new in (edits or {}).items():
            if old in text:
                text = text.replace(old, new)
                unseen.pop(old, None)
        target = folder / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        first = '#include "torch.h"\n' if path == kernel.source else ""  # a precompiled header must come first
        target.write_text(f'{first}#line 1 "{path.name}"\n{rewrite(text)}')
    assert not unseen, f"{kernel.source.name} has none of {list(unseen)}"
    return _compile(folder / _relative(kernel.source), folder)


class Emulated:
    """A kernel that runs on the CPU, called as every kernel: the tensors in their order, on the CPU, of 8 dimensions at
    most, and the scalars, `(*tensors, **call)`; what is left out is as the schema says.

    Each call draws another schedule, the same ones in every process. Raises KernelError."""

    def __init__(self, kernel: Kernel, library: Path) -> None:
        self.symbol, self.seed = kernel.symbol, 0
        self._library = ctypes.CDLL(str(library))
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

    def __call__(self, *tensors: torch.Tensor, **call: float | bool) -> None:
        self.seed += 1
        bound = self.signature.bind(*tensors, **call)
        bound.apply_defaults()
        arguments = (Argument * len(self._arguments))(
            *(self._argument(about, bound.arguments[about.name]) for about in self._arguments)
        )
        error = ctypes.create_string_buffer(1000)
        self._library.emulator_call(
            self.symbol.encode(), arguments, len(arguments), self.seed, error, ctypes.c_size_t(1000)
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
    done = subprocess.run([build.compiler(), *words], capture_output=True, text=True)
    if done.returncode:
        raise build.BuildError(build.first_error(done.stderr), done.stderr)


@cache
def precompiled() -> tempfile.TemporaryDirectory[str]:
    """A folder with the compiled header and runtime, which take longer than a kernel."""
    folder = tempfile.TemporaryDirectory(prefix="minfer-emulator-")
    root = Path(folder.name)
    _run(*FLAGS, *_includes(), "-x", "c++-header", HERE / "torch.h", "-o", root / "torch.h.gch")
    for name in RUNTIME:
        _run(*FLAGS, *_includes(root), "-c", HERE / f"{name}.cpp", "-o", root / f"{name}.o")
    return folder


def _includes(*folders: Path) -> list[str]:
    home = build.toolkit()
    assert home is not None
    return [*(f"-I{path}" for path in (*folders, INCLUDE, HERE)), "-isystem", str(home / "include")]


def _compile(source: Path, folder: Path) -> Path:
    made, library, ready = folder / "kernel.o", folder / "kernel.so", Path(precompiled().name)
    _run(*FLAGS, *_includes(ready, folder), "-x", "c++", "-c", source, "-o", made)
    _run("-shared", "-Wl,-Bsymbolic", made, *(ready / f"{name}.o" for name in RUNTIME), "-o", library)
    return library
