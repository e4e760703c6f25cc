"""A process with a file system, process table, network and shared memory of its own (namespaces), without privilege.

`separate` comes first; the next process that is forked is the first one of its own process table, calls `furnish`, and
takes all others there with it when it dies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from minfer.sandbox.syscalls import call, mount

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT = 1, 2, 4, 8, 32
BIND, RECURSIVE, PRIVATE = 1 << 12, 1 << 14, 1 << 18
FLAGS = {"nosuid": NOSUID, "nodev": NODEV, "noexec": NOEXEC, "noatime": 1 << 10, "nodiratime": 1 << 11}
FLAGS |= {"relatime": 1 << 21, "nosymfollow": 1 << 8}
DETACH = 2
PLAIN_DEVICES = ("null", "zero", "full", "random", "urandom")
BASE = "/tmp"  # every system has it
SMALL = "size=1m,nr_inodes=4k,mode=755"


def separate() -> None:
    """Raises OSError where this machine does not allow it. This process must have one thread."""
    user, group = os.getuid(), os.getgid()
    call("unshare", NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def furnish(hidden: Iterable[str], visible: Iterable[str], devices: Sequence[str], scratch: str, nbytes: int) -> None:
    """Everything read-only; folders that are `hidden` empty, but for what of them is `visible`; of devices only these;
    and `scratch` an empty folder to write in, of so many bytes, in memory. Paths are without symbolic links. Raises
    OSError."""
    mount(None, "/", None, PRIVATE | RECURSIVE)
    devices = [*(f"/dev/{name}" for name in PLAIN_DEVICES), *devices]
    shown = {}
    for path in (*visible, *devices):
        with contextlib.suppress(OSError):  # what is not there for this user
            shown[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
    empty = {path for path in (*hidden, "/dev", scratch) if Path(path).is_dir()}
    root = f"{BASE}/root"
    mount("tmpfs", BASE, "tmpfs", NOSUID | NODEV, SMALL)
    Path(root).mkdir()
    mount("/", root, None, BIND | RECURSIVE)
    _remount_read_only(root)

    for path in sorted({*empty, *shown}, key=lambda path: path.count("/")):  # what contains others first
        if path in empty:
            if not Path(root + path).exists():  # hidden already, with a folder that it is in
                empty.remove(path)
                continue
            options = f"size={nbytes},nr_inodes=64k,mode=700" if path == scratch else SMALL
            mount("tmpfs", root + path, "tmpfs", NOSUID | NODEV, options)
        elif any(Path(path).is_relative_to(outer) for outer in empty):
            _bind(shown[path], root + path)
    for fd in shown.values():
        os.close(fd)
    for name, meant in {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}.items():
        Path(f"{root}/dev/{name}").symlink_to(f"/proc/self/fd{meant}")
    Path(f"{root}/dev/shm").mkdir()
    mount("tmpfs", f"{root}/dev/shm", "tmpfs", NOSUID | NODEV, f"size={nbytes},nr_inodes=64k,mode=1777")
    for path in empty - {scratch}:
        mount(None, root + path, None, REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    mount("proc", f"{root}/proc", "proc", NOSUID | NODEV | NOEXEC)
    mount(None, f"{root}/proc", None, REMOUNT | BIND | RDONLY | NOSUID | NODEV | NOEXEC)

    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    os.chdir("/")


def _remount_read_only(root: str) -> None:
    """A recursive bind leaves each mount as it was; each has flags that must stay."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        point = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), fields[4])
        if point == root or point.startswith(f"{root}/"):
            flags = sum(FLAGS.get(option, 0) for option in fields[5].split(","))
            try:
                mount(None, point, None, REMOUNT | BIND | RDONLY | flags)
            except OSError as error:  # another mount lies over it, so that nobody can reach it
                if error.errno not in (errno.EINVAL, errno.ENOENT, errno.EACCES, errno.ENOTDIR):
                    raise


def _bind(fd: int, target: str) -> None:
    """Show an open file or folder, read-only, at a path, which may have to be made."""
    place = Path(target)
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        place.mkdir(parents=True, exist_ok=True)
    elif not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    mount(f"/proc/self/fd/{fd}", target, None, BIND | RECURSIVE)
    _remount_read_only(target)
