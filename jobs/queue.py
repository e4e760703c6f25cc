"""What becomes of jobs after they were submitted: who still waits or runs, how one ended, and how to end it.

submitit takes NODE_FAIL for the end of a job, and SLURM runs that job again; so squeue is asked, not submitit."""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from minfer.jobs.run import Job

WAITING = (
    "PENDING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
    "CONFIGURING",
    "NODE_FAIL",
    "PREEMPTED",
)


LOWER = "lower cluster.cpus, cluster.memory_gb or cluster.gres"
# Why a job waits for ever, by SLURM's reason, and what to do. Other reasons, such as Resources or Priority, pass.
STUCK = {
    "PartitionConfig": f"no node of the partition has what a job asks for; {LOWER}",
    "PartitionNodeLimit": f"no node of the partition has what a job asks for, or all that have are down; {LOWER}",
    "PartitionTimeLimit": "a job asks for more time than the partition allows; lower cluster.time_min",
    "PartitionDown": "the partition is down; ask the site, or choose another with cluster.partition",
    "PartitionInactive": "the partition is inactive; choose another with cluster.partition",
    "BadConstraints": "no node has the features that a job asks for; correct cluster.constraint",
    "InvalidAccount": "the account is not valid; correct cluster.account",
    "InvalidQOS": "the QOS is not valid; correct cluster.qos",
    "JobHeldUser": "it is held; release it with scontrol release",
    "JobHeldAdmin": "an administrator holds it; ask them",
    "DependencyNeverSatisfied": "a job that it depends on has failed; correct cluster.flags",
    "JobHoldMaxRequeue": "SLURM could not start it several times and holds it; release it with scontrol release",
    "launch failed requeued held": "SLURM could not start it, and holds it; ask the site, or release it with scontrol release",
}


@dataclass(frozen=True)
class Seen:
    """What squeue says of a job: SLURM's word for its state, why it waits, and when it may start; empty where unknown."""

    word: str
    reason: str = ""
    start: str = ""  # such as 2026-11-23T14:05:00; not where SLURM counts on a year for each job that has no time limit


def states(folder: Path, jobs: Collection[Job]) -> dict[str, Seen] | None:
    """What is known of each job, by its id; one that is over is not in it. None when SLURM does not answer."""
    found = {job.id: Seen("RUNNING") for job in jobs if job.executor == "local" and _runs(folder, job)}
    if all(job.executor == "local" for job in jobs):
        return found
    soon = (datetime.datetime.now() + datetime.timedelta(days=30)).isoformat()
    told = _ask("squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i|%T|%S|%r")
    if told is None:
        return None
    ids = {job.id for job in jobs}
    lines = [line.split("|", 3) for line in told.splitlines()]
    return found | {
        line[0]: Seen(line[1], plain(line[3]), line[2] if line[2] < soon else "")
        for line in lines
        if len(line) == 4 and line[0] in ids
    }


def plain(reason: str) -> str:
    """SLURM's reason as STUCK has it: some versions print sentences in brackets, with underscores for spaces."""
    return reason.strip().strip("()").replace("_", " ")


def stuck(reason: str) -> str | None:
    """Why a job with this reason will not start by itself, and what to do; None where it only has to wait."""
    if reason in STUCK:
        return STUCK[reason]
    if reason.startswith("ReqNodeNotAvail"):  # SLURM adds which: a job of cluster.distribute or of flags.nodelist
        return (
            "a node that it has to run on is down, drained or reserved; it waits until the node is back, or cancel it"
        )
    if re.match(r"(QOS|Assoc|MaxCpuPer|MaxMemPer)", reason):
        if "PerJob" in reason or "Wall" in reason:
            return f"a job asks for more than a limit of your account or QOS allows; {LOWER}, or cluster.time_min"
        return (
            "a limit of your account or QOS is reached; unless it is below what one job needs, it passes when jobs end"
        )
    return None


@dataclass(frozen=True)
class Account:
    """What SLURM's accounting has of a job. None where it does not say, as of a job that has not started."""

    state: str  # in SLURM's words, such as TIMEOUT
    queue_s: float | None = None  # from its submission to its start
    run_s: float | None = None
    max_rss_mb: float | None = None  # the largest of its steps


def accounts(jobs: Collection[Job]) -> dict[str, Account]:
    """What is accounted of each job, by its id; nothing without slurmdbd."""
    if not (ids := sorted({job.id for job in jobs if job.executor == "slurm"})):
        return {}
    fields = "JobID,State,Submit,Start,ElapsedRaw,MaxRSS"
    environment = os.environ | {"SLURM_TIME_FORMAT": "%s"}
    told = _ask(
        "sacct", "--noheader", "--parsable2", f"--format={fields}", f"--jobs={','.join(ids)}", environment=environment
    )
    return account((told or "").splitlines())


def account(lines: Iterable[str]) -> dict[str, Account]:
    """sacct's lines: one a job, and one for each of its steps, which alone have MaxRSS."""
    found: dict[str, Account] = {}
    for line in lines:
        if line.count("|") != 5:
            continue
        name, state, submit, start, elapsed, rss = line.split("|")
        job, step = name.partition(".")[::2]
        if not step and state:
            queued = float(start) - float(submit) if start.isdigit() and submit.isdigit() else None
            found[job] = Account(
                state.split()[0], queued, float(elapsed) if elapsed.isdigit() and queued is not None else None
            )
        elif job in found and (size := re.fullmatch(r"([\d.]+)([KMGT]?)", rss)):
            mb = (
                float(size[1])
                * {"": 1e-6, "K": 2**10 / 1e6, "M": 2**20 / 1e6, "G": 2**30 / 1e6, "T": 2**40 / 1e6}[size[2]]
            )
            found[job] = replace(found[job], max_rss_mb=max(mb, found[job].max_rss_mb or 0.0))
    return found


def ends(jobs: Collection[Job]) -> dict[str, str]:
    """How jobs ended, by id and in SLURM's words, such as TIMEOUT; without accounting nobody knows."""
    return {job: about.state for job, about in accounts(jobs).items()}


def cancel(folder: Path, jobs: Collection[Job], patience_s: float = 20) -> None:
    """End jobs. Those of this machine are waited for, so that nothing is left running."""
    ids = sorted({job.id for job in jobs if job.executor == "slurm"})
    for start in range(0, len(ids), 500):  # a command line has an end
        _ask("scancel", *ids[start : start + 500])
    local = [job for job in jobs if job.executor == "local"]
    deadline = time.monotonic() + patience_s
    while running := [job for job in local if _runs(folder, job)]:
        for job in running:
            # Again and again: a job that is still importing has no handler yet. submitit hands it on to the job.
            try:
                os.kill(int(job.id), signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.2)


def _runs(folder: Path, job: Job) -> bool:
    """Whether the process of a local job is there, and is that job's: numbers come round again."""
    try:
        return os.fsencode(folder.name) in Path(f"/proc/{job.id}/cmdline").read_bytes()  # empty for one that has ended
    except OSError:
        return False


def _ask(*command: str, environment: Mapping[str, str] | None = None) -> str | None:
    """What a command of SLURM's says; None when it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment).stdout
    except (OSError, subprocess.SubprocessError):
        return None
