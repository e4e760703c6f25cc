"""A run after it was submitted: shards that run twice, jobs that are told to stop, and what the run's folder says."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from minfer import ops
from minfer.jobs import executors, queue
from minfer.jobs.executors import local
from minfer.jobs.run import CONFIG, JOBS, Job, Run
from minfer.plan.cases import Plan
from minfer.plan.config import Cluster, Config, Container, UserError
from minfer.plan.extra import load
from minfer.plan.shard import Shard, Unfit, hash_outside
from minfer.process.stopping import AGAIN, STOPPED, Stopping
from minfer.rows import store
from minfer.rows.writer import StoreError, Writer
from minfer.run import control, start
from minfer.run.progress import RunProgress, ShardProgress
from minfer.worker import write_rows
from minfer.worker.claim import Claim, Superseded, lock_gpu
from minfer.worker.compiler import Compiler
from minfer.worker.events import Events
from minfer.worker.shard import run_cases
from minfer.worker.supervisor import Machine
from tests.conftest import FAST, FAULTS, ROOT


@pytest.fixture
def shard(tmp_path, faults) -> Shard:
    op = ops.get("hgemm")
    cases = [op.case(name, "float16", dict.fromkeys(op.axes, 16)) for name in ("raises", "zeros", "hangs")]
    folder, results = str(tmp_path / "run"), str(tmp_path / "results")
    (tmp_path / "run" / "progress").mkdir(parents=True)
    return Shard("0000", "test", folder, results, "cpu", cases, FAST, 60.0, 60.0, extra=[str(FAULTS)])


def events(shard: Shard, kind: str) -> list[dict[str, object]]:
    lines = (Path(shard.folder) / "progress" / "0000.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


def kernels(shard: Shard) -> list[str]:
    found = [row["kernel"] for row in store.rows(store.files(Path(shard.results)))]
    assert len(set(found)) == len(found)
    return found


@pytest.mark.slow
def test_told_to_stop_soon_a_shard_leaves_its_case_and_run_again_does_the_rest_once(shard):
    """`hangs` never ends: it is abandoned, and the status asks for another job only where a case was finished."""
    path = shard.save()
    code = f"from minfer.jobs import node; node.run([{str(path)!r}], None, 2.0, None, None)"
    for status, done in ((AGAIN, 2), (STOPPED, 0)):
        before = len(events(shard, "case")) if done == 0 else 0
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
        deadline = time.monotonic() + 120
        log = Path(shard.folder) / "progress" / "0000.jsonl"
        while not log.exists() or len(events(shard, "case")) < before + done + 1:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        for _ in range(2):  # SLURM may send it twice
            process.send_signal(signal.SIGUSR2)
        assert process.wait(timeout=60) == status
        assert kernels(shard) == ["raises", "zeros"]
    assert [event["again"] for event in events(shard, "stopped")] == [True, False]
    assert len(events(shard, "kept")) == 2 and len(events(shard, "done")) == 2

    shard.case_timeout_s = 6.0
    run_cases(shard, Events(shard), Stopping())
    assert kernels(shard) == ["raises", "zeros", "hangs"]


def test_a_process_whose_shard_another_has_begun_writes_no_more(shard):
    first = Claim(shard)
    first.check()
    second = Claim(shard)
    with pytest.raises(Superseded, match="runs this shard now"):
        first.check()
    second.check()


def test_files_that_changed_since_a_run_was_submitted_end_it_with_a_sentence(shard, tmp_path):
    kernel = tmp_path / "kernel.py"
    kernel.write_text("before")
    shard.sources = hash_outside([str(kernel)], shard.cases)
    assert set(shard.sources) == {str(kernel), str(FAULTS)}  # the project's own are copied
    shard.check_sources()
    kernel.write_text("after")
    with pytest.raises(Unfit, match=r"kernel\.py has changed since the run was submitted; start a new run"):
        shard.check_sources()


def test_what_is_timed_on_a_gpu_is_alone_there():
    gpu, order = f"test-{os.getpid()}", []

    def second() -> None:
        with lock_gpu(gpu, lambda: order.append("waits")):
            order.append("second")

    thread = threading.Thread(target=second)
    with lock_gpu(gpu, lambda: order.append("never")), lock_gpu(None, lambda: order.append("never")):
        thread.start()
        deadline = time.monotonic() + 60
        while not order:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        order.append("first")
    thread.join()
    Path(f"/tmp/minfer-{gpu}.lock").unlink()
    assert order == ["waits", "first", "second"]


def test_local_shards_have_a_gpu_each_of_those_that_the_user_left_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert [local._choose_gpu(shard, 2) for shard in range(2)] == ["GPU-a", "GPU-b"]
    assert local._choose_gpu(0, 1) == "GPU-a,GPU-b"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [local._choose_gpu(shard, 3) for shard in range(3)] == ["0", "1", "2"] and local._choose_gpu(0, 1) is None


@pytest.mark.slow
def test_local_shards_run_at_once_each_on_a_gpu_of_its_own_and_from_the_runs_sources(shard, monkeypatch):
    """The GPUs are make-believe: what is run is the CPU's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    folder = Path(shard.folder)
    run, names = Run(folder), ["0000", "0001"]
    Run.create(folder, Config(cluster=Cluster("local"), results=shard.results))
    shard.cases = shard.cases[:1]
    for shard.name in names:
        shard.save()
    jobs = local.Local(Cluster("local"), Container()).submit(run, names)
    assert len({job.id for job in jobs}) == 2
    for job in jobs:
        assert os.fsencode(folder / "sources") in Path(f"/proc/{job.id}/environ").read_bytes()
    assert "PYTHONSAFEPATH" not in os.environ and str(folder) not in os.environ.get("PYTHONPATH", "")
    progress = RunProgress(Run(folder))
    deadline = time.monotonic() + 200
    while progress.active:
        progress.read()
        assert time.monotonic() < deadline, progress.line()
        time.sleep(0.2)
    assert progress.line() == "shards: 2 done; 2 of 2 rows", progress.reasons()
    told = [
        [json.loads(line) for line in (folder / "progress" / f"{name}.jsonl").read_text().splitlines()]
        for name in names
    ]
    assert [[e["gpu"] for e in events if e["event"] == "start"] for events in told] == [["GPU-a"], ["GPU-b"]]


