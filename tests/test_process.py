"""A process seen from outside: what it says, and what is left when it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from minfer.bench.timing import Timing
from minfer.process import cgroup, fork_server
from minfer.process.output import MOST_PRINTED
from minfer.process.remote import (
    MOST_MOVED_S,
    Died,
    Process,
    _states,
    children,
    cpu_s,
    family,
    runs,
    stop,
    waking_apart,
)
from minfer.sandbox import Sandbox
from tests.conftest import ROOT

ECHO = """
import os
from minfer.process.remote import serve
serve(lambda request, say: os._exit(3) if 'die' in request else (say(phase='echoing'), request)[1])
"""


# Leaves a process behind, in another session and without a parent here, that counts in a file.
LEAVES = """
import os, time
from minfer.process.remote import serve

def answer(request, say):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in range(10**9):
            with open(request["file"], "w") as file:
                file.write(str(number))
            time.sleep(0.001)
    return {"done": True}

serve(answer)
"""


# Prints more than is kept, tries to empty its log, and dies with a last word.
PRINTS = """
import os, sys
from minfer.process.output import MOST_PRINTED
from minfer.process.remote import serve

def answer(request, say):
    for fd in (1, 2):
        try:
            os.ftruncate(fd, 0)
        except OSError:
            pass
    for _ in range(MOST_PRINTED >> 19):
        os.write(1, b"x" * (1 << 20))
    sys.exit("\\nits last word")

serve(answer)
"""

# Reports progress for ever, under a name that is not UTF-8.
FLOODS = """
import ctypes
from minfer.process.remote import serve

def answer(request, say):
    ctypes.CDLL(None).prctl(15, b"half of \\xc3", 0, 0, 0)  # PR_SET_NAME
    while True:
        say(phase="flooding")

serve(answer)
"""

# Wakes itself by a timer when it is stopped, and computes.
WAKES = """
import ctypes, platform, signal, struct, time
from minfer.process.remote import serve

def work(*_):
    end = time.perf_counter() + 0.02
    while time.perf_counter() < end:
        pass

def answer(request, say):
    create, settime = {"x86_64": (222, 223), "aarch64": (107, 110)}[platform.machine()]
    signal.signal(signal.SIGCONT, work)
    libc, timer = ctypes.CDLL(None), ctypes.c_int()
    assert libc.syscall(create, 1, struct.pack("Qii48x", 0, signal.SIGCONT, 0), ctypes.byref(timer)) == 0
    assert libc.syscall(settime, timer, 0, struct.pack("qqqq", 0, 0, *divmod(request["after_ns"], 10**9)), None) == 0
    return {"done": True}

