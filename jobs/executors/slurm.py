"""Submits shards through submitit: to SLURM, or to processes on this machine."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import submitit

from minfer.jobs import node, preflight
from minfer.jobs import run as record
from minfer.jobs.run import Job
from minfer.plan import shell
from minfer.plan.config import Cluster, Config, Container, UserError
from minfer.process.stopping import AGAIN

# What a job inside a container needs of the environment that `--cleanenv` drops.
PASS_ON = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURMD_NODENAME", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID",
           "SLURM_NTASKS", "SLURM_NNODES", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_TMPDIR", "SLURM_CPUS_PER_TASK",
           "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SUBMITIT_EXECUTOR")  # fmt: skip
PASS_ON_ONE = 'eval "[ -z \\"\\${$name+x}\\" ] || export \\"APPTAINERENV_$name=\\$$name\\""'


# The last lines of a job's script, on the node and outside any container, where scontrol is: a shard that had to stop
# and got something done says so by its exit status.
REQUEUE = ["status=$?", f'[ "$status" != {AGAIN} ] || scontrol requeue "$SLURM_JOB_ID"', 'exit "$status"']


LOCAL_MIN = 30 * 24 * 60  # what submitit gives a local job, which has no time limit


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


def submit(shards: list[Path], cluster: Cluster, container: Container, folder: Path, retry: int = 0) -> list[Job]:
    """Start the jobs of shards, note them in the run's folder and return at once. A job under SLURM has a shard for each
    of its GPUs; where shards are pinned to a node, the job is, too. Whoever calls this has the lock of
    `record.submitting`. Raises UserError when something that jobs need is not there, or SLURM refuses."""
    kind = executor_name(cluster)
    preflight.before_submitting(cluster, container, kind)
    if kind == "slurm" or container.image is not None:
        check_names(folder, cluster)
    sources = record.sources(folder)
    grace_s = _grace_s(cluster)
    executor = _executor(kind, cluster, container, folder)
    total = len(record.shards(folder))
    # Ctrl-C in a terminal goes to every process of its group. Local jobs inherit that it is ignored, and
    # `queue.cancel` ends them in order.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    jobs: list[Job] = []
    try:
        most = _largest_array() if kind == "slurm" else len(shards)
        for where, part in _arrays(shards, cluster, shards_per_job(cluster, kind), most):
            if kind == "slurm":
                executor.update_parameters(**parameters(cluster, container, sources, folder, grace_s, where))
            record.announce(folder, [path.stem for group in part for path in group])
            n = len(part)
            gpus = [_gpu(int(group[0].stem), total) if kind == "local" else None for group in part]
            with _environment(sources), contextlib.redirect_stderr(io.StringIO()):  # sbatch's complaint is in the error
                started = executor.map_array(
                    node.run, [list(map(str, group)) for group in part], [cluster.scratch] * n, [grace_s] * n, gpus,
                    [cluster.gres] * n,
                )  # fmt: skip
            asked = retry, cluster.time_min, cluster.memory_gb
            new = [
                Job(path.stem, job.job_id, kind, *asked)
                for group, job in zip(part, started, strict=True)
                for path in group
            ]
            record.add(folder, new)  # at once: what was submitted must be found again
            jobs += new
        return jobs
    except submitit.core.utils.FailedJobError as error:
        reason = " ".join(str(error).split("sbatch: error:")[-1].split())
        if jobs:
            raise UserError(
                f"{len(jobs)} of {len(shards)} shards are queued as {folder.name}, and SLURM refused the rest: {reason}; "
                f"go on later with {shell.command('resubmit', folder.name)}"
            ) from error
        raise UserError(f"SLURM refused the job: {reason}; change cluster.* and try again") from error
    finally:
        signal.signal(signal.SIGINT, handler)


def script(jobs: int, cluster: Cluster, container: Container, folder: Path, where: str | None = None) -> str:
    """What sbatch is given for a run of so many jobs, all on the node `where` if there is one: the script of its first
    array. Nothing is submitted, but the run's request must be in its folder. Raises UserError."""
    if executor_name(cluster) != "slurm":
        raise UserError("dry_run=script shows what SLURM is given, and jobs run without it here; choose cluster=slurm")
    check_names(folder, cluster)
    executor = _executor("slurm", cluster, container, folder, where)
    if (tasks := min(jobs, _largest_array())) > 1:
        executor.parameters["map_count"] = tasks  # as submitit's map_array does
    return executor._make_submission_file_text(executor._submitit_command_str, "")


def _executor(
    kind: str, cluster: Cluster, container: Container, folder: Path, where: str | None = None
) -> submitit.core.core.PicklingExecutor:
    """submitit's, with all that jobs of a run ask for."""
    sources, logs = folder / record.COPY, folder / "jobs"
    executor: submitit.core.core.PicklingExecutor
    python = python_of_jobs(kind, container, cluster.scratch, sources, folder)
    if kind == "slurm":
        executor = submitit.SlurmExecutor(folder=logs, python=python)
        executor.update_parameters(**parameters(cluster, container, sources, folder, _grace_s(cluster), where))
    else:
        executor = submitit.LocalExecutor(folder=logs, python=python)
        executor.update_parameters(timeout_min=LOCAL_MIN)
    return executor


def _grace_s(cluster: Cluster) -> int:
    """cluster.grace_s, but of a short time limit a third at most."""
    return cluster.grace_s if cluster.time_min is None else min(cluster.grace_s, 20 * cluster.time_min)


