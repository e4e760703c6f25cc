"""What a job needs, asked before it is queued, again in its script on the node, and once more there by Python. Each lack is
one sentence with the remedy."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from minfer.jobs import run as record
from minfer.plan.config import Cluster, Container, UserError

LEAST_SCRATCH_MB = 200  # a shard's builds and their temporary files
NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "cifs", "smb3", "9p", "afs", "panfs")
SAID = "minfer: "  # how a sentence begins in the log of a job


def before_submitting(cluster: Cluster, container: Container, kind: str) -> None:
    """What can be known before a queue is waited for. Raises UserError."""
    if container.image is not None:
        image = Path(container.image).expanduser().absolute()
        if not image.exists():
            raise UserError(
                f"the container image {image} does not exist; build it (docker build -t minfer . && apptainer build "
                f"--build-arg BOOTSTRAP=docker-daemon --build-arg IMAGE=minfer:latest {image} apptainer.def), name "
                "another with container.image, or use container=none"
            )
        if not os.access(image, os.R_OK):
            raise UserError(f"the container image {image} cannot be read; make it readable (chmod a+r)")
        if shutil.which("apptainer") is None:
            raise UserError(
                "container=apptainer needs apptainer, which is not on the PATH; load its module or use container=none"
            )
    if kind == "slurm":
        _node_exists(cluster)


@dataclass(frozen=True)
class Node:
    """What a node of a partition has, and how long a job may run there."""

    name: str
    state: str  # by sinfo's words, such as idle; with a * it does not answer
    cpus: int
    memory_mb: int
    gres: str
    minutes: float

    @property
    def gpus(self) -> dict[str, int]:
        return gpus(self.gres)


def nodes(partition: str | None) -> list[Node]:
    """The nodes of a partition, None for the site's default one; none where SLURM does not say."""
    chosen = [f"--partition={partition}"] if partition else []
    try:
        told = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%P|%c|%m|%G|%l|%N|%T", *chosen],
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.split("|") for line in told.splitlines() if line.count("|") == 6]
    lines = [line for line in lines if partition or line[0].endswith("*")] or lines
    return [
        Node(name, state, _leading(cpus), _leading(memory), gres.strip(), _minutes(limit))
        for _, cpus, memory, gres, limit, name, state in lines
    ]


def _leading(text: str) -> int:
    """The number that `8`, `8+` or `64000+` begins with."""
    found = re.match(r"\d+", text.strip())
    return int(found[0]) if found else 0


def _minutes(limit: str) -> float:
    """A time limit of SLURM's, such as 1-12:00:00, 30:00 or infinite, in minutes."""
    if not (found := re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit.strip())):
        return math.inf
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return 1440 * days + 60 * hours + minutes + seconds / 60


def _node_exists(cluster: Cluster) -> None:
    """That some node of the partition has what a job asks for, and jobs may run as long there. Raises UserError."""
    there = nodes(cluster.partition)
    if not there:
        return  # sbatch will say why
    wanted = gpus(cluster.gres)
    where = f"of partition {cluster.partition} " if cluster.partition else ""
    fit = [node for node in there if fits(node, cluster.gres)]
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
            having = f" with {cluster.gres}" if wanted else ""
            raise UserError(
                f"no node {where}has {asked}{unit} {what}{having}, at most {most}{unit}; lower {key}, or set it to null for "
                "the site's default"
            )
    longest = most_of(cluster)["time_min"]
    if cluster.time_min is not None and cluster.time_min > longest:
        raise UserError(
            f"jobs {where}may run for {longest:g} min, and cluster.time_min is {cluster.time_min}; lower it"
        )


