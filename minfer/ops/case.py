"""A case: one cell of the matrix, and the rules by which a kernel says which cases it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Case:
    """op x kernel x dtype x parameters x shape.

    `params` are the op's own choices that change the numbers, the work or the memory layout (for hgemm: `layout`,
    `accumulate`). `shape` maps the op's axes to sizes, without those at their default size. Both are in the op's order, so
    that `key` is stable. A call that is not the op's first one is a parameter too, `call`, which comes last.
    """

    op: str
    kernel: str
    dtype: str
    params: Mapping[str, str]
    shape: Mapping[str, int]

    def __getitem__(self, axis: str) -> int:
        """The size of an axis."""
        return self.shape[axis]

    @property
    def key(self) -> str:
        """A stable name of this cell, such as `hgemm/v01_naive/float16/layout=TN,accumulate=float32/m=512,n=512,k=512`."""
        return f"{self.op}/{self.kernel}/{self.problem}"

    @property
    def problem(self) -> str:
        """`key` without op and kernel: what two kernels must share to be comparable."""
        params = ",".join(f"{k}={v}" for k, v in self.params.items())
        return f"{self.dtype}/{params}/{self.shape_name}"

    @property
    def shape_name(self) -> str:
        return ",".join(f"{k}={v}" for k, v in self.shape.items())

    def with_shape(self, shape: Mapping[str, int]) -> Case:
        """The same with other sizes."""
        return replace(self, shape=dict(shape))

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "kernel": self.kernel,
            "dtype": self.dtype,
            "params": dict(self.params),
            "shape": dict(self.shape),
        }


# A rule looks at a case and returns why a kernel cannot run it, as half a sentence, or None.
Rule = Callable[[Case], str | None]


def multiples(**factors: int) -> Rule:
    """The rule that each named axis be a multiple of the given factor."""

    def rule(case: Case) -> str | None:
        for axis, factor in factors.items():
            if case[axis] % factor:
                return f"needs {axis} to be a multiple of {factor}, got {case[axis]}"
        return None

    return rule


def at_most(**limits: int) -> Rule:
    """The rule that each named axis be no longer than the given limit."""

    def rule(case: Case) -> str | None:
        for axis, limit in limits.items():
            if case[axis] > limit:
                return f"needs {axis} to be at most {limit}, got {case[axis]}"
        return None

    return rule


def both(*rules: Rule) -> Rule:
    """The rule that each of the given ones be kept."""
    return lambda case: next((why for rule in rules if (why := rule(case))), None)
