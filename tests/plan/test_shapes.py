"""What is said of sizes that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from minfer.plan import cases as matrix
from minfer.plan.config import Shape, UserError
from minfer.shapes import named_sets
from tests.plan.test_matrix import SMALL, config, refusal


def test_a_complaint_about_sizes_names_the_key_that_the_user_set_or_the_set() -> None:
    for key, device in (("cpu", "cpu"), ("gpu", "cuda")):
        with pytest.raises(UserError, match=rf"^shape\.{key}: m=0 is not a size; sizes are whole numbers from 1$"):
            matrix.plan(config(shape=Shape("squares", **{key: [SMALL | {"m": 0}]})), device)
    squares = Shape(**named_sets()["squares"] | {"op": ""})
    with pytest.raises(
        UserError, match=r"^shape set 'squares' does not fit rmsnorm: its axes are tokens, hidden, not m, n, k$"
    ):
        matrix.plan(config(op="rmsnorm", shape=squares), "cpu")


@pytest.mark.parametrize("size", [0, -8, 1.5, "8", "all", True, None, {"a": 1}, [8, 0], [[8]]], ids=repr)
def test_sizes_are_whole_numbers_from_1(size: Any) -> None:
    message = refusal(config(shapes=[SMALL | {"n": size}]))
    wrong = {"[8, 0]": "0", "[[8]]": "[8]"}.get(repr(size), repr(size))
    assert message.startswith(f"shape.cpu: n={wrong} is not a size"), message
