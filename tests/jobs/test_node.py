"""What a job under SLURM sets before its shards begin, in a process of its own and with no shard to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

CODE = """
import os
from minfer.jobs import node
node._run_shards = lambda *_: print(os.environ.get("OMP_NUM_THREADS"))
node.run([{shard!r}] * {shards}, {scratch!r}, 2.0, None, None)
"""


@pytest.mark.parametrize(
    ("cpus", "said", "shards", "threads"),
    [("6", None, 1, "6"), ("6", "2", 1, "2"), (None, None, 1, "None"), ("6", None, 4, "1"), ("1", None, 2, "1")],
)
def test_a_job_has_as_many_threads_as_processors(
    cpus: str | None, said: str | None, shards: int, threads: str, tmp_path: Path
) -> None:
    shard = tmp_path / "0000.json"
    shard.write_text(json.dumps({"folder": str(tmp_path), "name": "0000", "profilers": {}, "device": "cpu"}))
    (tmp_path / "progress").mkdir()
    told = {"SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": cpus, "OMP_NUM_THREADS": said, "SLURM_TMPDIR": None}
    environment = {name: value for name, value in (os.environ | told).items() if value is not None}
    code = CODE.format(shard=str(shard), shards=shards, scratch=str(tmp_path / "scratch"))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{threads}\n", "")
