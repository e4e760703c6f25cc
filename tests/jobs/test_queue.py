"""What SLURM's states and reasons mean for a run, jobs that only SLURM's queue has, and commands that fail."""

from __future__ import annotations

import errno
import json
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from minfer import launch, ops
from minfer.jobs import commands, queue
from minfer.jobs.run import CONFIG, JOBS, Job, Run
from minfer.plan.config import MaybeQueued, NoAnswer, UserError
from minfer.plan.shard import Shard
from minfer.run import control, start
from minfer.run.progress import RunProgress
from tests.conftest import FAST

# Of the manual of squeue and of SLURM's library; of the families of limits some of each.
STATES = set(re.findall(r"\w+", """
BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY PENDING
POWER_UP_NODE PREEMPTED RECONFIG_FAIL REQUEUE_FED REQUEUE_HOLD REQUEUED RESIZING RESV_DEL_HOLD REVOKED RUNNING SIGNALING
SPECIAL_EXIT STAGE_OUT STOPPED SUSPENDED TIMEOUT UPDATE_DB EXPEDITING"""))  # fmt: skip
REASONS = set(re.findall(r"\w+", """
AccountNotAllowed AccountingPolicy AssocGrpBB AssocGrpBBMinutes AssocGrpBillingRunMinutes AssocGrpCPUMinutesLimit
AssocGrpCpuLimit AssocGrpEnergy AssocGrpGRES AssocGrpJobsLimit AssocGrpLicense AssocGrpMemLimit AssocGrpNodeLimit
AssocGrpSubmitJobsLimit AssocGrpUnknown AssocGrpWallLimit AssocMaxBBPerJob AssocMaxCpuPerJobLimit AssocMaxGRESPerNode
AssocMaxJobsLimit AssocMaxNodePerJobLimit AssocMaxSubmitJobLimit AssocMaxWallDurationPerJobLimit AssociationJobLimit
AssociationResourceLimit AssociationTimeLimit BadConstraints BeginTime BlockFreeAction BlockMaxError BurstBufferOperation
BurstBufferResources BurstBufferStageIn Cleaning DeadLine Dependency DependencyNeverSatisfied FedJobLock FrontEndDown
InactiveLimit InvalidAccount InvalidQOS JobArrayTaskLimit JobHeldAdmin JobHeldUser JobHoldMaxRequeue JobLaunchFailure
Licenses MaxBBPerAccount MaxCpuPerAccount MaxGRESPerAccount MaxJobsPerAccount MaxMemPerLimit MaxMemoryPerAccount
MaxNodePerAccount MaxSubmitJobsPerAccount NodeDown NonZeroExitCode None OutOfMemory PartitionConfig PartitionDown
PartitionInactive PartitionNodeLimit PartitionTimeLimit PowerNotAvail PowerReserved Priority Prolog QOSGrpCpuLimit
QOSGrpGRES QOSGrpNodeLimit QOSGrpWallLimit QOSJobLimit QOSMaxCpuPerJobLimit QOSMaxCpuPerUserLimit QOSMaxGRESPerUser
QOSMaxJobsPerUserLimit QOSMaxMemoryPerNode QOSMaxWallDurationPerJobLimit QOSMinCpuNotSatisfied QOSMinGRES QOSMinMemory
QOSNotAllowed QOSResourceLimit QOSTimeLimit QOSUsageThreshold RaisedSignal ReqNodeNotAvail Reservation ReservationDeleted
Resources SchedDefer SystemFailure TimeLimit"""))  # fmt: skip


def test_every_state_and_reason_of_the_manual_is_known_and_another_is_shown_as_it_is():
    assert queue.STATES.keys() == STATES
    assert [reason for reason in sorted(REASONS - queue.PASSING) if not queue.explain_wait(reason)] == []
    assert queue.explain_wait("NewInTwoYears") is None
    new = queue.Seen("TELEPORTING", "NewInTwoYears")
    assert new.place == queue.WAITING and new.why == "TELEPORTING: NewInTwoYears"
    assert new.remedy and "minfer does not know this state" in new.remedy
    gone = queue.Seen("RESV_DEL_HOLD", "Reservation weekly was deleted")
    assert gone.place == queue.WAITING and gone.remedy and "its reservation has ended" in gone.remedy
    assert queue.Seen("PENDING", "Priority").why == "Priority" and queue.Seen("PENDING", "Priority").remedy is None


@pytest.mark.parametrize(
    ("job", "tasks"),
    [("86", ["86"]), ("86_3", ["86_3"]), ("86_[0-3%10]", ["86_0", "86_1", "86_2", "86_3"]), ("86_[7]", ["86_7"]),
     ("86_[0-4:2,9%1]", ["86_0", "86_2", "86_4", "86_9"]), ("86_[0-2,...]", ["86_[0-2,...]"])],
)  # fmt: skip
def test_the_tasks_of_an_array_that_slurm_names_together(job, tasks):
    assert queue.expand_tasks(job) == tasks


