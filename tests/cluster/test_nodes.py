"""Nodes and launchers that are not as they should be, on a real SLURM."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minfer.jobs import executors
from minfer.jobs.run import Run
from minfer.rows import store
from minfer.rows.select import newest
from minfer.run.progress import RunProgress
from tests.cluster.conftest import (
    at,
    control,
    events,
    lab_node,
    node_of,
    over,
    resubmit,
    rows,
    submit,
    until,
    words,
)  # fmt: skip
from tests.cluster.test_faults import SLOW, supervisor
from tests.conftest import ROOT

FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.fault("the launcher is killed; status from a new shell")
def test_a_run_whose_launcher_is_killed_goes_on_and_is_looked_at_from_a_new_shell(folder):
    command = [sys.executable, "-m", "minfer.launch", *words(folder, SLOW)]
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    until(lambda: list(folder.glob("runs/*/jobs.jsonl")), "the submission")
    (run,) = (folder / "runs").iterdir()
    at(run, "slow")
    launcher.kill()
    launcher.wait()
    (job,) = Run(run).jobs.values()
    subprocess.run(["scontrol", "suspend", job.id], check=True)  # for as long as a busy machine takes to look
    status = control("status", run)
    subprocess.run(["scontrol", "resume", job.id], check=True)
    assert status.returncode == 0 and "shards: 1 running; 1 of 3 rows" in status.stdout, status.stdout + status.stderr
    assert over(run).line() == "shards: 1 done; 3 of 3 rows"
    status = control("status", run)
    assert status.returncode == 0 and "3 of 3 cases" in status.stdout
    assert len(rows(folder)) == 3


@pytest.mark.fault("the image is missing on one node")
def test_an_image_that_one_node_lacks_is_named_with_the_node_and_another_node_does_the_rest(lab, folder, monkeypatch):
    """Apptainer is played by a script: what is missing here is the file."""
    image = folder / "images" / "minfer.sif"
    image.parent.mkdir()
    image.write_text("an image")
    play = f'#!/bin/bash\nwhile [ "$1" != {image} ]; do shift; done\nshift\n'
    play += f'export PATH={Path(sys.executable).parent}:$PATH\nexec "$@"\n'
    tool = executable(folder / "bin" / "apptainer", play)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    lab_node("crash", "node2")
    lab_node("hide", "node2", image.parent)
    try:
        more = ("container=apptainer", f"container.image={image}", "+cluster.flags.nodelist=node2")
        run = submit(folder, "kernel=[honest,zeros]", *more)
        why = over(run).reasons()["0000"]
        assert why.startswith(f"node node2 has no {image}; copy the container image there"), why
        assert rows(folder) == []
        resubmit(run, "cluster.flags.nodelist=node1")
        assert over(run).line() == "shards: 1 done; 2 of 2 rows"
        assert len(rows(folder)) == 2
    finally:
        lab_node("crash", "node2")
        lab_node("start", "node2")


@pytest.mark.fault("ncu hangs")
def test_an_ncu_that_hangs_costs_its_counters_and_no_row(folder, monkeypatch):
    tool = executable(folder / "bin" / "ncu", "#!/bin/sh\nexec sleep 3600\n")
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    extra = folder / "extra.py"
    extra.write_text(
        "import sys\n"
        "if sys.argv[0].endswith('profilers/host.py'):\n"  # there is no GPU, and a minute is long
        "    from minfer.profilers import ncu\n"
        "    ncu.DEVICES, ncu.START_S, ncu.CASE_S = ('cpu',), 3.0, 0.1\n"
    )
    run = submit(folder, "kernel=[torch,cpu_naive]", "profiler=ncu", f"extra=[{extra}]")
    assert over(run).line() == "shards: 1 done; 2 of 2 rows"
    found = rows(folder)
    assert len(found) == 2 and {row["status"] for row in found} <= set(store.MEASURED)
    assert all("was killed after" in row["profilers"]["ncu"] for row in found), [row["profilers"] for row in found]


@pytest.mark.fault("the clocks of two nodes are an hour apart")
def test_rows_of_a_node_whose_clock_is_an_hour_behind_are_in_order(lab, folder):
    if FAKETIME is None:
        pytest.skip("no libfaketime here")
    late = f"ALL,LD_PRELOAD={FAKETIME},FAKETIME=-3600,FAKETIME_DONT_FAKE_MONOTONIC=1,NO_FAKE_STAT=1"
    begin = datetime.datetime.now(datetime.UTC)
    first = submit(folder, "kernel=zeros", "+cluster.flags.nodelist=node1")
    over(first)
    second = submit(
        folder, "kernel=zeros", "+cluster.flags.nodelist=node2", f"cluster.setup=['export SLURM_EXPORT_ENV={late}']"
    )
    assert over(second).line() == "shards: 1 done; 1 of 1 rows"
    (warning,) = events(second, "warning")
    assert "s behind; its rows' times are set right" in warning["message"]
    assert len(rows(folder)) == 2
    table, _ = store.read(store.files(folder / "results"))
    assert newest(table)["run"].to_pylist() == [second.name]
    for time in table["finished"].to_pylist():
        assert begin < time < datetime.datetime.now(datetime.UTC)


@pytest.mark.fault("split-brain: a node is declared down, and its job goes on")
def test_a_job_that_slurm_lost_sight_of_writes_no_row_once_its_successor_runs(lab, folder):
    run = submit(folder, SLOW)
    at(run, "slow")
    name, old = node_of(run), supervisor(run)
    lab_node("cut", name)
    os.kill(old, signal.SIGSTOP)  # so that it is at its case when the other has begun
    try:
        until(lambda: len(events(run, "start")) == 2 and len(events(run, "case")) > 2, "the second job")
        os.kill(old, signal.SIGCONT)
        (job,) = Run(run).jobs.values()
        log = run / "jobs" / f"{job.id}_0_log.err"
        until(lambda: "runs this shard now" in log.read_text(), "that the first process gives way")
        assert over(run).line() == "shards: 1 done; 3 of 3 rows"
    finally:
        lab_node("start", name)
    assert {row["kernel"] for row in rows(folder)} == {"honest", "slow", "zeros"}


def test_a_job_of_two_gpus_runs_two_shards_at_once_each_on_its_own(lab, folder):
    """The GPUs are make-believe, and what they are asked to do is the CPU's."""
    more = ("kernel=slow", "dtype=[float16,bfloat16]", "cluster.max_jobs=2", "cluster.cpus=2", "cluster.memory_gb=4")
    run = submit(folder, *more)
    executors.cancel(Run(run), list(Run(run).jobs.values()))
    over(run)
    resubmit(run, "cluster.gres=gpu:l40s:2")
    jobs = Run(run).jobs
    assert len(jobs) == 2 and len({job.id for job in jobs.values()}) == 1
    assert over(run).line() == "shards: 2 done; 2 of 2 rows"
    starts = [event for event in events(run, "start") if event["gpu"] is not None]
    assert sorted(event["gpu"] for event in starts) == ["0", "1"]
    ends = [event for event in events(run, "end") if event["time"] > starts[0]["time"]]
    assert max(event["time"] for event in starts) < min(event["time"] for event in ends)
    assert len(rows(folder)) == 2


