"""What a job needs, asked before it is queued, again in its script on the node, and once more there by Python. Each lack is
one sentence with the remedy."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from jobs import record
from minfer.plan.config import Cluster, Container, UserError

LEAST_SCRATCH_MB = 200  # a shard's builds and their temporary files
NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "cifs", "smb3", "9p", "afs", "panfs")
SAID = "minfer: "  # how a sentence begins in the log of a job


def before_submitting(cluster: Cluster, container: Container, kind: str) -> None:
    """What can be known before a queue is waited for. Raises UserError."""
    if container.image is not None:
        image = Path(container.image).expanduser().absolute()
        if not image.exists():
            raise UserError(f"the container image {image} does not exist; build it, or set container.image")
        if not os.access(image, os.R_OK):
            raise UserError(f"the container image {image} cannot be read; make it readable (chmod a+r)")
        if shutil.which("apptainer") is None:
            raise UserError(
                "container=apptainer needs apptainer, which is not on the PATH; load its module or use container=none"
            )
    if kind == "slurm" and cluster.gres:
        _gpu_exists(cluster)


def _gpu_exists(cluster: Cluster) -> None:
    """That some node of the partition has the GPUs asked for. Raises UserError."""
    wanted = gpus(cluster.gres)
    partition = [f"--partition={cluster.partition}"] if cluster.partition else []
    try:
        told = subprocess.run(
            ["sinfo", "--noheader", "--format=%G", *partition], capture_output=True, text=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return  # sbatch will say it
    there = [gpus(line) for line in told.split()]
    fits = any(
        all((node.get(model, 0) if model else sum(node.values())) >= n for model, n in wanted.items()) for node in there
    )
    if wanted and there and not fits:
        known = ", ".join(sorted({line.split("(")[0] for line in told.split()})).replace("null", "no GPU")
        where = f"of partition {cluster.partition} " if cluster.partition else ""
        raise UserError(
            f"no node {where}has {cluster.gres}, only {known or 'no GPU'}; correct cluster.gres or partition"
        )


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


def said(log: Path) -> str | None:
    """The sentence that a job ended with, from its log."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.removeprefix(SAID) for line in reversed(lines) if line.startswith(SAID)), None)
