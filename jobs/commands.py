"""Runs SLURM's commands with a time limit, and without the environment variables that change what they do.

`SBATCH_PARTITION` overrides the partition in a job's script. With `SQUEUE_STATES=running` squeue shows no pending job. Inside
`salloc` each command inherits the limits of that allocation."""

from __future__ import annotations

import os
import re
import subprocess

TIMEOUT_S = 30.0  # the longest that a command may take
THEIRS = re.compile(r"(SLURM|SLURMD|SBATCH|SALLOC|SQUEUE|SINFO|SACCT|SCANCEL|SCONTROL)_")
KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"}  # they say where SLURM is, and who is asking


SILENT = re.compile("Unable to contact slurm|[Cc]onnect(ion)? fail|[Cc]onnection refused|Socket timed out")


class Failed(Exception):
    """A command that failed. Its text is the command's own message."""


class Silent(Failed):
    """A command to which SLURM did not answer."""


def run(*command: str, **variables: str) -> str:
    """The output of a SLURM command; `variables` are added to its environment. Raises Failed, and Silent if SLURM does not
    answer."""
    environment = {name: value for name, value in os.environ.items() if not _is_theirs(name)} | variables
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired as error:
        raise Silent(f"{command[0]} does not answer within {TIMEOUT_S:g} s") from error
    except OSError as error:
        raise Failed(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        form = Silent if SILENT.search(done.stderr) else Failed
        raise form(done.stderr.strip() or f"{command[0]} ended with status {done.returncode}")
    return done.stdout


def ask(*command: str, **variables: str) -> str | None:
    """The output of a SLURM command; None if it fails or does not answer in time."""
    try:
        return run(*command, **variables)
    except Failed:
        return None


def list_set_aside() -> list[str]:
    """Sentences for the user on the variables of this shell that minfer ignores when it submits jobs."""
    found = sorted(filter(_is_theirs, os.environ))
    told = []
    if job := os.environ.get("SLURM_JOB_ID"):  # it comes with dozens of others
        found = [name for name in found if not name.startswith(("SLURM_", "SLURMD_"))]
        told.append(f"this shell is inside of SLURM's job {job}; jobs are submitted as from outside of it")
    if found:
        told.append(
            f"{', '.join(found)} of your environment {'is' if len(found) == 1 else 'are'} set aside; jobs ask for what "
            "cluster.* says, and cluster.flags.NAME=VALUE takes any option of sbatch"
        )
    return told


def _is_theirs(name: str) -> bool:
    return THEIRS.match(name) is not None and name not in KEPT
