"""The process that compiles one kernel that nobody has read: in a sandbox, where a compiler may run into anything.

What it builds goes to a file that its supervisor has opened and reads when this process is gone (`minfer.worker.sandboxed`).
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minfer import build, ops
from minfer.process.remote import serve


def answer(request: dict[str, Any], _: object) -> dict[str, Any]:
    """`built`, with the library in the file `to`; or `error`, in a line, and `log`."""
    os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.gettempdir()
    for path in request["extra"]:
        ops.load_file(Path(path))
    try:
        built = build.build(ops.get(request["op"]).kernels[request["kernel"]], request["arch"])
    except build.BuildError as error:
        return {"error": str(error), "log": error.log}
    with open(request["to"], "wb") as file:
        file.write(Path(built.library).read_bytes())
    return {"built": asdict(built)}


if __name__ == "__main__":
    serve(answer)