class Slurm:
    """A fake SLURM. `jobs` are squeue's lines, None if it does not answer; `refusal` is what scancel says."""

    def __init__(self) -> None:
        self.jobs: list[str] | None = []
        self.refusal = ""
        self.cancelled: list[str] = []

    def run(self, *command: str, **_: str) -> str:
        if self.jobs is None:
            raise commands.Failed(f"{command[0]} does not answer")
        if command[0] == "scancel":
            if self.refusal:
                raise commands.Failed(self.refusal)
            self.cancelled += command[1:]
        return "\n".join(self.jobs) if command[0] == "squeue" else ""


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    played = Slurm()
    monkeypatch.setattr(commands, "run", played.run)
    monkeypatch.setattr("minfer.run.progress.POLLS_S", (0.0, 10.0))
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/sbatch" if name == "sbatch" else real(name))
    return played


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Three shards of a case each, submitted as tasks of the array 7."""
    op = ops.get("hgemm")
    folder, names = tmp_path / "20260101-000000-0000", ["0000", "0001", "0002"]
    for index, name in enumerate(names):
        case = op.case("torch", "float16", dict.fromkeys(op.axes, 16 * (index + 1)))
        Shard(name, folder.name, str(folder), str(tmp_path), "cpu", [case], FAST, 60.0, 60.0).save()
    (folder / CONFIG).write_text(
        f"op: hgemm\ndtype: float16\nshape: {{name: x}}\ncluster: {{name: slurm, executor: slurm}}\nresults: {tmp_path}/r\n"
    )
    run = Run(folder)
    run.announce(names)
    run.add_jobs([Job(name, f"7_{index}", "slurm") for index, name in enumerate(names)])
    return run


def line(job: int | str, word: str = "PENDING", reason: str = "Priority", name: str = "other") -> str:
    return f"7_{job}|{word}|N/A|{reason}|{name}"


def read(run: Run) -> RunProgress:
    progress = RunProgress(run)
    progress.read_once()
    return progress


def test_a_job_that_only_slurm_knows_of_is_seen_cancelled_and_not_submitted_twice(run, slurm):
    """The run's folder has lost the line of a job, as on a full disk."""
    (run.folder / JOBS).write_text('{"shard": "0000", "id": "7_0", "executor": "slurm"}\n{"shard": "0001", "i')
    slurm.jobs = [line(n, name=f"minfer-{run.name}") for n in range(3)] + ["9|RUNNING|N/A|None|minfer-other"]
    progress = read(run)
    assert progress.counts() == {"queued": 3} and list(progress.lost) == ["7_1", "7_2"] and not progress.missing
    assert "2 jobs of the run are in the queue, and its folder does not name them: 7_1, 7_2;" in progress.warnings()[0]
    assert control.describe(progress)["jobs"] == ["7_0", "7_1", "7_2"]
    (run.folder / JOBS).unlink()
    assert list(read(run).lost) == ["7_0", "7_1", "7_2"]
    control.cancel(Console(quiet=True), run, [])
    assert slurm.cancelled == ["7_0", "7_1", "7_2"]
    slurm.jobs = []
    assert read(run).counts() == {"cancelled": 3} and len(read(run).missing) == 3


def test_a_lost_job_with_a_name_of_the_users_is_found_by_its_folder(run, slurm):
    """`cluster.flags.job-name` may be the same for all of a user's runs."""
    (run.folder / JOBS).unlink()
    other = run.folder.with_name("20260101-000000-0001")
    slurm.jobs = [line(0, name=f"mine|{run.sources}"), line(1, name=f"mine|{other}/sources"), line(2, name="mine")]
    assert list(read(run).lost) == ["7_0"]


def test_jobs_that_slurm_hides_from_another_user_are_not_failed(run, slurm, monkeypatch, capsys):
    def answer(*command: str, **_: str) -> str:
        private = "PrivateData             = accounts,jobs,usage\n" if command[0] == "scontrol" else ""
        return private or slurm.run(*command)

    monkeypatch.setattr(commands, "run", answer)
    assert read(run).counts() == {"failed": 3}  # its owner sees that no job is left
    run.owner = 1 << 20
    monkeypatch.setattr("os.getuid", lambda: 1 << 21)
    progress = read(run)
    assert progress.counts() == {"queued": 3} and not progress.missing
    assert progress.line().startswith(
        "SLURM shows jobs only to their owner (PrivateData=jobs), so their state is unknown; 0"
    )
    assert control.status(Console(width=200), run, ["--json"]) == NoAnswer.status
    assert json.loads(capsys.readouterr().out)["slurm"] == "hides jobs"
    slurm.jobs = [line(0, "RUNNING")]  # as an operator of SLURM sees it
    assert read(run).counts() == {"failed": 2, "running": 1}


