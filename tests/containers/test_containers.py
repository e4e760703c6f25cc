"""A sweep run in what the Dockerfile and apptainer.def make."""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import shutil
from pathlib import Path

from minfer import cli
from minfer.rows import store
from tests.conftest import ROOT
from tests.containers.conftest import COMMIT, DIGEST, SOMEBODY, own, sh

SWEEP = ("+sweep=hgemm", "kernel=[cpu_naive]", "cluster=local", "device=cpu", "shape=tiny", "dtype=float16",
         "timing=quick", "timing.warmup_s=0", "timing.looks=[10]", "timing.precision=0.5", "timing.cold_cap_s=2",
         "timing.least_rounds=3", "timing.steady_block_s=0.02")  # fmt: skip


def check_row(results: Path, owner: int) -> None:
    """The row of SWEEP is whole, says which image and commit it is of, and belongs to the caller."""
    files = store.files(results)
    (row,) = store.rows(files)
    assert row["kernel"] == "cpu_naive" and row["status"] in store.MEASURED
    assert (row["image"], row["commit"]) == (DIGEST, COMMIT)
    assert {path.stat().st_uid for path in [*files, *(path.parent for path in files)]} == {owner}


def test_docker_runs_a_sweep_for_a_user_whom_the_image_does_not_know(built, tmp_path):
    os.chown(tmp_path, SOMEBODY, SOMEBODY)
    assert "1 of 1 cases" in built.docker(*SWEEP, results=tmp_path)
    check_row(tmp_path, SOMEBODY)


def test_apptainer_runs_the_same_sweep_where_it_is_called_with_its_own_sources(built, tmp_path):
    (tmp_path / "minfer").mkdir()
    (tmp_path / "minfer" / "__init__.py").write_text("raise SystemExit('other sources than the commit says')")
    assert "1 of 1 cases" in built.apptainer(*SWEEP, cwd=tmp_path)
    check_row(tmp_path / "results", os.geteuid())


def test_apptainer_labels_say_which_sources_and_which_base(built):
    image = built.work / "minfer.sif"
    labels = json.loads(sh("apptainer", "inspect", "--json", image))["data"]["attributes"]["labels"]
    assert labels["org.opencontainers.image.revision"] == COMMIT
    assert labels["org.opencontainers.image.base.digest"] == DIGEST


def test_apptainer_does_not_take_its_caller_for_the_user_of_the_image(built):
    command = ("apptainer", "exec", "--cleanenv", built.work / "minfer.sif", "python3", "-c")
    said = sh(*command, "import getpass; print(getpass.getuser())", env=own(built.work))
    assert said.splitlines()[-1] == pwd.getpwuid(os.geteuid()).pw_name


def test_a_container_without_a_gpu_says_how_to_pass_one(built):
    said = built.docker("+sweep=hgemm", "cluster=local", "device=cuda", code=2)
    assert "\nminfer: device=cuda, and no GPU was passed to this container; add --gpus all" in f"\n{said}"


def test_results_that_the_image_may_not_write_are_one_sentence(built, tmp_path):
    tmp_path.chmod(0o755)
    said = built.docker(*SWEEP, code=2, results=tmp_path)
    assert "\nminfer: cannot write to /workspace/results: Permission denied; run the container as" in f"\n{said}"
    assert "Traceback" not in said


def test_what_comes_next_can_be_typed_outside_the_docker_container(built, tmp_path):
    os.chown(tmp_path, SOMEBODY, SOMEBODY)
    said = built.docker(*SWEEP, results=tmp_path)
    (command,) = re.findall(r"^Next: (.*?)   #", said, re.MULTILINE)
    words = shlex.split(command)
    assert words[:2] == ["docker", "run"] and "$PWD/results:/workspace/results" in words
    assert "--user" in words and "on no mount" not in said
    built.docker(*words[words.index("minfer") + 1 :], results=tmp_path)
    assert (tmp_path / "report.html").stat().st_uid == SOMEBODY


def test_what_comes_next_can_be_typed_outside_the_apptainer_container(built, tmp_path):
    said = built.apptainer(*SWEEP, cwd=tmp_path)
    (command,) = re.findall(r"^Next: (.*?)   #", said, re.MULTILINE)
    words = shlex.split(command)
    image = words.index(str(built.work / "minfer.sif"))
    assert words[:2] == ["apptainer", "run"]
    built.apptainer(*words[image + 1 :], cwd=tmp_path)
    assert (tmp_path / "report.html").is_file()


def test_results_on_no_mount_are_told_at_once(built):
    assert "results is on no mount, and its rows go with the container" in built.docker(*SWEEP)


def test_other_commands_of_the_image_run_as_they_are(built, tmp_path):
    os.chown(tmp_path, SOMEBODY, SOMEBODY)
    built.docker(*SWEEP, results=tmp_path)
    (tmp_path / "TABLES.md").write_text("<!-- results:begin -->\n<!-- results:end -->\n")
    os.chown(tmp_path / "TABLES.md", SOMEBODY, SOMEBODY)
    built.docker("python", "analysis/make_tables.py", "--readme", "results/TABLES.md", results=tmp_path)
    assert "hgemm" in (tmp_path / "TABLES.md").read_text()
    said = built.docker("pytest", "-n0", "tests/bench/test_stats.py", "tests/analysis/test_make_tables.py::test_golden")
    assert " passed" in said and "warning" not in said
    assert "There are no runs" in built.docker("runs") and "There are no runs" in built.docker("minfer", "runs")
    assert "unknown command 'satus'; did you mean status?" in built.docker("satus", code=2)


def test_no_command_of_minfer_is_hidden_by_one_of_the_image(built):
    names = (*cli.ACTIONS, cli.RUNS, *cli.READERS, cli.RACE)
    said = built.docker("sh", "-c", f"for name in {' '.join(names)}; do command -v $name; done; true")
    assert said == ""


def test_tables_are_made_in_a_clone_that_is_mounted_over_the_sources(built, tmp_path):
    clone = tmp_path / "clone"
    for name in ("analysis", "minfer", "conf", "jobs"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "results" / "nvidia-h200", clone / "results" / "nvidia-h200")
    (clone / "README.md").write_text("<!-- results:begin -->\n<!-- results:end -->\n")
    for path in (clone, *clone.rglob("*")):
        os.chown(path, SOMEBODY, SOMEBODY)
    built.docker("python", "analysis/make_tables.py", **{".": clone})
    assert "hgemm" in (clone / "README.md").read_text()
