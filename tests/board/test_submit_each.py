"""Several submissions in one run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from minfer import ops
from minfer.board import judging, submit
from minfer.board.folder import JUDGED, REFUSED, Board, Entry
from minfer.plan import extra
from minfer.plan.config import Config, UserError
from tests.board.faking import fake, fake_runs, measured
from tests.board.making import EPYC, make_board, make_entry

SOURCE = b"def softmax(y, x, mask):\n    y.copy_(x.softmax(-1))  # %d\n"


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return make_board(tmp_path / "board")


def sources(count: int) -> list[dict[str, bytes]]:
    return [{f"k{number}.py": SOURCE % number} for number in range(count)]


def test_one_run_judges_all_and_only_the_best_is_raced(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[list[str]] = []
    raced: list[str] = []
    scores = {"k0": 0.5, "k1": 2.0, "k2": None, "k3": 1.0}

    def run(board: Board, season: Any, entries: Sequence[Entry]) -> None:
        runs.append([entry.name for entry in entries])

    def note(board: Board, season: Any, entry: Entry, judged: Any) -> None:
        score = scores[entry.name]
        entry.state, entry.device = (JUDGED if score else REFUSED), EPYC
        entry.score = {"value": score, "low": score, "high": score} if score else {}
        entry.result = submit.answers.begin(entry) | {"verdict": "ranked" if score else "wrong"}
        board.save(entry)

    def race(board: Board, season: Any, entry: Entry) -> None:
        raced.append(entry.name)

    monkeypatch.setattr(submit.judging, "run", run)
    monkeypatch.setattr(submit, "_note", note)
    monkeypatch.setattr(submit, "_race", race)
    answers = submit.submit_each(board, "softmax", sources(4), "ada", "cpu", "MIT", True)
    assert runs == [["k0", "k1", "k2", "k3"]] and raced == ["k1"]
    assert [answer["verdict"] for answer in answers] == ["ranked", "ranked", "wrong", "ranked"]
    assert [answer["name"] for answer in answers] == ["k0", "k1", "k2", "k3"] and answers[1]["of"] == 3


def test_a_run_that_fails_leaves_none_pending(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise UserError("no partition")

    monkeypatch.setattr(submit.judging, "run", run)
    with pytest.raises(UserError, match="no partition"):
        submit.submit_each(board, "softmax", sources(2), "ada")
    assert [(entry.state, entry.result["message"]) for entry in board.entries()] == [(REFUSED, "no partition")] * 2


def test_what_cannot_be_judged_leaves_no_entry(board: Board) -> None:
    with pytest.raises(UserError, match="two of the files have the same name"):
        submit.submit_each(board, "softmax", [{"k.py": SOURCE % 1}, {"k.py": SOURCE % 2}], "ada")
    cuda = b"MINFER_SOFTMAX(softmax_k, minfer::launch)\n"
    with pytest.raises(UserError, match=r"k\.cu is not for the device of the season softmax-cpu-1"):
        submit.submit_each(board, "softmax", [{"k.cu": cuda}], "ada")
    assert not board.entries()


def test_two_kernels_of_one_run_can_be_raced(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the race they are the same submissions in the same order, and they must be registered once more."""
    registered: list[bool] = []

    def run(config: Config) -> int:
        for path in config.extra:
            extra.load(path)
        registered.append({*config.kernel} <= ops.get("softmax").kernels.keys())
        return 0

    def gather(numbers: dict[str, int], *_: Any) -> judging.Judged:
        names = [entry.kernel for entry in board.entries()]
        rows = [
            measured(speed) | {"metrics": {judging.BESIDE + end: 2.0 for end in ("", "_low", "_high")}}
            for speed in (1, 2)
        ]
        return fake({name: dict.fromkeys(numbers.values(), row) for name, row in zip(names, rows, strict=True)})

    monkeypatch.setattr(judging.start, "run", run)
    monkeypatch.setattr(judging, "_gather", gather)
    answers = submit.submit_each(board, "softmax", sources(2), "ada")
    assert registered == [True, True]
    assert [(answer["rank"], answer["message"]) for answer in answers] == [(2, ""), (1, "")]


def test_a_race_that_cannot_run_costs_no_answer(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(board, monkeypatch, {"k0": 1.0, "k1": 2.0})

    def down(*_: object) -> None:
        raise UserError("sbatch: the partition is down")

    monkeypatch.setattr(submit, "run_race", down)
    answers = submit.submit_each(board, "softmax", sources(2), "ada")
    assert [answer["verdict"] for answer in answers] == ["ranked", "ranked"]
    assert "the partition is down), so it cannot take the record yet" in answers[1]["message"]


def test_a_file_that_is_refused_costs_no_other_its_run(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the board has, one that is no kernel of the op, one for another device, and one with a syntax error."""
    known = make_entry(board, "known", text=(SOURCE % 1).decode())
    known.content = submit.hash_files(known.files)
    board.save(known)
    runs = fake_runs(board, monkeypatch, {"k0": 0.5})
    given = [*sources(2), {"other.py": b"pass\n"}, {"gpu.cu": b"MINFER_SOFTMAX(softmax_gpu, minfer::launch)\n"}]
    given.append({"broken.py": b"def softmax(y, x, mask):\n    y.copy_(x\n"})
    answers = submit.submit_each(board, "softmax", given, "ada")
    assert runs == [["k0"]] and [answer["verdict"] for answer in answers] == [
        "ranked",
        *3 * ["not_judged"],
        "compile_error",
    ]
    assert [answer["name"] for answer in answers] == ["k0", "k1", "other", "gpu", "broken"]
    assert [bool(answer["submission"]) for answer in answers] == [True, False, False, False, False]
    assert f"the same files are submission {known.id}" in answers[1]["message"]
    assert answers[1]["next"] == f"change the source, or run minfer archive show {known.id}"
    assert answers[2]["next"] == "correct it, and submit it again"
    assert "other.py has no function softmax" in answers[2]["message"]
    assert answers[3]["message"] == "gpu.cu is not for the device of the season softmax-cpu-1"
    assert (answers[4]["compiler"]["file"], answers[4]["compiler"]["line"]) == ("broken.py", 2)
    assert sorted(entry.name for entry in board.entries()) == ["k0", "known"]
    for answer in answers:
        assert submit.answers.text(answer)
    with pytest.raises(UserError, match=f"the same files are submission {known.id}"):
        submit.submit_each(board, "softmax", given[1:4], "ada")


def test_kernels_of_a_batch_beyond_the_limit_are_refused(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = json.loads((board.folder / "settings.json").read_text()) | {"per_hour": 2}
    (board.folder / "settings.json").write_text(json.dumps(settings))
    runs = fake_runs(board, monkeypatch, {f"k{number}": 1.0 for number in range(3)})
    answers = submit.submit_each(board, "softmax", sources(3), "ada")
    assert runs[0] == ["k0", "k1"] and [answer["verdict"] for answer in answers] == ["ranked", "ranked", "not_judged"]
    assert "the limit is 2" in answers[2]["message"] and re.fullmatch(
        r"wait \d+ min, and submit it again", answers[2]["next"]
    )