def test_jobs_that_are_not_cancelled_are_no_success(run, slurm):
    slurm.jobs = [line(0), line(1)]
    slurm.refusal = (
        "scancel: error: Kill job error on job id 7_1: Access/permission denied\n"
        "scancel: error: Kill job error on job id 7_2: Invalid job id specified"
    )
    with pytest.raises(
        UserError,
        match=r"^1 of 2 jobs of \S+ were cancelled; scancel says of the others: Kill job error on job id 7_1: Access",
    ):
        control.cancel(Console(quiet=True), run, [])
    assert read(run).counts() == {"queued": 2, "failed": 1}


def test_a_run_that_is_cancelled_while_its_jobs_are_submitted_gets_no_more(run, slurm, monkeypatch):
    seen = []
    begun = threading.Event()

    def submit() -> None:
        with run.lock():
            begun.set()
            while not run.cancelled:
                begun.wait(0.01)
            seen.append(list(slurm.cancelled))

    thread = threading.Thread(target=submit)
    thread.start()
    begun.wait()
    slurm.jobs = [line(n) for n in range(3)]
    assert control.cancel(Console(quiet=True), Run(run.folder), []) == 0
    thread.join()
    assert seen == [[]] and len(slurm.cancelled) == 3  # what was submitted by then is cancelled, too


def test_what_slurm_does_not_answer_is_said_at_once_and_is_no_fact(run, slurm, capsys):
    slurm.jobs = None
    assert control.status(Console(width=200), run, ["--json"]) == NoAnswer.status == 3
    told = json.loads(capsys.readouterr().out)
    assert told["slurm"] == "no answer" and {each["source"] for each in told["usage"]} == {"worker"}
    for action in (control.cancel, control.resubmit):
        with pytest.raises(NoAnswer):
            action(Console(quiet=True), run, [])
    for name, path in run.shards.items():
        run.tell([name], event="done", case=Shard.load(path).cases[0].key)
        run.tell([name], event="end")
    assert not read(run).active  # so that nobody waits for SLURM when all is there


def test_a_disk_that_is_full_is_one_sentence(run, monkeypatch, capsys):
    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded", str(run.folder))

    assert launch.exit_status(fail) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"minfer: cannot write to {run.folder}: Disk quota exceeded;") and said.count("\n") == 1

    def fail_all(*_: object) -> None:
        raise shutil.Error([("a", "b", f"[Errno 28] No space left on device: 'b{n}'") for n in range(900)])

    monkeypatch.setattr(shutil, "copytree", fail_all)
    with pytest.raises(UserError, match=r"^cannot copy the sources to \S+: No space left on device; free space there"):
        run.copy_sources()


def test_shards_that_wait_or_are_done_are_looked_at_only_when_the_queue_is(run, slurm, monkeypatch):
    """Each look is a request to the file system of runs/."""
    slurm.jobs = [line(0, "RUNNING"), line(1)]
    run.tell(["0002"], event="end")
    progress = read(run)
    assert progress.counts() == {"queued": 1, "running": 1, "done": 1}
    monkeypatch.setattr("minfer.run.progress.POLLS_S", (1000.0, 1000.0))
    for name in ("0000", "0001"):
        run.tell([name], event="start", node="n1")
    assert [path.stem for path in progress._find_grown(False)] == ["0000"]
    assert [path.stem for path in progress._find_grown(True)] == ["0000", "0001"]
    assert len(progress.read()) == 1


@pytest.mark.parametrize(
    ("failure", "queued", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            True,
            "^1 jobs are queued as .*, and their ids cannot be written",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), False, "No space left on device"),
        (UserError("SLURM refused the job"), False, "SLURM refused the job"),
        (NoAnswer("SLURM does not answer"), None, "SLURM does not answer"),
        (MaybeQueued("SLURM does not answer: sbatch"), True, "SLURM does not answer: sbatch"),
    ],
)
def test_a_launch_that_fails_leaves_a_folder_only_for_jobs_that_are_queued(
    run, slurm, monkeypatch, failure, queued, said
):
    def submit(*_: object) -> None:
        raise failure

    (run.folder / JOBS).unlink()
    slurm.jobs = None if queued is None else [line(0, name=f"minfer-{run.name}")] * queued
    monkeypatch.setattr(start, "_create_run", lambda config: run)
    monkeypatch.setattr(start, "_write_shards", lambda run, launch: ["0000"])
    executor: Any = SimpleNamespace(submit=submit)
    with pytest.raises((UserError, OSError), match=said):
        start._submit(Console(quiet=True), run.request, executor, Any)
    assert run.folder.exists() == bool(queued)
