"""A function's contract: the dtypes and sizes of its tensors, stated in a table and checked in one place.

    TAKES = Contract(
        "moe_ffn",
        \"\"\"
        x: float16 | bfloat16 (tokens, hidden)
        down: x (experts, hidden, ffn)
        gate_up: x (experts, 2*ffn, hidden)
        offsets: int32 (experts)
        -> x (tokens, hidden)
        \"\"\",
        experts=1,
    )

A line is a tensor that the function takes or, after an arrow, a new one that it returns. Its dtype is the one that is named, or
that of another tensor, or one of several. Its sizes are numbers, axes by name, or products of these. The first tensor with an
axis decides its size. `...` stands for any number of leading axes. The words after the table are rules for axes: a tuple
has the sizes that are allowed, and a range too; a number is the least size; a string names an axis, known before, of which this
one is a divisor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
Rule = tuple[int, ...] | range | int | str
LEAD = "..."
LINE = re.compile(r"(?:(\w+): |-> )(\w+(?: \| \w+)*) \((.*)\)")


@dataclass(frozen=True)
class Size:
    """A size as the table has it: a number times axes."""

    text: str
    factor: int
    axes: tuple[str, ...]

    def of(self, sizes: Mapping[str, Any]) -> Any:
        """Its value; None if the size of an axis is not known."""
        if any(axis not in sizes for axis in self.axes):
            return None
        return math.prod((sizes[axis] for axis in self.axes), start=self.factor)

    def matches(self, size: Any, sizes: dict[str, Any]) -> bool:
        """Whether a tensor may have this size. Decides an axis that is not known."""
        if (wanted := self.of(sizes)) is not None:
            return bool(size == wanted)
        (axis,) = (axis for axis in self.axes if axis not in sizes)
        known = math.prod((sizes[each] for each in self.axes if each != axis), start=self.factor)
        if known != 1 and (known == 0 or size % known):
            return False
        sizes[axis] = size if known == 1 else size // known
        return True


@dataclass(frozen=True)
class Takes:
    """A line of the table."""

    name: str  # empty for a result
    dtypes: tuple[torch.dtype | str, ...]  # a string is the tensor whose dtype it has
    lead: bool  # whether its sizes begin with `...`
    sizes: tuple[Size, ...]


class Contract:
    """What the function `minfer.<function>` takes."""

    def __init__(self, function: str, table: str, **rules: Rule) -> None:
        self.function, self.rules = function, rules
        lines = [_parse(line) for line in table.strip().splitlines()]
        self.tensors = [line for line in lines if line.name]
        self.results = [line for line in lines if not line.name]

    def check(self, *given: Any, **sizes: Any) -> dict[str, Any]:
        """The size of each axis. Takes the tensors in the order of the table, None for one that is left out; further arguments
        are ignored. `sizes` are axes that are known before. Raises ValueError for tensors that do not fit."""
        dtypes: dict[str, torch.dtype] = {}
        first: Tensor = given[0]
        for line, tensor in zip(self.tensors, given, strict=False):
            if tensor is None:
                continue
            dtypes[line.name] = tensor.dtype
            known = dict(sizes)
            right = tensor.dtype in [dtypes[each] if isinstance(each, str) else each for each in line.dtypes]
            if not (_match(line, tensor.shape, sizes) and right):
                raise self._misfit(line, tensor, dtypes, right, known)
            if tensor.device != first.device:
                raise self.error(f"{line.name} on the device of {self.tensors[0].name}, {first.device}", tensor.device)
            for axis, rule in self.rules.items():
                if axis in sizes and axis not in known:
                    self._check_rule(line.name, axis, rule, sizes)
        return sizes

    def make(self, *given: Any, **sizes: Any) -> Any:
        """The new tensors that the function returns, not filled: one, or a tuple of several. Raises as `check` does."""
        found = [given[0].new_empty(shape, dtype=dtype) for shape, dtype in self._results(given, sizes)]
        return found[0] if len(found) == 1 else tuple(found)

    def check_out(self, out: Tensor, *given: Any) -> None:
        """Raises ValueError unless a caller's tensor `out` is like the one that `make` returns. Raises as `check` does."""
        ((shape, dtype),), device = self._results(given, {}), given[0].device
        if out.shape != shape or out.dtype != dtype or out.device != device:
            takes = f"an out of {dtype}, {shape} on {device}"
            raise self.error(takes, f"{out.dtype}, {tuple(out.shape)} on {out.device}")

    def _results(self, given: tuple[Any, ...], sizes: dict[str, Any]) -> list[tuple[tuple[Any, ...], torch.dtype]]:
        sizes = self.check(*given, **sizes)
        named = {line.name: x for line, x in zip(self.tensors, given, strict=False)}
        found = []
        for line in self.results:
            (dtype,) = (named[each].dtype if isinstance(each, str) else each for each in line.dtypes)
            lead = sizes[LEAD] if line.lead else ()
            found.append(((*lead, *(size.of(sizes) for size in line.sizes)), dtype))
        return found

    def error(self, takes: str, got: object) -> ValueError:
        """The error of an argument that does not fit."""
        return ValueError(f"minfer.{self.function} takes {takes}, got {got}")

    def _misfit(
        self, line: Takes, tensor: Tensor, dtypes: Mapping[str, torch.dtype], right: bool, sizes: Mapping[str, Any]
    ) -> ValueError:
        """The error of a tensor whose dtype is wrong, or if that is `right`, whose shape is."""
        shape = _text(line, sizes)
        if len(line.dtypes) == 1 and isinstance(line.dtypes[0], torch.dtype):
            takes = f"{line.name} of {_name(line.dtypes[0])} and the shape {shape}"
            return self.error(takes, f"{tensor.dtype}, {tuple(tensor.shape)}")
        if right:
            return self.error(f"{line.name} of {shape}", tuple(tensor.shape))
        names = [f"the dtype of {x}, {dtypes[x]}" if isinstance(x, str) else _name(x) for x in line.dtypes]
        return self.error(f"{line.name} of {_any_of(names)}", tensor.dtype)

    def _check_rule(self, name: str, axis: str, rule: Rule, sizes: Mapping[str, Any]) -> None:
        size = sizes[axis]
        if isinstance(rule, str):
            if size == 0 or sizes[rule] % size:
                raise self.error(f"{name} whose {axis} divide the {sizes[rule]} {rule}", size)
        elif isinstance(rule, int):
            if size < rule:
                raise self.error(f"{name} whose {axis} is at least {rule}", size)
        elif isinstance(rule, range):  # `in` would compare a symbolic size with each number
            if not rule.start <= size < rule.stop:
                raise self.error(f"{name} whose {axis} is from {rule.start} to {rule.stop - 1}", size)
        elif size not in rule:
            raise self.error(f"{name} whose {axis} is {_any_of(map(str, rule))}", size)


