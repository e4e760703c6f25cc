"""The state of a job in the queue, and what every state and reason of SLURM's manual means for a run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

WAITING, RUNNING, OVER = "waiting", "running", "over"
# Every job state of SLURM's manual: what it means for a run.
STATES = {
    "PENDING": WAITING, "CONFIGURING": WAITING, "POWER_UP_NODE": WAITING, "REQUEUED": WAITING, "REQUEUE_FED": WAITING,
    "REQUEUE_HOLD": WAITING, "SPECIAL_EXIT": WAITING, "RESV_DEL_HOLD": WAITING, "EXPEDITING": WAITING,
    # SLURM runs these again, because minfer asks for it
    "NODE_FAIL": WAITING, "PREEMPTED": WAITING, "BOOT_FAIL": WAITING, "LAUNCH_FAILED": WAITING, "RECONFIG_FAIL": WAITING,
    "RUNNING": RUNNING, "COMPLETING": RUNNING, "SUSPENDED": RUNNING, "STOPPED": RUNNING, "RESIZING": RUNNING,
    "SIGNALING": RUNNING, "STAGE_OUT": RUNNING, "UPDATE_DB": RUNNING,
    "COMPLETED": OVER, "CANCELLED": OVER, "DEADLINE": OVER, "FAILED": OVER, "OUT_OF_MEMORY": OVER, "TIMEOUT": OVER,
    "REVOKED": OVER,
}  # fmt: skip
CANCELLED = "CANCELLED"

LOWER = "lower cluster.cpus, cluster.memory_gb or cluster.gres"
RELEASE = "release it with scontrol release"
REMOVED = "its reservation has ended; cancel the run, and resubmit it with another cluster.flags.reservation"
# Why a job waits for ever, by its state and by SLURM's reason, and what to do.
HELD = {
    "REQUEUE_HOLD": f"it was queued again and held; {RELEASE}",
    "SPECIAL_EXIT": f"it was queued again and held; {RELEASE}",
    "RESV_DEL_HOLD": REMOVED,
}
STUCK = {
    "PartitionConfig": f"no node of the partition has what a job asks for; {LOWER}",
    "PartitionNodeLimit": f"no node of the partition has what a job asks for, or all that have are down; {LOWER}",
    "PartitionTimeLimit": "a job asks for more time than the partition allows; lower cluster.time_min",
    "PartitionDown": "the partition is down; ask the site, or choose another with cluster.partition",
    "PartitionInactive": "the partition is inactive; choose another with cluster.partition",
    "BadConstraints": "no node has the features that a job asks for; correct cluster.constraint",
    "InvalidAccount": "the account is not valid; correct cluster.account",
    "AccountNotAllowed": "the account may not use the partition; correct cluster.account or cluster.partition",
    "InvalidQOS": "the QOS is not valid; correct cluster.qos",
    "QOSNotAllowed": "the QOS may not be used there; correct cluster.qos or cluster.partition",
    "AccountingPolicy": f"an accounting rule of the site does not let a job start; {LOWER}, or ask the site",
    "MaxMemPerLimit": "a job asks for more memory than the partition allows; lower cluster.memory_gb",
    "JobHeldUser": f"it is held; {RELEASE}",
    "JobHeldAdmin": "an administrator holds it; ask them",
    "DependencyNeverSatisfied": "a job that it depends on has failed; correct cluster.flags",
    "DeadLine": "it cannot end before its deadline; correct cluster.flags",
    "JobHoldMaxRequeue": f"SLURM could not start it several times and holds it; {RELEASE}",
    "launch failed requeued held": f"SLURM could not start it, and holds it; ask the site, or {RELEASE}",
    "ReservationDeleted": REMOVED,
}
# Reasons that pass by themselves, and those of jobs that have ended.
PASSING = {
    "", "None", "Priority", "Resources", "Dependency", "BeginTime", "Licenses", "Reservation", "Cleaning", "Prolog",
    "SchedDefer", "JobArrayTaskLimit", "BurstBufferResources", "BurstBufferStageIn", "BurstBufferOperation", "NodeDown",
    "PowerNotAvail", "PowerReserved", "FedJobLock", "FrontEndDown", "BlockMaxError", "BlockFreeAction",
    "SystemFailure", "JobLaunchFailure", "NonZeroExitCode", "RaisedSignal", "TimeLimit", "InactiveLimit", "OutOfMemory",
}  # fmt: skip
LIMIT = re.compile(r"(QOS|Assoc|Max)\w+")  # a limit of a QOS, an association or an account
TOO_MUCH = re.compile(r"\w+Per(Job|Node)(Limit)?|\w+WallDuration\w*|QOSTimeLimit|AssociationTimeLimit")


@dataclass(frozen=True)
class Seen:
    """A job in the queue: SLURM's word for its state, why it waits, and when it may start; empty if unknown."""

    word: str
    reason: str = ""
    start: str = ""  # such as 2026-11-23T14:05:00; not where SLURM counts on a year for each job that has no time limit

    @property
    def place(self) -> str:
        """WAITING, RUNNING or OVER. A state that is not in SLURM's manual counts as WAITING, and is shown as it is."""
        return STATES.get(self.word, WAITING)

    @property
    def why(self) -> str:
        """Why it waits, in SLURM's words: its state if that is not PENDING, and its reason."""
        words = [self.word if self.word != "PENDING" else "", self.reason if self.reason != "None" else ""]
        return ": ".join(filter(None, words))

    @property
    def remedy(self) -> str | None:
        """Why it will not start by itself, and what to do; None if it only has to wait."""
        if self.word not in STATES:
            return "minfer does not know this state; SLURM's manual of squeue explains it"
        return HELD.get(self.word) or explain_wait(self.reason)


