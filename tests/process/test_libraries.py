"""Which shared objects another process has loaded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from minfer.process.libraries import UNREADABLE, loaded, names


def test_what_a_process_loads_later_is_seen(tmp_path: Path) -> None:
    library = tmp_path / "libblas\x1b[2J.so"
    shutil.copy(next(path for path in loaded("self") if "/libm.so" in path), library)
    code = f"import ctypes; print(flush=True); input(); ctypes.CDLL({str(library)!r}); print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    try:
        process.stdout.readline()
        before = loaded(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        after = loaded(process.pid)
    finally:
        process.kill()
        process.wait()
    assert names(after, before) == ["libblas.so"] and names(before, before) == []
    assert names(after, [*before, str(library)]) == []
    assert loaded(process.pid) == {UNREADABLE} and names({UNREADABLE}, before) == [UNREADABLE]
