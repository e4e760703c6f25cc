"""The committed board, and its pages. `tools/publish_board.py` makes both; the pages alone are made by

minfer board build benchmarks/results/board -o docs/board
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.browser import Browser, chromium
from minfer.board import page
from minfer.board.folder import Board
from minfer.board.score import FASTER
from minfer.board.season import list_seasons
from tests.board.making import make_board, make_entry, make_race
from tests.conftest import ROOT
from tools import publish_board

DATA, PAGES = ROOT / "benchmarks" / "results" / "board", ROOT / "docs" / "board"
MOST_BYTES = 300_000
published = pytest.mark.skipif(not DATA.is_dir(), reason="no board is published yet")


def read(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@published
def test_the_pages_are_those_of_the_committed_board(tmp_path: Path) -> None:
    page.build(Board.find(DATA), tmp_path)
    assert read(tmp_path) == read(PAGES), "run: minfer board build benchmarks/results/board -o docs/board"


@published
def test_the_board_is_small_closed_and_has_every_source() -> None:
    board = Board.find(DATA)
    assert (
        sum(map(len, (read(DATA) | {f"pages/{name}": text for name, text in read(PAGES).items()}).values()))
        < MOST_BYTES
    )
    assert all(not season.is_open and season.shapes for season in list_seasons(board))
    entries = board.entries()
    assert len({entry.op for entry in entries}) >= 2
    assert all(entry.keep and entry.licence and board.source(entry) for entry in entries)


@published
@pytest.mark.slow  # starts Chromium
@pytest.mark.skipif(chromium() is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [1280, 1600])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_pages_work_in_a_browser(width: int, theme: str) -> None:
    with Browser(width, 900) as browser:
        browser.prefers(theme)
        for file in PAGES.rglob("*.html"):
            browser.open(file)
            assert browser.js("document.documentElement.dataset.theme") == theme
            assert browser.js("document.documentElement.scrollWidth <= innerWidth"), file
            browser.press("Tab")
            assert browser.js("document.activeElement.textContent") == "Skip to the content"
        assert not browser.errors and all(url.startswith("file:") for url in browser.requests)


def test_the_best_of_each_season_are_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = make_board(
        tmp_path / "theirs", closed=5000.0, shapes=[{"dtype": "float16", "shape": {"rows": 2}, "params": {}}]
    )
    entries = [make_entry(board, f"k{number}", score) for number, score in enumerate((1.0, 2.0, 0.3, 0.5, 0.6, 0.7))]
    make_entry(board, "hidden", 9.0, keep=False)
    make_race(board, entries[1], entries[0], FASTER)
    monkeypatch.setattr(publish_board, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["publish_board.py", str(board.folder)])
    assert publish_board.main() == 0
    made = Board.find(tmp_path / "benchmarks" / "results" / "board")
    assert [entry.name for entry in made.entries()] == ["k0", "k1", "k2", "k5"] and len(made.races()) == 1
    assert "k1 by ada" in (tmp_path / "docs" / "board" / "index.html").read_text()
