"""Submissions through the whole pipeline, on the CPU."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minfer import ops
from minfer.bench.judged import FASTER, HELD_UP, LONGER
from minfer.board import answer as answers
from minfer.board import judging, submit, watch
from minfer.board.folder import JUDGED, Board, Entry
from minfer.board.season import Season, find_open, list_seasons, open_season
from minfer.board.tasks import write_extra
from minfer.ops import python_source
from minfer.ops.op import REGISTERED
from minfer.plan.config import UserError
from minfer.rows import store
from tests.board.faking import HONEST, QUICK, fake, fake_runs, measured
from tests.board.making import make_board, make_entry
from tests.conftest import ROOT

ZEROS = b"def softmax(y, x, mask):\n    y.zero_()\n"
BROKEN = b"#include <nowhere.h>\nMINFER_SOFTMAX(softmax_mine, minfer::launch)\n"
SMALL = {"problems": 1, "cluster": {"executor": "local"}}
EXPLOITS = (  # those whose verdict depends on no clock
    "returns_zeros", "returns_constant", "writes_a_part", "leaves_nan", "ignores_an_input", "accumulates_in_half",
    "caches_by_pointer", "mutates_its_inputs", "skips_every_other_call", "says_unsupported", "knows_the_shapes",
    "guesses_the_seed", "lazy_tensor", "patches_perf_counter", "rewrites_the_reference", "exits", "forks",
)  # fmt: skip
# All 17 take two processors ten minutes. Each is judged in tests/exploits, too.
SUBMITTED = EXPLOITS if os.environ.get("MINFER_EVERY_EXPLOIT") else EXPLOITS[2::3]


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return make_board(tmp_path / "board")


def test_a_person_may_submit_so_many_within_an_hour(board: Board) -> None:
    settings = json.loads((board.folder / "settings.json").read_text()) | {"per_hour": 2}
    (board.folder / "settings.json").write_text(json.dumps(settings))
    for minutes in (10, 70, 80, 20):
        make_entry(board, f"k{minutes}", when=time.time() - 60 * minutes)
    with pytest.raises(UserError, match="ada has submitted 2 kernels within an hour, and the limit is 2; wait 40 min"):
        submit.submit(board, "softmax", {"mine.py": HONEST}, "ada")
    assert len(board.entries()) == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [("mine.cu", "is for a GPU, and the season"), ("mine.txt", "no kernel that minfer can build")],
)
def test_what_cannot_be_judged_costs_nothing(board: Board, name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        submit.submit(board, "softmax", {name: BROKEN}, "ada")
    assert not board.entries()


@pytest.mark.parametrize(
    ("name", "source", "wanted", "device"),
    [
        ("mine.cpp", b"MINFER_SOFTMAX(softmax_mine, minfer::launch)\n", "", "cpu"),
        ("mine.cu", b"MINFER_SOFTMAX(softmax_mine, minfer::launch)\n", "", "cuda"),
        ("mine.py", b"import triton\n" + HONEST, "", "cuda"),
        ("mine.py", HONEST, "cuda", "cuda"),
    ],
)
def test_of_two_seasons_a_kernel_gets_the_one_that_it_fits(
    name: str, source: bytes, wanted: str, device: str, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_season(board, "softmax", "cuda")
    fake_runs(board, monkeypatch, {"mine": 1.0})
    with pytest.raises(UserError, match="choose one with --device"):
        submit.submit(board, "softmax", {"mine.py": HONEST + b"# either"}, "ada")
    assert submit.submit(board, "softmax", {name: source}, "ada", device=wanted)["season"] == f"softmax-{device}-1"
    (answer,) = submit.submit_each(board, "softmax", [{name: source + b"# other"}], "bob", wanted)
    assert answer["season"] == f"softmax-{device}-1"


@pytest.mark.parametrize(
    ("source", "line", "said"),
    [
        (HONEST + b"def f(:\n    pass\n", 6, "SyntaxError: invalid syntax"),
        (HONEST + b"return 1\n", 6, "SyntaxError: 'return' outside function"),
        (HONEST + b"x = 1\n  y = 2\n", 7, "IndentationError: unexpected indent"),
        (HONEST + b"x = '\xff\xfe'\n", 6, "SyntaxError: (unicode error) 'utf-8' codec can't decode byte 0xff"),
        (HONEST + b"x = 1\0\n", 0, "SyntaxError: source code string cannot contain null bytes"),
        (HONEST + b"x = " + b"(" * 5000 + b"1" + b")" * 5000, 6, "SyntaxError: too many nested parentheses"),
        (
            HONEST + b"x = " + b"-" * 100_000 + b"1\n",
            0,
            "Python's parser gives up, because the file is nested too deeply or too large",
        ),
        (
            HONEST + b"x = 1" + b"+1" * 200_000 + b"\n",
            0,
            "Python's parser gives up, because the file is nested too deeply or too large",
        ),
    ],
)
def test_a_file_that_is_no_python_is_not_run_and_costs_nothing(
    source: bytes, line: int, said: str, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = fake_runs(board, monkeypatch, {"mine": 1.0})
    answer = submit.submit(board, "softmax", {"mine.py": source}, "ada")
    assert not runs and not board.entries() and not list(board.folder.glob("objects/*/*"))
    assert (answer["verdict"], answer["submission"], answer["compiler"]["file"]) == ("compile_error", "", "mine.py")
    assert answer["compiler"]["message"].startswith(said) and answer["compiler"]["line"] == line
    text = answers.text(answer)
    where = f"line {line} of mine.py" if line else "the file mine.py"
    assert text.startswith(
        f"softmax/mine by ada: season softmax-cpu-1\nNo rank: compile_error.\n{where[0].upper()}{where[1:]}: "
    )
    assert text.endswith(
        f"; it was not run, and does not count towards the hourly limit.\nNext: correct {where}, and submit it again."
    )


def test_a_file_whose_parser_takes_too_long_is_judged(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Python needs too long to say whether there is a syntax error, the sandbox finds out."""
    runs = fake_runs(board, monkeypatch, {"mine": 1.0})
    monkeypatch.setattr(python_source, "_run", lambda *_: None)
    assert submit.submit(board, "softmax", {"mine.py": HONEST + b"def f(:\n"}, "ada")["verdict"] == "ranked"
    assert runs == [["mine"]]


