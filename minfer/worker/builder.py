"""The process that compiles one untrusted kernel. It runs in a sandbox, because sources can make a compiler do anything.

It writes the library to a file that its parent has opened, and that the parent reads once this process has ended
(`minfer.worker.sandboxed`).
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minfer import build, ops
from minfer.build import cache
from minfer.build.errors import BuildError
from minfer.process.remote import serve

MOST_LOG = 1 << 20  # how many characters of a compiler's output are kept


def answer(request: dict[str, Any], _: object) -> dict[str, Any]:
    """The reply: `built`, with the library written to the file `to`, and `reads`, the files that the compiler read besides the
    sources; or `error`, which is one line, and `log`."""
    os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.gettempdir()
    for path in request["extra"]:
        ops.load_file(Path(path))
    try:
        kernel = ops.get(request["op"]).kernels[request["kernel"]]
        built = build.build(kernel, request["arch"])
    except BuildError as error:
        return {"error": str(error), "log": error.log[:MOST_LOG]}
    with open(request["to"], "wb") as file:
        file.write(Path(built.library).read_bytes())
    return {"built": asdict(built), "reads": sorted(cache.recorded(kernel, request["arch"]) or {})}


if __name__ == "__main__":
    serve(answer)
