"""Cases and jobs that are done again, on a real SLURM."""

from __future__ import annotations

import re

from minfer.rows import store
from tests.cluster.conftest import control, over, submit


def test_cases_with_a_status_are_done_again_and_the_others_are_not(folder):
    """`hangs` is killed, twice; `raises` stays as it is. The newest row counts, and the old ones are kept."""
    run = submit(folder, "kernel=[honest,hangs,raises]", "case_timeout_s=15")
    assert over(run).line() == "shards: 1 done; 3 of 3 rows"
    assert "nothing to submit" in control("resubmit", run).stdout
    done = control("resubmit", run, "status=slow")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("minfer: unknown status 'slow'; it can be ok, unconverged, wrong, "), done.stderr
    done = control("resubmit", run, "status=timeout,oom", "cluster.time_min=9")
    assert done.returncode == 4, done.stdout + done.stderr  # all have a row, and some failed
    assert "1 cases with the status timeout or oom are to be done again." in done.stdout
    assert "3 of 3 cases" in done.stdout and "still to be done" not in done.stdout
    assert over(run).line() == "shards: 1 done; 3 of 3 rows"
    found = list(store.rows(store.files(folder / "results")))
    kernels = [row["kernel"] for row in sorted(found, key=lambda row: row["finished"])]
    assert sorted(kernels[:3]) == ["hangs", "honest", "raises"] and kernels[3:] == ["hangs"]
    assert len({row["job"] for row in found}) == 2
    assert len(re.findall("hangs/.*: timeout", control("status", run).stdout)) == 1


def test_cases_that_were_to_be_done_again_and_whose_job_was_cancelled_are_missing(folder):
    run = submit(folder, "kernel=[zeros,raises]")
    assert over(run).line() == "shards: 1 done; 2 of 2 rows"
    held = "cluster.flags={hold: true}"
    assert "1 cases with the status wrong are to" in control("resubmit", run, "status=wrong", held, "wait=false").stdout
    left = control("resubmit", run, "status=wrong", "wait=false").stdout
    assert "1 such cases are left as they are" in left and "nothing to submit" in left
    assert "1 jobs cancelled; its 1 rows are kept" in control("cancel", run).stdout
    over(run)
    status = control("status", run)
    assert status.returncode == 1 and "1 of these cases are still to be done again" in status.stdout
    assert control("resubmit", run, "cluster.flags={}").returncode == 4
    assert over(run).line() == "shards: 1 done; 2 of 2 rows"
    assert len(list(store.rows(store.files(folder / "results")))) == 3
