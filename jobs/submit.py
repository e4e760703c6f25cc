"""Submits shards through submitit: to SLURM, or to processes on this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import time
from pathlib import Path

import submitit

from jobs import node
from minfer.config import Cluster, Container, UserError

# What a job inside a container needs of the environment that `--cleanenv` drops.
PASS_ON = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS",
           "SLURM_NNODES", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_TMPDIR", "CUDA_VISIBLE_DEVICES",
           "SUBMITIT_EXECUTOR")  # fmt: skip


def executor_name(cluster: Cluster) -> str:
    """`slurm` or `local`. Raises UserError where SLURM was asked for and is not there."""
    found = shutil.which("sbatch") is not None
    if cluster.executor == "auto":
        return "slurm" if found else "local"
    if cluster.executor not in ("slurm", "local"):
        raise UserError(f"cluster.executor is {cluster.executor!r}; it can be auto, local or slurm")
    if cluster.executor == "slurm" and not found:
        raise UserError(
            f"cluster={cluster.name} needs SLURM, and sbatch is not on the PATH; use a login node or cluster=local"
        )
    return cluster.executor


def submit(shards: list[Path], cluster: Cluster, container: Container, folder: Path) -> list[submitit.Job[None]]:
    """Start one job a shard and return at once. Raises UserError when SLURM refuses."""
    kind = executor_name(cluster)
    python = _python(container)
    # submitit unpickles the function by its name, on the node, so the sources must be importable there.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(node.SOURCES), os.environ.get("PYTHONPATH", "")]))
    executor = submitit.AutoExecutor(
        folder=folder / "jobs", cluster=kind, **({f"{kind}_python": python} if python else {})
    )
    executor.update_parameters(timeout_min=cluster.time_min)
    if kind == "slurm":
        executor.update_parameters(
            name="minfer",
            cpus_per_task=cluster.cpus,
            mem_gb=cluster.memory_gb,
            slurm_partition=cluster.partition,
            slurm_account=cluster.account,
            slurm_qos=cluster.qos,
            slurm_constraint=cluster.constraint,
            slurm_gres=cluster.gres,
            slurm_setup=list(cluster.setup) or None,
            slurm_additional_parameters={"chdir": str(node.SOURCES)},
        )
    else:
        # submitit hides all GPUs from a local job, or renumbers them; jobs/node.py puts the user's own choice back.
        os.environ[node.VISIBLE] = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    # Ctrl-C in a terminal goes to every process of its group. Local jobs inherit that it is ignored, and `stop` ends
    # them in order.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return executor.map_array(node.run, [str(path) for path in shards], [cluster.scratch] * len(shards))
    except submitit.core.utils.FailedJobError as error:
        reason = " ".join(str(error).split("sbatch: error:")[-1].split())
        raise UserError(f"SLURM refused the job: {reason}; change cluster.* and try again") from error
    finally:
        signal.signal(signal.SIGINT, handler)


def _python(container: Container) -> str | None:
    """The command that stands for `python` in a job: inside the container, where there is one."""
    if container.image is None:
        return None
    image = Path(container.image).expanduser().absolute()
    if not image.exists():
        raise UserError(f"the container image {image} does not exist; build it, or set container.image")
    if shutil.which("apptainer") is None:
        raise UserError(
            "container=apptainer needs apptainer, which is not on the PATH; load its module or use container=none"
        )
    # The variables are expanded by the job's shell, on the node.
    passed = " ".join(f'--env {name}="${{{name}:-}}"' for name in PASS_ON)
    binds = " ".join(f"--bind {shlex.quote(path)}" for path in [str(node.SOURCES), *container.binds])
    pwd = f"--pwd {shlex.quote(str(node.SOURCES))} --env PYTHONPATH={shlex.quote(str(node.SOURCES))}"
    return f"apptainer exec --nv --cleanenv {passed} {binds} {pwd} {shlex.quote(str(image))} python"


def stop(jobs: list[submitit.Job[None]], patience_s: float = 20) -> None:
    """Cancel jobs; local ones are waited for, so that nothing is left running."""
    local = [process for job in jobs if (process := getattr(job, "_process", None)) is not None]
    if not local:
        for job in jobs:
            job.cancel(check=False)
    deadline = time.monotonic() + patience_s
    while running := [process for process in local if process.poll() is None]:
        for process in running:
            # Again and again: a job that is still importing has no handler yet. submitit hands it on to the job.
            process.send_signal(signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
        time.sleep(0.2)
