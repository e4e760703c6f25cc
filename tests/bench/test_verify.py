"""Verification against kernels that are right, and those that break its rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from minfer import ops
from minfer.bench.errors import Errors, run_reference
from minfer.bench.integrity import Dishonest
from minfer.bench.operands import Operands
from minfer.bench.verify import Inputs, Known, WrongResult, choose_inputs, verify
from minfer.ops import DTYPES, Kernel, multiples
from tests.honest import ANY, CPU, HGEMM, SQUARE, Tensor, after, both_dtypes, both_layouts, check, fails, honest

pytestmark = pytest.mark.usefixtures("one_thread")


# Right


def test_a_sum_in_order_may_drop_terms_that_are_too_small_for_it() -> None:
    """A float32 sum that begins with 1 drops each term below 2^-24 of it, always downwards: 1023 such terms are far more than
    independent roundings. A kernel that leaves out terms that an fp32 sum keeps is still found."""
    op = ops.get("softmax")
    case = op.case("cpu_naive", "float32", {"rows": 1, "n": 1024}, {"mask": "none"})

    def worst(small: float, least: float) -> float:
        x = torch.full((1, 1024), small, dtype=torch.float64)
        x[0, 0] = 0.0
        given = {"y": x, "x": x, "mask": torch.empty(0, dtype=torch.float64)}
        [expected] = op.reference(case, given).values()
        terms = x.exp() * (x.exp() >= least)
        assert expected.bound is not None
        return float(((x.exp() / terms.sum() - expected.value).abs() / expected.bound).max())

    assert worst(-17.0, 2.0**-24) < 1 < worst(-13.0, 2.0**-18)


@pytest.fixture
def runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is run on each of its inputs once: more runs look for races, and take more than half of the time."""
    monkeypatch.setattr("minfer.bench.verify.REPEATS", 0)


@both_dtypes
@both_layouts
@pytest.mark.usefixtures("runs_once")
@pytest.mark.parametrize("k", [1, 2, 17, 64, 512, 4096])
def test_an_honest_kernel_passes_with_room_to_spare(dtype: str, layout: str, k: int) -> None:
    errors = check(honest, dtype, layout, k=k)
    # Rounding the output to nearest is half of the one ulp that the bound allows; the sum adds next to nothing.
    assert 0.3 < errors.over_bound < 0.9
    assert 0 < errors.rel_l2 < torch.finfo(DTYPES[dtype]).eps
    assert 0 < errors.max_abs < 4 * 4 * math.sqrt(max(k, 320)) * torch.finfo(DTYPES[dtype]).eps


@both_dtypes
@pytest.mark.usefixtures("runs_once")
def test_an_honest_kernel_never_exceeds_the_bound(dtype: str) -> None:
    worst = max(check(honest, dtype, "NN", seed=seed, k=96).over_bound for seed in range(0, 1000, 40))
    assert worst < 0.9


@both_layouts
@pytest.mark.parametrize(
    ("dtype", "accumulate", "name"),
    [("float16", "float32", "torch"), ("bfloat16", "float32", "torch"), ("float16", "float16", "torch_acc16")],
)
def test_the_baseline_is_right(dtype: str, accumulate: str, name: str, layout: str) -> None:
    baseline = HGEMM.baseline(HGEMM.case("any", dtype, SQUARE, {"layout": layout, "accumulate": accumulate}))
    function = HGEMM.kernels[baseline].function
    assert baseline == name
    assert function and check(function, dtype, layout, accumulate=accumulate, k=512).over_bound < 1
    assert not torch.backends.cuda.matmul.allow_fp16_accumulation  # as it was before


