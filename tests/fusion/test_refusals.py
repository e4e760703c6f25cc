"""`minfer.fuse`: each reason to leave a match as it is, and that it is said."""

from __future__ import annotations

import importlib  # of minfer.fusion when a test asks: it imports torch.compile, which takes seconds

import pytest
import torch
import torch.nn.functional as F

import minfer
from minfer import build
from minfer.build.errors import BuildError
from tests.fusion.fused import Layer, check, norm, randn, said, swap, tables


def test_rope_of_tables_whose_halves_may_differ_is_refused(capfd):
    turn = lambda q, cos, sin: q * cos + swap(q) * sin
    q, table = randn(2, 4, 5, 16), randn(1, 1, 5, 16)
    check(capfd, turn, q, table, table + 1, refused=["the graph does not show that the two halves of"])


ROTATIONS = {  # of q (2, 4, 5, 16): what is refused, and why
    "three dimensions": (
        lambda q, cos, sin: q[0] * cos + swap(q[0]) * sin,
        "has 3 dimensions, and not the four of a batch of heads",
    ),
    "not the halves": (
        lambda q, cos, sin: q * cos + torch.cat((-q[..., 4:], q[..., :4]), -1) * sin,
        "what is swapped is not the halves of a head",
    ),
    "two shapes": (
        lambda q, cos, sin: q * cos + swap(q) * sin[:1],
        "sin has the shape (1, 16) for heads of 16",
    ),
    "a row for each head": (
        lambda q, cos, sin: q * cos.expand(4, 5, 16) + swap(q) * sin.expand(4, 5, 16),
        "have no row for each token of",
    ),
}


@pytest.mark.parametrize("form", ROTATIONS)
def test_rotations_that_a_kernel_does_not_compute_are_refused(capfd, form):
    turn, why = ROTATIONS[form]

    def turned(q):
        cos, sin = (each[0] for each in tables(5, 16, torch.float32))
        return turn(q, cos, sin)

    check(capfd, turned, randn(2, 4, 5, 16), patterns=["rope"], refused=[why])


def test_tables_for_each_sequence_of_a_batch_that_may_change_are_refused(capfd):
    def turned(q):
        angles = torch.arange(q.shape[0] * 5, device=q.device).view(-1, 1, 5, 1) * 0.9 ** torch.arange(8)
        angles = torch.cat((angles, angles), -1)
        return q * angles.cos() + swap(q) * angles.sin()

    why = "each sequence has rows of its own, and their number is not known before it runs"
    fused, q = minfer.fuse(turned, rest="eager", unmeasured="fuse", patterns=["rope"]), randn(2, 4, 5, 16)
    torch._dynamo.mark_dynamic(q, 0)
    torch.testing.assert_close(fused(q), turned(q), rtol=1e-5, atol=1e-5)
    assert why in "\n".join(said(capfd))


def test_heads_whose_number_or_width_may_change_are_refused(capfd):
    def turned(q, angles):
        angles, (first, second) = torch.cat((angles, angles), -1), q.chunk(2, -1)
        return q * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    for dim, why in ((1, "the number of heads is not known"), (3, "the width of a head is not known")):
        torch._dynamo.reset()
        q, angles = randn(2, 4, 5, 16), randn(5, 8)
        torch._dynamo.maybe_mark_dynamic(q, dim)
        torch._dynamo.maybe_mark_dynamic(angles, 1 if dim == 3 else 0)
        fused = minfer.fuse(turned, rest="eager", unmeasured="fuse", patterns=["rope"])
        torch.testing.assert_close(fused(q, angles), turned(q, angles), rtol=1e-5, atol=1e-5)
        assert why in "\n".join(said(capfd))


def test_a_result_of_another_dtype_and_an_empty_one_are_refused(capfd):
    def wide(x, w):
        x = x.float()
        return w.float() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    x, w = randn(3, 64).bfloat16(), randn(64).bfloat16()
    check(capfd, wide, x, w, refused=["is torch.float32 and would be torch.bfloat16"])
    check(capfd, lambda a, b: F.silu(a) * b, randn(0, 32), randn(0, 32), refused=["it has no elements"])


def test_a_sum_that_is_used_before_its_weight_is_there_is_not_fused_with_its_norm(capfd):
    def layer(x, residual, w):
        residual = residual + x
        return norm(residual, w * residual.sum()), residual

    check(capfd, layer, randn(3, 64), randn(3, 64), randn(64), fused=["rms_norm"], refused=["before", "is there"])


