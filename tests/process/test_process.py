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
from minfer.process import fork_server
from minfer.process.death import Died
from minfer.process.output import MOST_PRINTED
from minfer.process.remote import Process
from minfer.process.threads import children, runs
from minfer.sandbox import Sandbox
from tests.conftest import ROOT, another_fork_server


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_requests_are_answered_and_nothing_stays_open(log: Path) -> None:
    Process("tests.answering.echo", log).kill()  # the first one starts the fork server
    before = descriptors()
    for number in range(3):
        process = Process("tests.answering.echo", log)
        assert process.ask(60, number=number) == {"number": number} and process.phase == "echoing"
        process.kill()
        process.kill()  # once more does no harm
        assert descriptors() == before


@pytest.mark.timeout(60)
def test_a_process_that_is_killed_at_once_ends(log: Path) -> None:
    """It had no session yet when the fork server told of it, so that nothing was killed, and was waited for for ever."""
    for _ in range(50):
        Process("tests.answering.echo", log).kill()


def test_a_death_says_where_it_happened_and_nothing_stays_open(log: Path) -> None:
    Process("tests.answering.echo", log).kill()
    before = descriptors()
    process = Process("tests.answering.echo", log)
    with pytest.raises(Died, match="died in the phase 'start' by exit status 3"):
        process.ask(60, die=True)
    assert descriptors() == before


def test_processes_are_forks_of_one_and_live_apart(log: Path) -> None:
    first, second = Process("tests.answering.echo", log), Process("tests.answering.echo", log)
    for process in (first, second):
        process.ask(60, number=1)
    assert len({os.getsid(p.process.pid) for p in (first, second)}) == 2
    assert children(os.getpid()) >= {first.process.pid, second.process.pid, fork_server.pid()}
    first.kill()
    assert first.process.returncode == -signal.SIGKILL and second.ask(60, number=2) == {"number": 2}
    second.kill()


@pytest.mark.slow
def test_a_fork_server_that_was_ended_is_replaced(log: Path) -> None:
    Process("tests.answering.echo", log).kill()
    old = fork_server.pid()
    assert old is not None
    os.kill(old, signal.SIGKILL)
    process = Process("tests.answering.echo", log)
    assert process.ask(60, number=1) == {"number": 1} and fork_server.pid() != old
    process.kill()


def test_another_environment_is_another_fork_server(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Process("tests.answering.echo", log).kill()
    old = fork_server.pid()
    monkeypatch.setenv("MINFER_TEST", "1")
    Process("tests.answering.echo", log).kill()
    assert fork_server.pid() != old


def test_a_fork_has_the_folder_and_the_late_variables_of_whoever_asks(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "a compiler")
    Process("tests.answering.echo", log).kill()
    old = fork_server.pid()
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    monkeypatch.delenv("CXX")
    monkeypatch.chdir(tmp_path)
    process = Process("tests.answering.echo", log)
    seen = process.ask(60, where=True)
    assert seen == {"cwd": str(tmp_path), "TRITON_CACHE_DIR": "elsewhere", "CXX": None}
    assert fork_server.pid() == old
    process.kill()


def test_a_process_that_cannot_be_started_says_why(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (log.parent / "torch.py").write_text("raise ImportError('libcudart.so.99 is missing')\n")
    monkeypatch.setenv("PYTHONPATH", f"{log.parent}:{ROOT}")
    before = descriptors()
    with (
        another_fork_server(),
        pytest.raises(Died, match=r"no process could be started: ImportError: libcudart\.so\.99"),
    ):
        Process("tests.answering.echo", log)
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
process = Process("tests.answering.echo", Path(sys.argv[1]))
process.ask(60, number=1)
from minfer.process import fork_server
print(process.process.pid, fork_server.pid(), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_nothing_outlives_who_asked(log: Path) -> None:
    asker = subprocess.Popen([sys.executable, "-c", CHAIN, str(log)], stdout=subprocess.PIPE, text=True)
    assert asker.stdout
    pids = [int(pid) for pid in asker.stdout.readline().split()]
    asker.kill()
    asker.communicate()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(runs(pid) for pid in pids):
        time.sleep(0.05)
    assert len(pids) == 2 and not any(runs(pid) for pid in pids)


def test_a_log_can_neither_be_emptied_nor_filled_from_a_sandbox(log: Path) -> None:
    log.write_text("of others\n")
    before = descriptors()
    with pytest.raises(Died, match="its last word"):
        Process("tests.answering.prints", log, sandbox=Sandbox("limits")).ask(60)
    assert log.read_bytes().startswith(b"of others\n") and MOST_PRINTED < log.stat().st_size < 1.1 * MOST_PRINTED
    assert descriptors() <= before + 2  # a fork server's, if it is the first


def test_who_reports_progress_for_ever_reaches_its_timeout(log: Path) -> None:
    process = Process("tests.answering.floods", log)
    with pytest.raises(Died, match="killed after 2 s, in the phase 'flooding'"):
        process.ask(2)
