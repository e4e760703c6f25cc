"""The processes that are left behind to this one, when their parents have ended."""

from __future__ import annotations

import os
import threading

from minfer.process import fork_server
from minfer.process.threads import all_children

running: set[int] = set()  # the pids of this process's own children
sweeping = threading.Lock()  # what one thread just starts, another must not take for an orphan
_adopts = False


def adopt_orphans() -> None:
    """Make this process the parent of whatever its descendants leave behind. Its children must all be a `Process` from
    now on, or its fork_server."""
    global _adopts
    fork_server.become_reaper()
    _adopts = True


def orphans() -> set[int]:
    """The processes that were left behind to this one, and that nobody has waited for. Those that have ended
    count too, because such a process may have started another one."""
    return all_children(os.getpid()) - running - {fork_server.pid()} if _adopts else set()
