"""Reports progress for ever, under a name that is not UTF-8."""

import ctypes

from minfer.process.remote import serve


def answer(request, say):
    ctypes.CDLL(None).prctl(15, b"half of \xc3", 0, 0, 0)  # PR_SET_NAME
    while True:
        say(phase="flooding")


serve(answer)
