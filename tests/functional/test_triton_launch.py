"""A prepared call hands to Triton's C launcher what Triton itself hands to it, and notices what Triton would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import minfer
from minfer import build, ops
from minfer.functional import library, prepared
from tests.functional.calls import Call, calls, half
from tests.functional.faked_triton import STREAM, Launched, faked
from tests.tiers import mostly_slow

Tensor = torch.Tensor
CALLS = calls() | {
    "moe_route of many": Call("moe_route", {"logits": torch.rand(16, 64), "k": 2}),
    "rope without positions": Call(
        "rope", {"q": half(7, 4, 64), "k": half(7, 2, 64), "cos": torch.rand(9, 32), "sin": torch.rand(9, 32)}
    ),
    "axpby of scalars": Call("axpby", {"a": torch.rand(3, 64), "b": torch.rand(3, 64), "alpha": -0.0, "beta": 2.5}),
}
# A call, and the Triton kernel that it is to use.
KERNELS = {
    "axpby of scalars": "axpby/triton_blocks",
    "embedding": "embedding/triton_rows",
    "kv_append_": "kv_append/triton_rows",
    "layer_norm": "layernorm/triton_rows",
    "moe_route of many": "moe_route/triton_two_launches",
    "rms_norm": "rmsnorm/triton_rows",
    "rms_norm with a residual": "add_rmsnorm/triton_rows",
    "rope": "rope/triton_heads",
    "rope without positions": "rope/triton_heads",
    "rope_": "rope/triton_heads",
    "seq_sum": "seq_sum/triton_sequences",
    "silu_mul": "silu_mul/triton_blocks",
    "softmax": "softmax/triton_rows",
}


@pytest.fixture
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """What the call of the test's parameter `name` launches by its Triton kernel."""
    name = request.getfixturevalue("name") if "name" in request.fixturenames else "rms_norm"
    op, kernel = KERNELS[name].split("/")
    of = ops.get(op).kernels[kernel]

    def choose(*problem: Any) -> Any:
        return build.function(of)

    choose.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(library, "_kernel", choose)
    library.forget()
    with faked(of) as launched:
        yield launched


def plans() -> list[prepared.Run]:
    return [run for of_op in prepared._remembered for runs in of_op.values() for run in runs]


