"""Processes that are stopped or frozen, with their threads and with all that they started, and go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minfer.process import cgroup, fork_server, pids
from minfer.process.death import Died
from minfer.process.freezing import MOST_MOVED_S, stop
from minfer.process.remote import Process
from minfer.process.threads import children, cpu_s, family, runs, states, waking_apart
from minfer.sandbox import Sandbox

WITHOUT_ITS_FIRST_THREAD = """
import ctypes, os, threading, time
def stay():
    if os.fork():
        print(flush=True)
        time.sleep(600)
    os.setsid()
    if os.fork():
        os._exit(0)
    while True:
        pass
threading.Thread(target=stay).start()
time.sleep(0.2)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_first_thread_ended_is_seen_and_stopped_with_all_that_it_started() -> None:
    """Its state is that of a process that has ended, which is what `ps` shows, and what it forked twice has no parent there."""
    command = [sys.executable, "-c", WITHOUT_ITS_FIRST_THREAD]
    before, others = fork_server.become_reaper(), children(os.getpid())
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    mine = lambda: children(os.getpid()) - others
    try:
        assert process.stdout
        process.stdout.readline()
        deadline = time.monotonic() + 60
        while states(process.pid)[0] != "Z" or not mine() - {process.pid}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert runs(process.pid) and process.pid in mine()
        stop(mine)
        left = family(mine())
        assert len(left) >= 2 and all(set(states(pid)) <= set("TZX") for pid in left)
    finally:
        for pid in family(mine()):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        fork_server.become_reaper(before)
        process.stdout.close()


def makes_cgroups() -> bool:
    process = subprocess.Popen(["sleep", "60"])
    try:
        cgroup.Cgroup(process.pid).kill()
    except OSError:
        return False
    finally:
        process.kill()
        process.wait()
    return True


def test_what_hides_from_its_parent_is_frozen_and_killed_with_the_cgroup(log: Path, tmp_path: Path) -> None:
    """This process adopts no orphans, and the one that is left behind is in another session."""
    if not makes_cgroups():
        pytest.skip("this user can make no cgroup of version 2")
    counted = tmp_path / "counted"
    moved = lambda: (before := counted.read_text(), time.sleep(0.2), counted.read_text() != before)[2]
    process = Process("tests.answering.leaves", log, sandbox=Sandbox("limits"))
    try:
        folder = process.freezer.cgroup.folder if process.freezer.cgroup else None
        assert folder and process.ask(60, file=str(counted)) == {"done": True}
        for _ in range(2):
            deadline = time.monotonic() + 60
            while not counted.exists() or not moved():
                assert time.monotonic() < deadline
            process.freezer.freeze()  # what is frozen can be killed, too
            assert not moved()
            process.freezer.thaw()
        process.freezer.freeze()
    finally:
        process.kill()
    assert not moved() and not folder.exists()
    left = folder.parent / f"{cgroup.PREFIX}{2**22 + 1}-00"  # of a process that never was
    left.mkdir()
    cgroup.remove_left_behind(folder.parent)
    assert not left.exists()


