"""Finds the cases of a shard that need not run: an earlier process of this run has written their rows, or, with
`resume=true`, another run has, with the same sources, rules, device and timing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from minfer import ops
from minfer.bench import RULES
from minfer.fingerprint import fingerprint
from minfer.ops import Case
from minfer.plan.shard import Shard
from minfer.rows import store
from minfer.worker.supervisor import Machine

# A resumed run does not repeat these. What crashed or ran out of time or memory may succeed the next time.
FINAL = ("ok", "unconverged", "wrong", "dishonest", "impossible", "unsupported")


def find_written(shard: Shard, tell: Callable[..., None]) -> Iterator[tuple[Case, str, set[str], Path]]:
    """The cases of which earlier processes of this shard have written rows, before their job was ended and started again.
    Each comes with its status, the profilers that have run over it, and its file. Rows that `redo` replaces do not count."""
    cases = {case.key: case for case in shard.cases}
    for path in sorted(Path(shard.results).glob(f"*/{shard.run}/{shard.name}-*.parquet")):
        for row in store.rows([path], ["case", "status", "profilers", "finished"]):
            replaced = row["finished"].timestamp() <= shard.redo.get(row["case"], float("-inf"))
            if (case := cases.get(row["case"])) and not replaced:
                tell(event="kept", case=case.key)
                yield case, row["status"], set(row["profilers"] or ()), path


def find_pending(shard: Shard, machine: Machine, tell: Callable[..., None]) -> Iterator[Case]:
    """The cases that still have to run."""
    done: dict[tuple[str, str, str, str], tuple[str, bool]] = {}
    if shard.resume:
        columns = ["case", "source", "timing", "device", "status", "guarantee", "profilers"]
        for old in store.rows(store.files(Path(shard.results)), columns):
            unprofiled = set(shard.profilers) - set(old["profilers"] or ())
            if old["status"] in FINAL and not unprofiled:
                unjudged = shard.untrusted and old["guarantee"] == "in-process"
                done[old["case"], old["source"], old["timing"], old["device"]] = old["status"], unjudged
    for case in shard.cases:
        kernel = ops.get(case.op).kernels[case.kernel]
        source = fingerprint(kernel, machine.arch, RULES)
        status, unjudged = done.get((case.key, source, shard.timing.name, machine.environment["device"]), (None, False))
        unjudged = unjudged and not kernel.returns  # those are never judged
        if status is None or unjudged or case.key in shard.redo:
            yield case
        else:
            tell(event="skip", case=case.key, status=status)
