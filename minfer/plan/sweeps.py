"""Splits a request for several sweeps into one config for each, with the sweep's own keys and resources."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from minfer.plan.config import Cluster, Config, Shape, UserError, check_values, choose, written

SWEPT = {"op", "kernel", "dtype", "params"}  # what a sweep says, beside its shape
CHANGED = ("kernel", "dtype", "params", "gpu", "cpu", "cluster")  # what an entry of `sweeps` may replace
# Keys of `cluster` that a sweep may state; they hold for its own jobs.
RESOURCES = ("gres", "cpus", "memory_gb", "time_min", "constraint", "exclusive")


def parts(config: Config) -> list[Config]:
    """The configs of the sweeps that a request names, each with the request's timing, profilers and so on. If it names none,
    the request itself. Raises UserError."""
    entries = [entry for at, entry in enumerate(config.sweeps) if entry not in config.sweeps[:at]]
    return [_part(config, *entry_of(entry)) for entry in entries] or [config]


def entry_of(entry: Any) -> tuple[str, dict[str, Any]]:
    """The sweep that an entry of `sweeps` names, and the keys that replace those of the sweep. Raises UserError."""
    if isinstance(entry, str):
        return entry, {}
    if not isinstance(entry, dict) or not isinstance(entry.get("sweep"), str):
        raise UserError(f"sweeps has {entry}; an entry is a sweep's name, or a mapping with it under the key sweep")
    changed = {key: value for key, value in entry.items() if key != "sweep"}
    for key in changed:
        choose(f"key of sweep {entry['sweep']}", key, CHANGED)
    forms = (("params", dict, "{name: value}"), ("gpu", list, "[{n: 64}]"), ("cpu", list, "[{n: 64}]"))
    for key, kind, form in (*forms, ("cluster", dict, "{memory_gb: 64}")):
        if key in changed and not isinstance(changed[key], kind):
            raise UserError(f"sweep {entry['sweep']} has {key} {changed[key]!r}; write it like {key}: {form}")
    return entry["sweep"], changed


def _part(config: Config, name: str, changed: dict[str, Any]) -> Config:
    """One of several sweeps, with the resources that its jobs ask for. Raises UserError where it sets more than these, op,
    kernel, dtype, params and shape."""
    sweep = written("sweep", name)
    cluster = _ask(config.cluster, name, [sweep.pop("cluster", {}), changed.pop("cluster", {})])
    shape = next(
        (each["override /shape"] for each in sweep.pop("defaults", []) if "override /shape" in each), "squares"
    )
    if other := set(sweep) - SWEPT:
        raise UserError(f"sweep {name} sets {min(other)}, and cannot be one of several; run it alone: +sweep={name}")
    shapes = {"shape": written("shape", shape)}
    own = {key: value for key, value in changed.items() if key in SWEPT}
    own["shape"] = {key: value for key, value in changed.items() if key not in SWEPT}
    typed: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(Config), sweep, shapes, own))
    theirs: dict[str, Any] = {key: typed[key] for key in SWEPT}
    part = dataclasses.replace(config, sweeps=[], shape=Shape(**typed["shape"]), cluster=cluster, **theirs)
    check_values(part)
    return part


def _ask(cluster: Cluster, sweep: str, stated: list[Any]) -> Cluster:
    """`cluster` with the keys that a sweep states. Keys on the command line hold for all sweeps. Raises UserError."""
    typed = {word.lstrip("+").partition("=")[0] for word in sys.argv[1:]}
    own = {key: value for each in stated for key, value in each.items() if f"cluster.{key}" not in typed}
    for key in own:
        if key not in RESOURCES:
            raise UserError(
                f"sweep {sweep} sets cluster.{key}, and is one of several; its jobs can only ask for {', '.join(RESOURCES)}"
            )
    try:
        asked: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(Cluster), own))
    except OmegaConfBaseException as error:
        raise UserError(
            f"sweep {sweep}: bad value for cluster.{error.full_key}: {str(error).splitlines()[0]}"
        ) from error
    return dataclasses.replace(cluster, **{key: asked[key] for key in own})
