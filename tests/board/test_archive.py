"""The archive's commands, as a user types them; none of them imports PyTorch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from minfer import cli
from minfer.board import judging
from minfer.board.answer import differences
from minfer.board.folder import Board
from minfer.board.page import build
from minfer.board.score import holders
from tests.board.faking import HONEST
from tests.board.making import SEED, SHOWN, fill, make_board, make_entry, make_race


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return make_board(tmp_path / "board")


class Shell:
    """Runs `minfer ...` in this process."""

    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], board: Board) -> None:
        self.patch, self.capsys, self.board = patch, capsys, board

    def __call__(self, *words: str) -> tuple[int, str]:
        self.patch.setattr(sys, "argv", ["minfer", *words, "--board", str(self.board.folder)])
        status = cli.main()
        said = self.capsys.readouterr()
        return status, said.out + said.err


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], board: Board) -> Shell:
    return Shell(monkeypatch, capsys, board)


def test_a_list_has_a_line_for_each(shell: Shell, board: Board) -> None:
    make_entry(board, "mine", 1.25)
    make_entry(board, "theirs", who="bob", op="rmsnorm")
    status, said = shell("archive", "list")
    assert status == 0 and "1.25" in said and "2 submissions." in said
    assert (
        "theirs" not in shell("archive", "list", "--as", "ada")[1]
        and "mine" not in shell("archive", "list", "--op", "rmsnorm")[1]
    )
    found = json.loads(shell("archive", "list", "--json")[1])
    assert [each["name"] for each in found["submissions"]] == ["mine", "theirs"] and not found["unreadable"]


def test_a_source_is_shown_only_if_its_author_allows_it(shell: Shell, board: Board) -> None:
    shown, hidden = make_entry(board, "shown"), make_entry(board, "hidden", keep=False)
    assert json.loads(shell("archive", "show", shown.id, "--json")[1])["source"] == "// shown\n"
    assert json.loads(shell("archive", "show", hidden.id, "--json")[1])["source"] is None
    near = json.loads(shell("archive", "near", "softmax", "--json")[1])
    assert {each["name"]: each["source"] for each in near["submissions"]} == {"shown": "// shown\n", "hidden": None}
    assert "// hidden" not in shell("archive", "diff", shown.id, hidden.id)[1]


def test_two_submissions_are_compared(shell: Shell, board: Board) -> None:
    one = make_entry(board, "one", opcodes={"vector": 2.0}, text="int a;\nint b;\n")
    other = make_entry(board, "other", 2.0, opcodes={"vector": 80.0}, text="int a;\nint c;\n")
    status, said = shell("archive", "diff", one.id, other.id)
    assert status == 0 and "-int b;" in said and "+int c;" in said and "vector instructions" in said


def test_only_the_author_removes_a_submission(shell: Shell, board: Board) -> None:
    entry = make_entry(board, "mine")
    status, said = shell("archive", "remove", entry.id, "--as", "bob")
    assert status == 2 and said.endswith("bob's, and only its author may remove it; if it is yours, add --as ada\n")
    assert shell("archive", "remove", entry.id, "--as", "ada")[0] == 0 and not board.entries()


@pytest.mark.parametrize("words", [("remove", "--as", "ada"), ("quarantine",)])
def test_what_is_removed_has_no_page_any_longer(
    words: tuple[str, ...], shell: Shell, board: Board, tmp_path: Path
) -> None:
    """Not only after the next submission: its source was there for everybody to read."""
    settings = json.loads((board.folder / "settings.json").read_text()) | {"site": str(tmp_path / "site")}
    (board.folder / "settings.json").write_text(json.dumps(settings))
    entry = make_entry(board, "mine")
    page = build(board, tmp_path / "site").parent / "kernels" / f"{entry.id}.html"
    assert page.exists() and shell("archive", *words, entry.id)[0] == 0
    assert not page.exists() and entry.id not in (tmp_path / "site" / "board.json").read_text()


def test_a_removed_holder_costs_no_other_the_record(shell: Shell, board: Board) -> None:
    """It was faster than the first, and the third than it; so the third is faster than the first."""
    first, second, third = (make_entry(board, name, who=name) for name in ("first", "second", "third"))
    make_race(board, second, first, "faster")
    make_race(board, third, second, "faster")
    assert shell("archive", "remove", second.id, "--as", "second")[0] == 0
    assert [entry.name for entry in holders(board.entries(), board.races())] == ["first", "third"]
    (race,) = board.races()
    assert (race["challenger"], race["holder"], race["verdict"]) == (third.id, first.id, "faster")
    assert (
        race["joined"] and race["value"] == pytest.approx(1.1**2) and 1.05 < race["low"] < race["value"] < race["high"]
    )
    assert shell("archive", "remove", third.id, "--as", "third")[0] == 0
    assert [entry.name for entry in holders(board.entries(), board.races())] == ["first"]


def test_who_may_not_write_there_removes_nothing(shell: Shell, board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = make_entry(board, "mine")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert shell("archive", "remove", entry.id, "--as", "ada") == (
        2,
        f"minfer: only the owner of {board.folder} can remove files there; ask them\n",
    )


def test_a_page_that_cannot_be_written_again_hides_no_removal(shell: Shell, board: Board, tmp_path: Path) -> None:
    (tmp_path / "site").write_text("a file")
    settings = json.loads((board.folder / "settings.json").read_text()) | {"site": str(tmp_path / "site")}
    (board.folder / "settings.json").write_text(json.dumps(settings))
    entry = make_entry(board, "mine")
    status, said = shell("archive", "remove", entry.id, "--as", "ada")
    assert status == 2 and f"Removed {entry.id}" in said
    assert f"the page of {entry.id} is still in {tmp_path / 'site'}, because " in said
    assert not board.entries()


def test_a_ratio_whose_interval_is_too_wide_is_a_word(
    shell: Shell, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the pages: upper end over lower end above 3."""
    entry = make_entry(board, "wide", 1.234, wide=1.8)
    make_entry(board, "sure", 2.35, wide=1.7)
    for words in (("archive", "list"), ("archive", "near", "softmax"), ("board", "rank")):
        said = shell(*words)[1]
        assert "unsure" in said and "1.23" not in said and "2.35" in said
    wide = {"number": 1, "status": "ok", "ratio": {"value": 0.777, "low": 0.4, "high": 1.6}, "roof_percent": None}
    entry.result["problems"] = [wide]
    assert not differences(entry, board.entries()[1])


