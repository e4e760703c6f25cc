"""The archive's files."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from minfer.board.folder import Board, hash_files, write_json
from minfer.board.season import find_open
from minfer.plan.config import UserError
from tests.board.making import make_board, make_entry, make_race


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return make_board(tmp_path / "board")


def test_a_submission_is_read_as_it_was_written(board: Board) -> None:
    entry = make_entry(board, "mine", 1.5, opcodes={"vector": 3.0})
    assert board.entries() == [entry] and board.entry(entry.id[:4]) == entry
    assert board.source(entry) == "// mine\n"


def test_equal_files_are_kept_once_and_go_with_the_last_that_has_them(board: Board) -> None:
    one, other = (make_entry(board, name, text="// same\n") for name in ("one", "other"))
    assert len(list(board.folder.glob("objects/*/*"))) == 1
    board.drop(one)
    assert board.source(other) == "// same\n"
    board.drop(other)
    assert not list(board.folder.glob("objects/*/*")) and not board.entries()


def test_a_file_that_was_changed_is_not_taken_for_what_it_was(board: Board) -> None:
    entry = make_entry(board, "mine")
    (file,) = board.folder.glob("objects/*/*")
    file.write_text("other")
    with pytest.raises(UserError, match="not kept"):
        board.source(entry)


def test_what_is_dropped_takes_its_races_with_it(board: Board) -> None:
    one, other = make_entry(board, "one"), make_entry(board, "other")
    make_race(board, other, one, "faster")
    board.drop(other)
    assert not board.races()


def test_an_entry_that_cannot_be_read_hides_no_other(board: Board) -> None:
    make_entry(board, "mine")
    (board.folder / "entries" / "0000000000.json").write_text("{")
    assert [entry.name for entry in board.entries()] == ["mine"]


def test_what_names_shapes_is_the_owners_alone(board: Board) -> None:
    private = ["rows", "logs", "quarantine", "work", "seasons/softmax-cpu-1.json"]
    assert not any(stat.S_IMODE((board.folder / name).stat().st_mode) & 0o077 for name in private)


def test_mistakes_are_told_in_a_sentence(board: Board, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no board; name one with --board"):
        Board.find(tmp_path)
    with pytest.raises(UserError, match="there is no submission 'abc'; the archive is empty"):
        board.entry("abc")
    (board.folder / "settings.json").write_text('{"per_day": 3}')
    with pytest.raises(UserError, match="per_day"):
        _ = board.settings


def test_a_hash_of_files_does_not_know_their_names() -> None:
    assert (
        hash_files({"a.cpp": "12", "b.h": "34"})
        == hash_files({"c.cpp": "34", "d.h": "12"})
        != hash_files({"a.cpp": "12"})
    )


def test_a_board_of_a_newer_version_is_named(tmp_path: Path) -> None:
    board = make_board(tmp_path / "board", field_of_tomorrow=3)
    with pytest.raises(UserError, match="this version of minfer"):
        find_open(board, "softmax")
    write_json(board.folder / "settings.json", {"per_hour": 3, "per_day": 9})
    with pytest.raises(UserError, match="per_day, which this version of minfer does not know"):
        _ = board.settings


def test_a_folder_that_nobody_may_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(UserError, match="Permission denied; ask its owner"):
        Board.find(tmp_path)
