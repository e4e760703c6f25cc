"""Landlock: a process gives up access to files, needs no privilege for it, and cannot take it back; nor can its children.

https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from minfer.sandbox import syscalls

READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, list a folder
REWRITE = READ | 1 << 1 | 1 << 14  # and write to the files that are there, or truncate them
FILE_ONLY = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14  # what may be granted on something that is no folder
ACCESSES = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14}  # by the version that brought them; 2: move, 3: truncate
NETWORK = 0b11  # bind and connect by TCP, since version 4
SIGNALS, ABSTRACT_SOCKETS = 2, 1  # beyond the own domain, since version 6


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = [("access", ctypes.c_uint64), ("fd", ctypes.c_int32)]


def version() -> int:
    """Of the kernel's Landlock; 0 where it has none or it is turned off."""
    try:
        return syscalls.call("landlock_create_ruleset", None, 0, 1)
    except OSError:
        return 0


def restrict(readable: Iterable[str], rewritable: Iterable[str], writable: Iterable[str], scoped: int) -> None:
    """Leave this process nothing but these files and folders, and what is in them. In `rewritable` folders it may change
    the files that are there, but not create or remove any. `scoped`: of SIGNALS and ABSTRACT_SOCKETS, what must stay among what
    it starts. Raises OSError. Its privileges must have been given up."""
    known = version()
    if not known:
        raise OSError("no Landlock")
    every = sum(bits for since, bits in ACCESSES.items() if known >= since)
    rules = _Ruleset(every, NETWORK if known >= 4 else 0, scoped if known >= 6 else 0)
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    ruleset = syscalls.call("landlock_create_ruleset", ctypes.byref(rules), size, 0)
    try:
        for access, paths in ((READ, readable), (REWRITE, rewritable), (every, writable)):
            for path in paths:
                _allow(ruleset, path, access & every)
        syscalls.call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                access &= FILE_ONLY
            rule = _Beneath(access, fd)
            syscalls.call("landlock_add_rule", ruleset, 1, ctypes.byref(rule), 0)
        finally:
            os.close(fd)


def all_but(hidden: Iterable[str], root: str = "/") -> Iterator[str]:
    """Everything beneath a folder except these, in as few paths as there can be: Landlock can only allow."""
    inside = [path for path in hidden if Path(path).is_relative_to(root)]
    if not inside:
        yield root
    elif root not in inside:
        with contextlib.suppress(OSError):
            for entry in os.scandir(root):
                if not entry.is_symlink():
                    yield from all_but(inside, entry.path)
