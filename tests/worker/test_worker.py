"""What the supervisor believes of a reply, and what it runs again."""

from __future__ import annotations

import datetime
import errno
import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from minfer import ops
from minfer.bench import RULES, rules_of, verify
from minfer.bench.timing import Timing
from minfer.fingerprint import fingerprint
from minfer.functional import library
from minfer.functional.best import Choice
from minfer.ops import Case, Op
from minfer.plan.shard import Shard
from minfer.rows import store
from minfer.worker import case_timer
from minfer.worker.child import Child
from minfer.worker.failures import describe_error, failure_columns
from minfer.worker.resume import Elsewhere, find_pending
from minfer.worker.supervisor import Machine, derive_columns
from minfer.worker.triton_times import TritonTimes

HGEMM = ops.get("hgemm")
CASE = HGEMM.case("torch", "float16", {"m": 1024, "n": 1024, "k": 1024})


MACHINE = Machine({"device": "a GPU"}, (9, 0), None)
PEAKS = {"read_gbps": 1000.0, "copy_gbps": 1000.0}


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"row": None},
        {"row": {}},
        {"row": {"status": "splendid"}},
        {"row": {"status": "ok"}},
        {"row": {"status": "ok"}, "cold": [[1.0, 1.0]], "steady": [], "watts": []},
        {"row": {"status": "ok"}, "cold": [[1.0] * 3], "steady": [], "watts": [700.0]},
        {"row": {"status": "ok"}, "cold": [[1.0] * 3], "steady": [[1.0]] * 4, "watts": [700.0, 0.0, 1.0, 1.0]},
        {"row": {"status": "wrong", "speed": 1}},
        {"row": {"status": "wrong", "verified": "all"}},
    ],
)
def test_a_reply_that_no_case_can_come_to_is_dishonest(reply: dict[str, Any]) -> None:
    row = derive_columns(CASE, reply, Timing(), PEAKS)
    assert row["status"] == "dishonest" and "malformed reply from the kernel's process" in row["message"]
    assert "\n" not in row["message"]


def test_a_cpu_without_memory_is_oom_as_a_gpu_is():
    for error in (OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryError(), torch.OutOfMemoryError("no memory")):
        assert failure_columns(error, torch.device("cpu"), lambda: None)["status"] == "oom"
    assert (
        failure_columns(OSError(errno.ENOENT, "No such file"), torch.device("cpu"), lambda: None)["status"] == "error"
    )


def test_a_reply_has_no_times_but_those_of_its_samples() -> None:
    claims = {"cold_us": 1e-3, "cold_tflops": 9e9, "cold_verdict": "faster", "steady_us": 1e-3}
    told = derive_columns(
        CASE, {"row": {"status": "ok"} | claims, "cold": [[1e-5] * 3] * 30, "steady": [], "watts": []}, Timing(), PEAKS
    )
    assert told["cold_us"] == pytest.approx(10) and told["cold_verdict"] == "tie" and told["cold_tflops"] < 1000
    assert told["steady_us"] is None
    told = derive_columns(CASE, {"row": {"status": "wrong", "message": "zeros"} | claims}, Timing(), PEAKS)
    assert told["status"] == "wrong" and all(told[name] is None for name in claims)


