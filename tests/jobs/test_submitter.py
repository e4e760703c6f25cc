"""How jobs are submitted, by stand-ins for SLURM's commands: each sweep's own resources, and an sbatch without an answer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minfer import ops
from minfer.bench.timing import Timing
from minfer.jobs import commands
from minfer.jobs.executors.slurm import Slurm
from minfer.jobs.executors.submitter import TAKE_FILE
from minfer.jobs.run import Run
from minfer.launch import compose, exit_status
from minfer.plan import cases
from minfer.plan.config import Cluster, Config, MaybeQueued, Shape, UserError
from minfer.plan.shard import Shard
from minfer.plan.sweeps import parts
from minfer.run import control
from minfer.run.start import run
from tests.conftest import FAST

# sbatch keeps each script that it is given, and what its jobs would find in the environment.
STAND_INS = {
    "sbatch": 'n=$(ls "$SAID" | wc -l); cp "${@: -1}" "$SAID/$n.sh"; echo "$MINFER_FILES" > "$SAID/../files"; eval "${MUTE-}"; '
    'echo "Submitted batch job $((70 + n))"',
    "squeue": 'cat "$SAID/../queue" 2>/dev/null; :',
    "srun": ":",
    "sinfo": ":",
    "scontrol": ":",
    "sacct": ":",
    "scancel": ":",
}
TWO = ["sweeps=[{sweep: axpby, cpu: [{n: 64}], cluster: {memory_gb: 64, time_min: 30}},{sweep: silu_mul}]"]
RUN = commands.run


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """SLURM's stand-ins, and the folder with what sbatch was given."""
    tools, said = tmp_path / "tools", tmp_path / "said"
    tools.mkdir()
    said.mkdir()
    for name, text in STAND_INS.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(said))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # compose sets it; here it must not outlive the test
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("minfer.run.progress.POLLS_S", (0.0, 10.0))
    return said


