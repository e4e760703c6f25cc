"""What goes wrong beside a kernel: names, files, disks, clocks and people at the same time. Each is told in one sentence, and
no submission is lost."""

from __future__ import annotations

import errno
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minfer import ops
from minfer.board import archive, folder, judging, stage, submit, watch
from minfer.board.folder import JUDGED, Board, Entry
from minfer.board.score import holders
from minfer.board.season import Season, close_season, list_seasons, open_season
from minfer.plan.config import UserError
from tests.board.faking import HONEST, QUICK, fake, fake_runs, measured
from tests.board.making import make_board, make_entry


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return make_board(tmp_path / "board")


@pytest.mark.parametrize("name", ["../mine", "a/b", ".hidden", "", "a" * 62, "mine\n", "a b", "größe"])
def test_a_name_that_is_no_name_of_a_file_is_refused(board: Board, name: str) -> None:
    with pytest.raises(UserError, match="a person cannot be called"):
        submit.submit(board, "softmax", {"mine.py": HONEST}, name)
    if name:
        with pytest.raises(UserError, match="a kernel cannot be called"):
            submit.submit(board, "softmax", {"mine.py": HONEST}, "ada", name)
    assert not board.entries() and not list(board.folder.glob("objects/*"))


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    with open(file, "wb") as large:
        large.truncate(50 << 20)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("it was read"))
    with pytest.raises(UserError, match=r"mine.py has 52,428,800 bytes; a file may have 4,194,304"):
        stage.read_files([file])


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("mine.py", b"def softmax(y, x, mask): pass\n"),
        ("mine.cpp", b"\tMINFER_SOFTMAX(\n  softmax_other, minfer::launch)\n"),
    ],
)
def test_four_megabytes_of_blank_lines_are_read_once(name: str, end: bytes) -> None:
    """An expression that looks at the rest of the file from each line needs hours, and the inbox waits."""
    content = b"\n" * ((4 << 20) - len(end)) + end
    assert stage.find_kind("softmax", name, content) == stage.find_kind("softmax", name, end)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("mine.py", HONEST + b"# \xff\xfe\n"),
        ("mine.py", b"import triton\n" + HONEST + b"# \xff\xfe\n"),
        ("mine.cpp", b"// \xff\xfe\nMINFER_SOFTMAX(softmax_mine, minfer::launch)\n"),
    ],
)
def test_a_file_that_is_no_utf_8_harms_no_other_submission(
    name: str, content: bytes, board: Board, tmp_path: Path
) -> None:
    """It is registered beside others, and its bytes reach the compiler as they are."""
    kind = stage.find_kind("softmax", name, content)
    other = make_entry(board, "other", kind="python", text=HONEST.decode())
    odd = make_entry(board, "mine", kind=kind)
    odd.files = {name: board.keep(content)}
    file = stage.stage(board, [odd, other], tmp_path / "sources")
    op = ops.get("softmax")
    try:
        ops.load_file(file)
        assert {odd.kernel, other.kernel} <= op.kernels.keys()
        (staged,) = (tmp_path / "sources" / odd.id).iterdir()
        assert b"\xff\xfe" in staged.read_bytes()
    finally:
        for entry in (odd, other):
            op.kernels.pop(entry.kernel, None)


