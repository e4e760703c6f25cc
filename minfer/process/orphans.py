"""Orphans: processes that became children of this one because their parents have ended."""

from __future__ import annotations

import os
import threading

from minfer.process import fork_server
from minfer.process.threads import all_children

running: set[int] = set()  # the pids of this process's own children
sweeping = threading.Lock()  # so that no thread takes a process that another is starting for an orphan
_adopts = False


def adopt_orphans() -> None:
    """Make this process the parent of the orphans among its descendants. From now on each of its own children must be a
    `Process` or the fork server."""
    global _adopts
    fork_server.become_reaper()
    _adopts = True


def orphans() -> set[int]:
    """The orphans that nobody has waited for. Those that have ended count, too, because they may have started another
    process."""
    return all_children(os.getpid()) - running - {fork_server.pid()} if _adopts else set()
