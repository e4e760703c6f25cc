"""What a job needs, asked before it is queued and on its node."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from minfer.bench import device
from minfer.jobs import logs, partition, preflight
from minfer.jobs import run as jobs_run
from minfer.jobs.executors.local import Local
from minfer.jobs.executors.slurm import Slurm, check_lines
from minfer.jobs.run import CONFIG, Run
from minfer.plan.config import Cluster, Container, UserError

REQUEST = "op: hgemm\ndtype: float16\nshape: {{name: tiny}}\ncluster: {{name: local}}\nresults: {}\n"


def test_gpus_of_a_request_and_of_a_node_are_read_alike():
    assert partition.count_gpus("gpu:l40s:4") == partition.count_gpus("gpu:l40s:4(S:0-1)") == {"l40s": 4}
    assert partition.count_gpus("gpu:2") == {"": 2} and partition.count_gpus("gpu") == {"": 1}
    assert partition.count_gpus("lscratch:100,gpu:a100_80g:1") == {"a100_80g": 1}
    assert partition.count_gpus("gpu:1g.10gb:2") == {"1g.10gb": 2} and partition.count_gpus("gpu:l40s") == {"l40s": 1}
    for none in (None, "", "lscratch:100", "(null)"):
        assert partition.count_gpus(none) == {}
    assert Slurm(Cluster("x", gres="gpu:l40s:4"), Container()).shards_per_job == 4
    assert Local(Cluster("x", gres="gpu:l40s:4"), Container()).shards_per_job == 1
    assert Slurm(Cluster("x"), Container()).shards_per_job == 1


def test_another_model_than_the_one_asked_for_is_named():
    assert preflight.explain_model("gpu:l40s:1", ["NVIDIA L40S"]) is None
    assert preflight.explain_model("gpu:big:1", ["NVIDIA L40S"]) is None  # a site's own word says nothing
    assert preflight.explain_model("gpu:1", ["NVIDIA L40S"]) is None
    why = preflight.explain_model("gpu:l40s:1", ["NVIDIA A100-SXM4-80GB"])
    assert why and "gpu:l40s:1 was asked for, and the GPU is NVIDIA A100" in why


def test_a_driver_for_an_older_major_cuda_is_named_with_the_switch(monkeypatch):
    monkeypatch.setattr(device.torch.version, "cuda", "13.2")
    assert device.old_driver(13000) is None and device.old_driver(14010) is None
    why = device.old_driver(12040)
    assert why and "supports CUDA 12.4" in why and "UV_PROJECT=cuda12" in why


def test_a_node_with_another_gpu_or_an_old_driver_ends_the_job_with_a_sentence(monkeypatch):
    """NVML is played: there is no GPU here."""

    def play(name: str, driver: int) -> None:
        for function, value in {"Init": None, "DeviceGetCount": 1, "DeviceGetHandleByIndex": 0, "DeviceGetName": name,
                                "SystemGetCudaDriverVersion": driver}.items():  # fmt: skip
            monkeypatch.setattr(pynvml, f"nvml{function}", lambda *_, value=value: value)

    monkeypatch.setattr(device.torch.version, "cuda", "13.2")
    play("NVIDIA L40S", 13000)
    preflight.check_gpu("gpu:l40s:1")
    with pytest.raises(SystemExit, match=r"^minfer: node \S+: gpu:h100:1 was asked for, and the GPU is NVIDIA L40S"):
        preflight.check_gpu("gpu:h100:1")
    play("NVIDIA L40S", 12040)
    with pytest.raises(SystemExit, match=r"^minfer: node \S+: the NVIDIA driver supports CUDA 12\.4"):
        preflight.check_gpu("gpu:l40s:1")


def test_the_file_system_of_a_path_is_that_of_the_nearest_mount():
    mounts = "\n".join(["/dev/sda / ext4 rw 0 0", "server:/home /home nfs4 rw 0 0", r"tmpfs /home/a\040b tmpfs rw 0 0"])
    assert preflight.file_system(Path("/tmp/x"), mounts) == "ext4"
    assert preflight.file_system(Path("/home/x"), mounts) == "nfs4"
    assert preflight.file_system(Path("/homes"), mounts) == "ext4"
    assert preflight.file_system(Path("/home/a b/c"), mounts) == "tmpfs"


def test_scratch_on_a_network_file_system_is_a_warning(monkeypatch):
    monkeypatch.setattr(preflight, "file_system", lambda path: "lustre")
    (warning,) = preflight.find_warnings(Path("/scratch"), [])
    assert "network file system (lustre)" in warning and "cluster.scratch" in warning
    monkeypatch.setattr(preflight, "file_system", lambda path: "xfs")
    assert not list(preflight.find_warnings(Path("/scratch"), []))


def test_scratch_without_room_or_that_cannot_be_made_ends_the_job_with_a_sentence(tmp_path, monkeypatch):
    preflight.prepare_scratch(tmp_path / "new")
    assert (tmp_path / "new").is_dir()
    with pytest.raises(
        SystemExit, match=r"^minfer: cannot make the scratch folder /proc/x on .*; set cluster\.scratch"
    ):
        preflight.prepare_scratch(Path("/proc/x"))
    monkeypatch.setattr(preflight, "LEAST_SCRATCH_MB", 1 << 40)
    with pytest.raises(SystemExit, match=r"has \d+ MB free, and compiling takes up to"):
        preflight.prepare_scratch(tmp_path)
    monkeypatch.undo()
    full = SimpleNamespace(f_files=9000, f_favail=12)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    with pytest.raises(
        SystemExit, match=r"has room for 12 more files, and compiling makes up to 2000; remove some or set"
    ):
        preflight.prepare_scratch(tmp_path)
    full.f_files = full.f_favail = 0  # where there is no such limit
    preflight.prepare_scratch(tmp_path)


def test_an_image_that_is_not_there_is_one_sentence_before_anything_is_queued(tmp_path):
    with pytest.raises(UserError, match=r"the container image .* does not exist; build it"):
        Slurm(Cluster("x"), Container("apptainer", str(tmp_path / "minfer.sif"))).preflight()


def test_the_script_of_a_job_says_what_its_node_lacks(tmp_path):
    """Also where names have quotes and spaces: they are never read by the shell."""
    folder, odd = tmp_path / "run", tmp_path / "it's a $(touch pwned) ;"
    (folder / "sources").mkdir(parents=True)
    (folder / CONFIG).write_text(REQUEST.format(tmp_path))

    def say(container: Container, python: str = "/bin/sh", scratch: str | None = None) -> tuple[int, str]:
        lines = check_lines(Slurm(Cluster("x", scratch=scratch), container), Run(folder), python)
        script = "\n".join(["command() { true; }", *lines, "echo fit"])  # there may be no apptainer here
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path)
        assert (done.returncode == 0) == (done.stdout == "fit\n")
        (tmp_path / "log").write_text(done.stderr)
        return done.returncode, logs.find_sentence(tmp_path / "log") or ""

    assert say(Container()) == (0, "")
    status, said = say(Container("apptainer", str(odd)))
    assert status == 1 and f"has no {odd}; copy the container image there, or set container.image" in said
    odd.write_text("an image")
    assert say(Container("apptainer", str(odd))) == (0, "")
    assert say(Container("apptainer", str(odd)), scratch=str(tmp_path / "new scratch")) == (0, "")
    assert (tmp_path / "new scratch").is_dir()
    status, said = say(Container("apptainer", str(odd)), scratch="/proc/x")
    assert status == 1 and "cannot make /proc/x; set cluster.scratch" in said
    status, said = say(Container(), python=str(tmp_path / "nowhere"))
    assert status == 1 and "uv sync" in said and "cluster.flags.exclude" in said
    assert not (tmp_path / "pwned").exists()


def test_the_sources_of_a_run_are_its_own_read_only_and_copied_once(tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    for name in ("checkout/minfer", "checkout/jobs"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "module.py").write_text("before")
    (checkout / "minfer" / "jobs").symlink_to("../jobs")  # as in a clone
    monkeypatch.setattr(jobs_run, "PACKAGE", checkout / "minfer")
    (tmp_path / "run").mkdir()
    run = Run(tmp_path / "run")
    run.copy_sources()
    (checkout / "minfer" / "module.py").write_text("after")
    run.copy_sources()
    assert (run.sources / "minfer" / "module.py").read_text() == "before"
    assert not (run.sources / "minfer" / "jobs" / "module.py").stat().st_mode & 0o222


MEMORY = "it ran out of memory; raise cluster.memory_gb"
SINFO = """\
gpu*|2|16000|gpu:l40s:2|infinite|n1|idle
gpu*|64|512000+|gpu:a100:1(S:0)|1-12:00:00|n2|idle
long|8|32000|(null)|30:00|n3|idle
"""


@pytest.fixture
def sinfo(monkeypatch):
    """sinfo is played: a default partition of two nodes, and another one."""

    def play(command, **_):
        chosen = [word.partition("=")[2] for word in command if word.startswith("--partition=")]
        lines = [line for line in SINFO.splitlines(True) if not chosen or line.split("|")[0].strip("*") in chosen]
        return subprocess.CompletedProcess(command, 0, "".join(lines), "")

    monkeypatch.setattr(subprocess, "run", play)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, None),
        ({"cpus": 64, "memory_gb": 500, "time_min": 2160}, None),
        ({"cpus": 65}, "no node has 65 CPUs, at most 64; lower cluster.cpus, or set it to null for the site's default"),
        (
            {"memory_gb": 501},
            "no node has 501 GB of memory, at most 500 GB; lower cluster.memory_gb, or set it to null",
        ),
        ({"gres": "gpu:l40s:1", "cpus": 3}, "no node has 3 CPUs with gpu:l40s:1, at most 2; lower cluster.cpus"),
        ({"gres": "gpu:l40s:1", "time_min": 10**6}, None),
        ({"gres": "gpu:a100:1", "time_min": 2161}, "jobs may run for 2160 min, and cluster.time_min is 2161; lower it"),
        (
            {"gres": "gpu:l40s:3"},
            "no node has gpu:l40s:3, only gpu:a100:1, gpu:l40s:2; correct cluster.gres or partition",
        ),
        (
            {"partition": "long", "gres": "gpu:1"},
            "no node of partition long has gpu:1, only no GPU; correct cluster.gres",
        ),
        (
            {"partition": "long", "time_min": 31},
            "jobs of partition long may run for 30 min, and cluster.time_min is 31",
        ),
    ],
)
def test_what_no_node_of_the_partition_has_is_one_sentence(sinfo, asked, said):
    ask = Slurm(Cluster("x", **asked), Container()).preflight
    if said is None:
        return ask()
    with pytest.raises(UserError) as told:
        ask()
    assert str(told.value).startswith(said)


def test_gpus_of_several_models_are_named_where_any_will_do(sinfo):
    models = lambda gres: Slurm(Cluster("x", gres=gres), Container()).list_models()
    assert models("gpu:1") == ["a100", "l40s"] and models("gpu:l40s:1") == models(None) == []


@pytest.mark.parametrize(
    ("log", "end", "said"),
    [
        ("", "OUT_OF_MEMORY", MEMORY),
        ("x\nslurmstepd: error: Exceeded job memory limit\n", "", MEMORY),
        ("slurmstepd: error: StepId=7.0 exceeded memory limit (9 > 8), being killed\n", "FAILED", MEMORY),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0\n", "FAILED", MEMORY),
        ("Traceback:\nModuleNotFoundError: No module named 'hydra'\n", "", "ModuleNotFoundError: No module named 'hydra'; "),
        ("a\n/x: line 9: module: command not found\nb\n", "", "/x: line 9: module: command not found; correct cluster.setup"),
        ("Traceback:\n  File\nRuntimeError: \x1b[31mno\n", "", "RuntimeError: [31mno"),
        ("all is well\n", "TIMEOUT", logs.TIME),
        ("all is well\n", "FAILED", None),
        ("submitit WARNING (x) - Caught signal SIGUSR2 on n1: this job is timed-out.\nsubmitit.UncompletedJobError\n", "FAILED",
         logs.TIME),
    ],
)  # fmt: skip
def test_the_line_of_a_log_that_says_why_a_job_ended(tmp_path, log, end, said):
    (tmp_path / "log").write_text(log)
    found = logs.find_cause(tmp_path / "log", end)
    assert found is None if said is None else found and found.startswith(said)
    assert logs.find_cause(tmp_path / "none", end) == ({"OUT_OF_MEMORY": MEMORY, "TIMEOUT": logs.TIME}.get(end))
