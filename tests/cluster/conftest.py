"""Tests on a real SLURM: this machine's own (`tests/cluster/up.sh`), or any whose `sbatch` is on the PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from jobs import control as jobs_control
from minfer import store
from minfer.launch import compose
from minfer.progress import RunProgress
from minfer.run import run as run_config
from tests.conftest import FAULTS, ROOT

HERE = Path(__file__).resolve().parent
LAB = Path(os.environ.get("LAB_DIR", "/var/tmp/minfer-slurm"))
PATIENCE_S = 420.0  # most that a test waits for anything


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("sbatch") is None:
        reason = "no sbatch on the PATH; tests/cluster/up.sh brings up a SLURM on this machine"
    elif subprocess.run(["sinfo", "-h"], capture_output=True, timeout=60).returncode != 0:
        reason = "sbatch is on the PATH and SLURM does not answer; tests/cluster/up.sh brings one up on this machine"
    else:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def lab() -> None:
    """Only where the cluster is ours to break."""
    if not (LAB / "run" / "slurmctld.pid").exists() or os.geteuid() != 0:
        pytest.skip("breaks nodes and daemons, and may do so only in the cluster of tests/cluster/up.sh")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where a test's runs and results are: on a real site in the clone, which the nodes see."""
    if (LAB / "run" / "slurmctld.pid").exists():
        yield tmp_path
        return
    shared = ROOT / "runs" / tmp_path.name
    yield shared
    shutil.rmtree(shared, ignore_errors=True)


def words(folder: Path, *more: str) -> list[str]:
    """A small request on SLURM; no GPU, because the cluster's may be make-believe."""
    return [
        "+sweep=hgemm", "cluster=slurm", "cluster.gres=null", "cluster.cpus=1", "cluster.memory_gb=2",
        "cluster.time_min=10", f"cluster.scratch={folder / 'scratch'}", "device=cpu", "shape=tiny", "timing=quick",
        "dtype=float16", f"extra=[{FAULTS}]", f"results={folder / 'results'}", f"runs={folder / 'runs'}", *more,
    ]  # fmt: skip


def submit(folder: Path, *more: str) -> Path:
    """Submit and do not wait; the run's folder. In this process, because importing torch takes seconds."""
    before = set((folder / "runs").glob("*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["launch", *words(folder, "wait=false", *more)])
        (config,) = compose()
    assert run_config(config) == 0
    (run,) = set((folder / "runs").glob("*")) - before
    return run


def resubmit(run: Path) -> None:
    """`python -m jobs.resubmit RUN wait=false`, in this process."""
    assert jobs_control.resubmit(Console(), run, ["wait=false"]) == 0


def control(action: str, run: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """`python -m jobs.ACTION RUN`, from another process and folder."""
    command = [sys.executable, "-m", f"jobs.{action}", str(run), *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, timeout=PATIENCE_S)


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.2)


def over(run: Path) -> RunProgress:
    """Wait until no job of a run waits or runs; what is known of it then."""
    progress = RunProgress(run)

    def done() -> bool:
        progress.read()
        return not progress.active

    until(done, f"the end of {run}")
    return progress


def at(run: Path, kernel: str) -> None:
    """Wait until a case of a kernel is being run."""
    told = lambda: [line for path in run.glob("progress/*.jsonl") for line in path.read_text().splitlines()]
    until(lambda: any('"case"' in line and f"/{kernel}/" in line for line in told()), f"a case of {kernel}")


def rows(folder: Path) -> list[store.Row]:
    """All rows, and that no case has two."""
    found = list(store.rows(store.files(folder / "results")))
    cases = [row["case"] for row in found]
    assert sorted(cases) == sorted(set(cases)), cases
    return found


def node_of(run: Path) -> str:
    """The node that the run's one job runs on, as SLURM names it."""
    (job,) = RunProgress(run).jobs.values()
    told = subprocess.run(["squeue", "-h", "-j", job.id, "-o", "%N"], capture_output=True, text=True, check=True)
    return told.stdout.strip()


def lab_node(action: str, name: str) -> None:
    """Crash or start a node, or slurmctld, of our own cluster."""
    subprocess.run([HERE / "node.sh", action, name], check=True, timeout=60)
