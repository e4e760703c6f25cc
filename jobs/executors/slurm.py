"""Submits jobs to SLURM, as arrays."""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from minfer.jobs import commands, partition
from minfer.jobs.executors.base import Device, Executor, ignore_interrupts, import_path
from minfer.jobs.executors.submitter import TAKE_FILE, Submitter
from minfer.jobs.logs import NODE
from minfer.jobs.queue import Account, Seen, normalize, parse_accounts
from minfer.jobs.run import Job, Run
from minfer.plan import shell
from minfer.plan.config import MaybeQueued, UserError
from minfer.process.stopping import AGAIN

# Environment variables that a job in a container needs, though `--cleanenv` drops the environment.
PASS_ON = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURMD_NODENAME", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID",
           "SLURM_NTASKS", "SLURM_NNODES", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_TMPDIR", "SLURM_CPUS_PER_TASK",
           "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SUBMITIT_EXECUTOR")  # fmt: skip
PASS_ON_ONE = 'eval "[ -z \\"\\${$name+x}\\" ] || export \\"APPTAINERENV_$name=\\$$name\\""'
# Another line of a job's script: it writes the node's name to the log, so that minfer can tell on which node a job failed.
NODE_LINE = f'echo "{NODE}${{SLURMD_NODENAME:-$(hostname -s)}}"'
# The last lines of a job's script. They run on the node, outside any container, where scontrol is available. A shard that
# was stopped after it had finished some cases exits with AGAIN, and its job is queued again.
REQUEUE = ["status=$?", f'[ "$status" != {AGAIN} ] || scontrol requeue "$SLURM_JOB_ID"', 'exit "$status"']