def test_without_cgroups_a_process_starts_as_before(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(cgroup, "own", none)
    process = Process("tests.answering.echo", log, sandbox=Sandbox("limits"))
    process.freezer.freeze()
    process.freezer.thaw()
    assert process.freezer.cgroup is None and process.ask(60, number=1) == {"number": 1}
    process.kill()


@pytest.mark.parametrize(("after_ns", "moves"), [(500_000_000, True), (1 << 40, False)])
def test_who_runs_while_it_is_stopped_is_found(
    log: Path, monkeypatch: pytest.MonkeyPatch, after_ns: int, moves: bool
) -> None:
    def none(pid: int) -> None:
        raise OSError

    monkeypatch.setattr("minfer.process.freezing.Cgroup", none)
    process = Process("tests.answering.wakes", log, sandbox=Sandbox("limits"))
    process.ask(60, after_ns=after_ns)
    process.freezer.freeze()
    time.sleep(1.0)
    if moves:
        with pytest.raises(Died, match="ran while it was stopped"):
            process.freezer.thaw()
    else:
        process.freezer.thaw()
    process.kill()


def test_what_is_frozen_uses_no_more_of_a_cpu(log: Path) -> None:
    process = Process("tests.answering.spins", log)
    process.send()
    begin, deadline = cpu_s(process.process.pid), time.monotonic() + 60
    while cpu_s(process.process.pid) < begin + 100 * MOST_MOVED_S:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.freezer.freeze()
    used = cpu_s(process.process.pid)
    time.sleep(0.05)
    assert cpu_s(process.process.pid) == pytest.approx(used, abs=MOST_MOVED_S)
    process.kill()


def test_who_is_missed_by_a_look_is_found_by_the_next(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([set()] * 3 + [{1234}] + [set()] * 100)
    process = Process("tests.answering.echo", log)
    process.ask(60)
    process.freezer.freeze()
    assert process.freezer.strays() == set()
    monkeypatch.setattr("minfer.process.freezing.children", lambda pid: next(looks))
    assert process.freezer.strays() == {1234}
    monkeypatch.undo()
    process.kill()


def test_a_frozen_cgroup_knows_all_its_processes(log: Path, tmp_path: Path) -> None:
    process = Process("tests.answering.leaves", log, sandbox=Sandbox("limits"))
    if process.freezer.cgroup is None:
        process.kill()
        pytest.skip("no cgroup can be made here")
    process.ask(60, file=str(tmp_path / "count"))
    process.freezer.freeze()
    assert len(process.freezer.strays()) in (
        1,
        2,
    )  # in another session, no child of it any more; its parent may not have ended yet
    process.kill()


@pytest.mark.parametrize("itself", [False, True])
def test_who_leaves_its_cgroup_is_found(log: Path, tmp_path: Path, itself: bool) -> None:
    """A process of root may write to the files of another cgroup if the sandbox does not hide them."""
    process = Process("tests.answering.leaves", log, sandbox=Sandbox("limits"))
    if process.freezer.cgroup is None:
        process.kill()
        pytest.skip("no cgroup can be made here")
    folder, file = process.freezer.cgroup.folder, tmp_path / "moved"
    try:
        process.ask(60, cgroup=str(folder.parent), file=str(file), itself=itself)
        deadline = time.monotonic() + 60
        while not (itself or file.exists()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if itself:
            with pytest.raises(Died, match="left the cgroup"):
                process.freezer.freeze()
        else:
            process.freezer.freeze()
            assert len(process.freezer.strays()) == 1 and process.freezer.cgroup.processes() == {process.process.pid}
        (folder / "of its own").mkdir()
    finally:
        process.kill()
    assert not folder.exists()


def test_threads_are_limited_for_root_too(log: Path) -> None:
    process = Process("tests.answering.tells", log, sandbox=Sandbox("limits"))
    folder = process.freezer.pids
    try:
        if folder is None:
            pytest.skip("this user can make no cgroup with the controller pids")
        assert int((folder / "pids.max").read_text()) == pids.MOST_THREADS
        (folder / "pids.max").write_text("20")  # and what it has is less
        assert 1 <= process.ask(60, threads=40)["threads"] <= 20
    finally:
        process.kill()
    assert not folder.exists()


def test_the_first_thread_wakes_beside_this_one_and_the_others_on_other_cpus() -> None:
    """Until they are released. What the first thread starts then may run on any CPU."""
    mine = os.sched_getaffinity(0)
    if len(mine) < 2:
        pytest.skip("needs two CPUs")
    code = (
        "import threading; threading.Thread(target=input).start(); print(end='.', flush=True); threading.Event().wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout and process.stdout.read(1) == b"."
        (other,) = {int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir()} - {process.pid}
        with waking_apart(process.pid) as release:
            (cpu,) = os.sched_getaffinity(process.pid)
            assert os.sched_getaffinity(0) == {cpu} and os.sched_getaffinity(other) == mine - {cpu}
            release()
            assert os.sched_getaffinity(process.pid) == os.sched_getaffinity(other) == mine
            assert os.sched_getaffinity(0) == {cpu}
        assert os.sched_getaffinity(0) == mine
    finally:
        process.kill()
        process.communicate()
    with waking_apart(process.pid):  # it has ended
        assert os.sched_getaffinity(0) == mine


def test_a_name_that_is_no_text_stops_nobody(log: Path) -> None:
    process = Process("tests.answering.floods", log)
    process.send()
    deadline = time.monotonic() + 60
    while b"half of" not in Path(f"/proc/{process.process.pid}/comm").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.freezer.freeze()
    with waking_apart(process.process.pid):
        process.freezer.thaw()
    process.kill()
