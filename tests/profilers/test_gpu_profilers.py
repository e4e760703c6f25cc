"""The profilers that need a GPU, held against what is known of a case by other means."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minfer import ops, profilers
from minfer.bench import device as devices
from minfer.bench.clock import CudaClock, Hooks
from minfer.ops import Case
from minfer.profilers import Finding, Job, calls, jit, proton, static
from minfer.rows import store
from tests.conftest import launch

pytestmark = pytest.mark.gpu

SIZE = 2048  # long enough to compare clocks, and its 24 MB of operands fit a large L2 cache
KERNELS = ("triton_tiled", "torch")
OPTIONS: dict[str, dict[str, Any]] = {"torch": {"calls": 5}, "proton": {"calls": 20, "instrument": False}}

# A Triton kernel that marks scopes and registers itself, as a user would write it.
SCOPED = """
import triton
import triton.language as tl
import triton.profiler.language as pl
from minfer import ops

pl.enable_semantic("triton")

@triton.jit
def fill(out, value, BLOCK: tl.constexpr):
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    with pl.scope("store"):
        tl.store(out + where, value)

def hgemm(out, a, b, alpha=1.0, beta=0.0):
    fill[(out.numel() // 64,)](out, 1.0, BLOCK=64)

ops.get("hgemm").triton(__file__)
"""


def case_of(kernel: str, size: int = SIZE) -> Case:
    op = ops.get("hgemm")
    return op.case(kernel, "float16", dict.fromkeys(op.axes, size))


def warm_us(case: Case) -> float:
    """Median microseconds of calls whose operands are in the cache, by CUDA events, less what an empty window reads."""
    call = calls.prepare_call(case, "cuda")
    clock = CudaClock(devices.pick("cuda"))
    clock.buffer = clock.buffer[:1024]  # nothing is evicted
    order = np.zeros((8, 1), dtype=int)  # few, so that all are in the queue before the first one runs
    times = [clock.cold([lambda index: call()], order, Hooks()) for _ in range(20)]
    return (float(np.median(times)) - clock.empty(8)) * 1e6


Found = tuple[Finding, Path]


def profiled(name: str, options: dict[str, Any], cases: list[Case], folder: Path, *extra: Path) -> list[Found]:
    """What a profiler finds, in a process of its own as in a run, and the folder of its files."""
    setting = profilers.Setting("cuda", [str(path) for path in extra], folder, folder / "log", 300, 300)
    found = []
    for _, columns in profilers.run(name, options, [(case, "ok") for case in cases], setting):
        metrics, functions = (
            {key.removeprefix(f"{name}."): value for key, value in columns[kind].items()}
            for kind in ("metrics", "functions")
        )
        found.append((Finding(metrics, functions, columns["profilers"][name]), folder / name))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Found]:
    cases, results = [case_of(kernel) for kernel in KERNELS], {}
    for name, options in OPTIONS.items():
        folder = tmp_path_factory.mktemp("results")
        results[name] = dict(zip(KERNELS, profiled(name, options, cases, folder), strict=True))
    return lambda name, kernel: results[name][kernel]


@pytest.mark.timing
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", OPTIONS)
def test_gpu_the_profilers_time_is_the_events_time(found, name, kernel):
    finding, _ = found(name, kernel)
    assert finding.why == "ok" and finding.metrics["device_us"] > 0
    assert finding.metrics["device_us"] == pytest.approx(warm_us(case_of(kernel)), rel=0.25)


@pytest.mark.timing
@pytest.mark.parametrize("name", OPTIONS)
def test_gpu_triton_tiled_is_one_kernel(found, name):
    finding, _ = found(name, "triton_tiled")
    assert finding.metrics["kernels"] == finding.metrics["kernel0.calls"] == 1
    assert finding.functions == {"kernel0": "kernel"}
    assert finding.metrics["kernel0.device_us"] == pytest.approx(finding.metrics["device_us"])


@pytest.mark.timing
@pytest.mark.parametrize("kernel", KERNELS)
def test_gpu_protons_rates_follow_from_its_time(found, kernel):
    (finding, _), case = found("proton", kernel), case_of(kernel)
    seconds, op = finding.metrics["device_us"] * 1e-6, ops.get(case.op)
    assert finding.metrics["tflops"] == pytest.approx(op.flops(case) / seconds / 1e12)
    assert finding.metrics["gbps"] == pytest.approx(op.bytes(case) / seconds / 1e9)


@pytest.mark.timing
def test_gpu_the_host_launches_what_the_device_runs(found):
    finding, _ = found("torch", "triton_tiled")
    assert finding.metrics["launches"] == 1 and 0 < finding.metrics["launch_us"] < finding.metrics["cpu_us"]
    finding, _ = found("torch", "torch")
    on_device = finding.metrics["device_us"] + finding.metrics["copies_us"]
    assert finding.metrics["aten::mm.self_device_us"] == pytest.approx(on_device)


@pytest.mark.timing
@pytest.mark.parametrize("kernel", KERNELS)
def test_gpu_the_files_are_there_and_can_be_read(found, kernel):
    slug = store.slug(case_of(kernel).key)
    finding, folder = found("torch", kernel)
    trace = json.loads(gzip.decompress((folder / f"{slug}.trace.json.gz").read_bytes()))
    ran = [event["name"].lower() for event in trace["traceEvents"] if event.get("cat") == "kernel"]  # it capitalises
    assert (
        ran.count(finding.functions["kernel0"].lower()) == OPTIONS["torch"]["calls"] * finding.metrics["kernel0.calls"]
    )
    assert finding.functions["kernel0"][:40] in (folder / f"{slug}.txt").read_text()
    finding, folder = found("proton", kernel)
    tree = proton.read(folder / f"{slug}.hatchet")
    assert set(finding.functions.values()) <= set(proton.kernels(tree))
    assert finding.functions["kernel0"] in (folder / f"{slug}.txt").read_text()


def test_gpu_proton_keeps_a_trace_of_a_kernels_scopes(tmp_path):
    source = tmp_path / "scoped.py"
    source.write_text(SCOPED)
    cases = [case_of("scoped", 64), case_of("triton_tiled", 64)]
    (scoped, folder), (without, _) = profiled("proton", {"calls": 2, "instrument": True}, cases, tmp_path, source)
    assert scoped.why == "ok" and scoped.metrics["kernels"] == 1
    (path,) = folder.glob("*.chrome_trace")
    assert {event["name"] for event in json.loads(path.read_text())["traceEvents"]} == {"store"}
    assert "marks no scopes" in without.why and without.metrics["tflops"] > 0


def test_gpu_static_reads_what_a_triton_call_launches(tmp_path):
    case = case_of("triton_tiled")
    job = Job([case], {"archs": ["sm_89"]}, "cuda", tmp_path, 300, frozenset({case.key}))
    (finding,) = static.profile(job)
    arch = devices.arch(devices.pick("cuda"))
    assert finding.why == "ok" and finding.functions == {arch: "kernel"}
    assert {name.split(".", 1)[0] for name in finding.metrics} == {arch}
    assert finding.metrics[f"{arch}.max_threads"] == 256  # num_warps=8
    assert 0 < finding.metrics[f"{arch}.occupancy_percent"] <= 100
    assert finding.metrics[f"{arch}.dynamic_shared_bytes"] > 16 << 10


def test_gpu_a_call_leaves_one_binary_a_shape():
    module = ops.get("hgemm").kernels["triton_tiled"].module()
    for size in (64, 1024):  # blocks of 64 and of 128 rows
        (binary,) = jit.find_launched(module, calls.prepare_call(case_of("triton_tiled", size), "cuda"))
        assert binary.metadata.num_warps == (4 if size == 64 else 8) and binary.asm["cubin"]


def test_gpu_one_command_runs_all_three(tmp_path):
    words = ["+sweep=hgemm", "cluster=local", "timing=quick", "dtype=float16", "kernel=[torch,triton_tiled,v03_wmma]"]
    words += ["shape.gpu=[{m: 256, n: 256, k: 256}]", "profiler=[static,torch,proton]"]
    done = launch(*words, f"results={tmp_path / 'results'}", f"runs={tmp_path / 'runs'}")
    assert done.returncode == 0, done.stdout + done.stderr
    arch = devices.arch(devices.pick("cuda"))
    for row in store.rows(store.files(tmp_path / "results")):
        assert row["profilers"]["torch"] == row["profilers"]["proton"] == "ok", row["profilers"]
        assert row["metrics"]["torch.kernels"] >= 1 and row["metrics"]["proton.tflops"] > 0
        if row["kernel"] == "triton_tiled":
            assert row["profilers"]["static"] == "ok" and f"static.{arch}" in row["functions"]
