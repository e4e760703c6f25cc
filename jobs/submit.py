"""Submits shards through submitit: to SLURM, or to processes on this machine."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import submitit

from jobs import node, record
from jobs.record import Job
from minfer.config import Cluster, Container, UserError
from minfer.stopping import AGAIN

# What a job inside a container needs of the environment that `--cleanenv` drops.
PASS_ON = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS",
           "SLURM_NNODES", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_TMPDIR", "CUDA_VISIBLE_DEVICES",
           "SUBMITIT_EXECUTOR")  # fmt: skip


# The last lines of a job's script, on the node and outside any container, where scontrol is: a shard that had to stop
# and got something done says so by its exit status.
REQUEUE = ["status=$?", f'[ "$status" != {AGAIN} ] || scontrol requeue "$SLURM_JOB_ID"', 'exit "$status"']


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


def submit(shards: list[Path], cluster: Cluster, container: Container, folder: Path) -> list[Job]:
    """Start one job a shard, note them in the run's folder and return at once. Raises UserError when SLURM refuses."""
    kind = executor_name(cluster)
    python = _python(container)
    # submitit unpickles the function by its name, on the node, so the sources must be importable there.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(node.SOURCES), os.environ.get("PYTHONPATH", "")]))
    executor = submitit.AutoExecutor(
        folder=folder / "jobs", cluster=kind, **({f"{kind}_python": python} if python else {})
    )
    grace_s = min(cluster.grace_s, 20 * cluster.time_min)  # of a short time limit a third at most
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
            slurm_exclusive=cluster.exclusive or None,
            slurm_array_parallelism=cluster.parallel,
            slurm_signal_delay_s=grace_s,
            slurm_setup=list(cluster.setup) or None,
            slurm_teardown=REQUEUE,
            slurm_additional_parameters={"chdir": str(node.SOURCES), "requeue": True} | cluster.flags,
        )
    else:
        # submitit hides all GPUs from a local job, or renumbers them; jobs/node.py puts the user's own choice back.
        os.environ[node.VISIBLE] = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    # Ctrl-C in a terminal goes to every process of its group. Local jobs inherit that it is ignored, and
    # `queue.cancel` ends them in order.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    jobs = []
    try:
        most = _largest_array() if kind == "slurm" else len(shards)
        for start in range(0, len(shards), most):
            part = shards[start : start + most]
            record.announce(folder, [path.stem for path in part])
            n = len(part)
            with contextlib.redirect_stderr(io.StringIO()):  # sbatch's complaint; it is in the error, too
                started = executor.map_array(node.run, list(map(str, part)), [cluster.scratch] * n, [grace_s] * n)
            jobs += [Job(path.stem, job.job_id, kind) for path, job in zip(part, started, strict=True)]
            record.add(folder, jobs[start:])  # at once: what was submitted must be found again
        return jobs
    except submitit.core.utils.FailedJobError as error:
        reason = " ".join(str(error).split("sbatch: error:")[-1].split())
        raise UserError(f"SLURM refused the job: {reason}; change cluster.* and try again") from error
    finally:
        signal.signal(signal.SIGINT, handler)


def _largest_array() -> int:
    """How many tasks an array may have here: SLURM's MaxArraySize, which is one more than the largest index."""
    told = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True).stdout
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", told, re.MULTILINE)
    return max(1, int(found[1])) if found else 1001


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
