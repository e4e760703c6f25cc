"""A judged case has one budget of time, whatever its kernel waits for."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minfer import ops
from minfer.bench import judged
from minfer.worker import remote_kernel, supervisor
from minfer.worker.remote_kernel import RemoteKernel
from minfer.worker.supervisor import BUDGET, Supervisor
from tests.process.test_replies import JUDGED, a_shard

CASE = ops.get("hgemm").case("cpu_naive", "float16", {"m": 8, "n": 8, "k": 8})


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("share", [0.99, 0.3, 2.0])
def test_attempts_share_one_budget(share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel waits for this share of its timeout in its own process, and as long again when it is judged."""
    clock, one = Clock(), Supervisor(a_shard(tmp_path, [CASE]), tmp_path / "log")
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(judged, "contradiction", lambda *_: judged.Contradiction("words", 9.0, 1.0))

    def child(case: ops.Case, row: dict[str, Any], seconds: float) -> dict[str, Any]:
        clock.now += min(share * 5.0, seconds)
        return {"status": "ok"}

    def judge(case: ops.Case, left_s: float) -> dict[str, Any]:
        clock.now += min(share * 5.0, left_s)
        return JUDGED

    monkeypatch.setattr(one, "_run_child", child)
    monkeypatch.setattr(one, "_ask_judge", judge)
    row = one._run_judged(CASE, {})
    assert clock.now <= 100 + BUDGET * 5.0 + 1e-6
    said = rf"took more than {BUDGET} timeouts of 5 s, in [23] attempts" if share > 0.5 else "words"
    assert row["status"] == ("timeout" if share > 0.5 else "dishonest") and re.fullmatch(said, row["message"])
    one.end()


@pytest.mark.parametrize(
    ("statuses", "seconds", "status", "attempts", "of"),
    [
        (["unconverged", "ok"], 1.0, "ok", 2, 2),
        (["unconverged", None, "unconverged", "ok"], 1.0, "ok", 4, 4),
        (["unconverged", None, None, None], 1.0, "unconverged", 4, 1),
        (["unconverged", "ok"], 70.0, "unconverged", 1, 1),
        (["unconverged", "wrong"], 1.0, "wrong", 2, None),
        ([None] * 4, 1.0, "dishonest", 4, None),
    ],
)
def test_what_is_unconverged_is_measured_again(
    statuses: list[str | None],
    seconds: float,
    status: str,
    attempts: int,
    of: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`statuses`: by what the judge measures in each attempt; None where its times contradict those inside.
    `of`: the attempt whose times are in the row."""
    clock, one = Clock(), Supervisor(a_shard(tmp_path, [CASE]), tmp_path / "log")
    one.shard.case_timeout_s = 180.0
    left = iter(statuses)
    now: list[str | None] = []

    def child(case: ops.Case, row: dict[str, Any], seconds: float) -> dict[str, Any]:
        now.append(next(left))
        return {"status": "wrong" if now[-1] == "wrong" else "ok"}

    def judge(case: ops.Case, left_s: float) -> dict[str, Any]:
        clock.now += seconds
        return JUDGED | {"loaded": []}

    monkeypatch.setattr(supervisor, "time", clock)
    contradiction = judged.Contradiction("words", 9.0, 1.0)
    monkeypatch.setattr(judged, "contradiction", lambda *_: None if now[-1] else contradiction)
    monkeypatch.setattr(judged, "columns", lambda *_: {"status": now[-1], "judged_us": float(len(now))})
    monkeypatch.setattr(supervisor, "percent_of_peak", lambda case, us, *_: {"judged_percent_of_peak": us})
    monkeypatch.setattr(one, "_run_child", child)
    monkeypatch.setattr(one, "_ask_judge", judge)
    row = one._run_judged(CASE, {})
    assert (row["status"], len(now)) == (status, attempts)
    assert row.get("judged_us") == row.get("judged_percent_of_peak") == of
    one.end()


def test_all_requests_of_a_kernel_share_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = Clock(), []
    monkeypatch.setattr(remote_kernel, "time", clock)

    def receive(seconds: float) -> dict[str, Any]:
        asked.append(seconds)
        clock.now += seconds
        return {"done": 1.0}

    started = SimpleNamespace(send=lambda **_: None, receive=receive, phase="")
    monkeypatch.setattr(remote_kernel, "Process", lambda *_: started)
    stated = {"seed": 1, "supported": [], "deterministic": True}
    request = {"timeout_s": 5.0, "left_s": 12.0, "device": "cpu", "sandbox": None, "extra": [], "libraries": {}}
    arena: Any = SimpleNamespace(fds=[], handle={})
    kernel = RemoteKernel(CASE, request | {"stated": stated}, arena, Path("log"))
    for _ in range(4):
        kernel.ask("run", "done")
    assert asked == pytest.approx([5.0, 5.0, 2.0, 0.1])