def _parse(line: str) -> Takes:
    name, dtypes, axes = LINE.fullmatch(line.strip()).groups()  # type: ignore[union-attr]
    found = tuple(getattr(torch, each, each) for each in dtypes.split(" | "))
    words = [word for word in axes.split(", ") if word]
    lead = words[:1] == [LEAD]
    return Takes(name or "", found, lead, tuple(map(_size, words[lead:])))


def _size(text: str) -> Size:
    parts = text.split("*")
    factor = math.prod(int(part) for part in parts if part.isdigit())
    return Size(text, factor, tuple(part for part in parts if not part.isdigit()))


def _match(line: Takes, shape: torch.Size, sizes: dict[str, Any]) -> bool:
    count = len(shape) - len(line.sizes)
    if count < 0 or (count and not line.lead):
        return False
    if line.lead and tuple(shape[:count]) != sizes.setdefault(LEAD, tuple(shape[:count])):
        return False
    return all(wanted.matches(size, sizes) for wanted, size in zip(line.sizes, shape[count:], strict=True))


def _text(line: Takes, sizes: Mapping[str, Any]) -> str:
    """The shape that is wanted, with the sizes that are known."""
    lead = map(str, sizes.get(LEAD, (LEAD,))) if line.lead else ()
    found = [size.text if (value := size.of(sizes)) is None else str(value) for size in line.sizes]
    words = [*lead, *found]
    return f"({', '.join(words)}{',' * (len(words) == 1)})"


def _any_of(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
