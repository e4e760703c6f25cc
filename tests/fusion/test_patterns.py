"""`minfer.fuse`: each pattern in the forms in which it is written, and that results stay what they were."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import minfer
from tests.fusion.fused import BF16, check, norm, randn, said, swap, tables

SLOW = pytest.mark.slow


NORMS = {
    "as in transformers": norm,
    "F.rms_norm": lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
    "x * x": lambda x, w: (x.float() * (1 / ((x.float() * x.float()).mean(-1, True) + 1e-6).sqrt()) * w).to(x.dtype),
    "in place": lambda x, w: norm(x, w).mul_(1),
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("form", list(NORMS)[:3])
def test_rms_norm(capfd, form, dtype):
    check(capfd, NORMS[form], randn(2, 3, 64, dtype=dtype), randn(64, dtype=dtype), fused=["rms_norm"])


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_rms_norm_with_its_residual(capfd, dtype):
    def layer(x, residual, w):
        residual = residual + x
        return norm(residual, w), residual * 2

    inputs = [randn(2, 3, 64, dtype=dtype), randn(2, 3, 64, dtype=dtype), randn(64, dtype=dtype)]
    before = [each.clone() for each in inputs]
    check(capfd, layer, *inputs, fused=["add_rms_norm"])
    for mine, was in zip(inputs, before, strict=True):
        assert torch.equal(mine, was)  # the op changes its residual, which is the caller's here


def test_in_place_variants_are_the_same_form(capfd):
    def layer(x, residual, w, gate, up):
        residual.add_(x)
        return norm(residual, w), F.silu(gate, inplace=True).mul_(up)

    inputs = [randn(2, 64), randn(2, 64), randn(64), randn(2, 32), randn(2, 32)]
    other = [each.clone() for each in inputs]
    with torch.no_grad():
        want = layer(*other)
        got = minfer.fuse(layer, rest="eager", unmeasured="fuse")(*inputs)
    torch.testing.assert_close((got, inputs), (want, other))
    assert [": fused, " in line for line in said(capfd)] == [True, True]


def test_swiglu_and_silu_mul(capfd):
    x, w1, w2 = randn(2, 3, 64, dtype=BF16), randn(96, 64, dtype=BF16) / 8, randn(96, 64, dtype=BF16) / 8
    check(capfd, lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), x, w1, w2, fused=["swiglu"])
    gate = lambda x, g, u: F.linear(x, u) * F.silu(F.linear(x, g))
    floats = [each.float() for each in (x, w1, w2)]
    check(
        capfd,
        gate,
        *floats,
        fused=["silu_mul"],
        refused=["minfer.swiglu takes x of float16 or bfloat16, got torch.float32"],
    )
    packed = lambda both: F.silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1]
    check(capfd, packed, randn(3, 64), fused=["silu_mul"])


def test_the_gated_unit(capfd):
    x, w, b = randn(5, 64, dtype=BF16), randn(2, 96, 64, dtype=BF16) / 8, randn(2, 96, dtype=BF16)
    unit = lambda x, w, b: torch.sigmoid(F.linear(x, w[0], b[0])) * F.linear(x, w[1], b[1])
    check(capfd, unit, x, w, b, fused=["gated_unit"])


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_bias_and_what_follows_a_product(capfd, approximate):
    x, w, b = randn(2, 3, 64, dtype=BF16), randn(96, 64, dtype=BF16) / 8, randn(96, dtype=BF16)
    check(capfd, lambda x, w, b: F.relu(F.linear(x, w, b)), x, w, b, fused=["gemm_bias_relu"])
    check(capfd, lambda x, w, b: (x @ w.t() + b).relu_(), x, w, b, fused=["gemm_bias_relu"])
    gelu = lambda x, w, b: F.gelu(F.linear(x, w, b), approximate=approximate)
    check(capfd, gelu, x, w, b, fused=["gemm_bias_gelu"])
    check(capfd, lambda x, w, b: F.gelu(x @ w.t() + b, approximate=approximate), x, w, b, fused=["gemm_bias_gelu"])


COMBINATIONS = {
    "alpha a + b": lambda a, b: 2.5 * a + b,
    "b + alpha a": lambda a, b: b + a * 2.5,
    "alpha a + beta b": lambda a, b: 2 * a + b * 0.5,
    "add with alpha": lambda a, b: torch.add(b, a, alpha=-3),
    "alpha a - beta b": lambda a, b: 2.0 * a - 0.5 * b,
    "alpha a - b": lambda a, b: 2.0 * a - b,
    "a - beta b": lambda a, b: a - 0.5 * b,
    "sub with alpha": lambda a, b: torch.sub(a, b, alpha=0.25),
    "in place": lambda a, b: a.mul(3).add_(b, alpha=0.5),
}


@pytest.mark.parametrize("form", COMBINATIONS)
def test_combinations(capfd, form):
    check(capfd, COMBINATIONS[form], randn(3, 40), randn(3, 40), fused=["axpby"])


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(("batch", "heads_first"), [(1, True), pytest.param(2, True, marks=SLOW), (1, False)])
def test_rope_takes_a_query_and_its_key_at_once(capfd, batch, heads_first, dtype):
    def turn(q, k):
        cos, sin = (each.unsqueeze(1 if heads_first else 2) for each in tables(5, 16, dtype, batch))
        if heads_first:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        return q * cos + swap(q) * sin, k * cos + swap(k) * sin

    check(capfd, turn, randn(2, 5, 4, 16, dtype=dtype), randn(2, 5, 2, 16, dtype=dtype), fused=["rope"])