def test_a_cpu_run_asks_for_no_gpu_and_a_gpu_that_no_node_has_is_one_sentence(lab, folder):
    run = submit(folder, "kernel=zeros", "cluster.gres=gpu:1")
    over(run)
    assert [event["gpu"] for event in events(run, "start")] == [None]
    assert Run(run).request.cluster.gres is None
    with pytest.raises(Exception, match=r"no node has gpu:h100:1, only gpu:.*l40s:2; correct cluster\.gres"):
        submit(folder, "kernel=torch", "cluster.gres=gpu:h100:1", "device=cuda", "shape=squares")


def test_a_queued_job_runs_the_sources_that_it_was_submitted_with(lab, folder):
    extra = folder / "extra.py"
    text = (
        "from minfer import ops\nimport minfer\n"
        "def where(out, *inputs, **call):\n    raise RuntimeError('from ' + minfer.__file__)\n"
        "ops.get('hgemm').torch('where', where)\n"
    )
    extra.write_text(text)
    held = ("kernel=where", f"extra=[{extra}]", "+cluster.flags.hold=true")
    first, second = submit(folder, *held), submit(folder, *held)
    release = lambda run: subprocess.run(
        ["scontrol", "release", *(job.id for job in Run(run).jobs.values())], check=True
    )
    release(first)
    assert over(first).line() == "shards: 1 done; 1 of 1 rows"
    (row,) = rows(folder)
    assert row["message"] == f"from {first / 'sources' / 'minfer' / '__init__.py'}"
    extra.write_text(text + "# changed\n")
    release(second)
    assert over(second).reasons() == {"0000": f"{extra} has changed since the run was submitted; start a new run"}
    assert len(rows(folder)) == 1 and RunProgress(Run(second)).rows == 0


@pytest.mark.fault("a node on which every job fails at once takes most of a run")
def test_a_node_on_which_every_job_fails_is_named_and_left_out(lab, folder):
    """Each job takes a whole node. A job on node1 fails at once, so node1 takes one job after another."""
    setup = """cluster.setup=["[ $SLURMD_NODENAME != node1 ] || exit 3"]"""
    more = ("kernel=[zeros,raises,honest]", "dtype=[float16,bfloat16]", "cluster.max_jobs=6", "cluster.cpus=2", setup)
    run = submit(folder, *more)
    progress = over(run)
    failed = progress.failed
    status = control("status", run)
    assert f"{len(failed)} shards ({', '.join(failed)}) on node1 failed: its job ended early as FAILED" in status.stdout
    advice = f"resubmit {run.relative_to('/')} cluster.flags.exclude=node1"  # `control` is typed in /
    assert f"Note: {len(failed)} jobs failed on node1, and none got anything done there; " in status.stdout
    assert advice in status.stdout and len(failed) >= 3
    resubmit(run, "cluster.avoid=auto", "cluster.flags.begin=now+900")
    (job, *_) = {job.id: job for name, job in Run(run).jobs.items() if name in failed}
    told = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True).stdout
    assert "ExcNodeList=node1" in told
    control("cancel", run)
