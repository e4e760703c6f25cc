"""How far an output is from the op's reference, by element and as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from minfer.ops import DTYPES, Case, Expected, Op, Spec, Tensors
from minfer.ops.bounds import whole_limit


@dataclass(frozen=True)
class Errors:
    """How far results are from the reference: the largest errors over all inputs and outputs.

    Only outputs of floats with a bound count in `rel_l2`, ||result - reference|| / ||reference||, in `max_abs`, which is in the
    output's unit, and in `over_limit`."""

    rel_l2: float = 0.0
    max_abs: float = 0.0
    over_bound: float = 0.0  # |result - reference| / bound; above 1 is wrong. Exact outputs and checks: 0 or inf
    over_limit: float = 0.0  # ||result - reference|| / the limit for the whole output; above 1 is wrong
    tried: int = 0  # sets of inputs
    left_out: int = 0  # sets of inputs that a slow kernel was not run on

    def worst(self, other: Errors) -> Errors:
        """The larger of each; NaN is larger than any number."""
        return Errors(
            _larger(self.rel_l2, other.rel_l2),
            _larger(self.max_abs, other.max_abs),
            _larger(self.over_bound, other.over_bound),
            _larger(self.over_limit, other.over_limit),
            self.tried + other.tried,
            self.left_out + other.left_out,
        )

    @property
    def over(self) -> float:
        """The larger of `over_bound` and `over_limit`: above 1, or NaN, is wrong."""
        return _larger(self.over_bound, self.over_limit)


def _larger(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def run_reference(op: Op, case: Case, tensors: Tensors) -> Mapping[str, Expected]:
    """What each written tensor must be, computed from the tensors as they were before the call, but for shared ones. Tensors
    that only have a check are left out. Raises ValueError for an op whose reference and tensors do not fit each other."""
    specs = op.specs(case)
    exact = {
        spec.name: tensors[spec.name].double() if tensors[spec.name].is_floating_point() else tensors[spec.name]
        for spec in specs
        if spec.role != "out" and not spec.shared
    }
    found = op.reference(case, exact, **op.call(case))
    written = {spec.name: spec for spec in specs if spec.role != "in"}
    if not isinstance(found, Mapping):
        raise ValueError(
            f"the reference of {op.name} returns a {type(found).__name__}; return a dict of the outputs by name"
        )
    if missing := written.keys() - found.keys() - op.checks.keys():
        raise ValueError(f"the reference of {op.name} lacks its output {min(missing)}")
    if unknown := found.keys() - written.keys():
        raise ValueError(
            f"the reference of {op.name} returns {min(unknown)}, which is not an output; its outputs are {', '.join(written)}"
        )
    for name, right in found.items():
        _check_expected(f"the reference of {op.name} gives its output {name}", written[name], right)
    return found


def _check_expected(who: str, spec: Spec, right: Expected) -> None:
    if not isinstance(right, Expected):
        raise ValueError(f"{who} as a {type(right).__name__}; return exact(...), rounded(...), dot(...) or within(...)")
    if right.value.shape != spec.shape:
        raise ValueError(f"{who} the shape {tuple(right.value.shape)}, but the output has {spec.shape}")
    if right.bound is not None and not DTYPES[spec.dtype].is_floating_point:
        raise ValueError(f"{who} a bound, but {spec.dtype} is not rounded; return exact(...)")


def bound_of(expected: Expected, dtype: torch.dtype) -> torch.Tensor:
    """How far each element of a right result of this dtype may be from its value, in fp64: what the reference allows, plus
    the rounding to the dtype."""
    kind = torch.finfo(dtype)
    rounding = expected.value.abs().mul_(kind.eps).add_(kind.smallest_normal)
    return rounding if expected.bound is None else rounding.add_(expected.bound)


def limit_of(expected: Expected, dtype: torch.dtype) -> float:
    """How large the norm of all errors of a right result of this dtype may be. Values that are not finite have no error.

    One element may be zero instead of a subnormal number. All together may not, because the softmax of a long row in float16
    has only subnormal numbers."""
    assert expected.bound is not None
    kind, elements = torch.finfo(dtype), expected.value.numel()
    value = float(expected.value.norm())
    if not math.isfinite(value):
        value = float(expected.value.masked_fill(~expected.value.isfinite(), 0.0).norm())
    bound = float(expected.bound.expand_as(expected.value).norm())
    rounding = kind.eps * (value + kind.smallest_normal * math.sqrt(elements))
    return whole_limit(value, bound, rounding, elements, expected.terms, expected.unit)


def describe_wrong(op: Op, case: Case, name: str, tensors: Tensors, expected: Mapping[str, Expected]) -> str:
    """Says how many elements of a wrong output are wrong, and the index, the value and the expected value of the first. If each
    element is within its bound and only the whole output is not, it says the same of the element with the largest error.
    Arguments as of `compare_output`."""
    result, right = tensors[name], expected.get(name)
    if name in op.checks:
        wrong = ~op.checks[name](case, tensors).expand_as(result)
        right = None  # another answer may be right, too
    elif right is None or right.bound is None:
        wrong = result.to(right.value.dtype) != right.value if right else torch.zeros_like(result, dtype=torch.bool)
    else:
        error = result.double()
        same = error == right.value
        error.sub_(right.value).abs_().masked_fill_(same, 0.0)
        wrong = ~(error <= bound_of(right, result.dtype))  # a NaN is wrong
        if not bool(wrong.any()):
            return f"the largest error is {_describe_element(int(error.argmax()), result, right)}"
    count = int(wrong.sum())
    first = _describe_element(int(wrong.flatten().view(torch.uint8).argmax()), result, right)
    return f"{count} of {wrong.numel()} elements {'is' if count == 1 else 'are'} wrong, the first {first}"


def _describe_element(place: int, result: torch.Tensor, right: Expected | None) -> str:
    """Where an element is, counted in the order of the indices, what it is, and what it must be."""
    index = [int(i) for i in torch.unravel_index(torch.tensor(place), result.shape)]

    def number(tensor: torch.Tensor, digits: int = 7) -> str:
        return format(tensor[tuple(index)].item(), f".{digits}g" if tensor.is_floating_point() else "")

    said = f"at {index}: got {number(result)}"
    if right is None:
        return said
    said += f", expected {number(right.value)}"
    return said if right.bound is None else f"{said}, bound {number(bound_of(right, result.dtype), 3)}"


def compare_output(op: Op, case: Case, name: str, tensors: Tensors, expected: Mapping[str, Expected]) -> Errors:
    """How far an output is from what it must be. `tensors`: inputs as they were, and outputs as they are."""
    result = tensors[name]
    if name in op.checks:
        return Errors(over_bound=0.0 if bool(op.checks[name](case, tensors).all()) else math.inf)
    right = expected[name]
    if right.bound is None:
        return Errors(over_bound=0.0 if bool((result.to(right.value.dtype) == right.value).all()) else math.inf)
    if not result.numel():
        return Errors()
    difference = result.double()
    same = difference == right.value  # an infinity where there must be one
    difference.sub_(right.value)
    rel_l2 = float(difference.norm() / right.value.norm().clamp_min(1e-300))
    difference.abs_().masked_fill_(same, 0.0)
    over_limit = float(difference.norm()) / max(limit_of(right, result.dtype), 1e-300)
    largest, over_bound = difference.max(), difference.div_(bound_of(right, result.dtype)).max()
    return Errors(rel_l2, float(largest), float(over_bound), over_limit)
