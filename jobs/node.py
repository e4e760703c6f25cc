"""What a job does on its node: caches on node-local scratch, then the shard."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1]
VISIBLE = "MINFER_VISIBLE_DEVICES"  # a local job's CUDA_VISIBLE_DEVICES, or "all"


def run(shard: str, scratch: str | None, grace_s: float) -> None:
    """Run a shard; under SLURM with the compilers' caches and TMPDIR in a folder of the job's own, removed after.

    SIGUSR2 says that the job ends in `grace_s` seconds."""
    # SLURM may send it to every process of the job, and a compiler or a kernel's process would die of it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    if "SLURM_JOB_ID" not in os.environ:
        if (visible := os.environ.get(VISIBLE, "all")) == "all":
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        _run_shard(shard, grace_s)
        return
    base = os.environ.get("SLURM_TMPDIR") or scratch or f"/tmp/{getpass.getuser()}"
    Path(base).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"minfer-{os.environ['SLURM_JOB_ID']}-", dir=base))
    for variable, name in (("TORCH_EXTENSIONS_DIR", "extensions"), ("TRITON_CACHE_DIR", "triton"), ("TMPDIR", "tmp")):
        (folder / name).mkdir()
        os.environ[variable] = str(folder / name)
    try:
        _run_shard(shard, grace_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_shard(shard: str, grace_s: float) -> None:
    from minfer.worker import run_shard  # imports torch, which must see the environment above

    run_shard(shard, grace_s)
