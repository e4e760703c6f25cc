"""Checks on the node, before the shards begin, that it has what they need. (The job's script has already checked what Python
needs to start.) A failed check ends the job with one sentence that says what is missing and what to do."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from minfer.jobs.logs import PREFIX
from minfer.jobs.partition import count_gpus

LEAST_SCRATCH_MB = 200  # a shard's builds and their temporary files
LEAST_FILES = 2000
NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "cifs", "smb3", "9p", "afs", "panfs")


def prepare_scratch(base: Path) -> None:
    """Make the folder for a job's builds, and see that it has room. Ends the process with a sentence where it cannot be."""
    remedy = "set cluster.scratch to another folder of the node"
    try:
        base.mkdir(parents=True, exist_ok=True)
        free_mb = shutil.disk_usage(base).free >> 20
        disk = os.statvfs(base)
    except OSError as error:
        sys.exit(f"{PREFIX}cannot make the scratch folder {base} on {socket.gethostname()}: {error.strerror}; {remedy}")
    if free_mb < LEAST_SCRATCH_MB:
        sys.exit(
            f"{PREFIX}the scratch folder {base} on {socket.gethostname()} has {free_mb} MB free, and compiling takes up to "
            f"{LEAST_SCRATCH_MB}; free it or {remedy}"
        )
    if disk.f_files and disk.f_favail < LEAST_FILES:  # some file systems have no such limit
        sys.exit(
            f"{PREFIX}the scratch folder {base} on {socket.gethostname()} has room for {disk.f_favail} more files, and "
            f"compiling makes up to {LEAST_FILES}; remove some or {remedy}"
        )


def check_gpu(gres: str | None) -> None:
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
    if why := explain_model(gres, names) or old_driver(driver):
        sys.exit(f"{PREFIX}node {socket.gethostname()}: {why}")


def explain_model(gres: str | None, names: list[str]) -> str | None:
    """Why GPUs of these names are not what `gpu:l40s:1` asks for; a site's word without a number is not held against them."""
    plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in names]
    for model in count_gpus(gres):
        word = re.match(r"[a-z]+\d+[a-z]*", model.lower())
        if word and plain and not any(word[0] in name for name in plain):
            return f"{gres} was asked for, and the GPU is {names[0]}; correct cluster.gres, or add cluster.constraint"
    return None


def find_warnings(scratch: Path, profilers: Collection[str]) -> Iterator[str]:
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
