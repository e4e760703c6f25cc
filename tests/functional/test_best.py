"""`best` finds without sorting what sorting all measurements finds, for any problem, and its memory is bounded."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from minfer import ops
from minfer.functional import ahead, library
from minfer.functional import best as chooser
from minfer.ops.axes import Ragged
from tests.functional import by_sorting

CAPABILITIES = ((9, 0), (9, 0), (8, 0), (8, 9), (10, 0), (7, 5), None)
DEVICES = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "")


def draw_shape(rng: random.Random, op: ops.Op, entries: list[Mapping[str, Any]]) -> dict[str, int]:
    """A shape that was measured, one that is as far from several (sizes of it doubled or halved), or any, with sizes of 0."""
    how = rng.choice(("measured", "doubled", "near", "any", "any"))
    shape = dict(rng.choice(entries)["shape"]) if entries else dict.fromkeys(op.axes, 64)
    for axis, size in shape.items():
        if how == "doubled":
            shape[axis] = int(size * 2.0 ** rng.randint(-2, 2))
        elif how == "near" and rng.random() < 0.5:
            shape[axis] = max(0, size + rng.randint(-40, 40))
        elif how == "any":
            shape[axis] = rng.choice((0, 1, rng.randint(1, 300), 2 ** rng.randint(0, 15)))
        if axis in ("kv_heads", "experts"):  # by which some rules divide
            shape[axis] = max(1, shape[axis])
    return shape


def problems(rng: random.Random, name: str) -> Iterator[dict[str, Any]]:
    op, entries = ops.get(name), chooser.table().get(name, [])
    while True:
        params = {
            each: rng.choice(valid.examples if isinstance(valid, Ragged) else valid)
            for each, valid in op.params.items()
        }
        if entries and rng.random() < 0.5:
            params = dict(rng.choice(entries)["params"])
        elif rng.random() < 0.3 and len(op.calls) > 1:
            params["call"] = rng.choice(list(op.calls))
        yield {
            "name": name,
            "dtype": rng.choice(("float16", "bfloat16", "float32")),
            "params": params,
            "shape": draw_shape(rng, op, entries),
            "capability": rng.choice(CAPABILITIES),
            "device": rng.choice(DEVICES),
        }


def outcome(function: Callable[..., chooser.Choice], problem: Mapping[str, Any]) -> object:
    try:
        return function(**problem)
    except ValueError as error:
        return repr(error)


@pytest.mark.parametrize("count", (15, pytest.param(1000, marks=pytest.mark.slow)))
def test_it_chooses_what_sorting_chooses(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "rule_of", lambda kernel, capability: None)
    monkeypatch.setattr(chooser, "_choosers", {})
    rng = random.Random(0)
    for name in sorted(chooser.table()):
        for problem in itertools.islice(problems(rng, name), count):
            assert outcome(chooser.best, problem) == outcome(by_sorting.best, problem), problem


def test_a_kernel_with_a_model_of_its_own_is_preferred_where_nothing_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen(m: int, n: int, k: int, device: str = DEVICES[0], capability: tuple[int, int] | None = (9, 0)) -> str:
        params, shape = {"layout": "TN", "accumulate": "float32"}, {"m": m, "n": n, "k": k}
        return chooser.best("hgemm", "bfloat16", params, shape, capability, device).kernel

    assert chosen(300, 4096, 4096) == "v18_fitted"
    assert chosen(300, 4100, 4096) == chosen(300, 4096, 4100) == chosen(300, 4095, 4097) == "v18_fitted"
    assert chosen(1, 4100, 4096) == chosen(300, 300, 300) == "v22_any_size" != chosen(300, 301, 301)  # odd rows
    assert chosen(300, 300, 300, capability=(8, 9)) != "v22_any_size"
    assert chosen(0, 4096, 4096) != "v18_fitted"
    assert chosen(33, 4096, 4104) == chosen(100, 28672, 1024) == "v17_one_wave"
    assert chosen(100, 34000, 4096) == "v18_fitted"  # v17 would have a second wave
    assert {chosen(m, 2048, 8192) for m in (9, 32, 64, 100)} == {"v18_fitted"}  # it divides k
    assert chosen(32, 14336, 2048) == chosen(100, 4104, 4096) == "v17_one_wave"
    assert (
        chosen(64, 4096, 4096) != "v18_fitted" and chosen(512, 8448, 4096) != "v18_fitted"
    )  # whole waves of large tiles
    assert chosen(300, 4096, 4096, capability=(8, 9)) != "v18_fitted" != chosen(300, 4096, 4096, capability=None)
    times = {"v14_small": 8.0, "v18_fitted": 9.0}
    entry = {"arch": "sm_90a", "device": DEVICES[0], "dtype": "bfloat16", "kernels": times}
    entry |= {"params": {"layout": "TN", "accumulate": "float32"}, "shape": {"m": 300, "n": 4096, "k": 4096}}
    monkeypatch.setattr(chooser, "table", lambda: {"hgemm": [entry]})
    assert chosen(300, 4096, 4096) == "v14_small"  # measured here
    assert chosen(300, 4096, 4096, DEVICES[1]) == chosen(301, 4096, 4096) == "v18_fitted"


INT4 = {"format": "int4_g128", "accumulate": "float32"}
PROMOTED = {"format": "fp8_fp8", "accumulate": "promoted"}
BY_NEAREST = {"v07_stream", "v17_one_wave", "triton_rows", "v04_fp8_mma"}


@pytest.mark.parametrize(
    ("op", "params", "wanted"),
    [
        ("quant_gemm", INT4, {(1, 2560, 9728): "v02_gemv", (2, 5120, 25600): "v02_gemv"}),
        ("quant_gemm", INT4, {(3, 2560, 9728): "v03_mma", (16, 32000, 4096): "v03_mma", (32, 25600, 4096): "v03_mma"}),
        ("quant_gemm", INT4, {(12, 25600, 4096): "v07_stream", (33, 25600, 4096): "v09_int4_wgmma"}),
        ("quant_gemm", INT4 | {"format": "int4_g64"}, {(1, 2560, 9728): "v02_gemv", (13, 128256, 3072): "v03_mma"}),
        ("quant_gemm", INT4 | {"format": "fp8_fp8"}, {(20, 4096, 4096): "v04_fp8_mma"}),
        ("quant_gemm", PROMOTED, {(64, 32000, 4096): "v11_fp8_promoted_slices", (65, 25344, 4096): "v11_fp8_promoted_slices"}),
        ("quant_gemm", PROMOTED, {(65, 25352, 4096): "v12_fp8_fitted", (100, 5128, 9728): "v11_fp8_promoted_slices"}),
        ("quant_gemm", PROMOTED, {(100, 2560, 9728): "v12_fp8_fitted", (129, 2560, 4096): "v12_fp8_fitted"}),
        ("gemm_bias_gelu", {"layout": "TN"}, {(3997, 10944, 2048): "v03_pingpong", (2048, 2048, 2560): "v03_pingpong"}),
        ("gemm_bias_gelu", {"layout": "TN"}, {(2047, 10944, 2048): "v05_fitted", (3997, 10944, 2568): "v05_fitted"}),
        ("layernorm", {}, {(398, 7168): "v03_any_width", (1144, 2560): "v03_any_width", (9000, 4096): "triton_rows"}),
        ("softmax", {"mask": "none"}, {(1025, 128): "v07_short_rows", (7430, 7): "v07_short_rows"}),
        ("softmax", {"mask": "none"}, {(1024, 100): "triton_rows", (5000, 129): "triton_rows"}),
        ("layernorm", {}, {(100, 7168): "triton_rows", (259, 3072): "triton_rows"}),
    ],
)  # fmt: skip
def test_between_measured_shapes_rules_of_hopper_choose(
    op: str, params: dict[str, str], wanted: dict[tuple[int, ...], str]
) -> None:
    for sizes, kernel in wanted.items():
        choice = chooser.best(
            op, "bfloat16", params, dict(zip(ops.get(op).axes, sizes, strict=False)), (9, 0), DEVICES[0]
        )
        assert (choice.kernel, "by a rule" in choice.why) == (kernel, kernel not in BY_NEAREST), sizes


def test_a_rule_that_was_timed_on_hopper_holds_on_no_other_gpu() -> None:
    found = {x.preferred: x for x in ops.every_kernel() if x.preferred in chooser.preferred.HOPPER_ONLY}
    assert found.keys() == chooser.preferred.HOPPER_ONLY
    for kernel in found.values():
        assert kernel.builds_for("sm_80") and chooser.rule_of(kernel, (9, 0))
        assert chooser.rule_name(kernel, (8, 0)) == kernel.before_hopper != kernel.preferred
        assert not any(chooser.rule_of(kernel, each) for each in ((10, 0), None))
    problem, capabilities = ("layernorm", "bfloat16", {}, {"tokens": 398, "hidden": 7168}), ((9, 0), (8, 0))
    assert ["by a rule" in chooser.best(*problem, each, "").why for each in capabilities] == [True, False]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 100, 2048, 8192])  # v03_mma was not measured at 1 x 2048
def test_gpus_before_hopper_attend_with_mma_sync(tokens: int, head_dim: int) -> None:
    shape = {"batch": 1, "seq_q": tokens, "seq_kv": tokens, "heads": 32, "kv_heads": 32, "head_dim": head_dim}
    params = {"layout": "padded", "lengths": "full", "lse": "no", "page": "none", "quant": "none", "call": "causal"}
    for capability in ((8, 0), (8, 9)):
        assert chooser.best("prefill_attention", "bfloat16", params, shape, capability, "").kernel == "v03_mma"


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9)])
def test_gpus_before_hopper_have_a_rule_for_products(capability: tuple[int, int]) -> None:
    """Each kernel that has such a rule is taken somewhere, and only where it takes the product."""

    def chosen(
        *sizes: int, layout: str = "TN", sums: str = "float32", on: tuple[int, int] = capability
    ) -> chooser.Choice:
        shape = dict(zip("mnk", sizes, strict=True))
        return chooser.best("hgemm", "float16", {"layout": layout, "accumulate": sums}, shape, on, "NVIDIA L40S")

    wanted = {(1, 4096, 4096): "v15_gemv", (8, 2880, 2048): "v15_gemv", (8, 28672, 4096): "v16_skinny"}
    wanted |= {(9, 2880, 2048): "v16_skinny", (16, 152064, 4096): "v16_skinny"}
    wanted |= dict.fromkeys(
        [(17, 16904, 512), (129, 512, 512), (300, 4096, 4096), (8192, 8192, 8192)], "v23_mma_fitted"
    )
    for sizes, kernel in wanted.items():
        choice = chosen(*sizes)
        assert choice.kernel == kernel and "by a rule, mma_" in choice.why, (sizes, choice)
        assert chosen(*sizes, on=(9, 0)).kernel != "v23_mma_fitted" and "mma_" not in chosen(*sizes, on=(10, 0)).why
    assert chosen(8, 4096, 4096, layout="NN").kernel == "v16_skinny"
    others = [(0, 4096, 4096), (300, 4100, 4096), (300, 4096, 4100), (300, 504, 4096), (300, 4096, 504), (1, 64, 64)]
    assert not any("by a rule" in chosen(*sizes).why for sizes in others)
    assert "by a rule" not in chosen(300, 4096, 4096, sums="float16").why
    kernels = {x.name for x in ops.get("hgemm").kernels.values() if x.before_hopper}
    assert (
        kernels
        == set(wanted.values())
        <= {x.name for x in ahead.choosable("hgemm", f"sm_{capability[0]}{capability[1]}")}
    )
    for kernel in kernels:
        assert not chooser.rule_of(ops.get("hgemm").kernels[kernel], (10, 0))
        assert not chooser.rule_of(ops.get("hgemm").kernels[kernel], None)


def test_a_product_that_was_measured_needs_no_rule_before_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {
        "arch": "sm_89",
        "device": "NVIDIA L40S",
        "dtype": "float16",
        "kernels": {"v07_tuned": 8.0, "v23_mma_fitted": 9.0},
    }
    params, shape = {"layout": "TN", "accumulate": "float32"}, {"m": 300, "n": 4096, "k": 4096}
    monkeypatch.setattr(chooser, "table", lambda: {"hgemm": [entry | {"params": params, "shape": shape}]})
    found = {
        m: chooser.best("hgemm", "float16", params, shape | {"m": m}, (8, 9), "NVIDIA L40S").kernel for m in (300, 301)
    }
    assert found == {300: "v07_tuned", 301: "v23_mma_fitted"}


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.build, "function", lambda kernel, arch, from_wheel: None)
    kernel, cpu = library._kernel, torch.device("cpu")
    kernel.cache_clear()
    for n in range(library.MOST_PROBLEMS + 10):
        kernel("axpby", "float32", (), (("n", n),), cpu)
    assert kernel.cache_info().currsize == library.MOST_PROBLEMS
    kernel.cache_clear()
    monkeypatch.setattr(chooser, "_choosers", {})
    for n in range(chooser.MOST_SETTINGS + 10):
        chooser.chooser("axpby", "float32", (), ("n",), (9, 0), f"GPU {n}")
    assert len(chooser._choosers) <= chooser.MOST_SETTINGS


def test_a_kernel_that_is_registered_later_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "table", lambda: {})
    op = ops.get("axpby")
    before = chooser.best("axpby", "float32", {}, {"n": 8}, None, "").kernel
    monkeypatch.setitem(op.kernels, "cpu_later", replace(op.kernels[before], name="cpu_later"))
    assert chooser.best("axpby", "float32", {}, {"n": 8}, None, "").kernel == "cpu_later"
