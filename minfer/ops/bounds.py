"""What an op's reference returns: the right value of each element of an output, and how far from it a kernel may be.

A bound is of the error before the output is rounded to its dtype. Verification adds that rounding itself: eps |value| plus
the smallest normal number of the dtype. The unit roundoff u is 2^-24 for sums in float32 and 2^-11 in float16.

The elements' bounds allow for the worst of many elements. The errors of all elements together are far smaller; `whole_limit`
limits their norm. It finds a kernel that computes something else although each of its elements is within a wide bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11}
DEVIATIONS = 4  # standard deviations of an error that a bound allows


@dataclass(frozen=True)
class Expected:
    """`value` and `bound` are fp64 tensors of the output's shape; without a bound, the output must be exactly `value`.

    `terms`: how many terms each sum has, in an accumulator whose unit roundoff is `unit`; 0 if the bound is not that of
    `dot`, which is 4 sqrt(terms) unit times the magnitudes of the terms."""

    value: torch.Tensor
    bound: torch.Tensor | None = None
    terms: int = 0
    unit: float = 0.0


def exact(value: torch.Tensor) -> Expected:
    """Integers, and floats that are copied and not computed."""
    return Expected(value)


def within(value: torch.Tensor, bound: torch.Tensor) -> Expected:
    """Values with a bound that the op has worked out itself."""
    return Expected(value, bound)


def rounded(value: torch.Tensor, roundings: float, accumulate: str = "float32") -> Expected:
    """Values that take about so many roundings in the accumulator's precision, each relative to the result: products,
    quotients and functions without cancellation, such as an rsqrt."""
    return Expected(value, value.abs() * (roundings * ROUNDOFF[accumulate]))


def dot(value: torch.Tensor, magnitude: torch.Tensor, terms: int, accumulate: str = "float32") -> Expected:
    """Sums of `terms` products. `magnitude` is the sum of the terms' magnitudes, of the same shape; it is overwritten.

    4 sqrt(terms) u magnitude is the probabilistic form of the classical forward error bound gamma_n (Higham and Mary, A
    new approach to probabilistic rounding error analysis, SISC 2019; Higham, Accuracy and Stability, section 3.5)."""
    unit = ROUNDOFF[accumulate]
    return Expected(value, magnitude.mul_(DEVIATIONS * math.sqrt(terms) * unit), terms, unit)


def whole_limit(value: float, bound: float, rounding: float, elements: int, terms: int, unit: float) -> float:
    """How large the Euclidean norm of all errors of an output may be.

    `value`, `bound` and `rounding`: the norms of the right values, of the elements' bounds, and of what the rounding to the
    output's dtype adds to these; `terms` and `unit` as in `Expected`.

    The limit is

        min(|b| + |r|, max(|v| / 32, (1 + 4 / sqrt(elements)) (|r| + e)))

    with v, b and r for value, bound and rounding. e / sqrt(elements) is the root mean square of the errors before the output is
    rounded. A bound allows an element at least 4 standard deviations, so that e is |b| / 4. For sums it is less:

        e = u sqrt(terms |v|^2 + |s|^2)    where |s|, the norm of the terms' magnitudes, is |b| / (4 sqrt(terms) u)

    Let terms be independent and of mean 0. Then the root mean square of a partial sum of i terms is sqrt(i / terms) of that of
    the sum, and each addition adds an independent error of at most u / sqrt(3) of its partial sum (Robertazzi and Schwartz,
    Best ordering for floating-point addition, TOMS 1988). When the terms are added one after the other, these errors come to
    u sqrt(terms / 6) of the sum; any other order gives less. The first part of e is 2.4 times as much. The part with |s| is for
    sums that are small by chance although their partial sums are not.

    The factor 1 + 4 / sqrt(elements) allows the norm of few elements 4 standard deviations. The maximum with |v| / 32 is for
    errors that many elements share; a sum that omits a sixteenth of its terms is off by 1/4, far more than 1/32."""
    errors = bound / DEVIATIONS
    if terms:
        errors = math.hypot(unit * math.sqrt(terms) * value, bound / (DEVIATIONS * math.sqrt(terms)))
    likely = (1 + DEVIATIONS / math.sqrt(elements)) * (rounding + errors)
    return min(bound + rounding, max(value / 32, likely))
