"""Whatever a kernel does, its case gets a row that says so, and the next case runs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minfer import ops
from minfer.process.death import Died
from minfer.process.output import MOST_PRINTED
from minfer.rows import store
from minfer.rows.writer import StoreError
from minfer.worker.supervisor import Shard
from tests.conftest import FAST, FAULTS, ROOT, another_fork_server, launch


def test_every_fault_has_its_row_and_the_next_case_runs(run_shard):
    faults = [
        "segfaults",
        "reads_too_far",
        "zeros",
        "does_not_compile",
        "hungry",
        "raises",
        "exits",
        "killed",
        "noisy",
        "honest",
    ]
    rows = {row["kernel"]: row for row in run_shard(faults, case_timeout_s=60.0)}
    assert list(rows) == faults
    expected = {
        "segfaults": ("crashed", "SIGSEGV"),
        "reads_too_far": ("crashed", "in the phase 'verify' by SIGSEGV; it may have read or written beyond an operand"),
        "zeros": ("wrong", "all zeros"),
        "does_not_compile": ("compile_error", "does_not_compile.cpp"),
        "hungry": ("oom", "memory"),
        "raises": ("error", "these operands do not please me"),
        "exits": ("crashed", "exit status 0"),
        "killed": ("crashed", "SIGKILL"),
    }
    for kernel, (status, words) in expected.items():
        assert rows[kernel]["status"] == status, rows[kernel]["message"]
        assert words in rows[kernel]["message"]
        assert rows[kernel]["cold_us"] is None and rows[kernel]["steady_us"] is None
    for kernel in ("noisy", "honest"):
        assert rows[kernel]["status"] in store.MEASURED, rows[kernel]["message"]
        assert rows[kernel]["cold_us"] > 0 and rows[kernel]["steady_us"] > 0


def test_a_kernel_that_hangs_is_killed_and_the_next_case_runs(run_shard):
    hangs, zeros = run_shard(["hangs", "zeros"], case_timeout_s=4.0)
    assert (hangs["status"], hangs["message"]) == ("timeout", "killed after 4 s, in the phase 'verify'")
    assert hangs["cold_us"] is None and zeros["status"] == "wrong"


def test_a_child_that_cannot_start_is_reported(run_shard, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "ctypes.py").write_text("raise ImportError('no ctypes on this node')")
    with another_fork_server(), pytest.raises(Died, match="no ctypes on this node"):
        run_shard(["honest"])
    assert "no kernel could be run" in (tmp_path / "run" / "progress" / "0000.jsonl").read_text()


def limited(size: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python where files may not grow beyond a size: what a full disk or a quota looks like from inside."""
    code = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
from minfer.worker.shard import run_shard
run_shard({words[0]!r})
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_rows_that_cannot_be_written_are_rescued_or_reported(run_shard, tmp_path):
    """The results folder fills up in mid-run: the finished row stays readable, and one sentence says what happened."""
    with pytest.raises(StoreError, match="cannot write") as caught:
        (tmp_path / "results").write_text("a file where the folder should be")
        run_shard(["honest"])
    assert [row["kernel"] for row in caught.value.rows] == ["honest"]


@pytest.mark.slow
def test_full_results_folder_keeps_what_was_written(tmp_path):
    op = ops.get("hgemm")
    cases = [op.case("torch", dtype, dict.fromkeys(op.axes, 32)) for dtype in ("float16", "bfloat16")]
    shard = Shard("0000", "test", str(tmp_path / "run"), str(tmp_path / "results"), "cpu", cases, FAST, 60.0, 60.0)
    path = shard.save()
    done = limited(20_000, str(path))
    assert done.returncode == 1
    progress = (tmp_path / "run" / "progress" / "0000.jsonl").read_text()
    assert "cannot write" in progress and "File too large" in progress and "Traceback" not in progress
    assert not list((tmp_path / "results").rglob(".*"))


FILLED = """
import sys
from pathlib import Path
from minfer.worker.shard import run_shard
run, shard = Path(sys.argv[1]), Path(sys.argv[2])
(run / "shards").mkdir()
inside = run / "shards" / shard.name
inside.write_text(shard.read_text())
for attempt in range(2):
    try:
        run_shard(str(inside))
        print("attempt", attempt, "exits 0")
    except SystemExit as end:
        print("attempt", attempt, "exits", end.code)
    print((run / "progress" / "0000.jsonl").read_text(), flush=True)
    (run / "filler").unlink()
    (run / "filler").touch()
"""


