"""From a request to cases: what is run, what is left out and why, and the estimate of the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import MISSING

from minfer import ops
from minfer.bench.timing import Timing
from minfer.ops import Case, Op, dot, multiples, out, size
from minfer.ops.op import REGISTERED
from minfer.plan import cases as matrix
from minfer.plan.config import Config, Draw, Profiler, Shape, Static, UserError

SMALL = {"m": 16, "n": 24, "k": 32}


def config(**changes: Any) -> Config:
    """A request for hgemm in float16 on one small shape."""
    shapes = changes.pop("shapes", [SMALL])
    settings: dict[str, Any] = {"op": "hgemm", "dtype": "float16", "shape": Shape(name="test", gpu=shapes, cpu=shapes)}
    return Config(**settings | changes)


def kernels(plan: matrix.Plan) -> list[str]:
    return list(dict.fromkeys(case.kernel for case in plan.cases))


@pytest.fixture
def toy() -> Iterator[Op]:
    """An op with a kernel for every rule of support; planning needs no sources."""

    def nothing(out: torch.Tensor, *_: torch.Tensor) -> None:
        raise AssertionError("planning ran a kernel")

    op = Op(
        "toy",
        axes={"m": size(), "n": size()},
        params={"mode": ("a", "b"), "accumulate": ("float32", "float16")},
        tensors=lambda case: [out("y", case["m"]), ops.given("x", case["m"], case["n"])],
        reference=lambda case, t: {"y": dot(t["x"].sum(1), t["x"].abs().sum(1), case["n"])},
    )
    op.torch("base", nothing, baseline=True)
    op.cuda("v01_any.cu")
    op.cuda("v02_hopper.cu", archs="sm_90a")
    op.cuda("v03_aligned.cu", archs="sm_90+", requires=multiples(m=4, n=8))
    op.torch("half", nothing, dtypes=("float16",), params={"accumulate": ("float16",)})
    op.cpp("cpu_any.cpp")
    yield op
    del REGISTERED["toy"]


def toy_config(**changes: Any) -> Config:
    return config(**{"op": "toy", "shapes": [{"m": 4, "n": 8}]} | changes)


# Which kernels


def test_all_on_a_gpu_is_every_kernel_but_the_cpus_in_ladder_order(toy: Op) -> None:
    plan = matrix.plan(toy_config(), "cuda", (9, 0))
    assert kernels(plan) == ["base", "v01_any", "v02_hopper", "v03_aligned"]
    assert list(plan.left_out) == ["cpu_any", "half"] and "CPU" in plan.left_out["cpu_any"]
    assert plan.left_out["half"] == "supports accumulate=float16, not float32"
    plan = matrix.plan(toy_config(params={"accumulate": ["float32", "float16"]}), "cuda", (9, 0))
    assert kernels(plan) == ["base", "v01_any", "v02_hopper", "v03_aligned", "half"]


def test_all_on_a_cpu_leaves_out_the_gpus_kernels_and_says_why(toy: Op) -> None:
    plan = matrix.plan(toy_config(), "cpu")
    assert kernels(plan) == ["base", "cpu_any"]
    assert set(plan.left_out) == {"v01_any", "v02_hopper", "v03_aligned", "half"}
    assert all("CUDA GPU" in why for name, why in plan.left_out.items() if name != "half")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_hgemm_has_its_baseline_and_kernels_of_its_own_on_every_device(device: str) -> None:
    plan = matrix.plan(config(), device)
    op = ops.get("hgemm")
    assert {op.baseline(case) for case in plan.cases} == {"torch"} and len(kernels(plan)) >= 3
    assert all(device in op.kernels[name].devices for name in kernels(plan))
    assert set(kernels(plan)) | set(plan.left_out) == set(op.kernels) - {"matmul"}  # a function, not a kernel


@pytest.mark.parametrize("wanted", ["base", ["base"], ["cpu_any", "base"], ["base", "base"]])
def test_named_kernels_are_run_once_in_the_order_asked_for(toy: Op, wanted: str | list[str]) -> None:
    plan = matrix.plan(toy_config(kernel=wanted), "cpu")
    assert kernels(plan) == list(dict.fromkeys([wanted] if isinstance(wanted, str) else wanted))
    assert plan.left_out == {}
    assert len(plan.cases) == len(kernels(plan))


def refusal(request: Config, device: str = "cpu", capability: tuple[int, int] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        matrix.plan(request, device, capability)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"op": "hgem"}, ["op", "'hgem'", "hgemm"]),
        ({"kernel": "v01_naiv"}, ["kernel", "'v01_naiv'", "v01_naive"]),
        ({"kernel": ["torch", "triton_tile"]}, ["kernel", "'triton_tile'", "triton_tiled"]),
        ({"kernel": ["all", "torch"]}, ["kernel", "'all'"]),
        ({"kernel": None}, ["kernel", "'None'", "torch"]),
        ({"kernel": []}, ["kernel is empty"]),
        ({"dtype": "float8"}, ["dtype", "'float8'", "float16"]),
        ({"dtype": ["float16", "half"]}, ["dtype", "'half'", "bfloat16"]),
        ({"dtype": []}, ["dtype is empty"]),
        ({"params": {"layout": "NT"}}, ["layout", "'NT'", "TN"]),
        ({"params": {"layout": ["TN", "TT"]}}, ["layout", "'TT'", "NN"]),
        ({"params": {"layout": None}}, ["layout", "'None'", "TN"]),
        ({"params": {"layouts": "TN"}}, ["parameter", "'layouts'", "layout"]),
        ({"params": {"accumulate": "float64"}}, ["accumulate", "'float64'", "float16"]),
        ({"shapes": []}, ["shape.cpu has no shapes"]),
        ({"shapes": [{"m": 8, "n": 8}]}, ["shape.cpu", "m, n, k"]),
        ({"shapes": [{"m": 8, "n": 8, "k": 8, "b": 8}]}, ["shape.cpu", "m, n, k", "b"]),
        ({"shapes": [{"rows": 8, "n": 8, "k": 8}]}, ["shape.cpu", "m, n, k", "rows"]),
        ({"shapes": [512]}, ["shape.cpu", "m, n, k", "512"]),
        ({"shapes": [[8, 8, 8]]}, ["shape.cpu", "m, n, k"]),
        ({"shapes": [SMALL | {"m": []}]}, ["shape.cpu"]),
    ],
    ids=str,
)
def test_an_unknown_word_is_refused_with_the_valid_ones(changes: dict[str, Any], named: list[str]) -> None:
    message = refusal(config(**changes))
    assert [word for word in named if word not in message] == [], message


def test_a_gpu_kernel_asked_for_by_name_on_a_cpu_is_refused_with_those_that_run_here(toy: Op) -> None:
    message = refusal(toy_config(kernel=["base", "v01_any"]))
    assert "v01_any" in message and "CUDA GPU" in message
    assert message.endswith("base, half, cpu_any")
    assert "v01_naive" in refusal(config(kernel="v01_naive"))


def test_static_keeps_cuda_kernels_where_they_cannot_run(toy: Op) -> None:
    static = Profiler(static=Static())
    plan = matrix.plan(toy_config(profiler=static), "cpu")
    assert kernels(plan) == ["base", "v01_any", "v02_hopper", "v03_aligned", "cpu_any"]
    assert list(plan.left_out) == ["half"]
    waiting = {case.kernel for case in plan.cases if plan.unsupported.get(case.key) == "needs a CUDA GPU"}
    assert waiting == {"v01_any", "v02_hopper", "v03_aligned"}
    assert kernels(matrix.plan(toy_config(kernel="v01_any", profiler=static), "cpu")) == ["v01_any"]
    assert kernels(matrix.plan(toy_config(kernel="v02_hopper", profiler=static), "cuda", (8, 9))) == ["v02_hopper"]
    assert "multiple of 4" in refusal(
        toy_config(kernel="v03_aligned", profiler=static, shapes=[{"m": 5, "n": 8}]), "cuda"
    )
    left_out = matrix.plan(config(profiler=static), "cpu").left_out
    triton = [kernel.name for kernel in ops.get("hgemm").kernels.values() if kernel.backend == "triton"]
    assert [left_out[name] for name in triton] == ["needs a CUDA GPU"] * len(triton) != []
    assert list(matrix.plan(toy_config(profiler=static), "cuda").left_out) == ["cpu_any", "half"]


def test_static_takes_architectures_that_it_knows_the_limits_of(toy: Op) -> None:
    message = refusal(toy_config(profiler=Profiler(static=Static(["sm_89", "sm_99"]))))
    assert "unknown architecture 'sm_99'" in message and "sm_90a" in message


def test_a_cpu_kernel_asked_for_by_name_on_a_gpu_is_refused_with_those_that_run_here(toy: Op) -> None:
    message = refusal(toy_config(kernel="cpu_any"), "cuda")
    assert "cpu_any" in message and "device=cpu" in message and "v01_any" in message


# What a kernel supports


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        ("sm_80+", (7, 5), False),
        ("sm_80+", (8, 0), True),
        ("sm_80+", (8, 9), True),
        ("sm_80+", (9, 0), True),
        ("sm_80+", (10, 0), True),
        ("sm_80+", (12, 0), True),
        ("sm_89+", (8, 6), False),
        ("sm_90+", (8, 9), False),
        ("sm_90+", (12, 1), True),
        ("sm_90a", (8, 9), False),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_100a", (9, 0), False),
        ("sm_100a", (10, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_120+", (10, 0), False),
        ("sm_120+", (12, 0), True),
        ("sm_90a", None, True),  # not known yet: the node's supervisor decides
    ],
)
def test_an_architecture_is_a_least_one_with_plus_and_else_exact(
    toy: Op, archs: str, capability: tuple[int, int] | None, runs: bool
) -> None:
    toy.cuda("v09_rule.cu", archs=archs)
    why = toy.kernels["v09_rule"].unsupported(toy.case("v09_rule", "float16", {"m": 4, "n": 8}), capability)
    assert (why is None) == runs
    if not runs and capability:
        assert why and archs in why and f"sm_{capability[0]}{capability[1]}" in why


@pytest.mark.parametrize(
    ("archs", "arch", "builds"),
    [
        ("sm_80+", "sm_75", False),
        ("sm_80+", "sm_80", True),
        ("sm_80+", "sm_90a", True),
        ("sm_90+", "sm_120a", True),
        ("sm_90a", "sm_90a", True),
        ("sm_90a", "sm_100a", False),
        ("sm_100a", "sm_100a", True),
    ],
)
def test_the_compiler_is_asked_only_for_architectures_that_the_kernel_states(
    toy: Op, archs: str, arch: str, builds: bool
) -> None:
    toy.cuda("v09_rule.cu", archs=archs)
    assert toy.kernels["v09_rule"].builds_for(arch) == builds


def test_what_a_kernel_does_not_support_is_planned_with_its_reason(toy: Op) -> None:
    request = toy_config(dtype=["float16", "bfloat16"], params={"accumulate": ["float32", "float16"]},
                         shapes=[{"m": 4, "n": 8}, {"m": 3, "n": 8}, {"m": 4, "n": 12}])  # fmt: skip
    plan = matrix.plan(request, "cuda", (9, 0))
    assert len(plan.cases) == 2 * 2 * 3 * 5
    assert set(plan.unsupported) < {case.key for case in plan.cases}
    for case in plan.cases:
        why = plan.unsupported.get(case.key)
        if case.kernel == "half" and case.dtype == "bfloat16":
            assert why == (
                "is registered for float16, not bfloat16; if it supports bfloat16, add it to dtypes= where you register it"
            )
        elif case.kernel == "half" and case.params["accumulate"] == "float32":
            assert why == "supports accumulate=float16, not float32"
        elif case.kernel == "v03_aligned" and case.shape["m"] == 3:
            assert why == "needs m to be a multiple of 4, got 3"
        elif case.kernel == "v03_aligned" and case.shape["n"] == 12:
            assert why == "needs n to be a multiple of 8, got 12"
        else:
            assert why is None
    assert matrix.plan(request, "cuda", (8, 9)).unsupported.keys() > plan.unsupported.keys()


def test_a_request_in_which_nothing_can_run_is_refused_with_a_reason(toy: Op) -> None:
    message = refusal(toy_config(kernel="v02_hopper"), "cuda", (8, 9))
    assert "nothing to run" in message and "v02_hopper" in message and "sm_90a" in message and "sm_89" in message
    message = refusal(toy_config(kernel="v03_aligned", shapes=[{"m": 5, "n": 8}]), "cuda")
    assert "multiple of 4, got 5" in message


# Cases and their keys


def test_lists_in_a_shape_stand_for_all_their_combinations() -> None:
    shapes = [{"m": [1, 16], "n": [8, 24], "k": 32}, SMALL, {"m": 7, "n": 7, "k": 7}]  # SMALL is among the first four
    plan = matrix.plan(config(kernel="torch", shapes=shapes), "cpu")
    sizes = [tuple(case.shape.values()) for case in plan.cases]
    assert sizes == [(16, 24, 32), (1, 8, 32), (1, 24, 32), (16, 8, 32), (7, 7, 7)]  # the largest is the headline


def test_an_axis_with_a_default_may_be_left_out_and_is_no_part_of_a_key_at_it() -> None:
    sizes = {"batch": 1, "seq_q": 8, "seq_kv": 8, "heads": 1, "kv_heads": 1, "head_dim": 192}

    def shapes(*entries: dict[str, Any]) -> list[str]:
        planned = matrix.plan(
            config(op="prefill_attention", kernel="torch_eager", shapes=[sizes | entry for entry in entries]), "cpu"
        )
        return [case.shape_name.partition("head_dim=")[2] for case in planned.cases]

    found = shapes({"head_dim": [64, 192]}, {"v_dim": [192, 128]})
    assert sorted(found) == ["192", "192,v_dim=128", "64"]
    with pytest.raises(UserError, match="v_dim=96 must be head_dim=192, or 128 where head_dim=192"):
        shapes({"v_dim": 96})
    with pytest.raises(UserError, match="its axes are batch, seq_q, seq_kv, heads, kv_heads, head_dim, v_dim, not"):
        shapes({"dim_v": 128})


def test_each_device_has_shapes_of_its_own() -> None:
    request = config(kernel="torch")
    request.shape.cpu = [dict.fromkeys("mnk", 8)]
    assert {case.shape["m"] for case in matrix.plan(request, "cpu").cases} == {8}
    assert {case.shape["m"] for case in matrix.plan(request, "cuda").cases} == {16}


def test_parameters_that_are_not_asked_for_are_the_default(toy: Op) -> None:
    cases = matrix.plan(toy_config(kernel="base"), "cpu").cases
    assert [dict(case.params) for case in cases] == [{"mode": "a", "accumulate": "float32"}]
    cases = matrix.plan(toy_config(kernel="base", params={"mode": ["b", "a"]}), "cpu").cases
    assert [case.params["mode"] for case in cases] == ["b", "a"]


def test_a_problem_is_planned_with_all_its_kernels_one_after_the_other() -> None:
    request = config(dtype=["float16", "bfloat16"], params={"layout": ["TN", "NN"]}, shapes=[SMALL | {"m": [1, 2, 3]}])
    cases = matrix.plan(request, "cuda").cases
    count = len({case.kernel for case in cases})
    blocks = [cases[i : i + count] for i in range(0, len(cases), count)]
    assert len(blocks) == 2 * 2 * 3
    assert all(len({case.problem for case in block}) == 1 for block in blocks)
    assert len({block[0].problem for block in blocks}) == len(blocks)
    assert [case.dtype for case in cases] == sorted((case.dtype for case in cases), reverse=True)  # as asked for


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": ["float16", "float16"]},
        {"kernel": ["torch", "torch"]},
        {"params": {"layout": ["NN", "TN", "NN"]}},
        {"shapes": [SMALL, dict(reversed(SMALL.items())), SMALL | {"m": [16, 16]}]},
    ],
    ids=str,
)
def test_asking_twice_plans_once(changes: dict[str, Any]) -> None:
    keys = Counter(case.key for case in matrix.plan(config(**changes), "cpu").cases)
    assert max(keys.values()) == 1


GOLDEN = {
    "hgemm/v01_naive/float16/layout=TN,accumulate=float32/m=512,n=512,k=512": (
        "v01_naive", "float16", {"m": 512, "n": 512, "k": 512}, None),
    "hgemm/torch/bfloat16/layout=NN,accumulate=float32/m=1,n=4096,k=14336": (
        "torch", "bfloat16", {"k": 14336, "m": 1, "n": 4096}, {"layout": "NN"}),
    "hgemm/x/float16/layout=NN,accumulate=float16/m=2,n=3,k=4": (
        "x", "float16", {"n": 3, "k": 4, "m": 2}, {"accumulate": "float16", "layout": "NN"}),
}  # fmt: skip


@pytest.mark.parametrize("key", GOLDEN)
def test_keys_are_what_published_rows_hold_whatever_the_order_of_the_request(key: str) -> None:
    case = ops.get("hgemm").case(*GOLDEN[key])
    assert case.key == key
    assert f"{case.op}/{case.kernel}/{case.problem}" == key
    assert Case(**case.to_dict()) == case


names = st.sampled_from(["a", "b"])
sizes = st.integers(1, 3)


@given(cases=st.lists(st.tuples(names, names, names, sizes, sizes, sizes), unique=True, max_size=40))
def test_different_cases_have_different_keys(cases: list[tuple[str, str, str, int, int, int]]) -> None:
    op = ops.get("hgemm")
    keys = {
        op.case(kernel, dtype, {"m": m, "n": n, "k": k}, {"layout": layout}).key
        for kernel, dtype, layout, m, n, k in cases
    }
    assert len(keys) == len(cases)


# Time


def test_the_estimate_grows_with_the_cases_and_shrinks_with_the_jobs(toy: Op) -> None:
    def estimate(jobs: int, **changes: Any) -> float:
        request = toy_config(timing=Timing(warmup_s=0.5, steady_block_s=0.25), **changes)
        return matrix.plan(request, "cuda", (9, 0)).seconds(request, jobs)

    several = [{"m": [4, 8, 12, 16], "n": 8}]
    one = Timing(warmup_s=0.5, steady_block_s=0.25).estimate()
    assert estimate(1, kernel="base") == one
    assert estimate(1, kernel="base", shapes=several) == 4 * one
    assert estimate(4, kernel="base", shapes=several) == one
    assert estimate(1, kernel="v01_any") == one + matrix.BUILD_S
    # what is not supported is not timed
    assert estimate(1, kernel=["base", "half"]) == one


def test_a_peer_that_is_not_installed_has_a_row_that_says_so(toy: Op) -> None:
    toy.peer("theirs", lambda *tensors: None, package="no_such_package")
    plan = matrix.plan(toy_config(kernel=["base", "theirs"]), "cuda", (9, 0))
    (why,) = {why for key, why in plan.unsupported.items() if "/theirs/" in key}
    assert why == "needs the package no_such_package: pip install 'minfer[peers]'"
    assert matrix.plan(toy_config(), "cpu").left_out["theirs"] == "needs a CUDA GPU"


# Drawn problems


def test_drawn_problems_take_the_place_of_dtype_parameters_and_shape() -> None:
    request = config(kernel="functions", draw=Draw(5, 3), dtype=MISSING, params={"layout": "NN"})
    plan = matrix.plan(request, "cuda", (9, 0))
    assert set(kernels(plan)) == {"torch", "matmul"} and len(plan.cases) == 10
    problems = {(case.dtype, case.params["layout"], *case.shape.values()) for case in plan.cases}
    assert len(problems) == 5 and not any(case.shape == SMALL for case in plan.cases)
    assert [case.key for case in plan.cases] == [case.key for case in matrix.plan(request, "cuda", (9, 0)).cases]
    other = config(kernel="functions", draw=Draw(5, 4))
    assert {case.key for case in matrix.plan(other, "cuda", (9, 0)).cases} != {case.key for case in plan.cases}


def test_all_kernels_can_be_had_at_drawn_problems_and_functions_only_by_name() -> None:
    assert "matmul" not in kernels(matrix.plan(config(), "cpu"))
    assert kernels(matrix.plan(config(kernel="matmul"), "cpu")) == ["matmul"]
    assert {"cpu_naive", "torch"} <= set(kernels(matrix.plan(config(draw=Draw(2)), "cpu")))


def test_drawn_sweeps_of_functions_leave_out_kernels_that_take_long_at_each_shape() -> None:
    """`torch_flex` compiles for 14 seconds at each problem. In that time the other kernels are timed at three problems. With
    1460 sequences, `torch_eager` takes minutes."""
    of = {"op": "prefill_attention", "params": {}, "dtype": "bfloat16"}
    plan = matrix.plan(config(**of, kernel="functions", draw=Draw(5)), "cuda", (9, 0))
    assert {"attention", "torch", "torch_flash"} <= set(kernels(plan)) and "torch_flex" not in kernels(plan)
    for slow, why in (
        ("torch_flex", "compiles for many seconds"),
        ("torch_eager", "launches several kernels for each"),
    ):
        assert slow not in kernels(plan) and plan.left_out[slow].startswith(why)
        for wanted in (["attention", slow], "all"):
            assert slow in kernels(matrix.plan(config(**of, kernel=wanted, draw=Draw(5)), "cuda", (9, 0)))


def test_an_op_that_does_not_say_how_its_problems_are_drawn_is_refused(toy: Op) -> None:
    with pytest.raises(UserError, match=r"toy does not; choose .*hgemm"):
        matrix.plan(toy_config(draw=Draw(5)), "cpu")


def test_functions_are_refused_for_an_op_without_one(toy: Op) -> None:
    with pytest.raises(
        UserError, match="kernel=functions is for ops with a function that can be timed, and toy has none"
    ):
        matrix.plan(toy_config(kernel="functions"), "cpu")


@pytest.mark.parametrize("wrong", [{"untrusted": False}, {"beside": "v01_naive"}])
def test_a_kernel_beside_the_others_is_one_of_them_and_needs_a_judge(wrong: dict[str, Any]) -> None:
    right = {"kernel": ["torch", "cpu_naive"], "untrusted": True, "beside": "cpu_naive"}
    assert len(matrix.plan(config(**right), "cpu").cases) == 2
    with pytest.raises(UserError, match="needs untrusted=true, and"):
        matrix.plan(config(**right | wrong), "cpu")


def test_some_of_the_drawn_problems_are_run() -> None:
    drawn = matrix.plan(config(kernel="torch", draw=Draw(4, 1)), "cpu").cases
    assert matrix.plan(config(kernel="torch", draw=Draw(4, 1, only=[1, 3])), "cpu").cases == [drawn[1], drawn[3]]