def _arrays(
    shards: list[Path], cluster: Cluster, size: int, most: int
) -> Iterator[tuple[str | None, list[list[Path]]]]:
    """What is submitted at once, as an array of at most so many jobs: the shards of each, `size` at most, and the node that
    they are pinned to, if any."""
    pinned = (lambda path: json.loads(path.read_text())["node"]) if cluster.distribute else (lambda path: None)
    for where, of in itertools.groupby(shards, pinned):
        paths = list(of)
        groups = [paths[start : start + size] for start in range(0, len(paths), size)]
        for start in range(0, len(groups), most):
            yield where, groups[start : start + most]


def parameters(
    cluster: Cluster, container: Container, sources: Path, folder: Path, grace_s: int, where: str | None = None
) -> dict[str, Any]:
    """What a job asks of SLURM, and its script does before and after Python, by submitit's names; `where`: the one node
    that may run it."""
    flags = {str(name): value for name, value in cluster.flags.items()}
    name = flags.pop("job-name", f"minfer-{folder.name}")
    if where is not None:
        flags.pop("exclude", None)  # which is why it is not one of the others
        flags["nodelist"] = where
    return {
        "job_name": name,
        "time": cluster.time_min,
        "wckey": flags.pop("wckey", None),  # submitit's own is refused by sites that keep a list of them
        "cpus_per_task": cluster.cpus,
        "mem": None if cluster.memory_gb is None else f"{cluster.memory_gb}GB",
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "gres": cluster.gres,
        "exclusive": cluster.exclusive or None,
        "array_parallelism": cluster.parallel,
        "signal_delay_s": grace_s,
        "setup": [
            *(f"export {name}={shlex.quote(value)}" for name, value in imports(sources).items()),
            "export SLURM_EXPORT_ENV=ALL",  # a user's SBATCH_EXPORT=NONE is for this script; its tasks get what it has
            *cluster.setup,
            *preflight.script_lines(sys.executable, cluster, container, sources, folder),
        ],
        "teardown": REQUEUE,
        "additional_parameters": {"chdir": str(sources), "requeue": True} | flags,
    }


def shards_per_job(cluster: Cluster, kind: str) -> int:
    """How many shards a job runs at once: as many as it has GPUs; a local job has one."""
    return max(1, sum(preflight.gpus(cluster.gres).values())) if kind == "slurm" else 1


def _gpu(shard: int, total: int) -> str | None:
    """The CUDA_VISIBLE_DEVICES of a local shard: a GPU of its own where the run has several, else whatever the user said."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if total == 1 or visible == "":
        return visible
    names = visible.split(",") if visible else [str(index) for index in range(total)]
    return names[shard % len(names)]


@contextlib.contextmanager
def _environment(sources: Path) -> Iterator[None]:
    """What jobs inherit: they import the run's own copy of the sources, not those that are installed, and never what lies
    where the launcher was called."""
    theirs = imports(sources)
    before = {name: os.environ.get(name) for name in theirs}
    os.environ |= theirs
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def imports(sources: Path) -> dict[str, str]:
    """The environment by which a job imports the run's own copy of the sources."""
    path = os.pathsep.join(filter(None, [str(sources), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _largest_array() -> int:
    """How many tasks an array may have here: SLURM's MaxArraySize, which is one more than the largest index."""
    told = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True).stdout
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", told, re.MULTILINE)
    return max(1, int(found[1])) if found else 1001


def _kernels(request: Config) -> list[str]:
    """The folders of the files that a user's kernels are in."""
    return list(dict.fromkeys(str(Path(path).parent) for path in request.extra))


def check_names(folder: Path, cluster: Cluster) -> None:
    """Raise UserError for folders that jobs could not be told of: sbatch reads its options line by line and loses
    backslashes, and colons and commas end a path for Python or Apptainer."""
    request = record.request(folder)
    for path in (str(folder), request.results, *_kernels(request), cluster.scratch or ""):
        if not path.isprintable() or re.search(r"[:,\\]", path):
            raise UserError(
                f"the folder {path!r} has a colon, comma, backslash or control character in its name, of which jobs could "
                "not be told; rename it or choose another"
            )


def python_of_jobs(kind: str, container: Container, scratch: str | None, sources: Path, folder: Path) -> str | None:
    """The command that stands for `python` in a job: inside the container, where there is one. It sees the run's sources,
    which it cannot write, the run's folder, the results and the node's scratch; nothing else of the clone and, under
    SLURM, not the user's home. Kernels that are not trusted have no network."""
    if container.image is None:
        return None
    image = Path(container.image).expanduser().absolute()
    request = record.request(folder)
    kernels = _kernels(request)
    places = [str(folder), *(f"{path}:{path}:ro" for path in (sources, *kernels)), request.results, *container.binds]
    places += [scratch] if scratch else []
    options = [f"--bind {shlex.quote(path)}" for path in places]
    options += [
        f"--pwd {shlex.quote(str(sources))} --env PYTHONPATH={shlex.quote(str(sources))} --env PYTHONSAFEPATH=1"
    ]
    options += ["--net --network none"] if request.untrusted else []
    start = f"apptainer exec --nv {' '.join(options)}"
    script = preflight.python_inside([folder, sources, *kernels, request.results])
    inside = f"{shlex.quote(str(image))} sh -c {shlex.quote(script)} sh"
    if kind == "local":  # keeps the environment, and its caches at home
        return f"{start} {inside}"
    # What SLURM told a task is known to a shell in that task, and Apptainer takes it from variables of its own.
    pass_on = f"for name in {' '.join(PASS_ON)}; do {PASS_ON_ONE}; done"
    start += ' --cleanenv --no-home ${SLURM_TMPDIR:+--bind "$SLURM_TMPDIR"}'
    task = f'{pass_on}; exec {start} {inside} "$@"'
    return f"sh -c {shlex.quote(task)} sh"
