"""The judge of an untrusted kernel (`minfer.worker.judge`): what it times, copies and compares, on a CPU and as on a GPU."""

from __future__ import annotations

import contextlib
import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minfer import ops
from minfer.bench.arena import Arena, guarded_bytes
from minfer.bench.integrity import Dishonest
from minfer.bench.judged import Samples
from minfer.bench.operands import STRUCTURES, Operands
from minfer.bench.verify import same_bits
from minfer.process.death import Died
from minfer.process.freezing import Freezer
from minfer.worker import judge as worker_judge
from minfer.worker import judged_rounds, shared_operands
from minfer.worker.isolated import Runner
from minfer.worker.judged_rounds import JudgedRounds
from minfer.worker.remote_kernel import RemoteKernel, Spent
from minfer.worker.shared_operands import SharedOperands
from minfer.worker.supervisor import percent_of_peak, state

CASE = ops.get("hgemm").case("torch", "float16", {"m": 64, "n": 64, "k": 64})

REQUEST = {"device": "cpu", "extra": [], "op_files": [], "libraries": {}, "sandbox": None, "timeout_s": 60.0}
REQUEST["stated"] = state(CASE, None)


@pytest.mark.parametrize("goes_on", [False, True])
def test_the_judge_takes_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool) -> None:
    """Of an honest kernel; also as on a GPU. There a process's work goes on while the process is stopped, so the baseline is
    timed while the kernel's process does not exist, half before it and half after it. On a CPU it is timed before and beside
    it."""
    started: list[RemoteKernel] = []
    blocks: list[int] = []  # 0: of the baseline, 1: of the kernel
    beside: set[bool] = set()  # whether the kernel's process existed beside a request to the baseline's

    class Noting(RemoteKernel):
        def __init__(self, *about: Any) -> None:
            super().__init__(*about)
            started.append(self)

        def _send(self, what: str, **about: Any) -> None:
            if what == "run":
                blocks.append(started.index(self))
            if self is started[0]:
                beside.update(other.process.process.poll() is None for other in started[1:])
            super()._send(what, **about)

    monkeypatch.setattr(worker_judge, "RemoteKernel", Noting)
    monkeypatch.setitem(shared_operands.GOES_ON, "cpu", goes_on)
    reply = worker_judge.judge(REQUEST | {"case": CASE.to_dict()}, tmp_path / "log")
    found = Samples.of(reply["samples"])
    rounds = len(found.kernel)  # on a CPU there are more on a busy machine
    assert rounds == judged_rounds.ROUNDS if goes_on else rounds in range(4, 17, 4)
    assert len(found.baseline) == rounds and len(found.cold_baseline) >= 3
    counting = 1 + judged_rounds.CALIBRATIONS
    assert len(found.linked) == len(found.linked_baseline) == len(found.baseline_work) == rounds
    before = 0 if goes_on else 2 * judged_rounds.ROUNDS
    assert len(found.before) == before and blocks.count(1) == counting + 2 * rounds
    assert blocks.count(0) == counting + before + 3 * rounds and set(blocks[: counting + before]) == {0}
    assert beside == ({False} if goes_on else {True})
    after = len(blocks) - 1 - blocks[::-1].index(1)
    half = 3 * judged_rounds.ROUNDS // 2  # of the baseline's blocks, linked ones among them, and the duplicate's
    assert not goes_on or blocks[after + 1 :] == [0] * half


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_judge_refuses_what_is_only_right_on_normal_values(
    structure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a kernel whose results are zero where the inputs are not those of the other distributions."""

    class Normal(RemoteKernel):
        def __call__(self, *tensors: Any, **call: Any) -> None:
            super().__call__(*tensors, **call)
            large = tensors[1].abs() > 7  # 16 times or 8 times a normal value
            columns = int(large.any(0).sum())
            if large.any() and (columns > 16) == (structure == "tailed"):
                tensors[0].zero_()

    monkeypatch.setattr(worker_judge, "RemoteKernel", Normal)
    reply = worker_judge.judge(REQUEST | {"case": CASE.to_dict()}, tmp_path / "log")
    assert reply["row"]["status"] == "wrong" and f"({structure} inputs" in reply["row"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [False, True])
def test_another_kernel_is_timed_in_the_same_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """On a CPU in each round. As on a GPU: half before the kernel's blocks and half after them, in a process that exists only
    then. The results are checked."""
    processes: list[RemoteKernel] = []
    timed: list[tuple[str, int]] = []  # the process of each block, and how many others ran foreign code beside it
    checked: list[int] = []

    class Noting(RemoteKernel):
        def __init__(self, *about: Any) -> None:
            super().__init__(*about)
            processes.append(self)

        def _send(self, what: str, **about: Any) -> None:
            if what == "run":
                timed.append(
                    (names[self.process.process.pid], sum(p.process.process.poll() is None for p in processes[1:]))
                )
            elif self.process.process.pid not in names:
                names[self.process.process.pid] = order[len(names)]
            super()._send(what, **about)

    order = ["baseline", "other", "kernel", "other"] if goes_on else ["baseline", "kernel", "other"]
    names: dict[int, str] = {}
    monkeypatch.setattr(worker_judge, "RemoteKernel", Noting)
    monkeypatch.setitem(shared_operands.GOES_ON, "cpu", goes_on)
    check = SharedOperands.check
    monkeypatch.setattr(SharedOperands, "check", lambda self, *about: (checked.append(1), check(self, *about)))
    other = {"case": CASE.to_dict(), "stated": REQUEST["stated"]}
    reply = worker_judge.judge(REQUEST | {"case": CASE.to_dict(), "beside": other}, tmp_path / "log")
    found = Samples.of(reply["samples"])
    rounds = len(found.kernel)
    assert len(found.beside) == rounds == len(found.baseline) and len(found.baseline_lag) == 2 * rounds
    assert len(checked) >= 3 * rounds and {name for name, _ in timed} == {"baseline", "kernel", "other"}
    if goes_on:
        assert {count for name, count in timed if name == "baseline"} == {0}
        assert {count for name, count in timed if name != "baseline"} == {1}
        ran = [name for name, _ in timed if name != "baseline"]
        assert list(dict.fromkeys(itertools.pairwise(ran))) == [
            ("other", "other"), ("other", "kernel"), ("kernel", "kernel"), ("kernel", "other")
        ]  # fmt: skip


def test_a_baseline_that_fails_without_a_kernel_accuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*about: Any) -> None:
        raise Died("crashed", "the process died")

    monkeypatch.setattr(JudgedRounds, "_calibrate", fails)
    row = worker_judge.judge(REQUEST | {"case": CASE.to_dict()}, tmp_path / "log")["row"]
    assert row == {"status": "error", "message": "the baseline failed in a process of its own: the process died"}


def test_as_many_results_are_copied_whatever_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the clock includes the copies, and so does the empty request that is subtracted."""
    found: list[tuple[int, int, set[int]]] = []
    take = SharedOperands.take_snapshot

    def counting(operands: SharedOperands, calls: int, linked: bool = False) -> None:
        before = len(copies)
        take(operands, calls, linked)
        found.append((calls, len(copies) - before, set(operands.snapshot)))

    copies: list[torch.Tensor] = []

    def copy_bits(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(SharedOperands, "take_snapshot", counting)
    monkeypatch.setattr(shared_operands, "copy_bits", copy_bits)
    monkeypatch.setattr(
        JudgedRounds, "_count_calls", lambda rounds, remote: 3 if remote is rounds.kernel else rounds.operands.count
    )
    monkeypatch.setattr(worker_judge, "sets_for", lambda *about: 40)
    monkeypatch.setitem(shared_operands.GOES_ON, "cpu", True)
    monkeypatch.setitem(shared_operands.TAKE_S, "cpu", 60.0)
    reply = worker_judge.judge(REQUEST | {"case": CASE.to_dict()}, tmp_path / "log")
    assert "samples" in reply
    assert {number for _, number, _ in found} == {shared_operands.SNAPSHOT}
    assert {calls for calls, _, _ in found} == {3, 40}
    assert all(taken == {0, 1, 2} for calls, _, taken in found if calls == 3)


def test_what_counts_on_a_cpu_is_the_time_without_waits() -> None:
    known, unknown = (Spent(0.8, 0.5, 0.4, waits_known=known) for known in (True, False))
    assert (known.counted, unknown.counted) == (0.5, 0.8)
    rest = Spent(0.2, 0.1, 0.0, waits_known=True)
    assert known.per_call(rest, 2).counted == pytest.approx(0.2) and unknown.per_call(rest, 2).counted == pytest.approx(
        0.3
    )


@pytest.mark.parametrize(
    ("spread", "most_s", "rounds"),
    [
        (1.0, (600, 600), 4),
        (1.2, (600, 600), 4),
        (1.3, (600, 600), 16),
        (1.3, (0, 600), 4),
        (1.7, (0, 600), 48),
        (9, (0, 0), 4),
    ],
)
def test_further_rounds_are_taken_while_the_ratio_is_not_known(
    spread: float, most_s: tuple[float, float], rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_once(self: JudgedRounds, *names: str, count: int) -> dict[str, list[float]]:
        blocks = {name: [1e-4] * count for name in (*names, "work", "baseline_work", "lag", "baseline_lag")}
        return blocks | {"kernel": [1e-4 / spread, 1e-4 * spread] * (count // 2)}

    monkeypatch.setattr(JudgedRounds, "_run_once", run_once)
    further = tuple((*line[:2], seconds) for line, seconds in zip(worker_judge.FURTHER, most_s, strict=True))
    monkeypatch.setattr(worker_judge, "FURTHER", further)
    reply = worker_judge.judge(REQUEST | {"case": CASE.to_dict()}, tmp_path / "log")
    assert {len(reply["samples"][name]) for name in ("kernel", "baseline", "linked", "work")} == {rounds}


@pytest.mark.timing
def test_what_is_done_after_the_answer_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if stopping a process takes so long that a late thread has done its calls by then."""

    def stop_late(freezer: Freezer) -> None:
        time.sleep(0.05)
        stop(freezer)

    stop = Freezer.freeze
    monkeypatch.setattr(Freezer, "freeze", stop_late)
    extra = [str(Path(__file__).resolve().parents[1] / "exploits" / "answers_early.py")]
    case = ops.get("hgemm").case("answers_early", "float16", CASE.shape)
    row = worker_judge.judge(REQUEST | {"extra": extra, "case": case.to_dict()}, tmp_path / "log")["row"]
    assert row["status"] == "dishonest" and "went on writing its results" in row["message"]


@pytest.mark.parametrize("late", [False, True])
def test_a_large_result_that_is_finished_ahead_of_its_copy(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy of 1 MB takes so long that a thread can write a result's second half before the judge comes to it."""
    device, op = torch.device("cpu"), ops.get("hgemm")
    case = op.case("torch", "float16", {"m": 256, "n": 2048, "k": 8})
    per_set = guarded_bytes(op.operand_bytes(case), len(op.specs(case)))
    operands = SharedOperands(case, 3, Arena(3 * per_set, device), device)
    operands.draw()
    operands.write()
    results = []
    for shared in operands.sets:
        out, a, b = shared["out"], shared["a"], shared["b"]
        results.append(a @ b)
        out[:128] = results[-1][:128]
        if not late:
            out[128:] = results[-1][128:]

    def finish_and_copy(tensor: torch.Tensor) -> torch.Tensor:
        number = next(i for i, shared in enumerate(operands.sets) if shared["out"] is tensor)
        tensor[128:] = results[number][128:]
        return tensor.clone()

    monkeypatch.setattr(shared_operands, "copy_bits", finish_and_copy)
    monkeypatch.setitem(shared_operands.TAKE_S, "cpu", 60.0)
    operands.choose_pieces(3)
    operands.take_snapshot(3)
    with pytest.raises(Dishonest, match="went on writing") if late else contextlib.nullcontext():
        operands.check(3)


def test_a_block_of_a_baseline_contains_no_copy_to_its_outputs() -> None:
    """With the copy, torch's softmax took 55 us in the judge's block on an H100, and 31 us in the bench. So each kernel's
    speed-up was overstated by a factor of 1.8."""
    op = ops.get("softmax")
    case = op.case("torch", "float32", {"rows": 3, "n": 8})
    operands = Operands(op, case, 1, "normal", torch.device("cpu"))
    arena = Arena(guarded_bytes(op.operand_bytes(case), len(operands.tensors)), torch.device("cpu"))
    runner = Runner("cpu", case.to_dict(), arena.handle, [], {})
    shared = {name: arena.copy(tensor) for name, tensor in operands.tensors.items()}
    before = {name: tensor.clone() for name, tensor in shared.items()}
    runner.prepare([[arena.describe(tensor) for tensor in shared.values()]], op.call(case))
    runner.run(1)
    assert all(same_bits(shared[name], tensor) for name, tensor in before.items())
    (result,) = runner.returned
    assert torch.allclose(result.sum(-1), torch.ones(3))
    runner.call([arena.describe(tensor) for tensor in shared.values()], op.call(case))
    (written,) = operands.named("out")
    assert torch.equal(shared[written], result)


class Blocks(JudgedRounds):
    """Rounds on a GPU whose kernel and baseline take `call_s` while their calls are counted and `later_s` afterwards."""

    def __init__(self, call_s: float, later_s: float, sets: int = 400) -> None:
        self.device, self.call_s, self.later_s = torch.device("cuda"), call_s, later_s
        self.operands = SimpleNamespace(count=sets)
        self.kernel = self.baseline = self
        self.calls, self.prepared = {self: 8}, []

    def time(self, what: str, calls: int) -> Spent:
        return Spent(*[self.call_s * calls] * 3)

    def _note_strays(self, remote: object) -> None:
        pass

    def _prepare(self, remote: object, calls: int) -> None:
        self.calls[remote] = calls
        self.prepared.append(calls)

    def _run_once(self, *names: str, count: int) -> dict[str, Any]:
        return {name: [self.call_s, self.later_s, self.call_s, self.call_s] for name in names}


@pytest.mark.parametrize("names", [("kernel",), ("baseline", "duplicate")])
@pytest.mark.parametrize(
    ("call_s", "later_s", "calls"),
    [
        (5e-6, 5e-6, 400),  # eight calls say little about a short kernel
        (1e-3, 1e-3, 50),
        (0.1, 0.1, 8),
        (1e-3, 5e-6, 400),  # it was slow only while its calls were counted
    ],
)
def test_a_block_on_a_gpu_takes_50_ms_or_has_all_calls(
    call_s: float, later_s: float, calls: int, names: tuple[str, ...]
) -> None:
    rounds = Blocks(call_s, later_s)
    rounds._prepare(rounds, rounds._count_calls(rounds))
    rounds.run(*names)
    assert rounds.calls[rounds] == calls
    assert len(rounds.prepared) == 1 + (call_s != later_s)


def test_a_judged_time_on_a_gpu_is_compared_with_a_long_copy() -> None:
    """64 x 64 elements of three half matrices are 24,576 bytes; at 3,000 GB/s a copy of them takes 8.2 ns."""
    found = percent_of_peak(CASE, 0.01, {"copy_gbps": 3000.0}, "cuda")
    assert found["judged_percent_of_peak"] == pytest.approx(82, rel=0.01)
    assert percent_of_peak(CASE, 0.01, {"copy_gbps": 3000.0}, "cpu") == {} == percent_of_peak(CASE, 0.01, None, "cuda")
