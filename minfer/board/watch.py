"""Judges the files that people put into a board's inbox, one after the other. So people can submit who may not read the
season's seed.

A submission is one file, `inbox/OP/NAME.cpp` (or .cu, .py). It belongs to the user who owns the file, so nobody can submit in
another's name. The answer is written beside it as `NAME.cpp.json`, and the file is removed when it is judged. If several people
wait, the one who has submitted least within the last hour comes first. Several watchers may run at once, for example where
SLURM has several nodes: each locks the file that it judges.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import stat
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from minfer.board.folder import HOUR_S, MOST_BYTES, Board, write_json
from minfer.board.judging import Interrupted
from minfer.board.stage import SUFFIXES, check_name
from minfer.board.submit import submit
from minfer.plan.config import UserError

LOOKS_S = 2.0
SETTLES_S = 1.0  # if a file has changed since then, somebody may still be writing it


@dataclass(frozen=True)
class Waiting:
    """A file in the inbox."""

    path: Path
    who: str
    when: float

    @property
    def op(self) -> str:
        return self.path.parent.name


def list_waiting(board: Board, now: float) -> list[Waiting]:
    """The files that wait, in the order in which they are judged."""
    found = []
    for path in board.folder.glob("inbox/*/*"):
        with contextlib.suppress(OSError):
            about = path.lstat()
            changed = about.st_ctime  # unlike the other times, its owner cannot choose it
            if path.suffix in SUFFIXES and stat.S_ISREG(about.st_mode) and abs(now - changed) >= SETTLES_S:
                found.append(Waiting(path, name_owner(about.st_uid), changed))
    recent = Counter(entry.who for entry in board.entries() if abs(now - entry.when) < HOUR_S)
    found.sort(key=lambda each: each.when)
    fair = []
    for each in found:
        fair.append((recent[each.who], each.when, each))
        recent[each.who] += 1
    return [each for *_, each in sorted(fair, key=lambda item: item[:2])]


def name_owner(uid: int) -> str:
    """The login name of a user, or the number of a user who has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid{uid}"


def watch(board: Board, once: bool) -> None:
    """Judge what is in the inbox, for ever, or with `once` until no file waits that no other watcher judges."""
    while True:
        waiting = list_waiting(board, time.time() + (SETTLES_S if once else 0))
        if any(_judge(board, each) for each in waiting):
            continue
        if once:
            return
        time.sleep(LOOKS_S)


def _judge(board: Board, waiting: Waiting) -> bool:
    """Judge one file, write its answer beside it, and remove it. False if another watcher judges it or has judged it."""
    path = waiting.path
    answer: dict[str, Any]
    with contextlib.ExitStack() as held:
        try:
            file = held.enter_context(os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError):
            return False
        except OSError as error:
            return _answer(
                waiting, {"verdict": "not_judged", "message": f"{path.name} cannot be read: {error.strerror}"}
            )
        if not path.exists():
            return False
        try:
            check_name("a file", path.name)
            answer = submit(board, waiting.op, {path.name: _read(path.name, file)}, waiting.who)
        except Interrupted:  # by the owner; the file is judged when a watcher starts again
            raise
        except Exception as error:  # whatever a file does, the next one is judged
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            answer = {"verdict": "not_judged", "message": why}
        return _answer(waiting, answer)


def _answer(waiting: Waiting, answer: Mapping[str, Any]) -> bool:
    """Write the answer to a file beside it, and remove it."""
    path = waiting.path
    with contextlib.suppress(UserError):  # the name may be too long, or that of a folder
        write_json(path.with_name(f"{path.name}.json"), answer)
    path.unlink(missing_ok=True)
    said = {"file": path.name, "op": waiting.op, "who": waiting.who, "verdict": answer["verdict"]}
    print(json.dumps(said), flush=True)
    return True


def _read(name: str, file: IO[bytes]) -> bytes:
    """The content of a file of another user. Raises UserError if it is too large."""
    content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UserError(f"{name} has more than {MOST_BYTES:,} bytes; submit a smaller file")
    return content
