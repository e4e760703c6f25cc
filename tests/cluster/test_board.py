"""A board on SLURM: people put files into its inbox, and two watchers have them judged as jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from minfer.board.folder import Board
from tests.cluster.conftest import PATIENCE_S
from tests.conftest import ROOT

HASTY, PATIENT = (
    2001,
    [2002, 2003, 2004, 2005, 2006, 2007],
)  # users; the first one submits four kernels, and before the others
WRONG = "def softmax(y, x, mask):\n    y.zero_()  # {}\n"


def minfer(*words: str) -> list[str]:
    return [sys.executable, "-m", "minfer", *words]


def test_ten_submissions_at_once_lose_nothing_and_wait_fairly(folder: Path) -> None:
    """All kernels return zeros, so that each job ends at its first verification. Of the person with four kernels, the second
    one comes after the first ones of all others, but for those that a watcher has taken already."""
    place, environment = folder / "board", os.environ | {"PYTHONPATH": str(ROOT)}
    board = Board.make(place)
    cluster = {"executor": "slurm", "gres": None, "cpus": 1, "memory_gb": 3, "scratch": str(folder / "scratch")}
    (place / "settings.json").write_text(json.dumps({"problems": 1, "per_hour": 4, "cluster": cluster}))
    opened = [*minfer("board", "open-season", "softmax", "--device", "cpu", "--board", str(place))]
    subprocess.run(opened, check=True, env=environment, timeout=PATIENCE_S)
    inbox, whose = place / "inbox" / "softmax", {}
    for number, user in enumerate([*[HASTY] * 4, *PATIENT]):
        file = inbox / f"k{number}.py"
        file.write_text(WRONG.format(number))
        os.chown(file, user, user)
        whose[file.name] = f"uid{user}"
    watch = minfer("board", "watch", "--once", "--board", str(place))
    watchers = [subprocess.Popen(watch, env=environment, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [watcher.wait(2 * PATIENCE_S) for watcher in watchers] == [0, 0]

    entries = board.entries()
    assert {f"{entry.name}.py": entry.who for entry in entries} == whose and len(entries) == 10
    assert not list(inbox.glob("*.py")) and not list((place / "work").iterdir())
    for name in whose:
        answer = json.loads((inbox / f"{name}.json").read_text())
        assert (answer["verdict"], answer["failing"]["got"]) == ("wrong", 0), answer
    order = [entry.who for entry in entries]
    first = [order.index(f"uid{user}") for user in PATIENT]
    second = [index for index, who in enumerate(order) if who == f"uid{HASTY}"][1]
    assert order.index(f"uid{HASTY}") <= 1 and second >= max(first) - 1, order
