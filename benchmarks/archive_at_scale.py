"""How long `minfer archive list` and `near` take with many submissions: `python -m benchmarks.archive_at_scale [COUNT]`.

The submissions are made up. Times are CPU seconds (user and system) of the whole command, the start of Python included."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from minfer.board.folder import JUDGED, Board, Entry, make_id

COMMANDS = (["list"], ["near", "softmax", "--dtype", "float16", "--shape", "rows=64,n=4096"])


def fill(board: Board, count: int) -> None:
    """Submissions of ten sources, each with ten lines."""
    task = {"dtype": "bfloat16", "shape": {"rows": 14, "n": 32000}, "params": {"mask": "none"}}
    for number in range(count):
        digest = board.keep(f"// kernel {number % 10}\n".encode() * 10)
        score = 1 + number % 97 / 100
        problems = [
            {"number": n, "status": "ok", "ratio": {"value": score, "low": score, "high": score}, "roof_percent": None}
            for n in range(1, 6)
        ]
        entry = Entry(
            make_id(str(number)), "softmax", f"k{number}", f"person{number % 7}", 1e9 + number, "cpp", {"k.cpp": digest},
            digest, "softmax-cpu-1", "MIT", True, JUDGED, "a processor", task=task,
        )  # fmt: skip
        entry.score = {"value": score, "low": score / 1.02, "high": score * 1.02}
        entry.opcodes = {"vector": float(number % 90), "fma": float(number % 31), "wide": 1.0, "calls": 2.0}
        entry.result = {"verdict": "ranked", "problems": problems}
        board.save(entry)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as folder:
        board = Board.make(Path(folder))
        fill(board, count)
        for words in COMMANDS:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            command = [sys.executable, "-m", "minfer", "archive", *words, "--board", folder]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(f"{count} submissions: minfer archive {words[0]}: {seconds:.2f} s of CPU time")


if __name__ == "__main__":
    main()
