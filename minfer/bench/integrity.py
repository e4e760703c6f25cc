"""Detects what a kernel does besides computing: patched timers, threads, processes, work handed to a library."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from minfer.ops.sources import read_source, strip_comments

# Work that a kernel of our own must not hand to a library, as PyTorch's profiler and a binary's symbols name it.
LIBRARY_OPS = re.compile(r"^aten::.*(mm|matmul|linear|einsum|dot|conv|attention|softmax|norm|_into)")
LIBRARIES = (b"cublas", b"cudnn", b"cutlass")
LOOKUPS = re.compile(r"\bdl(m?open|v?sym|_iterate_phdr)\b")


class Dishonest(Exception):
    """A kernel broke a rule of measuring; the message says which."""


class Watch:
    """Remembers the harness as it is, and says what a kernel changed. One serves a process."""

    def __init__(self) -> None:
        # torch.compile shows progress bars, and tqdm would start a thread that watches them.
        if tqdm := sys.modules.get("tqdm"):
            tqdm.tqdm.monitor_interval = 0
        self._threads = set(threading.enumerate())
        self._processes = _children()
        self._functions = {name: (function, _code(function)) for name, function in _harness()}

    def check(self) -> None:
        """Raises Dishonest for a patched function, a thread or a process that was not there before."""
        for name, function in _harness():
            if self._functions.get(name, (function, _code(function))) != (function, _code(function)):
                raise Dishonest(f"replaced {name}, which the measurement relies on")
        if extra := set(threading.enumerate()) - self._threads:
            raise Dishonest(f"left a thread running: {min(thread.name for thread in extra)}")
        if extra_processes := _children() - self._processes:
            raise Dishonest(f"left a process running: {min(extra_processes)}")


def _code(function: Any) -> Any:
    return getattr(function, "__code__", None)


def _harness() -> list[tuple[str, Any]]:
    """The functions that a measurement goes through: clocks, PyTorch's comparisons, and everything of the bench."""
    owners: list[tuple[str, Any, tuple[str, ...]]] = [
        ("time", time, ("perf_counter", "monotonic", "sleep")),
        ("torch", torch, ("equal", "sum", "full", "empty")),
        ("torch.cuda", torch.cuda, ("Event", "synchronize", "CUDAGraph", "graph", "current_stream", "_sleep")),
        ("torch.cuda.Event", torch.cuda.Event, ("record", "elapsed_time", "query", "synchronize")),
        (
            "torch.Tensor",
            torch.Tensor,
            ("double", "any", "all", "max", "norm", "sub_", "abs", "copy_", "fill_", "isnan"),
        ),
    ]
    found = [
        (f"{name}.{attribute}", getattr(owner, attribute))
        for name, owner, attributes in owners
        for attribute in attributes
    ]
    for module_name in sorted(sys.modules):
        if module_name.startswith("minfer.") and not module_name.startswith("minfer.ops."):
            for attribute, value in vars(sys.modules[module_name]).items():
                if isinstance(value, FunctionType):
                    found.append((f"{module_name}.{attribute}", value))
                elif isinstance(value, type) and value.__module__ == module_name:
                    methods = {k: v for k, v in vars(value).items() if isinstance(v, FunctionType)}
                    found += [(f"{module_name}.{attribute}.{name}", method) for name, method in methods.items()]
    return found


def _children() -> set[int]:
    """The processes that this one started and that still run."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            found |= {int(pid) for pid in path.read_text().split()}
        except OSError:
            continue
    return found


def check_library(path: Path) -> None:
    """Raises Dishonest when a built kernel refers to a library that would do the work."""
    content = path.read_bytes().lower()
    for name in LIBRARIES:
        if name in content:
            raise Dishonest(f"its binary refers to {name.decode()}: a kernel must not call a library")


def check_sources(paths: Iterable[Path]) -> None:
    """Raises Dishonest when a kernel's sources look up functions that its binary does not name."""
    for path in paths:
        if found := LOOKUPS.search(strip_comments(read_source(path))):
            raise Dishonest(f"{path.name} looks up a library with {found[0]}: a kernel must not call a library")


def check_delegation(call: Callable[[], object]) -> None:
    """Make one call and raise Dishonest when PyTorch sees an op in it that does the work for it."""
    # torch.profiler's own class does the same, and first imports torch._dynamo, which takes 5 s.
    with torch.autograd.profiler.profile() as profile:
        call()
    for event in profile.function_events or ():
        if LIBRARY_OPS.match(event.name):
            raise Dishonest(f"hands the work to PyTorch: it calls {event.name}")
