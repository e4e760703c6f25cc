"""The command `minfer`: what it tells apart before anything is launched, and whose commit a row names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import minfer.analysis.compare
import minfer.analysis.report
from minfer import cli, launch
from minfer.plan.config import UserError, groups
from minfer.run import start
from tests.conftest import ROOT

EMPTY = "is empty; give a name or a list of names, or leave the key out"
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
            "unknown command 'launch'; valid: "
            + ", ".join([*cli.ACTIONS, "runs", *cli.READERS, "race", "build", "warm", *cli.BOARD, *SWEEPS]),
        ),
        ([], "no sweep was chosen: name one, such as +sweep=hgemm; --help lists them"),
        (
            ["race", "HEAD"],
            "usage: minfer race REV_A REV_B +sweep=... [KEY=VALUE ...], where a revision is one of git's, or . for the files"
            " as they are",
        ),
        (
            ["race", "nowhere", ".", "+sweep=hgemm"],
            "git knows no revision nowhere with kernels of minfer; name a commit, a branch or .",
        ),
        (
            ["status"],
            "usage: minfer status RUN [--json] [--junit=FILE]"
            " (RUN: a run's name or folder, or the word last for the newest run)",
        ),
        (
            ["cancel", "--all"],
            "usage: minfer cancel RUN (RUN: a run's name or folder, or the word last for the newest run)",
        ),
        (["resubmit", "nowhere"], "there is no run nowhere; name its folder"),
        (["report", "last"], "there is no run last; name its folder"),
        (["+sweep=hgemm", "kernel=[]", "device=cpu", "cluster=local"], f"kernel {EMPTY}"),
        (["+sweep=hgemm", "dtype=[]", "device=cpu", "cluster=local"], f"dtype {EMPTY}"),
        (["+sweep=hgemm", "params.layout=[]", "device=cpu", "cluster=local"], f"params.layout {EMPTY}"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], said: str, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["minfer", *words])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # compose sets it; here it must not outlive the test
    assert cli.main() == 2
    assert capsys.readouterr().err == f"minfer: {said}\n"


@pytest.mark.parametrize("command", [*cli.USAGE, cli.BUILD, cli.WARM, "submit", *cli.READERS])
def test_every_command_prints_its_usage_when_asked_for_help(command: str, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in (["--help"], ["word", "-h"]):
        monkeypatch.setattr(sys, "argv", ["minfer", command, *words])
        try:
            status = cli.main()
        except SystemExit as end:  # argparse's
            status = int(end.code or 0)
        said = capsys.readouterr()
        assert status == 0 and said.out.startswith(f"usage: minfer {command} ") and not said.err


def test_the_help_names_every_command_and_how_to_ask_each_for_more():
    text = (ROOT / "conf/config.yaml").read_text()
    for command in (*cli.USAGE, cli.BUILD, cli.WARM, *cli.BOARD, *cli.READERS):
        assert f"  minfer {command} " in text
    assert "those above also take --help" in text


def test_the_version_is_that_of_minfer(monkeypatch, capsys):
    for words in (["--version"], ["+sweep=hgemm", "--version"]):
        monkeypatch.setattr(sys, "argv", ["minfer", *words])
        assert cli.main() == 0
        written = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        assert capsys.readouterr().out == f"minfer {written}\n"


def test_the_last_run_is_named_to_those_who_read_rows_and_options_are_left_alone(tmp_path, monkeypatch):
    given: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    for name in ("20260101-000000-0000", "20260102-000000-0000"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    for reader in (minfer.analysis.report, minfer.analysis.compare):
        monkeypatch.setattr(reader, "main", lambda words: given.append(words) or 0)
    request = "op: hgemm\ndtype: float16\nshape: {name: s}\ntiming: {name: t}\ncluster: {name: c}\n"
    for name in ("20260102-000000-0000", "20260103-000000-0000"):  # the second is newer, and has no rows
        (tmp_path / "runs" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / name / "config.yaml").write_text(request)
    (tmp_path / "results/cpu/20260102-000000-0000").mkdir(parents=True)
    (tmp_path / "results/cpu/20260102-000000-0000/0000-000.parquet").touch()
    assert cli.read("report", ["last", "-o", "last"]) == 0 and cli.read("compare", ["HEAD", "last"]) == 0
    (tmp_path / "last").touch()
    assert cli.read("report", ["last"]) == 0
    assert given == [["20260102-000000-0000", "-o", "last"], ["HEAD", "20260102-000000-0000"], ["last"]]


@pytest.mark.parametrize("chunks", [0, 100])
def test_a_reader_who_goes_away_ends_a_command_quietly(chunks: int):
    """Before what is left in the buffer is written, and in the middle of more than a pipe holds."""
    write = f"[print('y' * 65536) for _ in range({chunks})] and 0 or print('x') or 0"
    code = f"import sys; from minfer import launch; sys.exit(launch.exit_status(lambda: {write}))"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    "call",
    [
        "sys.argv[1:] = ['--help']; sys.exit(cli.main())",
        "sys.argv[1:] = ['status', '--help']; sys.exit(cli.main())",
        "sys.argv[1:] = ['--cfg', 'job', '+sweep=hgemm']; sys.exit(cli.main())",
        "from minfer.run.terminal import console; sys.exit(launch.exit_status(lambda: console().print('x')))",
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_help_and_tables_that_nobody_reads_end_quietly(call: str, unbuffered: str):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; from minfer import cli, launch; {call}"],
            cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": unbuffered}, stdout=closed, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("module", ["minfer", "minfer.launch"])
def test_an_interrupt_while_it_imports_is_silent(module: str, tmp_path):
    (tmp_path / "hydra.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-P", "-m", module, "+sweep=hgemm"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_while_it_composes_is_silent():
    """OmegaConf makes errors of its own of a KeyboardInterrupt."""
    code = """import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # these tests may run in the background, where it is ignored
from minfer import launch

def as_omegaconf(**about):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ValueError("NoneType has no attribute") from None

launch.hydra.main = as_omegaconf
sys.argv[1:] = ["+sweep=hgemm"]
sys.exit(launch.main())"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_another_pipe_that_breaks_is_no_quiet_end():
    code = "import os; from minfer import launch; r, w = os.pipe(); os.close(r); launch.exit_status(lambda: os.write(w, b'x'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "BrokenPipeError" in done.stderr


@pytest.mark.slow
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


def test_a_terminal_that_knows_only_ascii_gets_ascii():
    """Printing the table of times once ended in a traceback, after all rows were written."""
    code = "from minfer import launch; launch.exit_status(lambda: print('7.5 µs, 104.8 ± 0.3 (104–105) ☺') or 0)"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("7.5 us, 104.8 +- 0.3 (104-105) ?\n", "")


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    ("words", "said"), [(["status", "r1"], "looking at r1"), (["+sweep=hgemm"], "reading the request")]
)
def test_on_a_terminal_the_first_line_comes_before_anything_is_imported(
    terminal, words, said, tmp_path, monkeypatch, capsys
):
    def stop(*_: object) -> None:
        raise UserError("it went on")

    (tmp_path / "runs" / "r1").mkdir(parents=True)
    (tmp_path / "runs" / "r1" / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["minfer", *words])
    monkeypatch.setattr(launch, "compose", stop)
    monkeypatch.setattr("minfer.run.control.status", stop)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    cli.main()
    lines = capsys.readouterr().err.splitlines()
    assert (lines[0] == f"minfer: {said} ...") == terminal