def most_of(cluster: Cluster) -> dict[str, float]:
    """The most that a job with its GPUs can have of `time_min` and `memory_gb`, as far as SLURM says."""
    fit = [node for node in nodes(cluster.partition) if fits(node, cluster.gres)]
    return {
        "time_min": max((node.minutes for node in fit), default=math.inf),
        "memory_gb": max((node.memory_mb // 1024 for node in fit), default=math.inf),
    }


def fits(node: Node, gres: str | None) -> bool:
    """Whether a node has the GPUs that a job asks for."""
    of = node.gpus
    return all((of.get(model, 0) if model else sum(of.values())) >= n for model, n in gpus(gres).items())


def models(cluster: Cluster) -> list[str]:
    """The models of GPU that a job of no particular model may get, where there are several."""
    if "" not in gpus(cluster.gres):
        return []
    found = sorted({model for node in nodes(cluster.partition) for model in node.gpus if model})
    return found if len(found) > 1 else []


def gpus(gres: str | None) -> dict[str, int]:
    """How many GPUs of each model such a text of SLURM's names: `gpu:l40s:4` -> {"l40s": 4}; "" is any model."""
    found = re.findall(r"(?:^|,)gpu(?::(?=[\w.-]*[A-Za-z])([\w.-]+))?(?::(\d+))?(?=[,(]|$)", gres or "")
    return {model: int(n or 1) for model, n in found}


def script_lines(python: str, cluster: Cluster, container: Container, sources: Path, folder: Path) -> list[str]:
    """The first lines of a job's script: what the node must have before Python can start at all."""
    seen = "put the clone, runs= and results= on a file system that the nodes see"
    needs = [("-d", path, seen) for path in (sources, Path(record.request(folder).results))]
    if container.image is not None:
        image = Path(container.image).expanduser().absolute()
        needs.append(("-r", image, "copy the container image there, or set container.image"))
    else:
        needs.append(("-x", Path(python), "put the environment (uv sync) on a file system that the nodes see"))
    lines = [_refuse(f"[ {test} {shlex.quote(str(path))} ]", f"has no {path}", then) for test, path, then in needs]
    if container.image is not None:
        lines.append(_refuse("command -v apptainer >/dev/null", "has no apptainer", "load its module in cluster.setup"))
        if cluster.scratch:  # a folder that is not there cannot be bound
            where = shlex.quote(cluster.scratch)
            lines.append(_refuse(f"mkdir -p {where}", f"cannot make {cluster.scratch}", "set cluster.scratch"))
    return lines


def python_inside(folders: Iterable[Path | str]) -> str:
    """A script that takes Python's place in a container: it ends with a sentence where the container does not have a folder.
    Apptainer goes on without what a site does not let it bind, and Python would not find what it is to import."""
    remedy = "; have the site allow it (user bind control = yes in apptainer.conf), or use container=none"
    said = [
        (shlex.quote(str(f)), shlex.quote(f"{SAID}apptainer did not bind {f} into the container{remedy}"))
        for f in folders
    ]
    return "".join(f"[ -d {folder} ] || {{ echo {why} >&2; exit 1; }}; " for folder, why in said) + 'exec python "$@"'


def _refuse(test: str, what: str, remedy: str) -> str:
    said = shlex.quote(f" {what}; {remedy}, or leave the node out with +cluster.flags.exclude=")
    return f'{test} || {{ node="${{SLURMD_NODENAME:-$(hostname -s)}}"; echo "minfer: node $node"{said}"$node" >&2; exit 1; }}'


def scratch(base: Path) -> None:
    """Make the folder for a job's builds, and see that it has room. Ends the process with a sentence where it cannot be."""
    remedy = "set cluster.scratch to another folder of the node"
    try:
        base.mkdir(parents=True, exist_ok=True)
        free_mb = shutil.disk_usage(base).free >> 20
    except OSError as error:
        sys.exit(f"{SAID}cannot make the scratch folder {base} on {socket.gethostname()}: {error.strerror}; {remedy}")
    if free_mb < LEAST_SCRATCH_MB:
        sys.exit(
            f"{SAID}the scratch folder {base} on {socket.gethostname()} has {free_mb} MB free, and compiling takes up to "
            f"{LEAST_SCRATCH_MB}; free it or {remedy}"
        )


def gpu(gres: str | None) -> None:
    """See that the node's GPUs are of the model asked for, and its driver new enough for this PyTorch. Ends the process with
    a sentence where not; says nothing where no driver answers, because PyTorch will."""
    import pynvml

    from minfer.bench.device import old_driver  # imports torch, as the shard will

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        names = [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        driver = int(pynvml.nvmlSystemGetCudaDriverVersion())
    except pynvml.NVMLError:
        return
    if why := other_model(gres, names) or old_driver(driver):
        sys.exit(f"{SAID}node {socket.gethostname()}: {why}")


def other_model(gres: str | None, names: list[str]) -> str | None:
    """Why GPUs of these names are not what `gpu:l40s:1` asks for; a site's word without a number is not held against them."""
    plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in names]
    for model in gpus(gres):
        word = re.match(r"[a-z]+\d+[a-z]*", model.lower())
        if word and plain and not any(word[0] in name for name in plain):
            return f"{gres} was asked for, and the GPU is {names[0]}; correct cluster.gres, or add cluster.constraint"
    return None


def warnings(scratch: Path, profilers: Collection[str]) -> Iterator[str]:
    """What costs a run on this node something, and does not end it."""
    if (kind := file_system(scratch)) in NETWORK:
        yield (
            f"scratch {scratch} on {socket.gethostname()} is on a network file system ({kind}), which makes builds slow; "
            "set cluster.scratch to a disk of the node"
        )
    driver = Path("/proc/driver/nvidia/params")
    if "ncu" in profilers and os.geteuid() != 0 and driver.exists() and "RmProfilingAdminOnly: 1" in driver.read_text():
        yield (
            f"users may not read the GPU's counters on {socket.gethostname()}, so profiler=ncu will find nothing; an "
            "administrator can allow it with the driver option NVreg_RestrictProfilingToAdminUsers=0"
        )


def file_system(path: Path, mounts: str | None = None) -> str:
    """The type of the file system that a path is on, by the kernel's table of mounts."""
    table = Path("/proc/mounts").read_text() if mounts is None else mounts
    best, kind = "", ""
    for _, where, name, *_ in (line.split() for line in table.splitlines()):
        where = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), where)
        if path.is_relative_to(where) and len(where) >= len(best):  # of mounts over one another the last
            best, kind = where, name
    return kind


