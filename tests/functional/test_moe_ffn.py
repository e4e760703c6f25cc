"""`moe_ffn`: what the op states of its routing, its wrong kernels, and `minfer.moe_ffn`, an op like PyTorch's own."""

from __future__ import annotations

import pytest
import torch

from minfer import moe_ffn, moe_route, ops
from minfer.bench.operands import Operands
from minfer.bench.verify import WrongResult, verify
from minfer.ops.moe_ffn import ROUTINGS, experts_of_case, slots_here
from minfer.ops.moe_ffn.baselines import eager

pytestmark = pytest.mark.usefixtures("one_thread")
OP = ops.get("moe_ffn")
CPU = torch.device("cpu")
SHAPE = {"tokens": 24, "experts": 6, "k": 2, "hidden": 16, "ffn": 24}


def case_of(routing: str = "uniform", dtype: str = "float16", **shape: int) -> ops.Case:
    return OP.case("torch_eager", dtype, SHAPE | shape, {"routing": routing})


def made(routing: str, **shape: int) -> dict[str, torch.Tensor]:
    return Operands(OP, case_of(routing, **shape), 3, "normal", CPU).tensors


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_routing_is_what_its_name_says(routing):
    t, case = made(routing), case_of(routing)
    indices, here = t["indices"].long(), (t["indices"] >= 0) & (t["indices"] < 6)
    counts = torch.bincount(indices[here], minlength=6)
    assert t["offsets"].equal(counts.cumsum(0).int()) and int(counts.sum()) == slots_here(case)
    slots = t["order"][: int(t["offsets"][-1])].long()
    chosen = indices.flatten()[slots]
    assert chosen.equal(chosen.sort().values) and slots.unique().numel() == len(slots)
    assert all(slots[chosen == e].equal(slots[chosen == e].sort().values) for e in range(6))
    # Poison is exactly where nothing may be used.
    assert t["gate_up"].isnan().all((1, 2)).equal(counts == 0) and t["down"].isnan().any((1, 2)).equal(counts == 0)
    assert t["weights"].isnan().equal(~here) and t["x"].isnan().any(1).equal(~here.any(1))
    assert (t["order"][len(slots) :] > 1 << 20).all()
    distinct = all(len(set(row[mask].tolist())) == int(mask.sum()) for row, mask in zip(indices, here, strict=True))
    assert distinct == (routing != "one")
    assert {
        "uniform": bool(here.all()) and int(counts.min()) > 0,
        "zipf": bool(here.all()) and int(counts.max()) > 2 * int(counts.min()),
        "one": sorted(counts.tolist()) == [0, 0, 0, 0, 0, 48],
        "empty": int((counts == 0).sum()) == 3,
        "elsewhere": not here.all() and not here.any(1).all(),
    }[routing]


def test_experts_change_with_the_seed_and_costs_do_not():
    one, other = (Operands(OP, case_of("zipf"), seed, "normal", CPU).tensors["offsets"] for seed in (1, 2))
    assert not one.equal(other)
    counts = [sorted(offsets.diff(prepend=offsets.new_zeros(1)).tolist()) for offsets in (one, other)]
    assert counts[0] == counts[1] == sorted(torch.bincount(experts_of_case(case_of("zipf")).flatten()).tolist())


def test_flops_and_bytes():
    case = case_of("one")
    assert OP.flops(case) == 6 * 48 * 16 * 24
    read, written = OP.traffic_of(case)
    assert read == 2 * (24 * 16 + 3 * 16 * 24) + 4 * (3 * 48 + 6) and written == 2 * 24 * 16


def right(*tensors: torch.Tensor) -> None:
    tensors[0].copy_(eager(*tensors))


def wrong(name: str):
    def kernel(out, x, weights, indices, offsets, order, gate_up, down):
        ffn = down.shape[2]
        if name == "gate and up changed places":
            gate_up = torch.cat((gate_up[:, ffn:], gate_up[:, :ffn]), 1)
        if name == "a weight of another rank":
            weights = weights.flip(1)
        if name == "the next expert's product":
            down = down.roll(1, 0)
        if name == "no weights":
            weights = torch.ones_like(weights)
        if name == "an expert loses a token":
            order = order.clone()
            order[0] = order[1]
        right(out, x, weights, indices, offsets, order, gate_up, down)
        if name == "one column of a sum is left out":
            x0 = x[0].float() @ gate_up[indices[0, 0], :ffn].float().t()
            up = x[0].float() @ gate_up[indices[0, 0], ffn:].float().t()
            h = (torch.nn.functional.silu(x0) * up)[-1] * down[indices[0, 0], :, -1].float()
            out[0] = (out[0].float() - weights[0, 0] * h).to(out.dtype)

    return kernel


def test_the_eager_loop_is_right():
    assert verify(OP, case_of(), OP.kernels["torch_eager"], right, CPU, None, 0).tried >= 5


@pytest.mark.parametrize(
    "name",
    [
        "gate and up changed places",
        "a weight of another rank",
        "the next expert's product",
        "no weights",
        "an expert loses a token",
        "one column of a sum is left out",
    ],
)
def test_wrong_kernels_are_seen(name):
    with pytest.raises(WrongResult):
        verify(OP, case_of(), OP.kernels["torch_eager"], wrong(name), CPU, None, 0)


