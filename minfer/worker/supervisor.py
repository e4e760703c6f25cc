"""Runs one shard: a supervisor that never touches the device, and a child (`minfer.worker.child`) that it can lose.

Whatever happens to the child (a crash, a hang, no memory), the supervisor writes the case's row and goes on with the
next case in a fresh child.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from minfer import build, ops, profilers
from minfer.bench import device
from minfer.bench.derived import derive
from minfer.ops import Case
from minfer.plan.shard import Shard, Unfit
from minfer.process.remote import Died, Process, adopt_orphans
from minfer.process.stopping import AGAIN, STOPPED, Stopping
from minfer.rows import store
from minfer.rows.store import Row
from minfer.rows.writer import StoreError, Writer
from minfer.worker.claim import Claim, Superseded, alone
from minfer.worker.compiler import Compiler

CLAIMS = ("cold_us", "cold_speedup", "steady_us", "steady_speedup")  # what the judge holds against its own clock

TIMES = tuple(name for name in store.SCHEMA.names if name.startswith(("cold_", "steady_")))

AMEND_S = 5.0  # how often rows are amended while a profiler runs: a part of 64 rows takes 50 ms to write

PATIENCE_S = 60.0  # how long a results folder may be gone before a row goes elsewhere
SKEW_S = 60.0  # by how much a node's clock may differ before it is worth a word
GONE = (errno.ENOENT, errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN)

# A resumed run does not repeat these; what crashed or ran out of time or memory may do better another time.
SETTLED = ("ok", "unconverged", "wrong", "dishonest", "impossible", "unsupported")


class Supervisor:
    """Runs the cases of a shard and writes their rows."""

    def __init__(self, shard: Shard, stopping: Stopping | None = None) -> None:
        self.shard = shard
        self.stopping = stopping or Stopping()
        self.written = 0  # rows, by this process
        self._skew_s = 0.0
        self.child: Process | None = None
        self.judge: Process | None = None
        self.writer: Writer | None = None
        self.environment: Row = {"device_kind": shard.device}
        self.capability: tuple[int, int] | None = None
        self.gpu: str | None = None
        self.peaks: dict[str, float] | None = None  # measured by the first child
        self.builds: dict[str, build.Built | str] = {}  # by kernel; a str is why it failed
        self.log = Path(shard.folder) / "logs" / f"{shard.name}.log"
        progress = Path(shard.folder) / "progress" / f"{shard.name}.jsonl"
        progress.parent.mkdir(parents=True, exist_ok=True)
        self._progress = open(progress, "a", buffering=1)  # noqa: SIM115

    def run(self) -> None:
        """All cases that this run has no row of yet. Raises StoreError when rows cannot be written; the finished ones
        are then in its `rows`. Raises Unfit, and KeyboardInterrupt when it was told to stop before all were done."""
        try:
            claim = Claim(self.shard)
            self._skew_s = claim.skew_s
            gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
            self._tell(event="start", job=device.job(), node=socket.gethostname(), gpu=gpu)
            if abs(self._skew_s) > SKEW_S:
                off = f"{abs(self._skew_s):.0f} s {'behind' if self._skew_s > 0 else 'ahead'}"
                said = f"the clock of {socket.gethostname()} is {off}; its rows' times are set right"
                self._tell(event="warning", message=said)
            child = self._start_child()
            self.writer = Writer(self._results_folder(), self.shard.name)
            statuses = list(self._finished())
            finished = {case.key for case, _ in statuses}
            todo = [case for case in self._todo() if case.key not in finished]
            compiler = Compiler(self.shard, build.arch_of(self.capability) if self.capability else "", self._tell)
            self.builds = compiler.compile([case for case in todo if self._unsupported(case) is None])
            statuses = [(case, status) for case, status in statuses if case.key in self.writer.where]
            with alone(self.gpu, lambda: self._tell(event="waiting", gpu=self.gpu)):
                if todo:
                    self._prepare(child)
                for case in todo:
                    if self.stopping.soon:
                        raise KeyboardInterrupt
                    self._tell(event="case", case=case.key)
                    row = self._row(case, self._run_case(case))
                    claim.check()
                    path = self._append(self.writer, row)
                    self.written += 1
                    statuses.append((case, row["status"]))
                    self._tell(event="done", case=case.key, status=row["status"], file=str(path))
                self._profile(self.writer, statuses)
            claim.check()
            self.writer.close()
        except Died as error:
            self._tell(event="failed", message=f"no kernel could be run: {error}")
            raise
        finally:
            self._end_processes()

    def _finished(self) -> Iterator[tuple[Case, str]]:
        """The cases that earlier processes of this shard have written rows of: their job was ended, and is run again.

        The Writer is told of those that a profiler has not seen."""
        assert self.writer
        cases = {case.key: case for case in self.shard.cases}
        for path in sorted(Path(self.shard.results).glob(f"*/{self.shard.run}/{self.shard.name}-*.parquet")):
            for row in store.rows([path], ["case", "status", "profilers"]):
                if case := cases.get(row["case"]):
                    if set(self.shard.profilers) - set(row["profilers"] or ()) and path.parent == self.writer.folder:
                        self.writer.where[case.key] = path
                    self._tell(event="kept", case=case.key)
                    yield case, row["status"]

    def _start_child(self) -> Process:
        """A child that knows its device."""
        shard = self.shard
        self.child = Process("minfer.worker.child", self.log)
        hello = self.child.ask(shard.case_timeout_s, device=shard.device, timing=asdict(shard.timing))
        self.environment = hello["environment"]
        self.capability = tuple(hello["capability"]) if hello["capability"] else None
        self.gpu = hello["gpu"]
        return self.child

    def _prepare(self, child: Process) -> Process:
        """Have the peaks measured, by the first child, and then the extra files loaded."""
        shard = self.shard
        self.peaks = child.ask(shard.case_timeout_s, peaks=self.peaks, extra=shard.extra)["peaks"]
        return child

    def _end_processes(self) -> None:
        for process in (self.child, self.judge):
            if process:
                process.kill()
        self.child = self.judge = None

    def _results_folder(self) -> Path:
        return Path(self.shard.results) / store.slug(self.environment["device"]) / self.shard.run

    def _todo(self) -> Iterator[Case]:
        """The cases that the results do not hold already, for the same sources, device and timing."""
        done: dict[tuple[str, str, str, str], str] = {}
        if self.shard.resume:
            columns = ["case", "source", "timing", "device", "status", "guarantee", "profilers"]
            for old in store.rows(store.files(Path(self.shard.results)), columns):
                unjudged = self.shard.untrusted and old["guarantee"] == "in-process"
                unprofiled = set(self.shard.profilers) - set(old["profilers"] or ())
                if old["status"] in SETTLED and not unjudged and not unprofiled:
                    done[old["case"], old["source"], old["timing"], old["device"]] = old["status"]
        for case in self.shard.cases:
            source = ops.get(case.op).kernels[case.kernel].fingerprint()
            status = done.get((case.key, source, self.shard.timing.name, self.environment["device"]))
            if status is None:
                yield case
            else:
                self._tell(event="skip", case=case.key, status=status)

    def _append(self, writer: Writer, row: Row) -> Path:
        """Write a row, and wait for a results folder that is gone for a while. Raises StoreError."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return writer.append(row)
            except StoreError as error:
                if getattr(error.__cause__, "errno", None) not in GONE or time.monotonic() > deadline:
                    raise
            self._tell(event="waiting", why="the results folder is gone")
            time.sleep(1)

    def _unsupported(self, case: Case) -> str | None:
        kernel = ops.get(case.op).kernels[case.kernel]
        return kernel.elsewhere(self.shard.device) or kernel.unsupported(case, self.capability)

    def _run_case(self, case: Case) -> Row:
        """The columns of a case, whatever becomes of the child."""
        if why := self._unsupported(case):
            return {"status": "unsupported", "message": why}
        built = self.builds.get(f"{case.op}/{case.kernel}")
        if isinstance(built, str):
            return {"status": "compile_error", "message": built}
        row: Row = {}
        if built:
            row = {"build_s": built.seconds, "registers": built.registers}
            row |= {"shared_bytes": built.shared_bytes, "local_bytes": built.local_bytes}
        child = self.child or self._prepare(self._start_child())
        child.phase = "load"
        try:
            reply = child.ask(self.shard.case_timeout_s, case=case.to_dict())
        except Died as death:
            self.child = None
            if any(name in str(death) for name in ("SIGTERM", "SIGKILL")):
                time.sleep(1)  # whoever ends a job may end this process last, and then it was not the kernel's fault
            return row | {"status": death.status, "message": str(death)}
        row = self._columns(case, reply) | row
        if not reply.get("usable") or row["status"] in ("wrong", "dishonest") or self.shard.untrusted:
            child.kill()  # what it did to its process must not outlast it
            self.child = None
        if row["status"] not in store.MEASURED:
            return row
        return row | {"guarantee": "in-process"} | (self._judge(case, row) if self.shard.untrusted else {})

    def _columns(self, case: Case, reply: Mapping[str, Any]) -> Row:
        """What a reply comes to. Its process ran code that may say anything: of a correct case only the samples are
        believed, and what follows from them is worked out here."""
        try:
            said = dict(reply["row"])
            row = said | dict.fromkeys(TIMES)
            if row["status"] in store.MEASURED:
                roofs = self.peaks if self.shard.device == "cuda" else None
                row |= {name: said.get(name) for name in ("cold_empty_us", "steady_rotations")}
                row |= derive(case, reply["cold"], reply["steady"], self.shard.timing, roofs)
            if row["status"] not in store.MEASURED:  # no time without a right result
                row |= dict.fromkeys(TIMES)
            if row["status"] not in store.STATUSES:
                raise ValueError(row["status"])
            store.to_table([row])
            return row
        except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
            return {"status": "dishonest", "message": f"answered what no case can come to: {error!r}"}

    def _judge(self, case: Case, row: Row) -> Row:
        """What the judge, which has seen nothing of the kernel's process, makes of its row."""
        self.judge = self.judge or Process("minfer.worker.judge", self.log)
        claims = {name: row[name] for name in CLAIMS if row.get(name)}
        about = {"device": self.shard.device, "extra": self.shard.extra, "log": str(self.log)}
        timeout_s = self.shard.case_timeout_s
        try:
            reply = self.judge.ask(10 * timeout_s, case=case.to_dict(), claims=claims, timeout_s=timeout_s, **about)
        except Died as death:
            self.judge = None
            reply = {"row": {"status": "error", "message": f"the judge failed: {death}"}}
        judged = reply["row"]
        return judged | dict.fromkeys(TIMES) if "status" in judged else judged  # no time without a right result

    def _profile(self, writer: Writer, statuses: list[tuple[Case, str]]) -> None:
        """Run the profilers, one after the other, when all rows are on disk, and add to the rows what they find."""
        self._end_processes()  # they may want the device, and its memory, to themselves
        shard = self.shard
        timeouts = shard.build_timeout_s, shard.build_timeout_s + shard.case_timeout_s
        about = shard.device, shard.extra, self._results_folder(), self.log
        setting = profilers.Setting(*about, *timeouts, shard.timing.audit)
        for name, options in shard.profilers.items():
            self._tell(event="profiler", profiler=name, cases=len(statuses))
            found: dict[str, Row] = {}
            written = time.monotonic()
            try:
                with contextlib.closing(profilers.run(name, options, statuses, setting)) as findings:
                    for case, columns in findings:
                        found[case.key] = columns
                        self._tell(event="profiled", profiler=name, case=case.key, why=columns["profilers"][name])
                        if time.monotonic() > written + AMEND_S:
                            writer.amend(found)
                            found, written = {}, time.monotonic()
            finally:  # also when the job is stopped
                writer.amend(found)

    def _row(self, case: Case, columns: Row) -> Row:
        """The whole row of a case: what it is, where and when it ran, and the columns that running it filled."""
        kernel = ops.get(case.op).kernels[case.kernel]
        return {
            **columns,
            "run": self.shard.run,
            "case": case.key,
            **case.to_dict(),
            "backend": kernel.backend,
            "source": kernel.fingerprint(),
            "timing": self.shard.timing.name,
            "finished": datetime.datetime.fromtimestamp(time.time() + self._skew_s, datetime.UTC),
            "commit": self.shard.commit,
            "peaks": self.peaks,
            **self.environment,
        }

    def _tell(self, **event: Any) -> None:
        try:
            self._progress.write(json.dumps({"time": time.time() + self._skew_s} | event) + "\n")
        except OSError:
            pass  # progress is a courtesy; a full disk is reported where rows are written


