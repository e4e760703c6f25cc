"""Answers each request with itself; with what it has of whoever started it at `where`; and dies at `die`."""

import os
from pathlib import Path
from typing import Any

from minfer.process.remote import serve


def answer(request: dict[str, Any], say: Any) -> dict[str, Any]:
    if "die" in request:
        os._exit(3)
    if "where" in request:
        return {"cwd": str(Path.cwd())} | {name: os.environ.get(name) for name in ("TRITON_CACHE_DIR", "CXX")}
    say(phase="echoing")
    return request


serve(answer)
