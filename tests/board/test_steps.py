"""What a submitter sees while a submission is judged."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from minfer import cli
from minfer.board import judging, steps
from minfer.board.folder import Board
from minfer.board.season import list_seasons
from minfer.board.steps import Steps
from minfer.plan.config import Config
from tests.board.faking import HONEST, fake, measured
from tests.board.making import make_board


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not until() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert until()


def tell(folder: Path, *events: dict[str, str], run: str = "1") -> None:
    file = folder / "runs" / run / "progress" / "0000.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a") as log:
        log.writelines(json.dumps(event) + "\n" for event in events)


def test_the_newest_step_of_the_newest_run_is_told(tmp_path: Path) -> None:
    shown = Steps()
    shown.say("waiting for SLURM", "beside mine by ada: ")
    assert shown.line() == "minfer: beside mine by ada: waiting for SLURM (0 s since the start)"
    shown.follow(tmp_path, {"softmax/mine/1": "problem 1"})
    assert "waiting for SLURM" in shown.line()
    tell(tmp_path, {"event": "start"}, {"event": "build", "kernel": "softmax/mine"})
    assert "compiling" in shown.line()
    tell(tmp_path, {"event": "built"}, {"event": "case", "case": "softmax/mine/1"}, {"event": "done"})
    with open(tmp_path / "runs" / "1" / "progress" / "0000.jsonl", "a") as log:
        log.write('{"event": "bui')  # a process is in the middle of a line
    assert "beside mine by ada: verifying and timing problem 1 (" in shown.line()
    tell(tmp_path, {"event": "start"}, run="2")
    assert "beside mine by ada: starting (" in shown.line()
    tell(tmp_path, {"event": "case", "case": "softmax/mine/1"}, run="2")
    assert "verifying and timing problem 1 again: it could not be judged before (" in shown.line()


def test_a_terminal_has_one_line_and_a_log_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "POLL_S", 0.01)
    terminal, log = Terminal(), io.StringIO()
    with Steps(terminal) as shown:
        shown.say("compiling")
        wait(lambda: "compiling" in terminal.getvalue())
    assert "\n" not in terminal.getvalue() and terminal.getvalue().endswith("\r\x1b[K")
    with Steps(log) as shown:
        time.sleep(0.1)
        assert not log.getvalue()
        monkeypatch.setattr(steps, "LINE_S", 0.05)
        wait(lambda: log.getvalue().count("minfer: starting (0 s since the start)\n") >= 2)


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_submission_tells_its_steps_unless_a_program_reads_its_answer(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    board = make_board(tmp_path / "board")
    (tmp_path / "mine.py").write_bytes(HONEST)
    lines: list[str] = []
    real = Steps.line
    monkeypatch.setattr(Steps, "line", lambda shown: lines.append(real(shown)) or lines[-1])
    monkeypatch.setattr(steps, "POLL_S", 0.01)
    monkeypatch.setattr(steps, "LINE_S", 0.0)

    def run(config: Config) -> int:
        (season,) = list_seasons(board)
        problem = season.draw()[2]
        op = judging._load_op(season)
        key = op.case(config.kernel[0], problem.dtype, problem.shape, problem.params).key
        tell(Path(config.runs).parent, {"event": "case", "case": key})
        if not words:
            wait(lambda: any("problem 2" in line for line in lines))
        return 0

    def gather(numbers: dict[str, int], *_: object) -> judging.Judged:
        return fake({Board(board.folder).entries()[0].kernel: dict.fromkeys(numbers.values(), measured(1.0))})

    monkeypatch.setattr(judging.start, "run", run)
    monkeypatch.setattr(judging, "_gather", gather)
    command = ["submit", "softmax", str(tmp_path / "mine.py"), "--as", "ada", "--board", str(board.folder), *words]
    monkeypatch.setattr("sys.argv", ["minfer", *command])
    assert cli.main() == 0
    said = capsys.readouterr()
    if words:
        assert not said.err and json.loads(said.out)["rank"] == 1
    else:
        assert "minfer: verifying and timing problem 2 (the last is 3) (" in said.err and "verifying" not in said.out
