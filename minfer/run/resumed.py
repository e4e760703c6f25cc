"""What a launch with `resume=true` finds in the results before it starts a job."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from minfer.jobs.executors.base import Device
from minfer.ops import Case
from minfer.plan.config import Config, name_changes
from minfer.plan.shard import Shard
from minfer.rows import store
from minfer.worker.resume import KEY, Elsewhere, Found
from minfer.worker.supervisor import Machine


def find(config: Config, device: Device, cases: list[Case]) -> dict[str, Found]:
    """The rows because of which cases need not run, by the cases' keys, as the jobs would find them. Empty where the jobs'
    device is not known yet: under SLURM and in a container they look for themselves."""
    if not config.resume or not device.name:
        return {}
    shard = Shard(
        name="", run="", folder="", results=config.results, device=device.kind, cases=cases,
        timing=name_changes(config.timing), case_timeout_s=config.case_timeout_s, build_timeout_s=config.build_timeout_s,
        resume=True, untrusted=config.untrusted, profilers=config.list_profilers(),
    )  # fmt: skip
    elsewhere = Elsewhere(shard, Machine({"device": device.name}, device.capability, None))
    elsewhere.refresh()
    return {case.key: row for case in cases if (row := elsewhere.find(case))}


def load(found: Collection[Found], columns: Iterable[str]) -> tuple[list[store.Row], list[Path]]:
    """These rows, in their order, and the files that they are in."""
    files = sorted({each.path for each in found})
    rows = {tuple(row[name] for name in KEY): row for row in store.rows(files, {*KEY, *columns})}
    return [rows[each.key] for each in found if each.key in rows], files
