"""`profiler=torch`: PyTorch's profiler on real calls here, and its summary on events as a GPU gives them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minfer import ops, profilers
from minfer.profilers import Finding, Job, calls, host
from minfer.profilers import torch as profiler
from minfer.rows import store
from tests.conftest import has_gpu, launch


def job(folder: Path, *kernels: str, calls: int = 3) -> Job:
    op = ops.get("hgemm")
    cases = [op.case(kernel, "float16", dict.fromkeys(op.axes, 32)) for kernel in kernels]
    return Job(cases, {"calls": calls}, "cpu", folder, 60, frozenset(case.key for case in cases))


def test_the_operators_of_a_call_are_counted_by_call(tmp_path):
    (finding,) = profiler.profile(job(tmp_path / "made" / "late", "torch", calls=4))
    metrics = finding.metrics
    assert finding.why == "ok" and metrics["aten::mm.calls"] == 1  # the warm-up call is not in it
    assert metrics["cpu_us"] >= metrics["aten::mm.cpu_us"] >= metrics["aten::mm.self_cpu_us"] > 0
    assert not [name for name in metrics if "device" in name or "launch" in name or "kernel" in name]


def test_the_table_and_the_trace_are_kept(tmp_path):
    work = job(tmp_path, "cpu_naive", calls=2)
    list(profiler.profile(work))
    slug = store.slug(work.cases[0].key)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{slug}.trace.json.gz", f"{slug}.txt"]
    table = (tmp_path / f"{slug}.txt").read_text()
    assert table.startswith(f"2 calls of {work.cases[0].key}\n") and "minfer::hgemm_cpu_naive" in table
    trace = json.loads(gzip.decompress((tmp_path / f"{slug}.trace.json.gz").read_bytes()))
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names == ["cpu_naive"] * 2


def test_an_error_costs_one_case(tmp_path, faults):
    raises, torch = profiler.profile(job(tmp_path, "raises", "torch"))
    assert raises.metrics == {} and raises.why == "ValueError: these operands do not please me"
    assert torch.why == "ok"


def test_a_lost_cuda_context_is_not_an_error_of_one_case(monkeypatch):
    def fails() -> Finding:
        raise ValueError("Triton Error [CUDA]: an illegal memory access was encountered")

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(calls.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(calls.torch.cuda, "synchronize", lambda: None)
    assert calls.attempt(fails).why.startswith("ValueError: Triton Error")
    monkeypatch.setattr(calls.torch.cuda, "synchronize", lost)
    with pytest.raises(RuntimeError, match=r"^CUDA error"):
        calls.attempt(fails)


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    (finding,) = profiler.profile(job(tmp_path / "file" / "torch", "torch"))
    assert finding.metrics == {} and finding.why.startswith("NotADirectoryError")


def test_what_was_not_measured_is_not_called(tmp_path):
    work = job(tmp_path, "torch", "cpu_naive")
    measured = frozenset({work.cases[1].key})
    first, second = host.findings(profiler, profilers.Job(work.cases, work.options, "cpu", tmp_path, 60, measured))
    assert (first.why, second.why) == ("the case was not measured", "ok") and not first.metrics


def event(key: str, kind: str, count: int, *, cpu: float = 0, device: float = 0, annotation: bool = False) -> Any:
    times = {"cpu_time_total": cpu, "self_cpu_time_total": cpu / 2}
    times |= {"device_time_total": 2 * device, "self_device_time_total": device}
    about = {"key": key, "count": count, "device_type": SimpleNamespace(name=kind), "is_user_annotation": annotation}
    return SimpleNamespace(**about, **times)


# Two calls; by the way PyTorch lists what runs on a GPU: an annotation has a shadow on the device.
ON_GPU = [
    event("k", "CPU", 2, cpu=100, device=1, annotation=True),
    event("k", "CUDA", 2, device=60, annotation=True),
    event("aten::mm", "CPU", 2, cpu=80, device=50),
    event("cudaLaunchKernel", "CPU", 2, cpu=20, device=40),
    event("cuLaunchKernelEx", "CPU", 2, cpu=8),
    event("cudaDeviceSynchronize", "CPU", 1, cpu=900),
    event("Activity Buffer Request", "CPU", 1, cpu=700),
    event("reduce", "CUDA", 2, device=10),
    event("gemm", "CUDA", 2, device=40),
    event("Memset (Device)", "CUDA", 2, device=6),
]


def test_kernels_are_counted_once_on_a_gpu():
    finding = profiler.summary(ON_GPU, 2, on_gpu=True)
    assert finding.why == "ok" and finding.functions == {"kernel0": "gemm", "kernel1": "reduce"}
    assert finding.metrics == {
        "cpu_us": 50, "launches": 2, "launch_us": 7, "copies_us": 3, "kernels": 2, "device_us": 25,
        "kernel0.device_us": 20, "kernel0.calls": 1, "kernel1.device_us": 5, "kernel1.calls": 1,
        "aten::mm.calls": 1, "aten::mm.cpu_us": 40, "aten::mm.self_cpu_us": 20, "aten::mm.device_us": 50,
        "aten::mm.self_device_us": 25,
    }  # fmt: skip


def test_a_gpu_without_kernels_says_so_and_keeps_the_hosts_times():
    finding = profiler.summary([each for each in ON_GPU if each.device_type.name == "CPU"], 2, on_gpu=True)
    assert "saw no kernel" in finding.why and finding.metrics["cpu_us"] == 50 and "device_us" not in finding.metrics


def test_the_number_of_metrics_is_bounded():
    many = [event(f"aten::op{i}", "CPU", 1, cpu=i) for i in range(50)]
    many += [event(f"kernel{i}", "CUDA", 1, device=i) for i in range(50)]
    finding = profiler.summary(many, 1, on_gpu=True)
    assert "aten::op49.calls" in finding.metrics and "aten::op1.calls" not in finding.metrics
    assert finding.functions["kernel0"] == "kernel49" and len(finding.functions) == calls.MOST_KERNELS
    assert finding.metrics["kernels"] == 50 and finding.metrics["device_us"] == sum(range(50))
    assert len(finding.metrics) == 6 + 2 * calls.MOST_KERNELS + 5 * profiler.MOST_OPS


@pytest.mark.slow
@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_one_command_profiles_cpu_kernels(tmp_path):
    words = ["+sweep=hgemm", "cluster=local", "shape=tiny", "timing=quick", "dtype=float16", "kernel=[torch,cpu_naive]"]
    words += ["profiler=[static,torch,proton]", f"results={tmp_path / 'results'}", f"runs={tmp_path / 'runs'}"]
    done = launch(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(store.rows(store.files(tmp_path / "results")))
    assert [row["kernel"] for row in rows] == ["torch", "cpu_naive"]
    for row in rows:
        assert row["profilers"] == {
            "static": "reads CUDA kernels only",
            "torch": "ok",
            "proton": "proton needs a CUDA GPU",
        }
        assert row["status"] in store.MEASURED and row["metrics"]["torch.cpu_us"] > 0
    assert len(list(tmp_path.glob("results/*/*/torch/*.trace.json.gz"))) == 2
    assert not list(tmp_path.glob("results/*/*/proton"))
