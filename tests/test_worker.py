"""What the supervisor believes of a reply, and what it runs again."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from minfer import ops
from minfer.bench.timing import Timing
from minfer.rows import store
from minfer.worker.supervisor import Shard, Supervisor

HGEMM = ops.get("hgemm")
CASE = HGEMM.case("torch", "float16", {"m": 1024, "n": 1024, "k": 1024})


def supervisor(folder: str = "", **about: Any) -> Supervisor:
    """Of a shard on a GPU that is not there."""
    made = object.__new__(Supervisor)
    made.shard = Shard("0000", "test", folder, folder, "cuda", [CASE], Timing(), 60, 60, **about)
    made.peaks = {"read_gbps": 1000.0, "copy_gbps": 1000.0}
    made.environment, made._skew_s = {"device": "a GPU"}, 0.0
    made._progress = open(Path(folder) / "progress", "a") if folder else None  # noqa: SIM115
    return made


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"row": None},
        {"row": {}},
        {"row": {"status": "splendid"}},
        {"row": {"status": "ok"}},
        {"row": {"status": "ok"}, "cold": [[1.0, 1.0]], "steady": []},
        {"row": {"status": "wrong", "speed": 1}},
        {"row": {"status": "wrong", "verified": "all"}},
    ],
)
def test_a_reply_that_no_case_can_come_to_is_dishonest(reply: dict[str, Any]) -> None:
    row = supervisor()._columns(CASE, reply)
    assert row["status"] == "dishonest" and "answered what no case can come to" in row["message"]
    assert "\n" not in row["message"]


def test_a_reply_has_no_times_but_those_of_its_samples() -> None:
    claims = {"cold_us": 1e-3, "cold_tflops": 9e9, "cold_verdict": "faster", "steady_us": 1e-3}
    told = supervisor()._columns(CASE, {"row": {"status": "ok"} | claims, "cold": [[1e-5] * 3] * 30, "steady": []})
    assert told["cold_us"] == pytest.approx(10) and told["cold_verdict"] == "tie" and told["cold_tflops"] < 1000
    assert told["steady_us"] is None
    told = supervisor()._columns(CASE, {"row": {"status": "wrong", "message": "zeros"} | claims})
    assert told["status"] == "wrong" and all(told[name] is None for name in claims)


def test_resume_repeats_what_nobody_judged_where_judging_is_asked_for(tmp_path: Path) -> None:
    def left(**about: Any) -> list[Any]:
        return list(supervisor(str(tmp_path), resume=True, **about)._todo())

    row = {"run": "old", "case": CASE.key, **CASE.to_dict(), "source": HGEMM.kernels["torch"].fingerprint()}
    row |= {"timing": "default", "device": "a GPU", "status": "ok", "guarantee": "in-process"}
    row |= {"finished": datetime.datetime.now(datetime.UTC)}
    assert left() == [CASE]
    store.write(store.to_table([row]), tmp_path / "old.parquet")
    assert left() == [] and left(untrusted=True) == [CASE]
    store.write(store.to_table([row | {"guarantee": "judged"}]), tmp_path / "old.parquet")
    assert left() == left(untrusted=True) == []