def definition(x, weights, indices, gate_up, down):
    """Slot by slot in fp64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for slot, expert in enumerate(indices.flatten().tolist()):
        token, rank = divmod(slot, weights.shape[1])
        if 0 <= expert < len(down):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += weights[token, rank].double() * (
                down[expert].double() @ (torch.nn.functional.silu(gate) * up)
            )
    return out


def layer(tokens: int = 9, dtype: torch.dtype = torch.float16, hidden: int = 16, ffn: int = 24):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    gate_up = (torch.randn(6, 2 * ffn, hidden, generator=generator) / hidden**0.5).to(dtype)
    down = (torch.randn(6, hidden, ffn, generator=generator) / ffn**0.5).to(dtype)
    return x, torch.randn(tokens, 6, generator=generator), gate_up, down


def near(found, x, weights, indices, gate_up, down):
    tolerance = 4e-3 if x.dtype == torch.float16 else 3e-2
    wanted = definition(x, weights, indices, gate_up, down)
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 9])
def test_it_takes_what_moe_route_hands_over(tokens, dtype):
    x, logits, gate_up, down = layer(tokens, dtype)
    weights, indices, _, offsets, order = moe_route(logits, 2)
    found = moe_ffn(x, weights, indices, gate_up, down, offsets=offsets, order=order)
    near(found, x, weights, indices, gate_up, down)
    assert found.equal(moe_ffn(x, weights, indices, gate_up, down))  # sorted here


def test_indices_elsewhere_add_nothing():
    x, _, gate_up, down = layer()
    weights, indices = torch.rand(9, 3), torch.randint(0, 6, (9, 3), dtype=torch.int32)
    indices[0], indices[1, 1], indices[2, 0], indices[3, 2] = -1, 6, 1 << 30, -(1 << 31)
    found = moe_ffn(x, weights, indices, gate_up, down)
    near(found, x, weights, indices, gate_up, down)
    assert not found[0].any()


def test_all_to_one_expert_and_tensors_that_lie_badly():
    x, _, gate_up, down = layer(20)
    weights, indices = torch.rand(2, 20).t(), torch.full((20, 2), 4, dtype=torch.int32)
    for view in (x[3:], x[:, ::2].repeat(1, 2), x.t().contiguous().t(), x[:1].expand(20, -1)):
        each = (weights[: len(view)], indices[: len(view)])
        near(moe_ffn(view, *each, gate_up, down), view, *each, gate_up, down)
    near(moe_ffn(x, weights, indices, gate_up.flip(1), down.transpose(1, 2).contiguous().transpose(1, 2)),
         x, weights, indices, gate_up.flip(1), down)  # fmt: skip


def test_nothing_to_do():
    x, logits, gate_up, down = layer(4)
    none = x.new_empty(4, 0, dtype=torch.float32), x.new_empty(4, 0, dtype=torch.int32)
    assert not moe_ffn(x, *none, gate_up, down).any()
    weights, indices, *_ = moe_route(logits[:0], 2)
    assert moe_ffn(x[:0], weights, indices, gate_up, down).shape == (0, 16)


def test_it_is_an_op_like_pytorchs_own():
    x, logits, gate_up, down = layer()
    weights, indices, _, offsets, order = moe_route(logits, 2)
    torch.library.opcheck(torch.ops.minfer.moe_ffn.default, (x, weights, indices, gate_up, down, offsets, order))
    compiled = torch.compile(
        lambda x, w, i: moe_ffn(x, w, i, gate_up, down), backend="aot_eager", fullgraph=True, dynamic=True
    )
    for tokens in (7, 8):
        near(compiled(x[:tokens], weights[:tokens], indices[:tokens]),
             x[:tokens], weights[:tokens], indices[:tokens], gate_up, down)  # fmt: skip


def test_mistakes_are_a_sentence_each():
    x, logits, gate_up, down = layer()
    weights, indices, _, offsets, order = moe_route(logits, 2)
    fits = {"x": x, "weights": weights, "indices": indices, "gate_up": gate_up, "down": down, "offsets": offsets}
    fits["order"] = order
    for name, value, said in (
        ("x", x.float(), "x of float16 or bfloat16, got torch.float32"),
        ("x", x[0], r"x of \(tokens, hidden\), got \(16,\)"),
        ("weights", weights[:3], r"weights of float32 and the shape \(9, k\), got torch.float32, \(3, 2\)"),
        ("weights", weights.half(), r"weights of float32 and the shape \(9, k\), got torch.float16, \(9, 2\)"),
        ("indices", indices.long(), r"indices of int32 and the shape \(9, 2\), got torch.int64, \(9, 2\)"),
        ("indices", indices[:, :1], r"indices of int32 and the shape \(9, 2\), got torch.int32, \(9, 1\)"),
        ("gate_up", gate_up[:5], r"gate_up of \(6, 48, 16\), got \(5, 48, 16\)"),
        ("gate_up", gate_up.bfloat16(), "gate_up of the dtype of x, torch.float16, got torch.bfloat16"),
        ("down", down[0], r"down of \(experts, 16, ffn\), got \(16, 24\)"),
        ("offsets", None, "offsets and order together, or neither, got None for one of them"),
        ("offsets", offsets[1:], r"offsets of int32 and the shape \(6,\), got torch.int32, \(5,\)"),
        ("order", order[1:], r"order of int32 and the shape \(18,\), got torch.int32, \(17,\)"),
        ("down", down.to("meta"), "down on the device of x, cpu, got meta"),
    ):
        with pytest.raises(ValueError, match=f"^minfer.moe_ffn takes {said}$"):
            moe_ffn(**fits | {name: value})
    with pytest.raises(RuntimeError, match=r"^minfer.moe_ffn has no backward: call it under torch.no_grad"):
        moe_ffn(**fits | {"x": x.clone().requires_grad_()})
