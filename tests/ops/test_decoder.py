"""The op `decoder`: its weights are shared, its figures are those of the published model, and minfer's model computes it."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from minfer import build, fingerprint, ops
from minfer.bench import operands as bench
from minfer.bench.device import capability, pick
from minfer.bench.operands import Operands
from minfer.bench.verify import WrongResult, verify
from minfer.build import toolchain
from minfer.ops import Case, compiled
from minfer.ops.decoder import THETA, baselines, linear_weights, shape
from minfer.ops.decoder.baselines import Last, by_transformers, graphed, layer, unpacked, whole
from minfer.ops.decoder.seeded import Seeded
from minfer.worker.compiler import needed_by

OP, CPU = ops.get("decoder"), torch.device("cpu")
SIZES = "1 64 2 1 64 64 64"
LLAMA = "32 4096 32 8 128 14336 128256"


def step(kernel: str = "minfer", sizes: str = SIZES, new: int = 1, context: int = 40, batch: int = 2) -> Case:
    return OP.case(kernel, "bfloat16", shape(sizes, batch, new, context))


@pytest.mark.parametrize("new", (1, 40, 7))
def test_minfers_model_computes_the_op(new: int) -> None:
    kernel = OP.kernels["minfer"]
    errors = verify(OP, step(new=new), kernel, build.function(kernel), CPU, None, seed=new)
    assert errors.over <= 0.5
    assert errors.rel_l2 <= 2e-2


def test_a_step_is_captured_at_the_second_call_with_the_same_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

    class Tensor:
        is_cuda = True

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        calls.append("capture")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    function = graphed(lambda *tensors: calls.append("run"))  # type: ignore[arg-type]
    one, other = Tensor(), Tensor()
    for tensors in ((one, other), (one, other), (one, other), (other, one)):
        function(*tensors)
    assert calls == ["run", "capture", "run", "replay", "replay", "run"]


def test_tensors_are_those_of_the_last_call_until_one_is_freed() -> None:
    last, freed = Last(), list[int]()
    one, other = torch.zeros(1), torch.zeros(1)
    assert [last.are(each, lambda: freed.append(1)) for each in ((one, other), (one, other), (one,))] == [0, 1, 0]
    del other
    assert not freed  # it was of the call before
    del one
    assert freed == [1]


def test_the_plain_layer_writes_the_caches_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a view of them: torch.compile would copy whole caches."""
    given, written = list[Any](), list[Any]()
    into = torch.Tensor.index_copy_
    monkeypatch.setattr(torch.Tensor, "index_copy_", lambda x, *more: written.append(x) or into(x, *more))
    of_layer = lambda *tensors: given.extend(tensors[4:6]) or layer(*tensors)
    case = step("torch")
    whole(of_layer)(*Operands(OP, case, 1, "normal", CPU).arguments)
    assert len(written) == 2 and all(one is other for one, other in zip(given, written, strict=True))


def needs_transformers() -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install 'minfer[peers]'")


@pytest.mark.slow  # it takes seconds to import
@pytest.mark.parametrize(("new", "context"), ((1, 40), (40, 40), (1, 1)))
def test_transformers_computes_the_op(new: int, context: int) -> None:
    needs_transformers()
    kernel = replace(OP.kernels["transformers"], function=by_transformers(THETA, compile_layers=False))
    case = step("transformers", "2 64 4 2 64 64 64", new, context)
    assert verify(OP, case, kernel, build.function(kernel), CPU, None, seed=new).rel_l2 <= 3e-2