serve(answer)
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests: another one would need another fork server."""
    folder = tmp_path_factory.mktemp("echo")
    (folder / "echo.py").write_text(ECHO)
    (folder / "leaves.py").write_text(LEAVES)
    (folder / "prints.py").write_text(PRINTS)
    (folder / "wakes.py").write_text(WAKES)
    (folder / "floods.py").write_text(FLOODS)
    return folder


@pytest.fixture
def echo(modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `echo` that answers each request with itself, and dies at `die`; returns a log for it."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(modules), str(ROOT)]))
    return tmp_path / "log"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_requests_are_answered_and_nothing_stays_open(echo: Path) -> None:
    Process("echo", echo).kill()  # the first one starts the fork server
    before = descriptors()
    for number in range(3):
        process = Process("echo", echo)
        assert process.ask(60, number=number) == {"number": number} and process.phase == "echoing"
        process.kill()
        process.kill()  # once more does no harm
        assert descriptors() == before


@pytest.mark.timeout(60)
def test_a_process_that_is_killed_at_once_ends(echo: Path) -> None:
    """It had no session yet when the fork server told of it, so that nothing was killed, and was waited for for ever."""
    for _ in range(50):
        Process("echo", echo).kill()


def test_a_death_says_where_it_happened_and_nothing_stays_open(echo: Path) -> None:
    Process("echo", echo).kill()
    before = descriptors()
    process = Process("echo", echo)
    with pytest.raises(Died, match="died in the phase 'start' by exit status 3"):
        process.ask(60, die=True)
    assert descriptors() == before


def test_processes_are_forks_of_one_and_live_apart(echo: Path) -> None:
    first, second = Process("echo", echo), Process("echo", echo)
    for process in (first, second):
        process.ask(60, number=1)
    assert len({os.getsid(p.process.pid) for p in (first, second)}) == 2
    assert children(os.getpid()) >= {first.process.pid, second.process.pid, fork_server.pid()}
    first.kill()
    assert first.process.returncode == -signal.SIGKILL and second.ask(60, number=2) == {"number": 2}
    second.kill()


@pytest.mark.slow
def test_a_fork_server_that_was_ended_is_replaced(echo: Path) -> None:
    Process("echo", echo).kill()
    old = fork_server.pid()
    assert old is not None
    os.kill(old, signal.SIGKILL)
    process = Process("echo", echo)
    assert process.ask(60, number=1) == {"number": 1} and fork_server.pid() != old
    process.kill()


def test_another_environment_is_another_fork_server(echo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Process("echo", echo).kill()
    old = fork_server.pid()
    monkeypatch.setenv("MINFER_TEST", "1")
    Process("echo", echo).kill()
    assert fork_server.pid() != old


def test_a_process_that_cannot_be_started_says_why(echo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (echo.parent / "torch.py").write_text("raise ImportError('libcudart.so.99 is missing')\n")
    monkeypatch.setenv("PYTHONPATH", f"{echo.parent}:{ROOT}")
    before = descriptors()
    with pytest.raises(Died, match=r"no process could be started: ImportError: libcudart\.so\.99"):
        Process("echo", echo)
    assert descriptors() <= before


def test_a_judge_has_a_fork_server_of_its_own_from_the_start(tmp_path: Path) -> None:
    """What it starts is a fork, too; and nothing that it starts is taken for what a kernel left behind."""
    judge = Process("minfer.worker.judge", tmp_path / "log")
    deadline = time.monotonic() + 60
    while not (found := children(judge.process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    (own,) = found
    while os.getsid(own) != own and time.monotonic() < deadline:  # it has just been forked
        time.sleep(0.05)
    assert os.getsid(own) == own
    called = [Path(f"/proc/{pid}/comm").read_text() for pid in (own, judge.process.pid)]
    assert called == ["minfer.forksrv\n", "minfer.judge\n"]
    judge.kill()
    while runs(own) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(own)


UNTOUCHED = """
import torch
def touched(*_): raise AssertionError("touched a device, of which nothing survives a fork")
for name in ("_cuda_init", "_cuda_getDeviceCount"):
    if hasattr(torch._C, name): setattr(torch._C, name, touched)
