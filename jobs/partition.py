"""The nodes that `cluster.distribute` stands for."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable

from minfer.jobs import preflight
from minfer.plan.config import Cluster, UserError

USABLE = ("idle", "mixed", "allocated", "completing", "planned", "reserved")  # by sinfo's words; others start no job


def nodes(cluster: Cluster) -> tuple[list[str], list[str]]:
    """The nodes that get the matrix, in sinfo's order, and for each that is left out a sentence that says why: those of the
    partition, or those that are named, that have the GPUs asked for and start jobs. Raises UserError where none is left, and
    for a name that is no node's."""
    there = {node.name: node for node in preflight.nodes(cluster.partition)}
    where = f"partition {cluster.partition}" if cluster.partition else "the default partition"
    if not there:
        raise UserError(f"sinfo names no node of {where}, which cluster.distribute needs; correct cluster.partition")
    named = cluster.distribute if isinstance(cluster.distribute, list) else []
    wanted = _expand(named) or list(there)
    if unknown := [name for name in wanted if name not in there]:
        raise UserError(
            f"{where} has no node {unknown[0]}; cluster.distribute takes true, or some of {', '.join(there)}"
        )
    excluded = set(_expand([str(cluster.flags["exclude"])])) if cluster.flags.get("exclude") else set()
    chosen, left_out = [], []
    for name in wanted:
        node = there[name]
        if name in excluded:
            left_out.append(f"{name} is left out: cluster.flags excludes it")
        elif not preflight.fits(node, cluster.gres):
            left_out.append(f"{name} is left out: it does not have {cluster.gres}")
        elif node.state not in USABLE:
            left_out.append(
                f"{name} is left out: it is {node.state.rstrip('*')}{' (no answer)' * node.state.endswith('*')}"
            )
        else:
            chosen.append(name)
    if not chosen:
        raise UserError(f"no node is left for cluster.distribute: {'; '.join(left_out)}")
    return chosen, left_out


def _expand(names: Iterable[str]) -> list[str]:
    """Names such as node[01-03] as one each, by scontrol."""
    if not (plain := ",".join(names)):
        return []
    try:
        told = subprocess.run(
            ["scontrol", "show", "hostnames", plain], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"cannot read {plain!r} as names of nodes; write them as in [node01,node02]") from error
    return told.split()
