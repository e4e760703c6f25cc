"""What a user sees of jobs that wait, are held, suspended, refused or submitted twice."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from minfer.jobs.run import JOBS, Run
from minfer.plan.config import UserError
from minfer.rows import store
from tests.cluster.conftest import LAB, at, control, over, resubmit, rows, submit, until, words
from tests.conftest import ROOT, launch


def squeue(run, form: str) -> list[str]:
    """What squeue says of the jobs of a run."""
    ids = ",".join(job.id for job in Run(run).all_jobs)
    told = subprocess.run(["squeue", "--noheader", f"--jobs={ids}", f"--format={form}"], capture_output=True, text=True)
    return told.stdout.split()


def test_a_job_that_will_not_start_by_itself_is_named_with_its_reason(folder):
    run = submit(folder, "kernel=torch", "+cluster.flags.hold=true")
    until(lambda: squeue(run, "%r") == ["JobHeldUser"], "the hold")
    status = control("status", run)
    assert "shards: 1 queued (JobHeldUser); 0 of 1 rows" in status.stdout, status.stdout
    assert "Note: 1 jobs wait as JobHeldUser: it is held; release it with scontrol release." in status.stdout
    assert "1 jobs cancelled" in control("cancel", run).stdout


@pytest.mark.fault("jobs ask for more than any node of the partition has, and wait for ever")
def test_a_job_that_no_node_can_run_is_named_and_runs_when_it_asks_for_less(lab, folder, monkeypatch):
    """As on a site where preflight cannot know it."""
    monkeypatch.setattr("minfer.jobs.partition.check_asked", lambda cluster: None)
    run = submit(folder, "kernel=torch", "cluster.cpus=8", "cluster.memory_gb=64")
    until(lambda: squeue(run, "%r") == ["PartitionConfig"], "the reason")
    status = control("status", run)
    assert "Note: 1 jobs wait as PartitionConfig: no node of the partition has what a job asks for;" in status.stdout
    assert "1 jobs cancelled" in control("cancel", run).stdout
    over(run)
    resubmit(run, "cluster.cpus=1", "cluster.memory_gb=2")
    over(run)
    assert len(rows(folder)) == 1


@pytest.fixture
def memory_kept(lab) -> Iterator[None]:
    """SLURM ends jobs that take more memory than they asked for, as most sites have it."""
    conf = LAB / "etc" / "slurm.conf"
    before = conf.read_text()
    conf.write_text(f"{before}JobAcctGatherParams=OverMemoryKill\n")
    subprocess.run(["scontrol", "reconfigure"], check=True)
    yield
    conf.write_text(before)
    subprocess.run(["scontrol", "reconfigure"], check=True)


@pytest.mark.fault("a job takes more memory than it asked for, and SLURM ends it")
def test_a_job_that_ran_out_of_memory_says_so_and_runs_with_more(memory_kept, folder):
    eats = """cluster.setup=["python3 -c 'import time; x = 1500 * 2**20 * bytes([1]); time.sleep(60)'"]"""
    run = submit(folder, "kernel=[honest,torch]", "cluster.memory_gb=1", "cluster.flags={acctg-freq: 'task=1'}", eats)
    (why,) = over(run).reasons().values()
    assert why.split("; see")[0].endswith("it ran out of memory; raise cluster.memory_gb"), why
    resubmit(run, "cluster.memory_gb=8", "cluster.setup=[]")
    over(run)
    assert len(rows(folder)) == 2


def test_a_job_waits_with_its_reason_while_others_have_the_nodes(folder):
    run = submit(folder, "kernel=torch", "+cluster.flags.begin=now+600")
    until(lambda: squeue(run, "%r") == ["BeginTime"], "the reason")
    status = control("status", run)
    assert "1 queued (BeginTime; the first may start at 20" in status.stdout and "Note:" not in status.stdout
    control("cancel", run)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["cluster.cpus=4096"], "no node has 4096 CPUs, at most "),
        (["cluster.memory_gb=99999"], "no node has 99999 GB of memory, at most "),
        (["cluster.gres=gpu:h100:3", "device=cuda"], "no node has gpu:h100:3, only "),
        (["+cluster.flags.time=5"], "cluster.flags has time, which is cluster.time_min; set that"),
        (["+cluster.flags.array=0-3"], "cluster.flags has array, which minfer sets itself; leave it out"),
        (["cluster.partition=nowhere"], "SLURM refused the job: "),
    ],
)
def test_what_no_node_can_give_is_refused_at_once_and_leaves_no_run(folder, changes, said):
    done = launch(*words(folder, "kernel=torch", *changes))
    assert done.returncode == 2 and done.stderr.startswith(f"minfer: {said}"), done.stderr
    assert done.stderr.count("\n") == 1 and not list((folder / "runs").glob("*"))


def test_what_is_null_is_left_to_the_site_and_a_job_bears_its_runs_name(folder):
    run = submit(folder, "kernel=torch", "cluster.cpus=null", "cluster.memory_gb=null", "cluster.time_min=null",
                 "+cluster.flags.hold=true")  # fmt: skip
    assert squeue(run, "%j") == [f"minfer-{run.name}"]
    script = next((run / "jobs").glob("*submission*.sh")).read_text()
    assert not [option for option in ("--cpus-per-task", "--mem", "--time", "--wckey") if option in script], script
    control("cancel", run)
    run = submit(folder, "kernel=torch", "+cluster.flags.job-name=mine", "+cluster.flags.hold=true")
    assert squeue(run, "%j") == ["mine"]
    control("cancel", run)


def test_the_script_that_is_shown_is_the_one_that_is_submitted_and_slurm_knows_whom_to_mail(folder):
    mail = ("kernel=torch", "cluster.flags={mail-type: END, mail-user: me@example.org, hold: true}")
    shown = launch(*words(folder, *mail, "dry_run=script")).stdout
    assert not list((folder / "runs").iterdir())
    run = submit(folder, *mail)
    other = re.search(r"--job-name=minfer-(\S+)", shown)
    assert other and shown.replace(other[1], run.name) == next((run / "jobs").glob("*submission*.sh")).read_text()
    (job,) = Run(run).all_jobs
    told = subprocess.run(["scontrol", "show", "job", job.id], capture_output=True, text=True).stdout
    assert "MailUser=me@example.org" in told and "MailType=" in told and "END" in told
    control("cancel", run)


@pytest.mark.fault("sbatch passes no environment on (SBATCH_EXPORT=NONE)")
def test_an_environment_that_sbatch_does_not_pass_on_is_not_needed(folder, monkeypatch):
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    over(submit(folder, "kernel=torch"))
    assert [row["status"] in store.MEASURED for row in rows(folder)] == [True]


@pytest.mark.fault("a job is suspended for longer than a case may take")
def test_a_suspended_job_is_no_timeout(folder):
    """It is suspended in the middle of a case for longer than a case may take."""
    run = submit(folder, "kernel=[honest,torch]", "case_timeout_s=20")
    at(run, "honest")
    (job,) = Run(run).jobs.values()
    subprocess.run(["scontrol", "suspend", job.id], check=True)
    time.sleep(25)
    subprocess.run(["scontrol", "resume", job.id], check=True)
    over(run)
    found = {row["kernel"]: row for row in rows(folder)}
    assert len(found) == 2 and {row["status"] for row in found.values()} <= set(store.MEASURED), found


@pytest.mark.fault("files of a run are cut short")
def test_files_that_cannot_be_read_cost_a_sentence_and_every_job_is_cancelled(folder):
    run = submit(folder, "kernel=[torch,honest]", "cluster.max_jobs=2", "cluster.flags.begin=now+900")
    first, _ = sorted((run / "shards").glob("*.json"))
    first.write_text(first.read_text()[:100])
    with open(run / JOBS, "a") as file:
        file.write('{"shard": "0001", "id"')
    status = control("status", run)
    assert status.returncode == 0 and f"Note: {first} cannot be read" in status.stdout, status.stdout + status.stderr
    done = control("cancel", run)
    assert done.returncode == 0 and "2 jobs cancelled" in done.stdout, done.stdout + done.stderr
    until(lambda: not squeue(run, "%i"), "the end of both jobs")
    resubmit(run, "cluster.flags.begin=now")
    over(run)
    assert len(Run(run).all_jobs) == 3 and len(rows(folder)) == 1  # the other shard's file is gone for good


def test_two_resubmits_at_once_submit_a_shard_once(folder):
    run = submit(folder, "kernel=torch", "+cluster.flags.hold=true")
    assert "1 jobs cancelled" in control("cancel", run).stdout
    over(run)
    code = "import sys; from minfer.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "resubmit", str(run), "wait=false"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pair = [subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    said = ["".join(process.communicate()) for process in pair]
    assert len(Run(run).all_jobs) == 2, said  # the first one, and one more
    assert any("submitted again" in text for text in said)
    assert any("being submitted from another shell" in text or "nothing to submit" in text for text in said), said
    control("cancel", run)


@pytest.mark.fault("SLURM accepts half of a run's jobs and refuses the rest")
def test_half_a_submission_says_what_is_queued_and_how_to_go_on(folder, tmp_path, monkeypatch):
    """The second array is refused, as by MaxSubmitJobs."""
    real = subprocess.run(["which", "sbatch"], capture_output=True, text=True, check=True).stdout.strip()
    wrapper = tmp_path / "bin" / "sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(
        f'#!/bin/sh\nif [ -e "$0".called ]; then echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; fi\n'
        f'touch "$0".called\nexec {real} "$@"\n'
    )
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("minfer.jobs.executors.slurm._largest_array", lambda: 2)
    with pytest.raises(
        UserError, match=r"^2 of 3 shards are queued as \S+, and SLURM refused the rest: QOSMax"
    ) as told:
        submit(folder, "kernel=[torch,honest,cpu_naive]", "cluster.max_jobs=3")
    (run,) = (folder / "runs").iterdir()
    assert f"minfer resubmit {run.name}" in str(told.value) and len(Run(run).all_jobs) == 2
    monkeypatch.undo()
    resubmit(run)
    assert len(Run(run).all_jobs) == 3
    over(run)
    assert len(rows(folder)) == 3