import importlib, sys
from minfer.process import fork_server
for module in fork_server.PRELOADED: importlib.import_module(module)
assert not torch.cuda.is_initialized() and "triton" not in sys.modules
"""


@pytest.mark.slow
def test_what_the_fork_server_imports_touches_no_device() -> None:
    subprocess.run([sys.executable, "-c", UNTOUCHED], cwd=ROOT, check=True)


@pytest.mark.gpu
def test_the_fork_server_opens_no_gpu_and_its_fork_can(tmp_path: Path) -> None:
    child = Process("minfer.worker.child", tmp_path / "log")
    assert child.ask(120, device="cuda", timing=asdict(Timing()))["capability"]

    def gpus(pid: int | None) -> list[str]:
        opened = (os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())  # noqa: PTH115
        return [name for name in opened if name.startswith("/dev/nvidia")]

    assert gpus(child.process.pid) and not gpus(fork_server.pid())
    child.kill()


CHAIN = """
import os, sys, time
from pathlib import Path
from minfer.process.remote import Process
process = Process("echo", Path(sys.argv[1]))
process.ask(60, number=1)
from minfer.process import fork_server
print(process.process.pid, fork_server.pid(), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_nothing_outlives_who_asked(echo: Path) -> None:
    asker = subprocess.Popen([sys.executable, "-c", CHAIN, str(echo)], stdout=subprocess.PIPE, text=True)
    assert asker.stdout
    pids = [int(pid) for pid in asker.stdout.readline().split()]
    asker.kill()
    asker.communicate()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(runs(pid) for pid in pids):
        time.sleep(0.05)
    assert len(pids) == 2 and not any(runs(pid) for pid in pids)


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
        while _states(process.pid)[0] != "Z" or not mine() - {process.pid}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert runs(process.pid) and process.pid in mine()
        stop(mine)
        left = family(mine())
        assert len(left) >= 2 and all(set(_states(pid)) <= set("TZX") for pid in left)
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


def test_what_hides_from_its_parent_is_frozen_and_killed_with_the_cgroup(echo: Path, tmp_path: Path) -> None:
    """This process adopts no orphans, and the one that is left behind is in another session."""
    if not makes_cgroups():
        pytest.skip("this user can make no cgroup of version 2")
    counted = tmp_path / "counted"
    moved = lambda: (before := counted.read_text(), time.sleep(0.2), counted.read_text() != before)[2]
    process = Process("leaves", echo, sandbox=Sandbox("limits"))
    try:
        folder = process._cgroup.folder if process._cgroup else None
        assert folder and process.ask(60, file=str(counted)) == {"done": True}
        for _ in range(2):
            deadline = time.monotonic() + 60
            while not counted.exists() or not moved():
                assert time.monotonic() < deadline
            process.freeze()  # what is frozen can be killed, too
            assert not moved()
            process.thaw()
        process.freeze()
    finally:
        process.kill()
    assert not moved() and not folder.exists()
    left = folder.parent / f"{cgroup.PREFIX}{2**22 + 1}-00"  # of a process that never was
    left.mkdir()
    cgroup._remove_left_behind(folder.parent)
    assert not left.exists()


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


def test_without_cgroups_a_process_starts_as_before(echo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(cgroup, "own", none)
    process = Process("echo", echo, sandbox=Sandbox("limits"))
    process.freeze()
    process.thaw()
    assert process._cgroup is None and process.ask(60, number=1) == {"number": 1}
    process.kill()


def test_a_log_can_neither_be_emptied_nor_filled_from_a_sandbox(echo: Path) -> None:
    echo.write_text("of others\n")
    before = descriptors()
    with pytest.raises(Died, match="its last word"):
        Process("prints", echo, sandbox=Sandbox("limits")).ask(60)
    assert echo.read_bytes().startswith(b"of others\n") and MOST_PRINTED < echo.stat().st_size < 1.1 * MOST_PRINTED
    assert descriptors() <= before + 2  # a fork server's, if it is the first


def test_who_reports_progress_for_ever_reaches_its_timeout(echo: Path) -> None:
    process = Process("floods", echo)
    with pytest.raises(Died, match="killed after 2 s, in the phase 'flooding'"):
        process.ask(2)


def test_a_name_that_is_no_text_stops_nobody(echo: Path) -> None:
    process = Process("floods", echo)
    process.send()
    deadline = time.monotonic() + 60
    while b"half of" not in Path(f"/proc/{process.process.pid}/comm").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.freeze()
    with waking_apart(process.process.pid):
        process.thaw()
    process.kill()


@pytest.mark.parametrize(("after_ns", "moves"), [(500_000_000, True), (1 << 40, False)])
def test_who_runs_while_it_is_stopped_is_found(
    echo: Path, monkeypatch: pytest.MonkeyPatch, after_ns: int, moves: bool
) -> None:
    def none(pid: int) -> None:
        raise OSError

    monkeypatch.setattr("minfer.process.remote.Cgroup", none)
    process = Process("wakes", echo, sandbox=Sandbox("limits"))
    process.ask(60, after_ns=after_ns)
    process.freeze()
    time.sleep(1.0)
    if moves:
        with pytest.raises(Died, match="ran while it was stopped"):
            process.thaw()
    else:
        process.thaw()
    process.kill()


def test_what_is_frozen_uses_no_more_of_a_cpu(echo: Path) -> None:
    process = Process("echo", echo)
    process.ask(60)
    process.freeze()
    used = cpu_s(process.process.pid)
    time.sleep(0.05)
    assert cpu_s(process.process.pid) == pytest.approx(used, abs=MOST_MOVED_S)
    process.kill()


def test_who_is_missed_by_a_look_is_found_by_the_next(echo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([set()] * 3 + [{1234}] + [set()] * 100)
    process = Process("echo", echo)
    process.ask(60)
    process.freeze()
    assert process.strays() == set()
    monkeypatch.setattr("minfer.process.remote.children", lambda pid: next(looks))
    assert process.strays() == {1234}
    monkeypatch.undo()
    process.kill()


def test_a_frozen_cgroup_knows_all_its_processes(echo: Path, tmp_path: Path) -> None:
    process = Process("leaves", echo, sandbox=Sandbox("limits"))
    if process._cgroup is None:
        process.kill()
        pytest.skip("no cgroup can be made here")
    process.ask(60, file=str(tmp_path / "count"))
    process.freeze()
    assert len(process.strays()) in (
        1,
        2,
    )  # in another session, no child of it any more; its parent may not have ended yet
    process.kill()
