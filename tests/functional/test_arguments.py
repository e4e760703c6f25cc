"""Something else than a tensor as an argument of a public function is one sentence that names the argument."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import minfer
from tests.functional.calls import Call, calls

CALLS = {call.function: call for call in calls().values()}


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("wrong", (None, [1.0, 2.0], 3), ids=("None", "a list", "a number"))
def test_what_is_no_tensor_is_named(function: str, wrong: Any) -> None:
    call: Call = CALLS[function]
    for name in call.tensors():
        annotation = inspect.signature(getattr(minfer, function)).parameters[name].annotation
        if annotation not in ("Tensor", "torch.Tensor") and (wrong is None or "Lengths" in annotation):
            continue
        with pytest.raises(TypeError) as caught:
            call(**{name: wrong})
        takes = "a tensor or None" if "None" in annotation else "a tensor"
        assert str(caught.value) == f"minfer.{function} takes {takes} as {name}, got {type(wrong).__name__}"


def test_an_argument_too_few_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match=r"matmul\(\) missing 1 required positional argument: 'b'"):
        minfer.matmul(calls()["axpby"].given["a"])
