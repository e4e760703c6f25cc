"""The oracle against kernels that are right, and against every way of being wrong that we know of. All on the CPU."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minfer import ops
from minfer.bench.integrity import Dishonest
from minfer.bench.verify import Errors, Function, Trial, WrongResult, trials, verify
from minfer.ops import DTYPES, Kernel, multiples

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")
HGEMM = ops.get("hgemm")
ANY = Kernel("hgemm", "honest", "torch", Path("test"))
SQUARE = {"m": 24, "n": 24, "k": 64}

both_dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
both_layouts = pytest.mark.parametrize("layout", ["TN", "NN"])


def check(
    function: Function, dtype: str = "float16", layout: str = "TN", kernel: Kernel = ANY, seed: int = 0,
    accumulate: str = "float32", **shape: int,
) -> Errors:  # fmt: skip
    params = {"layout": layout, "accumulate": accumulate}
    case = HGEMM.case("honest", dtype, SQUARE | shape, params)
    return verify(HGEMM, case, kernel, function, CPU, None, seed)


def fails(function: Function, dtype: str = "float16", layout: str = "TN", k: int = 64) -> WrongResult:
    """How a wrong kernel is reported."""
    with pytest.raises(WrongResult) as caught:
        check(function, dtype, layout, k=k)
    message = str(caught.value)
    assert "\n" not in message and "seed" in message and "m=" in message  # enough to repeat it
    return caught.value


Tensor = torch.Tensor


def honest(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
    """Accumulates in float32, rounds once."""
    product = alpha * (a.float() @ b.float())
    out.copy_(product + beta * out.float() if beta else product)


def after(change: Function) -> Function:
    """The honest kernel, and then something done to its output."""

    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        honest(out, a, b, alpha, beta)
        change(out)

    return kernel


# Right


@both_dtypes
@both_layouts
@pytest.mark.parametrize("k", [1, 2, 17, 64, 512, 4096])
def test_an_honest_kernel_passes_with_room_to_spare(dtype: str, layout: str, k: int) -> None:
    errors = check(honest, dtype, layout, k=k)
    # Rounding the output to nearest is half of the one ulp that the bound allows; the sum adds next to nothing.
    assert 0.3 < errors.over_bound < 0.9
    assert 0 < errors.rel_l2 < torch.finfo(DTYPES[dtype]).eps
    assert 0 < errors.max_abs < 4 * 4 * math.sqrt(max(k, 320)) * torch.finfo(DTYPES[dtype]).eps


@both_dtypes
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


# Wrong


def filled_with(value: float) -> Function:
    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        out.fill_(value)

    return kernel


def test_zeros() -> None:
    assert "all zeros" in str(fails(filled_with(0.0)))


@pytest.mark.parametrize("value", [1.0, -0.37, math.inf])
def test_constant(value: float) -> None:
    assert "constant" in str(fails(filled_with(value)))


def test_nothing_written() -> None:
    message = str(fails(lambda out, a, b, alpha, beta: None))
    assert "100.0% of the output is NaN" in message and "not written" in message


@both_dtypes
def test_the_last_row_is_not_written(dtype: str) -> None:
    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        honest(out[:-1], a[:-1], b, alpha, beta)

    assert "4.2% of the output is NaN" in str(fails(kernel, dtype))  # 1 of 24


def test_a_tile_that_only_odd_shapes_have_is_not_written() -> None:
    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        rows = out.shape[0] // 8 * 8
        honest(out[:rows], a[:rows], b, alpha, beta)

    error = fails(kernel)
    assert "is NaN" in str(error) and "m=33" in str(error) and error.errors.tried == 4


def test_the_output_is_read_although_beta_is_0() -> None:
    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        out.copy_(alpha * (a.float() @ b.float()) + beta * out.float())

    error = fails(kernel)
    assert "NaN" in str(error) and "beta=0.0" in str(error)


@pytest.mark.parametrize("ignored", ["alpha", "beta"])
def test_a_scalar_is_ignored(ignored: str) -> None:
    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        honest(out, a, b, 1.0 if ignored == "alpha" else alpha, 0.0 if ignored == "beta" else beta)

    error = fails(kernel)
    assert "off by" in str(error) and "alpha=-0.5, beta=2.0" in str(error)
    assert error.errors.tried == 3  # it was right twice, under alpha=1 and beta=0


def test_beta_times_the_sign_of_zero() -> None:
    """out += instead of out = beta * out +."""

    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        honest(out, a, b, alpha, 1.0 if beta else 0.0)

    assert "off by" in str(fails(kernel))


@both_dtypes
@both_layouts
def test_the_result_is_transposed(dtype: str, layout: str) -> None:
    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        product = alpha * (a.float() @ b.float())
        product = product.t() if product.shape[0] == product.shape[1] else product
        out.copy_(product + beta * out.float() if beta else product)

    assert "off by" in str(fails(kernel, dtype, layout))


@pytest.mark.parametrize("index", [0, 1])
def test_an_input_is_changed(index: int) -> None:
    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        honest(out, a, b, alpha, beta)
        (a, b)[index][0, 0] += 1

    assert f"changed its input {index}" in str(fails(kernel))


def test_an_input_is_changed_so_that_the_result_fits() -> None:
    """Checking the result against the inputs as they are afterwards would be fooled."""

    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        a.zero_()
        out.zero_()

    assert "changed its input 0" in str(fails(kernel))


@both_dtypes
@pytest.mark.parametrize("where", [(0, 0), (23, 23), (7, 11)])
def test_one_element_is_wrong(dtype: str, where: tuple[int, int]) -> None:
    def change(out: Tensor) -> None:
        out[where] += 0.25

    assert "an element is off by" in str(fails(after(change), dtype, k=16))


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_one_element_is_infinite(value: float) -> None:
    def change(out: Tensor) -> None:
        out[3, 3] = value

    assert "off by inf" in str(fails(after(change)))


def test_one_element_is_nan() -> None:
    def change(out: Tensor) -> None:
        out[3, 3] = math.nan

    assert "0.2% of the output is NaN" in str(fails(after(change)))  # 1 of 576


@both_dtypes
def test_one_element_is_two_ulps_off(dtype: str) -> None:
    def change(out: Tensor) -> None:
        largest = int(out.float().abs().argmax())
        out.flatten()[largest] *= 1 + 2.5 * torch.finfo(out.dtype).eps

    assert "off by" in str(fails(after(change), dtype))


@both_dtypes
def test_neighbouring_columns_are_swapped(dtype: str) -> None:
    assert "off by" in str(fails(after(lambda out: out.copy_(out[:, [1, 0, *range(2, out.shape[1])]])), dtype))


def accumulate_in(precision: torch.dtype, step: int = 1) -> Function:
    """A kernel that keeps its sums in some precision, rounding after every `step` terms."""

    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        total = torch.zeros(out.shape, dtype=precision)
        for k in range(0, a.shape[1], step):
            total += (a[:, k : k + step].float() @ b[k : k + step].float()).to(precision)
        scaled = alpha * total.float()
        out.copy_(scaled + beta * out.float() if beta else scaled)

    return kernel


@pytest.mark.parametrize("step", [1, 16])
@pytest.mark.parametrize("k", [512, 2048])
def test_sums_in_float16_are_not_passed_off_as_float32(k: int, step: int) -> None:
    assert "off by" in str(fails(accumulate_in(torch.float16, step), k=k))


@pytest.mark.parametrize("step", [1, 16])
def test_sums_in_float16_are_right_where_that_is_declared(step: int) -> None:
    assert 0 < check(accumulate_in(torch.float16, step), accumulate="float16", k=512).over_bound < 0.9


def test_sums_in_bfloat16_are_wrong_whatever_is_declared() -> None:
    with pytest.raises(WrongResult, match="off by"):
        check(accumulate_in(torch.bfloat16), "float16", accumulate="float16", k=512)
    assert "off by" in str(fails(accumulate_in(torch.bfloat16), "bfloat16", k=512))


def test_sums_in_float32_are_right_term_by_term() -> None:
    assert check(accumulate_in(torch.float32), k=512).over_bound < 0.9


@both_dtypes
@both_layouts
@pytest.mark.parametrize("k", [64, 512])
def test_the_last_term_is_left_out(dtype: str, layout: str, k: int) -> None:
    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        honest(out, a[:, :-1], b[:-1], alpha, beta)

    assert "off by" in str(fails(kernel, dtype, layout, k=k))


def test_a_remainder_of_k_is_left_out() -> None:
    """Right wherever K is a multiple of 8; the odd shapes find it."""

    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        k = a.shape[1] // 8 * 8
        honest(out, a[:, :k], b[:k], alpha, beta)

    assert "k=17" in str(fails(kernel))


@both_dtypes
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("instead", ["ones", "shuffled", "another row"])
def test_an_operand_is_ignored_or_mistaken(dtype: str, index: int, instead: str) -> None:
    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        operands = [a, b]
        x = operands[index]
        operands[index] = {"ones": torch.ones_like(x), "shuffled": x.flip(0), "another row": x.roll(1, 0)}[instead]
        honest(out, operands[0], operands[1], alpha, beta)

    fails(kernel, dtype)


@both_dtypes
@pytest.mark.parametrize("factor", [1.01, 0.99, -1.0, 0.5])
def test_the_result_is_scaled(dtype: str, factor: float) -> None:
    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        product = factor * alpha * (a.float() @ b.float())
        out.copy_(product + beta * out.float() if beta else product)

    assert "off by" in str(fails(kernel, dtype))


def test_the_layout_is_mistaken() -> None:
    """B's memory read as row-major, whatever its strides say."""

    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        memory = b if b.is_contiguous() else b.t().contiguous().view(b.shape)
        honest(out, a, memory, alpha, beta)

    assert check(kernel, layout="NN").over_bound < 1
    assert "off by" in str(fails(kernel, layout="TN"))


