"""The wheel `minfer-kernels`: libraries that were built ahead, which functions use instead of compiling.

A library belongs to one `key`: a hash of the kernel's source, the headers of ours that it includes, and its flags, which name
the architecture and the oldest PyTorch that it serves. If the sources or flags have changed, the library is not used. A folder
of the cache is for one version of PyTorch, Python and the compiler; a library of the wheel is for several."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import platform
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from minfer.build.cache import Built
from minfer.build.toolchain import STABLE_ABI, flags_of, processor
from minfer.ops import PACKAGE, Kernel
from minfer.ops.sources import read_source_bytes

NAME = "minfer_kernels"


@dataclass(frozen=True)
class Library:
    """A library to pack."""

    kernel: Kernel
    arch: str
    built: Built


def key(kernel: Kernel, arch: str) -> str:
    """A hash of the sources and flags that a library must be built from to be used for a kernel."""
    digest = hashlib.sha256()
    for path in kernel.sources():
        digest.update(read_source_bytes(path))
    digest.update(json.dumps(flags_of(kernel, arch)).encode())
    return digest.hexdigest()[:16]


def find(kernel: Kernel, arch: str) -> Path | None:
    """The library of the installed wheel for a kernel, if it has one that fits these sources, this CUDA and this processor."""
    folder = _folder()
    about = _manifest(folder).get(_name(kernel, arch)) if folder else None
    if (
        folder is None
        or about is None
        or not kernel.source.is_relative_to(PACKAGE)
        or about["key"] != key(kernel, arch)
    ):
        return None
    fits = about["cuda"] == _cuda() if arch else set(about["processor"].split()) <= set(processor().split())
    path = folder / about["library"]
    return path if fits and path.is_file() else None


@cache
def _folder() -> Path | None:
    spec = importlib.util.find_spec(NAME)
    return Path(spec.origin).parent if spec and spec.origin else None


@cache
def _manifest(folder: Path) -> Mapping[str, Mapping[str, str]]:
    try:
        found: Mapping[str, Mapping[str, str]] = json.loads((folder / "manifest.json").read_text())["libraries"]
    except (OSError, ValueError, KeyError):
        return {}
    return found


def _name(kernel: Kernel, arch: str) -> str:
    return f"{kernel.op}_{kernel.source.stem}.{arch or 'cpu'}"


def _cuda() -> str:
    """The major version, which is part of the name of CUDA's runtime library."""
    return str(torch.version.cuda).split(".")[0]


def write_wheel(folder: Path, version: str, libraries: Iterable[Library]) -> Path:
    """Write the wheel of these libraries into a folder: for every Python, and every PyTorch from the one that the stable ABI
    names. The platform is that of the oldest glibc that has what all of them need."""
    files, about, glibc = dict[str, bytes](), dict[str, dict[str, Any]](), 17
    for each in libraries:
        name, content = _name(each.kernel, each.arch), Path(each.built.library).read_bytes()
        files[f"{NAME}/{name}.so"] = content
        about[name] = {"key": key(each.kernel, each.arch), "library": f"{name}.so"}
        about[name] |= {"cuda": _cuda()} if each.arch else {"processor": processor()}
        glibc = max([glibc, *(int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)(?=[.\0])", content))])
    tag = f"py3-none-manylinux_2_{glibc}_{platform.machine()}"
    info = f"{NAME}-{version}.dist-info"
    manifest = {"abi": STABLE_ABI, "libraries": about}
    files[f"{NAME}/__init__.py"] = b'"""Compiled kernels of minfer, which finds them here before it compiles."""\n'
    files[f"{NAME}/manifest.json"] = json.dumps(manifest, indent=1, sort_keys=True).encode()
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: minfer-kernels\nVersion: {version}\nSummary: compiled kernels of minfer\n"
        "Requires-Dist: torch>=2.11\n"
    ).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: minfer\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    lines = [f"{path},sha256={_digest(content)},{len(content)}\n" for path, content in files.items()]
    files[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for name, content in files.items():
            wheel.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED, 9)
    return path


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
