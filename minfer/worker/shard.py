"""What a job executes: one shard, from its file to its rows."""

from __future__ import annotations

import os
import resource
import socket
import sys
from pathlib import Path

from minfer import profilers
from minfer.bench import device
from minfer.build.errors import DISK_FULL
from minfer.ops import Case
from minfer.plan import extra
from minfer.plan.config import UserError
from minfer.plan.order import find_first_pass
from minfer.plan.shard import Shard, Unfit
from minfer.process.death import Died
from minfer.process.orphans import adopt_orphans
from minfer.process.stopping import AGAIN, STOPPED, Stopping
from minfer.rows import store
from minfer.rows.writer import StoreError, Writer
from minfer.worker import resume, write_rows
from minfer.worker.case_runner import CaseRunner
from minfer.worker.claim import Claim, Superseded, lock_gpu
from minfer.worker.compiler import Compiler
from minfer.worker.events import Events
from minfer.worker.profiling import profile
from minfer.worker.supervisor import Supervisor

SKEW_S = 60.0  # a larger difference of a node's clock is reported


def run_cases(shard: Shard, tell: Events, stopping: Stopping) -> None:
    """Run all cases of which this run has no row yet. Raises StoreError if rows cannot be written; its `rows` are then the
    finished ones. Raises OSError if the run's folder is full, Unfit, Died if no kernel could be run at all, and
    KeyboardInterrupt when told to stop."""
    log = Path(shard.folder) / "logs" / f"{shard.name}.log"
    supervisor = Supervisor(shard, log)
    try:
        claim = Claim(shard)
        tell.skew_s = claim.skew_s
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
        tell(event="start", job=device.job(), node=device.node(), gpu=gpu)
        if abs(claim.skew_s) > SKEW_S:
            off = f"{abs(claim.skew_s):.0f} s {'behind' if claim.skew_s > 0 else 'ahead'}"
            tell(
                event="warning", message=f"the clock of {socket.gethostname()} is {off}; its rows' times are set right"
            )
        machine = supervisor.start()
        folder = Path(shard.results) / store.slug(machine.environment["device"]) / shard.run
        writer = Writer(folder, shard.name)

        finished, seen = set(), set()  # the keys of cases that have a row that stays, or one of the first pass
        statuses = []  # of the cases that profilers have yet to see
        written = {row.case.key: row for row in resume.find_written(shard)}  # the newest of each case
        for row in written.values():
            if row.path.parent == folder and (row.is_first or set(shard.profilers) - row.profiled):
                writer.where[row.case.key] = row.path
            if row.is_first:
                seen.add(row.case.key)
                continue
            tell(event="kept", case=row.case.key)
            finished.add(row.case.key)
            if row.case.key in writer.where:
                statuses.append((row.case, row.status))
        elsewhere = resume.Elsewhere(shard, machine)
        todo = [case for case in resume.find_pending(shard, elsewhere, tell) if case.key not in finished]
        first = [case for case in _choose_first_pass(shard) if case.key not in finished | seen]
        wanted = [case for case in (*first, *todo) if supervisor.unsupported(case) is None]
        with Compiler(shard, machine.arch, tell, supervisor.sandbox).start(wanted, spare=1 if first else 0) as builds:
            if not first:
                builds.wait()
            with lock_gpu(machine.gpu, lambda: tell(event="waiting", gpu=machine.gpu)):
                builds.wait_for_device()
                if todo:
                    supervisor.prepare()
                runner = CaseRunner(shard, machine, supervisor, builds, writer, claim, stopping, tell, statuses)
                runner.run_first_pass(first)
                builds.wait()
                finished |= {case.key for case, _ in statuses}
                for case in elsewhere.order([case for case in todo if case.key not in finished]):
                    elsewhere.refresh()
                    if (found := elsewhere.find(case)) is not None:  # another run has measured it meanwhile
                        tell(event="skip", case=case.key, status=found.status)
                        continue
                    runner.run(case)
                supervisor.end()  # profilers may want the device, and its memory, to themselves
                profile(shard, _setting(shard, folder, log), statuses, writer, tell)
        claim.check()
        writer.close()
    finally:
        supervisor.end()


def _choose_first_pass(shard: Shard) -> list[Case]:
    """The cases of a shard's first pass. There is none where another run may be writing the same rows, nor with a
    judge, which repeats the timing of a case when in doubt."""
    return [] if shard.resume or shard.untrusted else find_first_pass(shard.cases, shard.timing)


def _largest_mb() -> float:
    """The largest resident memory of this process, or of a process that it has waited for, in MB."""
    kb = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return kb * 1024 / 1e6


def _explain_full_disk(error: OSError, shard: Shard) -> str:
    """What to do about a full disk that is not the results folder's."""
    where = str(error.filename or shard.folder)
    other = " or set runs= to a folder on another disk" if where.startswith(shard.folder) else ""
    return f"cannot write to {where}: {error.strerror}; free space there{',' if other else ''}{other}"


def _setting(shard: Shard, folder: Path, log: Path) -> profilers.Setting:
    timeouts = shard.build_timeout_s, shard.build_timeout_s + shard.case_timeout_s
    extra = [] if shard.untrusted else shard.extra
    return profilers.Setting(shard.device, extra, folder, log, *timeouts, shard.timing.audit)


def run_shard(path: str, grace_s: float = 0) -> None:
    """Run the shard described in a file. Raises SystemExit if not all cases are done.

    Stops cleanly at SIGINT and SIGTERM. At SIGUSR2 it stops within `grace_s` seconds, after the current case if it can, and
    exits with the status AGAIN if it has finished a case."""
    stopping = Stopping()
    stopping.install(grace_s)
    adopt_orphans()
    shard = Shard.load(Path(path))
    tell = Events(shard)
    status = 1
    try:
        shard.check_sources()
        for file in shard.extra:
            extra.load(file)
        run_cases(shard, tell, stopping)
        status = 0
    except StoreError as error:
        tell(event="failed", message=f"{error}; {write_rows.rescue(shard, error)}")
    except (Unfit, UserError) as error:
        tell(event="failed", message=str(error))
    except OSError as error:
        if not DISK_FULL.search(str(error)):
            raise
        tell(event="failed", message=_explain_full_disk(error, shard))
    except Superseded as error:
        sys.exit(str(error))  # the other process reports progress now
    except Died as error:
        tell(event="failed", message=f"no kernel could be run: {error}")
    except KeyboardInterrupt:
        again = stopping.soon and stopping.progressed
        status = AGAIN if again else STOPPED
        why = "its time was over" if stopping.soon else "it was stopped"
        if stopping.soon and not again:
            why = "its time was over before one case was finished; raise cluster.time_min"
        tell(event="stopped", message=why, again=again, limit="time_min" if stopping.soon and not again else None)
    tell(event="end", rss_mb=_largest_mb())
    if status:
        sys.exit(status)
