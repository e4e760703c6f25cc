"""The order of a plan's cases: what tells most first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minfer import ops
from minfer.ops import Case
from minfer.plan import cases as matrix
from minfer.plan.config import Config, Shape, names
from minfer.plan.order import put_headline_first
from minfer.plan.sweeps import parts
from minfer.rows.problems import representative_problem

SQUARES = [dict.fromkeys("mnk", size) for size in (512, 1024, 2048, 4096, 8192)]


def planned(shapes: list[dict[str, int]], **changes: object) -> list[Case]:
    shape = Shape(name="test", gpu=shapes, cpu=shapes)
    return matrix.plan(Config(**{"op": "hgemm", "dtype": "float16", "shape": shape} | changes), "cuda", (9, 0)).cases


def places(cases: list[Case], value: object) -> list[object]:
    """The values of cases without repeats in succession."""
    found = list(map(value, cases))
    return [one for one, before in zip(found, [None, *found], strict=False) if one != before]


def test_the_headline_comes_first_then_other_shapes_then_other_dtypes() -> None:
    cases = planned(SQUARES, dtype=["float16", "bfloat16"], params={"layout": ["TN", "NN"]})
    assert places(cases, lambda case: case.dtype) == ["float16", "bfloat16"]
    assert places(cases, lambda case: (case.dtype, case.params["layout"])) == [
        ("float16", "TN"), ("float16", "NN"), ("bfloat16", "TN"), ("bfloat16", "NN")
    ]  # fmt: skip
    sizes = places(cases, lambda case: case["m"])
    assert sizes == 4 * [8192, 512, 1024, 2048, 4096]
    assert len(cases) == len({case.key for case in cases})


def test_a_problem_begins_with_its_baseline_and_goes_up_the_ladder() -> None:
    cases = planned(SQUARES[:2])
    op = ops.get("hgemm")
    ladder = [name for name in op.kernels if name != "torch"]
    for problem in dict.fromkeys(case.problem for case in cases):
        kernels = [case.kernel for case in cases if case.problem == problem]
        assert kernels[0] == "torch" and kernels[1:] == [name for name in ladder if name in kernels[1:]]
    last = [op.case(name, "float16", SQUARES[0]) for name in ("v01_naive", "torch")]
    assert put_headline_first(op, last, (), baseline_first=True) == last[::-1]
    assert put_headline_first(op, last, (), baseline_first=False) == last


def test_named_kernels_keep_the_order_in_which_they_were_asked_for() -> None:
    cases = planned(SQUARES[:2], kernel=["v02_tiled", "torch", "v01_naive"])
    assert [case.kernel for case in cases] == 2 * ["v02_tiled", "torch", "v01_naive"]
    assert [case["m"] for case in cases] == 3 * [1024] + 3 * [512]


@pytest.mark.parametrize("sweep", ["hgemm", "rmsnorm", "decode"])
def test_the_headline_is_the_problem_that_stands_for_the_op_in_tables(
    sweep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["minfer"])
    (request,) = parts(Config(sweeps=[sweep]))
    plan = matrix.plan(replace(request, dtype=[*names(request.dtype)][:1]), "cuda", (9, 0))
    rows = []
    for problem in dict.fromkeys(case.problem for case in plan.cases):
        of = [case for case in plan.cases if case.problem == problem]
        measured = sum(case.key not in plan.unsupported for case in of)
        state = ops.get(request.op)
        rows.append(
            {"problem": problem, "measured": measured, "flops": state.flops(of[0]), "bytes": state.bytes(of[0])}
        )
    assert plan.cases[0].problem == representative_problem(rows)


def test_a_shape_that_few_kernels_support_is_no_headline() -> None:
    shapes = [dict.fromkeys("mnk", 1024), dict.fromkeys("mnk", 1021)]  # the odd one comes second, whatever its place
    assert planned(shapes[::-1], kernel="all")[0]["m"] == 1024