def test_a_result_that_was_remembered() -> None:
    """The first answer, given again and again."""
    answers: dict[torch.Size, Tensor] = {}

    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        if out.shape not in answers:
            honest(out, a, b, alpha, beta)
            answers[out.shape] = out.clone()
        out.copy_(answers[out.shape])

    assert fails(kernel).errors.tried == 2


def test_what_a_kernel_raises_is_not_hidden() -> None:
    def kernel(*_: object, **__: object) -> None:
        raise RuntimeError("no such luck")

    with pytest.raises(RuntimeError, match="no such luck"):
        check(kernel)


# What is tried, and what is reported


def test_a_case_is_tried_on_both_distributions_every_call_and_odd_shapes() -> None:
    case = HGEMM.case("honest", "float16", SQUARE)
    tried = trials(HGEMM, case, ANY, None, 5)
    assert {trial.distribution for trial in tried if trial.case == case} == {"uniform", "normal"}
    assert all(dict(call) in [dict(t.call) for t in tried if t.case == case] for call in HGEMM.calls)
    shapes = [dict(trial.case.shape) for trial in tried]
    assert all(dict(odd) in shapes for odd in HGEMM.odd_shapes)
    assert len({str(trial) for trial in tried}) == len(tried)
    assert len({trial.seed for trial in tried}) >= 3
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


