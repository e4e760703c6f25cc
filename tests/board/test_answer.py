"""What a submitter is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from minfer.bench import judged
from minfer.board import answer as answers
from minfer.board import page
from minfer.board.folder import Board
from minfer.board.score import rank
from minfer.rows import store
from tests.board.making import EPYC, make_board, make_entry
from tests.conftest import ROOT

SECRET = 4711  # a size of the hidden problems
BLOCK = (answers.__doc__ or "").partition("has all:")[2].partition("Of a hidden")[0]
KEYS = re.findall(r"^ *(\w+(?:, \w+)*)(?: {2,}\S.*)?$", BLOCK, re.MULTILINE)


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return make_board(tmp_path / "board")


def row(number: int, status: str = "ok", message: str = "", speedup: float = 2.0) -> store.Row:
    size = 14 if number == 0 else SECRET
    made: dict[str, Any] = dict.fromkeys(store.SCHEMA.names)
    made |= {
        "status": status,
        "message": message,
        "shape": {"rows": size, "n": 32000},
        "dtype": "float16",
        "params": {},
    }
    made |= {"device": EPYC, "kernel": "mine"}
    if status in store.MEASURED:
        made |= {"judged_speedup": speedup, "judged_speedup_low": speedup / 1.1, "judged_speedup_high": speedup * 1.1}
        made |= {"judged_us": 4.7, "judged_baseline_us": 9.4}
    return made


def tell(board: Board, rows: dict[int, store.Row], refused: dict[int, str] | None = None) -> dict[str, Any]:
    answer = answers.begin(make_entry(board, "mine"))
    answers.describe_rows(answer, rows, refused or {}, 2)
    json.dumps(answer, allow_nan=False)
    said = "" if answer["verdict"] == "ranked" else answers.text(answer)
    assert str(SECRET) not in json.dumps(answer) + said
    return answer


def test_every_key_is_documented(board: Board) -> None:
    documented = {name for names in KEYS for name in names.split(", ")}
    assert set(answers.begin(make_entry(board, "mine"))) == documented


def test_a_hidden_problem_has_a_number_a_ratio_and_no_time(board: Board) -> None:
    answer = tell(board, {n: row(n) for n in range(3)})
    assert answer["verdict"] == "ranked" and answer["shown"]["us"] == 4.7
    assert [set(problem) for problem in answer["problems"]] == 2 * [{"number", "status", "ratio", "roof_percent"}]


def test_the_compilers_first_error_has_its_line(board: Board) -> None:
    message = "mine.cpp:36:12: error: 'retrun' was not declared in this scope"
    answer = tell(board, {n: row(n, "compile_error", message) for n in range(3)})
    assert answer["compiler"] == {
        "file": "mine.cpp",
        "line": 36,
        "message": "error: 'retrun' was not declared in this scope",
    }
    assert "retrun" in answers.text(answer)


def test_a_wrong_element_of_the_shown_problem_is_told_in_full(board: Board) -> None:
    said = "all zeros; 9 of 9 elements are wrong, the first at [0, 3]: got 0, expected 0.01234567, bound 2e-05 (normal, seed 3)"
    answer = tell(board, {0: row(0, "wrong", said), 1: row(1, "wrong", said)})
    assert answer["failing"] == {"problem": 0, "index": [0, 3], "got": 0.0, "expected": 0.01234567, "bound": 2e-05}
    assert answer["message"] == said and answer["verdict"] == "wrong"


def test_a_wrong_element_of_a_hidden_problem_tells_no_size(board: Board) -> None:
    said = (
        f"1 of 9 elements is wrong, the first at [{SECRET}, 3]: got nan, expected 0.01234567, bound 2e-05 (n={SECRET})"
    )
    answer = tell(board, {0: row(0), 1: row(1, "wrong", said), 2: row(2)})
    assert answer["failing"] == {"problem": 1, "index": None, "got": "nan", "expected": 0.0123, "bound": 2e-05}
    assert "problem 1, which is hidden" in answer["message"]


def test_what_a_kernel_says_of_a_hidden_problem_is_not_passed_on(board: Board) -> None:
    answer = tell(board, {0: row(0), 1: row(1, "error", f"RuntimeError: rows={SECRET}"), 2: row(2)})
    assert answer["verdict"] == "error" and "raised an error" in answer["message"]


def test_a_busy_machine_is_not_the_kernels_fault(board: Board) -> None:
    said = judged.BUSY.format("its blocks take 1.9 times as long")
    answer = tell(board, {0: row(0), 1: row(1, "error", said), 2: row(2)})
    assert answer["verdict"] == "not_judged" and "less busy" in answer["next"]


@pytest.mark.parametrize("number", [0, 1])
def test_a_kernel_that_takes_too_long_is_told_so(board: Board, number: int) -> None:
    rows = {n: row(n, "timeout" if n == number else "ok", "was killed at the deadline") for n in range(3)}
    assert tell(board, rows)["verdict"] == "timeout" and tell(board, rows)["next"].startswith("make it faster")


def test_the_page_for_users_names_every_key(board: Board) -> None:
    page = (ROOT / "docs" / "board.md").read_text("utf-8")
    table = page[page.index("| key | what |") :].partition("\n\n")[0]
    named = {key for line in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named == answers.begin(make_entry(board, "mine")).keys()


def test_a_run_that_ended_early_gives_no_verdict(board: Board) -> None:
    answer = tell(board, {0: row(0), 1: row(1)})
    assert answer["verdict"] == "not_judged" and "problem 2" in answer["message"]


def test_a_row_that_cannot_count_gives_no_rank(board: Board) -> None:
    answer = tell(board, {n: row(n) for n in range(3)}, {2: "loads libopenblas.so, and a kernel does its own work"})
    assert answer["verdict"] == "refused" and answer["problems"][1]["status"] == "refused"


def test_a_rank_comes_with_the_leader_and_what_differs_most(board: Board) -> None:
    leader = make_entry(
        board, "leader", 2.0, who="bob", opcodes={"vector": 80.0, "fma": 20.0}, static={"registers": 64.0}
    )
    mine = make_entry(board, "slow", 1.0, opcodes={"vector": 2.0, "fma": 15.0}, static={"registers": 64.0})
    answer = answers.begin(mine) | {"verdict": "ranked", "problems": mine.result["problems"]}
    answers.describe_place(answer, mine, rank(board.entries(), []), [])
    assert (answer["rank"], answer["of"], answer["leader"]["submission"]) == (2, 2, leader.id)
    assert answer["leader"]["ahead"]["value"] == pytest.approx(2.0)
    assert answer["differences"][0]["what"].startswith("vector instructions") and len(answer["differences"]) == 2
    said = answers.text(answer)
    assert "Rank 2 of 2" in said and "make vectors of them" in said and "2 against 80" in said


def test_a_worse_submission_of_ones_own_says_which_one_counts(board: Board) -> None:
    better, worse = make_entry(board, "mine", 2.0), make_entry(board, "mine", 1.0)
    answer = answers.begin(worse) | {"verdict": "ranked"}
    answers.describe_place(answer, worse, rank(board.entries(), []), [])
    assert answer["message"] == (
        f"your submission {better.id} of this name keeps its place, rank 1 of 1, because it has the higher score"
    )
    assert answer["rank"] is None and "No rank of its own: 1 (" in answers.text(answer)


def test_an_answer_names_where_the_baseline_beats_the_leader_and_shows_its_machine_code(board: Board) -> None:
    mine = make_entry(board, "mine", opcodes={"vector": 2.0, "calls": 11.0})
    answer = answers.begin(mine) | {"verdict": "ranked", "problems": mine.result["problems"]}
    answers.describe_place(answer, mine, rank(board.entries(), []), [])
    said = answers.text(answer)
    assert answer["code"][answers.NAMES["calls"]] == 11.0 and "calls, of all instructions (%): 11" in said
    assert "on problem 1 the baseline is 2 times as fast" in answer["next"]
    answer["problems"] = [each for each in answer["problems"] if each["number"] == 2]  # the baseline is slower there
    answers.describe_place(answer, mine, rank(board.entries(), []), [])
    assert "baseline" not in answer["next"]


def test_the_shown_problem_has_its_bandwidth_beside_that_of_a_copy(board: Board) -> None:
    shown = row(0) | {"judged_gbps": 0.313, "peaks": [("copy_gbps", 3.73), ("read_gbps", 8.4)]}
    answer = tell(board, {0: shown, 1: row(1), 2: row(2)})
    mine = board.entries()[0]
    answers.describe_place(answer, mine, rank(board.entries(), []), [])
    assert (answer["shown"]["gbps"], answer["shown"]["copy_gbps"]) == (0.313, 3.73)
    assert "0.313 GB/s; a long copy has 3.73 GB/s here" in answers.text(answer)


def test_a_ratio_whose_interval_is_wider_than_a_factor_of_three_is_no_number(board: Board) -> None:
    """In an answer and on the pages, as everywhere in the project."""
    mine = make_entry(board, "mine", 87.0, wide=1.8)
    mine.result["problems"] = [{"number": 1, "ratio": mine.score, "roof_percent": None}]
    board.save(mine)
    answer = answers.begin(mine) | {"verdict": "ranked", "problems": mine.result["problems"]}
    answers.describe_place(answer, mine, rank(board.entries(), []), [])
    said = answers.text(answer)
    assert "problem 1  unsure (48.3 to 157)" in said and "87" not in said.replace(mine.id, "")
    assert "Rank 1 of 1: between 48.3 and 157 times the baseline's speed over 1 hidden problem.\n" in said
    page.build(board, board.folder / "site")
    (season,) = (board.folder / "site").glob("softmax-*.html")
    assert season.read_text().count("unsure <span class='soft'>(48.3 to 157)</span>") >= 2


def test_every_sentence_about_an_unsure_ratio_is_english(board: Board) -> None:
    """Sentences show the interval, never `unsure times as fast`."""
    first, mine = make_entry(board, "first", 9.0, wide=1.8), make_entry(board, "mine", 1.0, wide=1.8)
    make_entry(board, "last", 0.1)
    mine.result["race"] = {"holder": first.title, "verdict": "slower", "value": 0.3, "low": 0.1, "high": 0.9}
    board.save(mine)
    said = answers.text(answers.describe_now(board, mine))
    assert "of 3: between 0.556 and 1.8 times the baseline's speed over 2 hidden problems." in said
    assert (
        "In the same rounds as the record's holder, first by ada, it was between 0.1 and 0.9 times as fast: slower."
        in said
    )
    assert "The leader, first by ada, is between 3.92 and 20.7 times as fast." in said
    page.build(board, board.folder / "site")
    html = (board.folder / "site" / "kernels" / f"{mine.id}.html").read_text()
    for sentence in (
        "<li>Between 0.556 and 1.8 times the baseline's speed.</li>",
        "it was between 0.1 and 0.9 times as fast: slower.</li>",
        "is between 3.92 and 20.7 times as fast.</li>",
    ):
        assert sentence in html
    files = [*(board.folder / "site").rglob("*.html"), *(board.folder / "site").glob("feed.xml")]
    texts = [re.sub(r"<[^>]*>", "", file.read_text().partition("<body>")[2] or file.read_text()) for file in files]
    assert not [
        text for text in (said, *texts) if re.search(r"unsure( \([^)]*\))? (times|over)|is unsure|was unsure", text)
    ]
    assert "first by ada, between 5 and 16.2 times the baseline's speed<" in files[-1].read_text()
    assert "9 times" not in files[-1].read_text()  # no number there either
