"""Is a kernel right? It is run on random inputs and compared, element by element, with an oracle in fp64.

The bound of an element is one ulp of the output's dtype plus 4 sqrt(K) u S: u is the accumulator's unit roundoff, K
the length of the sum, S the sum of the magnitudes of its terms. It is the probabilistic form of the classical forward
error bound gamma_K S (Higham and Mary, A new approach to probabilistic rounding error analysis, SISC 2019).

The oracle is computed after the kernel ran, from inputs made anew from their seed: nothing that a kernel can reach
while it runs decides whether it is right.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from minfer.bench.integrity import Dishonest
from minfer.bench.operands import Operands
from minfer.ops import DTYPES, Case, Op

Function = Callable[..., object]
ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11}  # of the accumulator
REPEATS, REPEATS_S = 5, 0.2  # more runs on the same inputs, to see a race; fewer where they take long


@dataclass(frozen=True)
class Errors:
    """How far from the oracle, over everything that was tried."""

    rel_l2: float = 0.0
    max_abs: float = 0.0
    over_bound: float = 0.0  # above 1 is wrong
    tried: int = 0


class Stated(Protocol):
    """What a `minfer.ops.Kernel` says of itself and verification must know."""

    @property
    def deterministic(self) -> bool: ...

    def unsupported(self, case: Case, capability: tuple[int, int] | None) -> str | None: ...


class WrongResult(Exception):
    """The kernel's result is wrong; the message says how and on which input."""

    def __init__(self, message: str, errors: Errors) -> None:
        super().__init__(message)
        self.errors = errors


@dataclass(frozen=True)
class Trial:
    """One set of inputs to try a kernel on."""

    case: Case
    call: Mapping[str, Any]
    distribution: str  # "uniform" on [-1, 1], or "normal"
    seed: int

    def __str__(self) -> str:
        call = ", ".join(f"{k}={v}" for k, v in self.call.items())
        return f"{self.distribution} inputs, {self.case.shape_name}{', ' + call if call else ''}, seed {self.seed}"

    def operands(self, op: Op, device: torch.device) -> tuple[Operands, torch.Tensor, tuple[torch.Tensor, ...]]:
        """The output, poisoned or random where the call reads it, and the inputs; the same ones every time."""
        operands = Operands(self.seed, self.distribution, DTYPES[self.case.dtype], device)
        inputs = op.inputs(self.case, operands.rand)
        allocate = operands.rand if op.reads_out(**self.call) else operands.poisoned
        return operands, allocate(*op.out_shape(self.case)), inputs


def trials(op: Op, case: Case, kernel: Stated, capability: tuple[int, int] | None, seed: int) -> list[Trial]:
    """What a case is verified on: its own shape under both distributions and every call, then small odd shapes, of
    which one is drawn at random so that nobody can prepare for it."""
    chosen = [Trial(case, op.calls[0], "uniform", seed), Trial(case, op.calls[0], "normal", seed + 1)]
    chosen += [Trial(case, call, "uniform", seed + 2) for call in op.calls[1:]]
    draw = random.Random(seed)
    surprise = {axis: 8 * draw.randint(1, 40) for axis in op.axes}
    for shape in (*op.odd_shapes, surprise):
        odd = replace(case, shape=shape)
        if kernel.unsupported(odd, capability) is None:
            chosen += [Trial(odd, call, "normal", seed + 3) for call in op.calls]
    return chosen


def verify(
    op: Op,
    case: Case,
    kernel: Stated,
    function: Function,
    device: torch.device,
    capability: tuple[int, int] | None,
    seed: int,
) -> Errors:
    """Try a kernel on every trial of its case. Raises WrongResult or Dishonest at the first that fails."""
    worst = Errors()
    for trial in trials(op, case, kernel, capability, seed):
        worst = _try(op, trial, kernel, function, device, worst)
    return worst