def test_a_results_folder_that_is_gone_is_waited_for_and_not_made_anew(shard, tmp_path):
    tell = Events(shard)
    results = tmp_path / "results"
    writer = Writer(results / "cpu" / "test", "0000")
    write_rows.append(writer, {"case": "first"}, tell)
    results.rename(tmp_path / "elsewhere")
    seen = []

    def back() -> None:
        deadline = time.monotonic() + 30
        while not events(shard, "waiting") and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(results.exists())
        (tmp_path / "elsewhere").rename(results)

    thread = threading.Thread(target=back)
    thread.start()
    write_rows.append(writer, {"case": "second"}, tell)
    thread.join()
    assert seen == [False] and events(shard, "waiting")
    assert [row["case"] for row in store.rows(store.files(results))] == ["first", "second"]


def test_a_results_folder_that_stays_away_or_is_full_ends_the_shard_and_its_row_is_kept(shard, tmp_path, monkeypatch):
    monkeypatch.setattr(write_rows, "PATIENCE_S", 0.0)
    writer = Writer(tmp_path / "results" / "cpu" / "test", "0000")
    (tmp_path / "results").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="No such file or directory") as caught:
        write_rows.append(writer, {"case": "first"}, Events(shard))
    assert "unwritten rows are in" in write_rows.rescue(shard, caught.value)
    assert [row["case"] for row in store.rows(Path(shard.folder).glob("*rescued.parquet"))] == ["first"]


def test_a_compiler_without_room_ends_the_shard_and_is_no_row(shard, monkeypatch):
    errors = "x.cpp: fatal error: error writing to /tmp/x.s: No space left on device\n"
    (Path(shard.folder) / "logs").mkdir()
    with pytest.raises(
        Unfit, match=r"cannot compile x in .*: No space left on device; free it or set cluster\.scratch"
    ):
        Compiler(shard, "", lambda **event: None).explain("x", 1, errors)


def test_a_node_whose_clock_is_behind_is_named_and_its_times_are_the_file_systems(shard, monkeypatch):
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() - 3600)  # the module is everybody's
    skew_s = Claim(shard).skew_s
    assert abs(skew_s - 3600) < 60
    machine = Machine({"device": "a CPU"}, None, None)
    finished = write_rows.complete(shard, machine, None, shard.cases[0], {}, skew_s)["finished"].timestamp()
    assert abs(finished - true()) < 60


def test_the_state_of_a_shard_follows_its_process_and_the_queue():
    shard = ShardProgress("0000", 2)

    def after(word: str | None, *events: str, **about: object) -> str:
        for event in events:
            shard.take({"event": event, "case": event, "message": "why", **about})
        shard.settle(queue.Seen(word) if word else None)
        return shard.state

    assert after("PENDING", "submitted") == "queued"
    assert after("RUNNING", "start", "done") == "running"
    assert after(None) == "running"  # once out of sight is not gone
    assert after("NODE_FAIL") == "requeued" and after("PENDING") == "requeued"
    assert after("RUNNING", "start", "kept", "skip") == "running"
    assert after("RUNNING", "end") == "done"  # its process has said so, and SLURM will
    assert len(shard.cases) == 1 + 1 + 1 and shard.skipped.keys() == {"skip"}

    assert after("PENDING", "submitted") == "queued" and not shard.over
    assert after("RUNNING", "start", "stopped", "end", again=True) == "running"  # its script has it queued again
    assert after("PENDING") == "requeued"
    assert after(None) == "requeued" and after(None) == "failed" and shard.message == "why"
    assert after("PENDING", "submitted") == "queued"
    assert after(None) == "queued" and after(None) == "failed" and shard.message is None


