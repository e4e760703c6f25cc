"""What a kernel may not do beside computing, found from outside of it: processes left behind, work handed to a library.

`watch.py` has what is found inside of the process. A kernel runs in the harness's own process, so both raise the price
of cheating and cannot make it infinite: `tests/exploits` keeps every trick that we know, the unsolved ones too.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Work that a kernel of our own must not hand to a library, as PyTorch names its ops...
WORK = r"\w*(mm|matmul|linear|einsum|dot|conv|attention|softmax|norm|_into)"
LIBRARY_OPS = re.compile(rf"^aten::{WORK}")
# ...as a binary's symbols and literals name them and the libraries below them...
LIBRARIES = re.compile(
    rf"\bPy[A-Z][A-Za-z]+_|cublas|cudnn|cutlass|\bcblas_|\bmkl_|\bdnnl_|aoti_torch_(cpu|cuda)_|aten::{WORK}".encode(),
    re.IGNORECASE,
)
# ...and as a source looks them up where no symbol tells.
LOOKUPS = re.compile(r"\bdl(m?open|v?sym|_iterate_phdr)\b")
COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


IDLE_S = 100e-6  # within this, a GPU that is idle says so


class Dishonest(Exception):
    """A kernel broke a rule of measuring; the message says which."""


def adopt_orphans() -> None:
    """Make this process the parent of whatever its descendants leave behind (PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(36, 1)


def children() -> set[int]:
    """The processes that this one started and that still run; where it is their subreaper, all that descend from it."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in path.read_text().split() if _runs(int(pid))}
    return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def check_library(path: Path) -> None:
    """Raises Dishonest when a built kernel refers to a library that would do the work."""
    if found := LIBRARIES.search(path.read_bytes()):
        raise Dishonest(f"its binary refers to {found[0].decode()}: the work must be its own")


def check_sources(paths: Iterable[Path]) -> None:
    """Raises Dishonest when a kernel's sources look up functions that its binary does not name."""
    for path in paths:
        if found := LOOKUPS.search(COMMENTS.sub("", path.read_text())):
            raise Dishonest(f"{path.name} looks up a library with {found[0]}: the work must be its own")


class _Seen(TorchFunctionMode):
    """Collects the names of the functions of PyTorch's that Python calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)  # of an op; a function has a name only
        self.names.add(schema.name if schema else f"aten::{getattr(func, '__name__', func)}")
        return func(*args, **(kwargs or {}))


def check_idle(call: Callable[[], object]) -> None:
    """Make some calls on the GPU and raise Dishonest when each leaves work running on another stream, where it would
    slow down whatever is timed next."""
    left = []
    for _ in range(5):
        call()
        torch.cuda.current_stream().synchronize()
        begin = time.perf_counter()
        torch.cuda.synchronize()
        left.append(time.perf_counter() - begin)
    if min(left) > IDLE_S:
        raise Dishonest(f"leaves work running for {min(left) * 1e6:.0f} us after its call has ended")


def check_delegation(call: Callable[[], object]) -> None:
    """Make two calls and raise Dishonest when PyTorch sees an op in one that does the work for it."""
    # torch.profiler's own class does the same and imports torch._dynamo, which takes 5 s.
    with torch.autograd.profiler.profile() as profile:
        call()
    with _Seen() as seen:  # who knows when it is profiled may not know this
        call()
    for name in sorted({event.name for event in profile.function_events or ()} | seen.names):
        if LIBRARY_OPS.match(name):
            raise Dishonest(f"hands the work to PyTorch: it calls {name}")