MEMORY = "it ran out of memory; raise cluster.memory_gb"
# Lines of a log that say why a job ended, and what to add to them.
TELLING = (
    (r"oom[-_ ]?kill|out of memory|exceeded (job |step )?memory limit|OUT_OF_MEMORY", MEMORY),
    (
        r"^(ImportError|ModuleNotFoundError): .*",
        "the environment of the job lacks a package; uv sync, or correct cluster.setup",
    ),
    (
        r"command not found|No such file or directory",
        "correct cluster.setup, or put the file on a file system that the nodes see",
    ),
    (r"^\w*(Error|Exception)\b.*", ""),
)


def telling(log: Path, end: str = "") -> str | None:
    """The line of a job's log that says why it ended, with what to do; `end` is SLURM's word for that end."""
    if end == "OUT_OF_MEMORY":
        return MEMORY
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for pattern, remedy in TELLING:
        for line in reversed(lines[-200:]):
            if re.search(pattern, line, re.IGNORECASE):
                shown = "".join(c for c in line.strip() if c.isprintable())[:200]
                return f"{shown}; {remedy}" if remedy and remedy != MEMORY else remedy or shown
    return None


def limit(log: Path, end: str = "") -> str | None:
    """The key of `cluster` that a job ended by: what SLURM wrote to its log of its time or memory, or its word for the end."""
    if word := {"OUT_OF_MEMORY": "memory_gb", "TIMEOUT": "time_min"}.get(end):
        return word
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed([line for line in lines[-200:] if line.startswith(("slurmstepd", "srun"))]):
        if re.search(r"oom[-_ ]?kill|exceeded (job |step )?memory limit|OUT_OF_MEMORY", line, re.IGNORECASE):
            return "memory_gb"
        # SLURM may warn by SIGUSR2 a minute early, which ends a process that has not begun to listen.
        if "DUE TO TIME LIMIT" in line or "User defined signal 2" in line:
            return "time_min"
    return None


def said(log: Path) -> str | None:
    """The sentence that a job ended with, from its log."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.removeprefix(SAID) for line in reversed(lines) if line.startswith(SAID)), None)
