"""`minfer.specialise`: what is left when a compile, a disk or a process fails; and `minfer warm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from minfer.process.threads import runs
from minfer.specialise import Specialiser, exact, warm
from tests.conftest import ROOT
from tests.specialise import specialised
from tests.specialise.adapting import call, told, until

# Faults, in processes of their own


@pytest.mark.slow
def test_machine_code_that_crashes_is_lost_with_the_background_process(
    llvm: None, caplog: pytest.LogCaptureFixture
) -> None:
    specialiser = Specialiser(specialised.CRASHES)
    outcome = specialiser.compile(exact(16)).result(60)
    assert outcome.status == "failed" and "in the phase 'verify' by SIGSEGV" in outcome.why
    (line,) = told(caplog)
    assert line.startswith("crashes 16: not used, slow goes on: the process died")
    call(specialiser, 16)


@pytest.mark.slow
def test_a_compiler_that_fails_is_one_sentence_and_a_full_disk_one_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    specialiser = Specialiser(specialised.COMPILED)
    compiler(tmp_path, monkeypatch, "x.cpp:1:1: fatal error: no such luck")
    assert specialiser.compile(exact(16)).result(60).status == "failed"
    assert told(caplog)[0].startswith("compiled 16: not used, slow goes on: ") and "no such luck" in told(caplog)[0]
    compiler(tmp_path, monkeypatch, "x.cpp:1:1: fatal error: error writing to x.o: No space left on device")
    specialiser._background.close()  # its environment is that of the first compiler
    assert [specialiser.compile(exact(n)).result(60).status for n in (17, 18, 19)] == ["full"] * 3
    full = told(caplog)[1:]
    assert len(full) == 1 and full[0].endswith("cache/minfer: No space left on device")
    specialiser.monitor(20)
    assert specialiser.check() == []
    call(specialiser, 17)
    specialiser.close()


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, says: str, sleeps: int = 0) -> None:
    """A C++ compiler that fails."""
    path = folder / f"cxx{len(list(folder.iterdir()))}"
    path.write_text(
        '#!/bin/sh\ncase "$*" in *--version*|*-print-*) echo "c++ 12"; exit;; esac\n'
        f'sleep {sleeps}\necho "{says}" >&2\nexit 1\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


SCRIPT = """
import logging, os, sys, time
logging.basicConfig(format="%(message)s")
import torch
from minfer.specialise import Policy, Specialiser, exact
from tests.specialise import specialised
"""


def script(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + text],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ),
    )


@pytest.mark.slow
def test_a_process_that_exits_says_so_and_leaves_no_compiler_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, monkeypatch, "too late", sleeps=60)
    done = script("""
specialiser = Specialiser(specialised.COMPILED)
specialiser.compile(exact(16))
background = specialiser._background
while background._process is None or background._process.phase != "compile":
    time.sleep(0.05)
print(background._process.process.pid)
""")
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == "compiled 16: stopped before it was compiled; the next process does it"
    pid = int(done.stdout)
    until(lambda: not runs(pid), 10)
    with pytest.raises(ProcessLookupError):  # nor what it had started in its session
        until(lambda: os.killpg(pid, 0), 10)


@pytest.mark.slow
def test_a_fork_keeps_the_variants_and_compiles_on_its_own(llvm: None) -> None:
    done = script("""
specialiser = Specialiser(specialised.SOUND, Policy(threshold=5, every_calls=8))
specialiser.compile(exact(16)).result(60)
specialiser.compile(exact(24))
assert not specialiser._futures[exact(24)].done()
child = os.fork()
if child == 0:
    try:
        assert specialiser.variants == [exact(16)]
        y, x = torch.empty(24), torch.randn(24)
        for _ in range(20):
            specialiser.execute(24, y, x)
        deadline = time.monotonic() + 60
        while exact(24) not in specialiser.variants and time.monotonic() < deadline:
            time.sleep(0.05)
        specialiser.execute(24, y, x)
        assert torch.equal(y, 2 * x) and exact(24) in specialiser.variants
        os._exit(0)
    except BaseException as error:
        print("child:", repr(error), file=sys.stderr, flush=True)
        os._exit(1)
