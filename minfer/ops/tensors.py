"""What an op says of its tensors: shape, dtype, role, layout, and how the values of each are made from a seed.

A `Fill` writes the values of one tensor, after those of the tensors before it, which it may look at. It also says how a
timed round changes them: a little, in place, without waiting for the device, and never so that they are invalid.
What a kernel must not read is poison: NaN among floats, an index out of all bounds among integers.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,  # bytes, and whatever is packed into them
    "int32": torch.int32,
    "int64": torch.int64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PIECES = 16  # of a row of uneven values
ABSURD = {"int32": 0x3FFFFFFF, "int64": 0x3FFFFFFFFFFF}  # indices that point nowhere

Tensors = Mapping[str, torch.Tensor]
Undo = Callable[[], object]


@dataclass
class Draw:
    """Where the values of one set of tensors come from: a generator on the device, and one of the host's.

    `distribution` is that of floats: "uniform" on [-1, 1], "normal", or "uneven". Uneven floats are normal, and each sixteenth
    of the last axis is multiplied by a random power of 2 from 1/128 to 1. So the mean of a part of a row says little about the
    mean of the whole row."""

    generator: torch.Generator
    random: random.Random
    distribution: str

    def floats(self, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """fp32 values of the distribution."""
        values = torch.empty(tuple(shape), dtype=torch.float32, device=device)
        if self.distribution == "uniform":
            return values.uniform_(-1, 1, generator=self.generator)
        values.normal_(generator=self.generator)
        if self.distribution == "uneven" and shape:
            pieces = min(PIECES, shape[-1])
            magnitudes = torch.empty((*shape[:-1], pieces), dtype=torch.float32, device=device)
            magnitudes.random_(-7, 1, generator=self.generator).exp2_()
            for piece in range(pieces):
                part = slice(shape[-1] * piece // pieces, shape[-1] * (piece + 1) // pieces)
                values[..., part] *= magnitudes[..., piece, None]
        return values

    def float(self) -> float:
        """One value of the distribution; for "uneven", a normal value that is not multiplied by anything."""
        return self.random.uniform(-1, 1) if self.distribution == "uniform" else self.random.gauss(0, 1)


class Fill(ABC):
    """How the values of a tensor are made; `changes` says whether a timed round can change them."""

    changes = False

    @abstractmethod
    def make(self, tensor: torch.Tensor, made: Tensors, draw: Draw) -> None:
        """Write all values. `made` has the tensors before this one."""

    def change(self, tensor: torch.Tensor, tensors: Tensors, draw: Draw) -> Undo:
        """Change a little, and return what takes it back. Without `changes`: nothing."""
        return lambda: None


@dataclass(frozen=True)
class Floats(Fill):
    scale: float
    shift: float
    poison: Callable[[Tensors], torch.Tensor] | None
    changes = True

    def make(self, tensor: torch.Tensor, made: Tensors, draw: Draw) -> None:
        values = draw.floats(tensor.shape, tensor.device)
        if (self.scale, self.shift) != (1.0, 0.0):
            values.mul_(self.scale).add_(self.shift)
        if self.poison:
            values.masked_fill_(self.poison(made), math.nan)
        tensor.copy_(values)

    def change(self, tensor: torch.Tensor, tensors: Tensors, draw: Draw) -> Undo:
        element = tensor[tuple(draw.random.randrange(size) for size in tensor.shape)]
        before = element.clone()
        value = self.shift + self.scale * draw.float()
        if self.poison is None:
            element.fill_(value)
        else:  # stays where it is
            old = before.float()
            element.copy_(torch.where(old.isnan(), old, torch.full_like(old, value)))
        return lambda: element.copy_(before)


@dataclass(frozen=True)
class Integers(Fill):
    low: int
    high: int
    changes = True

    def make(self, tensor: torch.Tensor, made: Tensors, draw: Draw) -> None:
        if tensor.is_floating_point():  # PyTorch draws no fp8
            wide = torch.empty(tensor.shape, device=tensor.device)
            tensor.copy_(wide.random_(self.low, self.high, generator=draw.generator))
        else:
            tensor.random_(self.low, self.high, generator=draw.generator)

    def change(self, tensor: torch.Tensor, tensors: Tensors, draw: Draw) -> Undo:
        element = tensor[tuple(draw.random.randrange(size) for size in tensor.shape)]
        before = element.clone()
        element.fill_(draw.random.randrange(self.low, self.high))
        return lambda: element.copy_(before)


@dataclass(frozen=True)
class Fixed(Fill):
    values: Sequence[int]

    def make(self, tensor: torch.Tensor, made: Tensors, draw: Draw) -> None:
        tensor.copy_(torch.tensor(self.values, dtype=tensor.dtype).view(tensor.shape))


@dataclass(frozen=True)
class PageTable(Fill):
    used: Sequence[int]
    pages: int
    caches: Sequence[str]
    changes = True

    def make(self, tensor: torch.Tensor, made: Tensors, draw: Draw) -> None:
        order = draw.random.sample(range(self.pages), sum(self.used))
        rows, first = [], 0
        absurd = ABSURD[NAMES[tensor.dtype]]
        for count in self.used:
            row = order[first : first + count]
            rows.append(row + [absurd] * (tensor.shape[1] - count))
            first += count
        tensor.copy_(torch.tensor(rows, dtype=tensor.dtype).view(tensor.shape))

    def change(self, tensor: torch.Tensor, tensors: Tensors, draw: Draw) -> Undo:
        entries = [(row, place) for row, count in enumerate(self.used) for place in range(count)]
        if not entries:
            return lambda: None
        one, other = (draw.random.choice(entries) for _ in range(2))

        def swap() -> None:
            pages = torch.stack([tensor[one], tensor[other]]).long()
            for name in self.caches:
                cache = tensors[name]
                cache = cache.view(torch.uint8) if cache.element_size() == 1 else cache  # PyTorch indexes no fp8
                cache.index_copy_(0, pages, cache.index_select(0, pages.flip(0)))
            tensor[one], tensor[other] = pages[1].to(tensor.dtype), pages[0].to(tensor.dtype)

        swap()
        return swap


@dataclass(frozen=True)
class MadeBy(Fill):
    function: Callable[[Tensors, Draw, torch.device], torch.Tensor]

    def make(self, tensor: torch.Tensor, made: Tensors, draw: Draw) -> None:
        tensor.copy_(self.function(made, draw, tensor.device))


def floats(scale: float = 1.0, shift: float = 0.0, poison: Callable[[Tensors], torch.Tensor] | None = None) -> Fill:
    """Random floats of the distribution that a trial has (see `Draw`), times `scale` plus `shift`.

    `poison(made)` is a mask that can be broadcast to the tensor: NaN is put where it is true."""
    return Floats(scale, shift, poison)


def integers(low: int, high: int) -> Fill:
    """Uniform integers from `low` to `high` - 1. Of uint8, 0 to 255 are random packed bits."""
    return Integers(low, high)


def fixed(values: Sequence[int]) -> Fill:
    """These integers, row-major, whatever the seed: lengths and offsets, which a case decides."""
    return Fixed(tuple(values))


def page_table(used: Sequence[int], pages: int, caches: Sequence[str]) -> Fill:
    """A (sequences, most pages) table: row i starts with `used[i]` different pages out of `pages`, drawn at random, and
    ends with absurd ones. A timed round lets two entries change places, and the pages in `caches`, the names of tensors
    whose first axis is the page, with them: what is meant stays the same, and where it lies does not."""
    return PageTable(tuple(used), pages, tuple(caches))


def made_by(function: Callable[[Tensors, Draw, torch.device], torch.Tensor]) -> Fill:
    """Whatever `function(made, draw, device)` returns; for what nothing above can say."""
    return MadeBy(function)


@dataclass(frozen=True)
class Spec:
    """One tensor of a case. `order`: its axes from the outermost in memory to the contiguous one, None for row-major.

    `shared`: there is one such tensor in a process, which all sets of operands share, because copies of it do not fit into
    memory: a model's weights. Its fill makes the same values whatever the seed. The reference does not get it, and makes the
    values itself, so that a kernel that changes it is wrong from its next verification on."""

    name: str
    role: str  # "in", "out" or "inout"
    shape: tuple[int, ...]
    dtype: str = ""  # one of DTYPES; the case's where empty
    fill: Fill = field(default_factory=floats)
    order: tuple[int, ...] | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        if self.dtype and self.dtype not in DTYPES:
            raise ValueError(f"{self.name} has the dtype {self.dtype}; there are {', '.join(DTYPES)}")
        if not all(isinstance(size, int) and size >= 0 for size in self.shape):
            raise ValueError(f"{self.name} has the shape {self.shape}; sizes are whole numbers from 0")
        if self.order is not None and sorted(self.order) != list(range(len(self.shape))):
            raise ValueError(f"{self.name} has the order {self.order}, which does not name each of its axes once")
        whole = self.dtype and not DTYPES[self.dtype].is_floating_point
        if whole and self.role != "out" and isinstance(self.fill, Floats):  # between -1 and 1: all zeros
            raise ValueError(f"{self.name} is {self.dtype}: say how it is filled, such as fill=integers(0, 128)")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """A flat tensor of `numel` elements in this shape and layout."""
        order = self.order or tuple(range(len(self.shape)))
        stored = flat.view([self.shape[axis] for axis in order])
        return stored.permute([order.index(axis) for axis in range(len(order))])

    def __str__(self) -> str:
        return f"{self.name} {self.role} {self.dtype} ({', '.join(map(str, self.shape))})"


def given(
    name: str, *shape: int, dtype: str = "", fill: Fill | None = None, order: tuple[int, ...] | None = None,
    shared: bool = False,
) -> Spec:  # fmt: skip
    """A tensor that a kernel reads, and must not change."""
    return Spec(name, "in", shape, dtype, fill or floats(), order, shared)


def out(name: str, *shape: int, dtype: str = "", order: tuple[int, ...] | None = None) -> Spec:
    """A tensor that a kernel writes: all of it, without reading it."""
    return Spec(name, "out", shape, dtype, floats(), order)


def inout(
    name: str, *shape: int, dtype: str = "", fill: Fill | None = None, order: tuple[int, ...] | None = None
) -> Spec:
    """A tensor that a kernel reads and writes. It gets its contents back before every timed call."""
    return Spec(name, "inout", shape, dtype, fill or floats(), order)
