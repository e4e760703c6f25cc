"""The commands that minfer suggests can be typed where they are printed: in a clone, with a wheel, outside a container."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minfer.plan import shell
from tests.conftest import ROOT

KNOWN = ("UV", "UV_PROJECT", "MINFER_STARTED_OUTSIDE", "APPTAINER_CONTAINER")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KNOWN:
        monkeypatch.delenv(name, raising=False)


def program(folder: Path, name: str, text: str = "#!/bin/sh\n") -> Path:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_by_uv_it_is_uv_run_with_the_project_named_elsewhere(tmp_path, monkeypatch):
    uv = program(tmp_path, "uv")
    monkeypatch.setenv("UV", str(uv))
    monkeypatch.chdir(tmp_path)
    assert shell.command("status", "r 1") == f"bin/uv run --project {ROOT} minfer status 'r 1'"
    monkeypatch.chdir(ROOT)
    assert shell.command("runs") == f"{uv} run minfer runs"
    monkeypatch.setenv("PATH", str(uv.parent))
    assert shell.command("runs") == "uv run minfer runs"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UV_PROJECT", "somewhere")
    assert shell.command("runs") == "uv run minfer runs"


def test_without_uv_it_is_the_script_beside_python_or_python_itself(tmp_path, monkeypatch):
    python, script = program(tmp_path, "python"), program(tmp_path, "minfer")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.chdir(ROOT)
    assert shell.command("runs") == f"{script} runs"
    monkeypatch.setenv("PATH", str(script.parent))
    assert shell.command("runs") == "minfer runs"
    script.unlink()
    assert shell.command("runs") == "python -m minfer runs"


@pytest.mark.slow
def test_python_m_minfer_is_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "minfer", "runs"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("There are no runs")


def test_outside_a_container_it_is_docker_run_with_its_mounts_or_apptainer_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MINFER_STARTED_OUTSIDE", "1")
    monkeypatch.setattr(shell, "WORKSPACE", tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    mounts = {tmp_path / "results"}
    monkeypatch.setattr(Path, "is_mount", lambda path: path in mounts)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: str(path) != "/dev/nvidiactl" and exists(path))
    assert (
        shell.command("report", "results/x")
        == f'docker run --rm -v "$PWD/results:{tmp_path}/results" minfer report results/x'
    )
    assert shell.outlives(tmp_path / "results" / "x") and not shell.outlives(tmp_path / "runs" / "x")
    monkeypatch.setattr(os, "getuid", lambda: 1001)
    assert '--user "$(id -u):$(id -g)"' in shell.command("runs")
    monkeypatch.setenv("APPTAINER_CONTAINER", "/images/minfer.sif")
    assert shell.command("runs") == "apptainer run /images/minfer.sif runs"
    assert shell.outlives(tmp_path / "runs" / "x")
