"""The named sets of shapes that the ops bring, for `shape=rmsnorm_heads`: those of an op are in `ops/<op>/shapes.yaml`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

OPS = Path(__file__).resolve().parent / "ops"
LOADER = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # in C where PyYAML was built so: each launch reads all the files


@cache
def named_sets(folder: Path = OPS) -> dict[str, dict[str, Any]]:
    """Each set in alphabetical order, written as a file of `conf/shape/` would be: its name, its op, and the sizes for a GPU
    and for a CPU. No two ops may have sets of the same name: `shape=` would not tell them apart."""
    found: dict[str, dict[str, Any]] = {}
    for file in folder.glob("*/shapes.yaml"):
        content: dict[str, Any] = yaml.load(file.read_text("utf-8"), LOADER)
        found |= {name: {"name": name, "op": file.parent.name, **sizes} for name, sizes in content.items()}
    return dict(sorted(found.items()))
