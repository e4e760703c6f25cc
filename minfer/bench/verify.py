"""Is a kernel right? It is run on random inputs and compared, element by element, with an oracle in fp64.

The bound of an element is one ulp of the output's dtype plus 4 sqrt(K) u S: u is the accumulator's unit roundoff, K
the length of the sum, S the sum of the magnitudes of its terms. It is the probabilistic form of the classical forward
error bound gamma_K S (Higham and Mary, A new approach to probabilistic rounding error analysis, SISC 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from minfer.ops import DTYPES, Case, Kernel, Op

Function = Callable[..., None]
ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11}  # of the accumulator


@dataclass(frozen=True)
class Errors:
    """How far from the oracle, over everything that was tried."""

    rel_l2: float = 0.0
    max_abs: float = 0.0
    over_bound: float = 0.0  # above 1 is wrong
    tried: int = 0


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


def random(trial: Trial, device: torch.device) -> Callable[..., torch.Tensor]:
    """The source of a trial's inputs: `rand(*shape)` gives the next tensor."""
    generator = torch.Generator(device).manual_seed(trial.seed)
    dtype = DTYPES[trial.case.dtype]

    def rand(*shape: int) -> torch.Tensor:
        values = torch.empty(shape, dtype=torch.float32, device=device)
        if trial.distribution == "uniform":
            values.uniform_(-1, 1, generator=generator)
        else:
            values.normal_(generator=generator)
        return values.to(dtype)

    return rand


def trials(op: Op, case: Case, kernel: Kernel, capability: tuple[int, int] | None, seed: int) -> list[Trial]:
    """What a case is verified on: its own shape under both distributions and every call, and small odd shapes."""
    chosen = [Trial(case, op.calls[0], "uniform", seed), Trial(case, op.calls[0], "normal", seed + 1)]
    chosen += [Trial(case, call, "uniform", seed + 2) for call in op.calls[1:]]
    for shape in op.odd_shapes:
        odd = replace(case, shape=shape)
        if kernel.unsupported(odd, capability) is None:
            chosen += [Trial(odd, call, "normal", seed + 3) for call in op.calls]
    return chosen


def verify(
    op: Op,
    case: Case,
    kernel: Kernel,
    function: Function,
    device: torch.device,
    capability: tuple[int, int] | None,
    seed: int,
) -> Errors:
    """Try a kernel on every trial of its case; raises WrongResult at the first that fails."""
    worst = Errors()
    for trial in trials(op, case, kernel, capability, seed):
        worst = _try(op, trial, function, device, worst)
    return worst


def _try(op: Op, trial: Trial, function: Function, device: torch.device, worst: Errors) -> Errors:
    rand = random(trial, device)
    inputs = op.inputs(trial.case, rand)
    before = [tensor.clone() for tensor in inputs]
    out = torch.full(op.out_shape(trial.case), math.nan, dtype=DTYPES[trial.case.dtype], device=device)
    if op.reads_out(**trial.call):
        out = rand(*out.shape)
    expected, bound = oracle(op, trial, out, inputs)

    function(out, *inputs, **trial.call)
    if device.type == "cuda":
        torch.cuda.synchronize(device)

    for index, (tensor, kept) in enumerate(zip(inputs, before, strict=True)):
        if not torch.equal(tensor, kept):
            raise WrongResult(f"changed its input {index} ({trial})", worst)
    errors = _errors(out, expected, bound)
    worst = Errors(
        max(worst.rel_l2, errors.rel_l2),
        max(worst.max_abs, errors.max_abs),
        max(worst.over_bound, errors.over_bound),
        worst.tried + 1,
    )
    if fault := _fault(out, errors):
        raise WrongResult(f"{fault} ({trial})", worst)
    return worst


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


def _errors(out: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> Errors:
    difference = out.double().sub_(expected)
    rel_l2 = float(difference.norm() / expected.norm().clamp_min(1e-300))
    difference.abs_()
    return Errors(rel_l2, float(difference.max()), float(difference.div_(bound).max()))


def _fault(out: torch.Tensor, errors: Errors) -> str | None:
    """What is wrong with an output, in words that point at the likely mistake."""
    if not errors.over_bound > 1:  # NaN compares false, and is looked at next
        if not math.isnan(errors.over_bound):
            return None
        share = float(out.isnan().double().mean())
        return f"{share:.1%} of the output is NaN: not written, or computed so"
    if not bool(out.any()):
        return "the output is all zeros"
    if out.numel() > 1 and bool((out == out.flatten()[0]).all()):
        return "the output is constant"
    return f"an element is off by {errors.over_bound:.3g} times its error bound"
