"""An op of the tests' own, and recipes for it: of a sound variant, and of those that go wrong in each way."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import torch

from minfer.bench.stats import Comparison
from minfer.ops import Op, given, out, rounded, size
from minfer.specialise import Recipe, trial
from minfer.specialise.buckets import Key

if os.environ.get("TESTS_SPECIALISED_TRIAL") == "faster":  # as tests want it that run trials in other processes
    trial.compare_blocks = lambda times, least: Comparison(2.0, 1.9, 2.1, 0.0, least)

op = Op(
    "doubled",
    axes={"n": size(64)},
    tensors=lambda case: [out("y", case["n"]), given("x", case["n"])],
    reference=lambda case, t: {"y": rounded(2 * t["x"], 1)},
    odd_shapes=({"n": 7},),
)


def slow(y: torch.Tensor, x: torch.Tensor) -> None:
    """Serves every size, and takes longer than any variant."""
    for _ in range(20):
        torch.mul(x, 2, out=y)


def fast(y: torch.Tensor, x: torch.Tensor) -> None:
    torch.mul(x, 2, out=y)


op.torch("slow", slow, baseline=True, dtypes=("float32",))
op.torch("fast", fast, dtypes=("float32",))

LOOP = """define void @{symbol}(ptr noalias %y, ptr noalias %x) {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  %from = getelementptr float, ptr %x, i64 %i
  %value = load float, ptr %from
  %twice = fmul float %value, {factor}
  %to = getelementptr float, ptr %y, i64 %i
  store float %twice, ptr {to}
  %next = add i64 %i, 1
  %done = icmp eq i64 %next, {n}
  br i1 %done, label %end, label %loop
end:
  ret void
}}
"""


def bind(address: int, key: Key) -> Callable[..., None]:
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(address)
    return lambda y, x: call(y.data_ptr(), x.data_ptr())


def bind_slow(address: int, key: Key) -> Callable[..., None]:
    once = bind(address, key)

    def repeated(y: torch.Tensor, x: torch.Tensor) -> None:
        for _ in range(20):
            once(y, x)

    return repeated


def recipe(
    name: str,
    fallback: str = "slow",
    factor: float = 2.0,
    to: str = "%to",
    text: str = LOOP,
    bind: Callable[..., Callable[..., None]] = bind,
) -> Recipe:
    def source(symbol: str, key: Key) -> str:
        return text.format(symbol=symbol, n=key[0].high, factor=factor, to=to)

    return Recipe(name, "doubled", fallback, "llvm", ("n",), source, {}, bind=bind)


SOUND = recipe("sound")
SLOWER = recipe("slower", fallback="fast", bind=bind_slow)
WRONG = recipe("wrong", factor=3.0)
CRASHES = recipe("crashes", to="null")
BROKEN = recipe("broken", text="no IR at all")

CPP = """#include "ops/op.h"
using minfer::Tensor;
static void {symbol}(Tensor y, const Tensor x) {{
  for (int i = 0; i < {n}; ++i) minfer::output<float>(y, "y")[i] = 2 * minfer::input<float>(x, "x")[i];
}}
MINFER_OP({symbol}, "(Tensor(a!) y, Tensor x) -> ()")
"""
COMPILED = Recipe("compiled", "doubled", "slow", "cpp", ("n",), lambda s, key: CPP.format(symbol=s, n=key[0].high), {})
