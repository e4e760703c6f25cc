"""Checks whether the bounds of an op would accept a kernel that computes nothing: one that writes zeros, one number everywhere,
or a copy of an input. Such an op is refused with a sentence, because verification could not tell its kernels from wrong ones.

The check costs little: nearly always the first elements show that such a result is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from minfer.bench.errors import compare_output, limit_of, run_reference
from minfer.bench.operands import Operands, poison
from minfer.ops import Case, Expected, Op, Tensors
from minfer.ops.bounds import DEVIATIONS, whole_limit, within

# If terms are random, a sum that omits a sixteenth of them is off by the square root of 1/16 relative to its size.
TOO_WIDE = 0.25
FEW = 32  # fewer elements can all be zero, or equal, by chance
REDRAWN = ("uniform", "normal", "uneven")  # all distributions on which kernels are verified
REDRAWN_SEED = 1 << 20  # far from those of verification, which count up from a case's own
SAMPLE = 4096  # elements that nearly always show that a result is wrong


def refuse_trivial(op: Op, case: Case, tensors: Tensors, results: Tensors, expected: Mapping[str, Expected]) -> None:
    """Raises ValueError if a trivial result would be right. `tensors`: as they were before the call. `results`: those of a
    right kernel by name, for outputs that have a check and no reference. Without them such an output is skipped."""
    for spec in op.specs(case):
        name = spec.name
        if spec.role == "in" or not spec.numel:
            continue
        if name in op.checks:
            kind = _trivial_by_check(op, case, name, tensors, results) if name in results else None
        else:
            kind = _trivial(op, case, name, tensors, expected)
            if kind and len(expected[name].value.unique()) < FEW:
                kind = _trivial_again(op, case, name, tensors[name].device)
        if kind:
            raise ValueError(
                f"{kind} would be right for the output {name} of {op.name} ({case.problem}); "
                "narrow the bounds of its reference, or fill its inputs otherwise"
            )


def _trivial(op: Op, case: Case, name: str, tensors: Tensors, expected: Mapping[str, Expected]) -> str | None:
    """What would be right for an output with a reference, or None."""
    right, dtype = expected[name], tensors[name].dtype
    value, elements = right.value, right.value.numel()
    if right.terms:
        # The limit of a sum of random terms, relative to it, with |s| as large as it usually is.
        usual = DEVIATIONS * right.terms * right.unit
        wide = whole_limit(1.0, usual, torch.finfo(dtype).eps, elements, right.terms, right.unit)
        if wide >= TOO_WIDE:
            return f"a sum of {right.terms} terms without a sixteenth of them, or whatever else is off by {wide:.0%},"
    if elements < FEW:
        return None
    if not bool((value != 0).any()):
        return "zeros"
    if right.bound is None:
        return None
    finite = value if bool(value.isfinite().all()) else value.masked_fill(~value.isfinite(), 0.0)
    if (wide := limit_of(right, dtype) / max(float(finite.norm()), 1e-300)) >= TOO_WIDE:
        return f"anything that is off by {wide:.0%} as a whole"
    for kind, result in _candidates(name, finite.mean(), right, tensors):
        if _is_right(op, case, name, result, expected):
            return kind
    return None


def _trivial_again(op: Op, case: Case, name: str, device: torch.device) -> str | None:
    """What would be right with other inputs, or None. Few different values may be near each other by chance: of two long sums
    of random terms, their mean is right for both in a few draws of a hundred. Bounds that are too wide are so in each draw."""
    for distribution in REDRAWN:
        tensors = Operands(op, case, REDRAWN_SEED, distribution, device).tensors
        if kind := _trivial(op, case, name, tensors, run_reference(op, case, tensors)):
            return kind
    return None


def _candidates(name: str, mean: torch.Tensor, right: Expected, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Results that need no computation, in the output's dtype, with their names. Results that equal the right one are left
    out: a rotation by an angle of 0 is a copy."""
    written, value = tensors[name], right.value
    yield "zeros", torch.zeros_like(written)
    if bool((value != value.flatten()[0]).any()):
        yield "the mean of all elements", mean.to(written.dtype).expand_as(written)
    if written.dim() > 1 and bool((value != value[-1:]).any()):
        yield "the last row, repeated,", value[-1:].to(written.dtype).expand_as(written)
    for other, tensor in tensors.items():
        is_alike = tensor.shape == written.shape and tensor.dtype == written.dtype
        if is_alike and bool((tensor.double() != value.to(written.dtype).double()).any()):
            yield f"a copy of {other}", tensor


def _is_right(op: Op, case: Case, name: str, result: torch.Tensor, expected: Mapping[str, Expected]) -> bool:
    """Whether a result is right. It compares a few rows first, and all rows only if these are right."""
    right = expected[name]
    rows = max(1, SAMPLE * len(result) // result.numel())
    assert right.bound is not None
    some = within(right.value[:rows], right.bound.expand_as(right.value)[:rows])
    if not compare_output(op, case, name, {name: result[:rows]}, {name: some}).over <= 1:
        return False
    return compare_output(op, case, name, {name: result}, expected).over <= 1


def _trivial_by_check(op: Op, case: Case, name: str, tensors: Tensors, results: Tensors) -> str | None:
    """The trivial result that the check of an output accepts, or None. A check that accepts even unwritten memory allows
    anything there on purpose."""
    if results[name].numel() < FEW or not bool((results[name] != 0).any()):
        return None

    def is_right(result: torch.Tensor) -> bool:
        return bool(op.checks[name](case, {**tensors, **results, name: result}).all())

    unwritten = torch.empty_like(results[name])
    poison(unwritten)
    return "zeros" if is_right(torch.zeros_like(results[name])) and not is_right(unwritten) else None
