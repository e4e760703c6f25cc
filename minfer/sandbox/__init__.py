"""Where code that nobody has read may run: what it can see, change and reach, as strictly as this machine allows.

Three levels, of which `strongest` finds out which this machine has:

- `namespaces`: a file system, process table, network and shared memory of its own. All files are read-only or hidden,
  and what it writes is in memory and gone with it. What it starts dies with it.
- `landlock`: it needs no namespaces, and so works within a container. It gives up all files but those that it may read,
  all signals and ptrace to other processes. It has a folder to write in, which is removed after it.
- `limits`: resource limits and no new privileges alone. It may do to files and processes what its user may.

The first two also filter system calls (`seccomp`). docs/security.md says what each level promises.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from minfer.sandbox import landlock, namespaces, seccomp, syscalls

LEVELS = ("namespaces", "landlock", "limits")
SCRATCH = "/tmp"  # in namespaces, where it is no other process's
HIDDEN = ("/tmp", "/var/tmp", "/run")  # other programs' files and sockets
THREADS = "/proc/self/task"
MOST_THREADS = 2048  # that a sandbox may have
MOST_FILES = 4096  # open at a time
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 4, 24, 38, 47
LAST_CAPABILITY = 63


@dataclass(frozen=True)
class Sandbox:
    """What code in it may see. JSON can hold it: the process that enters it is often another one."""

    level: str
    hidden: Sequence[str] = ()  # folders
    visible: Sequence[str] = ()  # of hidden ones, what may be read
    devices: Sequence[str] = ()  # of a GPU
    scratch: str = SCRATCH  # a folder to write in; in namespaces a new one is made there
    scratch_bytes: int = 4 << 30

    def separate(self) -> None:
        """What comes before the process is forked that enters. Raises OSError."""
        if self.level == "namespaces":
            syscalls.prctl(PR_SET_DUMPABLE, 1)  # else its files in /proc, which say who it is, are root's
            namespaces.separate()

    def enter(self) -> None:
        """Give up everything else, for this process and for what it starts. It must have one thread. Raises OSError."""
        here = Path.cwd()
        hidden = {os.path.realpath(path) for path in (*self.hidden, *HIDDEN)}
        if self.level == "namespaces":
            namespaces.furnish(hidden, self.visible, self.devices, self.scratch, self.scratch_bytes)
            os.chdir(here if here.is_dir() else self.scratch)
        self._limit()
        _give_up_privileges()
        connects = bool(self.devices)
        if self.level == "landlock":
            devices = [*(f"/dev/{name}" for name in namespaces.PLAIN_DEVICES), *self.devices]
            readable = [*landlock.all_but({*hidden, "/dev"}), *self.visible]
            scoped = landlock.SIGNALS | (0 if connects else landlock.ABSTRACT_SOCKETS)
            # cuInit writes the names of its threads to /proc/self/task/*/comm, and returns error 304 if it may not. The rule is
            # for this process alone: a process that it starts has another folder there.
            rewritable = [THREADS] if self.devices else []
            landlock.restrict(readable, rewritable, [self.scratch, *devices], scoped)
        if self.level != "limits":
            own_signals = self.level == "namespaces" or landlock.version() >= 6
            rules = seccomp.rules(self.level == "namespaces", own_signals, connects)
            seccomp.install(seccomp.program(rules))
        syscalls.prctl(PR_SET_DUMPABLE, 1)  # new privileges in the namespace had cleared it
        self._move_caches()

    def _limit(self) -> None:
        threads = int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])  # the limit counts those of a user
        limits = {resource.RLIMIT_NPROC: threads + MOST_THREADS, resource.RLIMIT_NOFILE: MOST_FILES}
        limits |= {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: self.scratch_bytes}
        if not self.devices:  # a GPU's driver reserves more than there is
            limits[resource.RLIMIT_DATA] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for which, most in limits.items():
            hard = resource.getrlimit(which)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(which, (most, most))

    def _move_caches(self) -> None:
        """Have libraries write where they may."""
        with contextlib.suppress(RuntimeError):  # a user without a name or HOME has none
            kept = Path("~/.cache/torch_extensions").expanduser()  # finished builds, to be read
            os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(kept))
        own = ("HOME", "TMPDIR", "TMP", "TEMP", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
        os.environ |= dict.fromkeys(own, self.scratch)
        tempfile.tempdir = None


def _give_up_privileges() -> None:
    for capability in range(LAST_CAPABILITY + 1):
        try:
            syscalls.prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # there are not so many, or it had none
            break
    syscalls.prctl(PR_CAP_AMBIENT, 4)  # clear all
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    syscalls.call("capset", header, (ctypes.c_uint32 * 6)())
    syscalls.prctl(PR_SET_NO_NEW_PRIVS, 1)


def keep_to_itself(yes: bool = True) -> None:
    """Let no other process of this user read or write this one's memory, or trace it. What it starts inherits that."""
    syscalls.prctl(PR_SET_DUMPABLE, int(not yes))


@cache
def available(level: str, devices: tuple[str, ...] = ()) -> bool:
    """Whether this machine has a level and, if a GPU's devices are given, whether CUDA starts in it. Tries both in a process of
    its own."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-m", "minfer.sandbox", level, *devices]
    try:
        return subprocess.run(command, env=environment, capture_output=True, timeout=60).returncode == 0
    except subprocess.TimeoutExpired:  # CUDA may wait for ever
        return False


def strongest(levels: Sequence[str] = LEVELS, devices: Sequence[str] = ()) -> str:
    """The strongest of these levels that this machine has and, if a GPU's devices are given, in which CUDA starts. The last
    level is not tried."""
    return next(level for level in levels if level == LEVELS[-1] or available(level, tuple(devices)))
