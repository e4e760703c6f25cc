"""The state of a job in the queue, and what SLURM's states and reasons mean."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

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
    """A job in the queue: SLURM's word for its state, why it waits, and when it may start; empty if unknown."""

    word: str
    reason: str = ""
    start: str = ""  # such as 2026-11-23T14:05:00; not where SLURM counts on a year for each job that has no time limit


def normalize(reason: str) -> str:
    """SLURM's reason as STUCK has it: some versions print sentences in brackets, with underscores for spaces."""
    return reason.strip().strip("()").replace("_", " ")


def explain_wait(reason: str) -> str | None:
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


def parse_accounts(lines: Iterable[str]) -> dict[str, Account]:
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
