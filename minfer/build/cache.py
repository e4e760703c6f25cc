"""The cache of built kernels: a folder for each build, whose name hashes everything that decides its content."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minfer.build import reads
from minfer.build.errors import BuildError
from minfer.build.toolchain import compiler, flags_of, link_flags, versions_of
from minfer.ops import Kernel
from minfer.ops.sources import read_source_bytes


@dataclass(frozen=True)
class Built:
    """A compiled kernel. Resources are per thread (registers, local memory) and per block (shared memory), and are the
    largest over the file's functions; None where no disassembler was found or the kernel runs on a CPU."""

    library: str
    seconds: float
    registers: int | None = None
    shared_bytes: int | None = None  # static; dynamic shared memory is chosen at launch
    local_bytes: int | None = None  # stack and spills


def directory(kernel: Kernel, arch: str) -> Path:
    """The folder of this kernel's build, which need not exist. Its name hashes everything that decides its content."""
    digest = hashlib.sha256()
    for path in kernel.sources():
        digest.update(read_source_bytes(path))
    about: list[Any] = [flags_of(kernel, arch), torch.__version__, *versions_of(kernel), link_flags(compiler())]
    digest.update(json.dumps(about).encode())
    return root() / f"{kernel.op}_{kernel.source.stem}_{digest.hexdigest()[:16]}"


def root() -> Path:
    """Where builds are kept."""
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    return Path(folder).expanduser().absolute() / "minfer"


def make_folder(path: Path) -> None:
    """Make a folder in the cache, and check that files can be written to it and to its parent: in a cache of several users,
    either may be another's. Raises BuildError."""
    with _says_what_to_do():
        path.mkdir(parents=True, exist_ok=True)
        for folder in (path.parent, path):
            with tempfile.TemporaryFile(dir=folder):
                pass


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold this file's lock. It is released when the process ends, however it ends. Raises BuildError if the file is
    another user's."""
    with contextlib.ExitStack() as held:
        with _says_what_to_do():
            file = held.enter_context(open(path, "w"))
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _says_what_to_do() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "set TORCH_EXTENSIONS_DIR to a folder that you can write to"
        raise BuildError(f"cannot keep compiled kernels in {root()}: {error.strerror}; {remedy}") from error


_given: dict[str, Built] = {}


def use_libraries(libraries: Mapping[str, str]) -> None:
    """Make this process use these libraries, by `op/kernel`, instead of building those kernels or searching the cache."""
    _given.update({name: Built(library, 0.0) for name, library in libraries.items()})


def find(kernel: Kernel, arch: str = "") -> Built | None:
    """The finished build of exactly these sources, flags and versions, if there is one and no other file that the compiler
    read has changed."""
    if found := _given.get(f"{kernel.op}/{kernel.name}"):
        return found
    folder = directory(kernel, arch)
    try:
        built = Built(**json.loads((folder / "built.json").read_text()))
    except (OSError, ValueError, TypeError):  # there is none yet, or only a part of one
        return None
    return built if Path(built.library).is_file() and reads.are_current(kernel, recorded(kernel, arch)) else None


def recorded(kernel: Kernel, arch: str) -> reads.Reads | None:
    """The other files that the last build of exactly these sources read; None if there is no record."""
    folder = directory(kernel, arch)
    found = read_record(folder / "reads.json")
    return read_record(sandboxed(folder), "reads") if found is None else found


def read_record(path: Path, name: str = "") -> reads.Reads | None:
    """What a build read, from a JSON file or its value `name`; None if there is no such record."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        about = json.loads(path.read_text())
        return dict((about[name] if name else about).items())
    return None


def write_whole(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def sandboxed(folder: Path) -> Path:
    """The JSON file about a build in a sandbox. `folder` is the one that the same build has without a sandbox."""
    return root() / "sandboxed" / f"{folder.name}.json"
