"""Notices what a kernel did to the process it shares with the harness: patched functions, changed settings, threads."""

from __future__ import annotations

import builtins
import contextlib
import gc
import json
import math
import os
import random
import re
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from minfer import ops
from minfer.bench.integrity import Dishonest, children

# What the harness calls, beside its own functions. A name that a library adds later is its own affair, except where it
# would hide another.
PYTHON = (builtins, gc, json, json.encoder, math, os, random, signal, threading, time)
LIBRARIES = (np, np.random, torch, torch.cuda, torch.cuda.streams, torch.cuda.graphs, torch.profiler)
CLASSES = (torch.cuda.Event, torch.cuda.Stream, torch.cuda.CUDAGraph, torch.cuda.graph, torch.Generator)

# Settings of PyTorch's that decide how fast a baseline is; their getters take no arguments.
GETTERS = re.compile(
    r"_get_(cublas|cudnn|mkldnn|onednn|blas|linalg|cpu_allow|default|deterministic|float32|nnpack|\w*sdp)\w*"
)
# The ops that baselines and the harness's comparisons consist of: another implementation can be registered for them.
AT_WORK = ("mm", "mm.out", "addmm", "addmm.out", "copy_", "clone", "fill_.Scalar", "equal", "sub_.Tensor", "sub.Tensor",
           "abs_", "add_.Tensor", "mul_.Tensor", "le.Tensor", "all", "any", "max", "isnan", "normal_", "uniform_")  # fmt: skip
KEYS = ("CPU", "CUDA", "Autograd", "Python", "Composite")  # dispatch keys on the way of a plain tensor

# Ways to get hold of the harness's data that a kernel has no use for.
FORBIDDEN = ("gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._current_frames", "sys._current_exceptions",
             "sys.settrace", "sys.setprofile")  # fmt: skip
FRAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")

SITE = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen ", "<__array_function__")

MISSING = object()
LATE = "manual_seed"  # torch._dynamo wraps it when it is imported, which PyTorch does when it likes


class Watch:
    """Remembers the process as it is before any kernel was loaded, and says what a kernel changed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        for op in ops.names():
            ops.get(op)
        self._names = {label: dict(names) for label, names, _ in _namespaces()}
        self._settings = _settings()
        self._python_threads = set(threading.enumerate())
        self._native_threads = self._count_threads()
        self._processes = children()
        self._held: list[tuple[Any, dict[str, Any]]] = []
        self._refused, self._asking = "", False
        self._glanced = [(names, itemgetter(*keys), more) for names, keys, more in _critical()]
        self._glimpse = self._look()

    def guard(self) -> None:
        """From now on, for as long as the process lives, refuse what only tampering needs."""
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        tampering = event in FORBIDDEN
        if event == "object.__setattr__" and isinstance(arguments[0], FunctionType):
            tampering = arguments[0].__module__ in self._names
        elif event == "ctypes.dlsym":
            tampering = str(arguments[1]).lstrip("_").startswith("Py")
        looking = event == "sys._getframe" or (event == "object.__getattr__" and arguments[1] in FRAMES)
        if looking and not self._asking:
            self._asking = True  # the next line looks at the call stack, too
            tampering = _is_a_kernel(sys._getframe(1))
            self._asking = False
        if tampering:
            what = arguments[1] if event.startswith(("object.", "ctypes.")) else event
            self._refused = f"tampered with the process: it used {what}"
            raise Dishonest(self._refused)

    def hold(self, *objects: Any) -> None:
        """Remember objects whose attributes nobody has reason to replace from now on, instead of those before."""
        self._held = [(held, {key: _frozen(value) for key, value in vars(held).items()}) for held in objects]

    def glance(self) -> None:
        """A check so short (some microseconds) that it fits behind every call. Raises Dishonest."""
        if self._look() != self._glimpse:
            self.check_names()

    def _look(self) -> list[tuple[Any, int]]:
        return [(getter(names), len(names) if more else 0) for names, getter, more in self._glanced]

    def check_names(self) -> None:
        """Raises Dishonest for what was refused, a replaced function or object, and a changed setting."""
        if self._refused:
            raise Dishonest(self._refused)
        settings = _settings()
        for name, value in self._settings.items():
            if settings[name] != value:
                change = f" from {value} to {settings[name]}" if len(f"{value}{settings[name]}") < 80 else ""
                raise Dishonest(f"changed {name}{change}, which the baseline is timed with")
        seen = set()
        for label, names, what in _namespaces():
            seen.add(label)
            kept = self._names.setdefault(label, dict(names))
            for key, value in kept.items():
                if names.get(key, MISSING) is not value and (what != "library" or (callable(value) and key != LATE)):
                    raise Dishonest(f"replaced {label}.{key}, which the measurement relies on")
            if what == "ours" and (added := [key for key in names.keys() - kept.keys() if _hides(key, names[key])]):
                raise Dishonest(f"added {label}.{min(added)} to what the measurement relies on")
        if gone := self._names.keys() - seen:
            raise Dishonest(f"removed {min(gone)}, which the measurement relies on")
        for held, attributes in self._held:
            now = vars(held)
            for key in attributes.keys() | now.keys():
                if not _same(_frozen(now.get(key, MISSING)), attributes.get(key, MISSING)):
                    raise Dishonest(f"replaced {type(held).__name__}.{key}, which the measurement relies on")

    def check(self) -> None:
        """Also raises Dishonest for a thread or a process that was not there before."""
        self.check_names()
        if extra := set(threading.enumerate()) - self._python_threads:
            raise Dishonest(f"left a thread running: {min(thread.name for thread in extra)}")
        for _ in range(20):  # a pool's threads take a moment to end
            if (count := self._count_threads()) <= self._native_threads:
                break
            time.sleep(0.01)
        else:
            raise Dishonest(f"left threads running: {count - self._native_threads} outside of PyTorch's pool")
        if extra_processes := children() - self._processes:
            raise Dishonest(f"left a process running: {min(extra_processes)}")

    def _count_threads(self) -> int:
        """The threads of this process, with PyTorch's pool at its largest. Zero on a GPU, where the driver starts
        threads when it likes: there, work that does not arrive in stream order is found by its result."""
        if self._device.type == "cuda":
            return 0
        wide = torch.ones(1 << 20)
        wide.add_(wide)
        return len(list(Path("/proc/self/task").iterdir()))


def _namespaces() -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """The names that a measurement goes through: label, names, and whose they are. Of a "library" only what can be
    called counts; to "ours" nothing may be added; the "registry" grows when a kernel's file is loaded."""
    for name, module in sorted(sys.modules.items()):
        if name == "__main__" or name == "minfer" or name.startswith("minfer."):
            yield name, vars(module), "ours"
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == name:
                    yield f"{name}.{key}", vars(value), "ours"
                elif isinstance(value, dict) and not key.startswith("_"):
                    yield f"{name}.{key}", value, "ours"
    yield "torch.Tensor", vars(torch.Tensor), "ours"
    for owner in (*PYTHON, *LIBRARIES, *CLASSES):
        label = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
        yield label, vars(owner), "library"
    yield "ops", ops._OPS, "registry"
    for name, op in list(ops._OPS.items()):
        yield f"op {name}", vars(op), "ours"
        yield f"the kernels of {name}", op.kernels, "registry"
        for kernel in list(op.kernels.values()):
            yield f"{name}/{kernel.name}", vars(kernel), "ours"


