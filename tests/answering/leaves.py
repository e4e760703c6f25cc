"""Leaves an orphan in another process session behind, which counts in a file. With `cgroup`, a child moves to that cgroup
instead; with `itself`, this process moves there."""

import os
import time
from pathlib import Path

from minfer.process.remote import serve


def answer(request, say):
    if "cgroup" in request:
        if request["itself"] or os.fork() == 0:
            Path(request["cgroup"], "cgroup.procs").write_text(str(os.getpid()))
            if not request["itself"]:
                Path(request["file"]).touch()
                time.sleep(600)
        return {"done": True}
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in range(10**9):
            with open(request["file"], "w") as file:
                file.write(str(number))
            time.sleep(0.001)
    return {"done": True}


serve(answer)
