"""Several sweeps in one run, and what an entry may change of its sweep."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from minfer.ops import PACKAGE
from minfer.plan import cases as matrix
from minfer.plan.config import CONF, Config, UserError
from minfer.plan.sweeps import parts


def test_several_sweeps_are_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["minfer"])
    plan = matrix.plan(Config(sweeps=["rmsnorm", "hgemm"], op="", dtype=[]), "cpu")
    alone = [matrix.plan(part, "cpu") for part in parts(Config(sweeps=["rmsnorm", "hgemm"]))]
    assert [case for case in plan.cases if case.op == "rmsnorm"] == alone[0].cases
    assert [case for case in plan.cases if case.op == "hgemm"] == alone[1].cases
    headlines = [c for one in alone for c in one.cases if c.problem == one.cases[0].problem]
    assert plan.cases[: len(headlines)] == headlines and {case.op for case in headlines} == {"rmsnorm", "hgemm"}
    assert [part.cases[0].op for part in alone] == ["rmsnorm", "hgemm"]
    assert {case.shape_name for case in alone[0].cases}.isdisjoint(case.shape_name for case in alone[1].cases)
    assert plan.left_out["hgemm/v01_naive"] == plan.left_out["rmsnorm/v01_naive"] == "needs a CUDA GPU"


def test_an_entry_of_several_sweeps_replaces_some_of_what_its_sweep_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["minfer"])
    shapes = [{"tokens": 3, "hidden": [64, 128]}]
    changed = {"sweep": "silu_mul", "params": {"call": "backward"}, "dtype": "float16", "gpu": shapes, "cpu": shapes}
    plan = matrix.plan(Config(sweeps=["silu_mul", changed, dict(changed)], op="", dtype=[]), "cuda", (9, 0))
    own = matrix.plan(parts(Config(sweeps=["silu_mul"]))[0], "cuda", (9, 0)).cases
    assert [case for case in plan.cases if case in own] == own
    added = [case for case in plan.cases if case not in own]
    assert {(case.dtype, case.params["call"], case["tokens"], case["hidden"]) for case in added} == {
        ("float16", "backward", 3, 64),
        ("float16", "backward", 3, 128),
    }
    assert len({case.key for case in plan.cases}) == len(plan.cases)
    assert "v02_vectors_backward" in {case.kernel for case in added} - {case.kernel for case in own}
    assert "silu_mul/v02_vectors" not in plan.left_out and "silu_mul/v02_vectors_backward" not in plan.left_out


def test_the_sweep_of_a_decoder_has_every_op_in_cases_that_a_gpu_does_in_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["minfer"])
    written: Any = OmegaConf.to_container(OmegaConf.load(CONF / "sweep" / "decoder_ops.yaml"))
    plan = matrix.plan(Config(sweeps=written["sweeps"], op="", dtype=[]), "cuda", (9, 0))
    assert len(plan.cases) - len(plan.unsupported) <= 460
    own_sweeps = {"hgemm", "quant_gemm", "dequant", "moe_ffn", "mla_decode", "decode_attention", "prefill_attention"}
    own_sweeps |= {"decoder"}
    shipped = {path.parent.name for path in (PACKAGE / "ops").glob("*/__init__.py")}
    assert {case.op for case in plan.cases} == shipped - own_sweeps - {"seq_sum"}


@pytest.mark.parametrize(
    ("sweeps", "said"),
    [
        (["rmsnor"], "did you mean rmsnorm"),
        (["decoder_ops"], "decoder_ops sets sweeps.*run it alone"),
        ([3], "sweeps has 3; an entry is"),
        ([{"op": "rope"}], "an entry is a sweep's name, or a mapping"),
        ([{"sweep": "rope", "shape": "rope"}], "unknown key of sweep rope 'shape'"),
        ([{"sweep": "rope", "gpu": 3}], "sweep rope has gpu 3; write it like gpu:"),
        ([{"sweep": "rope", "params": "in"}], "sweep rope has params 'in'"),
    ],
)
def test_a_sweep_that_cannot_be_one_of_several(sweeps: list[Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["minfer"])
    with pytest.raises(UserError, match=said):
        parts(Config(sweeps=sweeps))
