"""What the foreign code of a shard may see: its own sources, and what PyTorch and the compilers need."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from minfer import build, ops
from minfer.ops import Case
from minfer.plan.shard import Shard
from minfer.sandbox import HIDDEN, LEVELS, Sandbox, strongest


def sandbox(shard: Shard) -> Sandbox:
    """The sandbox for what this shard compiles, loads and runs, at the level that it asks for, else the strongest level."""
    own = [Path(shard.results), Path(shard.folder)]
    for folder in (*own, build.cache_folder()):  # the sandbox can only hide and show what exists already
        folder.mkdir(parents=True, exist_ok=True)
    hidden = {os.path.realpath(folder) for folder in (*own, *map(Path, (tempfile.gettempdir(), *HIDDEN)))}
    gpu = []
    if shard.device == "cuda":
        # The driver makes some of its devices when the first process uses it.
        subprocess.run(
            [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)"], stderr=subprocess.DEVNULL
        )
        gpu = sorted(map(str, Path("/dev").glob("nvidia*")))
    # CUDA shares memory only between processes of one PID namespace: https://github.com/openucx/ucx/issues/11978
    level = shard.sandbox or strongest(LEVELS[1:] if shard.device == "cuda" else LEVELS, gpu)
    return Sandbox(level, sorted(hidden), sorted(_needed(shard, hidden)), gpu)


def ours(case: Case) -> bool:
    """Whether a case runs only this project's code."""
    return ops.get(case.op).kernels[case.kernel].source.is_relative_to(ops.PACKAGE)


def _needed(shard: Shard, hidden: set[str]) -> set[str]:
    """The paths that must be readable, even inside a hidden folder; never a whole hidden folder."""
    kernels = [ops.get(case.op).kernels[case.kernel] for case in shard.cases]
    files = {Path(name) for name in (*shard.extra, *shard.sources)} | {kernel.source for kernel in kernels}
    folders = {ops.PACKAGE.parent, build.cache_folder(), *map(Path, (*sys.path, sys.prefix, sys.base_prefix))}
    if toolkit := build.toolkit():
        folders.add(toolkit)
    needed = {os.path.realpath(path) for path in files | folders | {file.parent for file in files}}
    return {path for path in needed if path != "/" and path not in hidden}
