"""A cgroup (version 2) for a process and all that it starts: they are frozen and killed together, whatever session or parent
they have now. Only where cgroups are mounted and this user may make one; https://docs.kernel.org/admin-guide/cgroup-v2.html."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

PREFIX = "minfer-"
POLL_S = 2e-5  # asleep, because a thread needs a CPU to be frozen
FROZEN_S = 10.0  # a process that waits for a disk cannot be frozen before it is served


class Cgroup:
    """Raises OSError where there can be none."""

    def __init__(self, pid: int) -> None:
        """With this process in it."""
        parent = own()
        remove_left_behind(parent)
        self.folder = parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self.folder.mkdir()
        try:
            (self.folder / "cgroup.procs").write_text(str(pid))
            self._is_frozen()  # raises where the kernel cannot freeze
        except OSError:
            self.folder.rmdir()
            raise

    def freeze(self) -> bool:
        """Whether all of it stands still; False where it does not in time."""
        (self.folder / "cgroup.freeze").write_text("1")
        deadline = time.monotonic() + FROZEN_S
        while not self._is_frozen():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def thaw(self) -> None:
        (self.folder / "cgroup.freeze").write_text("0")

    def processes(self) -> set[int]:
        """Those that have a thread left."""
        return set(map(int, (self.folder / "cgroup.procs").read_text().split()))

    def kill(self) -> None:
        """Kill all of it, and remove the cgroup once the processes are gone."""
        with contextlib.suppress(OSError):
            (self.folder / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + FROZEN_S
        while self.folder.exists() and time.monotonic() < deadline:
            inside = sorted(
                self.folder.glob("**/"), key=lambda path: len(path.parts)
            )  # folders that processes of root have made there
            with contextlib.suppress(OSError):  # busy: one of them is not gone yet
                for folder in (*reversed(inside), self.folder):
                    folder.rmdir()
            time.sleep(0.001)

    def _is_frozen(self) -> bool:
        return "frozen 1" in (self.folder / "cgroup.events").read_text()


def own() -> Path:
    """The folder of the cgroup that this process is in. Raises OSError where there is none."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    found = [Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"]
    paths = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    if not found or not paths:
        raise OSError("no cgroup of version 2 is mounted")
    return found[0] / paths[0].lstrip("/")


def remove_left_behind(parent: Path) -> None:
    """The empty cgroups of processes that were killed before they could remove them."""
    for folder in parent.glob(f"{PREFIX}*-*"):
        if not Path("/proc", folder.name.split("-")[1]).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
