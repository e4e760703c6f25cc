"""`minfer.axpby`: an op like PyTorch's own."""

from __future__ import annotations

import pytest
import torch

from minfer import axpby


@pytest.mark.parametrize("shape", [(5, 24), (77,), (), (2, 3, 4), (0,)])
def test_it_agrees_with_the_definition(shape):
    a, b = torch.randn(shape), torch.randn(shape)
    torch.testing.assert_close(axpby(a, b, 0.75, -1.5), 0.75 * a - 1.5 * b)
    torch.testing.assert_close(axpby(a, b), a + b)


def test_operands_that_lie_badly_are_copied():
    wide = torch.randn(7, 29)
    for a, b in (
        (wide[1:, 3:27], wide[:6, 1:25]),
        (wide[:, ::2], wide.flip(0)[:, :15]),
        (wide[:1].expand(6, -1), wide[1:]),
        (wide.t(), wide.t()),
        (wide.flatten()[1:9], wide.flatten()[:8]),
    ):
        torch.testing.assert_close(axpby(a, b, 2.0, 0.5), 2 * a + 0.5 * b)


def test_a_factor_of_zero_hides_no_nan():
    assert bool(axpby(torch.ones(8), torch.full((8,), float("nan")), 1.0, 0.0).isnan().all())


def test_it_is_an_op_like_pytorchs_own():
    torch.library.opcheck(torch.ops.minfer.axpby.default, (torch.randn(6, 24), torch.randn(6, 24), 0.5, 2.0))


def test_it_compiles_whole_and_for_any_shape():
    compiled = torch.compile(lambda a, b: axpby(a, b, 2.0, 3.0) + 1, backend="aot_eager", fullgraph=True, dynamic=True)
    for count in (6, 7):
        a, b = torch.randn(count), torch.randn(count)
        torch.testing.assert_close(compiled(a, b), 2 * a + 3 * b + 1)


def test_mistakes_are_a_sentence_each():
    a, b = torch.randn(6, 24), torch.randn(6, 24)
    for mine, theirs, said in (
        (a, b[:5], r"takes b of float32 and the shape \(6, 24\), got torch.float32, \(5, 24\)"),
        (a, b.half(), r"takes b of float32 and the shape \(6, 24\), got torch.float16, \(6, 24\)"),
        (a, b.to("meta"), "takes b on the device of a, cpu, got meta"),
    ):
        with pytest.raises(ValueError, match=f"^minfer.axpby {said}$"):
            axpby(mine, theirs)
    with pytest.raises(RuntimeError, match=r"^minfer.axpby has no backward: call it under torch.no_grad\(\)"):
        axpby(a.requires_grad_(), b)
