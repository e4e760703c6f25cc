"""What the functions take, from their own tables: drawn tensors that fit are accepted, and any other is named in a sentence."""

from __future__ import annotations

import pkgutil
import random
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import pytest
import torch

import minfer.functional
from minfer.functional import quantised
from minfer.functional.contract import LEAD, Contract, Takes
from tests.functional.calls import FUNCTIONS

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.int64, torch.uint8)


def contracts() -> Iterator[Contract]:
    for module in pkgutil.iter_modules(minfer.functional.__path__):
        for value in vars(import_module(f"minfer.functional.{module.name}")).values():
            for each in value.values() if isinstance(value, dict) else [value]:
                if isinstance(each, Contract):
                    yield each
    for form in ("q8_0", "q4_0", "q4_k", "q6_k", "int4_g64", "int4_g128", "fp8"):
        yield quantised._contract("dequant", form, torch.bfloat16, False)
        yield quantised._contract("quant_gemm", form, torch.float16, False)
    yield quantised._contract("quant_gemm", "fp8", torch.bfloat16, True)


ALL = list({id(each): each for each in contracts()}.values())


def draw_sizes(rng: random.Random, contract: Contract) -> dict[str, Any]:
    axes = dict.fromkeys(axis for line in contract.tensors for size in line.sizes for axis in size.axes)
    sizes: dict[str, Any] = {LEAD: tuple(rng.choice((0, 1, 3)) for _ in range(rng.randint(0, 2)))}
    for axis in axes:
        rule = contract.rules.get(axis, 0)
        if isinstance(rule, tuple | range):
            sizes[axis] = rng.choice(rule[:8])
        elif isinstance(rule, int):
            sizes[axis] = max(rule, rng.choice((0, 1, 2, 5, 8)))
    for axis in axes:
        if isinstance(divided := contract.rules.get(axis), str):
            sizes[axis] = rng.choice([n for n in range(1, 9) if sizes[divided] % n == 0])
    return sizes


def draw(rng: random.Random, contract: Contract, sizes: Mapping[str, Any]) -> list[torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    found = []
    for line in contract.tensors:
        dtype = rng.choice([made[each].dtype if isinstance(each, str) else each for each in line.dtypes])
        made[line.name] = torch.empty(shape_of(line, sizes), dtype=dtype, device="meta")
        found.append(made[line.name])
    return found


def shape_of(line: Takes, sizes: Mapping[str, Any]) -> tuple[int, ...]:
    return (*(sizes[LEAD] if line.lead else ()), *(size.of(sizes) for size in line.sizes))


def test_every_function_has_a_table() -> None:
    calls_others = {"cascade_attention"}  # which check what it hands them
    assert {each.function for each in ALL} == set(FUNCTIONS) - calls_others


@pytest.mark.parametrize("contract", ALL, ids=lambda each: each.function)
def test_what_fits_is_taken_and_what_does_not_is_named(contract: Contract) -> None:
    rng = random.Random(contract.function)
    for _ in range(20):
        sizes = draw_sizes(rng, contract)
        given = draw(rng, contract, sizes)
        try:
            found = contract.check(*given)
        except ValueError as error:  # a size of 0 does not decide an axis that is multiplied by another
            assert 0 in sizes.values(), error
            continue
        assert found.items() <= sizes.items()
        for place, line in enumerate(contract.tensors):
            wrong = given[place]
            others = [x for x in DTYPES if x not in line.dtypes and x not in {y.dtype for y in given}]
            for changed in (
                wrong.to(rng.choice(others)),
                torch.empty(wrong.shape, dtype=wrong.dtype) if place else None,
                wrong[None] if not line.lead else None,
            ):
                if changed is None:
                    continue
                with pytest.raises(ValueError) as caught:
                    contract.check(*given[:place], changed, *given[place + 1 :])
                said = rf"minfer\.{contract.function} takes {line.name} (of|on the device of) .+, got .+"
                assert re.fullmatch(said, str(caught.value))


def test_what_is_left_out_is_not_checked_and_results_follow_the_table() -> None:
    contract = Contract(
        "f",
        """
        x: float16 | bfloat16 (..., 2*half)
        w: x (half, n)
        gain: float32 (n)
        -> x (..., n)
        -> int32 (half*n)
        """,
        half=(2, 3),
        n="half",
    )
    x, w = torch.empty(4, 7, 6).half(), torch.empty(3, 3).half()
    assert contract.check(x, w, None) == {LEAD: (4, 7), "half": 3, "n": 3}
    first, second = contract.make(x, w, None)
    assert (first.shape, first.dtype, second.shape, second.dtype) == ((4, 7, 3), x.dtype, (9,), torch.int32)
    for given, said in (
        ((x, w, torch.empty(3).int()), "gain of float32 and the shape (3,), got torch.int32, (3,)"),
        ((x[..., :5], w), "x of (..., 2*half), got (4, 7, 5)"),
        ((x, w[:2]), "w of (3, n), got (2, 3)"),
        ((torch.empty(8).half(), w), "x whose half is 2 or 3, got 4"),
        ((x[..., :4], torch.empty(2, 3).half()), "w whose n divide the 2 half, got 3"),
        ((x.float(), w), "x of float16 or bfloat16, got torch.float32"),
        ((x, w.bfloat16()), "w of the dtype of x, torch.float16, got torch.bfloat16"),
        ((x, w.to("meta")), "w on the device of x, cpu, got meta"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(f'minfer.f takes {said}')}$"):
            contract.check(*given)