def run_shard(path: str, grace_s: float = 0) -> None:
    """Run the shard described in a file: what a job executes. Ends by SystemExit where not all is done.

    Stops cleanly at SIGINT and SIGTERM, and within `grace_s` seconds, if it can after the current case, at SIGUSR2: then
    with the status AGAIN, unless it got nothing done."""
    stopping = Stopping()
    stopping.install(grace_s)
    adopt_orphans()
    shard = Shard.load(Path(path))
    supervisor = Supervisor(shard, stopping)
    status = 1
    try:
        shard.check_sources()
        for file in shard.extra:
            ops.load_file(Path(file))
        supervisor.run()
        status = 0
    except StoreError as error:
        supervisor._tell(event="failed", message=f"{error}; {_rescue(shard, error)}")
    except Unfit as error:
        supervisor._tell(event="failed", message=str(error))
    except Superseded as error:
        sys.exit(str(error))  # its progress is the other's now
    except Died:
        pass
    except KeyboardInterrupt:
        again = stopping.soon and supervisor.written > 0
        status = AGAIN if again else STOPPED
        why = "its time was over" if stopping.soon else "it was stopped"
        if stopping.soon and not again:
            why = "its time was over before one case was finished; raise cluster.time_min"
        supervisor._tell(event="stopped", message=why, again=again)
    supervisor._tell(event="end")
    if status:
        sys.exit(status)


def _rescue(shard: Shard, error: StoreError) -> str:
    """Keep rows that could not be written where they belong, and say where."""
    for folder in (Path(shard.folder), Path("/tmp")):  # not TMPDIR, which goes with the job
        path = folder / f"minfer-{shard.run}-{shard.name}-rescued.parquet"
        try:
            store.write(store.to_table(error.rows), path)
            return f"its {len(error.rows)} unwritten rows are in {path}"
        except OSError:
            continue
    return f"its {len(error.rows)} unwritten rows are lost"
