"""Seasons: the problems on which a board's submissions are scored. They are drawn from a seed that nobody knows until the
season ends.

A season has problem 0, which everybody may see and which counts for nothing, and hidden ones, numbered from 1. All are drawn
from the op's own distribution (`op.draws`). So they represent what the op is used for, and nobody can tune a kernel for them
alone.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Container
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minfer.board.folder import Board, write_json
from minfer.plan.config import UserError

if TYPE_CHECKING:
    from minfer.ops.drawn import Problem

SHOWN = 0  # the number of the problem that everybody may see


@dataclass
class Season:
    """name: `<op>-<device>-<number>`. device: cuda or cpu. problems: how many are hidden. shown: the problem that everybody
    may see. extra: the file that registers the op, if it is not one of minfer's. shapes: those of all problems, once the season
    is closed."""

    name: str
    op: str
    device: str
    number: int
    seed: int
    problems: int
    opened: float
    closed: float | None = None
    shown: dict[str, Any] = field(default_factory=dict)
    extra: str = ""
    shapes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return self.closed is None

    def draw(self) -> list[Problem]:
        """Its problems. The first is the one that everybody may see."""
        from minfer import ops  # imports torch
        from minfer.ops import drawn

        op = ops.get(self.op)
        assert op.drawn is not None
        return drawn.problems(self.op, op.drawn, 1 + self.problems, self.seed, self.device)


def list_seasons(board: Board) -> list[Season]:
    """The seasons that this user may read, the oldest first."""
    found = []
    for path in sorted((board.folder / "seasons").glob("*.json")):
        try:
            found.append(Season(**json.loads(path.read_text("utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda season: season.opened)


def find_open(board: Board, op: str, device: str = "", fits: Container[str] = ("cpu", "cuda")) -> Season:
    """The open season of an op; if `device` is given, the one on that kind of device. If there are two, the one whose device is
    in `fits`. Raises UserError."""
    found = [s for s in list_seasons(board) if s.op == op and s.is_open and device in ("", s.device)]
    if len(found) > 1:
        found = [season for season in found if season.device in fits] or found
    if len(found) == 1:
        return found[0]
    if len(found) > 1:
        raise UserError(
            f"{op} has an open season on cpu and on cuda; choose one with --device; for the inbox, write a .cpp or .cu file"
        )
    names = sorted({season.op for season in list_seasons(board) if season.is_open})
    if any(not os.access(path, os.R_OK) for path in board.folder.glob(f"seasons/{op}-*.json")):
        raise UserError(
            f"only the owner of {board.folder} can read its open season of {op}; put your file into"
            f" {board.folder / 'inbox' / op}, and the owner's minfer board watch judges it"
        )
    for path in board.folder.glob(f"seasons/{op}-{device or '*'}-*.json"):
        if _is_newer(path):
            raise UserError(f"{path} cannot be read by this version of minfer; use the one that opened the season")
    there = f"; open: {', '.join(names)}" if names else ""
    raise UserError(f"no season of {op} is open{there}; open one with minfer board open-season {op}")


def _is_newer(path: Path) -> bool:
    """Whether an open season has fields that this version of minfer does not know."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return False
    known = {each.name for each in fields(Season)}
    return isinstance(found, dict) and not found.get("closed") and bool(found.keys() - known)


def open_season(board: Board, op: str, device: str, extra: str = "") -> Season:
    """Draw the seed of a new season and write it down. Raises UserError."""
    with board.lock("seasons"):
        return _open(board, op, device, extra)


def _open(board: Board, op: str, device: str, extra: str) -> Season:
    earlier = [season for season in list_seasons(board) if season.op == op and season.device == device]
    if any(season.is_open for season in earlier):
        raise UserError(
            f"a season of {op} on {device} is open; close it first: minfer board close-season {op} --device {device}"
        )
    number = 1 + len(earlier)
    season = Season(
        f"{op}-{device}-{number}", op, device, number, secrets.randbits(62), board.settings.problems, time.time()
    )
    season.extra = extra
    problems = season.draw()
    season.problems = len(problems) - 1
    if season.problems < 1:
        raise UserError(f"{op} has too few problems to draw, {len(problems)}; a season needs 2 or more")
    season.shown = asdict(problems[SHOWN])
    _save(board, season)
    inbox = board.folder / "inbox" / op
    inbox.mkdir(exist_ok=True)
    inbox.chmod(0o1777)
    return season


def close_season(board: Board, op: str, device: str = "") -> Season:
    """End a season. From then on everybody may read its shapes. A source is deleted if its author did not allow the archive to
    keep it. Raises UserError."""
    season = find_open(board, op, device)
    season.closed, season.shapes = time.time(), [asdict(problem) for problem in season.draw()]
    _save(board, season)
    for entry in board.entries():
        if entry.season == season.name and not entry.keep:
            board.forget_files(entry)
    return season


def _save(board: Board, season: Season) -> None:
    path = board.folder / "seasons" / f"{season.name}.json"
    write_json(path, asdict(season), 0o600 if season.is_open else 0o644)
