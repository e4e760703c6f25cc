"""What a job does on its node: caches on node-local scratch, then its shards, each on a GPU of its own."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from minfer.jobs import preflight
from minfer.jobs.run import Run
from minfer.process import fork_server
from minfer.process.stopping import AGAIN


def run(shards: Sequence[str], scratch: str | None, grace_s: float, gpu: str | None, gres: str | None) -> None:
    """Run a job's shards, at once; under SLURM with the compilers' caches and TMPDIR in a folder of the job's own, removed
    after, and with as many threads as it has processors, unless OMP_NUM_THREADS says otherwise. Ends by SystemExit where
    not all is done.

    SIGUSR2 says that the job ends in `grace_s` seconds. `gpu`: a local job's CUDA_VISIBLE_DEVICES; None:
    all. `gres`: what a job under SLURM asked for."""
    # SLURM may send it to every process of the job, and a compiler or a kernel's process would die of it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    if "SLURM_JOB_ID" not in os.environ:
        # submitit hides all GPUs from a local job, or renumbers them
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        _run_shards(shards, grace_s)
        return
    base = Path(os.environ.get("SLURM_TMPDIR") or scratch or f"/tmp/{getpass.getuser()}")
    preflight.prepare_scratch(base)
    about = json.loads(Path(shards[0]).read_text())
    for message in preflight.find_warnings(base, about["profilers"]):
        Run(Path(about["folder"])).tell([about["name"]], event="warning", message=message)
    folder = Path(tempfile.mkdtemp(prefix=f"minfer-{os.environ['SLURM_JOB_ID']}-", dir=base))
    for variable, name in (("TORCH_EXTENSIONS_DIR", "extensions"), ("TRITON_CACHE_DIR", "triton"), ("TMPDIR", "tmp")):
        (folder / name).mkdir()
        os.environ[variable] = str(folder / name)
    if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):  # not every site confines a job to its processors
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(cpus) // len(shards))))
    if not os.access(Path.home(), os.W_OK):  # a container has none
        os.environ["HOME"] = str(folder)
    try:
        if about["device"] == "cuda":
            preflight.check_gpu(gres)
        _run_shards(shards, grace_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_shards(shards: Sequence[str], grace_s: float) -> None:
    if len(shards) == 1:
        fork_server.prepare()  # imports torch beside us
        from minfer.worker.shard import run_shard  # imports torch, which must see the environment above

        run_shard(shards[0], grace_s)
        return
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(gpus) < len(shards):
        sys.exit(
            f"minfer: the job has {len(shards)} shards, and its node gave it the GPUs {gpus}; correct cluster.gres"
        )
    command = [sys.executable, "-m", "minfer.jobs.node"]
    processes = [
        subprocess.Popen([*command, shard, str(grace_s)], env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus[index]})
        for index, shard in enumerate(shards)
    ]

    def forward(number: int, _: object) -> None:
        for process in processes:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
    statuses = [process.wait() for process in processes]
    if any(statuses):  # a shard that is done by then finds nothing to do in the next job
        sys.exit(AGAIN if AGAIN in statuses else max(abs(status) for status in statuses))


if __name__ == "__main__":
    run_one, grace = sys.argv[1:]
    _run_shards([run_one], float(grace))
