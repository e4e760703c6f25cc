"""Tests on a real SLURM: this machine's own (`tests/cluster/up.sh`), or any whose `sbatch` is on the PATH."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minfer.jobs.run import Run
from minfer.launch import compose
from minfer.rows import store
from minfer.run import control as jobs_control
from minfer.run.progress import RunProgress
from minfer.run.start import commit_of_sources
from minfer.run.start import run as run_config
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
        if str(item.path).startswith(f"{HERE}/"):
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


def resubmit(run: Path, *changes: str) -> None:
    """`minfer resubmit RUN wait=false`, in this process."""
    assert jobs_control.resubmit(Console(), Run(run), ["wait=false", *changes]) == 0
    ledger.resubmitted = True


def control(action: str, run: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """`minfer ACTION RUN`, from another process and folder."""
    command = [sys.executable, "-m", "minfer", action, str(run), *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, timeout=PATIENCE_S)


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.2)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """What a run's processes told of one kind, so far."""
    told = [json.loads(line) for path in sorted(run.glob("progress/*.jsonl")) for line in path.read_text().splitlines()]
    return [event for event in told if event["event"] == kind]


def over(run: Path) -> RunProgress:
    """Wait until no job of a run waits or runs; what is known of it then."""
    progress = RunProgress(Run(run))

    def done() -> bool:
        progress.read()
        return not progress.active

    until(done, f"the end of {run}")
    ledger.runs[run] = progress
    return progress


def at(run: Path, kernel: str) -> None:
    """Wait until a case of a kernel is being run."""
    told = lambda: [line for path in run.glob("progress/*.jsonl") for line in path.read_text().splitlines()]
    until(lambda: any('"case"' in line and f"/{kernel}/" in line for line in told()), f"a case of {kernel}")


def rows(folder: Path) -> list[store.Row]:
    """All rows: no case of a run has two, and those that were there before are there as they were."""
    found = list(store.rows(store.files(folder / "results")))
    cases = [(row["run"], row["case"]) for row in found]
    now = {case: (row["finished"], row["status"]) for case, row in zip(cases, found, strict=True)}
    ledger.twice += len(cases) - len(now)
    ledger.lost += sum(now.get(case) != before for case, before in ledger.rows.items())
    ledger.rows = now
    assert ledger.twice == 0, cases
    assert ledger.lost == 0, cases
    return found


@dataclass
class Ledger:
    """What a test saw of its rows, for the table of faults (analysis/make.py reliability)."""

    rows: dict[tuple[str, str], tuple[Any, str]] = field(default_factory=dict)  # when last looked at
    lost: int = 0
    twice: int = 0
    resubmitted: bool = False
    runs: dict[Path, RunProgress] = field(default_factory=dict)  # that came to their end

    def outcome(self) -> dict[str, Any]:
        """The figures of the test. `finished_by` is who had the last cases run."""
        shards = [shard for run in self.runs.values() for shard in run.shards.values()]
        again = any(shard.started > 1 for shard in shards)
        by = "minfer resubmit" if self.resubmitted else "SLURM, which ran the job again" if again else "the job itself"
        cases = sum(len(run.cases) for run in self.runs.values())
        return {"cases": cases, "rows": len(self.rows), "lost": self.lost, "twice": self.twice, "finished_by": by}


ledger = Ledger()


@pytest.fixture(autouse=True)
def new_ledger() -> None:
    ledger.__dict__.update(Ledger().__dict__)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """With MINFER_OUTCOMES=FILE, note there what became of each test of a fault."""
    report = yield
    fault = item.get_closest_marker("fault")
    path = os.environ.get("MINFER_OUTCOMES")
    if path and fault and (call.when == "call" or (report.outcome != "passed" and call.when == "setup")):
        known = json.loads(Path(path).read_text()) if Path(path).exists() else {}
        figures = ledger.outcome() if call.when == "call" else {}
        known[fault.args[0]] = {"test": item.name, "outcome": report.outcome, "seconds": round(call.duration)} | figures
        known[fault.args[0]] |= {"commit": commit_of_sources(), "slurm": slurm_version()}
        Path(path).write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return report


@cache
def slurm_version() -> str:
    return subprocess.run(["sinfo", "--version"], capture_output=True, text=True).stdout.split()[-1]


def node_of(run: Path) -> str:
    """The node that the run's one job runs on, as SLURM names it."""
    (job,) = Run(run).jobs.values()
    told = subprocess.run(["squeue", "-h", "-j", job.id, "-o", "%N"], capture_output=True, text=True, check=True)
    return told.stdout.strip()


def lab_node(action: str, name: str, *more: str | Path) -> None:
    """What node.sh does to a node, or to slurmctld, of our own cluster."""
    subprocess.run([HERE / "node.sh", action, name, *more], check=True, timeout=60)


@contextlib.contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A small file system of its own at a folder."""
    folder.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Fill a file system up; the file that does it."""
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 1024)
    return filler