def test_files_that_are_cut_in_half_are_named_and_the_rest_is_shown(
    board: Board, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, half = make_entry(board, "whole"), make_entry(board, "half", 2.0)
    source = make_entry(board, "sourceless", 3.0)
    for path in (board.folder / "entries" / f"{half.id}.json", board._object(source.files["sourceless.cpp"])):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    archive.print_list(board, "", "", False)
    said = capsys.readouterr().out
    assert (
        whole.id in said
        and f"1 more submission cannot be read, the first {board.folder}/entries/{half.id}.json" in said
    )
    with pytest.raises(UserError, match=f"the source of {source.id} is not kept"):
        archive.print_entry(board, source, False)


def test_an_export_to_a_full_disk_leaves_no_half_file(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_entry(board, "mine")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archive, "_add", full)
    with pytest.raises(UserError, match="No space left on device; choose another file"):
        archive.export(board, tmp_path / "all.tar.gz")
    assert not [path for path in tmp_path.iterdir() if "tar" in path.name]


@pytest.mark.parametrize("until", ["objects", "entries", "logs", "rows"])
def test_a_full_disk_in_the_archive_is_told_in_a_sentence(
    until: str, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was there before is as it was."""
    fake_runs(board, monkeypatch, {"mine": 1.0})
    earlier = make_entry(board, "earlier", 2.0)
    write = os.replace

    def replace(source: Path, target: Path) -> None:
        if until in str(target):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(folder.os, "replace", replace)
        with pytest.raises((UserError, OSError), match="No space left on device"):
            submit.submit(board, "softmax", {"mine.py": HONEST}, "ada")
    assert not list(board.folder.glob("**/.*.tmp"))
    found = {entry.name: entry for entry in board.entries()}
    assert found["earlier"].state == JUDGED and board.content(earlier.files["earlier.cpp"])
    assert "mine" not in found or found["mine"].result["message"].count("No space left on device") == 1
    assert submit.submit(board, "softmax", {"mine.py": HONEST}, "ada")["verdict"] == "ranked"


def test_two_people_may_submit_the_same_name_in_the_same_second(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit.time, "time", lambda: 5000.0)
    fake_runs(board, monkeypatch, {"mine": 1.0})
    (season,) = list_seasons(board)
    put = lambda who: submit._record(board, season, {"mine.py": HONEST}, who, "mine", "python", "", False)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(put, ["ada", "bob", "ada", "bob"]))
    assert len({entry.id for entry in made}) == 4 == len(board.entries())
    assert sorted(entry.number for entry in board.entries()) == [1, 2, 3, 4]


def test_a_season_may_end_while_a_submission_runs(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is judged on that season's problems. Its source is deleted afterwards, if its author did not allow to keep it."""

    def run(board: Board, season: Season, entries: list, beside: Entry | None = None) -> judging.Judged:
        (open_one,) = list_seasons(board)
        if open_one.is_open:
            close_season(board, "softmax")
        return fake({each.kernel: {n: measured(1.0) for n in range(1 + season.problems)} for each in entries})

    monkeypatch.setattr(judging, "run", run)
    answer = submit.submit(board, "softmax", {"mine.py": HONEST}, "ada")
    assert (answer["verdict"], answer["rank"]) == ("ranked", 1)
    (entry,) = board.entries()
    assert board.content(entry.files["mine.py"]) is None
    with pytest.raises(UserError, match="no season of softmax is open"):
        submit.submit(board, "softmax", {"mine.py": QUICK}, "ada")


def test_a_race_that_cannot_run_costs_no_rank(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(board, monkeypatch, {"first": 1.0, "second": 2.0})
    submit.submit(board, "softmax", {"first.py": HONEST}, "ada")

    def down(*_: object) -> None:
        raise UserError("sbatch: the partition is down")

    monkeypatch.setattr(submit, "run_race", down)
    answer = submit.submit(board, "softmax", {"second.py": QUICK}, "bob")
    assert answer["verdict"] == "ranked" and answer["tied"] == ["first by ada"] and answer["race"] is None
    why = "it was not run beside the record's holder (sbatch: the partition is down), so it cannot take the record yet"
    assert answer["message"] == why
    assert answer["next"] == (
        "run minfer board prove softmax, which times it in the same rounds as the record's holder"
    )


def test_a_clock_that_steps_backwards_changes_no_record_and_no_limit(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = json.loads((board.folder / "settings.json").read_text()) | {"per_hour": 2}
    (board.folder / "settings.json").write_text(json.dumps(settings))
    fake_runs(board, monkeypatch, {"first": 2.0, "second": 1.0, "third": 1.0})
    now = time.time()
    for name, hours in (("first", 48), ("second", 0), ("third", -48)):
        monkeypatch.setattr(submit.time, "time", lambda hours=hours: now + 3600 * hours)
        submit.submit(board, "softmax", {f"{name}.py": HONEST + name.encode()}, "ada")
    entries = board.entries()
    assert [entry.name for entry in entries] == ["first", "second", "third"]
    assert [entry.name for entry in holders(entries, board.races())] == ["first"]


def test_two_owners_cannot_open_a_season_at_once(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    close_season(board, "softmax")

    def opened(_: int) -> str:
        try:
            return open_season(board, "softmax", "cpu").name
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        names = list(pool.map(opened, range(2)))
    assert "softmax-cpu-2" in names and any("is open; close it first" in name for name in names)


@pytest.mark.parametrize("name", ["a" * 251 + ".cpp", "mine\nmine.cpp", "-rf.cpp", "mine.cpp"])
def test_a_file_of_the_inbox_with_an_odd_name_stops_nobody(name: str, board: Board) -> None:
    """Nor does a folder at the place of its answer."""
    inbox = board.folder / "inbox" / "softmax"
    inbox.mkdir()
    (inbox / name).write_bytes(b"no kernel")
    (inbox / "mine.cpp.json").mkdir()
    os.mkfifo(inbox / "pipe.cpp")
    (inbox / "folder.cpp").mkdir()
    watch.watch(board, once=True)
    assert not (inbox / name).exists() and not board.entries()


def test_a_program_that_fails_on_one_file_judges_the_next(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = board.folder / "inbox" / "softmax"
    inbox.mkdir()
    for name in ("first.py", "second.py"):
        (inbox / name).write_bytes(HONEST + name.encode())

    def run(board: Board, season: Season, entries: list, beside: Entry | None = None) -> judging.Judged:
        if entries[0].name == "first":
            raise RuntimeError("a mistake of ours")
        return fake({entries[0].kernel: {n: measured(1.0) for n in range(1 + season.problems)}})

    monkeypatch.setattr(judging, "run", run)
    watch.watch(board, once=True)
    answers = {name: json.loads((inbox / f"{name}.py.json").read_text()) for name in ("first", "second")}
    assert answers["second"]["verdict"] == "ranked" and answers["first"]["message"] == "RuntimeError: a mistake of ours"


def test_two_watchers_judge_each_file_once(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = board.folder / "inbox" / "softmax"
    inbox.mkdir()
    for number in range(8):
        (inbox / f"k{number}.py").write_bytes(HONEST + b"#" * number)
    judged: list[str] = []

    def judge(board: Board, op: str, files: dict[str, bytes], who: str) -> dict[str, str]:
        judged.extend(files)
        time.sleep(0.01)
        return {"verdict": "ranked"}

    monkeypatch.setattr(watch, "submit", judge)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: watch.watch(board, once=True), range(3)))
    assert sorted(judged) == [f"k{number}.py" for number in range(8)]
    assert len(list(inbox.glob("*.json"))) == 8 and not list(inbox.glob("*.py"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "is not a JSON object"),
        ("null", "is not a JSON object"),
        ("{", "Expecting property name"),
        ('{"per_hour": "many"}', 'per_hour is "many" in .*; write a whole number above 0'),
        ('{"per_hour": 0}', "per_hour is 0 in .*; write a whole number above 0"),
        ('{"per_hour": true}', "per_hour is true in .*; write a whole number above 0"),
        ('{"problems": 1.5}', "problems is 1.5 in .*; write a whole number above 0"),
        ('{"case_timeout_s": null}', "case_timeout_s is null in .*; write a number above 0"),
        ('{"case_timeout_s": NaN}', "case_timeout_s is NaN in .*; write a number above 0"),
        ('{"site": 5}', "site is 5 in .*; write a string"),
        ('{"timing": 7}', "timing is 7 in .*; write a string"),
        ('{"cluster": [1]}', r"cluster is \[1\] in .*; write a JSON object"),
        ('{"cluster": {"time_min": "x"}}', "settings.json: .*'x'.*; correct this value"),
        ('{"cluster": {"nope": 1}}', "settings.json: .*nope.*; correct this value"),
        ('{"timing": "nope"}', "nope"),
    ],
)
def test_a_setting_of_a_wrong_type_is_told_in_a_sentence(text: str, said: str, board: Board) -> None:
    (board.folder / "settings.json").write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        submit.submit(board, "softmax", {"mine.py": HONEST}, "ada")
    assert "\n" not in str(caught.value)


def test_a_whole_number_is_a_number_of_seconds(board: Board) -> None:
    (board.folder / "settings.json").write_text('{"case_timeout_s": 30}')
    assert board.settings.case_timeout_s == 30


def test_a_watcher_that_is_interrupted_ends_and_loses_no_file(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = board.folder / "inbox" / "softmax"
    inbox.mkdir()
    (inbox / "mine.py").write_bytes(HONEST)
    monkeypatch.setattr(judging.start, "run", lambda config: 130)
    with pytest.raises(judging.Interrupted):
        watch.watch(board, once=True)
    assert [path.name for path in inbox.iterdir()] == ["mine.py"]


def test_a_board_where_none_can_be_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is there, or the folder is another user's."""
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"cannot make a board in .*file: Not a directory; name another folder with --board"
    ):
        Board.make(tmp_path / "file")

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(
        UserError, match=r"cannot make a board in .*theirs: Operation not permitted; name another folder"
    ):
        Board.make(tmp_path / "theirs")
