"""The command `minfer`: what it tells apart before anything is launched, and whose commit a row names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minfer import cli
from minfer.plan.config import groups
from minfer.run import start
from tests.conftest import ROOT

SWEEPS = [f"+sweep={name}" for name in groups()["sweep"]]


def call(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command, as its script calls it."""
    command = [sys.executable, "-P", "-c", "import sys; from minfer.cli import main; sys.exit(main())", *words]
    return subprocess.run(command, cwd=cwd, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["satus", "RUN"], "unknown command 'satus'; did you mean status?"),
        (["hgemm"], "unknown command 'hgemm'; did you mean +sweep=hgemm?"),
        (
            ["launch"],
            f"unknown command 'launch'; valid: {', '.join([*cli.ACTIONS, 'runs', *cli.READERS, 'race', 'warm', *SWEEPS])}",
        ),
        ([], f"no sweep was chosen; add {' or '.join(SWEEPS)}"),
        (
            ["race", "HEAD"],
            "usage: minfer race REV_A REV_B +sweep=...; a revision is one of git's, or . for the files as they are",
        ),
        (
            ["race", "nowhere", ".", "+sweep=hgemm"],
            "git knows no revision nowhere with kernels of minfer; name a commit, a branch or .",
        ),
        (["status"], "usage: minfer status RUN, where RUN is the name or the folder of a run, or last"),
        (["cancel", "--all"], "usage: minfer cancel RUN, where RUN is the name or the folder of a run, or last"),
        (["resubmit", "nowhere"], "there is no run nowhere; name its folder"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], said: str, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["minfer", *words])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # compose sets it; here it must not outlive the test
    assert cli.main() == 2
    assert capsys.readouterr().err == f"minfer: {said}\n"


def test_the_command_launches_from_a_folder_with_other_things_of_the_same_names(tmp_path):
    for name in ("minfer", "jobs", "conf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not these')")
    done = call("+sweep=hgemm", "shape=tiny", "cluster=local", "device=cpu", "dry_run=true", cwd=tmp_path)
    assert done.returncode == 0 and "Nothing was started" in done.stdout, done.stderr


def repository(folder: Path) -> None:
    """Make a git repository of a folder, with a commit."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*git, *words], check=True)


@pytest.mark.parametrize("place", [".", "vendored", "environment/minfer"])
def test_the_commit_is_that_of_a_clone_and_no_other_repositorys(place: str, tmp_path, monkeypatch):
    monkeypatch.delenv("MINFER_COMMIT", raising=False)
    conf = tmp_path / place / "conf"
    conf.mkdir(parents=True)
    (conf / "config.yaml").write_text("op: ???")
    monkeypatch.setattr(start, "CONF", conf)
    assert start.commit_of_sources() is None
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    assert start.commit_of_sources() is None  # somebody's repository, which does not have them
    repository(tmp_path)
    commit = start.commit_of_sources()
    assert (commit is None) == (place != ".")
    (conf / "config.yaml").write_text("op: hgemm")
    assert start.commit_of_sources() == (commit and f"{commit}+")
    monkeypatch.setattr(start, "INSTALLED", True)
    assert start.commit_of_sources() is None
    monkeypatch.setenv("MINFER_COMMIT", "0123456789ab")
    assert start.commit_of_sources() == "0123456789ab"


def test_a_clone_that_git_cannot_read_has_no_commit_and_not_that_of_the_image(tmp_path, monkeypatch):
    (tmp_path / ".git").write_text("gitdir: nowhere")
    monkeypatch.setattr(start, "CONF", tmp_path / "conf")
    monkeypatch.setenv("MINFER_COMMIT", "0123456789ab")
    assert start.commit_of_sources() is None