@pytest.mark.slow
def test_a_local_run_goes_on_without_its_launcher_and_is_looked_at_from_elsewhere(tmp_path):
    words = ["+sweep=hgemm", "cluster=local", "device=cpu", "shape=tiny", "timing=quick", "dtype=float16", "wait=false"]
    words += ["kernel=[zeros,hangs]", f"extra=[{FAULTS}]", "results=here/results", "runs=here/runs"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def call(*words: str, folder: Path = tmp_path) -> str:
        command = [sys.executable, "-m", "minfer", *words]
        with open(tmp_path / "said", "w+") as said:  # no pipe: the job, which goes on, has it open
            done = subprocess.run(command, cwd=folder, env=environment, stdout=said, stderr=said, timeout=120)
        assert done.returncode == 0, (tmp_path / "said").read_text()
        return (tmp_path / "said").read_text()

    assert "minfer status here/runs/" in call(*words)
    (run,) = (tmp_path / "here" / "runs").iterdir()
    deadline = time.monotonic() + 120
    while "/hangs/" not in "".join(path.read_text() for path in run.glob("progress/*.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    elsewhere = Path("/")
    assert "shards: 1 running; 1 of 2 rows" in call("status", str(run), folder=elsewhere)
    assert "1 jobs cancelled; its 1 rows are kept" in call("cancel", str(run), folder=elsewhere)
    (job,) = Run(run).jobs.values()
    assert executors.find_states(Run(run), [job]) == {}


def test_a_run_that_is_not_there_and_a_change_that_cannot_be(tmp_path):
    with pytest.raises(UserError, match="there is no run nowhere"):
        Run.find("nowhere")
    (tmp_path / "config.yaml").write_text("op: hgemm\ndtype: float16\nshape: {name: tiny}\ncluster: {name: local}\n")
    with pytest.raises(UserError, match=r"cannot change 'op=x' of a run; only cluster\.\* and container\.\*"):
        Run(tmp_path).change_request(["op=x"])
    can = r"only cluster\.KEY=VALUE, container\.KEY=VALUE, status=\.\.\. and wait=false can be given"
    with pytest.raises(UserError, match=rf"^cannot resubmit with 'dry_run=true'; {can}$"):
        control.resubmit(Console(), Run(tmp_path), ["wait=false", "status=oom", "cluster.cpus=1", "dry_run=true"])
    with pytest.raises(UserError, match=r"cluster\.time_min is 0"):
        Run(tmp_path).change_request(["cluster.time_min=0"])
    plus = Run(tmp_path)
    plus.change_request(["+cluster.flags.exclude=n2", "++cluster.cpus=4"])  # as for a launch
    assert plus.request.cluster.flags == {"exclude": "n2"} and plus.request.cluster.cpus == 4
    for word, said in {
        "cluster.time=5": "no such key 'cluster.time'; did you mean cluster.time_min?",
        "cluster.cpus=x": "bad value for 'cluster.cpus': value 'x' of type 'str' could not be converted to Integer",
        "cluster.setup=lines": "bad value for 'cluster.setup': it takes a list; write 'cluster.setup=[lines]'",
        "cluster.cpus=[1": "cannot read 'cluster.cpus=[1'; write it as key=value",
    }.items():
        with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
            Run(tmp_path).change_request([word])
    (tmp_path / "config.yaml").write_text("oops: 1\n")
    with pytest.raises(UserError, match=r"cannot read .*config\.yaml: .*oops"):
        Run(tmp_path).change_request(["cluster.cpus=1"])


def test_a_resubmit_changes_one_flag_or_all_of_them(tmp_path):
    words = "op: hgemm\ndtype: float16\nshape: {name: tiny}\n"
    (tmp_path / "config.yaml").write_text(f"{words}cluster: {{name: slurm, flags: {{hold: true, begin: now+600}}}}\n")

    def flags(*changes: str) -> dict[str, object]:
        run = Run(tmp_path)
        run.change_request(list(changes))
        return run.request.cluster.flags

    assert flags("cluster.flags.begin=now", "cluster.time_min=5") == {"hold": True, "begin": "now"}
    assert flags("cluster.flags={}") == {}
    assert flags("cluster.flags={nice: 5}") == {"nice": 5}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nothing_like_this\n", ", line 1, cannot be imported: ModuleNotFoundError: No module named 'nothing"),
        ("\n\nboom(\n", " cannot be imported: SyntaxError: '(' was never closed"),
        ("def f():\n    return {}['a']\nf()\n", ", line 2, cannot be imported: KeyError: 'a'; correct the file"),
    ],
)
def test_a_file_of_the_user_that_fails_is_one_sentence(tmp_path, text, said):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError) as caught:
        load(str(tmp_path / "mine.py"))
    assert str(caught.value).startswith(f"extra={tmp_path}/mine.py{said}")


