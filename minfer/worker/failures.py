"""Turns the error of a kernel that failed into the columns of its row: status, message and errors."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

import torch

from minfer.bench.errors import Errors
from minfer.bench.integrity import Dishonest
from minfer.bench.verify import WrongResult
from minfer.build.errors import DISK_FULL, BuildError
from minfer.rows.store import Row


def error_columns(errors: Errors) -> Row:
    """The columns with the errors that a verification found."""
    return {
        "rel_l2_error": errors.rel_l2,
        "max_abs_error": errors.max_abs,
        "error_over_bound": errors.over_bound,
        "error_over_limit": errors.over_limit,
    }


def failure_columns(error: Exception, device: torch.device, find_change: Callable[[], str | None]) -> Row:
    """The columns for an error of a kernel. `find_change` says what the kernel has changed in this process, if anything: the
    change may have caused an error in the harness."""
    if isinstance(error, WrongResult):
        return error_columns(error.errors) | {"status": "wrong", "message": str(error), "verified": error.errors.tried}
    if isinstance(error, Dishonest):
        return {"status": "dishonest", "message": str(error)}
    if isinstance(error, BuildError):
        return {"status": "compile_error", "message": str(error)}
    message = describe_error(error)
    out_of_memory = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or out_of_memory:
        return {"status": "oom", "message": message}
    if changed := find_change():
        return {"status": "dishonest", "message": changed}
    if "can't allocate memory" in message or "out of memory" in message:
        return {"status": "oom", "message": message}
    if device.type == "cuda" and "CUDA error" in str(error):
        # An illegal access or a failed assertion leaves the CUDA context unusable.
        return {"status": "crashed", "message": message}
    if (full := DISK_FULL.search(str(error))) and "triton" in sys.modules:
        where = os.environ.get("TRITON_CACHE_DIR", "~/.triton")
        message = f"cannot compile by Triton in {where}: {full[0]}; free it or set cluster.scratch"
    return {"status": "error", "message": message}


def describe_error(error: BaseException) -> str:
    """The first line of an error. If it ends with a colon, the next line is added. The error's type comes before it, except
    for a RuntimeError with a text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return text if isinstance(error, RuntimeError) and text else f"{type(error).__name__}: {text}"
