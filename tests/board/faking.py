"""Runs of submissions that give the speeds that a test chooses, and the sources that it submits."""

from __future__ import annotations

from pathlib import Path

import pytest

from minfer.bench.judged import BESIDE
from minfer.board import judging
from minfer.board.folder import Board, Entry
from minfer.board.season import Season
from minfer.rows import store

HONEST = b"import torch\n\n\ndef softmax(y, x, mask):\n    y.copy_(torch.softmax(x.double(), -1))\n"
QUICK = HONEST.replace(b"x.double()", b"x.float()")


def fake(rows: dict[str, dict[int, store.Row]]) -> judging.Judged:
    return judging.Judged(rows, {}, "printed")


def measured(speedup: float) -> store.Row:
    row: store.Row = dict.fromkeys(store.SCHEMA.names)
    row |= {"case": "softmax/x/float16//n=3", "status": "ok", "guarantee": "judged, namespaces", "device": "AMD EPYC"}
    row |= {"judged_speedup": speedup, "judged_speedup_low": speedup / 1.01, "judged_speedup_high": speedup * 1.01}
    return row | {"shape": {"n": 3}, "params": {}, "dtype": "float16", "judged_us": 1.0, "judged_baseline_us": 1.0}


def fake_runs(
    board: Board, monkeypatch: pytest.MonkeyPatch, speeds: dict[str, float], **failing: str
) -> list[list[str]]:
    """Let the runs give these speeds, by the names of the kernels' files; in races, the kernels `failing` end with a status.
    Returns the names of the kernels of each run, filled as they are run."""
    runs: list[list[str]] = []
    name = lambda entry: Path(next(iter(entry.files))).stem

    def run(board: Board, season: Season, entries: list, beside: Entry | None = None) -> judging.Judged:
        runs.append([entry.name for entry in entries])
        rows = {}
        for entry in entries:
            row = measured(speeds[name(entry)])
            if beside and entry is not beside:
                ratio = speeds[name(entry)] / speeds[name(beside)]
                row["metrics"] = {BESIDE: ratio, f"{BESIDE}_low": ratio / 1.005, f"{BESIDE}_high": ratio * 1.005}
            if beside and entry.name in failing:
                row |= {"status": failing[entry.name], "message": "it failed"}
            rows[entry.kernel] = dict.fromkeys(range(1 + season.problems), row)
        return fake(rows)

    monkeypatch.setattr(judging, "run", run)
    return runs
