"""`dry_run=script` shows what sbatch would be given, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minfer.launch import compose, exit_status
from minfer.process.stopping import AGAIN
from minfer.run.start import run

# Take the place of SLURM's commands: sbatch keeps what it is given, sinfo and scontrol know nothing.
STAND_INS = {"sbatch": 'cp "${@: -1}" "$SAID"; echo Submitted batch job 7', "srun": ":", "sinfo": ":", "scontrol": ":"}
WORDS = [
    "+sweep=hgemm", "cluster=slurm", "cluster.gres=null", "cluster.partition=a b", "cluster.time_min=30", "device=cpu",
    "shape=tiny", "wait=false", "cluster.flags={mail-type: END, mail-user: me@example.org}",
]  # fmt: skip


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """SLURM's stand-ins, and the file with what sbatch was last given."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in STAND_INS.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # compose sets it; here it must not outlive the test
    monkeypatch.chdir(tmp_path)
    return tmp_path / "said"


def launch(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["minfer", *WORDS, *words])
    return exit_status(lambda: run(compose()[0]))


@pytest.mark.parametrize("more", [[], ["cluster.max_jobs=3", "cluster.parallel=2", "cluster.flags.job-name=mine"]])
def test_the_script_shown_is_the_one_that_sbatch_is_given(more, said, monkeypatch, capsys):
    assert launch(monkeypatch, "dry_run=script", *more) == 0
    shown = capsys.readouterr().out
    assert not said.exists() and list(Path("runs").iterdir()) == []
    assert launch(monkeypatch, *more) == 0
    (folder,) = Path("runs").iterdir()
    name = re.search(rf"{Path('runs').absolute()}/([\w-]+)/sources", shown)
    assert name and shown.replace(name[1], folder.name) == said.read_text()
    assert shown.startswith("#!/bin/bash\n") and ("#SBATCH --array=0-2%2\n" in shown) == ("cluster.parallel=2" in more)


def test_a_launch_says_where_its_jobs_go_and_why(said, monkeypatch, capsys):
    """With sbatch on the PATH, a launch on a laptop asked for a GPU and said that the run is on a GPU."""
    words = ["+sweep=hgemm", "shape=tiny", "wait=false", "cluster.partition=a b"]
    monkeypatch.setattr(sys, "argv", ["minfer", *words, "kernel=cpu_naive"])
    assert exit_status(lambda: run(compose()[0])) == 2
    shown = capsys.readouterr()
    where = "Jobs go to SLURM, with gpu:1 each, because sbatch is on the PATH; cluster=local runs on this machine.\n"
    assert shown.out == where and "this run is on a GPU" in shown.err
    monkeypatch.setattr(sys, "argv", ["minfer", *words, "cluster.gres=null", "kernel=cpu_naive"])
    assert exit_status(lambda: run(compose()[0])) == 0
    out = capsys.readouterr().out
    assert out.startswith(where.replace("with gpu:1 each", "without a GPU")) and "cases of hgemm, about 0:0" in out


@pytest.mark.parametrize("setup", ["set -e", "true"])
def test_a_job_that_stops_early_is_queued_again_also_after_set_e(setup, said, monkeypatch, tmp_path):
    assert launch(monkeypatch, f"cluster.setup=[{setup}]") == 0
    for name, text in (("srun", f"exit {AGAIN}"), ("scontrol", 'echo "$@" >> "$SAID.scontrol"')):
        (tmp_path / "tools" / name).write_text(f"#!/bin/bash\n{text}\n")
    environment = os.environ | {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}
    done = subprocess.run(["bash", said], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == AGAIN, done.stderr
    assert "requeue 7\n" in Path(f"{said}.scontrol").read_text()


def test_flags_of_mail_are_in_the_script(said, monkeypatch, capsys):
    assert launch(monkeypatch, "dry_run=script") == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"#SBATCH --mail-type=END", "#SBATCH --mail-user=me@example.org"} <= set(lines)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["cluster=local", "dry_run=script"],
            "dry_run=script shows what SLURM is given, and jobs run without it here; choose cluster=slurm",
        ),
        (
            ["cluster=local", "container=apptainer", "container.image=/nowhere/minfer.sif", "dry_run=true"],
            "the container image /nowhere/minfer.sif does not exist; build it (docker build -t minfer . && apptainer build "
            "--build-arg BOOTSTRAP=docker-daemon --build-arg IMAGE=minfer:latest /nowhere/minfer.sif apptainer.def), name "
            "another with container.image, or use container=none",
        ),
        (["dry_run=maybe"], "dry_run is maybe; it can be true, false or script"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(words, told, said, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules[__name__], "WORDS", ["+sweep=hgemm", "device=cpu", "shape=tiny"])
    assert launch(monkeypatch, *words) == 2
    assert capsys.readouterr().err == f"minfer: {told}\n"
    assert not list(Path.cwd().glob("runs/*"))
