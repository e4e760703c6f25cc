"""The whole way on one machine: a launch on a real SLURM, whose jobs run in the real image, to the table."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from minfer.rows import store
from tests.cluster.conftest import words
from tests.conftest import ROOT
from tests.containers.conftest import DIGEST, HOST, SITE, Built, own, sh

pytestmark = pytest.mark.skipif(shutil.which("sbatch") is None, reason="no sbatch; tests/cluster/up.sh brings it up")

# A kernel's file, which says what a job lets it see and do.
CURIOUS = """
import contextlib, json, os, socket
from pathlib import Path

def can_write(folder):
    try:
        (Path(folder) / "written").write_text("x")
    except OSError:
        return False
    return True

if os.environ.get("SLURM_JOB_ID"):  # the launcher imports this file, too
  with contextlib.suppress(OSError):  # in the sandbox, which sees nothing of all this
    said = {
        "home": Path(%(home)r).exists(),
        "clone": Path(%(clone)r).exists(),
        "sources": can_write(Path.cwd()),
        "kernels": can_write(Path(__file__).parent),
        "networks": [name for _, name in socket.if_nameindex()],
        "scratch": os.environ["TORCH_EXTENSIONS_DIR"],
    }
    Path(%(answer)r).write_text(json.dumps(said))
"""


def launch(built: Built, folder: Path, *more: str) -> str:
    """A launch that waits, as a user types it; what it printed."""
    command = [sys.executable, "-m", "minfer.launch", *words(folder), "container=apptainer", "cluster.max_jobs=2",
               f"container.image={built.work / 'minfer.sif'}", f"container.binds=['{HOST}:{SITE}:ro']", *more]  # fmt: skip
    return sh(*command, cwd=ROOT, env=own(built.work))


def test_a_sweep_through_slurm_and_apptainer_becomes_a_table(built: Built, tmp_path: Path) -> None:
    said = launch(built, tmp_path, "extra=[]", "kernel=[cpu_naive,cpu_blocked]")
    rows = list(store.rows(store.files(tmp_path / "results")))
    cases = len(rows)
    assert f"{cases} of {cases} cases" in said and {row["kernel"] for row in rows} == {"cpu_naive", "cpu_blocked"}
    assert {row["status"] for row in rows} <= set(store.MEASURED)
    assert {row["image"] for row in rows} == {DIGEST}
    assert len({row["job"] for row in rows}) == 2 and all(row["node"] for row in rows)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results:begin -->\n<!-- results:end -->\n")
    sh(sys.executable, "analysis/make_tables.py", "--results", tmp_path / "results", "--readme", readme, cwd=ROOT)
    assert any("cpu_blocked" in page.read_text() for page in (tmp_path / "docs" / "results").glob("*/*.md"))


def test_a_sandbox_around_this_machine_serves_as_an_image(tmp_path: Path) -> None:
    """What a GPU machine without a network gets (tests/cluster/gpu.sh)."""
    told = sh(
        ROOT / "tests" / "cluster" / "gpu.sh", "image", tmp_path / "image", env=os.environ | {"PYTHON": sys.executable}
    )
    command = [sys.executable, "-m", "minfer.launch", *words(tmp_path), "extra=[]", "kernel=[cpu_naive]", *told.split()]
    sh(*command, cwd=ROOT, env=own(tmp_path))
    (row,) = store.rows(store.files(tmp_path / "results"))
    assert row["job"] and "@sha256:" in row["image"]


def test_a_job_with_a_kernel_that_is_not_trusted_sees_its_run_and_nothing_else(built: Built, tmp_path: Path) -> None:
    for folder in ("mine", "results"):
        (tmp_path / folder).mkdir()
    answer, curious = tmp_path / "results" / "answer.json", tmp_path / "mine" / "curious.py"
    with tempfile.NamedTemporaryFile(dir=Path.home()) as private:
        curious.write_text(CURIOUS % {"home": private.name, "clone": str(ROOT / "README.md"), "answer": str(answer)})
        launch(built, tmp_path, f"extra=[{curious}]", "kernel=[cpu_naive]", "untrusted=true")
    said = json.loads(answer.read_text())
    assert (said["home"], said["sources"], said["kernels"]) == (False, False, False)
    assert not said["clone"] or ROOT.is_relative_to(tempfile.gettempdir())  # Apptainer mounts the host's /tmp
    assert said["scratch"].startswith(str(tmp_path / "scratch"))
    assert said["networks"] == ["lo"]
    (guarantee,) = {row["guarantee"] for row in store.rows(store.files(tmp_path / "results"))}
    assert guarantee in ("judged, namespaces", "judged, landlock")
