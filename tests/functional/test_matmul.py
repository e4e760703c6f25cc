"""`minfer.matmul`: what it chooses and why, and that it is an op like PyTorch's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minfer import matmul, ops
from minfer.analysis import make
from minfer.functional import best as chooser
from minfer.functional import library
from minfer.rows import store
from tests.conftest import ROOT

H200 = (9, 0)


def best(m: int, n: int, k: int, dtype: str, layout: str, capability: tuple[int, int] | None) -> chooser.Choice:
    """As `matmul` asks."""
    params = {"layout": layout, "accumulate": "float32"}
    return chooser.best("hgemm", dtype, params, {"m": m, "n": n, "k": k}, capability, "NVIDIA H200")


@pytest.fixture
def measured(monkeypatch):
    """Replaces the table of measurements, (m, n, k) -> kernels by time, and turns off all rules."""
    monkeypatch.setattr(chooser, "rule_of", lambda kernel, capability: None)
    monkeypatch.setattr(chooser, "_choosers", {})

    def put(shapes: dict[tuple[int, int, int], dict[str, float]], op: str = "hgemm", **about: str) -> None:
        what: dict[str, Any] = {"arch": "sm_90a", "device": "NVIDIA H200", "dtype": "bfloat16"} | about
        what["params"] = {"layout": "TN"} | ({"accumulate": "float32"} if op == "hgemm" else {})
        named = ((dict(zip("mnk", shape, strict=True)), us) for shape, us in shapes.items())
        table = {op: [what | {"shape": shape, "kernels": us} for shape, us in named]}
        monkeypatch.setattr(chooser, "table", lambda: table)

    return put


def test_the_fastest_at_the_nearest_shape_that_was_measured(measured):
    measured({(16, 64, 64): {"v04_mma": 1.0, "v03_wmma": 2.0}, (2048, 64, 64): {"v05_pipelined": 3.0, "v04_mma": 4.0}})
    exact = best(16, 64, 64, "bfloat16", "TN", H200)
    assert exact == chooser.Choice(
        "v04_mma", "the fastest of 2 at this shape: 1 us cold, bfloat16 TN float32 on NVIDIA H200"
    )
    near = best(180, 64, 64, "bfloat16", "TN", H200)  # 16 and 2048 are 7 doublings apart, 181 is in the middle
    assert near.kernel == "v04_mma" and "at 16x64x64, the nearest shape measured" in near.why
    assert best(182, 64, 64, "bfloat16", "TN", H200).kernel == "v05_pipelined"


def test_what_does_not_support_the_problem_is_passed_over(measured):
    measured({(16, 64, 64): {"v07_tuned": 1.0, "v03_wmma": 2.0}, (9999, 9999, 9999): {"v01_naive": 1.0}})
    odd = best(16, 63, 64, "bfloat16", "TN", H200)
    assert odd.kernel == "v03_wmma" and odd.why.startswith("alone at 16x64x64")
    measured({(16, 64, 64): {"v07_tuned": 1.0}, (9999, 9999, 9999): {"v01_naive": 1.0}})
    assert best(16, 63, 64, "bfloat16", "TN", H200).kernel == "v01_naive"


def test_strips_are_not_taken_for_fewer_columns_than_were_measured(measured):
    us = {"v02_one_wave": 1.0, "v01_mma": 2.0}
    measured({(16, 4096, 4096): us, (16, 8192, 4096): us}, "gemm_bias_gelu")

    def chosen(n: int) -> str:
        shape = {"m": 16, "n": n, "k": 4096}
        return chooser.best("gemm_bias_gelu", "bfloat16", {"layout": "TN"}, shape, H200, "NVIDIA H200").kernel

    assert [chosen(n) for n in (1024, 4088, 4096, 5120)] == ["v01_mma"] * 2 + ["v02_one_wave"] * 2


def test_architecture_then_parameters_then_shape_and_device_then_dtype():
    shape, params = {"m": 64, "n": 64, "k": 64}, {"layout": "TN", "accumulate": "float32"}
    here = {"arch": "sm_90a", "device": "NVIDIA H200"}
    entry = here | {"params": params, "shape": shape, "dtype": "float16"}
    elsewhere = entry | {"device": "NVIDIA H100 80GB HBM3"}
    order = [
        entry,
        entry | {"dtype": "bfloat16"},
        entry | {"shape": shape | {"m": 96}},
        elsewhere,
        elsewhere | {"dtype": "bfloat16"},
        entry | {"shape": shape | {"m": 192}},
        elsewhere | {"shape": shape | {"m": 192}},
        entry | {"params": params | {"layout": "NN"}},
        entry | {"arch": "sm_89"},
    ]
    distances = [chooser.distance(entry, "float16", params, shape, H200, "NVIDIA H200") for entry in order]
    assert distances == sorted(distances) and len(set(distances)) == len(order)


@pytest.mark.parametrize("first", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_each_device_takes_what_was_measured_on_itself(monkeypatch, first):
    params, shape = {"layout": "TN", "accumulate": "float32"}, {"m": 64, "n": 64, "k": 64}
    about = {"arch": "sm_90a", "dtype": "bfloat16", "params": params, "shape": shape}
    fastest = {"NVIDIA H100 80GB HBM3": "v04_mma", "NVIDIA H200": "v05_pipelined"}
    entries = [about | {"device": device, "kernels": {kernel: 1.0}} for device, kernel in fastest.items()]
    entries.sort(key=lambda entry: entry["device"] != first)  # the order of the file decides nothing
    monkeypatch.setattr(chooser, "table", lambda: {"hgemm": entries})
    for device, kernel in fastest.items():
        choice = chooser.best("hgemm", "bfloat16", params, shape, H200, device)
        assert choice.kernel == kernel and choice.why.endswith(f"on {device}")


def test_a_measurement_of_other_axes_is_no_neighbour(measured, monkeypatch):
    measured({(64, 64, 64): {"v04_mma": 1.0}})
    (entry,) = chooser.table()["hgemm"]
    monkeypatch.setattr(chooser, "table", lambda: {"hgemm": [entry | {"shape": {"m": 64, "n": 64}}]})
    assert "no kernel that does was measured" in best(64, 64, 64, "bfloat16", "TN", H200).why


def test_where_nothing_was_measured_it_is_the_last_of_the_ladder(measured):
    measured({(64, 64, 64): {"v04_mma": 1.0}})  # on a GPU
    choice = best(64, 64, 64, "float16", "TN", None)
    assert choice.kernel == "cpu_blocked" and "no kernel that does was measured" in choice.why
    measured({(64, 64, 64): {"cpu_naive": 1.0}}, arch="cpu", device="AMD EPYC")
    assert best(64, 64, 64, "float16", "TN", None).kernel == "cpu_naive"
    with pytest.raises(ValueError, match=r"^no kernel of hgemm supports 8x8x8 in float32 on sm_90$"):
        best(8, 8, 8, "float32", "TN", H200)


def test_the_committed_table_is_of_kernels_that_there_are_and_are_ours():
    assert chooser.table.__wrapped__()["hgemm"]
    for name, entries in chooser.table.__wrapped__().items():
        op = ops.get(name)
        for entry in entries:
            assert all(kernel in op.kernels and op.kernels[kernel].backend != "torch" for kernel in entry["kernels"])
            assert list(entry["kernels"].values()) == sorted(entry["kernels"].values())
            assert op.params.keys() - set(op.later) <= entry["params"].keys() - {"call"} <= op.params.keys()
            assert [*entry["shape"]] == [*op.without_defaults(entry["shape"])]


def operands(m: int, n: int, k: int, dtype: torch.dtype, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    b = torch.randn(n, k).t() if layout == "TN" else torch.randn(k, n)
    return torch.randn(m, k).to(dtype), b.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("shape", [(33, 40, 64), (1, 8, 1), (5, 1, 7), (0, 8, 8), (4, 8, 0), (1, 1, 1)])
def test_it_multiplies(shape, layout, dtype):
    a, b = operands(*shape, dtype, layout)
    torch.testing.assert_close(matmul(a, b), a @ b)


def test_operands_that_lie_badly_are_copied():
    a, b = operands(6, 16, 24, torch.float16, "NN")
    wide = torch.randn(7, 29).half()
    inside, backwards, spread = wide[1:, 3:27], a.flip(0), torch.randn(24, 32).half()[:, ::2]
    for left, right in (
        (inside, b),
        (backwards, b),
        (a, spread),
        (a, spread.t().contiguous().t()),
        (a[:1].expand(6, -1), b),
    ):
        torch.testing.assert_close(matmul(left, right), left @ right)


@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_it_is_an_op_like_pytorchs_own(layout):
    torch.library.opcheck(torch.ops.minfer.hgemm.default, operands(6, 16, 24, torch.float16, layout))


def test_it_compiles_whole_and_for_any_shape():
    compiled = torch.compile(lambda a, b: matmul(a, b) + 1, backend="aot_eager", fullgraph=True, dynamic=True)
    for m in (6, 7):
        a, b = operands(m, 16, 24, torch.bfloat16, "TN")
        torch.testing.assert_close(compiled(a, b), a @ b + 1)


def test_mistakes_are_a_sentence_each():
    a, b = operands(6, 16, 24, torch.float16, "NN")
    for left, right, said in (
        (a, b.t(), r"takes b of \(24, n\), got \(16, 24\)$"),
        (a[0], b, r"takes a of \(m, k\), got \(24,\)$"),
        (a, b.bfloat16(), "takes b of the dtype of a, torch.float16, got torch.bfloat16$"),
        (a.float(), b.float(), "takes a of float16 or bfloat16, got torch.float32$"),
        (a, b.to("meta"), "takes b on the device of a, cpu, got meta$"),
    ):
        with pytest.raises(ValueError, match=f"^minfer.matmul {said}"):
            matmul(left, right)
    with pytest.raises(RuntimeError, match=r"^minfer.matmul has no backward: call it under torch.no_grad\(\)"):
        matmul(a.requires_grad_(), b)
    with torch.no_grad():
        torch.testing.assert_close(matmul(a, b), a @ b)


def test_its_choice_is_explained_once(monkeypatch, capsys):
    a = torch.ones(8, 8).half()
    for explain, lines in (("1", 2), ("0", 0)):
        library.forget()
        monkeypatch.setenv("MINFER_EXPLAIN", explain)
        for b in (a, a.t(), a):
            matmul(a, b)
        said = capsys.readouterr().err
        assert len(said.splitlines()) == lines, said
        assert ("minfer.hgemm m=8 n=8 k=8 float16 NN float32: cpu_" in said) == (explain == "1")


@pytest.mark.slow
def test_its_first_call_does_not_import_the_compiler():
    """Which takes seconds, where the call takes microseconds."""
    code = "import sys, torch; from minfer import matmul; a = torch.ones(8, 8).half(); matmul(a, a)"
    code += "; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# The table


def row(
    kernel: str, us: float, status: str = "ok", shape: tuple[int, int, int] = (1, 8, 8), **values: Any
) -> store.Row:
    params, sizes = {"layout": "TN", "accumulate": "float32"}, dict(zip("mnk", shape, strict=True))
    made: store.Row = {"run": "r", "op": "hgemm", "kernel": kernel, "backend": "cuda", "dtype": "float16"}
    made |= {"case": f"hgemm/{kernel}/{sizes}", "params": params, "shape": sizes, "status": status, "cold_us": us}
    return made | {"device": "NVIDIA H200", "device_kind": "cuda", "arch": "sm_90a"} | values


def test_the_table_is_what_the_rows_say(tmp_path: Path, capsys):
    half = {"layout": "TN", "accumulate": "float16"}
    norm: dict[str, Any] = {"op": "norm", "params": {}, "shape": {"tokens": 1}, "case": "norm/v01/b"}
    store.write(
        store.to_table(
            [
                row("v03_wmma", 3.0),
                row("v04_mma", 2.0, "unconverged"),
                row("v05_pipelined", 1.0, "wrong"),
                row("v06_swizzled", 1.0, arch=None),
                row("torch", 0.5, backend="torch"),
                row("v04_mma_acc16", 0.5, params=half),
                row("cpu_naive", 9.0, backend="cpp", device="EPYC", device_kind="cpu", arch="x86_64"),
                row("v01", 7.0) | norm,
            ]
        ),
        tmp_path / "rows.parquet",
    )
    where = ["--results", str(tmp_path), "--best", str(tmp_path / "best.json")]
    assert make.main(["best", *where, "--check"]) == 1
    assert "is out of date: run `python analysis/make.py best`" in capsys.readouterr().err
    assert make.main(["best", *where]) == 0 and make.main(["best", *where, "--check"]) == 0
    shape = '"shape": {"m": 1, "n": 8, "k": 8}'
    gpu, cpu = (
        f'"arch": "{arch}", "device": "{name}", "dtype": "float16", "params":'
        for arch, name in (("sm_90a", "NVIDIA H200"), ("cpu", "EPYC"))
    )
    sums = {bits: f'{{"layout": "TN", "accumulate": "float{bits}"}}, {shape}' for bits in (16, 32)}
    assert (tmp_path / "best.json").read_text().splitlines() == [
        "{",
        '"hgemm": [',
        f'{{{cpu} {sums[32]}, "kernels": {{"cpu_naive": 9.0}}}},',
        f'{{{gpu} {sums[16]}, "kernels": {{"v04_mma_acc16": 0.5}}}},',
        f'{{{gpu} {sums[32]}, "kernels": {{"v04_mma": 2.0, "v03_wmma": 3.0}}}}',
        "],",
        '"norm": [',
        f'{{{gpu} {{}}, "shape": {{"tokens": 1}}, "kernels": {{"v01": 7.0}}}}',
        "]",
        "}",
    ]
    (tmp_path / "broken.parquet").write_text("no")
    assert make.main(["best", *where]) == 1 and "nothing was written" in capsys.readouterr().err
    assert make.main(["best", "--results", str(tmp_path / "none")]) == 1


def test_without_rows_the_table_is_empty(tmp_path: Path):
    table = tmp_path / "best.json"
    assert make.main(["best", "--results", str(tmp_path), "--best", str(table)]) == 0
    assert json.loads(table.read_text()) == {}