def test_the_same_files_are_judged_once(board: Board) -> None:
    entry = make_entry(board, "mine")
    entry.content = submit.hash_files({"": board.keep(HONEST)})
    board.save(entry)
    with pytest.raises(UserError, match=f"the same files are submission {entry.id}, mine by ada"):
        submit.submit(board, "softmax", {"other.py": HONEST}, "bob")


def test_an_interrupted_run_is_called_that(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging.start, "run", lambda config: 130)
    with pytest.raises(UserError, match="the run was interrupted, so nothing got a rank; submit it again") as caught:
        submit.submit(board, "softmax", {"mine.py": HONEST}, "ada")
    assert caught.value.status == 130
    (entry,) = board.entries()
    assert entry.result["verdict"] == "not_judged" and "interrupted" in entry.result["message"]


def test_a_run_that_fails_is_kept_as_one_that_was_not_judged(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> judging.Judged:
        raise UserError("sbatch: the partition is down")

    monkeypatch.setattr(judging, "run", run)
    with pytest.raises(UserError, match="partition is down"):
        submit.submit(board, "softmax", {"mine.py": HONEST}, "ada")
    (entry,) = board.entries()
    assert entry.result["verdict"] == "not_judged" and "partition is down" in entry.result["message"]
    assert not entry.fingerprint  # so that it does not count


def test_rows_that_must_not_count() -> None:
    assert judging.why_refused(measured(1.0), "cpp") is None
    for words in (FASTER.format(9, 2), HELD_UP.format(3)):
        assert "could not be judged" in (judging.why_refused(measured(9.0) | {"message": words}, "cpp") or "")
    assert "not judged" in (judging.why_refused(measured(1.0) | {"guarantee": "in-process"}, "cpp") or "")
    blas, built = "libopenblas.so.0", f"{'0a' * 32}.so"
    for name, kind in ((blas, "cpp"), (built, "cpp"), (built, "python")):
        assert name in (judging.why_refused(measured(1.0) | {"libraries": [name]}, kind) or "")
    assert judging.why_refused(measured(1.0) | {"libraries": [blas]}, "python") is None


@pytest.mark.parametrize(
    ("kind", "block", "of_baseline", "reported", "counts"),
    [
        ("cpu", 900.0, 210.0, 90.0, False),
        ("cpu", 900.0, 210.0, 300.0, True),
        ("cuda", 2.1, 2.2, 1.4, True),
        ("cuda", 2.1, 2.2, 0.4, False),
    ],
)
def test_a_kernel_that_hides_its_time_has_no_rank(
    kind: str, block: float, of_baseline: float, reported: float, counts: bool
) -> None:
    """On a busy machine its row may be `unconverged` and not `dishonest`. Blocks of an honest kernel are longer than its own
    times, too, but not by much more than those of the baseline."""
    row = measured(1.0) | {"status": "unconverged", "message": LONGER.format(block, reported), "device_kind": kind}
    row |= {"judged_us": block, "judged_baseline_us": of_baseline, "cold_us": 1.1 * reported, "steady_us": reported}
    row |= {"cold_baseline_us": of_baseline / 1.5, "steady_baseline_us": of_baseline / 2}
    assert (judging.why_refused(row, "cpp") is None) == counts


@pytest.mark.parametrize("doubts", [0, 1, 2, 3])
def test_a_problem_that_could_not_be_judged_is_judged_again(
    doubts: int, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run that has only this problem, and in three runs at most."""
    runs: list[list[int]] = []

    def gather(numbers: dict[str, int], *_: object) -> judging.Judged:
        doubted = measured(2.0) | {"message": HELD_UP.format(3)}
        rows = dict.fromkeys(numbers.values(), measured(2.0))
        return fake({made[0].kernel: rows | ({2: doubted} if len(runs) <= doubts else {})})

    monkeypatch.setattr(judging.start, "run", lambda config: runs.append(list(config.draw.only)))
    monkeypatch.setattr(judging, "_gather", gather)
    made: list[Entry] = []
    monkeypatch.setattr(judging, "stage", lambda board, entries, folder: made.extend(entries) or folder)
    answer = submit.submit(board, "softmax", {"mine.py": HONEST}, "ada")
    assert runs == [[], [2], [2]][: 1 + doubts]
    assert answer["verdict"] == ("refused" if doubts == 3 else "ranked")
    if doubts == 3:
        assert "on problem 2 it could not be judged in 3 runs" in answer["message"]


def test_a_run_beside_the_holder_leaves_out_the_problem_that_counts_in_no_score(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[str, list[int]]] = []

    def gather(numbers: dict[str, int], *_: object) -> judging.Judged:
        rows = {kernel: dict.fromkeys(numbers.values(), measured(1.0 + len(runs))) for kernel in names}
        return fake(rows)

    monkeypatch.setattr(judging.start, "run", lambda config: runs.append((config.beside, list(config.draw.only))))
    monkeypatch.setattr(judging, "_gather", gather)
    names: list[str] = []
    monkeypatch.setattr(
        judging, "stage", lambda board, entries, folder: names.extend(each.kernel for each in entries) or folder
    )
    for who in ("ada", "bob"):
        submit.submit(board, "softmax", {"mine.py": HONEST + f"\n# {who}".encode()}, who)
    (_, alone), (_, also), (beside, raced) = runs
    assert alone == also == [] and beside and raced == [1, 2, 3]


def test_a_kernel_that_failed_has_no_problem_judged_again() -> None:
    busy = measured(1.0) | {"status": "error", "message": "could not be judged: it was busy"}
    wrong = measured(1.0) | {"status": "wrong", "message": "a wrong element"}
    of = lambda rows: judging._find_unjudged(fake({"mine": rows}))
    assert of({0: measured(1.0), 1: busy, 2: busy}) == [1, 2] and of({0: wrong, 1: busy}) == []


def test_the_inbox_is_fair_and_knows_people_by_their_files(board: Board) -> None:
    inbox = board.folder / "inbox" / "softmax"
    inbox.mkdir()
    who = watch.name_owner(os.getuid())
    for name in ("b.cpp", "a.cpp", "notes.txt"):
        (inbox / name).write_text(name)
        os.utime(
            inbox / name, (100, 99 if name == "a.cpp" else 100)
        )  # its owner can choose this time, so it does not count
        time.sleep(0.05)
    (inbox / "link.cpp").symlink_to(inbox / "a.cpp")
    waiting = watch.list_waiting(board, time.time() + watch.SETTLES_S)
    assert [(each.path.name, each.who, each.op) for each in waiting] == [
        ("b.cpp", who, "softmax"),
        ("a.cpp", who, "softmax"),
    ]


def test_an_answer_lies_beside_a_file_of_the_inbox(board: Board) -> None:
    inbox = board.folder / "inbox" / "softmax"
    inbox.mkdir()
    (inbox / "mine.cu").write_bytes(BROKEN)
    watch.watch(board, once=True)
    assert "is for a GPU" in json.loads((inbox / "mine.cu.json").read_text())["message"]
    assert not (inbox / "mine.cu").exists()


def test_ten_people_at_once_lose_nothing_and_the_limit_holds(board: Board) -> None:
    settings = json.loads((board.folder / "settings.json").read_text()) | {"per_hour": 3}
    (board.folder / "settings.json").write_text(json.dumps(settings))
    (season,) = list_seasons(board)

    def put(number: int) -> str:
        who, files = f"person{number % 2}", {"mine.py": HONEST + b"#" * number}
        try:
            return submit._record(board, season, files, who, "mine", "python", "", False).id
        except UserError:
            return ""

    with ThreadPoolExecutor(10) as pool:
        found = [name for name in pool.map(put, range(10)) if name]
    assert sorted(found) == sorted(entry.id for entry in board.entries()) and len(found) == 6


@pytest.fixture(scope="module")
def season(tmp_path_factory: pytest.TempPathFactory) -> tuple[Board, Season]:
    """A board with one hidden problem of softmax, and the season."""
    ops.get("softmax")
    board = Board.make(tmp_path_factory.mktemp("board"))
    (board.folder / "settings.json").write_text(json.dumps(SMALL))
    return board, open_season(board, "softmax", "cpu")


@pytest.mark.slow
def test_three_submissions_through_the_pipeline(season: tuple[Board, Season]) -> None:
    """One that does not compile, one that is wrong and one that is right, each with its answer; nothing stays behind."""
    board, _ = season
    broken = submit.submit(board, "softmax", {"mine.cpp": BROKEN}, "ada")
    assert broken["verdict"] == "compile_error" and "nowhere.h" in broken["compiler"]["message"]
    wrong = submit.submit(board, "softmax", {"zeros.py": ZEROS}, "ada")
    assert wrong["verdict"] == "wrong" and wrong["failing"]["got"] == 0
    right = submit.submit(board, "softmax", {"right.py": QUICK}, "ada", licence="MIT", keep=True)
    assert right["verdict"] in ("ranked", "refused", "not_judged"), right[
        "message"
    ]  # a busy machine may leave it unjudged
    entries = {entry.name: entry for entry in board.entries()}
    assert entries["zeros"].state == "refused" and not list((board.folder / "work").iterdir())
    rows = list(store.rows([board.folder / "rows" / f"{entries['right'].id}.parquet"]))
    assert len(rows) == 2 and {row["kernel"] for row in rows} == {entries["right"].kernel}
    assert not [path for path in board.folder.glob("*/*") if path.name.startswith("20")]  # a run's rows
    assert entries["right"].kernel not in ops.get("softmax").kernels


@pytest.mark.slow
def test_a_solution_of_a_task_through_the_pipeline(tmp_path: Path) -> None:
    """A file in KernelBench's form becomes an op with a season, and its `ModelNew` a submission."""
    task = ROOT / "tests" / "board" / "tasks" / "norm.py"
    path, _ = write_extra(task, "their_norm", tmp_path / "tasks")
    before = dict(REGISTERED)
    try:
        ops.load_file(path)
        board = Board.make(tmp_path / "board")
        (board.folder / "settings.json").write_text(json.dumps(SMALL))
        open_season(board, "their_norm", "cpu", str(path))
        solution = task.read_bytes().replace(b"class Model", b"class ModelNew")
        answer = submit.submit(board, "their_norm", {"solution.py": solution}, "ada")
        assert answer["verdict"] in ("ranked", "refused", "not_judged"), answer[
            "message"
        ]  # a busy machine may leave it unjudged
        wrong = submit.submit(board, "their_norm", {"zeros.py": b"def their_norm(y, *rest):\n    y.zero_()\n"}, "ada")
        assert wrong["verdict"] == "wrong"
    finally:
        REGISTERED.clear()
        REGISTERED.update(before)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_exploit_gets_a_rank(tmp_path: Path) -> None:
    """Exploits of tests/exploits as submissions, in one run with an honest one, whose row none of them harms: five of them, and
    with MINFER_EVERY_EXPLOIT=1 in the environment all that depend on no clock."""
    ops.get("hgemm")
    board = Board.make(tmp_path / "board")
    (board.folder / "settings.json").write_text(json.dumps(SMALL))
    open_season(board, "hgemm", "cpu")
    season, entries = find_open(board, "hgemm"), []
    wrapper = "import sys\n\nsys.path.insert(0, {root!r})\nfrom tests.exploits.{name} import {name} as hgemm\n"
    sources = {name: wrapper.format(root=str(ROOT), name=name) for name in SUBMITTED}
    sources["honest"] = "from minfer.ops.hgemm import torch_matmul as hgemm\n"
    for name, text in sources.items():
        entry = make_entry(board, name, op="hgemm", kind="python", season=season.name, state="pending", text=text)
        entries.append(dataclasses.replace(entry, files={f"{name}.py": entry.content}))
    judged = judging.run(board, season, entries)
    for entry in entries:
        submit._note(board, season, entry, judged)
    states = {entry.name: (entry.state, entry.result["message"]) for entry in entries}
    assert all(states[name][0] != JUDGED for name in SUBMITTED), states
    honest = judged.rows[entries[-1].kernel]
    assert all(row["status"] in (*store.MEASURED, "error") for row in honest.values()), states


HARMFUL = {
    "hangs": "def softmax(y, x, mask):\n    while True:\n        pass\n",
    "forks": """import os

def softmax(y, x, mask):
    for _ in range(200):
        if os.fork() == 0:
            while True:
                pass
""",
    "fills": """import os, tempfile

def softmax(y, x, mask):
    written = 0
    for folder in (os.getcwd(), tempfile.gettempdir(), "/dev/shm", "/tmp", "/var/tmp"):
        try:
            with open(os.path.join(folder, "large"), "wb") as file:
                while written < 1 << 31:
                    written += file.write(b"x" * (1 << 20))
                    file.flush()
        except OSError:
            pass
    raise MemoryError(f"wrote {written} bytes")
""",
    "lies": """from minfer import ops

def softmax(y, x, mask):
    y.zero_()

ops.get("softmax").torch("HONEST", softmax)
""",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_harmful_submission_costs_only_its_own_place(season: tuple[Board, Season]) -> None:
    """One that hangs, one that forks, one that fills the disk, and one that registers itself under another's name, in one run
    with an honest one, which comes last."""
    board, _ = season
    settings = json.loads((board.folder / "settings.json").read_text())
    (board.folder / "settings.json").write_text(json.dumps(settings | {"case_timeout_s": 30}))
    found = find_open(board, "softmax")
    honest = make_entry(board, "honest", kind="python", season=found.name, state="pending", text=QUICK.decode())
    entries = [
        make_entry(
            board, name, kind="python", season=found.name, state="pending", text=text.replace("HONEST", honest.kernel)
        )
        for name, text in HARMFUL.items()
    ]
    try:
        for entry in [*entries, honest]:
            entry.files = {f"{entry.name}.py": next(iter(entry.files.values()))}
        judged = judging.run(board, found, [*entries, honest])
        for entry in entries:
            submit._note(board, found, entry, judged)
            assert entry.state != JUDGED and entry.result["verdict"] != "not_judged", (entry.name, judged.log)
        rows = judged.table(honest.kernel)
        assert len(rows) == 2 and {row["status"] for row in rows} <= {*store.MEASURED, "error"}, rows
        assert {row["status"] for row in judged.table(entries[0].kernel)} == {"timeout"}
    finally:
        (board.folder / "settings.json").write_text(json.dumps(settings))
        for entry in [*entries, honest]:
            board.drop(entry)
