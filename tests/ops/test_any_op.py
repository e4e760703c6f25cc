"""Ops of odd kinds, each verified and timed on the CPU: their right kernel is taken for right, and a wrong one is seen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from minfer import build
from minfer.bench import clock
from minfer.bench.errors import run_reference
from minfer.bench.measure import Bench
from minfer.bench.operands import change
from minfer.bench.timing import Timing
from minfer.bench.verify import Inputs, WrongResult, verify
from minfer.ops import (
    Case,
    Op,
    Returning,
    exact,
    fixed,
    floats,
    given,
    inout,
    integers,
    out,
    page_table,
    rounded,
    size,
    within,
)
from minfer.ops.op import REGISTERED
from minfer.plan.statement import rehearse

pytestmark = pytest.mark.usefixtures("one_thread")
BRIEF = Timing(name="t", warmup_s=0, looks=[4], precision=0.5, cold_cap_s=2, least_rounds=3, steady_block_s=0.005)
CPU = torch.device("cpu")
Tensor = torch.Tensor


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[Op, Case]]]:
    """An op of 16 elements, and its case; forgotten after the test."""

    def made(
        tensors: Callable[[int], list[Any]], reference: Any, kernel: Any, dtype: str = "float32", **about: Any
    ) -> Any:
        op = Op("odd", axes={"n": size(64)}, tensors=lambda case: tensors(case["n"]), reference=reference, **about)
        op.torch("torch", kernel, baseline=True, dtypes=(dtype,))
        return op, op.case("torch", dtype, {"n": 16})

    yield made
    REGISTERED.pop("odd", None)


def copies(y: Tensor, x: Tensor) -> None:
    y.copy_(x)


def writes_nothing(*tensors: Tensor) -> None: ...


def all_threes(y: Tensor) -> None:
    y.fill_(3)


def largest(y: Tensor, x: Tensor) -> None:
    y.copy_(x.argmax())


def first_page(y: Tensor, table: Tensor, cache: Tensor) -> None:
    y.copy_(cache[table[0, 0].long()])


def adds_up(y: Tensor, x: Tensor) -> None:
    y.copy_(x.cumsum(0))


def flips(x: Tensor) -> None:
    x.bitwise_xor_(1)


def three_kinds(y: Tensor, half: Tensor, order: Tensor, x: Tensor) -> None:
    y.copy_(x), half.copy_(x), order.copy_(x.argsort(stable=True))


def as_it_is(case: Case, t: Any) -> Any:
    return {"y": exact(t["x"])}


def near(bound: Tensor) -> Callable[[Case, Any], Any]:
    return lambda case, t: {"y": within(t["x"], bound.expand(t["x"].shape) if bound.dtype == torch.float64 else bound)}


def in_pages(n: int) -> list[Any]:
    poison = floats(poison=lambda made: (torch.arange(3) != made["table"][0, 0])[:, None])
    table = given("table", 1, 2, dtype="int32", fill=page_table([1], 3, ["cache"]))
    return [out("y", n), table, given("cache", 3, n, fill=poison)]


def three_outputs(n: int) -> list[Any]:
    return [
        out("y", n, dtype="bfloat16"),
        out("half", n, dtype="float16"),
        out("order", n, dtype="int64"),
        given("x", n),
    ]


def of_three(case: Case, t: Any) -> Any:
    x = t["x"]
    return {"y": rounded(x, 0), "half": rounded(x, 0), "order": exact(x.argsort(stable=True))}


KINDS: dict[str, dict[str, Any]] = {
    "fp8 in and out": {"dtype": "float8_e4m3fn"},
    "fp8 of the other kind": {"dtype": "float8_e5m2"},
    "fp8 whole numbers": {
        "dtype": "float8_e4m3fn",
        "tensors": lambda n: [out("y", n), given("x", n, fill=integers(-4, 5))],
    },
    "an fp8 cache in pages": {
        "dtype": "float8_e4m3fn",
        "tensors": in_pages,
        "kernel": first_page,
        "reference": lambda case, t: {"y": exact(t["cache"][t["table"][0, 0].long()])},
    },
    "integers only": {
        "dtype": "int32",
        "tensors": lambda n: [out("y", n, dtype="int64"), given("x", n, fill=integers(-5, 6))],
        "kernel": adds_up,
        "reference": lambda case, t: {"y": exact(t["x"].cumsum(0))},
    },
    "nothing but bytes in place, column-major": {
        "dtype": "uint8",
        "tensors": lambda n: [inout("x", n, 5, order=(1, 0), fill=integers(0, 256))],
        "kernel": flips,
        "reference": lambda case, t: {"x": exact(t["x"] ^ 1)},
    },
    "layouts that differ": {
        "tensors": lambda n: [out("y", n, 3, 5, order=(2, 0, 1)), given("x", n, 3, 5, order=(1, 2, 0))],
    },
    "outputs of three dtypes": {"tensors": three_outputs, "kernel": three_kinds, "reference": of_three},
    "no dimensions": {"tensors": lambda n: [out("y"), given("x")]},
    "one element": {"tensors": lambda n: [out("y", 1), given("x", 1)]},
    "no input": {
        "tensors": lambda n: [out("y", n)],
        "kernel": all_threes,
        "reference": lambda case, t: {"y": exact(torch.full((case["n"],), 3.0))},
    },
    "a table of sequences without pages": {
        "tensors": lambda n: [
            out("y", n),
            given("x", n),
            given("table", 2, 2, dtype="int64", fill=page_table([0, 0], 3, [])),
        ],
        "kernel": lambda y, x, table: copies(y, x),
    },
    "an empty input": {
        "tensors": lambda n: [out("y", n), given("x", n), given("none", 0, n, dtype="int32", fill=fixed([]))],
        "kernel": lambda y, x, none: copies(y, x),
    },
    "a bound that is one number": {"reference": near(torch.tensor(1e-3))},
    "a bound that is expanded": {"reference": near(torch.tensor(1e-3, dtype=torch.float64))},
    "only a check": {
        "tensors": lambda n: [out("y", 1, dtype="int64"), given("x", n)],
        "kernel": largest,
        "reference": lambda case, t: {},
        "checks": {"y": lambda case, t: t["x"][t["y"].clamp(0, case["n"] - 1)] == t["x"].max()},
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_op_of_any_kind(kind: str, make: Callable[..., tuple[Op, Case]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "CPU_FLUSH_LIMIT", 1 << 20)  # no time is of interest
    about = {"tensors": lambda n: [out("y", n), given("x", n)], "reference": as_it_is, "kernel": copies} | KINDS[kind]
    op, case = make(**about)
    rehearse(op, [case])
    kernel = op.kernels["torch"]
    function = build.function(kernel)
    assert verify(op, case, kernel, function, CPU, None, 5).over_bound <= 1
    bench = Bench(op, case, function, function, CPU, 5, sets=4)
    assert len(bench.cold(BRIEF)) >= BRIEF.least_rounds
    bench.steady(BRIEF, lambda: None)
    bench.check_operands()
    with pytest.raises(WrongResult):
        verify(op, case, kernel, writes_nothing, CPU, None, 5)


def test_outputs_without_elements_are_right(make: Callable[..., tuple[Op, Case]]) -> None:
    op, case = make(lambda n: [out("y", 0), given("x", 0)], as_it_is, writes_nothing)
    verify(op, case, op.kernels["torch"], writes_nothing, CPU, None, 5)
    assert len(Bench(op, case, writes_nothing, writes_nothing, CPU, 5).cold(BRIEF)) >= BRIEF.least_rounds


def test_a_change_of_the_ops_own_differs_from_round_to_round(make: Callable[..., tuple[Op, Case]]) -> None:
    def anew(case: Case, t: Any, draw: Any) -> Any:
        before = t["x"].clone()
        t["x"].copy_(draw.floats(before.shape, before.device))
        return lambda: t["x"].copy_(before)

    op, case = make(lambda n: [out("y", n), given("x", n)], as_it_is, copies, change=anew)
    x = Inputs(case, "normal", 1).operands(op, CPU).named("in")
    seen = []
    for number in (1, 2, 1):
        undo = change(op, case, x, number, "normal")
        seen.append(x["x"].clone())
        undo()
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], seen[1])


MISSTATED = {
    "lacks its output y": lambda case, t: {},
    "returns z, which is not an output": lambda case, t: as_it_is(case, t) | {"z": exact(t["x"])},
    "as a Tensor; return exact": lambda case, t: {"y": t["x"]},
    r"the shape \(1,\), but the output has \(16,\)": lambda case, t: {"y": exact(t["x"][:1])},
    "returns a NoneType": lambda case, t: None,
}


@pytest.mark.parametrize("words", MISSTATED)
def test_a_reference_that_does_not_fit_is_refused(words: str, make: Callable[..., tuple[Op, Case]]) -> None:
    op, case = make(lambda n: [out("y", n), given("x", n)], MISSTATED[words], copies)
    with pytest.raises(ValueError, match=words):
        run_reference(op, case, Inputs(case, "normal", 1).operands(op, CPU).tensors)


def test_whole_numbers_have_no_bound_and_are_not_filled_with_floats() -> None:
    with pytest.raises(ValueError, match="say how it is filled"):
        given("x", 4, dtype="int8")
    with pytest.raises(ValueError, match="has the dtype fp32; there are float16"):
        given("x", 4, dtype="fp32")
    with pytest.raises(ValueError, match="sizes are whole numbers"):
        out("y", 4.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not name each of its axes once"):
        out("y", 4, 4, order=(0, 0))


def test_a_bound_of_whole_numbers_is_refused(make: Callable[..., tuple[Op, Case]]) -> None:
    tensors = lambda n: [out("y", n, dtype="int32"), given("x", n)]
    op, case = make(tensors, lambda case, t: {"y": rounded(t["x"], 1)}, copies)
    with pytest.raises(ValueError, match=r"a bound, but int32 is not rounded; return exact"):
        run_reference(op, case, Inputs(case, "normal", 1).operands(op, CPU).tensors)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "NoneType"),
        ([torch.ones(4, 4)], "list"),
        (torch.ones(4), "(4,)"),
        ((torch.ones(4, 4), torch.ones(4, 4)), "(4, 4), (4, 4)"),
    ],
)
def test_what_a_returning_function_did_not_return_is_named(returned: object, said: str) -> None:
    why = re.escape(f"it returned {said}; with returns=(0,) it must return tensors of the shapes (4, 4)")
    with pytest.raises(ValueError, match=f"^{why}$"):
        Returning(lambda y: returned, (0,))(torch.empty(4, 4))
