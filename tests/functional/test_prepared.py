"""A prepared call does what the same call does unprepared: results, in-place changes, errors, gradients and versions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import minfer
from minfer.functional import library, prepared
from tests.functional.calls import Call, calls, half, ints
from tests.tiers import mostly_slow

Tensor = torch.Tensor
CALLS = calls()
# For int4 weights without zeros, another kernel fills the zeros in.
UNPREPARED = {"quant_gemm"}
COMPOSED = {"cascade_attention"}  # of three calls, each of which is prepared
GPU = pytest.mark.gpu
UNWRITTEN = ("attention of packed", "attention of pages")  # the results for tokens behind the last sequence
FEW = ("matmul 1x16x32 TN", "attention", "kv_append_", "rms_norm with a residual", "rope_", "softmax")


@pytest.fixture(autouse=True)
def nothing_is_prepared() -> Iterator[None]:
    library.forget()
    yield
    library.forget()


def plans() -> list[prepared.Run]:
    return [run for of_op in prepared._remembered for runs in of_op.values() for run in runs]


def prepare(call: Callable[[], Any]) -> None:
    """The first call is only noted, and the second one prepares the later ones."""
    for _ in range(2):
        call()


def same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a.dtype, a.shape, a.stride(), a.device) == (b.dtype, b.shape, b.stride(), b.device)
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)


def test_this_pytorch_has_what_prepared_calls_need() -> None:
    assert prepared.AVAILABLE


def gives_the_same(name: str, device: str) -> None:
    call = CALLS[name]
    first = call(device)
    assert plans() == []
    call(device)
    assert plans() != [] and (prepared._never in plans()) == (name in UNPREPARED)
    for _ in range(2):
        found = call(device)
        if call.function != "sample":
            same(found, first)
    assert len(plans()) == (1 if name not in UNPREPARED | COMPOSED else 3)


@pytest.mark.parametrize("name", CALLS)
def test_it_gives_the_same(name: str) -> None:
    gives_the_same(name, "cpu")


def unaligned(x: Tensor) -> Tensor:
    return torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "another dtype": lambda x: x.to(torch.int16),
    "a dimension more": lambda x: x[None],
    "a shorter row": lambda x: x[..., :-1],
    "twice as long": lambda x: torch.cat([x, x]),
    "without elements": lambda x: x[:0],
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x.flatten()[0].expand(x.shape),
    "unaligned": unaligned,
    "without memory": lambda x: x.to("meta"),
    "negated": lambda x: torch._neg_view(x) if x.is_floating_point() else x,
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "with a gradient": lambda x: x.clone().requires_grad_() if x.is_floating_point() else x,
    "no tensor": lambda x: None,  # type: ignore[dict-item,return-value]
}


def outcome(call: Call, which: str, make: Callable[[Tensor], Tensor]) -> Any:
    torch.manual_seed(0)  # for `sample`
    try:
        return call(**{which: make(call.given[which].clone())})
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", mostly_slow([*CALLS], lambda name: name in FEW))
def test_other_tensors_have_the_outcome_that_they_have_unprepared(name: str) -> None:
    call = CALLS[name]
    for which in call.tensors():
        for how, make in OTHERS.items():
            library.forget()
            wanted = outcome(call, which, make)
            for _ in range(3):
                call()
            for _ in range(3):  # the last two may be prepared themselves
                found = outcome(call, which, make)
                if isinstance(wanted, list):
                    assert isinstance(found, list), (which, how, found)
                    if name not in UNWRITTEN:
                        same(found, wanted)
                else:
                    assert found == wanted, (which, how)


X, W = torch.rand(4, 64), torch.rand(64)


def norm() -> Tensor:
    return minfer.rms_norm(X, W)


def test_each_call_returns_memory_of_its_own() -> None:
    prepare(norm)
    a, b = norm(), norm()
    assert a.data_ptr() != b.data_ptr() and a._base is None and a._version == 0
    torch.testing.assert_close(a, b)


def test_a_tensor_that_is_given_twice_says_nothing_of_two() -> None:
    y = torch.rand(4, 64)
    for one, other in ((X, X), (X, y), (y, X), (y, y)):
        for _ in range(4):
            torch.testing.assert_close(minfer.silu_mul(one, other), torch.nn.functional.silu(one) * other)
    assert len(plans()) == 2


def test_equal_scalars_are_not_the_same() -> None:
    zeros, minus = torch.zeros(8), -torch.zeros(8)
    for scale in (0.0, -0.0, 0.0, -0.0, 1, 1.0, True):
        for _ in range(3):
            found = minfer.axpby(zeros, minus, alpha=scale, beta=scale)
            assert torch.equal(found.signbit(), (scale * zeros + scale * minus).signbit()), scale
    for _ in range(3):
        minfer.moe_route(torch.rand(2, 8), 1)
    with pytest.raises(TypeError, match="a whole number as k, got float"):
        minfer.moe_route(torch.rand(2, 8), 1.0)


def test_a_number_in_a_tensor_is_read_at_each_call() -> None:
    alpha = torch.tensor(1.0)
    for value in (1.0, 2.0, 3.0, 4.0):
        alpha.fill_(value)
        torch.testing.assert_close(minfer.axpby(X, X, alpha), value * X + X)
    assert plans() == []


def test_autograd_records_after_a_prepared_call() -> None:
    prepare(norm)
    prepare(lambda: minfer.silu_mul(X, X * 2))
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    minfer.silu_mul(minfer.rms_norm(x, w), x).sum().backward()
    assert x.grad is not None and w.grad is not None and w.grad.any()
    with torch.no_grad():
        for _ in range(3):
            assert not minfer.rms_norm(x, w).requires_grad
    assert minfer.rms_norm(x, w).requires_grad
    with pytest.raises(RuntimeError, match="has no backward"):
        minfer.softmax(x)


@pytest.mark.parametrize("name", ("kv_append_", "rms_norm with a residual", "rope_"))
def test_what_is_written_has_a_new_version_at_each_call(name: str) -> None:
    call = CALLS[name]
    given = {key: x.clone() if isinstance(x, Tensor) else x for key, x in call.given.items()}
    function = getattr(minfer, call.function)
    written = {"kv_append_": ("k_cache", "v_cache"), "rope_": ("q", "k")}.get(name, ("residual",))
    for place in range(4):
        before = {key: x._version for key, x in given.items() if isinstance(x, Tensor)}
        function(**given)
        changed = {key for key, version in before.items() if given[key]._version != version}
        assert changed == set(written), place
    for which in written:
        weight = torch.ones_like(given[which]).requires_grad_()
        loss = (weight * given[which]).sum()
        function(**given)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert plans() != [] and prepared._never not in plans()


def test_inference_mode_has_calls_of_its_own() -> None:
    with torch.inference_mode():
        for _ in range(3):
            assert norm().is_inference()
        made = torch.rand(4, 64)
    assert len(plans()) == 1
    for _ in range(3):
        assert not norm().is_inference()
    assert len(plans()) == 2
    for _ in range(3):
        assert not minfer.rms_norm(made, W).is_inference()
    with torch.inference_mode():
        assert norm().is_inference()


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_and_the_profiler_see_the_op() -> None:
    prepare(norm)
    wanted = norm()
    with Seen() as seen:
        torch.testing.assert_close(norm(), wanted)
    assert "minfer.rms_norm.default" in seen.names
    with torch.autograd.profiler.profile() as profile:
        norm()
    assert "minfer::rms_norm" in {event.name for event in profile.function_events}

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    with Functions():
        norm()
    assert "minfer.rms_norm.default" in names
    with torch._subclasses.FakeTensorMode() as mode:
        fake = minfer.rms_norm(mode.from_tensor(X), mode.from_tensor(W))
    assert isinstance(fake, torch._subclasses.FakeTensor)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: minfer.rms_norm(x, W))(X)
    assert "minfer.rms_norm" in graph.code


def test_transforms_are_applied() -> None:
    prepare(norm)
    x = torch.rand(3, 4, 64)
    for _ in range(3):
        torch.testing.assert_close(torch.vmap(lambda x: minfer.rms_norm(x, W))(x), minfer.rms_norm(x, W))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: minfer.rms_norm(x, W).sum())(X)
    with pytest.warns(Warning):  # it is deprecated
        traced = torch.jit.trace(lambda x: minfer.rms_norm(x, W), X, check_trace=False)
    assert "minfer::rms_norm" in str(traced.graph)


def test_a_subclass_is_dispatched() -> None:
    class Mine(torch.Tensor):
        pass

    prepare(norm)
    for _ in range(3):
        assert type(minfer.rms_norm(X.as_subclass(Mine), W)) is Mine


def test_pytorch_fills_what_it_allocates_where_it_is_deterministic() -> None:
    call = CALLS["attention of packed"]
    q = half(3, 1, 64)  # two tokens more than its only sequence has
    for _ in range(3):
        call(q=q)
    torch.use_deterministic_algorithms(True)
    try:
        assert call(q=q)[0][1:].isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_it_compiles_to_the_op() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def both(x: Tensor, residual: Tensor) -> Tensor:
        return minfer.softmax(minfer.rms_norm(x, W, residual=residual))

    prepare(norm)
    for function in (both, torch.compile(both, backend=backend, fullgraph=True)):
        for _ in range(3):
            torch.testing.assert_close(function(X, X.clone()), both(X, X.clone()))
    assert len(graphs) == 1 and "minfer.add_rms_norm" in graphs[0].code and "minfer.softmax" in graphs[0].code


def test_threads_may_call_for_the_first_time_at_once() -> None:
    wanted = torch.nn.functional.rms_norm(X, (64,), W, 1e-6)
    barrier, wrong = threading.Barrier(8), list[Any]()

    def work() -> None:
        barrier.wait()
        for _ in range(20):
            try:
                torch.testing.assert_close(norm(), wanted)
                torch.testing.assert_close(minfer.softmax(X), X.softmax(-1))
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    prepare(norm)
    assert prepared._never not in plans()


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST", 4)
    for tokens in range(1, 12):
        for _ in range(3):
            minfer.rms_norm(torch.rand(tokens, 64), W)
            assert sum(map(len, prepared._remembered)) <= 4
    x = torch.rand(4, 640)
    for stride in range(1, 12):  # other strides of one shape
        for _ in range(3):
            minfer.rms_norm(x.as_strided((2, 64), (64 + 4 * stride, 1)), W)
    assert len(plans()) <= prepared.MOST_ALIKE + 4


@GPU
@pytest.mark.parametrize("name", CALLS)
def test_it_gives_the_same_on_a_gpu(name: str) -> None:
    gives_the_same(name, "cuda")


@GPU
@pytest.mark.parametrize("name", FEW)
def test_it_is_captured_in_a_graph(name: str) -> None:
    call = CALLS[name]
    wanted = call("cuda")
    given = {key: x.to("cuda").clone() if isinstance(x, Tensor) else x for key, x in call.given.items()}
    kept = {key: x.clone() for key, x in given.items() if isinstance(x, Tensor)}
    function = getattr(minfer, call.function)
    prepare(lambda: function(**given))
    for key, x in kept.items():
        given[key].copy_(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function(**given)
    for key, x in kept.items():
        given[key].copy_(x)
    graph.replay()
    results = [] if found is None else [found] if isinstance(found, Tensor) else list(found)
    same([*results, *(x for x in given.values() if isinstance(x, Tensor))], wanted)


@GPU
def test_streams_and_devices_do_not_share_memory() -> None:
    x, w = X.cuda(), W.cuda()
    wanted = minfer.rms_norm(x, w)
    prepare(lambda: minfer.rms_norm(x, w))
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = [minfer.rms_norm(x, w) for _ in range(20)]
        stream.synchronize()
        for each in found:
            torch.testing.assert_close(each, wanted, rtol=0, atol=0)
    prepare(norm)
    assert norm().device.type == "cpu" and minfer.rms_norm(x, w).is_cuda
    with pytest.raises(ValueError, match="device"):
        minfer.rms_norm(x, W)


def test_a_tensor_elsewhere_is_prepared_for_itself() -> None:
    prepare(lambda: minfer.decode_attention(**CALLS["decode_attention"].given))
    with pytest.raises(ValueError, match="lengths"):
        minfer.decode_attention(**CALLS["decode_attention"].given | {"lengths": ints(5).long()})
