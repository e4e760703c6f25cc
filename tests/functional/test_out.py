"""`out=`, where PyTorch's function of the same name has it: written and returned, whatever it shares with the operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import minfer
from minfer.functional import library, prepared
from tests.functional.calls import half

Tensor = torch.Tensor
GIVEN: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "axpby": lambda: (torch.rand(8, 16), torch.rand(8, 16)),
    "matmul": lambda: (half(16, 16), half(16, 16)),
    "softmax": lambda: (half(8, 16),),
}


@pytest.fixture(autouse=True)
def nothing_is_prepared() -> Iterator[None]:
    library.forget()
    yield
    library.forget()


@pytest.mark.parametrize("name", GIVEN)
def test_it_is_written_and_returned(name: str) -> None:
    function, given = getattr(minfer, name), GIVEN[name]()
    wanted = function(*given)
    wide = torch.empty(2, *wanted.shape, dtype=wanted.dtype)
    places = (wanted.new_empty(wanted.shape), wide.permute(1, 2, 0)[..., 0], wide.reshape(-1)[1 : 1 + wanted.numel()])
    for out in places:
        out = out.view(wanted.shape)
        for _ in range(4):  # the last ones are prepared, where that is possible
            out.fill_(7)
            version = out._version
            assert function(*given, out=out) is out and out._version > version
            torch.testing.assert_close(out, wanted, rtol=0, atol=0)
    assert any(run is not prepared._never for of_op in prepared._remembered for runs in of_op.values() for run in runs)


@pytest.mark.parametrize("name", GIVEN)
def test_it_may_share_memory_with_an_operand(name: str) -> None:
    function, given = getattr(minfer, name), GIVEN[name]()
    wanted, count = function(*given), given[0].numel()
    for start in (0, 16, 64, count, count + 16):
        memory = torch.empty(4 * count, dtype=wanted.dtype)
        first, out = memory[:count].view(given[0].shape), memory[start : start + count].view(given[0].shape)
        apart = torch.empty_like(wanted)
        for other in (apart, apart, apart, out, out, out):  # prepared for tensors apart from each other
            first.copy_(given[0])
            torch.testing.assert_close(function(first, *given[1:], out=other), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", GIVEN)
def test_one_that_does_not_fit_is_an_error(name: str) -> None:
    function, given = getattr(minfer, name), GIVEN[name]()
    right = function(*given)
    for out in (right[:-1], right.double(), right.to("meta"), right[None]):
        with pytest.raises(
            ValueError, match=rf"^minfer.{name} takes an out of {right.dtype}, \({len(right)}, 16\) on cpu"
        ):
            function(*given, out=out)
    with pytest.raises(RuntimeError, match="has no backward"):
        function(*given, out=right.clone().requires_grad_())
    wrong: Any = [1.0]
    with pytest.raises(TypeError, match=f"minfer.{name} takes a tensor or None as out, got list"):
        function(*given, out=wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", GIVEN)
def test_it_is_an_op_that_compiles(name: str) -> None:
    function, given = getattr(minfer, name), GIVEN[name]()
    wanted = function(*given)
    op = getattr(torch.ops.minfer, {"matmul": "hgemm"}.get(name, name) + "_out").default
    more = {"axpby": (1.0, 1.0), "softmax": (None,)}.get(name, ())
    torch.library.opcheck(op, (*given, *more, torch.empty_like(wanted)))
    for backend in ("aot_eager", "inductor"):
        torch.compiler.reset()
        out = torch.empty_like(wanted)
        compiled = torch.compile(lambda *x: function(*x[:-1], out=x[-1]) + 1, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(*given, out), wanted + 1, rtol=0, atol=0)
        torch.testing.assert_close(out, wanted, rtol=0, atol=0)
