"""Kernels of two revisions in one process: each from its own sources, and the one against the other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from minfer import build, cli, ops
from minfer.bench.timing import PRECISION, Timing
from minfer.plan.config import Config, Shape, UserError
from minfer.rows import store
from minfer.run import race
from tests.conftest import ROOT

LABELS = ["1a2b3c4", "tree"]


@pytest.fixture
def trees(tmp_path: Path) -> list[Path]:
    return [race.unpack(race.TREE, tmp_path / label) for label in LABELS]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> ops.Op:
    """hgemm, whose kernels are afterwards what they were."""
    op = ops.get("hgemm")
    monkeypatch.setattr(op, "kernels", dict(op.kernels))
    return op


def register(op: ops.Op, tmp_path: Path) -> list[ops.Kernel]:
    ops.load_file(race.register(op, [op.kernels["cpu_blocked"]], LABELS, tmp_path))
    return [op.kernels[f"cpu_blocked@{label}"] for label in LABELS]


def test_two_revisions_of_a_kernel_have_sources_of_their_own(trees: list[Path], registered: ops.Op, tmp_path: Path):
    for kernel, tree in zip(register(registered, tmp_path), trees, strict=True):
        assert {path.relative_to(tree).as_posix() for path in kernel.sources()} == {
            "ops/hgemm/cpu_blocked.cpp", "ops/hgemm/hgemm.h", "ops/gemm.h", "ops/op.h",
        }  # fmt: skip
    case = registered.case("cpu_blocked@tree", "float16", {"m": 64, "n": 64, "k": 64})
    assert registered.baseline(case) == "cpu_blocked@1a2b3c4"


@pytest.mark.slow  # compiles both
def test_two_revisions_of_a_kernel_stand_beside_each_other(trees: list[Path], registered: ops.Op, tmp_path: Path):
    blocked = trees[1] / "ops" / "hgemm" / "cpu_blocked.cpp"
    text = blocked.read_text()
    assert "kPanelN = 512" in text  # the size of a buffer that lives on from call to call
    blocked.write_text(text.replace("kPanelN = 512", "kPanelN = 2048"))
    a, b = torch.randn(40, 70, dtype=torch.float16), torch.randn(70, 1500, dtype=torch.float16)
    for kernel in register(registered, tmp_path):
        out = torch.empty(40, 1500, dtype=torch.float16)
        build.function(kernel, "")(out, a, b, alpha=1.0, beta=0.0)
        torch.testing.assert_close(out, a @ b, rtol=1e-2, atol=1e-2)


def test_a_file_without_the_kernel_is_refused(trees: list[Path], registered: ops.Op, tmp_path: Path):
    (trees[0] / "ops" / "hgemm" / "cpu_naive.cpp").write_text("// nothing\n")
    with pytest.raises(UserError, match="does not define hgemm_cpu_naive; leave cpu_naive out with kernel="):
        race.register(registered, [registered.kernels["cpu_naive"]], LABELS, tmp_path)


@pytest.mark.slow  # compiles two kernels and runs a shard
def test_a_race_leaves_rows_of_their_own(registered: ops.Op, tmp_path: Path, monkeypatch, capsys):
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone, and a race is of revisions")
    monkeypatch.chdir(tmp_path)
    words = ["race", "HEAD", ".", "+sweep=hgemm", "kernel=cpu_naive", "shape=tiny", "dtype=float16", "timing=quick"]
    words += ["cluster=local", "device=cpu", "timing.looks=[5]", "timing.warmup_s=0", "timing.precision=0.9"]
    monkeypatch.setattr(sys, "argv", ["minfer", *words])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert cli.main() == 0, capsys.readouterr()
    (found,) = store.rows((tmp_path / race.RESULTS).rglob("*.parquet"))
    assert found["kernel"] == "cpu_naive@tree" and found["baseline"].startswith("cpu_naive@")
    assert found["status"] in store.MEASURED and found["cold_speedup"]
    assert not store.files(tmp_path / "results")  # no table or plot has them


def test_a_precision_that_is_not_given_is_the_devices():
    assert {kind: Timing().on(kind).target for kind in PRECISION} == {"cuda": 0.005, "cpu": 0.05}
    assert Timing(precision=0.02).on("cpu").target == 0.02 and Timing().target == PRECISION["cuda"]


@pytest.mark.parametrize(
    ("differs", "device", "said"),
    [
        ("", "cpu", "none differs between . and .; kernel=NAME races it anyway"),
        (
            "v02_tiled",
            "cpu",
            "the run is on a CPU, where the kernels that differ do not run: v02_tiled; add device=cuda",
        ),
    ],
)
def test_a_race_with_nothing_to_race_says_why_and_leaves_no_folder(
    differs: str, device: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(race, "unpack", lambda revision, target: target.mkdir(parents=True) or target)
    monkeypatch.setattr(race, "_text", lambda kernel, tree: f"{tree if kernel.name == differs else ''}")
    shape = Shape(name="test", gpu=[dict.fromkeys("mnk", 16)], cpu=[dict.fromkeys("mnk", 16)])
    config = Config(op="hgemm", dtype="float16", shape=shape, device=device)
    config.cluster.name = config.cluster.executor = "local"
    with pytest.raises(UserError) as refused:
        race.race(config, ".", ".")
    assert str(refused.value) == f"no kernel of hgemm to race: {said}"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("same", "missing", "said"),
    [
        (["v01"], ["v02"], "none differs"),
        ([], ["v02"], "none is in both"),
        ([], [], "none has a file of its own and runs on"),
    ],
)
def test_why_there_is_no_kernel_to_race(same: list[str], missing: list[str], said: str):
    assert race._explain_none(("a", "b"), "cuda", same, missing, []).startswith(said)
