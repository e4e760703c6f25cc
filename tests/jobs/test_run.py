"""The jobs that a run's folder lists, and what SLURM's queue says of them."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest

from minfer.jobs import commands, executors, queue
from minfer.jobs.run import CONFIG, JOBS, RUNS, Job, Run
from minfer.plan.config import UserError


def test_a_job_is_noted_on_a_line_of_its_own_behind_one_that_was_cut(tmp_path):
    jobs, run = [Job("0000", "1_0", "slurm"), Job("0000", "2_0", "slurm")], Run(tmp_path)
    run.add_jobs(jobs[:1])
    with open(tmp_path / JOBS, "a") as file:
        file.write('{"shard": "0001", "id"')
    run.add_jobs(jobs[1:])
    assert run.all_jobs == jobs


def test_the_last_job_of_a_shard_counts_and_numbers_that_came_round_again_do_not(tmp_path):
    (tmp_path / "progress").mkdir()
    run = Run(tmp_path)
    run.add_jobs([Job("0000", "1_0", "slurm"), Job("0001", "1_1", "slurm")])
    run.add_jobs([Job("0001", str(os.getpid()), "local")])
    assert {name: job.id for name, job in run.jobs.items()} == {"0000": "1_0", "0001": str(os.getpid())}
    other = run.jobs["0001"]
    assert executors.find_states(run, [other]) == {}  # this process, which is no job of that run
    executors.cancel(run, [other])  # and so it lives


def test_jobs_of_a_run_are_submitted_by_one_process_at_a_time(tmp_path):
    run = Run(tmp_path)
    first = run.lock()
    with first, pytest.raises(UserError, match="being submitted from another shell"), run.lock():
        pass
    with run.lock():
        pass


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("PartitionConfig", "lower cluster.cpus"), ("QOSMaxCpuPerJobLimit", "asks for more than a limit"),
        ("AssocMaxWallDurationPerJobLimit", "asks for more than a limit"), ("QOSMaxJobsPerUserLimit", "passes when jobs end"),
        ("launch failed requeued held", "scontrol release"), ("(launch_failed_requeued_held)", "scontrol release"),
        ("ReqNodeNotAvail, UnavailableNodes:node2", "or cancel it"),
        ("Resources", None), ("Priority", None), ("None", None),
    ],
)  # fmt: skip
def test_reasons_that_do_not_pass_are_told_from_those_that_do(reason, said):
    found = queue.explain_wait(queue.normalize(reason))
    assert found is None if said is None else found and said in found


def test_a_start_that_is_a_guess_is_not_shown(tmp_path, monkeypatch):
    """Where jobs have no time limit, SLURM counts on a year for each."""
    soon = (datetime.datetime.now() + datetime.timedelta(hours=2)).isoformat(timespec="seconds")
    lines = [
        f"7_0|PENDING|{soon}|Resources|x", "7_1|PENDING|2099-01-01T00:00:00|Resources|x", "7_2|PENDING|N/A|Priority|x",
    ]  # fmt: skip
    monkeypatch.setattr(commands, "ask", lambda *words: "\n".join(lines))
    found = executors.find_states(Run(tmp_path), [Job(f"000{n}", f"7_{n}", "slurm") for n in range(3)])
    assert found is not None and [found[f"7_{n}"].start for n in range(3)] == [soon, "", ""]


def test_the_last_run_is_the_newest_by_a_clock_that_does_not_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The hour that repeats in autumn, and a shell in another time zone, gave a later run the smaller name."""
    monkeypatch.chdir(tmp_path)
    for age, name in ((20, "20261025-025900-aaaa"), (10, "20261025-020100-bbbb"), (0, "20261024-230000-cccc")):
        (folder := RUNS / name).mkdir(parents=True)
        (folder / CONFIG).write_text("")
        os.utime(folder / CONFIG, (1_000_000 - age, 1_000_000 - age))
    assert [run.name[-4:] for run in Run.list_all()] == ["aaaa", "bbbb", "cccc"]
    assert Run.find("last").name.endswith("cccc")
