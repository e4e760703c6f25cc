"""Finds the cases of a shard that need not run: an earlier process of this run has written their rows, or, with
`resume=true`, another run has, with the same sources, rules, device and timing."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from minfer import ops
from minfer.bench import rules_of
from minfer.fingerprint import fingerprint
from minfer.ops import Case
from minfer.plan.shard import Shard
from minfer.rows import store
from minfer.worker.supervisor import Machine

# A resumed run does not repeat these. What crashed or ran out of time or memory may succeed the next time.
FINAL = ("ok", "unconverged", "wrong", "dishonest", "impossible", "unsupported")


@dataclass(frozen=True)
class Written:
    """A row that an earlier process of a shard has written, before its job was ended and started again."""

    case: Case
    status: str
    profiled: set[str]  # the profilers that have run over it
    path: Path
    is_first: bool  # whether it is of the first pass, and is to be replaced


def find_written(shard: Shard) -> Iterator[Written]:
    """The rows of earlier processes of this shard. Those that `redo` replaces do not count."""
    cases = {case.key: case for case in shard.cases}
    for path in sorted(Path(shard.results).glob(f"*/{shard.run}/{shard.name}-*.parquet")):
        for row in store.rows([path], ["case", "status", "profilers", "finished", "timing"]):
            replaced = row["finished"].timestamp() <= shard.redo.get(row["case"], float("-inf"))
            if (case := cases.get(row["case"])) and not replaced:
                is_first = row["timing"] == shard.timing.first().name
                yield Written(case, row["status"], set(row["profilers"] or ()), path, is_first)


@dataclass(frozen=True)
class Found:
    """A row because of which a case need not run."""

    status: str
    guarantee: str | None
    path: Path
    key: tuple[str, str, str, str]  # its columns KEY


KEY = ("case", "source", "timing", "device")


class Elsewhere:
    """The rows that all runs have written for a shard's cases, for `resume=true`. Another run may be writing rows at the same
    time."""

    def __init__(self, shard: Shard, machine: Machine) -> None:
        self.shard, self.machine = shard, machine
        self._read: dict[Path, int] = {}  # files, and when each was last changed
        self._done: dict[tuple[str, str, str, str], Found] = {}

    def find(self, case: Case) -> Found | None:
        """The row because of which a case need not run; None if the case has to run. Considers only rows that `refresh` has
        read."""
        if not self._done or case.key in self.shard.redo:
            return None
        kernel = ops.get(case.op).kernels[case.kernel]
        device = self.machine.environment["device"]
        must_be_judged = self.shard.untrusted and not kernel.returns  # those are never judged
        for rules in (rules_of("judged"), rules_of(None)):
            source = fingerprint(kernel, self.machine.arch, rules)
            found = self._done.get((case.key, source, self.shard.timing.name, device))
            # A judged row with the source of a row that nobody judged is of a judge with other rules.
            if found and not (must_be_judged and found.guarantee and rules == rules_of(None)):
                return found
        return None

    def refresh(self) -> None:
        """Read the rows that were written since the last call."""
        if not self.shard.resume:
            return
        columns = [*KEY, "status", "guarantee", "profilers"]
        for path in store.files(Path(self.shard.results)):
            try:
                changed = path.stat().st_mtime_ns
            except FileNotFoundError:  # merged into another
                continue
            if self._read.get(path) == changed:
                continue
            self._read[path] = changed
            for old in store.rows([path], columns):
                unprofiled = set(self.shard.profilers) - set(old["profilers"] or ())
                if old["status"] in FINAL and not unprofiled:
                    key = old["case"], old["source"], old["timing"], old["device"]
                    self._done[key] = Found(old["status"], old["guarantee"], path, key)

    def order(self, cases: list[Case]) -> list[Case]:
        """Cases in the order in which to run them. Each run begins at another case, so that two runs at once do not time the
        same case at the same time, and each finds the other's rows."""
        first = zlib.crc32(self.shard.run.encode()) % len(cases) if self.shard.resume and cases else 0
        return cases[first:] + cases[:first]


def find_pending(shard: Shard, elsewhere: Elsewhere, tell: Callable[..., None]) -> Iterator[Case]:
    """The cases that still have to run."""
    elsewhere.refresh()
    for case in shard.cases:
        if (found := elsewhere.find(case)) is None:
            yield case
        else:
            tell(event="skip", case=case.key, status=found.status)