def normalize(reason: str) -> str:
    """SLURM's reason as STUCK has it: some versions print sentences in brackets, with underscores for spaces."""
    return reason.strip().strip("()").replace("_", " ")


def explain_wait(reason: str) -> str | None:
    """Why a job with this reason will not start by itself, and what to do; None if it only has to wait, or if SLURM's manual
    does not have the reason."""
    if reason in STUCK:
        return STUCK[reason]
    if re.match(r"Reservation .* was deleted", reason):
        return REMOVED
    # SLURM appends the node; a job of cluster.distribute or of flags.nodelist has such a reason
    if reason.startswith(("ReqNodeNotAvail", "Nodes required for job are DOWN")):
        return (
            "a node that it has to run on is down, drained or reserved; it waits until the node is back, or cancel it"
        )
    if reason in PASSING or not LIMIT.fullmatch(reason):
        return None
    if reason.startswith("QOSMin"):
        return "a job asks for less than the QOS requires; raise cluster.cpus, cluster.memory_gb or cluster.gres"
    if TOO_MUCH.fullmatch(reason):
        return f"a job asks for more than a limit of your account or QOS allows; {LOWER}, or cluster.time_min"
    return "a limit of your account or QOS is reached; unless it is below what one job needs, it passes when jobs end"


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
            account = Account(
                state.split()[0], queued, float(elapsed) if elapsed.isdigit() and queued is not None else None
            )
            found |= dict.fromkeys(expand_tasks(job), account)
        elif job in found and (size := re.fullmatch(r"([\d.]+)([KMGT]?)", rss)):
            mb = (
                float(size[1])
                * {"": 1e-6, "K": 2**10 / 1e6, "M": 2**20 / 1e6, "G": 2**30 / 1e6, "T": 2**40 / 1e6}[size[2]]
            )
            found[job] = replace(found[job], max_rss_mb=max(mb, found[job].max_rss_mb or 0.0))
    return found


def expand_tasks(job: str) -> list[str]:
    """The tasks of an array that SLURM names together because none has started: `86_[0-2,7%10]` is 86_0, 86_1, 86_2, 86_7."""
    if not (found := re.fullmatch(r"(\d+_)\[([\d,:-]+)(?:%\d+)?\]", job)):
        return [job]
    parts = re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", found[2])
    return [
        f"{found[1]}{task}"
        for first, last, step in parts
        for task in range(int(first), int(last or first) + 1, int(step or 1))
    ]
