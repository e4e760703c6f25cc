"""What an op's reference returns: the right value of each element of an output, and how far from it a kernel may be.

A bound is of the error before the output is rounded to its dtype. Verification adds that rounding itself: eps |value| plus
the smallest normal number of the dtype. The unit roundoff u is 2^-24 for sums in float32 and 2^-11 in float16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11}


@dataclass(frozen=True)
class Expected:
    """`value` and `bound` are fp64 tensors of the output's shape; without a bound, the output must be exactly `value`."""

    value: torch.Tensor
    bound: torch.Tensor | None = None


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
    return Expected(value, magnitude.mul_(4 * math.sqrt(terms) * ROUNDOFF[accumulate]))