class Slurm(Executor):
    """A job runs a shard on each of its GPUs; several jobs are submitted as an array."""

    name = "slurm"
    queued = True

    def find_device(self, wanted: str) -> Device:
        """The kind of device that the request asks for: the node is not known yet."""
        if wanted != "auto":
            return Device(wanted)
        kind = "cuda" if partition.count_gpus(self.cluster.gres) else "cpu"
        if self.cluster.executor != "auto":
            return Device(kind)
        asked = f"with {self.cluster.gres} each" if kind == "cuda" else "without a GPU"
        why = "because sbatch is on the PATH; cluster=local runs on this machine"
        return Device(kind, note=f"Jobs go to SLURM, {asked}, {why}.")

    @property
    def shards_per_job(self) -> int:
        """One for each of its GPUs."""
        return max(1, sum(partition.count_gpus(self.cluster.gres).values()))

    def count_shards(self, device: Device) -> int:
        return self.shards_per_job * (1 if self.cluster.distribute else self.cluster.max_jobs)

    def choose_nodes(self) -> tuple[list[str], list[str]]:
        return partition.distribute(self.cluster)

    def list_models(self) -> list[str]:
        if "" not in partition.count_gpus(self.cluster.gres):
            return []
        nodes = partition.list_nodes(self.cluster.partition)
        found = sorted({model for node in nodes for model in node.gpus if model})
        return found if len(found) > 1 else []

    def find_most(self) -> dict[str, float]:
        fit = [node for node in partition.list_nodes(self.cluster.partition) if node.fits(self.cluster.gres)]
        return {
            "time_min": max((node.minutes for node in fit), default=math.inf),
            "memory_gb": max((node.memory_mb // 1024 for node in fit), default=math.inf),
        }

    def list_set_aside(self) -> list[str]:
        return commands.list_set_aside()

    def preflight(self) -> None:
        super().preflight()
        partition.check_asked(self.cluster)

    def submit(self, run: Run, shards: Sequence[str], retry: int = 0) -> list[Job]:
        """Queue arrays of jobs; a job whose shards are pinned to a node is pinned to it, too."""
        self.check_paths(run)
        groups = list(self._group(run, shards, retry))
        for asking in {repr(asking.cluster): asking for asking, _, _ in groups}.values():
            asking.preflight()
        run.copy_sources()
        jobs: list[Job] = []
        with ignore_interrupts():
            for asking, where, array in groups:
                if run.cancelled:
                    raise UserError(
                        f"{run.name} was cancelled from another shell, and {len(jobs)} of {len(shards)} shards were submitted"
                    )
                try:
                    jobs += asking._start(run, asking._executor(run, where), array, [None] * len(array), retry)
                except commands.Silent as error:
                    raise MaybeQueued(
                        f"SLURM does not answer: {' '.join(str(error).split())}; {len(jobs)} of {len(shards)} shards are "
                        f"queued as {run.name}, and the next {sum(map(len, array))} may be; when SLURM answers, "
                        f"{shell.command('status', str(shell.relative(run.folder)))} finds these jobs by their name"
                    ) from error
                except commands.Failed as error:
                    reason = " ".join(str(error).split("sbatch: error:")[-1].split())
                    if jobs:
                        raise UserError(
                            f"{len(jobs)} of {len(shards)} shards are queued as {run.name}, and SLURM refused the rest: "
                            f"{reason}; go on later with {shell.command('resubmit', run.name)}"
                        ) from error
                    raise UserError(f"SLURM refused the job: {reason}; change cluster.* and try again") from error
        return jobs

    def script(self, run: Run, jobs: int, where: str | None = None) -> str:
        """What sbatch is given: the script of the first array."""
        self.check_paths(run)
        executor = self._executor(run, where)
        if (tasks := min(jobs, _largest_array())) > 1:
            executor.parameters["map_count"] = tasks  # as for an array
        return executor._make_submission_file_text(executor._submitit_command_str, "")

    def _executor(self, run: Run, where: str | None) -> Submitter:
        executor = Submitter(folder=run.folder / "jobs", python=self.python(run))
        executor.update_parameters(**self.parameters(run, where))
        return executor

    def _group(
        self, run: Run, shards: Sequence[str], retry: int
    ) -> Iterator[tuple[Slurm, str | None, list[list[Path]]]]:
        """The arrays of jobs: for each the executor that asks for what its shards need, the node that it is pinned to, if any,
        and the shards of each job."""
        files, most = run.shards, _largest_array()

        def read(name: str) -> tuple[str | None, dict[str, Any]]:
            return json.loads(files[name].read_text())["node"], run.choose_resources(name)

        for (where, own), of in itertools.groupby(shards, read):
            asking = self.with_resources(own, raised=retry > 0)
            paths, size = [files[name] for name in of], asking.shards_per_job
            jobs = [paths[start : start + size] for start in range(0, len(paths), size)]
            for start in range(0, len(jobs), most):
                yield asking, where, jobs[start : start + most]

    def parameters(self, run: Run, where: str | None = None) -> dict[str, Any]:
        """submitit's parameters for a job: what it asks of SLURM, and what its script does before and after Python. `where` is
        the one node that may run it, if it is given."""
        cluster = self.cluster
        flags = {str(name): value for name, value in cluster.flags.items()}
        name = flags.pop("job-name", name_jobs(run))
        if where is not None:
            flags.pop("exclude", None)  # `choose_nodes` has applied it
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
            "signal_delay_s": self.grace_s,
            "setup": [
                TAKE_FILE,
                NODE_LINE,
                *(f"export {name}={shlex.quote(value)}" for name, value in import_path(run).items()),
                "export SLURM_EXPORT_ENV=ALL",  # so that a user's SBATCH_EXPORT=NONE does not empty the tasks' environment, too
                *cluster.setup,
                *check_lines(self, run),
                "set +e",  # if the user's setup has set -e: the lines after a shard that stopped early have to run
            ],
            "teardown": REQUEUE,
            "additional_parameters": {"chdir": str(run.sources), "requeue": True} | flags,
        }

    def _in_job(self, start: str, inside: str) -> str:
        # Only a shell in the task has the variables that SLURM sets for it; APPTAINERENV_… passes them into the container.
        pass_on = f"for name in {' '.join(PASS_ON)}; do {PASS_ON_ONE}; done"
        start += ' --cleanenv --no-home ${SLURM_TMPDIR:+--bind "$SLURM_TMPDIR"}'
        task = f'{pass_on}; exec {start} {inside} "$@"'
        return f"sh -c {shlex.quote(task)} sh"

    @classmethod
    def states(cls, run: Run, jobs: Collection[Job]) -> dict[str, Seen] | None:
        """Asks squeue and not submitit, which takes NODE_FAIL for the end of a job although SLURM runs it again. It asks for
        the jobs of the run's owner, because another user may be asking."""
        soon = (datetime.datetime.now() + datetime.timedelta(days=30)).isoformat()
        told = commands.ask("squeue", "--noheader", "--array", f"--user={run.owner}", "--format=%i|%T|%S|%r|%j|%Z")
        if told is None:
            return None
        ids = {job.id for job in jobs}
        lines = [line.split("|", 4) for line in told.splitlines()]
        found = {
            line[0]: Seen(line[1], normalize(line[3]), line[2] if line[2] < soon else "")
            for line in lines
            if len(line) == 5 and (line[0] in ids or _is_of(run, line[4]))
        }
        return None if not found and hides_jobs(run) else found

    @classmethod
    def accounts(cls, jobs: Collection[Job]) -> dict[str, Account]:
        """Empty without slurmdbd. It asks for whole arrays, because sacct has no line for a single task that never started."""
        fields = "JobID,State,Submit,Start,ElapsedRaw,MaxRSS"
        ids = ",".join(sorted({job.id.partition("_")[0] for job in jobs}))
        told = commands.ask(
            "sacct", "--noheader", "--parsable2", f"--format={fields}", f"--jobs={ids}", SLURM_TIME_FORMAT="%s"
        )
        return parse_accounts((told or "").splitlines())

    @classmethod
    def cancel(cls, run: Run, jobs: Collection[str]) -> list[str]:
        """Jobs that have ended count as cancelled."""
        ids = sorted(set(jobs))
        refused: list[str] = []
        for start in range(0, len(ids), 500):  # because a command line has a largest length
            try:
                commands.run("scancel", *ids[start : start + 500])
            except commands.Failed as error:
                refused += [line.removeprefix("scancel: error: ") for line in str(error).splitlines()]
        return [line for line in refused if not re.search("Invalid job id|already complet", line)]


def name_jobs(run: Run) -> str:
    """The name of a run's jobs. minfer finds them by it if the run's folder has lost their ids."""
    return f"minfer-{run.name}"


def _is_of(run: Run, place: str) -> bool:
    """Whether a job is one of the run's, by its name and its working folder, `NAME|FOLDER`. The folder is the run's also where
    the user has given the jobs another name."""
    return place.partition("|")[0] == name_jobs(run) or place.endswith(f"|{run.sources}")


def hides_jobs(run: Run) -> bool:
    """Whether SLURM hides the jobs of the run's owner from this user."""
    if os.getuid() in (0, run.owner):
        return False
    told = commands.ask("scontrol", "show", "config") or ""
    return re.search(r"^PrivateData\s*=.*\bjobs\b", told, re.MULTILINE) is not None


def check_lines(executor: Executor, run: Run, python: str = sys.executable) -> list[str]:
    """The first lines of a job's script, which check that the node has what Python needs to start."""
    cluster, container = executor.cluster, executor.container
    seen = "put the clone, runs= and results= on a file system that the nodes see"
    needs = [("-d", path, seen) for path in (run.sources, Path(run.request.results))]
    if container.image is not None:
        image = Path(container.image).expanduser().absolute()
        needs.append(("-r", image, "copy the container image there, or set container.image"))
    else:
        needs.append(("-x", Path(python), "put the environment (uv sync) on a file system that the nodes see"))
    lines = [_refuse(f"[ {test} {shlex.quote(str(path))} ]", f"has no {path}", then) for test, path, then in needs]
    if container.image is not None:
        lines.append(_refuse("command -v apptainer >/dev/null", "has no apptainer", "load its module in cluster.setup"))
        if cluster.scratch:  # Apptainer cannot bind a folder that does not exist
            where = shlex.quote(cluster.scratch)
            lines.append(_refuse(f"mkdir -p {where}", f"cannot make {cluster.scratch}", "set cluster.scratch"))
    return lines


def _refuse(test: str, what: str, remedy: str) -> str:
    why = shlex.quote(f" {what}; {remedy}, or leave the node out with cluster.flags.exclude=")
    return f'{test} || {{ node="${{SLURMD_NODENAME:-$(hostname -s)}}"; echo "minfer: node $node"{why}"$node" >&2; exit 1; }}'


def _largest_array() -> int:
    """The largest number of tasks that SLURM allows in an array. (MaxArraySize is one more than the largest index.)"""
    told = commands.ask("scontrol", "show", "config") or ""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", told, re.MULTILINE)
    return max(1, int(found[1])) if found else 1001
