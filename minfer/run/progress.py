"""How far the shards of a run are: what their processes wrote down, and what the queue says of their jobs."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minfer.jobs import executors, logs, queue
from minfer.jobs.executors.slurm import hides_jobs
from minfer.jobs.run import Run
from minfer.plan import shell
from minfer.plan.shard import Shard

POLLS_S = (0.5, 10.0)  # the queue is asked so often at first, and at last
BAD = 3  # when this many jobs failed on a node, and none there did anything, it is the node's fault
SURE = 2  # times that a job must not be in the queue before it is over: it may be between two nodes

STATES = ("queued", "running", "done", "failed", "cancelled", "requeued")
EARLY = ("failed", "cancelled")  # states of shards that no job will finish unless they are submitted again
ENDED = ("done", *EARLY)
CANCELLED = "its job was cancelled"


@dataclass
class ShardProgress:
    """One shard. Its state is one of STATES."""

    name: str
    total: int
    all_cases: tuple[str, ...] = ()  # by their keys
    pinned: str | None = None  # the only node that may run it
    state: str = "queued"
    cases: set[str] = field(default_factory=set)  # those that have a row, of this run or, resumed, of another
    first: set[str] = field(default_factory=set)  # those that have only a row of the first pass, with cold times
    skipped: dict[str, str] = field(default_factory=dict)  # of another, with the status of that row
    redo: set[str] = field(default_factory=set)  # those whose row is to be replaced, and has not been yet
    started: int = 0  # times, by its last job
    over: bool = False  # whether its last process came to its end
    message: str | None = None  # why that process did not do all
    again: bool = False  # whether that process asked to be queued again
    progressed: bool = False  # whether that process has finished a case
    cancelled: bool = False  # whether its job was cancelled
    limit: str | None = None  # the key of `cluster` of which it needs more
    warning: str | None = None  # what makes its node worse than it could be
    missed: int = 0  # times in succession that its job was not in the queue
    seen: queue.Seen | None = None  # its job in the queue
    node: str | None = None  # of its last process
    rss_mb: float | None = None  # the most memory that one process of its job had
    submitted: float | None = None  # times of the clock of the run's file system, in seconds
    begun: float | None = None
    queue_s: float | None = None  # from its last submission to its first start
    ran_s: float = 0.0  # its earlier starts since that submission, together
    last: float = 0.0  # when its last event was told

    def take(self, event: dict[str, Any]) -> None:
        """Bring it up to date with an event of its process."""
        self._clock(event)
        match event["event"]:
            case "submitted" | "start":
                self.started = self.started + 1 if event["event"] == "start" else 0
                self.over, self.message, self.again, self.limit = False, None, False, None
                self.cancelled = self.progressed = False
            case "redo":
                self.redo |= set(event["cases"])
                self.cases -= self.redo
                self.over = False
            case "done" | "kept":
                self.cases.add(event["case"])
                self.first.discard(event["case"])
                self.redo.discard(event["case"])
                self.progressed |= event["event"] == "done"
            case "first":
                self.first.add(event["case"])
                self.progressed = True
            case "skip":
                self.cases.add(event["case"])
                self.skipped[event["case"]] = event.get("status", "")
            case "failed" | "stopped":
                self.message, self.again = event["message"], event.get("again", False)
                self.limit = event.get("limit")
            case "cancelled":
                self.cancelled = True
            case "warning":
                self.warning = event["message"]
            case "end":
                self.over = True
                self.rss_mb = event.get("rss_mb")

    def _clock(self, event: dict[str, Any]) -> None:
        """Note when it was submitted, began and was last heard of, by the time of an event."""
        now = event.get("time", 0.0)
        if event["event"] == "submitted":
            self.submitted, self.begun, self.queue_s, self.ran_s = now, None, None, 0.0
            self.node = self.rss_mb = None
        elif event["event"] == "start":
            self.ran_s = self.run_s or 0.0
            if self.queue_s is None and self.submitted is not None:
                self.queue_s = max(0.0, now - self.submitted)
            self.begun, self.node = now, event.get("node")
        self.last = now

    @property
    def run_s(self) -> float | None:
        """How long its processes ran, together, as far as they told of it."""
        return None if self.begun is None else self.ran_s + max(0.0, self.last - self.begun)

    @property
    def waits(self) -> bool:
        """Whether its job is in the queue and does not run yet."""
        return self.seen is not None and self.seen.place == queue.WAITING

    def settle(self, seen: queue.Seen | None) -> None:
        """Its state, by what the queue says of its job; None when the job is not in it."""
        self.seen = seen if seen and seen.place != queue.OVER else None
        self.missed = 0 if self.seen else self.missed + 1
        if self.over and self.message is None:
            self.state = "done"
        elif self.seen:  # also when its process was stopped: SLURM may have it run again
            self.state = "running" if self.seen.place == queue.RUNNING else "requeued" if self.started else "queued"
        elif self.missed >= SURE:
            self.state = "cancelled" if self.cancelled else "failed"


class RunProgress:
    """All shards of a run, read from its folder: by the launcher, or later and from another shell."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.jobs = run.jobs  # the last of each shard
        self.unreadable: list[Path] = []  # files of shards
        loaded = [shard for path in run.shards.values() if (shard := self._load(path))]
        self.cases = [case for shard in loaded for case in shard.cases]
        self.shards = {
            shard.name: ShardProgress(
                shard.name, len(shard.cases), tuple(case.key for case in shard.cases), pinned=shard.node
            )
            for shard in loaded
        }
        self.answers = True  # whether SLURM tells the states of the jobs
        self.hidden = False  # whether it does not because they are another user's
        self.lost: dict[str, queue.Seen] = {}  # jobs of the run in the queue that its folder does not name
        self.ends: dict[str, str] = {}  # SLURM's word for the end of a job whose shard is not done
        self._asked_ends: set[str] = set()
        self._offsets: Counter[Path] = Counter()
        self._begin = self._asked = time.monotonic()
        self._asked -= POLLS_S[1]
        self._first: tuple[float, int] | None = None

    def _load(self, path: Path) -> Shard | None:
        try:
            return Shard.load(path)
        except (ValueError, KeyError, TypeError, OSError):
            self.unreadable.append(path)
            return None

    def read(self) -> list[dict[str, Any]]:
        """Bring it up to date; the events that are new."""
        events = []
        now = time.monotonic()
        due = now - self._asked >= min(POLLS_S[1], max(POLLS_S[0], (now - self._begin) / 20))
        for path in self._find_grown(due):
            for event in _new_events(path, self._offsets):
                if shard := self.shards.get(path.stem):
                    shard.take(event)
                    events.append(event)
        if due:
            self._asked = now
            seen = executors.find_states(self.run, self.jobs.values())
            self.answers = seen is not None
            self.hidden = seen is None and hides_jobs(self.run)
            self._settle(seen)
        if (self._first is None and self.rows) or any(event["event"] == "first" for event in events):
            self._first = now, self.rows  # rows of the first pass come at another pace
        return events

    def _find_grown(self, everything: bool) -> list[Path]:
        """The files of events that have grown. Without `everything` it does not look at those of shards that are done or whose
        job still waits in the queue, because each look at one of hundreds of files on a network file system takes time."""
        if not (told := self.run.progress_files).is_dir():
            return []
        found = []
        with os.scandir(told) as entries:
            for entry in entries:
                name, _, kind = entry.name.rpartition(".")
                shard = self.shards.get(name)
                still = shard is not None and (shard.state == "done" or shard.waits)
                if kind == "jsonl" and (everything or not still):  # not the claims on shards
                    path = Path(entry)
                    found += [path] if entry.stat().st_size > self._offsets[path] else []
        return sorted(found)

    def _settle(self, seen: dict[str, queue.Seen] | None) -> None:
        """Bring the states of shards up to date with the queue. `seen` is None if the queue does not answer."""
        if seen is None:  # what a process reported of itself still holds
            for shard in self.shards.values():
                shard.state = "done" if shard.over and shard.message is None else shard.state
            return
        if lost := seen.keys() - {job.id for job in self.jobs.values()}:
            lost -= {job.id for job in self.run.all_jobs}
        self.lost = {job: seen[job] for job in sorted(lost)}
        some = next(iter(self.lost.values()), None)  # may be the job of any shard that has none
        for shard in self.shards.values():
            job = self.jobs.get(shard.name)
            shard.settle((seen.get(job.id) if job else None) or some)
        failed = {s.name: job for s in self.shards.values() if s.state == "failed" and (job := self.jobs.get(s.name))}
        if new := [job for job in failed.values() if job.id not in self._asked_ends]:
            self._asked_ends |= {job.id for job in new}
            self.ends |= executors.find_ends(new)
            for job in new:
                shard = self.shards[job.shard]
                shard.node = shard.node or logs.find_node(self.run.log(job, "out"))
        for name, job in failed.items():
            if self.ends.get(job.id) == queue.CANCELLED:
                self.shards[name].state = "cancelled"

    def read_once(self) -> None:
        """Bring it up to date with what is known of every job now."""
        for _ in range(SURE):
            self._asked = float("-inf")
            self.read()
            if not self.active or not self.answers:
                return
            time.sleep(POLLS_S[0])

    def glance(self) -> None:
        """Bring it up to date with one look at the queue: a job that is between two nodes may be taken for over."""
        self._asked = float("-inf")
        self.read()
        for shard in self.shards.values():
            if shard.missed and shard.state not in ENDED:
                shard.state = "cancelled" if shard.cancelled else "failed"

    def counts(self) -> dict[str, int]:
        """How many shards are in each state that some are in."""
        found = Counter(shard.state for shard in self.shards.values())
        return {state: found[state] for state in STATES if found[state]}

    @property
    def queued(self) -> bool:
        """Whether its jobs are SLURM's."""
        return bool(self.lost) or any(executors.EXECUTORS[job.executor].queued for job in self.jobs.values())

    @property
    def rows(self) -> int:
        """How many cases have a row that stays."""
        return sum(len(shard.cases) for shard in self.shards.values())

    @property
    def first(self) -> int:
        """How many cases have only a row of the first pass."""
        return sum(len(shard.first) for shard in self.shards.values())

    @property
    def skipped(self) -> dict[str, str]:
        """The cases that were not run because another run has a row of them, with that row's status."""
        return {case: status for shard in self.shards.values() for case, status in shard.skipped.items()}

    @property
    def active(self) -> list[ShardProgress]:
        """The shards whose jobs wait or run."""
        return [shard for shard in self.shards.values() if shard.state not in ENDED]

    @property
    def waiting(self) -> list[ShardProgress]:
        """The shards whose jobs are in the queue and do not run yet."""
        return [shard for shard in self.shards.values() if shard.state in ("queued", "requeued")]

    def warnings(self) -> list[str]:
        """Why jobs wait that will not start by themselves, and which files of the run cannot be read: a sentence each."""
        counts = Counter((shard.seen.why, shard.seen.remedy) for shard in self.waiting if shard.seen)
        told = [f"{n} jobs wait as {why}: {remedy}" for (why, remedy), n in counts.items() if remedy]
        if self.lost:
            told.append(
                f"{len(self.lost)} jobs of the run are in the queue, and its folder does not name them: "
                f"{', '.join([*self.lost][:8])}; their shards are not submitted again, and minfer cancel ends them, too"
            )
        for node, n in self.find_bad_nodes().items():
            retry = shell.command("resubmit", str(shell.relative(self.run.folder)), f"cluster.flags.exclude={node}")
            told.append(f"{n} jobs failed on {node}, and none got anything done there; leave it out with {retry}")
        return told + [
            f"{path} cannot be read, and its shard is left out; start a new run for its cases"
            for path in self.unreadable
        ]

    @property
    def failed(self) -> list[str]:
        """The shards whose jobs ended early and were not cancelled."""
        return [shard.name for shard in self.shards.values() if shard.state == "failed"]

    @property
    def missing(self) -> list[str]:
        """The shards that no job will finish as it is."""
        return [s.name for s in self.shards.values() if s.state in EARLY and len(s.cases) < s.total]

    def find_bad_nodes(self) -> dict[str, int]:
        """The nodes on which at least BAD jobs failed before they had finished a case, and no job did anything else, while
        another node worked. Returns the number of failed jobs for each."""
        failed: Counter[str] = Counter()
        worked = set()
        for shard in self.shards.values():
            if shard.node and shard.state == "failed" and not shard.progressed:
                failed[shard.node] += 1
            elif shard.node and shard.state in ("running", "done", "failed"):
                worked.add(shard.node)
        return {node: n for node, n in failed.items() if n >= BAD and node not in worked and worked}

    def causes(self) -> dict[str, tuple[str, Path | None]]:
        """Why shards ended before all their cases were done, in the same words for the same cause, and the log that may say
        more."""
        found: dict[str, tuple[str, Path | None]] = {}
        for shard in self.shards.values():
            if shard.state not in EARLY:
                continue
            job, why = self.jobs.get(shard.name), shard.message
            if shard.state == "cancelled":
                why = CANCELLED
            elif why is None and job is None:
                why = "it was never submitted"
            if why or job is None or (why := logs.find_sentence(self.run.log(job))):
                found[shard.name] = why or "", None
                continue
            end = f" as {self.ends[job.id]}" if job.id in self.ends else ""
            cause = f": {line}" if (line := logs.find_cause(self.run.log(job), self.ends.get(job.id, ""))) else ""
            found[shard.name] = f"its job ended early{end}{cause}", self.run.log(job)
        return found

    def reasons(self) -> dict[str, str]:
        """Why shards ended before all their cases were done: a sentence each, with the id of the shard's job."""
        return {
            name: self._name_job(name, cause) + (f"; see {log}" if log else "")
            for name, (cause, log) in self.causes().items()
        }

    def _name_job(self, name: str, cause: str) -> str:
        job = self.jobs.get(name)
        return cause.replace("its job", f"its job {job.id}", 1) if job and cause.startswith("its job") else cause

    def line(self) -> str:
        """How far it is, in a line."""
        if not self.answers:
            why = "SLURM shows jobs only to their owner (PrivateData=jobs), so their state is unknown"
            return f"{why if self.hidden else 'SLURM does not answer'}; {self.rows} of {len(self.cases)} rows"
        waits = Counter(shard.seen.why for shard in self.waiting if shard.seen)
        starts = sorted(shard.seen.start for shard in self.waiting if shard.seen and shard.seen.start)
        why = ", ".join(filter(None, waits))
        when = f"the first may start at {starts[0].replace('T', ' ')}" if starts else ""
        because = f" ({'; '.join(filter(None, [why, when]))})" if why or when else ""
        shards = ", ".join(f"{n} {state}{because if state == 'queued' else ''}" for state, n in self.counts().items())
        left = round(self.left_s() or 0)
        eta = f", about {format_time(left)} left" if left else ""
        cold = f", {self.first} more with cold times only" if self.first else ""
        return f"shards: {shards}; {self.rows} of {len(self.cases)} rows{cold}{eta}"

    def left_s(self) -> float | None:
        """Seconds that the missing rows take at the pace of those since this was first read."""
        if self._first is None or not self.active:
            return None
        seconds, rows = time.monotonic() - self._first[0], self.rows - self._first[1]
        return (len(self.cases) - self.rows) * seconds / rows if rows else None


def format_time(seconds: float) -> str:
    """Hours, minutes and seconds, such as 0:09:00."""
    return str(datetime.timedelta(seconds=round(seconds)))


def _new_events(path: Path, offsets: Counter[Path]) -> list[dict[str, Any]]:
    """The whole lines that were appended to a progress file since the last call."""
    with open(path, "rb") as file:
        file.seek(offsets[path])
        text, newline, _ = file.read().rpartition(b"\n")
    offsets[path] += len(text + newline)
    events = []
    for line in text.splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:  # a process was killed in mid-line, and the next one went on behind it
            continue
    return events
