"""Seasons: what is drawn, and what nobody may read until the end."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from minfer import ops
from minfer.board.folder import Board
from minfer.board.season import close_season, find_open, list_seasons, open_season
from minfer.plan.config import UserError
from tests.board.making import make_entry


@pytest.fixture
def board(tmp_path: Path) -> Board:
    ops.get("softmax")
    return Board.make(tmp_path / "board")


def test_a_season_draws_problems_of_the_op_from_a_seed_of_its_own(board: Board) -> None:
    season = open_season(board, "softmax", "cpu")
    problems = season.draw()
    assert len(problems) == 1 + season.problems == 6 and season.shown == vars(problems[0])
    assert find_open(board, "softmax") == season and season.name == "softmax-cpu-1"
    file = board.folder / "seasons" / "softmax-cpu-1.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    other = Board.make(board.folder / "other")
    assert open_season(other, "softmax", "cpu").draw() != problems


def test_a_season_ends_with_its_shapes_and_without_sources_that_were_not_given(board: Board) -> None:
    season = open_season(board, "softmax", "cpu")
    kept, other = make_entry(board, "kept"), make_entry(board, "other", keep=False)
    closed = close_season(board, "softmax")
    assert closed.shapes == [vars(problem) for problem in season.draw()]
    assert stat.S_IMODE((board.folder / "seasons" / f"{season.name}.json").stat().st_mode) == 0o644
    assert board.source(kept)
    with pytest.raises(UserError, match="not kept"):
        board.source(other)
    assert open_season(board, "softmax", "cpu").name == "softmax-cpu-2" and len(list_seasons(board)) == 2


def test_mistakes_are_told_in_a_sentence(board: Board) -> None:
    with pytest.raises(UserError, match="no season of softmax is open; open one with minfer board open-season softmax"):
        find_open(board, "softmax")
    open_season(board, "softmax", "cpu")
    with pytest.raises(UserError, match="is open; close it first"):
        open_season(board, "softmax", "cpu")
    open_season(board, "softmax", "cuda")
    with pytest.raises(UserError, match="choose one with --device"):
        find_open(board, "softmax")
    with pytest.raises(UserError, match="open: softmax"):
        find_open(board, "rmsnorm")


def test_an_op_without_enough_problems_has_no_season(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    op = ops.get("softmax")
    monkeypatch.setattr(op, "drawn", lambda source: ops.drawn.Problem("float16", {"rows": 1, "n": 1}))
    with pytest.raises(UserError, match="too few problems"):
        open_season(board, "softmax", "cpu")
