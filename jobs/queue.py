"""What becomes of jobs after they were submitted: who still waits or runs, how one ended, and how to end it.

submitit takes NODE_FAIL for the end of a job, and SLURM runs that job again; so squeue is asked, not submitit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Collection
from pathlib import Path

from jobs.record import Job

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


def states(folder: Path, jobs: Collection[Job]) -> dict[str, str] | None:
    """SLURM's word for each job, by its id; one that is over is not in it. None when SLURM does not answer."""
    found = {job.id: "RUNNING" for job in jobs if job.executor == "local" and _runs(folder, job)}
    if all(job.executor == "local" for job in jobs):
        return found
    told = _ask("squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i %T")
    if told is None:
        return None
    ids = {job.id for job in jobs}
    return found | {words[0]: words[1] for line in told.splitlines() if (words := line.split())[0] in ids}


def ends(jobs: Collection[Job]) -> dict[str, str]:
    """How jobs ended, by id and in SLURM's words, such as TIMEOUT; without accounting nobody knows."""
    if not (ids := [job.id for job in jobs if job.executor == "slurm"]):
        return {}
    told = _ask(
        "sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID,State", f"--jobs={','.join(ids)}"
    )
    lines = [line.split("|") for line in (told or "").splitlines()]
    return {line[0]: line[1].split()[0] for line in lines if len(line) == 2 and line[1]}


def cancel(folder: Path, jobs: Collection[Job], patience_s: float = 20) -> None:
    """End jobs. Those of this machine are waited for, so that nothing is left running."""
    if ids := [job.id for job in jobs if job.executor == "slurm"]:
        _ask("scancel", *ids)
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


def _ask(*command: str) -> str | None:
    """What a command of SLURM's says; None when it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
