"""What jobs cost beside measuring: `python benchmarks/load.py`, where sbatch is on the PATH (tests/cluster/up.sh).

Submits 2,000 small cases for the CPU as an array of 200 tasks, waits for them, and prints how long submitting took, what a
task costs beside its cases, how many rows come in a second, and what share of the nodes' time was measurement. Exits 1
unless there is exactly one row a case. On two cores it takes 40 minutes: every task imports PyTorch twice; --tasks
and --cases ask for less.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from minfer.jobs.run import Run
from minfer.launch import compose
from minfer.rows import store
from minfer.run.progress import RunProgress
from minfer.run.start import run

ROOT = Path(__file__).resolve().parents[1]


def request(folder: Path, cases: int, tasks: int, more: list[str]) -> list[str]:
    """The command line of a launch with so many cases, the least that a case can be."""
    timing = ["warmup_s=0", "looks=[10]", "precision=0.5", "cold_cap_s=2", "least_rounds=3", "steady_block_s=0.02"]
    return [
        "+sweep=hgemm", "kernel=torch", "dtype=float16", "device=cpu", "shape=tiny", "profiler=none",
        f"shape.cpu=[{{m:[{','.join(map(str, range(1, cases + 1)))}],n:16,k:16}}]", "wait=false",
        *(f"timing.{word}" for word in timing), "cluster=slurm", "cluster.gres=null", "cluster.cpus=1",
        "cluster.memory_gb=2", "cluster.setup=['export OMP_NUM_THREADS=1']", f"cluster.max_jobs={tasks}",
        f"results={folder / 'results'}", f"runs={folder / 'runs'}",
        *more,
    ]  # fmt: skip


def node_seconds(ids: set[str]) -> float | None:
    """How long the jobs had their nodes, together, as SLURM accounts for it."""
    command = ["sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID,ElapsedRaw"]
    told = subprocess.run([*command, f"--jobs={','.join(sorted(ids))}"], capture_output=True, text=True).stdout
    found = dict(line.split("|") for line in told.splitlines())
    return sum(float(found[job]) for job in ids) if ids <= set(found) else None


def measure(folder: Path, words: list[str], patience_s: float) -> int:
    """Launch, wait, and print what it cost; the exit status."""
    sys.argv = ["launch", *words]
    (config,) = compose()
    begin = time.perf_counter()
    run(config)
    submit_s = time.perf_counter() - begin
    (path,) = (folder / "runs").iterdir()
    progress = RunProgress(Run(path))
    while progress.active:
        progress.read()
        if time.perf_counter() > begin + patience_s:
            print(f"not done after {patience_s:g} s: {progress.line()}", file=sys.stderr)
            break
        time.sleep(1)
    wall_s = time.perf_counter() - begin - submit_s
    rows = list(store.rows(store.files(folder / "results"), ["case", "verify_s", "time_s", "status"]))
    whole = sorted(row["case"] for row in rows) == sorted(case.key for case in progress.cases)
    jobs = {job.id for job in progress.jobs.values()}
    nodes_s = node_seconds(jobs)
    cases_s = sum((row["verify_s"] or 0) + (row["time_s"] or 0) for row in rows)
    print(f"cases {len(progress.cases)}, tasks {len(jobs)}, rows {len(rows)}: {'one a case' if whole else 'WRONG'}")
    print(f"planning and submitting: {submit_s:.1f} s")
    print(f"from there to the last row: {wall_s:.0f} s, {len(rows) / wall_s:.2f} rows a second")
    if nodes_s:
        print(f"a task beside its cases: {(nodes_s - cases_s) / len(jobs):.1f} s")
        print(f"share of the nodes' time that was verifying and timing: {100 * cases_s / nodes_s:.1f} %")
    for name, why in progress.reasons().items():
        print(f"shard {name}: {why}", file=sys.stderr)
    return 0 if whole else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs", help="where the nodes see it (default: runs)")
    parser.add_argument("--patience", type=float, default=7200, help="seconds after which to give up")
    parser.add_argument("more", nargs="*", help="further words of the request, such as cluster.partition=gpu")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="load-") as name:
        folder = Path(name)
        return measure(folder, request(folder, options.cases, options.tasks, options.more), options.patience)


if __name__ == "__main__":
    sys.exit(main())