@pytest.mark.slow
def test_one_layer_of_transformers_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_transformers()
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    monkeypatch.setattr(
        baselines, "compiled", lambda function: torch.compile(function, backend=counter, dynamic=False, fullgraph=True)
    )
    function = by_transformers(THETA)
    for seed in (1, 2):
        function(*Operands(OP, step(sizes="4 64 4 2 64 64 64"), seed, "normal", CPU).arguments)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_transformers_holds_weights_no_longer_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_transformers()
    monkeypatch.setattr(bench, "SHARED", {})
    models, init = list[weakref.ref[Any]](), baselines.Model.__init__
    monkeypatch.setattr(
        baselines.Model, "__init__", lambda model, *given: models.append(weakref.ref(model)) or init(model, *given)
    )
    operands = Operands(OP, step(), 1, "normal", CPU)
    function = by_transformers(THETA, compile_layers=False)
    function(*operands.arguments)
    assert models[0]() is not None
    del operands
    bench.SHARED.clear()
    gc.collect()
    assert models[0]() is None


@pytest.mark.parametrize("name", ("transformers", "torch_max_autotune"))
def test_int4_is_left_to_the_others(name: str) -> None:
    case = OP.case(name, "bfloat16", shape("2 128 2 1 64 128 64", 2, 1, 40), {"quant": "int4_g128"})
    assert OP.kernels[name].takes(case) == "supports quant=none, not int4_g128"


def test_transformers_takes_no_part_of_a_prompt() -> None:
    why = OP.kernels["transformers"].unsupported(step("transformers", new=7), None)
    assert why == "needs new to be 1 or context, got new=7 and context=40"


@pytest.mark.slow  # tracing takes seconds
def test_the_fused_model_computes_the_op() -> None:
    """Without inductor, whose C++ compiler takes a minute for each shape."""
    importlib.import_module("minfer.fusion")
    fused = whole(compiled(layer, backend="minfer", options={"rest": "eager"}))
    kernel = replace(OP.kernels["fuse"], function=fused)
    assert verify(OP, step("fuse"), kernel, build.function(kernel), CPU, None, seed=1).rel_l2 <= 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("minfer", "torch", "transformers", "fuse"))
def test_a_replayed_step_computes_what_its_first_call_computes(name: str) -> None:
    """The third call is replayed with other tokens in the same tensors; tensors elsewhere are not those that were captured."""
    function = build.function(OP.kernels[name], toolchain.arch_of(torch.cuda.get_device_capability()))
    case = OP.case(name, "bfloat16", OP.sizes["large"][0])
    one, other = (Operands(OP, case, seed, "normal", pick("cuda")) for seed in (1, 2))
    expected = [each.tensors["logits"].clone() for each in (one, other) if function(*each.arguments) is None]
    for _ in range(3):
        function(*one.arguments)
    assert torch.equal(one.tensors["logits"], expected[0])
    one.tensors["ids"].copy_(other.tensors["ids"])
    function(*one.arguments)
    assert torch.equal(one.tensors["logits"], expected[1])
    function(*other.arguments)
    assert torch.equal(other.tensors["logits"], expected[1])


def test_minfers_model_computes_the_op_with_weights_in_int4() -> None:
    case = OP.case("minfer", "bfloat16", shape("2 128 2 1 64 128 64", 2, 1, 40), {"quant": "int4_g128"})
    kernel = OP.kernels["minfer"]
    assert kernel.unsupported(case, None) is None
    assert "needs hidden to be a multiple of 128" in str(
        kernel.unsupported(case.with_shape(shape(SIZES, 2, 1, 40)), None)
    )
    assert verify(OP, case, kernel, build.function(kernel), CPU, None, seed=1).rel_l2 <= 2e-2
    assert OP.traffic_of(case)[0] < 0.5 * OP.traffic_of(step(sizes="2 128 2 1 64 128 64"))[0]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", OP.sizes["large"])
def test_minfers_model_computes_the_op_on_a_gpu(sizes: dict[str, int]) -> None:
    kernel, device = OP.kernels["minfer"], pick("cuda")
    able = capability(device)
    assert able is not None
    function = build.function(kernel, toolchain.arch_of(able))
    assert verify(OP, OP.case("minfer", "bfloat16", sizes), kernel, function, device, able, seed=1).rel_l2 <= 2e-2


