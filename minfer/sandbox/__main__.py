"""`python -m minfer.sandbox`: says which levels this machine has. With a level: enters it, and fails where it does not hold.
With a level and the devices of a GPU: fails, too, where CUDA does not start in it."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from pathlib import Path

from minfer.sandbox import LEVELS, Sandbox, available


def check(level: str, devices: list[str]) -> None:
    """Ends this process with a status other than 0 where the level is not there, or does not hold, or CUDA does not start."""
    with tempfile.TemporaryDirectory() as folder:
        kept, scratch = Path(folder) / "kept", Path(folder) / "scratch"
        kept.mkdir()
        scratch.mkdir()
        (kept / "file").touch()
        sandbox = Sandbox(level, [os.path.realpath(kept)], devices=devices, scratch=str(scratch))
        if level == "namespaces":
            sandbox = Sandbox(level, [os.path.realpath(kept)], devices=devices)
        sandbox.separate()
        if (pid := os.fork()) == 0:
            status = 1
            try:
                sandbox.enter()
                if level != "limits":
                    _try_all(kept, Path(sandbox.scratch))
                if devices and (error := ctypes.CDLL("libcuda.so.1").cuInit(0)):
                    raise OSError(f"CUDA does not start: cuInit returned {error}")
                status = 0
            except OSError as found:
                print(f"{level}: {found}", file=sys.stderr)
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


def describe(level: str) -> str:
    """What a user wants to know of a level: whether it is there, and where there is a GPU, whether CUDA starts in it."""
    gpu = tuple(sorted(map(str, Path("/dev").glob("nvidia*"))))
    if not available(level):
        return f"{level}: no"
    if not gpu or level == "namespaces":
        return f"{level}: yes"
    return f"{level}: yes, {'and CUDA starts in it' if available(level, gpu) else 'but CUDA does not start in it'}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        check(sys.argv[1], sys.argv[2:])
    else:
        print(*map(describe, LEVELS), sep="\n")