def test_runs_are_listed_and_their_logs_shown_also_where_a_file_is_broken(shard, monkeypatch, capsys):
    """Without a queue to ask: its job is a process that is gone."""
    folder = Path(shard.folder)
    shard.save()
    (folder / CONFIG).write_text("op: hgemm\ndtype: float16\nshape: {name: x}\ncluster: {name: local}\n")
    (folder / "shards" / "0001.json").write_text("{")
    Run(folder).add_jobs([Job("0000", "999999999", "local")])
    with open(folder / JOBS, "a") as file:
        file.write('{"shard": "00')
    Run(folder).tell(["0000", "0001"], event="done", case=shard.cases[0].key)
    (folder / "logs").mkdir()
    (folder / "logs" / "0000.log").write_text("a kernel \x1b[2Jsaid this\n")
    monkeypatch.chdir(folder.parent)
    Path("runs").mkdir()
    Path("runs/20260101-000000-0000").symlink_to(folder)
    monkeypatch.setattr(Run, "list_all", lambda: [Run(Path("runs/20260101-000000-0000"))])
    console = Console(width=200)
    assert Run.find("last").name == "20260101-000000-0000"
    assert control.runs(console, ["--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["cases"], run["rows"], run["shards"], run["jobs"]) == (3, 1, {"failed": 1}, ["999999999"])
    assert "0001.json cannot be read" in run["warnings"][0] and "ended early" in run["failed"]["0000"]
    assert control.runs(console, []) == 0 and "1 of 3" in capsys.readouterr().out
    assert control.logs(console, Run(folder), ["0000"]) == 0
    assert "a kernel [2Jsaid this\n" in capsys.readouterr().out
    assert control.logs(console, Run(folder), ["0"]) == 0  # as a plan calls it
    assert "a kernel [2Jsaid this\n" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"cannot read '1'; usage: minfer logs RUN \[SHARD\]"):
        control.logs(console, Run(folder), ["0", "1"])
    with pytest.raises(UserError, match="no shard 7; it has 0000"):
        control.logs(console, Run(folder), ["7"])


def test_a_run_whose_request_is_broken_is_cancelled(shard, capsys):
    """Its job is a process that has ended already."""
    folder = Path(shard.folder)
    shard.save()
    (folder / CONFIG).write_text("op: [")
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    Run(folder).add_jobs([Job("0000", str(gone.pid), "local")])
    assert control.cancel(Console(width=200), Run(folder), []) == 0
    assert "0 jobs cancelled; its 0 rows are kept" in capsys.readouterr().out
    with pytest.raises(UserError, match="cannot read 'now'; usage: minfer cancel RUN"):
        control.cancel(Console(), Run(folder), ["now"])


def test_a_log_is_shown_while_it_is_read(shard, monkeypatch):
    """A log may be larger than the memory, and its reader may go away after the first lines."""
    folder, shown = Path(shard.folder), []
    shard.save()
    (folder / "logs").mkdir()
    (folder / "logs" / "0000.log").write_text("é" * control.CHUNK * 3)

    def write(text: str) -> None:
        shown.append(text)
        if "é" in text:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", SimpleNamespace(write=write, flush=lambda: None))
    with pytest.raises(BrokenPipeError):
        control.logs(Console(), Run(folder), ["0000"])
    assert shown[-1] == "é" * control.CHUNK


def test_a_second_interrupt_leaves_no_jobs_and_the_last_sentence_is_said(tmp_path, monkeypatch):
    ended, console = [], Console(record=True, width=200, file=io.StringIO())

    def interrupted(*about: object) -> None:
        raise KeyboardInterrupt

    def cancel(*about: object) -> list[str]:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        ended.append(about)
        return []

    monkeypatch.setattr(start, "follow", interrupted)
    monkeypatch.setattr(executors, "cancel", cancel)
    monkeypatch.setattr(start, "print_summary", lambda *about: os.kill(os.getpid(), signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    executor = local.Local(Cluster("local"), Container())
    assert start.finish(console, Run(tmp_path), executor, Plan([], {}, {})) == 130
    assert len(ended) == 1 and "Stopped; finished rows are kept. To go on: " in console.export_text()
    assert signal.getsignal(signal.SIGINT) == before
