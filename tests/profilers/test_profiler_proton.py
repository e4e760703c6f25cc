"""`profiler=proton` without a GPU: its files are read, and what Triton's profiler may do is played by a stand-in.

`data/triton_tiled.hatchet` is written by hand after Triton's `TreeData.cpp`: 4 calls of 1024x1024x1024, two functions."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minfer import ops
from minfer.profilers import Finding, Job, proton
from minfer.rows import store
from tests.conftest import ROOT

HATCHET = ROOT / "tests" / "data" / "triton_tiled.hatchet"
SCOPE = "hgemm [M=1024, N=1024, K=1024]"


def test_a_hatchet_file_gives_the_metrics_of_one_call():
    finding = proton.summary(proton.read(HATCHET), SCOPE, 4)
    assert finding.functions == {"kernel0": "kernel", "kernel1": "reduce"}  # and not what proton itself launched
    assert finding.metrics == pytest.approx(
        {
            "kernels": 3, "device_us": 25, "kernel0.device_us": 20, "kernel0.calls": 1, "kernel1.device_us": 5,
            "kernel1.calls": 2, "tflops": 2 * 1024**3 / 25e-6 / 1e12, "gbps": 2 * 3 * 1024**2 / 25e-6 / 1e9,
        }
    )  # fmt: skip


def test_the_tree_is_rendered_line_by_line():
    root, scope, kernel, reduce = proton.render(proton.read(HATCHET))
    assert root.split() == ["8.333", "us", "x", "12", "ROOT"]
    assert scope.split() == ["8.333", "us", "x", "12", "85.899", "TFLOP/s", *SCOPE.split()]
    assert kernel.split() == ["20.000", "us", "x", "4", "kernel"] and reduce.split()[0] == "2.500"
    places = [line.index(name) for line, name in ((root, "ROOT"), (scope, SCOPE), (kernel, "kernel"))]
    assert places[0] < places[1] < places[2]


@pytest.mark.parametrize("text", ["", "[]", "{}", "[1]", '[{"frame": {"name": "ROOT"}}]', '[{"children": []}]'])
def test_what_is_no_hatchet_file_is_one_sentence(tmp_path, text):
    path = tmp_path / "case.hatchet"
    path.write_text(text)
    with pytest.raises(RuntimeError, match=r"^case.hatchet is no hatchet file: "):
        proton.read(path)


@pytest.mark.parametrize("scope", ["other", SCOPE])
def test_a_profile_without_kernels_is_no_profile(scope):
    tree = proton.read(HATCHET)
    if scope == SCOPE:
        tree["children"][0]["children"] = []
    with pytest.raises(RuntimeError, match="proton saw no kernel"):
        proton.summary(tree, scope, 4)


class StandIn:
    """Triton's profiler as far as it is used: it writes the hatchet file when it is finalised."""

    def __init__(self, scopes: bytes = b"{}") -> None:
        self.scopes, self.begun, self.entered = scopes, [], []  # type: ignore[var-annotated]

    def start(self, name: str, **how: str) -> int:
        self.begun.append((name, how))
        return len(self.begun) - 1

    @contextlib.contextmanager
    def scope(self, name: str, metrics: dict[str, float]) -> Any:
        self.entered.append((name, metrics))
        yield

    def finalize(self, number: int | None) -> None:
        name, how = self.begun[number or 0]
        if how:
            Path(f"{name}.chrome_trace").write_bytes(self.scopes)
        else:
            shutil.copy(HATCHET, f"{name}.hatchet")


