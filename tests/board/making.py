"""Boards with submissions that nobody judged, for the tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from minfer.board.folder import JUDGED, Board, Entry, make_id, write_json
from minfer.board.season import Season

EPYC, SEASON = "AMD EPYC", "softmax-cpu-1"
SHOWN = {"dtype": "bfloat16", "shape": {"rows": 14, "n": 32000}, "params": {"mask": "none"}}
SEED = 1234567890123456


def make_board(folder: Path, **values: Any) -> Board:
    """A board with an open season of softmax on the CPU."""
    board = Board.make(folder)
    season = Season(SEASON, "softmax", "cpu", 1, SEED, 3, 1000.0, shown=SHOWN)
    write_json(board.folder / "seasons" / f"{SEASON}.json", vars(season) | values, 0o600)
    return board


def make_entry(board: Board, name: str, score: float = 1.0, wide: float = 1.02, **values: Any) -> Entry:
    """A submission that has been judged; its interval reaches from score / wide to score * wide."""
    digest = board.keep(values.pop("text", f"// {name}\n").encode())
    when = values.pop("when") if "when" in values else 2000.0 + len(board.entries())
    about: dict[str, Any] = {
        "who": "ada",
        "kind": "cpp",
        "season": SEASON,
        "op": "softmax",
        "licence": "MIT",
        "keep": True,
    }
    about |= {"state": JUDGED, "device": EPYC, "fingerprint": "0123", "task": SHOWN, "rules": 3}
    about |= {"score": {"value": score, "low": score / wide, "high": score * wide}}
    about |= {"result": {"verdict": "ranked", "problems": problems(score), "race": None, "differences": []}}
    made = about | values
    entry = Entry(
        make_id(name, made["who"], str(when)),
        name=name,
        when=when,
        files={f"{name}.cpp": digest},
        content=digest,
        **made,
    )
    board.save(entry)
    return entry


def problems(score: float) -> list[dict[str, Any]]:
    return [
        {
            "number": n,
            "status": "ok",
            "ratio": {"value": score * part, "low": score * part / 1.1, "high": score * part * 1.1},
        }
        | {"roof_percent": None}
        for n, part in ((1, 0.5), (2, 2.0))
    ]


def make_race(board: Board, challenger: Entry, holder: Entry, verdict: str, when: float = 0.0) -> None:
    about = {"challenger": challenger.id, "holder": holder.id, "season": SEASON, "rules": 3}
    about["when"] = when or challenger.when
    board.save_race(about | {"verdict": verdict, "value": 1.1, "low": 1.05, "high": 1.2})


def fill(board: Board, count: int) -> None:
    """Submissions with scores and instructions at random."""
    draw = random.Random(1)
    for number in range(count):
        opcodes = {"vector": draw.uniform(0, 90), "fma": draw.uniform(0, 30), "wide": 3.0, "calls": 5.0}
        values: dict[str, Any] = {"who": f"person{number % 7}", "opcodes": opcodes, "when": 2000.0 + number}
        make_entry(board, f"k{number}", draw.uniform(0.2, 3), **values)
