"""A tangent is never dropped without a word: no function has a forward-mode derivative, and each says so."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import minfer
from tests.functional.calls import FUNCTIONS, calls

FIRST = {call.function: call for call in reversed(calls().values())}  # one call of each function


def test_all_functions_have_a_call() -> None:
    assert sorted(FIRST) == FUNCTIONS


@pytest.mark.parametrize("name", FIRST)
def test_a_dual_tensor_is_refused(name: str) -> None:
    call = FIRST[name]
    for _ in range(3):
        call()  # from the second call on it is prepared, and prepared calls do not see tangents
    floats = {key: x for key, x in call.tensors().items() if x.is_floating_point() and x.element_size() > 1}
    assert floats
    for key, x in floats.items():
        with forward_ad.dual_level():
            call()  # without a tangent it works
            dual = forward_ad.make_dual(x.clone(), torch.ones_like(x))
            with pytest.raises(RuntimeError, match=r"minfer\..* has no forward-mode derivative"):
                call(**{key: dual})


def test_jvp_is_refused() -> None:
    x = torch.rand(2, 64)
    with pytest.raises(RuntimeError, match=r"minfer\.softmax has no forward-mode derivative"):
        torch.func.jvp(minfer.softmax, (x,), (x,))


def test_an_op_refuses_a_dual_tensor_too() -> None:
    x = torch.rand(2, 64)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"minfer\.silu_mul has no forward-mode derivative"):
        torch.ops.minfer.silu_mul(forward_ad.make_dual(x, x), x)
