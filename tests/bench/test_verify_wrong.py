"""Verification against every way of being wrong that we know of."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from minfer.bench.errors import describe_wrong, run_reference
from minfer.bench.verify import Function, WrongResult
from minfer.ops import Case, Op, exact, given, integers, out, size
from minfer.ops.bounds import within
from minfer.ops.op import REGISTERED
from tests.honest import (
    HGEMM,
    SQUARE,
    Tensor,
    after,
    both_dtypes,
    both_layouts,
    check,
    check_right,
    fails,
    honest,
)

pytestmark = pytest.mark.usefixtures("one_thread")


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

    assert f"changed its input {'ab'[index]}" in str(fails(kernel))


def test_an_input_is_changed_so_that_the_result_fits() -> None:
    """Checking the result against the inputs as they are afterwards would be fooled."""

    def kernel(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        a.zero_()
        out.zero_()

    assert "changed its input a" in str(fails(kernel))


@both_dtypes
@pytest.mark.parametrize("where", [(0, 0), (23, 23), (7, 11)])
def test_one_element_is_wrong(dtype: str, where: tuple[int, int]) -> None:
    def change(out: Tensor) -> None:
        out[where] += 0.25

    message = str(fails(after(change), dtype, k=16))
    assert "an element of the output is off by" in message
    found = re.search(
        r"; 1 of 576 elements is wrong, the first at (.*): got (.*), expected (.*), bound (\S+) \(", message
    )
    assert found and found[1] == str(list(where)), message
    got, right, bound = map(float, found.groups()[1:])
    assert got - right == pytest.approx(0.25, abs=2 * bound) and 0 < bound < 0.1


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_one_element_is_infinite(value: float) -> None:
    def change(out: Tensor) -> None:
        out[3, 3] = value

    assert "off by inf" in str(fails(after(change)))


def test_one_element_is_nan() -> None:
    def change(out: Tensor) -> None:
        out[3, 3] = math.nan

    message = str(fails(after(change)))
    assert (
        "0.2% of the output is NaN" in message and "1 of 576 elements is wrong, the first at [3, 3]: got nan" in message
    )


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


def odd_op(**about: Any) -> tuple[Op, Case]:
    """An op with one output of whole numbers, and a case of it."""
    op = Op(
        "doubled",
        axes={"rows": size(64), "n": size(64)},
        tensors=lambda case: [
            out("places", case["rows"], case["n"], dtype="int32"),
            given("x", case["rows"], case["n"], fill=integers(-9, 10)),
        ],
        **about,
    )
    del REGISTERED[op.name]
    return op, Case("doubled", "mine", "float32", {}, {"rows": 3, "n": 4})


def test_an_output_that_must_be_exact_says_where_it_is_not() -> None:
    x = torch.arange(12.0).view(3, 4)
    places = (2 * x).int()
    places[1, 2] += 5
    places[2, 3] = -1
    op, case = odd_op(reference=lambda case, t: {"places": exact((2 * t["x"]).int())})
    tensors = {"x": x, "places": places}
    said = describe_wrong(op, case, "places", tensors, run_reference(op, case, tensors))
    assert said == "2 of 12 elements are wrong, the first at [1, 2]: got 17, expected 12"


def test_an_output_with_a_check_says_where_the_check_refuses_it() -> None:
    x = torch.arange(12.0).view(3, 4)
    places = x.int()
    places[2, 0] = 99
    about = {"reference": lambda case, t: {}, "checks": {"places": lambda case, t: t["places"] == t["x"]}}
    op, case = odd_op(**about)
    said = describe_wrong(op, case, "places", {"x": x, "places": places}, {})
    assert said == "1 of 12 elements is wrong, the first at [2, 0]: got 99"


def test_a_whole_beyond_its_limit_says_where_its_largest_error_is() -> None:
    right = within(torch.zeros(4, 3, dtype=torch.float64), torch.full((4, 3), 1.0, dtype=torch.float64))
    result = torch.full((4, 3), 0.5)
    result[1, 2] = -0.75
    said = describe_wrong(HGEMM, HGEMM.case("torch", "float32", SQUARE), "out", {"out": result}, {"out": right})
    assert said == "the largest error is at [1, 2]: got -0.75, expected 0, bound 1"


def test_a_failing_test_of_a_kernel_ends_with_what_is_wrong() -> None:
    op, case = odd_op(reference=lambda case, t: {"places": exact((2 * t["x"]).int())})
    x = torch.ones(3, 4)
    check_right(op, case, {"x": x}, {"places": (2 * x).int()})
    with pytest.raises(pytest.fail.Exception, match=r"output places: 12 of 12 elements are wrong, the first at .0, 0."):
        check_right(op, case, {"x": x}, {"places": x.int()})
