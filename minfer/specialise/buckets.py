"""Which sizes share a variant: exact ones, powers of two, or ranges.

A size is what a caller monitors: a length or a batch size, or several of them as a tuple. Its key has a `Span` for each number:
the sizes that one variant serves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from operator import index
from typing import NamedTuple

Size = int | tuple[int, ...]


class Span(NamedTuple):
    """The sizes from `low` to `high`, both included."""

    low: int
    high: int


Key = tuple[Span, ...]
Buckets = Callable[[Size], Key]


def exact(size: Size) -> Key:
    """A variant for each size."""
    return tuple(Span(number, number) for number in numbers(size))


def powers_of_two(size: Size) -> Key:
    """A variant for the sizes above one power of two and up to the next: 5 to 8, 9 to 16."""
    highs = [1 << (number - 1).bit_length() if number > 0 else number for number in numbers(size)]
    return tuple(Span(high // 2 + 1 if high > 1 else high, high) for high in highs)


def ranges(*highs: int) -> Buckets:
    """A variant for the sizes up to the first of `highs`, one for those from there to the second, and so on. Above the last,
    each size is its own. `ranges(16, 64)` has 1 to 16 and 17 to 64. Raises ValueError unless the highs rise, TypeError
    for what is no number."""
    highs = numbers(highs)
    if not highs or any(low >= high for low, high in zip((0, *highs), highs, strict=False)):
        raise ValueError(f"ranges takes rising sizes from 1, got {highs}")

    def span(number: int) -> Span:
        place = bisect_left(highs, number)
        if place == len(highs) or number < 1:
            return Span(number, number)
        return Span(highs[place - 1] + 1 if place else 1, highs[place])

    return lambda size: tuple(map(span, numbers(size)))


def named(text: str) -> Buckets:
    """What a command line calls them: `exact`, `powers`, or `ranges:16,64,256`. Raises ValueError for anything else."""
    name, _, highs = text.partition(":")
    if name == "ranges" and all(high.isdecimal() for high in highs.split(",")):
        return ranges(*map(int, highs.split(",")))
    if text in ("exact", "powers"):
        return exact if text == "exact" else powers_of_two
    raise ValueError(f"buckets are exact, powers, or ranges with their upper ends such as ranges:16,64, not {text!r}")


def numbers(size: Size) -> tuple[int, ...]:
    """The numbers of a size. Raises TypeError for what is none."""
    try:
        return tuple(map(index, size if isinstance(size, tuple) else (size,)))
    except TypeError:
        raise TypeError(f"a size is a whole number, or a tuple of them, got {size!r}") from None


def text(key: Key) -> str:
    """As a sentence has it: 128, 17-64, 4x128."""
    return "x".join(str(span.low) if span.low == span.high else f"{span.low}-{span.high}" for span in key)
