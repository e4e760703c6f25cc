"""Commits a board as a demonstration: `python tools/publish_board.py BOARD...`

Copies the best kernels of each season into benchmarks/results/board: those that held the record, the three best ones, and the
slowest. Closes the copies' seasons, so that their shapes are shown. Writes the pages to docs/board. A source whose author did
not allow it to be kept is left out. `minfer board build benchmarks/results/board -o docs/board` writes the pages again.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minfer.board import page
from minfer.board.folder import Board, Entry, Settings, write_json
from minfer.board.score import holders, rank
from minfer.board.season import list_seasons

ROOT = Path(__file__).resolve().parents[1]
BEST = 3


def choose(entries: Sequence[Entry], races: Sequence[dict[str, Any]]) -> list[Entry]:
    """The entries of one season and device that are published."""
    ranked = [standing.entry for standing in rank(entries, races)]
    chosen = [*holders(entries, races), *ranked[:BEST], min(entries, key=lambda entry: entry.score["value"])]
    return list({entry.id: entry for entry in chosen}.values())


def publish(source: Board, target: Board) -> None:
    """Copy one board's best kernels into another."""
    races = source.races()
    for season in list_seasons(source):
        entries = [entry for entry in source.entries() if entry.season == season.name and entry.ranks and entry.keep]
        if not entries:
            continue
        if season.is_open:
            season.closed, season.shapes = max(entry.when for entry in entries), [asdict(p) for p in season.draw()]
        write_json(target.folder / "seasons" / f"{season.name}.json", asdict(season))
        for device in dict.fromkeys(entry.device for entry in entries):
            chosen = choose([entry for entry in entries if entry.device == device], races)
            ids = {entry.id for entry in chosen}
            for entry in chosen:
                for digest in entry.files.values():
                    if content := source.content(digest):
                        target.keep(content)
                target.save(entry)
            for race in races:
                if {race["challenger"], race["holder"]} <= ids:
                    target.save_race(race)
            print(f"{season.name} on {device}: {len(chosen)} of {len(entries)} kernels")


def main() -> int:
    data, pages = ROOT / "benchmarks" / "results" / "board", ROOT / "docs" / "board"
    for folder in (data, pages):
        shutil.rmtree(folder, ignore_errors=True)
    for name in ("seasons", "entries", "objects", "races"):
        (data / name).mkdir(parents=True)
    write_json(data / "settings.json", asdict(Settings()))
    for word in sys.argv[1:]:
        publish(Board.find(Path(word)), Board(data))
    print(page.build(Board(data), pages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