def test_programs_are_told_what_cannot_be_read(shell: Shell, board: Board) -> None:
    make_entry(board, "whole")
    half = board.folder / "entries" / f"{make_entry(board, 'half').id}.json"
    half.write_text("{")
    season = make_board(board.folder, field_of_tomorrow=3).folder / "seasons" / "softmax-cpu-1.json"
    names = {("archive", "list"): "submissions", ("archive", "near", "softmax"): "submissions"}
    for words, name in (names | {("board", "rank"): "boards", ("board", "seasons"): "seasons"}).items():
        found = json.loads(shell(*words, "--json")[1])
        assert [*found] == [name, "unreadable"] and len(found[name]) == (name != "seasons")
        assert found["unreadable"] == [str(season if name == "seasons" else half)]


def test_a_lost_source_hides_no_other_submission(shell: Shell, board: Board) -> None:
    lost, _ = make_entry(board, "lost"), make_entry(board, "whole")
    board.forget_files(lost)
    found = json.loads(shell("archive", "near", "softmax", "--json")[1])["submissions"]
    assert {each["name"]: each["source"] for each in found} == {"lost": None, "whole": "// whole\n"}


def test_a_harmful_one_is_set_aside_with_its_log(shell: Shell, board: Board) -> None:
    entry = make_entry(board, "bad", 9.0)
    (board.folder / "logs" / f"{entry.id}.log").write_text("what it printed")
    assert shell("archive", "quarantine", entry.id, "--why", "it forks")[0] == 0
    folder = board.folder / "quarantine" / entry.id
    assert (folder / "log.txt").read_text() == "what it printed" and (folder / "bad.cpp.txt").read_text() == "// bad\n"
    assert json.loads((folder / "entry.json").read_text())["why"] == "it forks" and not board.entries()


def test_an_export_has_what_may_be_kept_and_no_open_season(shell: Shell, board: Board, tmp_path: Path) -> None:
    one, other = make_entry(board, "one"), make_entry(board, "other", 2.0)
    private = make_entry(board, "private", keep=False)
    for entry in (one, private):
        (board.folder / "rows" / f"{entry.id}.parquet").write_text("rows")
    make_race(board, other, one, "faster")
    make_race(board, private, one, "tie")
    assert shell("archive", "export", str(tmp_path / "all.tar.gz"))[0] == 0
    with tarfile.open(tmp_path / "all.tar.gz") as packed:
        names = set(packed.getnames())
    assert names == {
        *(f"entries/{entry.id}.json" for entry in (one, other)), f"sources/{one.id}/one.cpp", f"sources/{other.id}/other.cpp",
        f"races/{other.id}-{one.id}.json",
    }  # fmt: skip