@pytest.fixture
def profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finding]:
    """The finding for a Triton case, or another, with a stand-in for Triton's profiler and for the call."""

    def run(
        stand_in: Any, kernel: str = "triton_tiled", call: Callable[[], None] = lambda: None, **options: Any
    ) -> Any:
        op = ops.get("hgemm")
        monkeypatch.setitem(sys.modules, "triton.profiler", stand_in)
        monkeypatch.setattr(proton, "prepare_call", lambda case, device: call)
        monkeypatch.setattr(proton.torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(proton, "run_viewer", lambda path: None)
        case = op.case(kernel, "float16", dict.fromkeys(op.axes, 1024))
        (finding,) = proton.profile(Job([case], {"calls": 4, "instrument": False} | options, "cuda", tmp_path, 60))
        return finding

    return run


def test_each_call_has_its_flops_and_bytes(profiled, tmp_path):
    stand_in, calls = StandIn(), []
    finding = profiled(stand_in, call=lambda: calls.append(1))
    assert finding.why == "ok" and finding.metrics["kernels"] == 3 and len(calls) == 4
    assert stand_in.entered == [(SCOPE, {"flops": 2 * 1024**3, "bytes": 2 * 3 * 1024**2})] * 4
    slug = "hgemm-triton-tiled-float16-layout-tn-accumulate-float32-m-1024-n-1024-k-1024"
    assert stand_in.begun == [(str(tmp_path / slug), {})]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{slug}.hatchet", f"{slug}.txt"]
    assert "85.899 TFLOP/s" in (tmp_path / f"{slug}.txt").read_text()


def test_a_session_that_cannot_start_is_one_sentence(profiled):
    def start(name: str, **how: str) -> None:
        raise RuntimeError("Failed to execute cuptiSubscribe\nand more")

    finding = profiled(SimpleNamespace(start=start))
    assert finding.metrics == {} and finding.why == "proton cannot start: Failed to execute cuptiSubscribe"


def test_a_profiler_that_is_switched_off_says_so(profiled):
    off = SimpleNamespace(start=lambda name, **how: None, scope=StandIn().scope, finalize=lambda number: None)
    assert profiled(off).why == "proton wrote nothing; is it switched off (TRITON_PROTON_DISABLE)?"


def test_an_earlier_file_is_not_taken_for_a_new_one(profiled, tmp_path):
    assert profiled(StandIn()).why == "ok"
    off = SimpleNamespace(start=lambda name, **how: None, scope=StandIn().scope, finalize=lambda number: None)
    assert "proton wrote nothing" in profiled(off).why and not list(tmp_path.glob("*.hatchet"))


def test_the_session_ends_when_a_call_fails(profiled):
    ended = []
    stand_in = StandIn()
    stand_in.finalize = ended.append  # type: ignore[method-assign,assignment]

    def call() -> None:
        raise ValueError("no")

    assert profiled(stand_in, call=call).why == "ValueError: no" and ended == [0]


def test_instrumenting_is_another_session_and_keeps_its_trace(profiled, tmp_path):
    stand_in = StandIn(json.dumps({"traceEvents": [{"name": "load", "ph": "X"}]}).encode())
    finding = profiled(stand_in, instrument=True)
    assert finding.why == "ok" and finding.metrics["kernels"] == 3
    assert [how for _, how in stand_in.begun] == [{}, {"backend": "instrumentation", "data": "trace"}]
    assert len(list(tmp_path.glob("*.chrome_trace"))) == 1


@pytest.mark.parametrize("scopes", [b"", b'{"traceEvents": []}'])
def test_a_kernel_without_scopes_keeps_its_metrics_and_no_empty_trace(profiled, tmp_path, scopes):
    finding = profiled(StandIn(scopes), instrument=True)
    assert finding.metrics["kernels"] == 3 and "marks no scopes" in finding.why
    assert not list(tmp_path.glob("*.chrome_trace"))


def test_only_triton_kernels_are_instrumented(profiled, monkeypatch):
    monkeypatch.setattr(proton, "summary", lambda tree, scope, calls: Finding({"kernels": 1.0}))
    stand_in = StandIn()
    assert profiled(stand_in, kernel="v03_wmma", instrument=True).why == "ok" and len(stand_in.begun) == 1


def test_on_a_cpu_it_says_what_it_needs(tmp_path):
    op = ops.get("hgemm")
    cases = [op.case("torch", "float16", dict.fromkeys(op.axes, 8))]
    (finding,) = proton.profile(Job(cases, {"calls": 4, "instrument": False}, "cpu", tmp_path / "none", 60))
    assert finding == Finding(why="proton needs a CUDA GPU") and not (tmp_path / "none").exists()


def test_proton_viewer_prints_the_same_rate(tmp_path):
    pytest.importorskip("hatchet")
    shutil.copy(HATCHET, tmp_path)
    text = proton.run_viewer(tmp_path / HATCHET.name)
    assert text and f"8.333 85.899 {SCOPE}" in text
    assert "scalar_metric_kernel" not in text


def test_triton_has_what_is_used_of_it():
    import inspect

    real = pytest.importorskip("triton.profiler")
    inspect.signature(real.start).bind("name", backend="instrumentation", data="trace")
    inspect.signature(real.scope).bind("name", {"flops": 1.0})
    inspect.signature(real.finalize).bind(0)
    libproton = pytest.importorskip("triton._C.libproton").proton
    assert getattr(libproton, "metadata_scope_name", proton.OWN) == proton.OWN
    assert store.slug("a/b=c.d") == "a-b-c-d"  # no dots: proton's suffix is the file's only one
