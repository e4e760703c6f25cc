"""Replies with its environment, from Python and from Linux. With `threads`, it replies how many of that many threads it could
start."""

import contextlib
import os
import threading
from pathlib import Path

from minfer.process.remote import serve


def answer(request, say):
    end = threading.Event()
    with contextlib.suppress(RuntimeError):
        for _ in range(request.get("threads", 0)):
            threading.Thread(target=end.wait).start()
    count = threading.active_count()
    end.set()
    return {
        "python": dict(os.environ),
        "linux": Path("/proc/self/environ").read_bytes().decode(),
        "threads": count,
    }


serve(answer)
