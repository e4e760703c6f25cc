"""`minfer.specialise`: what is called often is compiled, tried, and then called."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minfer.specialise import Outcome, Policy, Span, Specialiser, exact, ranges, recipes, trial
from minfer.specialise.background import Background
from tests.specialise import specialised
from tests.specialise.adapting import (
    FASTER,
    QUIET_FASTER,
    QUIET_SLOWER,
    QUIET_TIE,
    RESTLESS,
    call,
    operands,
    steady,
    told,
    until,
)


def test_what_is_called_often_is_compiled_and_called(quick: list[int]) -> None:
    specialiser = Specialiser(specialised.SOUND, Policy(threshold=20, every_calls=32))
    for _ in range(40):
        call(specialiser, 16)
        call(specialiser, 3 + len(quick))
    until(lambda: specialiser.variants)
    assert call(specialiser, 16) == 16.0
    assert call(specialiser, 40) != 40.0  # the generic kernel
    for _ in range(100):
        call(specialiser, 16)
    specialiser.wait(10)
    assert quick.count(16) == 1


def test_nothing_is_looked_at_between_looks(quick: list[int]) -> None:
    specialiser = Specialiser(specialised.SOUND, Policy(threshold=1, every_calls=0))
    for _ in range(50):
        call(specialiser, 16)
    assert not quick and specialiser.check() == [exact(16)] and specialiser.check() == []
    assert specialiser.compile(exact(16)).result(30) == FASTER
    assert specialiser.variants == [exact(16)]


def test_a_look_each_so_many_seconds_needs_no_calls_of_execute(quick: list[int]) -> None:
    specialiser = Specialiser(specialised.SOUND, Policy(threshold=3, every_calls=0, every_s=0.05))
    for _ in range(5):
        specialiser.monitor(16)
    until(lambda: specialiser.variants == [exact(16)])
    specialiser.close()


def test_all_that_is_stopped_is_said_in_one_sentence(
    quick: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends = threading.Event()
    monkeypatch.setattr(Background, "outcome", lambda self, key: ends.wait(20) and FASTER)
    specialiser = Specialiser(specialised.SOUND)
    futures = [specialiser.compile(exact(n)) for n in (16, 17, 18)]
    specialiser.close()
    specialiser.close()
    ends.set()
    assert all(future.cancelled() for future in futures)
    assert told(caplog) == ["sound 16 and 2 more: stopped before they were compiled; the next process does it"]


def test_a_bucket_serves_all_its_sizes(quick: list[int]) -> None:
    specialiser = Specialiser(specialised.SOUND, Policy(threshold=1), ranges(8, 64))
    specialiser.compile(specialiser.buckets(20)).result(30)
    assert call(specialiser, 9) == call(specialiser, 64) == 64.0
    assert call(specialiser, 8) != 64.0 and call(specialiser, 65) != 64.0


def test_what_a_variant_is_not_for_goes_to_the_generic_kernel(llvm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Background, "outcome", lambda self, key: FASTER)
    monkeypatch.setattr("minfer.specialise.specialiser.known", lambda *about: None)
    sums, generic = Specialiser(recipes.SEQ_SUM_LLVM), []
    wide, full = torch.ones(3, 20), torch.empty(0, dtype=torch.int32)
    ragged = torch.tensor([5, 20, 1], dtype=torch.int32)
    fallback = sums.fallback
    sums.fallback = lambda *tensors: generic.append(1) or fallback(*tensors)
    sums.compile(exact(20)).result(60)
    assert sums.variants == [exact(20)]

    def first(x: torch.Tensor, seqlens: torch.Tensor) -> float:
        y = torch.zeros_like(x)
        sums.execute(20, y, x, seqlens)
        return float(y[0, 0])

    assert (first(wide, full), len(generic)) == (20.0, 0)
    assert (first(wide, ragged), first(wide.bfloat16(), full), len(generic)) == (5.0, 20.0, 2)
    with pytest.raises(
        RuntimeError, match="seq_sum: y must be contiguous in its last dimension"
    ):  # what the generic one says
        first(torch.ones(20, 3).t(), full)


def test_so_does_what_fails_a_check_of_a_variant(quick: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def checks(self: object, key: object, arch: str = "") -> object:
        return lambda y, x: torch._check(len(x) == 64, lambda: "this kernel takes n = 64")  # raises RuntimeError

    monkeypatch.setattr("minfer.specialise.recipe.Recipe.function", checks)
    specialiser = Specialiser(specialised.SOUND, buckets=ranges(64))
    specialiser.compile(specialiser.buckets(20)).result(10)
    assert specialiser.variants == [ranges(64)(20)]
    y, x = operands(20)
    specialiser.execute(20, y, x)
    assert torch.equal(y, 2 * x)


def test_the_table_is_replaced_while_others_call(quick: list[int]) -> None:
    specialiser = Specialiser(specialised.SOUND, Policy(threshold=1, budget=2, every_calls=16))
    wrong, stop = [], threading.Event()

    def caller(n: int) -> None:
        while not stop.is_set():
            found = call(specialiser, n)
            if found == found and found != n:
                wrong.append((n, found))

    threads = [threading.Thread(target=caller, args=(n,)) for n in (5, 6, 7, 8)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong and quick and len(specialiser.variants) <= 2


def test_a_variant_that_cannot_be_loaded_is_said_once_and_the_generic_kernel_serves(
    quick: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: object, key: object, arch: str = "") -> None:
        raise OSError("cannot open shared object file")

    monkeypatch.setattr("minfer.specialise.recipe.Recipe.function", fails)
    specialiser = Specialiser(specialised.SOUND, Policy(threshold=1, every_calls=8))
    for _ in range(40):
        call(specialiser, 16)
    until(lambda: specialiser.outcomes)
    assert [record.getMessage() for record in caplog.records] == [
        "sound 16: not used, slow goes on: cannot open shared object file"
    ]
    assert specialiser.variants == [] and call(specialiser, 16) != 16.0


def test_what_is_no_key_is_refused_and_the_others_are_compiled(quick: list[int]) -> None:
    specialiser = Specialiser(specialised.SOUND)
    for wrong in (16, (16,), "16"):
        with pytest.raises(TypeError, match=r"^a key is what buckets make of a size, such as exact\(128\), got "):
            specialiser.compile(wrong)  # type: ignore[arg-type]
    assert specialiser.compile(exact((16, 3))).result(10).why == "sound has keys of n, got 16x3"
    assert specialiser.compile(exact(16)).result(10) == FASTER
    specialiser.close()
    assert specialiser.compile(exact(17)).cancelled() and specialiser.compile(exact(16)).result(0) == FASTER


def test_what_is_no_size_is_said_once_and_the_others_are_counted(
    quick: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    specialiser = Specialiser(specialised.SOUND, Policy(threshold=3, every_calls=0))
    for size in (16, [16], "16", 16, None, 16):
        specialiser.monitor(size)  # type: ignore[arg-type]
    assert specialiser.check() == [exact(16)]
    specialiser.monitor([17])  # type: ignore[arg-type]
    assert specialiser.check() == []
    assert told(caplog) == ["sound: calls of what has no bucket are not counted: unhashable type: 'list'"]


def test_buckets_that_make_no_keys_do_not_end_the_thread(quick: list[int], caplog: pytest.LogCaptureFixture) -> None:
    wrong = lambda size: exact(size) if size < 100 else size
    specialiser = Specialiser(specialised.SOUND, Policy(threshold=1, every_calls=0, every_s=0.05), wrong)
    specialiser.monitor(128)
    until(lambda: told(caplog))
    specialiser.monitor(16)
    until(lambda: specialiser.variants == [exact(16)])
    assert told(caplog) == ["sound: a key is what buckets make of a size, such as exact(128), got 128"]
    specialiser.close()


def test_a_fault_of_any_kind_and_a_future_that_is_cancelled_do_not_end_the_thread(
    quick: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()

    def outcome(self: Background, key: tuple[Span, ...]) -> Outcome:
        goes_on.wait(20)
        if key == exact(16):
            raise MemoryError("no memory for a process")
        return FASTER

    monkeypatch.setattr(Background, "outcome", outcome)
    specialiser = Specialiser(specialised.SOUND)
    first, second, third = (specialiser.compile(exact(n)) for n in (16, 17, 18))
    assert second.cancel()
    goes_on.set()
    assert third.result(10) == FASTER and first.result(10) == Outcome("failed", "no memory for a process")
    assert told(caplog) == ["sound 16: not used, slow goes on: no memory for a process"]


def test_threads_that_call_at_once_start_one_thread(quick: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []

    class Slow(threading.Thread):
        def __init__(self, *about: object, **more: object) -> None:
            time.sleep(0.1)
            super().__init__(*about, **more)  # type: ignore[arg-type]
            started.append(self)

    specialiser = Specialiser(specialised.SOUND)
    callers = [threading.Thread(target=specialiser.compile, args=(exact(n),)) for n in range(10, 14)]
    monkeypatch.setattr(threading, "Thread", Slow)
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    specialiser.wait(10)
    assert len(started) == 1


def test_waiting_takes_no_longer_than_was_asked_for(quick: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Background, "outcome", lambda self, key: time.sleep(0.3) or FASTER)
    specialiser = Specialiser(specialised.SOUND)
    assert specialiser.wait(0) == []
    for n in range(10, 14):
        specialiser.compile(exact(n))
    with pytest.raises(TimeoutError):
        specialiser.wait(0.6)  # longer than for any one of them
    assert specialiser.wait(20) == [FASTER] * 4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"fallback": "fastest"}, "doubled has no kernel 'fastest', only slow, fast"),
        ({"op": "tripled"}, "there is no op 'tripled'"),
        ({"axes": ("m",)}, "`axes` and `rest` must be the axes of doubled: n"),
        ({"backend": "rust"}, "a backend is cpp or cuda or triton or llvm, not 'rust'"),
        ({"bind": None}, "`bind` belongs to the backend llvm, and to no other"),
        ({"name": "sound", "file": Path("other.py")}, f"{specialised.__file__} has one of that name"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^recipe [a-z]+: {re.escape(said)}$"):
        replace(specialised.SOUND, **({"name": "other"} | wrong))


def test_what_is_no_recipe_or_policy_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^a Specialiser takes a Recipe, got 'sound'$"):
        Specialiser("sound")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^a Specialiser takes a Policy, got 3$"):
        Specialiser(specialised.SOUND, 3)  # type: ignore[arg-type]


# The trial


@pytest.mark.parametrize(
    ("blocks", "status", "looks"),
    [
        ([QUIET_FASTER], "faster", 1),
        ([QUIET_SLOWER], "not faster", 1),
        ([QUIET_TIE], "not faster", 1),
        ([RESTLESS], "undecided", trial.REPEATS),
        ([RESTLESS, QUIET_SLOWER], "not faster", 2),
        ([RESTLESS, RESTLESS, QUIET_FASTER], "faster", 3),
    ],
)
def test_a_verdict_needs_a_quiet_control_and_is_kept(
    llvm: None, monkeypatch: pytest.MonkeyPatch, blocks: list[tuple[float, ...]], status: str, looks: int
) -> None:
    taken = steady(monkeypatch, *blocks)
    outcome = trial.tried(specialised.SOUND, exact(16))
    assert (outcome.status, len(taken)) == (status, looks)
    assert bool(outcome.why) == (status == "undecided")
    again = trial.tried(specialised.SOUND, exact(16))
    assert (again.status, again.speedup) == (status, outcome.speedup)
    assert len(taken) == (2 * looks if status == "undecided" else looks)  # found again, but for what was not decided
    assert (again.trial_s == 0.0) == (status != "undecided")


def test_what_was_not_decided_is_asked_for_again_after_twice_the_calls(
    quick: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = [Outcome("undecided", "the machine was busy"), FASTER]
    monkeypatch.setattr(Background, "outcome", lambda self, key: outcomes.pop(0))
    specialiser = Specialiser(specialised.SOUND, Policy(threshold=10, every_calls=0))

    def asked(calls: int) -> list[object]:
        for _ in range(calls):
            specialiser.monitor(16)
        return list(specialiser.check())

    caplog.set_level("INFO")
    assert asked(10) == [exact(16)]
    assert specialiser.compile(exact(16)).result(10).status == "undecided"
    assert specialiser.variants == [] and call(specialiser, 16) != 16.0
    assert told(caplog) == ["sound 16: not decided, slow goes on, tried again after more calls: the machine was busy"]
    assert asked(18) == [] and asked(1) == [exact(16)]  # one more was that of `call`
    assert specialiser.compile(exact(16)).result(10) == FASTER
    assert specialiser.variants == [exact(16)] and asked(1000) == []


def test_a_wrong_one_and_one_that_is_no_ir_are_not_used(llvm: None) -> None:
    outcome = trial.tried(specialised.WRONG, exact(16))
    assert outcome.status == "failed" and outcome.why.startswith("it is not right: ")
    assert trial.tried(specialised.BROKEN, exact(16)).why.startswith("LLVM: ")
    refused = trial.tried(recipes.SEQ_SUM_LLVM, ranges(16, 64)(20))
    assert refused == Outcome("failed", "an LLVM variant of seq_sum is for one length, not for 17 to 64")


@pytest.mark.timing
@pytest.mark.slow
def test_trials_with_the_real_clock(llvm: None) -> None:
    """Both kernels run in one thread at this size. On a busy machine there may be no verdict, but never the wrong one."""
    size = exact(1 << 14)
    assert trial.tried(specialised.SOUND, size).status in ("faster", "undecided")
    assert trial.tried(specialised.SLOWER, size).status in ("not faster", "undecided")


def test_another_device_has_another_trial(llvm: None) -> None:
    places = [
        trial.record(specialised.SOUND, exact(16), arch, name) for arch, name in (("", "a"), ("", "b"), ("sm_90a", "a"))
    ]
    places.append(trial.record(specialised.SOUND, exact(17), "", "a"))
    assert len(set(places)) == 4


def test_what_was_found_out_on_another_device_is_not_used_and_said_once(
    llvm: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steady(monkeypatch, QUIET_FASTER)
    asked: list[object] = []
    monkeypatch.setattr(Background, "outcome", lambda self, key: asked.append(key) or trial.tried(self.recipe, key))

    def compiled_on(device: str) -> list[str]:
        """What is said while two variants are compiled on a device."""
        monkeypatch.setattr("minfer.bench.device.name", lambda about: device)
        caplog.clear()
        specialiser = Specialiser(specialised.SOUND)
        for n in (16, 17):
            assert specialiser.compile(exact(n)).result(60).faster
        specialiser.close()
        return told(caplog)

    assert compiled_on("NVIDIA One") == [] and len(asked) == 2
    assert compiled_on("NVIDIA One") == [] and len(asked) == 2  # found again
    moved = "sound: verdicts from NVIDIA One are not used on NVIDIA Two; variants are tried again"
    assert compiled_on("NVIDIA Two") == [moved] and len(asked) == 4


def test_a_disk_that_fills_up_before_the_outcome_is_written_is_said(
    llvm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: str) -> None:
        raise OSError(28, "No space left on device")

    steady(monkeypatch, QUIET_FASTER)
    monkeypatch.setattr(trial, "write", full)
    assert trial.tried(specialised.SOUND, exact(24)) == Outcome("full", "No space left on device")
