"""Limits the threads of a process and of all processes that it starts by the cgroup controller `pids`, because RLIMIT_NPROC
does not limit root. It works only where this user may make such a cgroup. See
https://docs.kernel.org/admin-guide/cgroup-v1/pids.html."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from minfer.process.cgroup import PREFIX, remove_left_behind

MOST_THREADS = 2048


def limit(pid: int, version_2: Path | None) -> Path | None:
    """Limit a process. `version_2` is its own cgroup of version 2, if it has one. Returns the folder of a new
    cgroup, to be given to `remove`, or None if none was made."""
    with contextlib.suppress(OSError):
        if version_2 and (version_2 / "pids.max").exists():
            (version_2 / "pids.max").write_text(str(MOST_THREADS))
            return None
        parent = _version_1()
        remove_left_behind(parent)
        folder = parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        folder.mkdir()
        try:
            (folder / "pids.max").write_text(str(MOST_THREADS))
            (folder / "cgroup.procs").write_text(str(pid))
        except OSError:
            folder.rmdir()
            raise
        return folder
    return None


def remove(folder: Path) -> None:
    """Remove a cgroup whose processes have ended. If that fails, a later `limit` removes it."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _version_1() -> Path:
    """The folder of the cgroup with the controller `pids` that this process is in. Raises OSError where there is none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "pids" in controllers.split(","):
            for mount in map(str.split, Path("/proc/self/mounts").read_text().splitlines()):
                if mount[2] == "cgroup" and "pids" in mount[3].split(","):
                    return Path(mount[1]) / path.lstrip("/")
    raise OSError("no cgroup with the controller pids is mounted")