def test_a_size_that_depends_on_data_is_refused(capfd):
    chosen = lambda a, b: F.silu(a[a > 0]) * b[a > 0]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(capfd, chosen, randn(3, 32), randn(3, 32), refused=["silu_mul at", " depends on data"])


def test_what_holds_for_some_sizes_only_is_refused(capfd):
    combined, gated = lambda a, b: 2 * a[a > 0] + b, lambda a, b: F.silu(a[a > 0]) * b
    why = "not fused, it holds for some sizes only, and these are not known before it runs"
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for name, function in (
            ("axpby at add", combined),
            ("silu_mul at mul", gated),
        ):  # a kernel would need a single a > 0
            check(capfd, function, randn(3, 32), randn(1), refused=[name, why])


def test_a_result_of_another_shape_is_refused(capfd):
    def outer(x, gate, up):
        return F.silu((x @ gate).view(5, 1, 32)) * (x @ up)

    x, gate, up = (each.bfloat16() for each in (randn(5, 64), randn(64, 32) / 8, randn(64, 32) / 8))
    check(capfd, outer, x, gate, up, refused=["swiglu at mul", "mul is (5, 5, 32) and would be (5, 1, 32)"])


def test_a_device_without_kernels_and_a_problem_without_one_are_refused(capfd, monkeypatch):
    gate = lambda a, b: F.silu(a) * b
    with torch.no_grad():
        minfer.fuse(gate, rest="eager", unmeasured="fuse")(*(randn(3, 32).to("meta") for _ in range(2)))
    assert "minfer has kernels for a CPU and for CUDA, and this is on meta" in "\n".join(said(capfd))
    torch._dynamo.reset()

    def nothing(*_):
        raise ValueError("no kernel of silu_mul supports this")

    monkeypatch.setattr("minfer.fusion.rewrite.best", nothing)
    check(capfd, gate, randn(3, 32), randn(3, 32), refused=["not fused, no kernel of silu_mul supports this"])


def test_what_another_uses_is_not_fused(capfd):
    def layer(gate, up):
        middle = F.silu(gate)
        return middle * up, middle.abs()

    check(capfd, layer, randn(3, 32), randn(3, 32), refused=["silu_mul at", "is used by abs_1 too"])
    returned = lambda gate, up: (lambda middle: (middle * up, middle))(F.silu(gate))
    check(capfd, returned, randn(3, 32), randn(3, 32), refused=["is an output of the graph too"])


def test_forms_that_a_kernel_does_not_compute_are_refused(capfd):
    x, w = randn(4, 6, 64), randn(64)
    first = lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6))
    check(capfd, first, x, w, refused=["its mean is over the dimensions [1], a kernel's is over the last"])
    half = lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    check(capfd, half, x.bfloat16(), w.bfloat16(), refused=["its mean is of torch.bfloat16, a kernel's is of float32"])
    check(capfd, norm, x.bfloat16(), w, refused=["takes weight of the dtype of x, torch.bfloat16, got torch.float32"])
    check(
        capfd,
        lambda a, b: 2 * a + b,
        randn(3, 8),
        randn(8),
        refused=["takes b of float32 and the shape (3, 8), got torch.float32, (8,)"],
    )
    check(
        capfd,
        lambda a, b: 2 * a + b,
        x.t_() if x.dim() == 2 else x[0].t(),
        x[1].t(),
        refused=["lies in memory with strides"],
    )
    doubles = [each.double() for each in (randn(3, 8), randn(3, 8))]
    check(capfd, lambda a, b: F.silu(a) * b, *doubles, refused=["float32, float16 or bfloat16, got torch.float64"])


def test_a_gelu_with_a_constant_of_its_own_is_refused(capfd):
    def gelu(x, w, b):
        h = F.linear(x, w, b)
        return h * 0.5 * (1 + torch.tanh(0.7 * (h + 0.044715 * (h * h * h))))

    inputs = [each.bfloat16() for each in (randn(5, 64), randn(96, 64) / 8, randn(96))]
    check(capfd, gelu, *inputs, patterns=["gemm_bias_gelu"], refused=["its tanh is of 0.7 times its argument"])


def test_by_default_what_was_not_measured_is_refused(capfd):
    inputs = randn(3, 32), randn(3, 32)
    check(
        capfd,
        lambda a, b: F.silu(a) * b,
        *inputs,
        unmeasured="refuse",
        refused=["on a CPU was not measured against eager"],
    )


def row(**speedups):
    about = {"arch": "cpu", "device": "a CPU", "dtype": "float32", "params": {}, "shape": {"tokens": 4, "hidden": 32}}
    return {"silu_mul": [about | {"speedups": {"torch": 1.0} | speedups}]}


