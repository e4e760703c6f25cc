"""Builds a kernel's source file into a torch op and loads it; builds are cached by content.

Each kernel is one extension, compiled by `torch.utils.cpp_extension` with ninja, for one architecture, into
`TORCH_EXTENSIONS_DIR` (default `~/.cache/torch_extensions`). The cache key hashes the source, the headers of ours that
it includes, the flags, and the versions of torch and of the compiler. `python -m minfer.build OP KERNEL [ARCH]`
builds one kernel in a process of its own.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from minfer.build import cache, device_code, packed, reads, toolchain
from minfer.build.cache import Built
from minfer.build.errors import BuildError, first_error
from minfer.ops import Kernel, Returning


def build(kernel: Kernel, arch: str = "") -> Built:
    """Compile a kernel (and load it into this process), or find it in the cache. Raises BuildError."""
    if found := cache.find(kernel, arch):
        return found
    home = toolchain.toolkit() if kernel.backend == "cuda" else None
    if kernel.backend == "cuda" and home is None:
        major = str(torch.version.cuda).split(".")[0]
        remedy = "" if major == "12" else ", or install minfer's own dependencies (uv sync)"  # PyPI has no nvcc for 12
        raise BuildError(f"no nvcc for CUDA {major}: set CUDA_HOME to a CUDA {major} toolkit{remedy}")
    if not toolchain.compiler_version(toolchain.compiler()):
        raise BuildError(toolchain.no_compiler())

    folder = cache.directory(kernel, arch)
    cache.make_folder(folder)
    with cache.lock(folder.with_suffix(".lock")):
        if found := cache.find(kernel, arch):
            return found
        # Older PyTorch uses a file as a lock, and waits for ever for one that a killed build left behind. Our own lock
        # is released when its process ends, so any such file is stale.
        (folder / "lock").unlink(missing_ok=True)
        if (folder / "built.json").exists():  # built from other contents than today's; ninja may not notice the change
            for stale in (*folder.glob("*.o"), *folder.glob("*.so"), folder / "device.cubin"):
                stale.unlink(missing_ok=True)
        start = time.perf_counter()
        library = _compile(kernel, arch, folder, home)
        cache.write_whole(folder / "reads.json", reads.record(kernel, reads.listed(kernel, folder)))
        built = Built(str(library), round(time.perf_counter() - start, 3), **device_code.resources(library, arch, home))
        cache.write_whole(folder / "built.json", asdict(built))
    return built


def _compile(kernel: Kernel, arch: str, folder: Path, home: Path | None) -> Path:
    from torch.utils import cpp_extension

    toolchain.put_ninja_on_path()
    flags, link = toolchain.flags_of(kernel, arch), [*toolchain.link_flags(toolchain.compiler())]
    if home:
        cpp_extension.CUDA_HOME = str(_without_blanks(home, folder))
        link.append(f"-L{shlex.quote(str(_cudart_folder(folder, home)))}")
    cpp_extension.TORCH_LIB_PATH = shlex.quote(str(Path(torch.__file__).parent / "lib"))  # PyTorch does not quote it
    cpp_extension.get_cxx_compiler = partial(_one_program, folder)
    name = folder.name.rpartition("_")[0]
    # PyTorch skips a name that it has built in this process; our builds of one name are in different folders.
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
    except UnicodeDecodeError as error:  # PyTorch decodes what the compiler said, which quotes the source
        said = error.object.decode(errors="replace")
        raise BuildError(first_error(said), said) from error
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise BuildError(first_error(str(error)), str(error)) from error
    return folder / f"{name}.so"


def _one_program(folder: Path) -> str:
    """The compiler as one program, as PyTorch needs it. For a command of several words (`ccache g++`) this is a script."""
    command = toolchain.compiler()
    if len(words := shlex.split(command)) < 2:
        return command
    script = folder / "g++"  # PyTorch warns of other names
    script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    script.chmod(0o755)
    return str(script)


def _without_blanks(home: Path, folder: Path) -> Path:
    """A path of the CUDA toolkit that needs no quotes, because PyTorch quotes neither nvcc's path nor that of its libraries.
    If the path would need them, this is a link in the build's folder, relative to that folder, where ninja runs."""
    if shlex.quote(str(home)) == str(home):
        return home
    link = folder / "cuda"
    link.unlink(missing_ok=True)
    link.symlink_to(home)
    return Path(link.name)


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


def function(kernel: Kernel, arch: str = "", from_wheel: bool = False) -> Callable[..., None]:
    """The kernel as a callable `(*tensors, **call)`. Builds it if it needs that and is not in the cache. Raises BuildError,
    also if its library does not register it.

    With `from_wheel` the wheel minfer-kernels is searched first. Code that measures must not use this, because a row names the
    compiler that built its kernel."""
    if kernel.function is not None:
        return Returning(kernel.function, kernel.returns) if kernel.returns else kernel.function
    if kernel.backend == "triton":
        return getattr(kernel.module(), kernel.symbol)
    if not hasattr(torch.ops.minfer, kernel.symbol):
        if not (from_wheel and _load_packed(kernel, arch)):
            torch.ops.load_library(build(kernel, arch).library)
        if not hasattr(torch.ops.minfer, kernel.symbol):
            raise BuildError(
                f"{kernel.source.name} registers no {kernel.symbol}; end it with {_macro(kernel)}({kernel.symbol}, ...)"
            )
    return getattr(torch.ops.minfer, kernel.symbol).default


def _load_packed(kernel: Kernel, arch: str) -> bool:
    """Load a kernel from the wheel. Returns False if that is not possible: for example, its library may need another C
    library."""
    with contextlib.suppress(OSError):
        if found := packed.find(kernel, arch):
            torch.ops.load_library(str(found))
            return True
    return False


def _macro(kernel: Kernel) -> str:
    """The macro that registers a kernel of this op: `MINFER_HGEMM` if the op's header defines it, else `MINFER_OP`."""
    own, header = f"MINFER_{kernel.op.upper()}", kernel.root / "ops" / kernel.op / f"{kernel.op}.h"
    return own if header.is_file() and f"#define {own}(" in header.read_text() else "MINFER_OP"
