"""No op includes a file from another op's folder: what several ops use is in `minfer/cuda/` or beside `ops/op.h`."""

from __future__ import annotations

import re
from pathlib import Path

from minfer import ops

FOLDER = Path(ops.__file__).parent


def test_no_op_includes_from_another_ops_folder() -> None:
    sources = [path for path in FOLDER.parent.rglob("*") if path.suffix in (".cu", ".cuh", ".cpp", ".h")]
    found = [
        f"{path.relative_to(FOLDER.parent)} includes {header}"
        for path in sources
        for header, op in re.findall(r'#include "(ops/(\w+)/[\w.]+)"', path.read_text())
        if path.parent != FOLDER / op
    ]
    assert len(sources) > 150 and not found