@pytest.mark.parametrize(("ratio", "fused"), [(1.5, ["silu_mul"]), (0.99, ["silu_mul"]), (0.97, [])])
def test_the_measured_rows_decide(capfd, monkeypatch, ratio, fused):
    monkeypatch.setattr("minfer.fusion.worth.table", lambda: row(cpu_loops=ratio))
    inputs = randn(4, 32), randn(4, 32)
    text = check(capfd, lambda a, b: F.silu(a) * b, *inputs, unmeasured="refuse", fused=fused)
    assert f"cpu_loops: {ratio:.2f} times as fast as eager PyTorch at this shape" in text


def test_the_measured_rows_decide_for_sizes_near_theirs(capfd, monkeypatch):
    monkeypatch.setattr("minfer.fusion.worth.table", lambda: row(cpu_loops=1.5))
    gate = lambda a, b: F.silu(a) * b
    text = check(capfd, gate, randn(3, 32), randn(3, 32), unmeasured="refuse", fused=["silu_mul"])
    assert "cpu_loops: 1.50 times as fast as eager PyTorch at 4x32" in text
    far = randn(64, 32), randn(64, 32)
    check(capfd, gate, *far, unmeasured="refuse", refused=["near 64x32 was not measured"])


def test_the_table_has_the_rows_of_a_gpu_against_torch_compile():
    shape = {"m": 16, "n": 14336, "k": 4096}
    params = {"gate": "swiglu", "layout": "TN"}
    worth = importlib.import_module("minfer.fusion.worth")
    ask = lambda kernel, arch: worth.compare(
        "gated_unit", kernel, "bfloat16", params, shape, arch, "NVIDIA H200", "inductor"
    )
    assert not ask("v05_one_wave", (9, 0)).slower and ask("v02_mma", (9, 0)).slower
    assert ask("v05_one_wave", (8, 0)).unknown and "was not measured" in ask("v05_one_wave", (8, 0)).why


@pytest.mark.parametrize("first", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_each_device_is_judged_by_what_was_measured_on_itself(monkeypatch, first):
    about = {"arch": "sm_90a", "dtype": "bfloat16", "params": {}, "shape": {"tokens": 4, "hidden": 32}}
    speedups = {"NVIDIA H100 80GB HBM3": 0.5, "NVIDIA H200": 2.0}
    entries = [
        about | {"device": device, "speedups": {"torch": 1.0, "v01_naive": ratio}} for device, ratio in speedups.items()
    ]
    entries.sort(key=lambda entry: entry["device"] != first)  # the order of the file decides nothing
    worth = importlib.import_module("minfer.fusion.worth")
    monkeypatch.setattr("minfer.fusion.worth.table", lambda: {"silu_mul": entries})
    for device, ratio in speedups.items():
        found = worth.compare("silu_mul", "v01_naive", "bfloat16", {}, about["shape"], (9, 0), device, "eager")
        assert found.slower == (ratio < 1) and found.why.endswith(f"on {device}")


def test_a_kernel_that_does_not_compile_is_left_out(capfd, monkeypatch):
    def fail(*_, **__):
        raise BuildError("silu_mul.h:1: error: no compiler")

    monkeypatch.setattr(build, "function", fail)
    inputs = randn(3, 32), randn(3, 32)
    check(capfd, lambda a, b: F.silu(a) * b, *inputs, refused=["cpu_loops does not compile here: silu_mul.h:1: error"])


def test_numbers_that_are_inputs_of_the_graph_are_refused_and_others_are_not(capfd):
    x, w = randn(3, 64), randn(64)
    check(capfd, norm, x, w, dynamic=True, refused=["rms_norm at mul", "its eps is ", "not known when compiling"])
    both = lambda x, y, w, eps=1e-6: norm(x + y, w, eps)
    check(capfd, both, x, x, w, dynamic=True, refused=["add_rms_norm at mul", "rms_norm at mul"])
    add = lambda a, b, alpha=0.5: alpha * a + b
    check(capfd, add, x, x, dynamic=True, refused=["axpby at add", "its alpha is "])
    one = lambda a, b, alpha=0.5: alpha * a + 2 * b  # 2 is known, and what is added to it may be anything
    check(capfd, one, x, x, dynamic=True, fused=["axpby"])


def test_what_the_backward_needs_is_not_fused_and_gradients_are_right(capfd):
    model, x = Layer(), randn(2, 5, 64)
    model(x).square().sum().backward()
    want = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    minfer.fuse(model, rest="eager", unmeasured="fuse")(x).square().sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], want, rtol=1e-4, atol=1e-5)
    assert "saved for the backward pass" in "\n".join(said(capfd))