@pytest.mark.slow
def test_a_runs_folder_that_fills_up_ends_the_shard_and_blames_no_kernel(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    op = ops.get("hgemm")
    cases = [op.case(name, "float16", dict.fromkeys(op.axes, 32)) for name in ("fills", "honest", "torch")]
    shard = Shard("0000", "test", str(run), str(tmp_path / "results"), "cpu", cases, FAST, 60.0, 60.0)
    shard.extra = [str(FAULTS)]
    outside = shard.save().rename(tmp_path / "0000.json")
    environment = os.environ | {"MINFER_FILLS": str(run / "filler")}
    done = in_small(run, "2m", [sys.executable, "-c", FILLED, str(run), str(outside)], environment)
    full, _, again = done.stdout.partition("attempt 1")
    why = f"cannot write to {run}: No space left on device; free space there, or set runs= to a folder on another disk"
    assert full.startswith("attempt 0 exits 1") and why in full, done
    assert '"case": "' in full and "honest" not in full
    assert again.startswith(" exits 0"), done
    rows = list(store.rows(store.files(tmp_path / "results")))
    assert [row["kernel"] for row in rows] == ["fills", "honest", "torch"]
    assert {row["status"] for row in rows} <= set(store.MEASURED)


@pytest.mark.slow
def test_a_kernel_that_never_stops_printing_fills_no_disk_and_its_row_says_so(run_shard, tmp_path):
    loud, after = run_shard(["never_silent", "noisy"], case_timeout_s=8.0)
    assert loud["status"] == "timeout" and after["status"] in store.MEASURED
    assert loud["message"] == "killed after 8 s, in the phase 'verify'; it printed more than 16 MiB"
    log = tmp_path / "run" / "logs" / "0000.log"
    assert log.stat().st_size < 1.1 * MOST_PRINTED and log.read_bytes().count(b"and on stderr") > 1


def in_small(folder: Path, size: str, command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command where a folder is a file system of this size, in a namespace in which a user may mount one."""
    mounted = ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs "$0" && exec "$@"', str(folder)]
    if not shutil.which("unshare") or subprocess.run([*mounted, "true"], capture_output=True).returncode:
        pytest.skip("users may not mount here")
    return subprocess.run([*mounted, *command], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_scratch_that_is_full_while_triton_compiles_costs_that_case_only(tmp_path):
    """In a namespace of its own, where a user may mount a file system that is too small."""
    pytest.importorskip("triton")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    op = ops.get("hgemm")
    cases = [op.case(name, "float16", dict.fromkeys(op.axes, 32)) for name in ("compiles", "honest")]
    folders = str(tmp_path / "run"), str(tmp_path / "results")
    shard = Shard("0000", "test", *folders, "cpu", cases, FAST, 60.0, 60.0, extra=[str(FAULTS)])
    code = f"from minfer.worker.shard import run_shard; run_shard({str(shard.save())!r})"
    environment = os.environ | {"TRITON_CACHE_DIR": str(scratch)}
    done = in_small(scratch, "64k", [sys.executable, "-c", code], environment)
    assert done.returncode == 0, done.stderr
    full, after = store.rows(store.files(tmp_path / "results"))
    assert (full["kernel"], full["status"]) == ("compiles", "error") and full["cold_us"] is None
    assert full["message"] == (
        f"cannot compile by Triton in {scratch}: No space left on device; free it or set cluster.scratch"
    )
    assert after["status"] in store.MEASURED, after["message"]


@pytest.mark.parametrize(
    ("folder", "complaint"),
    [
        ("/proc/minfer", "minfer: cannot write to /proc/minfer: "),
        pytest.param("/dev/null/minfer", "minfer: /dev/null is no folder; choose another", marks=pytest.mark.slow),
    ],
)
def test_a_results_folder_that_cannot_be_written_is_refused_at_once(folder: str, complaint: str):
    done = launch("+sweep=hgemm", "cluster=local", f"results={folder}")
    assert done.returncode == 2
    assert done.stderr.startswith(complaint) and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_interrupt_keeps_finished_rows_and_leaves_nothing_running(tmp_path):
    words = [
        "+sweep=hgemm",
        "cluster=local",
        "device=cpu",
        "kernel=[honest,hangs]",
        "dtype=float16",
        "shape=tiny",
        "timing=quick",
    ]
    words += [
        f"extra=[{ROOT / 'tests/faults/kernels.py'}]",
        f"results={tmp_path / 'results'}",
        f"runs={tmp_path / 'runs'}",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "minfer.launch", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        env=os.environ | {"MINFER_TEST": str(tmp_path)},
        # A shell's job in the background has SIGINT ignored, and so would all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not any("hangs" in path.read_text() for path in tmp_path.glob("runs/*/progress/*.jsonl")):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.2)
    assert {"minfer.child\n", "minfer.forksrv\n"} < set(started(tmp_path))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the whole group
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert "finished rows are kept" in out and re.search("To go on: .*minfer resubmit ", out)
    assert [row["kernel"] for row in store.rows(store.files(tmp_path / "results"))] == ["honest"]
    time.sleep(1)
    assert not started(tmp_path)


def started(folder: Path) -> list[str]:
    """The processes that have MINFER_TEST with this folder in their environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"MINFER_TEST={folder}".encode() in environment.read_bytes().split(b"\0"):
                found.append((environment.parent / "comm").read_text())
    return found


@pytest.mark.timing
@pytest.mark.gpu
def test_gpu_faults(run_shard):
    names = ["illegal_access", "honest", "spins", "hungry", "v01_naive"]
    rows = {row["kernel"]: row for row in run_shard(names, device="cuda", case_timeout_s=15.0)}
    assert (
        rows["illegal_access"]["status"] == "crashed" and "illegal memory access" in rows["illegal_access"]["message"]
    )
    assert rows["spins"]["status"] == "timeout"
    assert rows["hungry"]["status"] == "oom"
    for kernel in ("honest", "v01_naive"):
        assert rows[kernel]["status"] in store.MEASURED, rows[kernel]["message"]
