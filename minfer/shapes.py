"""The ops' named sets of shapes, for `shape=rmsnorm_heads`; those of an op are in `ops/<op>/shapes.yaml`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

OPS = Path(__file__).resolve().parent / "ops"
# In C if PyYAML has it, because each launch reads all the files.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def named_sets(folder: Path = OPS) -> dict[str, dict[str, Any]]:
    """All sets in alphabetical order, each with the content of a file in `conf/shape/`: its name, its op, and the sizes for a
    GPU and for a CPU. No two ops may have sets of the same name: `shape=` would not tell them apart."""
    found: dict[str, dict[str, Any]] = {}
    for file in folder.glob("*/shapes.yaml"):
        content: dict[str, Any] = yaml.load(file.read_text("utf-8"), LOADER)
        found |= {name: {"name": name, "op": file.parent.name, **sizes} for name, sizes in content.items()}
    return dict(sorted(found.items()))
