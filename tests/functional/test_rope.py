"""`minfer.rope` and `minfer.rope_`: ops like PyTorch's own, one with a backward, one in place."""

from __future__ import annotations

import pytest
import torch

from minfer import ops, rope, rope_

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STYLES = [False, True]


def tables(rows: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(rows)[:, None] * 100.0 ** (-torch.arange(half) / half)
    return angles.cos(), angles.sin()


def eager(q, k, cos, sin, positions=None, *, start=0, interleaved=False):
    """In the formula of complex numbers, which the op's reference does not use."""
    rows = torch.arange(start, start + q.shape[-3]) if positions is None else positions.long()
    angle = torch.complex(cos.double(), sin.double())[rows].unsqueeze(-2)

    def one(x):
        wide, half = x.double(), cos.shape[1]
        rotated = wide[..., : 2 * half]
        pairs = rotated.unflatten(-1, (half, 2)) if interleaved else rotated.unflatten(-1, (2, half)).transpose(-1, -2)
        turned = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * angle)
        turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
        return torch.cat((turned, wide[..., 2 * half :]), -1).to(x.dtype)

    return one(q), one(k)


def pair(*shape: int, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(shape).to(dtype), torch.randn(*shape[:-2], kv_heads, shape[-1]).to(dtype)


def check(found, wanted) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", STYLES)
@pytest.mark.parametrize(
    ("shape", "half", "kv_heads"),
    [
        ((2, 5, 3, 32), 16, 1),
        ((5, 3, 40), 8, 2),
        ((1, 1, 1, 6), 3, 0),
        ((2, 3, 4, 14), 5, 4),
        ((0, 5, 3, 32), 16, 1),
        ((2, 0, 3, 32), 8, 1),
    ],
)
def test_it_agrees_with_the_definition(shape, half, kv_heads, interleaved, dtype):
    q, k = pair(*shape, kv_heads=kv_heads, dtype=dtype)
    cos, sin = tables(12, half)
    given = torch.randint(0, 12, shape[:-2], dtype=torch.int32)
    for how in ({}, {"start": 7}, {"positions": given}):
        wanted = eager(q, k, cos, sin, interleaved=interleaved, **how)
        found = rope(q, k, cos, sin, interleaved=interleaved, **how)
        check(found, wanted)
        mine = q.clone(), k.clone()
        assert all(a is b for a, b in zip(rope_(*mine, cos, sin, interleaved=interleaved, **how), mine, strict=True))
        check(mine, wanted)


def test_tensors_that_lie_badly():
    """Parts of a projection and transposed heads, which are read as they lie, and what must be copied."""
    cos, sin = tables(6, 16)
    both = torch.cat(tables(6, 16), 1)
    projection = torch.randn(2, 6, 7, 32).half()
    wide = torch.randn(2, 6, 4, 41).half()
    for q, k in (
        (projection[:, :, :4], projection[:, :, 4:6]),
        (projection.transpose(1, 2).contiguous().transpose(1, 2)[:, :, :4], projection[:, :, 4:6]),
        (wide[:, :, :3, 3:35], wide[:, :, 3:, 1:33]),
        (projection.flip(1), projection.transpose(0, 3).contiguous().transpose(0, 3)),
    ):
        wanted = eager(q, k, cos, sin)
        check(rope(q, k, cos, sin), wanted)
        check(rope(q, k, both[:, :16], both[:, 16:]), wanted)
        check(rope(q, k, cos.t().contiguous().t(), sin), wanted)
        beside = projection[:, :, 6].clone(), wide[..., 35:].clone()
        rope_(q, k, cos, sin)
        check((q, k), wanted)
        assert torch.equal(projection[:, :, 6], beside[0]) and torch.equal(wide[..., 35:], beside[1])
    expanded = torch.randn(1, 1, 4, 32).expand(2, 6, 4, 32)
    check(rope(expanded, expanded, cos, sin), eager(expanded, expanded, cos, sin))
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        rope_(expanded, expanded[:], cos, sin)


@pytest.mark.parametrize("interleaved", STYLES)
def test_a_position_without_a_row_gives_nan_and_reads_nothing(interleaved):
    q, k = pair(1, 4, 3, 24)
    cos, sin = tables(9, 8)
    positions = torch.tensor([[0, 9, -1, 8]], dtype=torch.int32)
    missing = torch.tensor([False, True, True, False])
    kept = positions.clamp(0, 8)
    for found, right, x in zip(
        rope(q, k, cos, sin, positions, interleaved=interleaved),
        eager(q, k, cos, sin, kept, interleaved=interleaved),
        (q, k),
        strict=True,
    ):
        assert bool(found[:, missing, :, :16].isnan().all())
        torch.testing.assert_close(found[:, ~missing], right[:, ~missing])
        assert torch.equal(found[..., 16:], x[..., 16:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", STYLES)
def test_its_gradients_are_those_of_the_definition(interleaved, dtype):
    cos, sin = tables(9, 8)
    inputs = pair(2, 5, 3, 24, dtype=dtype)
    upstream = [torch.randn_like(x) for x in inputs]
    positions = torch.randint(0, 9, (2, 5), dtype=torch.int32)
    found = []
    for function in (rope, eager):
        leaves = [x.clone().requires_grad_() for x in inputs]
        results = function(*leaves, cos, sin, positions, interleaved=interleaved)
        torch.autograd.backward(results, upstream)
        found.append([leaf.grad for leaf in leaves])
    check(*found)


def test_one_of_two_results_may_be_unused_and_a_gradient_may_be_expanded():
    cos, sin = tables(5, 8)
    q, k = (x.requires_grad_() for x in pair(2, 5, 3, 16))
    rope(q, k, cos, sin)[0].sum().backward()
    others = q.detach().clone().requires_grad_()
    eager(others, k.detach(), cos, sin)[0].sum().backward()
    torch.testing.assert_close(q.grad, others.grad)
    assert k.grad is None or not bool(k.grad.any())


def test_backward_has_the_rotation_as_its_own():
    """A backward of float32 is not fine enough for gradgradcheck; it is linear, so that one product shows it."""
    cos, sin = tables(5, 8)
    q, k = (x.requires_grad_() for x in pair(2, 5, 3, 16))
    weights = [torch.randn_like(x).requires_grad_() for x in (q, k)]
    first = torch.autograd.grad(rope(q, k, cos, sin), (q, k), weights, create_graph=True)
    other = [torch.randn_like(x) for x in (q, k)]
    second = torch.autograd.grad(first, weights, other)
    check(second, eager(*other, cos, sin))


@pytest.mark.parametrize("interleaved", STYLES)
def test_the_reference_of_backward_is_the_gradient_of_that_of_forward(interleaved):
    op = ops.get("rope")
    shape = dict(zip(op.axes, (2, 3, 2, 1, 6, 4), strict=True))
    prefix = "interleaved" if interleaved else ""
    names = {"forward": prefix or "forward", "backward": f"{prefix}_backward" if prefix else "backward"}
    cos, sin = (table.double() for table in tables(3, 2))
    rest = {"positions": torch.empty(2, 0, dtype=torch.int32), "cos": cos, "sin": sin}

    def reference(call, q, k):
        case = op.case("torch", "float32", shape, {"place": "out", "call": names[call]})
        found = op.reference(case, {"q": q, "k": k} | rest, **op.call(case))
        return found["q_out"].value, found["k_out"].value

    class Reference(torch.autograd.Function):
        @staticmethod
        def forward(context, q, k):
            return reference("forward", q, k)

        @staticmethod
        def backward(context, dq, dk):
            return reference("backward", dq, dk)

    inputs = [torch.randn(2, 3, heads, 6, dtype=torch.float64).requires_grad_() for heads in (2, 1)]
    assert torch.autograd.gradcheck(Reference.apply, inputs)


def test_in_place_is_refused_where_a_gradient_would_be_wrong():
    cos, sin = tables(5, 8)
    q, k = pair(2, 5, 3, 16)
    weight = torch.ones(16, requires_grad=True)
    for mine, theirs in ((q * weight, k), (q, k * weight)):
        with pytest.raises(
            RuntimeError, match=r"^minfer\.rope_ would overwrite q and k, which need a gradient: use minfer"
        ):
            rope_(mine, theirs, cos, sin)
    with pytest.raises(RuntimeError, match=r"^minfer\.rope has no gradient of cos and sin: give it detached tables$"):
        rope(q, k, cos.requires_grad_(), sin)
    activation = q * weight
    saved = activation.square().sum()  # keeps the activation for its backward
    with torch.no_grad():
        rope_(activation, k, cos, sin)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@pytest.mark.parametrize("positions", [None, torch.tensor([[4, 0, 3], [2, 2, 1]], dtype=torch.int32)])
def test_they_are_ops_like_pytorchs_own(positions):
    cos, sin = tables(5, 8)
    q, k = pair(2, 3, 3, 16, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.minfer.rope_.default, (q, k, cos, sin, positions, False))
    torch.library.opcheck(torch.ops.minfer.rope_backward.default, (q, k, cos, sin, positions, True))
    torch.library.opcheck(
        torch.ops.minfer.rope.default, (q.requires_grad_(), k.requires_grad_(), cos, sin, positions, False)
    )


def test_they_compile_whole_and_for_any_shape():
    def both(q, k, cos, sin):
        q, k = rope(q, k, cos, sin, start=1)
        with torch.no_grad():
            mine = q.clone(), k.clone()
            rope_(*mine, cos, sin, interleaved=True)
        return q, k, *mine

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True, dynamic=True)
    cos, sin = tables(9, 8)
    for seq in (5, 6):
        leaves = [x.requires_grad_() for x in pair(2, seq, 3, 16)]
        found = compiled(*leaves, cos, sin)
        wanted = eager(*leaves, cos, sin, start=1)
        check(found[:2], wanted)
        check(found[2:], eager(*(x.detach() for x in wanted), cos, sin, interleaved=True))
        gradients = [torch.autograd.grad(sum(x.sum() for x in results), leaves) for results in (found[:2], wanted)]
        check(*gradients)


def test_mistakes_are_a_sentence_each():
    cos, sin = tables(5, 8)
    q, k = pair(2, 5, 3, 16)
    places = torch.zeros(2, 5, dtype=torch.int32)
    for arguments, keywords, said in (
        (
            (q[0, 0], k, cos, sin),
            {},
            r"q of \(batch, seq, heads, head_dim\) or \(seq, heads, head_dim\), got \(3, 16\)",
        ),
        ((q.double(), k, cos, sin), {}, "q of float32, float16 or bfloat16, got torch.float64"),
        ((q, k.half(), cos, sin), {}, "k of the dtype of q, torch.float32, got torch.float16"),
        ((q, k[:, :4], cos, sin), {}, r"k of \(2, 5, kv_heads, 16\), got \(2, 4, 2, 16\)"),
        ((q, k, cos.half(), sin), {}, r"cos of float32 and the shape \(longest, half\), got torch.float16, \(5, 8\)"),
        ((q, k, cos, sin[1:]), {}, r"sin of float32 and the shape \(5, 8\), got torch.float32, \(4, 8\)"),
        ((q[..., :14], k[..., :14], cos, sin), {}, "cos of 1 to head_dim / 2 = 7 columns, got 8"),
        ((q, k, cos, sin), {"start": 1}, "cos with a row for each of 5 tokens, from start on, got 4"),
        ((q, k, cos, sin), {"start": -1}, "a start from 0, got -1"),
        ((q, k, cos, sin, places), {"start": 2}, "positions or start, got both; add start=2 to the positions"),
        (
            (q, k, cos, sin, places.long()),
            {},
            r"positions of int32 and the shape \(2, 5\), got torch.int64, \(2, 5\)",
        ),
        ((q, k, cos, sin, places[0]), {}, r"positions of int32 and the shape \(2, 5\), got torch.int32, \(5,\)"),
        ((q, k, cos, sin.to("meta")), {}, "sin on the device of q, cpu, got meta"),
    ):
        for function in (rope, rope_):
            with pytest.raises(ValueError, match=f"^minfer.{function.__name__} takes {said}$"):
                function(*arguments, **keywords)
    with pytest.raises(
        ValueError, match=r"^minfer.rope_ takes a q and a k that share no elements, got one tensor as both$"
    ):
        rope_(q, q, cos, sin)