def test_seasons_are_listed_without_a_seed(shell: Shell, board: Board) -> None:
    assert str(SEED) not in (text := shell("board", "seasons", "--json")[1])
    assert json.loads(text)["seasons"][0]["shown"] == SHOWN
    assert "softmax-cpu-1" in shell("board", "seasons")[1]


def test_ranks_are_listed(shell: Shell, board: Board) -> None:
    assert "No submission has a rank yet." in shell("board", "rank")[1]
    make_entry(board, "mine", 1.25)
    make_entry(board, "theirs", 1.24, who="bob")
    assert "1=    1.25" in shell("board", "rank")[1]
    (found,) = json.loads(shell("board", "rank", "--json")[1])["boards"]
    assert [each["rank"] for each in found["standings"]] == [1, 1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["submit"], "the following arguments are required: OP, FILE; see minfer submit --help"),
        (["submit", "softmx", "x.cpp"], "unknown op 'softmx'; did you mean softmax?"),
        (["submit", "softmax", "none.cpp"], "none.cpp is not a file"),
        (["submit", "softmax", "x.cpp", "--keep"], "say under which licence"),
        (["archive", "show", "abc"], "there is no submission 'abc'"),
        (["archive", "shwo", "abc"], "invalid choice: 'shwo'"),
        (["archive", "near", "softmax", "-n", "-3"], "-n -3 shows no submission; write 1 or more"),
        (["archive", "near", "softmax", "--shape", "rows"], "cannot read 'rows' of --shape"),
        (["board", "open-season", "softmx"], "unknown op 'softmx'; did you mean softmax?"),
    ],
)
def test_mistakes_are_told_in_a_sentence(shell: Shell, words: list[str], said: str) -> None:
    status, printed = shell(*words)
    assert status == 2 and said in printed and printed.count("\n") == 1


def test_help_typos_and_lists_import_no_pytorch(board: Board) -> None:
    fill(board, 3)
    code = f"""
import contextlib, sys
from minfer import cli
asking = ["submit --help", "archive --help", "board build -h"]
for words in [*asking, "archive list", "archive near softmax", "submit softmx x.cpp", "board rank"]:
    sys.argv = ["minfer", *words.split(), "--board", {str(board.folder)!r}]
    with contextlib.suppress(SystemExit):
        cli.main()
assert not {{"torch", "pyarrow"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_each_submission_is_read_once(shell: Shell, board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """What listing and searching cost grows with the number of submissions, and no faster."""
    fill(board, 100)
    read = []
    whole = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path), whole(path))[1])
    assert "100 submissions." in shell("archive", "list")[1] and len(read) == 100
    read.clear()
    assert shell("archive", "near", "softmax", "--dtype", "float16")[0] == 0 and len(read) == 100


def test_tables_of_a_newer_board_name_what_they_cannot_read(shell: Shell, board: Board) -> None:
    """Otherwise such a board looks as if nobody had submitted anything."""
    entry = make_entry(board, "mine")
    file = board.folder / "entries" / f"{entry.id}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"field_of_tomorrow": 3}))
    season = make_board(board.folder, field_of_tomorrow=3).folder / "seasons" / f"{entry.season}.json"
    ranks, seasons = shell("board", "rank")[1], shell("board", "seasons")[1]
    assert f"1 submission cannot be read, the first {file}: if a newer minfer wrote the board, use that one" in ranks
    assert f"1 season cannot be read, the first {season}: if a newer minfer" in seasons
    assert "1 more submission cannot be read" in shell("archive", "list")[1]


def test_a_misspelt_task_is_not_compared(shell: Shell, board: Board) -> None:
    make_board(board.folder, op="their_norm")
    assert shell("archive", "near", "softmaz") == (2, "minfer: unknown op 'softmaz'; did you mean softmax?\n")
    assert shell("archive", "near", "softmax", "--dtype", "float12")[0] == 2
    assert shell("archive", "near", "their_norm", "--dtype", "float16")[0] == 0


def test_a_submission_that_is_ended_is_not_pending_for_ever(
    shell: Shell, board: Board, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By SIGTERM, as `timeout` and SLURM send it."""

    def run(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], 10)
        pytest.fail("it went on")

    monkeypatch.setattr(judging, "run", run)
    (tmp_path / "mine.py").write_bytes(HONEST)
    assert shell("submit", "softmax", str(tmp_path / "mine.py"), "--as", "ada")[0] == 130
    (entry,) = board.entries()
    assert (entry.state, entry.result["message"], entry.fingerprint) == ("refused", "it was interrupted", "")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
