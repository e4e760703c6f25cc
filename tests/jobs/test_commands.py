"""How SLURM's commands are run: without variables of the user's environment, and with errors that are told apart."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from minfer.jobs import commands, executors, partition
from minfer.jobs.run import Job, Run
from minfer.plan.config import NoAnswer

Stub = Callable[[str, str], None]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Puts a script onto the PATH in place of one of SLURM's commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return put


def test_the_users_variables_reach_no_command_of_slurm(stub, monkeypatch):
    stub("squeue", "env")
    for name in ("SQUEUE_STATES", "SLURM_TIME_FORMAT", "SLURM_MEM_PER_CPU", "SLURM_CONF", "SLURMBER"):
        monkeypatch.setenv(name, "user's")
    seen = commands.run("squeue", SLURM_TIME_FORMAT="%s")
    assert "SLURM_TIME_FORMAT=%s" in seen and "SLURM_CONF=user's" in seen and "SLURMBER=user's" in seen
    assert "SQUEUE_STATES" not in seen and "SLURM_MEM_PER_CPU" not in seen


def test_what_is_set_aside_is_said_in_a_sentence_each(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    assert commands.list_set_aside() == []
    monkeypatch.setenv("SBATCH_PARTITION", "debug")
    (told,) = commands.list_set_aside()
    assert told.startswith("SBATCH_PARTITION of your environment is set aside; jobs ask for what cluster.* says")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "100")
    inside, again = commands.list_set_aside()
    assert inside.startswith("this shell is inside of SLURM's job 12;") and again == told


def test_a_run_is_looked_up_among_the_jobs_of_its_owner(stub, tmp_path):
    """Another user sees the run as its owner does."""
    stub("squeue", f'case "$*" in *--user={tmp_path.stat().st_uid + 1}*) echo "7_0|RUNNING|N/A|None|x" ;; esac')
    run = Run(tmp_path)
    assert executors.find_states(run, [Job("0000", "7_0", "slurm")]) == {}
    run.owner = tmp_path.stat().st_uid + 1
    assert executors.find_states(run, [Job("0000", "7_0", "slurm")])


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (
            "echo 'slurm_load_partitions: Unable to contact slurm controller (connect failure)' >&2; exit 1",
            commands.Silent,
        ),
        ("exec sleep 5", commands.Silent),
        ("echo 'Invalid partition' >&2; exit 1", commands.Failed),
    ],
)
def test_a_command_without_an_answer_is_told_from_one_that_fails(stub, monkeypatch, script, error):
    monkeypatch.setattr(commands, "TIMEOUT_S", 0.3)
    stub("sinfo", script)
    with pytest.raises(commands.Failed) as caught:
        commands.run("sinfo")
    assert caught.type is error
    if error is commands.Silent:
        with pytest.raises(NoAnswer, match=r"^SLURM does not answer: .*; try again when it does$"):
            partition.list_nodes(None)
    else:
        assert partition.list_nodes(None) == []
