"""Races: which submissions are run beside the record's holder, and what that decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from minfer.board import submit
from minfer.board.folder import Board
from minfer.board.score import holders
from minfer.board.season import list_seasons
from minfer.plan.config import UserError
from tests.board.faking import HONEST, QUICK, fake_runs
from tests.board.making import make_board, make_entry, make_race


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return make_board(tmp_path / "board")


def test_a_new_leader_is_run_beside_the_one_that_it_displaces(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = fake_runs(board, monkeypatch, {"first": 1.0, "second": 2.0, "third": 1.5})
    answers = [
        submit.submit(board, "softmax", {f"{name}.py": HONEST + name.encode()}, "ada")
        for name in ("first", "second", "third")
    ]
    assert runs == [["first"], ["second"], ["first", "second"], ["third"]]
    assert [answer["rank"] for answer in answers] == [1, 1, 2] and answers[1]["race"]["verdict"] == "faster"
    assert answers[1]["race"]["low"] == pytest.approx(
        2 / 1.005**0.577, rel=0.01
    )  # of the same rounds, over three problems
    assert [entry.name for entry in holders(board.entries(), board.races())] == ["first", "second"]
    assert (board.folder / "logs" / f"{answers[0]['submission']}.log").read_text() == "printed"


def test_a_score_that_is_not_surely_lower_is_run_beside_the_record(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine an improved kernel may have the lower score."""
    runs = fake_runs(board, monkeypatch, {"first": 1.0, "near": 0.999, "far": 0.9})
    for name in ("first", "near", "far"):
        submit.submit(board, "softmax", {f"{name}.py": HONEST + name.encode()}, "ada")
    assert runs == [["first"], ["near"], ["first", "near"], ["far"]]


@pytest.mark.parametrize(("status", "times"), [("wrong", 1), ("timeout", 2)])
def test_a_holder_that_fails_when_it_is_run_again_has_no_rank(
    status: str, times: int, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it could keep the record by failing in each race."""
    runs = fake_runs(board, monkeypatch, {"first": 1.0, "second": 2.0}, first=status)
    submit.submit(board, "softmax", {"first.py": HONEST}, "ada")
    answer = submit.submit(board, "softmax", {"second.py": QUICK}, "bob")
    assert runs == [["first"], ["second"], *[["first", "second"]] * times]
    assert (answer["rank"], answer["of"], answer["race"]) == (1, 1, None)
    first = next(entry for entry in board.entries() if entry.name == "first")
    assert first.state == "refused" and f"ended with: {status}" in first.result["message"]


def test_a_race_on_another_device_decides_nothing(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cluster whose nodes have different processors."""
    first, second = make_entry(board, "first", 1.0), make_entry(board, "second", 2.0)
    fake_runs(board, monkeypatch, {"first": 1.0, "second": 2.0})
    second.device = "Xeon"
    (season,) = list_seasons(board)
    with pytest.raises(UserError, match="that run was on AMD EPYC and not on Xeon"):
        submit.run_race(board, season, second, first)
    assert not board.races()


def test_a_higher_score_that_no_run_has_proven_is_proven_later(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(board, monkeypatch, {"first": 1.0, "second": 2.0})
    assert "no kernel with a score" in submit.prove(board, "softmax")
    make_entry(board, "first", 1.0)
    make_entry(board, "second", 2.0)
    assert "second by ada beside first by ada: faster, 2 " in submit.prove(board, "softmax")
    assert "second by ada holds the record, and each other kernel has a surely lower score" in submit.prove(
        board, "softmax"
    )


def test_an_older_kernel_that_was_never_raced_may_prove_itself(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(board, monkeypatch, {"first": 1.0, "second": 3.0, "third": 2.0})
    first, _, third = (make_entry(board, n, s) for n, s in (("first", 1.0), ("second", 3.0), ("third", 2.0)))
    make_race(board, third, first, "faster")
    assert "second by ada beside third by ada: faster, 1.5 (" in submit.prove(board, "softmax")
    assert [entry.name for entry in holders(board.entries(), board.races())] == ["first", "third", "second"]