def _try(op: Op, trial: Trial, kernel: Stated, function: Function, device: torch.device, worst: Errors) -> Errors:
    operands, out, inputs = trial.operands(op, device)
    address = out.data_ptr()
    returned = function(out, *inputs, **trial.call)
    check_genuine(out, address)
    # Compared in stream order, before any synchronisation: what runs elsewhere has not arrived yet.
    result = out.detach().clone()
    synchronize(device)
    if returned is not None:
        raise Dishonest(f"returned a {type(returned).__name__}; a kernel writes its output and returns nothing")

    _, original, fresh = trial.operands(op, device)
    for index, (tensor, kept) in enumerate(zip(inputs, fresh, strict=True)):
        if not torch.equal(tensor, kept):
            raise WrongResult(f"changed its input {index} ({trial})", worst)
    if operands.breached():
        raise WrongResult(f"wrote outside its output ({trial})", worst)
    expected, bound = oracle(op, trial, original, fresh)
    errors = _errors(result, expected, bound)
    worst = Errors(
        max(errors.rel_l2, worst.rel_l2),
        max(errors.max_abs, worst.max_abs),
        max(errors.over_bound, worst.over_bound),
        worst.tried + 1,
    )
    if fault := _fault(result, errors):
        raise WrongResult(f"{fault} ({trial})", worst)
    bits = result if kernel.deterministic else None
    if not _repeats(op, trial, function, device, bits, expected, bound):
        raise WrongResult(f"gives another result when run again, which looks like a race ({trial})", worst)
    return worst


def check_genuine(out: torch.Tensor, address: int) -> None:
    """Raises Dishonest when an output is no longer the plain tensor at that address, which a kernel was to write."""
    if type(out) is not torch.Tensor or out.data_ptr() != address:
        raise Dishonest("put another tensor in the place of its output")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _repeats(
    op: Op,
    trial: Trial,
    function: Function,
    device: torch.device,
    bits: torch.Tensor | None,
    expected: torch.Tensor,
    bound: torch.Tensor,
) -> bool:
    """Whether the kernel gives the same bits again or, where it does not promise to, a right result."""
    deadline = time.perf_counter() + REPEATS_S
    for _ in range(REPEATS):
        _, out, inputs = trial.operands(op, device)
        function(out, *inputs, **trial.call)
        if not (torch.equal(out, bits) if bits is not None else _errors(out, expected, bound).over_bound <= 1):
            return False
        if time.perf_counter() > deadline:
            break
    return True


def oracle(
    op: Op, trial: Trial, out: torch.Tensor, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The expected output and the bound on each element's error, both fp64."""
    exact = [tensor.double() for tensor in inputs]
    expected, magnitude = op.reference(out.double(), *exact, **trial.call)
    ulp = torch.finfo(DTYPES[trial.case.dtype])
    roundoff = ROUNDOFF[trial.case.params.get("accumulate", "float32")]
    sums = magnitude.mul_(4 * math.sqrt(op.reduction(trial.case)) * roundoff)
    return expected, sums.add_(expected.abs(), alpha=ulp.eps).add_(ulp.smallest_normal)


def tolerance(op: Op, trial: Trial, out: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> float:
    """How far two correct results may lie apart, beside the rounding of the output: twice what the largest sum of
    magnitudes allows each of them, and as much again because inputs change by an element a round."""
    expected, bound = oracle(op, trial, out, inputs)
    sums = bound.sub_(expected.abs_(), alpha=torch.finfo(out.dtype).eps)
    return 4 * float(sums.max())


def differs(result: torch.Tensor, other: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Whether two correct results of the same inputs could not differ so much; NaN counts as a difference."""
    allowed = other.float().abs_().mul_(4 * torch.finfo(other.dtype).eps).add_(tolerance)
    return (result.float().sub_(other).abs_() <= allowed).all().logical_not()


def _errors(out: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> Errors:
    difference = out.double().sub_(expected)
    rel_l2 = float(difference.norm() / expected.norm().clamp_min(1e-300))
    difference.abs_()
    return Errors(rel_l2, float(difference.max()), float(difference.div_(bound).max()))


def _fault(out: torch.Tensor, errors: Errors) -> str | None:
    """What is wrong with an output, in words that point at the likely mistake."""
    if errors.over_bound <= 1:
        return None
    if math.isnan(errors.over_bound):
        share = float(out.isnan().double().mean())
        return f"{share:.1%} of the output is NaN: not written, or computed so"
    if not bool(out.any()):
        return "the output is all zeros"
    if out.numel() > 1 and bool((out == out.flatten()[0]).all()):
        return "the output is constant"
    return f"an element is off by {errors.over_bound:.3g} times its error bound"