@pytest.mark.parametrize(("waited_s", "flags"), [(0.0, ""), (30.0, store.BUSY), (None, "")])
def test_a_row_says_that_other_programs_kept_calls_from_a_processor(
    waited_s: float | None, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the threads finds that one of them has waited for so long since the last; None: the system does not say."""
    looks = itertools.count()
    delays = {} if waited_s is None else {"7": waited_s * 1e9}
    monkeypatch.setattr(
        case_timer, "run_delays", lambda pid: {name: int(ns * next(looks)) for name, ns in delays.items()}
    )
    monkeypatch.setattr(TritonTimes, "time_autotuner", lambda *about: None)  # it would stay changed for other tests
    case = ops.get("rmsnorm").case("torch", "float32", {"tokens": 2, "hidden": 8})
    reply = Child("cpu", Timing(warmup_s=0, looks=[5], steady_block_s=0)).run(case, lambda **about: None)
    row = reply["row"]
    assert row["status"] == "ok" and row["flags"] == flags
    assert (row["cold_waited"] is None) == (waited_s is None) and ((row["cold_waited"] or 0) > 0.1) == bool(flags)


def test_what_autotuning_takes_is_added_up() -> None:
    times, triton = TritonTimes(), pytest.importorskip("triton")

    class Compiled:
        """A kernel that does nothing, as the autotuner takes one."""

        fn = staticmethod(lambda n, BLOCK: None)
        __name__ = "nothing"

        def run(self, *arguments: Any, **options: Any) -> None: ...

    def bench(call: Any, quantiles: Any) -> list[float]:
        time.sleep(0.02)
        return [1.0, 1.0, 1.0]

    class Autotuner(triton.runtime.autotuner.Autotuner):  # type: ignore[name-defined, misc]
        """So that Triton's own stays as it is for other tests."""

    times.time_autotuner(Autotuner)
    times.time_autotuner(Autotuner)  # as before the next kernel
    configs = [triton.Config({"BLOCK": size}) for size in (1, 2)]
    tuner = Autotuner(Compiled(), ["n"], configs, ["n"], None, None, do_bench=bench)
    told = []
    for n in (5, 5, 6):  # the second time its choice is known
        tuner.run(n)
        told.append(times.tuned_s)
    assert 0.04 <= told[0] == told[1] and told[1] + 0.04 <= told[2]


def test_resume_repeats_what_nobody_judged_where_judging_is_asked_for(tmp_path: Path) -> None:
    def left(**about: Any) -> list[Any]:
        shard = Shard("0000", "test", "", str(tmp_path), "cuda", [CASE], Timing(), 60, 60, resume=True, **about)
        return list(find_pending(shard, Elsewhere(shard, MACHINE), lambda **event: None))

    row = {
        "run": "old",
        "case": CASE.key,
        **CASE.to_dict(),
        "source": fingerprint(HGEMM.kernels["torch"], "sm_90a", RULES),
    }
    row |= {"timing": "default", "device": "a GPU", "status": "ok", "guarantee": "in-process"}
    row |= {"finished": datetime.datetime.now(datetime.UTC)}
    assert left() == [CASE]
    store.write(store.to_table([row]), tmp_path / "old.parquet")
    assert left() == [] and left(untrusted=True) == [CASE]
    store.write(store.to_table([row | {"guarantee": "judged, landlock"}]), tmp_path / "old.parquet")
    assert left() == [] and left(untrusted=True) == [CASE]  # a judge of other rules judged it
    row["source"] = fingerprint(HGEMM.kernels["torch"], "sm_90a", rules_of("judged, landlock"))
    store.write(store.to_table([row | {"guarantee": "judged, landlock"}]), tmp_path / "old.parquet")
    assert left() == left(untrusted=True) == []


def test_a_row_that_another_run_writes_meanwhile_is_not_measured_again(tmp_path: Path) -> None:
    cases = [HGEMM.case("torch", "float16", dict.fromkeys(HGEMM.axes, size)) for size in (16, 32, 48, 64)]
    runs = [
        Elsewhere(Shard("0000", run, "", str(tmp_path), "cuda", cases, Timing(), 60, 60, resume=True), MACHINE)
        for run in ("20260101-000000-0000", "20260101-000000-0003")
    ]
    source = fingerprint(HGEMM.kernels["torch"], "sm_90a", RULES)
    about = {"source": source, "timing": "default", "device": "a GPU", "status": "ok", "guarantee": "in-process"}
    measured: list[tuple[int, str]] = []
    for pair in zip(*(run.order(cases) for run in runs), strict=True):  # in step: both begin a case at once
        todo = []
        for index, (run, case) in enumerate(zip(runs, pair, strict=True)):
            run.refresh()
            if run.find(case) is None:
                todo.append((index, case))
        for index, case in todo:
            measured.append((index, case.key))
            row = {"run": str(index), "case": case.key, **case.to_dict(), **about}
            row["finished"] = datetime.datetime.now(datetime.UTC)
            store.write(store.to_table([row]), tmp_path / f"{len(measured)}.parquet")
    assert sorted(case for _, case in measured) == sorted(case.key for case in cases)
    assert {index for index, _ in measured} == {0, 1}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("one\ntwo"), "one"),
        (
            RuntimeError("backend='x' raised:\nAssertionError: no views\n\nmore"),
            "backend='x' raised: AssertionError: no views",
        ),
        (ValueError("one:"), "ValueError: one:"),
        (KeyError(), "KeyError: "),
    ],
)
def test_an_error_that_a_line_announces_is_said(error: Exception, said: str) -> None:
    assert describe_error(error) == said