assert specialiser._futures[exact(24)].result(60).faster
assert os.waitpid(child, 0)[1] == 0
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_fork_of_a_process_with_a_gpu_says_that_it_cannot_call_anything(llvm: None) -> None:
    done = script("""
specialiser = Specialiser(specialised.SOUND, Policy(threshold=5, every_calls=8))
specialiser.compile(exact(16)).result(60)
specialiser.device = torch.device("cuda", 0)  # as if it were one's
y, x = torch.empty(16), torch.randn(16)
child = os.fork()
if child == 0:
    for size in [16, 17] * 10:
        try:
            specialiser.execute(size, y, x)
        except RuntimeError as error:
            said = str(error)
        else:
            os._exit(1)
    print(said, file=sys.stderr, flush=True)
    os._exit(0 if specialiser.compile(exact(18)).cancelled() else 2)
assert os.waitpid(child, 0)[1] == 0
specialiser.execute(16, y, x)
assert torch.equal(y, 2 * x) and specialiser.variants == [exact(16)]
""")
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().startswith(
        "minfer.specialise: a forked process cannot use the CUDA context of its parent;"
    )


# `minfer warm`


def trace(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("# sizes\n\n" + "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


@pytest.mark.slow
def test_two_processes_that_warm_the_same_do_it_once(llvm: None, tmp_path: Path, cache: Path) -> None:
    path = trace(tmp_path, {"recipe": "sound", "size": 16, "calls": 3}, {"recipe": "sound", "size": 16})
    command = [sys.executable, "-m", "minfer", "warm", str(path), f"extra={specialised.__file__}"]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(process.communicate(timeout=120)[0].rsplit(", ")[-1] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert said[0].startswith("compiled in") and said[1] == "found in the build cache\n"
    assert len(list(cache.rglob("*.o"))) == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"recipe": "sound", "size": 0}', "sizes and calls must be whole numbers from 1"),
        ('{"recipe": "sound", "size": [1, 2]}', "a size of sound is of n"),
        ('{"recipe": "unheard", "size": 1}', "no recipe 'unheard'"),
        ('{"recipe": "sound"}', "'size'"),
        ("nonsense", "Expecting value"),
        ("[" * 100_000, "maximum recursion depth"),
    ],
)
def test_a_mistake_in_a_trace_is_said_with_its_line(line: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(warm.TraceError, match=f"trace.jsonl:3: .*{why}"):
        warm.sizes(trace(tmp_path, line))


def test_calls_of_a_trace_add_up(tmp_path: Path) -> None:
    lines = (
        {"recipe": "sound", "size": 16, "calls": 3},
        {"recipe": "sound", "size": 16},
        {"recipe": "sound", "size": 9},
    )
    path, expected = trace(tmp_path, *lines), {"sound": Counter({16: 4, 9: 1})}
    assert warm.sizes(path) == expected
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # the mark with which some editors begin a file
    assert warm.sizes(path) == expected


def test_a_mistake_on_the_command_line_is_a_sentence(tmp_path: Path) -> None:
    for words in ([], ["a", "b"], [str(trace(tmp_path)), "buckets=none"], [str(trace(tmp_path)), "speed=1"]):
        with pytest.raises(warm.TraceError, match="usage: minfer warm"):
            warm.main(words)


@pytest.mark.slow
def test_the_example_says_what_it_does_before_it_serves_for_a_minute(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "adaptive_serving.py")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for word, status in (("--help", 0), ("--seconds=5", 2)):
        done = subprocess.run([sys.executable, example, word], cwd=tmp_path, env=env, capture_output=True, timeout=50)
        assert done.returncode == status and not (tmp_path / "adaptive-serving.svg").exists()
