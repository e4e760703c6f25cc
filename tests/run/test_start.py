"""What a launch does before its jobs start: it looks at the machine, the request and the results, and may be stopped."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from minfer import ops
from minfer.bench import RULES, device
from minfer.fingerprint import fingerprint
from minfer.jobs.executors import local
from minfer.jobs.executors.base import Device
from minfer.jobs.run import Job, Run
from minfer.plan.config import Cluster, Config, Container, Shape, UserError
from minfer.rows import store
from minfer.run import start
from tests.conftest import FAST

CUDA = """
from types import SimpleNamespace
NAMES = {names}
def device_count(): return len(NAMES)
def get_device_capability(): return (9, 0)
def get_device_properties(gpu): return SimpleNamespace(name=NAMES[gpu], total_memory=int(8e10))
"""


@pytest.mark.parametrize(
    ("names", "image", "name"),
    [
        (["NVIDIA H200"] * 2, None, "NVIDIA H200"),
        (["NVIDIA H200"], "minfer.sif", ""),
        (["NVIDIA H200", "NVIDIA L40S"], None, ""),
        ([], None, None),
    ],
)
def test_gpus_of_this_machine_have_a_name_where_jobs_are_sure_to_find_it(names, image, name, tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "cuda.py").write_text(CUDA.format(names=names))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(local, "_has_driver", lambda: True)
    found = local.Local(Cluster("local"), Container(image=image)).find_device("auto")
    wanted = Device("cuda", (9, 0), len(names), str(name), 8e10)
    assert found == wanted if name is not None else found.kind == "cpu"


@pytest.mark.parametrize(("k", "said"), [(8, False), (10**14, True)])
def test_a_plan_says_which_problems_do_not_fit_in_memory(k: int, said: bool, tmp_path, capsys):
    sizes = Shape("one", cpu=[{"m": 8, "n": [4, 8], "k": [8, k]}])
    assert start.run(tiny(device="cpu", dry_run=True, shape=sizes)) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert ("2 of 4 problems do not fit in the memory of " in told) == said
    assert (f"the tensors of hgemm float16/layout=TN,accumulate=float32/m=8,n=8,k={k} take 3," in told) == said


@pytest.mark.parametrize("below", ["", "further/down"])
def test_a_file_where_a_folder_is_needed_is_named(below: str, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=rf"^{tmp_path}/file is no folder; choose another with results=... or runs=...$"
    ):
        start.run(tiny(device="cpu", results=str(tmp_path / "file" / below)))


def test_a_file_of_the_user_that_registers_nothing_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("from minfer import ops\nops.get('hgemm')\n")
    with pytest.raises(UserError, match=r"^extra=.*mine\.py registers no op and no kernel; add one"):
        start.run(tiny(extra=[str(tmp_path / "mine.py")], device="cpu"))


def test_a_file_of_the_user_may_have_been_imported_before(tmp_path):
    """As for the second request of --multirun, or a season of the board."""
    (tmp_path / "mine.py").write_text(
        "from minfer import ops\nop = ops.get('hgemm')\nop.torch('twice_loaded', lambda *given: None)\n"
    )
    request = tiny(extra=[str(tmp_path / "mine.py")], device="cpu", dry_run=True)
    request.kernel = "twice_loaded"
    try:
        assert [start.run(request), start.run(request)] == [0, 0]
    finally:
        ops.get("hgemm").kernels.pop("twice_loaded", None)


@pytest.mark.parametrize("where", ["find_device", "submit"])
def test_an_interrupt_before_jobs_start_is_said_and_leaves_no_run(where: str, tmp_path, monkeypatch, capsys):
    def interrupted(*about: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local.Local, where, interrupted)
    folders = {"results": str(tmp_path / "results"), "runs": str(tmp_path / "runs")}
    with pytest.raises(KeyboardInterrupt):
        start.run(tiny(device="cpu", **folders))
    assert capsys.readouterr().out.endswith("Stopped before anything was started.\n")
    assert not [*tmp_path.glob("runs/*")]


def test_an_interrupt_when_jobs_may_have_been_started_names_them(tmp_path, monkeypatch):
    def interrupted(self: local.Local, run: Run, shards: list[str]) -> None:
        run.add_jobs([Job(shards[0], "0", "local")])
        raise KeyboardInterrupt

    monkeypatch.setattr(local.Local, "submit", interrupted)
    with pytest.raises(
        start.Stopped, match=r"stopped while jobs were being submitted\. To look: .* cancel "
    ) as stopped:
        start.run(tiny(device="cpu", results=str(tmp_path / "results"), runs=str(tmp_path / "runs")))
    assert stopped.value.status == 130 and [*tmp_path.glob("runs/*/jobs.jsonl")]


@pytest.mark.parametrize("lacks", [False, True])
def test_a_resumed_launch_looks_for_rows_before_it_starts_a_job(lacks: bool, tmp_path, monkeypatch, capsys):
    """It shows them and creates no run where none is missing; else only what is missing is planned."""
    sizes = Shape("two", cpu=[{"m": [8, 16], "n": 8, "k": 8}])
    folders = {"results": str(tmp_path / "results"), "runs": str(tmp_path / "runs")}
    request = tiny(device="cpu", resume=True, shape=sizes, **folders)
    torch = ops.get("hgemm").kernels["torch"]
    about = {"timing": FAST.name, "device": device.name(device.pick("cpu")), "source": fingerprint(torch, "", RULES)}
    cases = [ops.get("hgemm").case("torch", "float16", {"m": m, "n": 8, "k": 8}) for m in (8, 16)]
    times = {"metric": "TFLOP/s", "cold_us": 12.5, "finished": datetime.datetime.now(datetime.UTC), "status": "wrong"}
    rows = [{"run": "r1", "case": case.key, **case.to_dict(), **about, **times} for case in cases[: 1 if lacks else 2]]
    (folder := tmp_path / "results" / "cpu" / "r1").mkdir(parents=True)
    store.write(store.to_table(rows), folder / "0000-000.parquet")
    submitted: list[Path] = []
    monkeypatch.setattr(local.Local, "submit", lambda self, run, shards: submitted.append(run.folder))
    request.wait = False

    assert start.run(request) == (0 if lacks else 4)
    said = capsys.readouterr().out
    assert submitted == [*tmp_path.glob("runs/*")] and len(submitted) == lacks
    if lacks:
        assert "2 cases of hgemm, 1 of them in the results already (resume=true), about " in said
    else:
        assert "12.5" in said and "All 2 cases were in the results already (resume=true); nothing was started." in said
        assert "Rows: " in said and "Next: " in said

    request.dry_run = True
    assert start.run(request) == 0
    said = capsys.readouterr().out
    assert said.count("│ in the results already") == (1 if lacks else 2)
    assert ("Would run nothing: all rows are in the results already" in said) != lacks


def tiny(**keys: Any) -> Config:
    """A request for one small case on this machine."""
    sizes = Shape("one", cpu=[{"m": 8, "n": 8, "k": 8}])
    where = {"cluster": Cluster("local", executor="local"), "timing": FAST, "shape": sizes}
    return Config(op="hgemm", kernel="torch", dtype="float16", **where | keys)