@pytest.mark.parametrize(("taken_for_slow_s", "slow_s", "is_brief"), [(-1.0, -1.0, True), (-1.0, math.inf, False)])
def test_a_slow_kernel_is_timed_in_five_rounds_and_its_row_says_so(
    taken_for_slow_s: float, slow_s: float, is_brief: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the time of its timed calls shows that it was not slow: then it is verified and timed as any other."""
    monkeypatch.setattr("minfer.bench.verify.SLOW_S", taken_for_slow_s)
    monkeypatch.setattr("minfer.worker.child.SLOW_S", slow_s)
    monkeypatch.setattr(TritonTimes, "time_autotuner", lambda *about: None)  # it would stay changed for other tests
    case = ops.get("rmsnorm").case("torch", "float32", {"tokens": 2, "hidden": 8})
    timing = Timing(warmup_s=0, looks=[3], least_rounds=3, steady_block_s=0.001)
    phases: list[str] = []
    reply = Child("cpu", timing).run(case, lambda phase: phases.append(phase))
    row = derive_columns(case, reply, timing, None)
    assert row["status"] in store.MEASURED, row["message"]
    assert (store.SLOW in row["flags"]) == is_brief
    assert (row["cold_rounds"] == 5, row.get("steady_us") is None) == (is_brief, is_brief)
    again = taken_for_slow_s < 0 < slow_s
    assert phases == ["load", *(2 if again else 1) * ["verify", "time"]]


def test_a_process_runs_a_kernel_at_each_odd_shape_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even so, each row counts all sets of inputs, with those whose result was known."""
    monkeypatch.setattr(TritonTimes, "time_autotuner", lambda *about: None)  # it would stay changed for other tests
    op, tried, check = ops.get("rmsnorm"), list[tuple[Case, str]](), verify._verify_on

    def noted(op: Op, inputs: verify.Inputs, *rest: Any) -> verify.Checked:
        tried.append((inputs.case, inputs.distribution))
        return check(op, inputs, *rest)

    monkeypatch.setattr(verify, "_verify_on", noted)
    child = Child("cpu", Timing(warmup_s=0, looks=[3], least_rounds=3, steady_block_s=0))
    cases = [op.case("torch", "float32", {"tokens": tokens, "hidden": 8}) for tokens in (2, 4)]
    rows = [child.run(case, lambda phase: None)["row"] for case in cases]
    assert [row["status"] for row in rows] == ["ok", "ok"] and rows[0]["verified"] == rows[1]["verified"] > 5
    of_odd = [(case, how) for case, how in tried if case.shape in op.odd_shapes]
    assert len(of_odd) == len(op.calls) * len(op.odd_shapes) and all(of_odd.count(one) == 1 for one in of_odd)
    assert all((case, how) in tried for case in cases for how in ("uniform", "normal", "uneven"))


def test_the_row_of_a_function_says_which_kernel_it_chose_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "chosen", None)  # and is again after the test
    monkeypatch.setattr(TritonTimes, "time_autotuner", lambda *about: None)  # it would stay changed for other tests
    case = ops.get("hgemm").case("matmul", "float16", {"m": 19, "n": 27, "k": 35})
    timing = Timing(warmup_s=0, looks=[3], least_rounds=3, steady_block_s=0)
    row = derive_columns(case, Child("cpu", timing).run(case, lambda phase: None), timing, None)
    assert row["status"] in store.MEASURED, row["message"]
    name, _, why = row["chosen"].partition(", ")
    assert ops.get("hgemm").kernels[name].backend == "cpp" and why


def test_the_row_of_a_function_says_what_its_own_call_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verification makes other calls at the same shape, after the row's own."""
    monkeypatch.setattr(library, "chosen", None)
    monkeypatch.setattr(TritonTimes, "time_autotuner", lambda *about: None)
    monkeypatch.setattr(library, "best", lambda op, dtype, params, *about: Choice("", params.get("call", "causal")))
    library.forget()
    shape = {"batch": 1, "seq_q": 5, "seq_kv": 5, "heads": 2, "kv_heads": 1, "head_dim": 64}
    timing = Timing(warmup_s=0, looks=[3], least_rounds=3, steady_block_s=0)
    child = Child("cpu", timing)
    case = ops.get("prefill_attention").case("attention", "bfloat16", shape)
    row = derive_columns(case, child.run(case, lambda phase: None), timing, None)
    assert row["status"] in store.MEASURED, row["message"]
    assert row["chosen"].endswith(", causal")
    assert {what.rpartition(", ")[2] for what in child.choices.values()} > {"causal", "full"}
    library.forget()
