"""The nodes of a SLURM partition: what they have, whether a job fits, and which of them `cluster.distribute` chooses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from minfer.jobs import commands
from minfer.plan.config import Cluster, NoAnswer, UserError

USABLE = ("idle", "mixed", "allocated", "completing", "planned", "reserved")  # states in which nodes start jobs


@dataclass(frozen=True)
class Node:
    """The resources of a node, and how long a job may run there."""

    name: str
    state: str  # as sinfo prints it, such as idle; a * means that the node does not answer
    cpus: int
    memory_mb: int
    gres: str
    minutes: float

    @property
    def gpus(self) -> dict[str, int]:
        return count_gpus(self.gres)

    def fits(self, gres: str | None) -> bool:
        """Whether it has the GPUs that a job asks for."""
        has = self.gpus
        return all((has.get(model, 0) if model else sum(has.values())) >= n for model, n in count_gpus(gres).items())


def count_gpus(gres: str | None) -> dict[str, int]:
    """The number of GPUs of each model in a gres string: `gpu:l40s:4` -> {"l40s": 4}; "" is any model."""
    found = re.findall(r"(?:^|,)gpu(?::(?=[\w.-]*[A-Za-z])([\w.-]+))?(?::(\d+))?(?=[,(]|$)", gres or "")
    return {model: int(n or 1) for model, n in found}


def drop_gpus(gres: str | None) -> str | None:
    """A gres string without its GPUs; None if nothing is left."""
    return ",".join(word for word in (gres or "").split(",") if not count_gpus(word)) or None


def list_nodes(partition: str | None) -> list[Node]:
    """The nodes of a partition (None: the site's default); empty if sinfo fails. Raises NoAnswer."""
    chosen = [f"--partition={partition}"] if partition else []
    try:
        told = commands.run("sinfo", "--noheader", "--Node", "--format=%P|%c|%m|%G|%l|%N|%T", *chosen)
    except commands.Silent as error:
        raise NoAnswer(f"SLURM does not answer: {' '.join(str(error).split())}; try again when it does") from error
    except commands.Failed:
        return []
    lines = [line.split("|") for line in told.splitlines() if line.count("|") == 6]
    lines = [line for line in lines if partition or line[0].endswith("*")] or lines
    return [
        Node(name, state, _leading(cpus), _leading(memory), gres.strip(), _minutes(limit))
        for _, cpus, memory, gres, limit, name, state in lines
    ]


def _leading(text: str) -> int:
    """The number at the start of `8`, `8+` or `64000+`."""
    found = re.match(r"\d+", text.strip())
    return int(found[0]) if found else 0


def _minutes(limit: str) -> float:
    """A time limit of SLURM's, such as 1-12:00:00, 30:00 or infinite, in minutes."""
    if not (found := re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit.strip())):
        return math.inf
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return 1440 * days + 60 * hours + minutes + seconds / 60


def check_asked(cluster: Cluster) -> None:
    """Raise UserError if no node of the partition has what a job asks for, or jobs may not run that long there."""
    there = list_nodes(cluster.partition)
    if not there:
        return  # sbatch will say why
    where = f"of partition {cluster.partition} " if cluster.partition else ""
    fit = [node for node in there if node.fits(cluster.gres)]
    if not fit:
        known = (
            ", ".join(sorted({node.gres.split("(")[0] for node in there}))
            .replace("(null)", "")
            .replace("null", "no GPU")
        )
        raise UserError(
            f"no node {where}has {cluster.gres}, only {known or 'no GPU'}; correct cluster.gres or partition"
        )
    for what, asked, unit, most, key in (
        ("CPUs", cluster.cpus, "", max(node.cpus for node in fit), "cluster.cpus"),
        ("of memory", cluster.memory_gb, " GB", max(node.memory_mb for node in fit) // 1024, "cluster.memory_gb"),
    ):
        if asked is not None and asked > most:
            having = f" with {cluster.gres}" if count_gpus(cluster.gres) else ""
            raise UserError(
                f"no node {where}has {asked}{unit} {what}{having}, at most {most}{unit}; lower {key}, or set it to null for "
                "the site's default"
            )
    longest = max(node.minutes for node in fit)
    if cluster.time_min is not None and cluster.time_min > longest:
        raise UserError(
            f"jobs {where}may run for {longest:g} min, and cluster.time_min is {cluster.time_min}; lower it"
        )


def distribute(cluster: Cluster) -> tuple[list[str], list[str]]:
    """The nodes that run the matrix, in sinfo's order, and a sentence for each node that is left out. They are the nodes of
    the partition, or those named in `cluster.distribute`, that have the GPUs asked for and start jobs. Raises UserError if
    none is left, and for the name of a node that does not exist."""
    there = {node.name: node for node in list_nodes(cluster.partition)}
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
        elif not node.fits(cluster.gres):
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
    """Expand names such as node[01-03], with scontrol."""
    if not (plain := ",".join(names)):
        return []
    try:
        return commands.run("scontrol", "show", "hostnames", plain).split()
    except commands.Failed as error:
        raise UserError(f"cannot read {plain!r} as names of nodes; write them as in [node01,node02]") from error
