"""Scores, ranks and records."""

from __future__ import annotations

from pathlib import Path

import pytest

from minfer.board.folder import Board, Entry
from minfer.board.score import FASTER, TIE, Ratio, geometric_mean, holders, rank
from tests.board.making import make_board, make_entry, make_race


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return make_board(tmp_path / "board")


def ranks(board: Board) -> dict[str, tuple[int, bool]]:
    return {s.entry.name: (s.rank, s.tied) for s in rank(board.entries(), board.races())}


def record(board: Board) -> list[str]:
    return [entry.name for entry in holders(board.entries(), board.races())]


def test_a_score_is_the_geometric_mean_and_its_interval_shrinks_with_independent_problems() -> None:
    four = geometric_mean([Ratio(2.0, 1.6, 2.5), Ratio(0.5, 0.4, 0.625)] * 2)
    assert four.value == pytest.approx(1.0)
    assert four.low == pytest.approx(1.25**-0.5) and four.high == pytest.approx(1.25**0.5)
    one = geometric_mean([Ratio(2.0, 1.6, 2.5)])
    assert (one.value, one.low, one.high) == pytest.approx((2.0, 1.6, 2.5))


def test_a_quotient_has_the_intervals_of_both() -> None:
    found = Ratio(2.0, 1.8, 2.2).over(Ratio(1.0, 0.9, 1.1))
    assert found.value == pytest.approx(2.0)
    assert found.low < 1.8 and found.high > 2.2 and found.verdict == FASTER
    assert Ratio(1.02, 0.98, 1.05).over(Ratio(1.0, 0.99, 1.01)).verdict == TIE


def test_what_lies_within_noise_shares_a_rank(board: Board) -> None:
    for name, score in (("best", 2.0), ("near", 1.97), ("far", 1.0)):
        make_entry(board, name, score)
    assert ranks(board) == {"best": (1, True), "near": (1, True), "far": (3, False)}


def test_a_higher_score_takes_the_lead_only_after_a_race(board: Board) -> None:
    first = make_entry(board, "first", 1.0)
    second = make_entry(board, "second", 3.0)
    assert ranks(board) == {"first": (1, True), "second": (1, True)} and record(board) == ["first"]
    make_race(board, second, first, FASTER)
    assert ranks(board) == {"second": (1, False), "first": (2, False)} and record(board) == ["first", "second"]


def test_a_race_decides_against_the_scores(board: Board) -> None:
    first, second = make_entry(board, "first", 2.0), make_entry(board, "second", 1.99)
    make_race(board, second, first, FASTER)
    assert record(board)[-1] == "second" and ranks(board) == {"second": (1, False), "first": (2, False)}


def test_a_race_that_ends_in_a_tie_leaves_the_record(board: Board) -> None:
    first, second = make_entry(board, "first", 1.0), make_entry(board, "second", 3.0)
    make_race(board, second, first, TIE)
    assert record(board) == ["first"] and ranks(board)["second"] == (1, True)


def test_the_record_follows_the_races_and_not_the_order_of_submission(board: Board) -> None:
    """The second kernel may be raced late, for example because SLURM was down."""
    first, second, third = (
        make_entry(board, name, score) for name, score in (("first", 1.0), ("second", 3.0), ("third", 2.0))
    )
    make_race(board, third, first, FASTER)
    assert record(board) == ["first", "third"]
    make_race(board, second, third, FASTER, when=9000.0)
    assert record(board) == ["first", "third", "second"] and ranks(board)["second"] == (1, False)


def test_the_first_race_takes_the_record(board: Board) -> None:
    """If two were faster than the same holder, they have yet to race with each other."""
    first, second, third = (
        make_entry(board, name, score) for name, score in (("first", 1.0), ("second", 2.0), ("third", 2.0))
    )
    make_race(board, third, first, FASTER, when=8000.0)
    make_race(board, second, first, FASTER, when=9000.0)
    assert record(board) == ["first", "third"]


def test_a_person_has_one_place_for_each_name(board: Board) -> None:
    first = make_entry(board, "mine", 1.0)
    make_entry(board, "mine", 0.5)
    better = make_entry(board, "mine", 2.0)
    make_entry(board, "mine", 0.9, who="bob")
    make_race(board, better, first, FASTER)
    assert [(s.entry.who, s.entry.id == better.id) for s in rank(board.entries(), board.races())] == [
        ("ada", True), ("bob", False),
    ]  # fmt: skip


def test_only_what_was_judged_and_has_a_score_is_ranked(board: Board) -> None:
    make_entry(board, "failed", state="refused", score=5.0)
    pending: Entry = make_entry(board, "pending", state="pending")
    pending.score = {}
    board.save(pending)
    assert not rank(board.entries(), board.races()) and not record(board)
