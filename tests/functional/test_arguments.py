"""A wrong type of argument raises one sentence that names the argument."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

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
        if wrong == 3 and "int" in annotation:
            continue
        with pytest.raises(TypeError) as caught:
            call(**{name: wrong})
        takes = "a tensor or None" if "None" in annotation else "a tensor"
        takes += " or a whole number" if "int" in annotation else ""
        assert str(caught.value) == f"minfer.{function} takes {takes} as {name}, got {type(wrong).__name__}"


@pytest.mark.parametrize(
    ("function", "wrong", "said"),
    [
        ("rms_norm", {"eps": None}, "a number as eps, got NoneType"),
        ("rms_norm", {"eps": torch.ones(2, 16)}, "a number as eps, got a tensor of (2, 16)"),
        ("axpby", {"alpha": "2"}, "a number as alpha, got str"),
        ("axpby", {"beta": 1j}, "a number as beta, got complex"),
        ("attention", {"causal": "yes"}, "True or False as causal, got str"),
        ("attention", {"window": 1.5}, "a whole number or None as window, got float"),
        ("attention", {"scale": "8"}, "a number or None as scale, got str"),
        ("moe_route", {"k": [1]}, "a whole number as k, got list"),
        ("quant_gemm", {"format": None}, "a string as format, got NoneType"),
        ("silu_mul_quant", {"dtype": "int8"}, "a torch.dtype as dtype, got str"),
        ("sample", {"top_k": 1.5, "temperature": 1.0}, "a whole number or a tensor as top_k, got float"),
        ("sample", {"top_p": [0.9], "temperature": 1.0}, "a number or a tensor as top_p, got list"),
        ("sample", {"generator": 3}, "a torch.Generator or None as generator, got int"),
        ("rope", {"positions": None, "start": None}, "a whole number as start, got NoneType"),
    ],
)
def test_a_setting_of_a_wrong_type_is_named(function: str, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError) as caught:
        CALLS[function](**wrong)
    assert str(caught.value) == f"minfer.{function} takes {said}"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("function", CALLS)
def test_a_tensor_that_is_not_dense_is_named(function: str) -> None:
    call = CALLS[function]
    for name, x in call.tensors().items():
        if "Lengths" in inspect.signature(getattr(minfer, function)).parameters[name].annotation:
            continue
        for wrong, got in (
            (x.to_sparse(), "the layout torch.sparse_coo"),
            (torch.nested.nested_tensor([x]), "a nested tensor"),
        ):
            with pytest.raises(TypeError) as caught:
                getattr(minfer, function)(**call.given | {name: wrong})
            assert str(caught.value) == f"minfer.{function} takes a dense tensor as {name}, got {got}"


def test_an_error_of_another_argument_is_its_own() -> None:
    """PyTorch takes a tensor with one element as a number, so it is not what was wrong."""
    with pytest.raises(ValueError, match=r"^minfer.axpby takes b of float32"):
        CALLS["axpby"](alpha=torch.tensor(2.0), b=torch.rand(3))


def test_an_argument_too_few_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match=r"matmul\(\) missing 1 required positional argument: 'b'"):
        minfer.matmul(calls()["axpby"].given["a"])
