"""`minfer.rope_append`: what `rms_norm`, `rope` and `kv_append_` do one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minfer
from minfer import rope_append

Tensor = torch.Tensor
NAN = float("nan")


def arguments(
    tokens: int, heads: int, kv_heads: int, dim: int, half: int, dtype: torch.dtype, norm: bool
) -> dict[str, Any]:
    torch.manual_seed(tokens)
    angles = torch.rand(9, half) * 6
    given = {
        "qkv": torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype),
        "k_cache": torch.randn(3, 4, kv_heads, dim).to(dtype),
        "v_cache": torch.randn(3, 4, kv_heads, dim).to(dtype),
        "positions": torch.arange(tokens, dtype=torch.int32) + 2,
        "where": torch.randperm(12)[:tokens],
        "cos": angles.cos(),
        "sin": angles.sin(),
    }
    return given | {name: 1 + torch.randn(dim).to(dtype) / 8 for name in ("q_weight", "k_weight") if norm}


def one_by_one(given: dict[str, Any]) -> Tensor:
    kv_heads = given["k_cache"].shape[2]
    q, k, v = given["qkv"].split((given["qkv"].shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    if "q_weight" in given:
        q, k = minfer.rms_norm(q, given["q_weight"]), minfer.rms_norm(k, given["k_weight"])
    q, k = minfer.rope(q, k, given["cos"], given["sin"], given["positions"])
    minfer.kv_append_(given["k_cache"], given["v_cache"], k, v, given["where"])
    return q


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "half"), [(5, 4, 2, 64, 32), (7, 3, 1, 10, 3), (1, 1, 1, 2, 1)]
)
def test_it_is_what_the_three_functions_are(tokens, heads, kv_heads, dim, half, dtype, norm):
    given = arguments(tokens, heads, kv_heads, dim, half, dtype, norm)
    given["where"][-1] = -1
    mine = {name: x.clone() for name, x in given.items()}
    found, wanted = rope_append(**mine), one_by_one(given)
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(found, wanted, **close)
    torch.testing.assert_close(mine["k_cache"], given["k_cache"], **close)
    assert torch.equal(mine["v_cache"], given["v_cache"])
    assert torch.equal(mine["qkv"], given["qkv"])


def test_a_position_without_a_row_is_nan_where_it_is_rotated():
    given = arguments(3, 2, 1, 8, 2, torch.float32, False)
    given["positions"] = torch.tensor([-1, 9, 1], dtype=torch.int32)
    found = rope_append(**given)
    assert found[:2, :, :4].isnan().all() and not found[:2, :, 4:].isnan().any() and not found[2].isnan().any()
    keys = given["k_cache"].flatten(0, 1)[given["where"]]
    assert keys[:2, :, :4].isnan().all() and not keys[2].isnan().any()


def test_what_is_not_written_may_be_nan():
    given = arguments(4, 2, 2, 16, 8, torch.bfloat16, True)
    given["where"] = torch.tensor([3, -1, 12, 2**62])
    given["qkv"][1:, 2:] = NAN
    assert not rope_append(**given).isnan().any()
    assert not given["k_cache"].isnan().any() and not given["v_cache"].isnan().any()


def test_no_token_no_key_and_no_cache_are_no_work():
    given = arguments(0, 4, 2, 64, 32, torch.float16, False)
    assert rope_append(**given).shape == (0, 4, 64)
    given = arguments(3, 4, 0, 64, 32, torch.float16, False)
    q, _ = minfer.rope(given["qkv"], given["qkv"][:, :0], given["cos"], given["sin"], given["positions"])
    assert torch.equal(rope_append(**given), q)
    given = arguments(3, 4, 2, 64, 32, torch.float16, False)
    given |= {name: torch.empty(0, 4, 2, 64).half() for name in ("k_cache", "v_cache")}
    assert rope_append(**given).shape == (3, 4, 64)


def test_parts_of_a_wider_projection_and_what_lies_badly():
    given = arguments(5, 4, 2, 64, 32, torch.float16, True)
    wanted = rope_append(**given)
    wide = torch.zeros(5, 9, 80).half()
    wide[:, 1:, 8:72] = given["qkv"]
    for qkv in (wide[:, 1:, 8:72], given["qkv"].transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(rope_append(**given | {"qkv": qkv}), wanted)


@pytest.mark.parametrize("norm", [False, True])
def test_it_is_an_op_like_pytorchs_own(norm):
    given = arguments(5, 4, 2, 8, 4, torch.float32, norm)
    weights = (given.get("q_weight"), given.get("k_weight"))
    names = ("qkv", "k_cache", "v_cache", "positions", "where", "cos", "sin")
    torch.library.opcheck(torch.ops.minfer.rope_append.default, (*(given[name] for name in names), *weights, 1e-6))


def test_it_compiles_whole_and_for_any_shape():
    def step(given: dict[str, Any]) -> Tensor:
        return rope_append(**given) + given["k_cache"].sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (6, 7):
        given = arguments(tokens, 4, 2, 8, 4, torch.float32, False)
        mine = {name: x.clone() for name, x in given.items()}
        torch.testing.assert_close(compiled(mine), step(given))
        assert torch.equal(mine["k_cache"], given["k_cache"]) and torch.equal(mine["v_cache"], given["v_cache"])


def test_mistakes_are_a_sentence_each():
    given = arguments(5, 4, 2, 8, 4, torch.float32, True)
    for changed, said in (
        ({"qkv": given["qkv"].double()}, "takes qkv of float32, float16 or bfloat16, got torch.float64"),
        ({"qkv": given["qkv"][0]}, r"takes qkv of \(tokens, heads \+ 2 \* kv_heads, head_dim\), got \(8, 8\)"),
        ({"k_cache": given["k_cache"][:2]}, r"takes v_cache of \(2, 4, 2, 8\), got \(3, 4, 2, 8\)"),
        ({"k_cache": given["k_cache"][..., :4]}, r"takes k_cache of \(pages, slots, kv_heads, 8\), got \(3, 4, 2, 4\)"),
        ({"k_cache": given["k_cache"].half()}, "takes k_cache of the dtype of qkv, torch.float32, got torch.float16"),
        ({"v_cache": given["v_cache"].half()}, "takes v_cache of the dtype of qkv, torch.float32, got torch.float16"),
        (
            {"qkv": given["qkv"][:, :3]},
            r"takes qkv of \(5, heads \+ 2 \* 2, 8\), with the 2 kv_heads of k_cache, got \(5, 3, 8\)",
        ),
        ({"where": given["where"].int()}, r"takes where of int64 and the shape \(5,\), got torch.int32, \(5,\)"),
        ({"positions": given["positions"][:4]}, r"takes positions of int32 and the shape \(5,\), got torch.int32, \(4,\)"),
        ({"cos": given["cos"].half()}, r"takes cos of float32 and the shape \(longest, half\), got torch.float16, \(9, 4\)"),
        ({name: given[name].repeat(1, 2) for name in ("cos", "sin")}, "takes cos of 1 to head_dim / 2 = 4 columns, got 8"),
        ({name: given[name][:, :0] for name in ("cos", "sin")}, "takes cos of 1 to head_dim / 2 = 4 columns, got 0"),
        ({"sin": given["sin"][:1]}, r"takes sin of float32 and the shape \(9, 4\), got torch.float32, \(1, 4\)"),
        ({"q_weight": None}, "takes q_weight and k_weight together, or neither, got None for one of them"),
        ({"q_weight": torch.ones(4)}, r"takes q_weight of \(8,\), got \(4,\)"),
        ({"k_weight": torch.ones(8).half()}, "takes k_weight of the dtype of qkv, torch.float32, got torch.float16"),
        ({"where": given["where"].to("meta")}, "takes where on the device of qkv, cpu, got meta"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^minfer.rope_append {said}$"):
            rope_append(**given | changed)
    for name in ("k_cache", "v_cache"):
        wide = torch.randn(3, 4, 2, 16)[..., :8]
        said = rf"takes a contiguous {name}, which it changes in place, got strides \(128, 32, 16, 1\)"
        with pytest.raises(ValueError, match=f"^minfer.rope_append {said}$"):
            rope_append(**given | {name: wide})
    with pytest.raises(RuntimeError, match=r"^minfer.rope_append has no backward: call it under torch.no_grad\(\)"):
        rope_append(**given | {"qkv": given["qkv"].clone().requires_grad_()})


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [128, 10])
def test_a_graph_repeats_it_with_the_same_bits(dim, dtype, norm):
    given = {name: x.cuda() for name, x in arguments(7, 4, 2, dim, dim // 2, dtype, norm).items()}
    q = rope_append(**given)
    keys, values = given["k_cache"].clone(), given["v_cache"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = rope_append(**given)
    for _ in range(2):
        for cache in (given["k_cache"], given["v_cache"]):
            cache.flatten(0, 1)[given["where"]] = NAN
        again.fill_(NAN)
        graph.replay()
        assert torch.equal(again, q) and torch.equal(given["k_cache"], keys) and torch.equal(given["v_cache"], values)