def launch(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    words = ("cluster=slurm", "cluster.gres=null", "device=cpu", "wait=false", *words)
    monkeypatch.setattr(sys, "argv", ["minfer", *words])
    return exit_status(lambda: run(compose()[0]))


def asked(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --(mem|time|array|cpus-per-task)=(\S+)$", script, re.MULTILINE))


def scripts(said: Path) -> list[dict[str, str]]:
    return [asked(path.read_text()) for path in sorted(said.iterdir())]


@pytest.mark.slow
def test_the_jobs_of_a_sweep_ask_for_what_it_states(said, monkeypatch, capsys):
    words = [*TWO, "cluster.cpus=2", "cluster.max_jobs=3"]
    assert launch(monkeypatch, *words, "dry_run=script") == 0
    shown = [asked(script) for script in capsys.readouterr().out.split("#!/bin/bash")[1:]]
    assert launch(monkeypatch, *words) == 0
    own, others = scripts(said)
    assert [own, others] == shown
    assert own == {"mem": "64GB", "time": "30", "cpus-per-task": "2"}
    assert others == {"cpus-per-task": "2", "array": "0-1%2"}  # it has most of the cases
    (folder,) = Path("runs").glob("2*")
    submitted = Run(folder.absolute())
    assert [(job.shard, job.time_min, job.memory_gb) for job in submitted.all_jobs] == [
        ("0000", 30, 64), ("0001", None, None), ("0002", None, None),
    ]  # fmt: skip

    assert control.resubmit(Console(quiet=True), submitted, ["cluster.memory_gb=128", "wait=false"]) == 0
    again = scripts(said)[2:]  # what is typed holds for all
    assert [each.get("mem") for each in again] == ["128GB", "128GB"] and again[0]["time"] == "30"


def several(*sweeps: Any) -> Config:
    return Config(
        sweeps=list(sweeps), op="", dtype=[], shape=Shape("x"), timing=Timing("x"), cluster=Cluster("x", gres="gpu:1")
    )


def test_what_is_typed_holds_for_every_sweep(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["minfer", "cluster=mine", "cluster.memory_gb=8"])
    config = several({"sweep": "axpby", "cluster": {"memory_gb": 64, "time_min": 30}})
    config.cluster.memory_gb = 8
    (part,) = parts(config)
    assert (part.cluster.memory_gb, part.cluster.time_min, part.cluster.gres) == (8, 30, "gpu:1")


@pytest.mark.parametrize(
    ("stated", "complaint"),
    [
        (
            {"max_jobs": 2},
            r"sweep axpby sets cluster\.max_jobs, and is one of several; its jobs can only ask for gres, cpus, ",
        ),
        (
            {"memory_gb": "much"},
            r"sweep axpby: bad value for cluster\.memory_gb: Value 'much' of type 'str' could not be ",
        ),
        ({"memory_gb": 0}, r"cluster\.memory_gb is 0; it takes a number from 1"),
        (4, r"sweep axpby has cluster 4; write it like cluster: \{memory_gb: 64\}"),
    ],
)
def test_what_a_sweep_of_several_cannot_ask_for_is_one_sentence(stated, complaint):
    with pytest.raises(UserError, match=f"^{complaint}"):
        parts(several({"sweep": "axpby", "cluster": stated}))


def test_cases_with_resources_of_their_own_have_shards_of_their_own():
    config = several("axpby", {"sweep": "silu_mul", "cluster": {"gres": "gpu:2", "cpus": 3}})
    assert [part.cluster.gres for part in parts(config)] == ["gpu:1", "gpu:2"] and config.cluster.cpus is None
    for device, own in (("cuda", {"gres": "gpu:2", "cpus": 3}), ("cpu", {"cpus": 3})):
        plan = cases.plan(config, device)
        for jobs in (1, 2, 7):
            shards = cases.split(plan, config, jobs)
            assert max(jobs - 1, 2) <= len(shards) <= max(jobs, 2)
            assert sorted(case.key for shard in shards for case in shard) == sorted(case.key for case in plan.cases)
            for shard in shards:
                (op,) = {case.op for case in shard}
                assert {repr(plan.resources[case.key]) for case in shard} == {repr(own if op == "silu_mul" else {})}


@pytest.fixture
def submitted(tmp_path: Path, said: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run of one shard, not submitted yet."""
    op = ops.get("axpby")
    folder = tmp_path / "runs" / "20260101-000000-0000"
    cases = [op.case("torch", "float32", {"n": 64})]
    Shard("0000", folder.name, str(folder), str(tmp_path), "cpu", cases, FAST, 1.0, 1.0).save()
    monkeypatch.setattr(Run, "copy_sources", lambda run: None)
    cluster = Cluster("slurm", executor="slurm")
    return Run.create(
        folder, Config(op="axpby", dtype="float32", shape=Shape("x"), cluster=cluster, results=str(tmp_path))
    )


def answer_late(*command: str, **variables: str) -> str:
    """As `commands.run` does where SLURM takes a job and says so too late."""
    told = RUN(*command, **variables)
    if command[0] == "sbatch":
        raise commands.Silent("sbatch does not answer within 30 s")
    return told


@pytest.mark.parametrize(
    ("mute", "why"),
    [
        (":", r"sbatch does not answer within 30 s"),
        (
            "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1",
            "sbatch: error: Socket timed out .*",
        ),
        ("echo Bye; exit", r"sbatch said 'Bye\\n', without the id of a job"),
    ],
    ids=["hangs", "times out", "says nothing"],
)
def test_a_job_that_sbatch_gave_no_answer_about_is_not_lost(said, submitted, monkeypatch, mute, why):
    """SLURM may have queued it all the same."""
    monkeypatch.setenv("MUTE", mute)
    if mute == ":":
        monkeypatch.setattr(commands, "run", answer_late)
    executor = Slurm(submitted.request.cluster, submitted.request.container)
    monkeypatch.setattr(Slurm, "preflight", lambda executor: None)
    monkeypatch.setattr("minfer.jobs.executors.slurm._largest_array", lambda: 1)
    told = rf"SLURM does not answer: {why}; 0 of 1 shards are queued as {submitted.name}, and the next 1 may be; "
    with pytest.raises(
        MaybeQueued, match=f"^{told}when SLURM answers, .*status .*{submitted.name} finds these jobs by their"
    ):
        executor.submit(submitted, ["0000"])

    (said.parent / "queue").write_text(f"70|PENDING|N/A|None|minfer-{submitted.name}|{submitted.sources}\n")
    assert control.resubmit(Console(quiet=True), submitted, ["wait=false"]) == 0 and not submitted.all_jobs
    assert control.cancel(Console(quiet=True), submitted, []) == 0

    # the job starts on its node, and finds what submitit looks for
    files = (said.parent / "files").read_text().strip()
    environment = {"MINFER_FILES": files, "SLURM_JOB_ID": "70", "PATH": os.environ["PATH"]}
    subprocess.run(["bash", "-ec", TAKE_FILE], env=environment, check=True)
    assert (submitted.folder / "jobs" / "70_submitted.pkl").read_bytes() == Path(f"{files}-0.pkl").read_bytes()
    assert TAKE_FILE in (said / "0.sh").read_text()


def test_a_job_that_sbatch_refuses_is_a_mistake(submitted, monkeypatch):
    monkeypatch.setenv("MUTE", "echo sbatch: error: invalid partition >&2; exit 1")
    executor = Slurm(submitted.request.cluster, submitted.request.container)
    with pytest.raises(
        UserError, match=r"^SLURM refused the job: invalid partition; change cluster\.\* and try again$"
    ):
        executor.submit(submitted, ["0000"])


def test_a_script_takes_the_file_of_its_task_and_no_other(tmp_path):
    for index in range(2):
        (tmp_path / f"a b-{index}.pkl").write_text(str(index))
    (tmp_path / "7_0_submitted.pkl").write_text("the launcher's")
    for task in ("0", "1"):
        environment = {
            "MINFER_FILES": str(tmp_path / "a b"),
            "SLURM_JOB_ID": "9",
            "SLURM_ARRAY_JOB_ID": "7",
            "PATH": os.environ["PATH"],
        }
        subprocess.run(["bash", "-c", TAKE_FILE], env=environment | {"SLURM_ARRAY_TASK_ID": task}, check=False)
    assert (tmp_path / "7_0_submitted.pkl").read_text() == "the launcher's"
    assert (tmp_path / "7_1_submitted.pkl").read_text() == "1"
    assert subprocess.run(["bash", "-c", TAKE_FILE], env={"PATH": os.environ["PATH"]}, check=False).returncode == 0