def without(addresses: dict[int, str], x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(without(addresses, each) for each in x)
    return addresses.get(x, "a copy") if isinstance(x, int) and x > 1 << 20 else (type(x), repr(x))


def called(name: str, launched: Launched, given: dict[str, Any]) -> list[Any]:
    """What one call hands to C, with names for the addresses of its tensors."""
    del launched[:]
    found = getattr(minfer, CALLS[name].function)(**given)
    results = [found] if isinstance(found, Tensor) else list(found or ())
    tensors = given | {f"result {place}": x for place, x in enumerate(results)}
    addresses = {x.data_ptr(): key for key, x in tensors.items() if isinstance(x, Tensor)}
    return [without(addresses, handed) for handed in launched]


@pytest.mark.parametrize("name", mostly_slow([*KERNELS], lambda name: name == "rms_norm"))
def test_c_gets_what_triton_hands_to_it(name: str, launched: Launched) -> None:
    given = dict(CALLS[name].given)
    wanted = called(name, launched, given)
    assert len(wanted) == (2 if name.startswith("moe_route") else 1)
    assert called(name, launched, given) == wanted  # it prepares the next ones
    (run,) = plans()
    assert run is not prepared._never and run.kernels  # type: ignore[attr-defined]
    assert all(STREAM in handed for handed in launched)
    calls_of_python = []
    jits = [x for x in vars(build_module(name)).values() if hasattr(x, "device_caches")]
    for jit in jits:
        jit.run = lambda *args, **options: calls_of_python.append(args)
    try:
        for _ in range(2):
            assert called(name, launched, given) == wanted
    finally:
        for jit in jits:
            del jit.run
    assert calls_of_python == []


def build_module(name: str) -> Any:
    op, kernel = KERNELS[name].split("/")
    return ops.get(op).kernels[kernel].module()


@pytest.mark.slow
def test_other_alignments_and_sizes_get_their_own_kernels(launched: Launched) -> None:
    """Triton compiles another kernel for a size that 16 divides, for a stride of 1 and for an address that is not aligned."""
    rows = torch.rand(8, 70)
    shapes = ((4, 64), (4, 63), (1, 64), (4, 1), (4, 17))
    views = [rows[:m, :n] for m, n in shapes] + [torch.rand(m, n) for m, n in shapes]
    views += [rows.reshape(-1)[1 : 1 + 4 * 63].view(4, 63), torch.rand(4, 64, dtype=torch.float64).float()]
    for x in views:
        given = {"x": x, "weight": torch.rand(x.shape[1])}
        wanted = [called("rms_norm", launched, given) for _ in range(4)]
        library.forget()
        assert [called("rms_norm", launched, given)] * 4 == wanted, x.shape


@pytest.mark.slow
def test_hooks_and_settings_of_triton_see_the_launch(launched: Launched) -> None:
    from triton import knobs

    given, seen = dict(CALLS["rms_norm"].given), list[str]()
    wanted = [called("rms_norm", launched, given) for _ in range(3)][-1]
    jit = build_module("rms_norm").kernel

    def hook(*args: Any, **options: Any) -> None:
        seen.append("called")

    for hooks in (knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls, jit.pre_run_hooks):
        hooks.append(hook)
        try:
            assert called("rms_norm", launched, given) == wanted
            assert seen == ["called"]
        finally:
            hooks.remove(hook)
        assert called("rms_norm", launched, given) == wanted
        assert seen.pop() == "called" and not seen
    with knobs.runtime.scope():
        knobs.runtime.debug = not knobs.runtime.debug
        count = len(jit.device_caches[0][0])
        called("rms_norm", launched, given)
        assert len(jit.device_caches[0][0]) == count + 1  # compiled anew
    assert called("rms_norm", launched, given) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("missing", ("copy", "several", "scratch", "stand-in"))
def test_what_is_not_understood_is_launched_by_triton(
    missing: str, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime import driver

    module, launcher = build_module("rms_norm"), driver.active.launcher_cls
    if missing == "copy":  # a launcher without what we know of it
        monkeypatch.setattr(launcher, "__call__", lambda self, *args: launched(*args))
    elif missing == "several":
        twice = launcher.__call__
        monkeypatch.setattr(launcher, "__call__", lambda self, *args: [twice(self, *args) for _ in range(2)])
    elif missing == "scratch":
        monkeypatch.setattr(
            launcher, "global_scratch_size", property(lambda self: 8, lambda self, x: None), raising=False
        )
        monkeypatch.setattr(launcher, "__call__", lambda self, *args: launched(*args))
    else:
        rmsnorm = module.rmsnorm
        monkeypatch.setattr(module, "rmsnorm", lambda y, x, weight, eps: rmsnorm(y, x.contiguous(), weight, eps))
    given = dict(CALLS["rms_norm"].given)
    wanted = [called("rms_norm", launched, given) for _ in range(4)]
    assert wanted == [wanted[0]] * 4 and wanted[0]
    (run,) = plans()
    assert run is not prepared._never and not run.kernels  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_a_gpu_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, kernel = KERNELS[name].split("/")
    of, call = ops.get(op).kernels[kernel], CALLS[name]

    def choose(*problem: Any) -> Any:
        return build.function(of)

    choose.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(library, "_kernel", choose)
    library.forget()
    wanted = call("cuda")
    call("cuda")
    (run,) = plans()
    assert run is not prepared._never and run.kernels  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        for jit in [x for x in vars(build_module(name)).values() if hasattr(x, "device_caches")]:
            patch.setattr(jit, "run", None)  # no launch goes through Triton's Python code
        torch.testing.assert_close(call("cuda"), wanted, rtol=0, atol=0, equal_nan=True)
        given = {key: x.cuda() if isinstance(x, Tensor) else x for key, x in call.given.items()}
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(graph, stream=stream):
            found = getattr(minfer, call.function)(**given)
        graph.replay()
        results = [] if found is None else [found] if isinstance(found, Tensor) else list(found)
        tensors = [*results, *(x for x in given.values() if isinstance(x, Tensor))]
        torch.testing.assert_close(tensors, wanted, rtol=0, atol=0, equal_nan=True)
    library.forget()