def _hides(key: str, value: Any) -> bool:
    """Whether a name that was added can stand for another; a module can not, it was only imported."""
    return not isinstance(value, ModuleType) and key != "__warningregistry__"


def _critical() -> Iterator[tuple[Mapping[str, Any], Iterable[str], bool]]:
    """What runs between the end of a timed call and the next full check: clocks, hooks and comparisons; names, which of
    them, and whether more of them count."""
    yield vars(time), ("perf_counter", "monotonic"), False
    yield vars(torch.cuda), ("synchronize", "Event", "current_stream"), False
    yield vars(torch.cuda.Event), ("record", "elapsed_time", "synchronize"), False
    yield vars(torch.Tensor), ("__reversed__", "norm"), True  # most methods are its base's, and would be hidden
    for name in ("minfer.bench.measure", "minfer.bench.clock", "minfer.bench.verify"):
        module = sys.modules.get(name)
        names = vars(module) if module else {}
        if functions := [key for key, value in names.items() if isinstance(value, FunctionType)]:
            yield names, functions, True
        for value in list(names.values()):
            if isinstance(value, type) and value.__module__ == name:
                yield vars(value), vars(value).keys(), True


def _frozen(value: Any) -> Any:
    """A value by identity, and what a list or a closure holds with it."""
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, FunctionType):
        return value, *(cell.cell_contents for cell in value.__closure__ or ())
    return value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other


def _settings() -> dict[str, Any]:
    """Everything global that changes how fast other code runs, or what it computes."""
    found: dict[str, Any] = {
        "the number of threads": torch.get_num_threads(),
        "the default dtype": torch.get_default_dtype(),
        "gradient mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "the stack of dispatch modes": torch._C._len_torch_dispatch_stack(),
        "the stack of function modes": torch._C._len_torch_function_stack(),
        "the profiler": torch._C._autograd._profiler_enabled(),
        "the trace function": (sys.gettrace(), sys.getprofile()),
        "the garbage collector": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "the signal handlers": [signal.getsignal(number) for number in signal.valid_signals()],
        "the interval of thread switches": sys.getswitchinterval(),
        "the CPUs it may run on": os.sched_getaffinity(0),
        "its priority": os.getpriority(os.PRIO_PROCESS, 0),
        "the rounding of numbers": (
            math.fsum([1.0, 2**-54]),
            math.fsum([1.0, 1.5 * 2**-53]),
            float(torch.tensor(1e-40) * 1),
        ),
    }
    for name in dir(torch._C):
        if GETTERS.fullmatch(name):
            with contextlib.suppress(TypeError):  # it takes an argument after all
                found[f"torch._C.{name}()"] = getattr(torch._C, name)()
    if torch.cuda.is_initialized():
        found["the current stream"] = torch.cuda.current_stream()
    matmul = torch.backends.cuda.matmul
    found["torch.backends.cuda.matmul"] = [matmul.allow_tf32, matmul.allow_fp16_accumulation]
    for name in AT_WORK:
        lines = torch._C._dispatch_dump(f"aten::{name}").splitlines()
        found[f"what aten::{name} does"] = [line for line in lines if line.startswith(KEYS)]
    return found


def _is_a_kernel(frame: FrameType | None) -> bool:
    """Whether a frame runs code that is neither Python's, nor PyTorch's, nor ours, also through the standard library."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(SITE) or file.startswith(str(ops.PACKAGE)):
            return False
        if not file.startswith(STANDARD):
            return True
        frame = frame.f_back
    return False
