"""`minfer.moe_route`: that it is an op like PyTorch's own, and that the op's checks see what is wrong."""

from __future__ import annotations

import pytest
import torch

from minfer import moe_route, ops
from minfer.bench.operands import Operands
from minfer.ops.moe_route import CHECKS, route


def logits(tokens: int = 9, experts: int = 16, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(3)).to(dtype)


def agree(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for result, right in zip(found, expected, strict=True):
        torch.testing.assert_close(result, right)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(9, 16, 2), (1, 1, 1), (33, 130, 8), (2, 7, 7)])
def test_it_routes(tokens, experts, k, normalize):
    x = logits(tokens, experts)
    weights, indices, counts, offsets, order = moe_route(x, k, normalize)
    agree((weights, indices, counts, offsets, order), route(x, k, normalize))
    experts_in_order = indices.flatten()[order.long()]
    assert experts_in_order.equal(experts_in_order.sort().values) and int(offsets[-1]) == tokens * k
    assert weights.dtype == torch.float32 and {t.dtype for t in (indices, counts, offsets, order)} == {torch.int32}


def test_logits_that_lie_badly():
    x = logits(12, 40)
    for view in (x[1:, 3:19], x[:, ::2], x.t(), x[:1].expand(5, -1), x.flip(0)):
        agree(moe_route(view, 3), route(view, 3, True))


def test_no_tokens_leave_no_counts():
    weights, indices, counts, offsets, order = moe_route(logits(0, 8), 2)
    assert weights.shape == indices.shape == (0, 2) and order.shape == (0,)
    assert not counts.any() and not offsets.any() and counts.shape == offsets.shape == (8,)


def test_extreme_logits():
    x = logits(4, 8)
    x[0, :7] = -torch.inf
    x[1, 2] = 3e38
    x[2] = 0.0
    x[3, 5] = torch.nan
    weights, indices, counts, _, order = moe_route(x, 3)
    assert weights[0].tolist() == [1.0, 0.0, 0.0] and indices[0, 0] == 7
    assert weights[1].tolist() == [1.0, 0.0, 0.0] and indices[1, 0] == 2
    torch.testing.assert_close(weights[2], torch.full((3,), 1 / 3))
    assert weights[3].isnan().all()
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 8 for row in indices.tolist())
    assert int(counts.sum()) == 12 and sorted(order.tolist()) == list(range(12))


def test_it_is_an_op_like_pytorchs_own():
    torch.library.opcheck(torch.ops.minfer.moe_route.default, (logits(), 2, True))
    compiled = torch.compile(lambda x: moe_route(x, 2), backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (6, 7):
        agree(compiled(logits(tokens)), route(logits(tokens), 2, True))


def test_mistakes_are_a_sentence_each():
    x = logits()
    for wrong, k, said in (
        (x[0], 2, r"takes logits of \(tokens, experts\), got \(16,\)$"),
        (x.half(), 2, "takes logits of float32 or bfloat16, got torch.float16$"),
        (x, 0, "takes k from 1 to the 16 experts, got 0"),
        (x, 17, "takes k from 1 to the 16 experts, got 17"),
    ):
        with pytest.raises(ValueError, match=f"^minfer.moe_route {said}"):
            moe_route(wrong, k)
    with pytest.raises(RuntimeError, match=r"^minfer.moe_route has no backward: call it under torch.no_grad"):
        moe_route(x.requires_grad_(), 2)


def test_each_check_sees_a_wrong_element():
    op = ops.get("moe_route")
    case = op.case("torch", "float32", {"tokens": 9, "experts": 16, "k": 3})
    t = Operands(op, case, 1, "normal", torch.device("cpu")).tensors
    for tensor, right in zip(t.values(), route(t["logits"], 3, True), strict=False):
        tensor.copy_(right)
    assert all(bool(check(case, t).all()) for check in CHECKS.values())
    for name, check in CHECKS.items():
        wrong = t[name].flatten()
        before, wrong[1] = wrong.clone(), wrong[0]  # twice the same, or one count for another
        if not wrong.equal(before):
            assert not bool(check(case, t).all()), name
        wrong.copy_(before)
        wrong[0] = 1 << 30
        assert not bool(check(case, t).all()), name
        wrong.copy_(before)
    t["order"][:2] = t["order"][:2].flip(0)  # by expert still, where the first has two, and not by token
    assert not bool(CHECKS["order"](case, t).all())
