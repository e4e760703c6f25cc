"""Races: which submissions are run beside the record's holder, and what that decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minfer.board import answer as answers
from minfer.board import archive, judging, page, submit
from minfer.board.folder import Board, Entry
from minfer.board.judging import Interrupted
from minfer.board.score import holders
from minfer.board.season import Season, list_seasons
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


def interrupt(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let each race end with this error."""

    def run_race(*_: object) -> None:
        raise error

    monkeypatch.setattr(submit, "run_race", run_race)


def read_ranks(board: Board) -> dict[str, int]:
    """What `minfer board rank` says of each submission."""
    (found,) = archive.standings(board).values()
    return {standing.entry.id: standing.rank for standing in found}


@pytest.mark.parametrize(
    ("error", "said"),
    [(Interrupted("the run was interrupted"), "the run was interrupted"), (KeyboardInterrupt(), "it was interrupted")],
)
def test_an_answer_tells_no_rank_that_the_board_does_not_show(
    error: BaseException, said: str, board: Board, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The faster kernel of a name has no place before a race with the older one, which holds the record."""
    fake_runs(board, monkeypatch, {"slow": 0.344, "quick": 1.18})
    older = submit.submit(board, "softmax", {"slow.py": HONEST}, "ada", "mine")
    with monkeypatch.context() as patch:
        interrupt(patch, error)
        newer = submit.submit(board, "softmax", {"quick.py": QUICK}, "ada", "mine")
    assert read_ranks(board) == {older["submission"]: 1} and (newer["rank"], newer["of"]) == (None, 1)
    why = f"it was not run beside the record's holder ({said}), so your submission {older['submission']} of this name keeps its"
    assert newer["message"] == f"{why} place, rank 1 of 1"
    text = answers.text(newer)
    assert "No rank of its own: 1.18 (" in text and "mine by ada, is" not in text
    assert (
        f"The leader is your submission {older['submission']}, with 0.292 (" in text and "this kernel's score." in text
    )
    assert "Next: run minfer board prove softmax, which times it in the same rounds as the record's holder." in text
    assert "mine by ada beside mine by ada: faster, 3.43 " in submit.prove(board, "softmax")
    assert read_ranks(board) == {newer["submission"]: 1}
    archive.print_entry(board, board.entry(newer["submission"]), False)
    assert "Rank 1 of 1: 1.18 (" in (now := capsys.readouterr().out) and "was not run beside" not in now
    assert "In the same rounds as the record's holder, mine by ada, it was 3.43 (" in now
    archive.print_entry(board, board.entry(older["submission"]), False)
    assert f"Your submission {newer['submission']} of this name keeps its place, rank 1 of 1" in capsys.readouterr().out


def test_a_kernel_of_another_name_shares_the_rank_until_it_is_proven(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_runs(board, monkeypatch, {"first": 1.0, "second": 2.0})
    first = submit.submit(board, "softmax", {"first.py": HONEST}, "ada")
    interrupt(monkeypatch, Interrupted("the run was interrupted"))
    second = submit.submit(board, "softmax", {"second.py": QUICK}, "bob")
    assert read_ranks(board) == {first["submission"]: 1, second["submission"]: 1}
    assert (second["rank"], second["tied"]) == (1, ["first by ada"])
    assert "The leader is first by ada, with 0.5 (" in answers.text(second)


def test_a_kernel_that_lost_a_race_to_its_authors_own_says_so(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newer one has the higher score, and yet the older one keeps the place."""
    older, newer = make_entry(board, "mine", 1.0), make_entry(board, "mine", 1.005)
    make_race(board, newer, older, "tie")
    found = answers.describe_now(board, newer)
    assert found["rank"] is None and read_ranks(board) == {older.id: 1}
    keeps = f"so your submission {older.id} of this name keeps its place, rank 1 of 1"
    assert found["message"] == f"in the same rounds it was not surely faster than the record's holder, {keeps}"
    page.build(board, board.folder / "site")
    html = (board.folder / "site" / "kernels" / f"{newer.id}.html").read_text()
    assert f"{older.id}</a> of this name has its place, because it holds the record." in html


def test_the_rank_of_an_archived_submission_is_that_of_now(
    board: Board, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_runs(board, monkeypatch, {"first": 1.0, "second": 2.0})
    first = submit.submit(board, "softmax", {"first.py": HONEST}, "ada")
    assert first["rank"] == 1
    submit.submit(board, "softmax", {"second.py": QUICK}, "bob")
    archive.print_entry(board, board.entry(first["submission"]), False)
    said = capsys.readouterr().out
    assert "Rank 2 of 2" in said and "The leader, second by bob, is 2 (" in said
    archive.print_entry(board, board.entry(first["submission"]), True)
    assert json.loads(capsys.readouterr().out)["result"]["rank"] == 2


def test_a_submission_is_shown_while_it_races(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it has a score and no answer yet; so it is, too, if the race's process was killed."""
    fake_runs(board, monkeypatch, {"first": 1.0, "second": 2.0})
    submit.submit(board, "softmax", {"first.py": HONEST}, "ada")
    shown = []

    def run_race(board: Board, *_: object) -> None:
        archive.print_entry(board, board.entries()[-1], False)
        shown.append(board.entries()[-1].name)
        raise UserError("it was killed")

    monkeypatch.setattr(submit, "run_race", run_race)
    submit.submit(board, "softmax", {"second.py": QUICK}, "bob")
    assert shown == ["second"]


@pytest.mark.parametrize("removed", ["first", "second"])
@pytest.mark.parametrize("beside", [False, True])
def test_a_submission_that_is_removed_while_it_runs_stays_removed(
    removed: str, beside: bool, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own run, or in the race; and the other one has its answer."""
    fake_runs(board, monkeypatch, {"first": 1.0, "second": 2.0})
    first = submit.submit(board, "softmax", {"first.py": HONEST}, "ada")
    run = judging.run

    def removing(
        board: Board, season: Season, entries: list, beside_it: Entry | None = None, **named: Any
    ) -> judging.Judged:
        holder = beside_it or named.get("beside")
        if (holder is not None) == beside:
            for entry in board.entries():
                if entry.name == removed:
                    board.drop(entry)
        return run(board, season, entries, holder)

    monkeypatch.setattr(judging, "run", removing)
    answer = submit.submit(board, "softmax", {"second.py": QUICK}, "bob")
    assert [entry.name for entry in board.entries()] == [{"first": "second", "second": "first"}[removed]]
    assert not board.races()
    if removed == "second":
        assert answer["verdict"] == "not_judged" and "was removed from the board while" in answer["message"]
        assert read_ranks(board) == {first["submission"]: 1}
    else:
        assert (answer["rank"], answer["of"], answer["message"]) == (1, 1, "")
