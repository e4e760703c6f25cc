"""Which cases of a shard need not be run: an earlier process of this run left their rows, or, with `resume=true`, another
run did, with the same sources, rules, device and timing."""

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

# A resumed run does not repeat these; what crashed or ran out of time or memory may do better another time.
FINAL = ("ok", "unconverged", "wrong", "dishonest", "impossible", "unsupported")


def kept(shard: Shard, tell: Callable[..., None]) -> Iterator[tuple[Case, str, set[str], Path]]:
    """The cases that earlier processes of this shard have written rows of, because their job was ended and is run again:
    each with its status, the profilers that have seen it, and the file. Rows that are to be replaced do not count."""
    cases = {case.key: case for case in shard.cases}
    for path in sorted(Path(shard.results).glob(f"*/{shard.run}/{shard.name}-*.parquet")):
        for row in store.rows([path], ["case", "status", "profilers", "finished"]):
            replaced = row["finished"].timestamp() <= shard.redo.get(row["case"], float("-inf"))
            if (case := cases.get(row["case"])) and not replaced:
                tell(event="kept", case=case.key)
                yield case, row["status"], set(row["profilers"] or ()), path


def todo(shard: Shard, machine: Machine, tell: Callable[..., None]) -> Iterator[Case]:
    """The cases that the results do not hold already."""
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