@pytest.mark.parametrize("share", ["one element", "all"])
def test_the_errors_of_an_output_with_nan_are_not_those_of_a_right_one(share: str) -> None:
    def change(out: Tensor) -> None:
        out[: 1 if share == "one element" else None, : 1 if share == "one element" else None] = math.nan

    errors = fails(after(change)).errors
    assert not errors.over_bound <= 1 and not errors.max_abs < 1 and not errors.rel_l2 < 1


def test_the_worst_of_all_trials_is_reported() -> None:
    case = HGEMM.case("honest", "float16", SQUARE)
    alone = []
    for trial in trials(HGEMM, case, ANY, None, 0):
        _, out, (a, b) = trial.operands(HGEMM, CPU)
        exact, _ = HGEMM.reference(out.double(), a.double(), b.double(), **trial.call)
        honest(out, a, b, **trial.call)
        alone.append(float((out.double() - exact).abs().max()))
    assert len(set(alone)) > 1
    assert check(honest).max_abs == pytest.approx(max(alone))


# Breaking the rules


@pytest.mark.parametrize("offset", [-1, 0, 4000])
def test_writing_outside_the_output(offset: int) -> None:
    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        honest(out, a, b, alpha, beta)
        place = out.storage_offset() + (offset if offset < 0 else out.numel() + offset)
        out.as_strided((1,), (1,), place).fill_(1.0)

    assert "wrote outside" in str(fails(kernel))


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


def test_returning_a_tensor_instead_of_writing_the_output() -> None:
    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> Tensor:
        honest(out, a, b, alpha, beta)
        return out

    with pytest.raises(Dishonest, match="returned a Tensor"):
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
        _, _, (a, _) = Trial(case, HGEMM.calls[0], distribution, seed).operands(HGEMM, CPU)
        return a

    for distribution, deviation in (("uniform", 3**-0.5), ("normal", 1.0)):
        values = draw(distribution, 1)
        assert values.dtype == DTYPES[dtype] and values.shape == (300, 100)
        assert torch.equal(values, draw(distribution, 1)) and not torch.equal(values, draw(distribution, 2))
        assert abs(float(values.float().mean())) < 0.02
        assert float(values.float().std()) == pytest.approx(deviation, rel=0.02)
    assert float(draw("uniform", 1).abs().max()) <= 1 < float(draw("normal", 1).abs().max())


@both_layouts
def test_the_operands_of_one_trial_differ_and_the_output_is_poisoned_where_it_is_not_read(layout: str) -> None:
    case = HGEMM.case("honest", "float16", dict.fromkeys("mnk", 16), {"layout": layout})
    for call in HGEMM.calls:
        _, out, (a, b) = Trial(case, call, "normal", 0).operands(HGEMM, CPU)
        assert not torch.equal(a, b) and not torch.equal(a, b.t()) and not torch.equal(out, a)
        assert bool(out.isnan().all()) == (call["beta"] == 0) == bool(out.isnan().any())
        assert (b.stride() == (1, 16)) == (layout == "TN")
