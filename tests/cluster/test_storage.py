"""Disks that fill up, turn read-only or go away under a job, on a real SLURM."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.cluster.conftest import at, events, fill, over, resubmit, rows, submit, tmpfs, until


@pytest.mark.fault("the results folder is full")
def test_results_folder_that_fills_up_keeps_what_was_written_and_says_so(lab, folder):
    with tmpfs(folder / "results", "100k") as results:
        run = submit(folder, "kernel=[slow,honest,zeros]")
        at(run, "slow")
        before = rows(folder)
        filler = fill(results)
        why = over(run).reasons()["0000"]
        assert "cannot write" in why and "No space left on device" in why and "unwritten rows are in" in why
        assert rows(folder) == before == []
        filler.unlink()
        resubmit(run)
        assert over(run).line() == "shards: 1 done; 3 of 3 rows"
        assert len(rows(folder)) == 3


@pytest.mark.fault("the results folder turns read-only")
def test_results_folder_that_turns_read_only_keeps_what_was_written_and_says_so(lab, folder):
    with tmpfs(folder / "results", "10m") as results:
        run = submit(folder, "kernel=[honest,slow,zeros]")
        at(run, "slow")
        assert [row["kernel"] for row in rows(folder)] == ["honest"]
        subprocess.run(["mount", "-o", "remount,ro", results], check=True)
        why = over(run).reasons()["0000"]
        assert "cannot write" in why and "Read-only file system" in why and "unwritten rows are in" in why
        subprocess.run(["mount", "-o", "remount,rw", results], check=True)
        assert [row["kernel"] for row in rows(folder)] == ["honest"]
        resubmit(run)
        assert over(run).line() == "shards: 1 done; 3 of 3 rows"
        assert len(rows(folder)) == 3


@pytest.mark.fault("the results folder is gone for a while")
def test_results_folder_that_is_gone_for_a_while_is_waited_for(folder):
    run = submit(folder, "kernel=[honest,slow,zeros]")
    at(run, "slow")
    assert len(rows(folder)) == 1
    (folder / "results").rename(folder / "elsewhere")
    until(lambda: events(run, "waiting"), "that the job waits for its results folder")
    assert not (folder / "results").exists()  # nobody made it anew, where its rows would be lost under the mount
    (folder / "elsewhere").rename(folder / "results")
    assert over(run).line() == "shards: 1 done; 3 of 3 rows"
    assert len(rows(folder)) == 3


@pytest.mark.fault("scratch is full before and in mid-build")
def test_scratch_that_is_full_before_or_while_a_kernel_is_built_costs_no_case_its_row(lab, folder):
    with tmpfs(folder / "scratch", "50m") as scratch:
        run = submit(folder, "kernel=[cpu_naive]")
        why = over(run).reasons()["0000"]
        assert re.search(r"the scratch folder .* has \d+ MB free, .*; free it or set cluster\.scratch", why), why
        subprocess.run(["mount", "-o", "remount,size=300m", scratch], check=True)
        resubmit(run)
        until(lambda: events(run, "building"), "the build")
        filler = fill(scratch)
        why = over(run).reasons()["0000"]
        assert re.match("cannot compile cpu_naive in .*: No space left on device; free it or set cluster.scratch", why)
        assert rows(folder) == []
        filler.unlink()
        resubmit(run)
        assert over(run).line() == "shards: 1 done; 1 of 1 rows"
        (row,) = rows(folder)
        assert row["status"] == "ok" or row["status"] == "unconverged", row["message"]
