"""Checks that a timed call computes what it computed when it was verified: compares its outputs with the baseline's.

This takes one comparison for each round, on the device, without waiting for it. The first result that differs by too much is
kept. The fp64 reference decides about it later, on the inputs of that round, under the bound of the verification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from minfer.bench.errors import Errors, compare_output, limit_of, run_reference
from minfer.bench.operands import Operands
from minfer.ops import Case, Op, Tensors

SLACK = 4.0  # times the bound: two right results may be at opposite ends of it, and it changes a little with the inputs


@dataclass(frozen=True)
class Tolerance:
    """How much two right results of nearly the same inputs may differ: each element by `SLACK` times its bound, each output
    as a whole by twice its limit."""

    op: Op
    case: Case
    allowed: dict[str, torch.Tensor]  # by output, before rounding, in fp32; outputs that must be exact are missing
    limits: dict[str, float] = field(default_factory=dict)  # by output, relative to its norm; only of sums

    @staticmethod
    def of(op: Op, case: Case, tensors: Tensors) -> Tolerance:
        """The tolerance for `tensors`, the inputs before any change."""
        expected = run_reference(op, case, tensors)
        bounds = {name: right.bound for name, right in expected.items() if right.bound is not None}
        limits = {
            name: 2 * limit_of(right, tensors[name].dtype) / norm
            for name, right in expected.items()
            if right.terms and (norm := float(right.value.norm())) > 0
        }
        return Tolerance(op, case, {name: SLACK * bound.float() for name, bound in bounds.items()}, limits)

    def differ(self, mine: Tensors, theirs: Tensors, inputs: Tensors) -> torch.Tensor:
        """Whether two results differ by more than this allows, as a tensor; NaN counts as a difference."""
        return torch.stack([self._differ(name, mine, theirs, inputs, self.allowed.get(name)) for name in mine]).any()

    def loosely(self, mine: Tensors, theirs: Tensors, inputs: Tensors) -> bool:
        """Whether two results differ by no more than the largest bound of any element allows. This is for inputs of the same
        distribution other than those of `of`, whose bounds are not known for each element."""
        most = {name: allowed.max() for name, allowed in self.allowed.items() if allowed.numel()}
        return not any(bool(self._differ(name, mine, theirs, inputs, most.get(name))) for name in mine)

    def _differ(
        self, name: str, mine: Tensors, theirs: Tensors, inputs: Tensors, allowed: torch.Tensor | None
    ) -> torch.Tensor:
        if name in self.op.checks:
            return self.op.checks[name](self.case, {**inputs, **mine}).all().logical_not()
        result, other = mine[name], theirs[name]
        if allowed is None:
            return (result != other).any() if result.element_size() > 1 else self._bytes_differ(result, other)
        limit = other.float().abs().mul_(SLACK * torch.finfo(other.dtype).eps).add_(allowed)
        limit.clamp_(max=torch.finfo(limit.dtype).max)  # so that only an infinity is near an infinity
        difference = (result.float() - other.float()).abs_().masked_fill_(result == other, 0.0)  # equal infinities
        differs = (difference <= limit).all().logical_not()
        if most := self.limits.get(name):
            differs |= difference.norm() > most * other.float().norm()
        return differs

    @staticmethod
    def _bytes_differ(result: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (result.view(torch.uint8) != other.view(torch.uint8)).any()


class TimedResults:
    """Compares the results of every timed round, and keeps the first suspect one: one that differs by too much.

    `inputs_of(round)` makes the operands of a round once more."""

    def __init__(self, tolerance: Tolerance, outputs: Tensors, inputs_of: Callable[[int], Operands]) -> None:
        self.tolerance, self.inputs_of = tolerance, inputs_of
        device = next(iter(outputs.values())).device
        self._suspect = torch.zeros((), dtype=torch.int64, device=device)  # the round, from 1; 0 for none
        self._kept = {name: torch.empty_like(tensor) for name, tensor in outputs.items()}

    def compare(self, number: int, mine: Tensors, theirs: Tensors, inputs: Tensors) -> None:
        """Compare the results of round `number`, which counts from 1."""
        first = self.tolerance.differ(mine, theirs, inputs) & (self._suspect == 0)
        self._suspect.copy_(torch.where(first, number, self._suspect))
        for name, kept in self._kept.items():
            kept.copy_(torch.where(first, mine[name], kept))

    def wrong(self) -> bool:
        """Whether the result that was kept since the last call is wrong; False if none was. Waits for the device."""
        number = int(self._suspect)
        if not number:
            return False
        self._suspect.zero_()
        inputs = self.inputs_of(number).named("in", "inout")
        return not matches_reference(self.tolerance.op, self.tolerance.case, inputs, self._kept)


def matches_reference(op: Op, case: Case, inputs: Tensors, results: Tensors) -> bool:
    """Whether results are right by the fp64 reference, from the inputs as they were before the call."""
    return over_bound(op, case, inputs, results) <= 1


def over_bound(op: Op, case: Case, inputs: Tensors, results: Tensors) -> float:
    """The largest error of the results against the fp64 reference: that of an element as a multiple of its bound, or that of
    an output as a multiple of its limit, whichever is larger. NaN for a NaN."""
    expected = run_reference(op, case, inputs)
    tensors = {**inputs, **results}
    worst = Errors()
    for name in results:
        worst = worst.worst(compare_output(op, case, name, tensors, expected))
    return worst.over
