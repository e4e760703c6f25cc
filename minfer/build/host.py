"""Compiles C++ that Python calls on the host, such as a model of kernels' times. It includes no headers of PyTorch, so it
compiles in about a second."""

from __future__ import annotations

import ctypes
import shlex
import subprocess
import time

from minfer.build import cache, packed, toolchain
from minfer.build.cache import Built
from minfer.build.errors import BuildError, first_error
from minfer.ops import Kernel

FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC")


def load(source: Kernel) -> ctypes.CDLL:
    """The library of a C++ source, given as a kernel that no op has. It comes from the wheel minfer-kernels, else from the
    cache, else it is compiled. Raises BuildError."""
    try:
        return ctypes.CDLL(str(packed.find(source, "") or build(source).library))
    except OSError as error:
        raise BuildError(f"cannot load the library of {source.source.name}: {error}") from error


def build(source: Kernel) -> Built:
    """Compile the source, or find it in the cache. Raises BuildError."""
    folder = cache.directory(source, "")
    library = folder / f"{source.source.stem}.so"
    if not library.exists():
        cache.make_folder(folder)
        with cache.lock(folder.with_suffix(".lock")):
            start, partial = time.perf_counter(), library.with_suffix(".partial")
            paths = [f"-I{path}" for path in source.include_paths]
            command = [*shlex.split(toolchain.compiler()), *FLAGS, *paths, str(source.source), "-o", str(partial)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            except OSError as error:
                raise BuildError(toolchain.no_compiler()) from error
            if done.returncode:
                raise BuildError(first_error(done.stderr), done.stderr)
            partial.replace(library)
            return Built(str(library), round(time.perf_counter() - start, 3))
    return Built(str(library), 0.0)
