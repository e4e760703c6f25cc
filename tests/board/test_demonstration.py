"""The committed board, and its pages: they are made from it by

minfer board build benchmarks/results/board -o docs/board
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.browser import Browser, chromium
from minfer.board import page
from minfer.board.folder import Board
from minfer.board.season import list_seasons
from tests.conftest import ROOT

DATA, PAGES = ROOT / "benchmarks" / "results" / "board", ROOT / "docs" / "board"
MOST_BYTES = 300_000


def read(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_pages_are_those_of_the_committed_board(tmp_path: Path) -> None:
    page.build(Board.find(DATA), tmp_path)
    assert read(tmp_path) == read(PAGES), "run: minfer board build benchmarks/results/board -o docs/board"


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