def test_a_sum_in_another_order_is_as_right() -> None:
    def split_k(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        parts = [a[:, i::8].float() @ b[i::8].float() for i in range(8)]
        product = alpha * torch.stack(parts).flip(0).sum(0)
        out.copy_(product + beta * out.float() if beta else product)

    assert check(split_k, k=1000).over_bound < 0.9


@both_dtypes
@pytest.mark.parametrize("step", [-1, 1], ids=["toward zero", "away from zero"])
def test_a_kernel_may_round_its_output_to_either_neighbour(dtype: str, step: int) -> None:
    """Conversions that truncate are common in hardware; the bound is one ulp, not half."""

    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        exact = alpha * (a.double() @ b.double()) + (beta * out.double() if beta else 0.0)
        nearest = exact.to(out.dtype)
        wrong_side = (nearest.double().abs() - exact.abs()) * step < 0
        out.view(torch.int16).copy_(nearest.view(torch.int16) + step * wrong_side)

    assert 0.8 < check(kernel, dtype, k=64).over_bound <= 1


# What is tried, and what is reported


def test_a_case_is_tried_on_every_distribution_every_call_and_odd_shapes() -> None:
    case = HGEMM.case("honest", "float16", SQUARE)
    tried = choose_inputs(HGEMM, case, ANY, None, 5)
    assert {inputs.distribution for inputs in tried if inputs.case == case} == {"uniform", "normal", "uneven"}
    same = [inputs.case for inputs in tried if inputs.case.shape == case.shape]
    assert all(call in [HGEMM.call(each) for each in same] for call in HGEMM.calls.values())
    shapes = [dict(inputs.case.shape) for inputs in tried]
    assert all(dict(odd) in shapes for odd in HGEMM.odd_shapes)
    assert len({inputs.describe(HGEMM) for inputs in tried}) == len(tried)
    assert len({inputs.seed for inputs in tried}) >= 3
    assert check(honest, seed=5).tried == len(tried)


def test_odd_shapes_that_a_kernel_does_not_support_are_not_tried() -> None:
    seen = set()

    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        seen.add((a.shape[0], b.shape[1], a.shape[1]))
        honest(out, a, b, alpha, beta)

    def shapes(supported: Kernel) -> set[tuple[int, ...]]:
        seen.clear()
        check(kernel, kernel=supported)
        return set(seen)

    known = {(24, 24, 64), *(tuple(shape[axis] for axis in "mnk") for shape in HGEMM.odd_shapes)}
    aligned = {shape for shape in known if shape[2] % 8 == 0}
    assert shapes(ANY) >= known > aligned
    assert shapes(replace(ANY, requires=multiples(k=8))) & known == aligned
    assert check(honest).tried > check(honest, kernel=replace(ANY, requires=multiples(k=8))).tried


def test_tried_counts_the_inputs_up_to_the_one_that_failed() -> None:
    seen = set()

    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        seen.add((float(a.float().sum()), alpha))
        honest(out, a, b, alpha, beta)
        if len(seen) == 3:
            out[0, 0] += 10

    errors = fails(kernel).errors
    assert errors.tried == len(seen) == 3
    assert errors.over_bound > 1 and errors.max_abs > 9


def test_what_is_known_of_an_odd_shape_counts_and_is_not_tried_again() -> None:
    odd, known = {(33, 65, 17), (1, 136, 264)}, Known()
    seen: list[tuple[int, ...]] = []

    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        seen.append((a.shape[0], b.shape[1], a.shape[1]))
        honest(out, a, b, alpha, beta)

    def verified(shape: dict[str, int], layout: str) -> tuple[set[tuple[int, ...]], Errors]:
        seen.clear()
        case = HGEMM.case("honest", "float16", shape, {"layout": layout})
        errors = verify(HGEMM, case, ANY, kernel, CPU, None, 1, known=known)
        return set(seen) & odd, errors

    first, errors = verified(SQUARE, "TN")
    assert first == odd and errors == check(honest, seed=1)
    found, again = verified(SQUARE | {"m": 25}, "TN")
    assert not found and again.tried == errors.tried
    assert verified({"m": 33, "n": 65, "k": 17}, "TN")[0] == {(33, 65, 17)}  # a case's own shape is always tried
    assert verified(SQUARE, "NN")[0] == odd


def test_a_kernel_that_is_known_to_be_wrong_at_an_odd_shape_stays_so() -> None:
    known, case = Known(), HGEMM.case("honest", "float16", SQUARE)

    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        honest(out, a, b, alpha, beta)
        if len(out) == 33:
            out[0, 0] += 10

    with pytest.raises(WrongResult) as first:
        verify(HGEMM, case, ANY, kernel, CPU, None, 1, known=known)
    with pytest.raises(WrongResult) as second:
        verify(HGEMM, case, ANY, honest, CPU, None, 2, known=known)
    assert "m=33" in str(first.value) and str(second.value) == str(first.value)
    assert second.value.errors.tried == first.value.errors.tried and second.value.errors.over_bound > 1


@pytest.mark.parametrize("share", ["one element", "all"])
def test_the_errors_of_an_output_with_nan_are_not_those_of_a_right_one(share: str) -> None:
    def change(out: Tensor) -> None:
        out[: 1 if share == "one element" else None, : 1 if share == "one element" else None] = math.nan

    errors = fails(after(change)).errors
    assert not errors.over_bound <= 1 and not errors.max_abs < 1 and not errors.rel_l2 < 1


def test_the_worst_of_all_inputs_is_reported() -> None:
    case = HGEMM.case("honest", "float16", SQUARE)
    alone = []
    for inputs in choose_inputs(HGEMM, case, ANY, None, 0):
        operands = inputs.operands(HGEMM, CPU)
        exact = run_reference(HGEMM, inputs.case, operands.tensors)["out"].value
        honest(*operands.arguments, **HGEMM.call(inputs.case))
        alone.append(float((operands.tensors["out"].double() - exact).abs().max()))
    assert len(set(alone)) > 1
    assert check(honest).max_abs == pytest.approx(max(alone))


# Breaking the rules


@pytest.mark.parametrize("offset", [-1, -4000])
def test_writing_outside_the_output(offset: int) -> None:
    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        honest(out, a, b, alpha, beta)
        out.as_strided((1,), (1,), out.storage_offset() + offset).fill_(1.0)

    assert "wrote outside" in str(fails(kernel))


@pytest.mark.parametrize("fenced", [False, True])
@pytest.mark.parametrize("offset", [-4000, -1, 0, 200])
def test_what_lies_around_an_operand_is_guarded(offset: int, fenced: bool) -> None:
    """With a fence, the guard behind an operand ends at the protected page."""
    case = HGEMM.case("torch", "float16", {"m": 3, "n": 5, "k": 7})
    operands = Operands(HGEMM, case, 1, "normal", torch.device("cpu"), fenced=fenced)
    out = operands.tensors["out"]
    assert not operands.is_breached()
    place = out.storage_offset() + (offset if offset < 0 else out.numel() + offset)
    out.as_strided((1,), (1,), place).fill_(1.0)
    assert operands.is_breached()


def test_a_result_that_differs_from_run_to_run_is_wrong_unless_declared() -> None:
    calls = []

    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        calls.append(1)
        honest(out, a, b, alpha, beta)
        if len(calls) % 2 == 0:
            out.view(torch.int16)[0, 0] ^= 1  # the last bit, which the bound forgives

    assert "another result when run again" in str(fails(kernel))
    check(kernel, kernel=replace(ANY, deterministic=False))


def test_a_result_that_is_sometimes_wrong_is_so_also_where_bits_may_differ() -> None:
    calls = []

    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        calls.append(1)
        honest(out, a, b, alpha, beta)
        if len(calls) == 2:
            out[0, 0] += 10

    with pytest.raises(WrongResult, match="another result when run again"):
        check(kernel, kernel=replace(ANY, deterministic=False))


@pytest.mark.parametrize("returned", [lambda out: out.clone(), lambda out: (out, out + 1)])
def test_returning_a_tensor_instead_of_writing_the_output(returned: Callable[[Tensor], object]) -> None:
    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> object:
        honest(out, a, b, alpha, beta)
        return returned(out)

    with pytest.raises(Dishonest, match=r"returned a (Tensor|tuple)"):
        check(kernel)


@pytest.mark.parametrize("returned", [lambda out: out, lambda out: (out, out.view(-1))])
def test_returning_the_output_is_a_mistake_and_no_deception(returned: Callable[[Tensor], object]) -> None:
    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> object:
        honest(out, a, b, alpha, beta)
        return returned(out)

    with pytest.raises(TypeError, match="returned its output tensor; a kernel must return None"):
        check(kernel)


def test_putting_another_tensor_in_the_place_of_the_output() -> None:
    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        other = torch.empty_like(out)
        honest(other, a, b, alpha, beta)
        out.data = other

    with pytest.raises(Dishonest, match="another tensor"):
        check(kernel)


# Inputs


@both_dtypes
def test_inputs_are_the_stated_distribution_and_the_same_for_the_same_seed(dtype: str) -> None:
    case = HGEMM.case("honest", dtype, {"m": 300, "n": 8, "k": 100})

    def draw(distribution: str, seed: int) -> Tensor:
        return Inputs(case, distribution, seed).operands(HGEMM, CPU).tensors["a"]

    for distribution, deviation in (("uniform", 3**-0.5), ("normal", 1.0)):
        values = draw(distribution, 1)
        assert values.dtype == DTYPES[dtype] and values.shape == (300, 100)
        assert torch.equal(values, draw(distribution, 1)) and not torch.equal(values, draw(distribution, 2))
        assert abs(float(values.float().mean())) < 0.02
        assert float(values.float().std()) == pytest.approx(deviation, rel=0.02)
    assert float(draw("uniform", 1).abs().max()) <= 1 < float(draw("normal", 1).abs().max())


@both_layouts
def test_the_operands_of_one_seed_differ_and_the_output_is_poisoned_where_it_is_not_read(layout: str) -> None:
    case = HGEMM.case("honest", "float16", dict.fromkeys("mnk", 16), {"layout": layout})
    for called in HGEMM.under_each_call(case):
        out, a, b = Inputs(called, "normal", 0).operands(HGEMM, CPU).arguments
        call = HGEMM.call(called)
        assert not torch.equal(a, b) and not torch.equal(a, b.t()) and not torch.equal(out, a)
        assert bool(out.isnan().all()) == (call["beta"] == 0) == bool(out.isnan().any())
        assert (b.stride() == (1, 16)) == (layout == "TN")


@pytest.mark.parametrize(("slow_s", "sparing"), [(-1.0, True), (-1.0, False), (math.inf, True)])
def test_a_slow_kernel_is_run_once_at_its_shape_and_at_all_small_ones(
    slow_s: float, sparing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minfer.bench.verify.SLOW_S", slow_s)
    case = HGEMM.case("honest", "float16", SQUARE)
    chosen = choose_inputs(HGEMM, case, ANY, None, 0)
    own = [inputs for inputs in chosen if inputs.case.shape == case.shape]
    shapes: list[tuple[int, int]] = []

    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        shapes.append(tuple(out.shape))
        honest(out, a, b, alpha, beta)

    errors = verify(HGEMM, case, ANY, kernel, CPU, None, 0, sparing)
    left_out = len(own) - 1 if sparing and slow_s < 0 else 0
    assert len(own) == 4 and (errors.left_out, errors.tried) == (left_out, len(chosen) - left_out)
    assert set(shapes) == {(inputs.case["m"], inputs.case["n"]) for inputs in chosen}
    with pytest.raises(WrongResult):
        verify(HGEMM, case, ANY, lambda *about, **call: None, CPU, None, 0, sparing)
