"""Leaves a process behind, in another session and without a parent here, that counts in a file."""

import os
import time

from minfer.process.remote import serve


def answer(request, say):
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
