"""`python -m minfer.sandbox`: says which levels this machine has. With a level: enters it, and fails where it does not hold."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from minfer.sandbox import LEVELS, Sandbox, available


def check(level: str) -> None:
    """Ends this process with a status other than 0 where the level is not there, or does not hold."""
    with tempfile.TemporaryDirectory() as folder:
        kept, scratch = Path(folder) / "kept", Path(folder) / "scratch"
        kept.mkdir()
        scratch.mkdir()
        (kept / "file").touch()
        sandbox = Sandbox(level, [os.path.realpath(kept)], scratch=str(scratch))
        if level == "namespaces":
            sandbox = Sandbox(level, [os.path.realpath(kept)])
        sandbox.separate()
        if (pid := os.fork()) == 0:
            status = 1
            try:
                sandbox.enter()
                if level != "limits":
                    _try_all(kept, Path(sandbox.scratch))
                status = 0
            except OSError as error:
                print(f"{level}: {error}", file=sys.stderr)
            os._exit(status)
        if status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            sys.exit(status)


def _try_all(kept: Path, scratch: Path) -> None:
    (scratch / "written").write_text("written")
    for forbidden in (
        lambda: (kept / "file").read_text(),
        lambda: (Path(__file__).parent / "written").write_text("written"),
        lambda: Path("/proc/self/comm").write_text("other"),
        lambda: os.kill(os.getppid() or -1, 0),
    ):
        try:
            forbidden()
        except OSError:
            continue
        raise OSError("does not hold")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        check(sys.argv[1])
    else:
        print(*(f"{level}: {'yes' if available(level) else 'no'}" for level in LEVELS), sep="\n")
