"""The files that a build read besides those that `Kernel.sources` finds, with their digests. The list is the compiler's own. If
one of these files has changed, the build is stale and the kernel's fingerprint is another one."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from minfer.build import toolchain
from minfer.ops import PACKAGE, Kernel
from minfer.ops.op import REGISTERED
from minfer.ops.sources import read_source, strip_comments

Reads = Mapping[str, str]  # path -> digest; "" for a file that cannot be digested

MOST_FILES = 1000
# Words by which a build depends on files that the compiler does not list: those that the assembler includes, and those whose
# existence a source tests.
UNLISTED = re.compile(r"\.incbin|\b__has_(?:include|include_next|embed)\b")
QUOTED = re.compile(r"""["']([^"'\\\n]{1,200})["']""")
IMPORTED = re.compile(r"^[ \t]*(?:from|import)[ \t]+([A-Za-z_][\w.]{0,199})", re.MULTILINE)
PROCESS = "process"  # a key beside the paths, for a build with files that the compiler does not list
_this_process = secrets.token_hex(8)


def reads_unlisted(kernel: Kernel) -> bool:
    """Whether a kernel from outside this project depends on files that the compiler does not list. Raises SourceError."""
    if kernel.source.is_relative_to(PACKAGE):
        return False
    return any(UNLISTED.search(strip_comments(read_source(path))) for path in kernel.sources() if path.suffix != ".py")


def are_current(kernel: Kernel, found: Reads | None) -> bool:
    """Whether none of these files has changed since they were recorded. Without a record, True for this project's own kernels,
    which include nothing but their sources. A build that depends on unlisted files is current only in the process that built
    it. Raises SourceError."""
    if found is None:
        return kernel.source.is_relative_to(PACKAGE)
    by = found.get(PROCESS, "")
    return digest(found.keys() - {PROCESS}) | ({PROCESS: by} if by else {}) == dict(found) and by in ("", _this_process)


def identity(kernel: Kernel, found: Reads | None) -> list[str]:
    """The present digests of these files, for a fingerprint; empty for a kernel that reads nothing but its sources. If the
    kernel depends on unlisted files, each process gets another result. Raises SourceError."""
    files = sorted(digest((found or {}).keys() - {PROCESS}).values())
    return [*files, *([_this_process] if reads_unlisted(kernel) else [])]


def record(kernel: Kernel, paths: Iterable[str]) -> dict[str, str]:
    """The record of the files that a build read, to be stored beside the build. Raises SourceError."""
    return digest(paths) | ({PROCESS: _this_process} if reads_unlisted(kernel) else {})


def digest(paths: Iterable[str]) -> dict[str, str]:
    """The digests of these files, of the first MOST_FILES at most."""
    return {path: _digest(path) for path in sorted(paths)[:MOST_FILES]}


def _digest(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    with open(fd, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        found, left = hashlib.sha256(), os.fstat(fd).st_size
        while left > 0 and (chunk := file.read(min(left, 1 << 20))):
            found.update(chunk)
            left -= len(chunk)
        return found.hexdigest()[:16]


def named_by_python(kernel: Kernel) -> dict[str, str]:
    """For a Python source from outside this project: the files beside it that its text names, in quotation marks or as a
    module, with their digests. What else it reads when it runs is not known. The sources of registered kernels are left out.
    Raises SourceError."""
    if kernel.source.suffix != ".py" or kernel.source.is_relative_to(PACKAGE):
        return {}
    text, folder = read_source(kernel.source), kernel.source.parent
    named = dict.fromkeys([*QUOTED.findall(text), *(f"{name.replace('.', '/')}.py" for name in IMPORTED.findall(text))])
    found = {os.path.realpath(folder / name) for name in list(named)[:MOST_FILES] if os.path.isfile(folder / name)}  # noqa: PTH113
    sources = {os.path.realpath(each.source) for op in REGISTERED.values() for each in op.kernels.values()}
    return digest(found - sources)


def listed(kernel: Kernel, folder: Path) -> list[str]:
    """The files that the compiler read, from the list that ninja keeps in a build's folder. Left out are the kernel's sources
    and the files of the compiler, of CUDA, of Python and of PyTorch, whose versions the build's name hashes."""
    toolchain.put_ninja_on_path()
    said = subprocess.run(
        ["ninja", "-t", "deps"], cwd=folder, capture_output=True, text=True, errors="surrogateescape"
    ).stdout
    return _others(kernel, (folder / line.strip() for line in said.splitlines() if line.startswith("    ")))


def listed_by_make(kernel: Kernel, file: Path) -> list[str]:
    """The same from the file that `-MD` writes: a rule of make."""
    text = file.read_text("utf-8", errors="surrogateescape").replace("\\\n", " ").partition(":")[2]
    return _others(kernel, (Path(word.replace("\\ ", " ")) for word in re.split(r"(?<!\\)\s+", text) if word))


def _others(kernel: Kernel, paths: Iterable[Path]) -> list[str]:
    known = {os.path.realpath(path) for path in kernel.sources()}
    found = {os.path.realpath(path) for path in paths}
    versioned = [os.path.realpath(path) for path in _versioned()]
    own = os.path.realpath(kernel.source.parent)
    return sorted(
        path
        for path in found - known
        if path.startswith(f"{own}/") or not any(path.startswith(f"{folder}/") for folder in versioned)
    )


def _versioned() -> list[str]:
    folders = [
        "/usr/include",
        "/usr/lib",
        "/usr/local/cuda",
        sysconfig.get_path("include"),
        sys.base_prefix,
        sys.prefix,
    ]
    folders.append(str(Path(torch.__file__).parent))
    if home := toolchain.toolkit():
        folders.append(str(home))
    return folders
