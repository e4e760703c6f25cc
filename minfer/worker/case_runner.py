"""Runs the cases of a shard one by one, and writes their rows: those of the first pass, and the full ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from minfer.bench.timing import Timing
from minfer.ops import Case
from minfer.plan.shard import Shard
from minfer.process.stopping import Stopping
from minfer.rows import store
from minfer.rows.store import Row
from minfer.rows.writer import Writer
from minfer.worker import write_rows
from minfer.worker.claim import Claim
from minfer.worker.compiler import Builds
from minfer.worker.supervisor import Machine, Supervisor


@dataclass
class CaseRunner:
    """What it takes to run a case and to write its row. Both methods raise StoreError, the OSError of a full disk, Superseded,
    and KeyboardInterrupt when the shard was told to stop soon."""

    shard: Shard
    machine: Machine
    supervisor: Supervisor
    builds: Builds
    writer: Writer
    claim: Claim
    stopping: Stopping
    tell: Callable[..., None]
    statuses: list[tuple[Case, str]] = field(default_factory=list)  # of the cases whose row stays, in their order

    def run_first_pass(self, cases: list[Case]) -> None:
        """Write a row with cold times for each case, while compilers may still run. The next case is the first one whose
        kernel is built. A row stays only if timing the case again would add nothing: if it has no times, or if its kernel
        is slow and no compiler ran beside it."""
        left = [*cases]
        while left:
            case = self.builds.take_ready(left)
            quiet = self.builds.is_complete
            columns = self._measure(case, self.shard.timing.first())
            is_slow = store.SLOW in (columns.get("flags") or "")
            if columns["status"] not in store.MEASURED or (is_slow and quiet):
                self._write(case, columns, self.shard.timing)
            else:
                self._write(case, columns, self.shard.timing.first(), event="first")

    def run(self, case: Case) -> None:
        """Write the row of a case that stays."""
        self._write(case, self._measure(case, self.shard.timing), self.shard.timing)

    def _measure(self, case: Case, timing: Timing) -> Row:
        if self.stopping.soon:
            raise KeyboardInterrupt
        self.supervisor.check_log()
        self.tell(event="case", case=case.key)
        found = self.builds.found
        self.supervisor.take(found)
        return self.supervisor.run(case, found.get(f"{case.op}/{case.kernel}"), timing)

    def _write(self, case: Case, columns: Row, timing: Timing, event: str = "done") -> None:
        peaks, skew_s = self.supervisor.peaks, self.claim.skew_s
        row = write_rows.complete(self.shard, self.machine, peaks, case, columns, skew_s, timing)
        self.claim.check()
        path = write_rows.append(self.writer, row, self.tell)
        self.stopping.progressed = True
        if event == "done":
            self.statuses.append((case, row["status"]))
        told = {name: value for name in store.TOLD if (value := row.get(name)) is not None}
        self.tell(event=event, case=case.key, status=row["status"], file=str(path), row=told)