def test_sets_of_operands_share_weights_and_caches() -> None:
    one, other = (Operands(OP, step(), seed, "normal", CPU) for seed in (1, 2))
    shared = [spec.name for spec in one.specs if spec.shared]
    assert {"qkv", "k_cache", "head", "cos"} <= set(shared)
    assert all(one.tensors[name] is other.tensors[name] for name in shared)
    assert not shared & one.named("in", "out").keys()
    assert not torch.equal(one.tensors["ids"], other.tensors["ids"])
    assert list(one.tensors) == [spec.name for spec in one.specs]  # the order of the arguments


def test_shared_tensors_are_freed_for_those_of_another_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SHARED", {})
    monkeypatch.setattr(bench, "MUCH", 1 << 20)
    Operands(OP, step(), 1, "normal", CPU)
    Operands(OP, step(context=41), 1, "normal", CPU)
    assert len({spec for spec, _ in bench.SHARED if spec.name == "k_cache"}) == 2  # both are small
    Operands(OP, step(sizes="1 512 2 1 64 1024 64"), 1, "normal", CPU)
    assert [spec.shape for spec, _ in bench.SHARED if spec.name == "qkv"] == [(1, 256, 512)]


def test_a_kernel_that_changes_a_weight_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SHARED", {})
    kernel = OP.kernels["torch"]
    function = build.function(kernel)

    def scales(*tensors: torch.Tensor) -> None:
        function(*tensors)
        tensors[-5].mul_(1.1)  # the head, before the scales of int4

    with pytest.raises(WrongResult):
        verify(OP, step("torch"), kernel, scales, CPU, None, seed=1)


def test_figures_are_those_of_an_8b_model() -> None:
    one = step(sizes=LLAMA, context=1024, batch=1)
    assert linear_weights(one) == pytest.approx(6.98e9, rel=1e-3)
    assert OP.traffic_of(one)[0] == pytest.approx(15.14e9, rel=1e-3)  # 13.96 + 1.05 of the head + 0.13 of the cache
    assert OP.flops(one) == pytest.approx(2 * 7.505e9 + 4 * 32 * 32 * 128 * 1024, rel=1e-3)
    prompt = step(sizes=LLAMA, context=4096, new=4096, batch=1)
    assert OP.flops(prompt) == pytest.approx(2 * 6.98e9 * 4096 + 2 * 32 * 4096 * 4096**2, rel=1e-2)
    assert OP.metric.work(OP, one) == 1
    assert OP.metric.work(OP, prompt) == 4096


@pytest.mark.parametrize("name", ("minfer", "fuse"))
def test_the_fingerprint_of_what_calls_functions_is_of_their_ops_and_modules(name: str) -> None:
    kernel = OP.kernels[name]
    whole = fingerprint.fingerprint(kernel, "", 1)
    assert whole != fingerprint.fingerprint(replace(kernel, modules=()), "", 1)
    assert whole != fingerprint.fingerprint(replace(kernel, composes=kernel.composes[1:]), "", 1)


def test_kernels_that_the_model_may_choose_are_built_ahead() -> None:
    needed = needed_by(OP.kernels["minfer"], "sm_90a")
    assert {"hgemm", "decode_attention", "rope_append"} <= {kernel.op for kernel in needed if kernel.needs_build}
    assert needed_by(OP.kernels["torch"], "sm_90a") == [OP.kernels["torch"]]


def test_the_mean_of_int4_weights_is_0() -> None:
    """Were it not, all logits of a deep decoder would have one sign, which rounding decides."""
    packed = torch.empty(512, 512, dtype=torch.uint8)
    Seeded("qkv", 1.0, whole=True).write(packed)
    values = unpacked(packed, torch.ones(512, 8))
    assert abs(values.mean()) < 0.05 and (values.min(), values.max()) == (-7, 7)
