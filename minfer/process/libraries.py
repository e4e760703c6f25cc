"""The shared objects that a process has loaded, seen from outside."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path

from minfer.process.text import make_printable

UNREADABLE = "(unreadable)"  # the process has hidden its list
MOST_NAMES = 500


def loaded(pid: int | str) -> set[str]:
    """The paths of the files that a process has mapped as code; only UNREADABLE if the process does not let others look."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return {UNREADABLE}
    fields = [line.split(maxsplit=5) for line in lines]
    return {found[5] for found in fields if len(found) == 6 and "x" in found[1] and not found[5].startswith("[")}


def names(paths: Iterable[str], known: Iterable[str]) -> list[str]:
    """The sorted names of these files, without the `known` paths and the modules of Python itself."""
    python = sysconfig.get_path("platstdlib")
    found = {path for path in set(paths) - set(known) if not path.startswith(f"{python}/lib-dynload/")}
    return sorted({make_printable(Path(path).name, 200) for path in found})[:MOST_NAMES]
