"""Runs through real jobs: from the command to the table, and what later commands make of them."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from minfer.jobs.run import Run
from minfer.rows import store
from tests.cluster.conftest import at, control, over, rows, submit, words
from tests.conftest import ROOT, launch


def test_from_the_command_to_the_table_through_an_array(folder):
    """Compiled kernels, too: their builds, and all else that is temporary, go to scratch and leave nothing there."""
    done = launch(
        *words(folder, "kernel=[torch,cpu_naive]", "shape.cpu=[{m:[64,128],n:64,k:64}]", "cluster.max_jobs=2")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(folder)
    assert len(found) == 4 and {row["status"] for row in found} <= set(store.MEASURED)
    jobs = {row["job"] for row in found}
    assert len(jobs) == 2 and len({job.partition("_")[0] for job in jobs}) == 1  # two tasks of one array
    assert {job.partition("_")[2] for job in jobs} == {"0", "1"}
    assert "4 of 4 cases" in done.stdout and "cpu_naive" in done.stdout
    assert "shards: 2 done; 4 of 4 rows" in done.stdout and re.search(r"shards: \d (queued|running)", done.stdout)
    (built,) = {row["build_s"] is not None for row in found if row["kernel"] == "cpu_naive"}
    assert built, "a build was found in a cache that is not the job's own"
    assert (folder / "scratch").is_dir() and not list((folder / "scratch").iterdir())


def test_a_run_is_looked_at_cancelled_and_resubmitted_from_other_shells(folder):
    run = submit(folder, "kernel=[honest,hangs]", "case_timeout_s=100")
    at(run, "hangs")
    status = control("status", run)
    assert status.returncode == 0 and "shards: 1 running; 1 of 2 rows" in status.stdout, status.stdout + status.stderr
    assert "honest" in status.stdout
    done = control("resubmit", run)
    assert done.returncode == 0 and "nothing to submit" in done.stdout
    done = control("cancel", run)
    assert done.returncode == 0 and "1 jobs cancelled; its 1 rows are kept" in done.stdout
    over(run)
    status = control("status", run)
    assert status.returncode == 1, status.stdout
    assert "shards: 1 cancelled; 1 of 2 rows" in status.stdout and "minfer resubmit" in status.stdout
    assert [row["kernel"] for row in rows(folder)] == ["honest"]

    (shard,) = (run / "shards").glob("*.json")
    shard.write_text(re.sub(r'"case_timeout_s": 100(\.0)?', '"case_timeout_s": 15.0', shard.read_text()))
    done = control("resubmit", run)
    assert done.returncode == 4, done.stdout + done.stderr  # `hangs` has a row, and failed
    assert "1 shard submitted again" in done.stdout and "2 of 2 cases" in done.stdout
    honest, hangs = sorted(rows(folder), key=lambda row: row["finished"])
    assert (honest["kernel"], hangs["status"]) == ("honest", "timeout") and honest["job"] != hangs["job"]
    assert "nothing to submit" in control("resubmit", run).stdout


def test_a_mistake_is_one_line(folder):
    for action in ("status", "cancel", "resubmit"):
        done = control(action, folder / "nowhere")
        assert (
            done.returncode == 2 and done.stderr.startswith("minfer: there is no run") and done.stderr.count("\n") == 1
        )
    done = launch(*words(folder, "cluster.partition=nowhere", "kernel=torch"))
    assert done.returncode == 2 and "SLURM refused the job: " in done.stderr and "Invalid partition" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list((folder / "runs").iterdir())


@pytest.mark.parametrize(
    "text", ["a b", "it's", 'a "b"', "a; touch pwned", "$(touch pwned)", "`touch pwned`", "#SBATCH", "é'\"'"]
)
def test_what_a_request_says_of_a_job_reaches_slurm_as_it_is(folder, text):
    run = submit(
        folder,
        "kernel=torch",
        "+cluster.flags.hold=true",
        f"+cluster.flags.comment={json.dumps(text, ensure_ascii=False)}",
    )
    (job,) = Run(run).jobs.values()
    try:
        told = subprocess.run(["squeue", "-h", "-j", job.id, "-O", "Comment:200"], capture_output=True, text=True)
        assert told.stdout.rstrip() == text
    finally:
        subprocess.run(["scancel", job.id], check=True)
    assert not list(folder.rglob("pwned")) and not (ROOT / "pwned").exists()
