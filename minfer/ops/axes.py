"""The axes of an op: which sizes each takes, how verification draws one, and lengths that differ within a batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Axis:
    """`check(size, sizes)` says why a size is not allowed, as half a sentence, or None. `draw(rng, sizes)` draws a small
    one. `sizes` are those of the axes before it, which its own may depend on. Sizes start at `least`, 0 or 1.

    `default` names an earlier axis. A shape may leave out an axis that has a default; it then has that axis's size. A case
    always leaves it out where the sizes are equal. So keys of rows stay as they are if an op gets an axis with a default."""

    check: Callable[[int, Sizes], str | None]
    draw: Callable[[random.Random, Sizes], int]
    least: int = 1
    default: str = ""


def size(most: int = 320) -> Axis:
    """Any size from 1. Drawn up to `most`, half of them multiples of 8, as kernels with vectors need them."""

    def draw(rng: random.Random, sizes: Sizes) -> int:
        return 8 * rng.randint(1, most // 8) if most >= 8 and rng.random() < 0.5 else rng.randint(1, most)

    return Axis(lambda size, sizes: None, draw)


def multiple_of(factor: int, most: int = 320) -> Axis:
    """Multiples of `factor`, such as a K that is made of quantised blocks."""

    def check(size: int, sizes: Sizes) -> str | None:
        return f"must be a multiple of {factor}" if size % factor else None

    return Axis(check, lambda rng, sizes: factor * rng.randint(1, max(1, most // factor)))


def one_of(*values: int) -> Axis:
    """One of these sizes, such as a head's dimension."""

    def check(size: int, sizes: Sizes) -> str | None:
        return None if size in values else f"must be {' or '.join(map(str, values))}"

    return Axis(check, lambda rng, sizes: rng.choice(values))


def divides(other: str) -> Axis:
    """The divisors of an earlier axis, such as the key-value heads that several query heads share."""

    def check(size: int, sizes: Sizes) -> str | None:
        return f"must divide {other}={sizes[other]}" if sizes[other] % size else None

    def draw(rng: random.Random, sizes: Sizes) -> int:
        return rng.choice([n for n in range(1, sizes[other] + 1) if sizes[other] % n == 0])

    return Axis(check, draw)


def up_to(other: str) -> Axis:
    """Sizes from 1 to that of an earlier axis, such as the k of a top-k."""

    def check(size: int, sizes: Sizes) -> str | None:
        return f"must be at most {other}={sizes[other]}" if size > sizes[other] else None

    return Axis(check, lambda rng, sizes: rng.randint(1, sizes[other]))


# The length of sequence i of a batch, as a part of the longest. Which one, and with which seed, is a parameter of the case,
# such as `lengths=uniform:3`, so that its key says it and everybody draws the same.
DISTRIBUTIONS: dict[str, Callable[[random.Random, int], float]] = {
    "full": lambda rng, i: 1.0,
    "halving": lambda rng, i: 0.5 ** (i % 8),  # 8192, 4096, ... 64, and again
    "uniform": lambda rng, i: rng.random(),
    "bimodal": lambda rng, i: 1.0 if rng.random() < 0.125 else rng.random() / 16,  # one long request among short ones
    "one_long": lambda rng, i: 1.0 if i == 0 else 1 / 64,
    "geometric": lambda rng, i: min(1.0, rng.expovariate(8.0)),
    "gaps": lambda rng, i: rng.random() * (i % 3 != 1),  # every third sequence is empty
}
WITHOUT_CHANCE = ("full", "halving", "one_long")


@dataclass(frozen=True)
class Ragged:
    """A parameter whose value names a distribution of lengths, with a seed where there is chance: `full`, `uniform:3`."""

    default: str = "full"
    examples: tuple[str, ...] = ("full", "uniform:1")

    def check(self, value: str) -> str | None:
        """Why a value is none, as half a sentence, or None."""
        name, colon, seed = value.partition(":")
        if name in DISTRIBUTIONS and (seed.isdecimal() if colon else name in WITHOUT_CHANCE):
            return None
        random_ones = (f"{name}:SEED" for name in DISTRIBUTIONS if name not in WITHOUT_CHANCE)
        return f"takes {', '.join([*WITHOUT_CHANCE, *random_ones])}, such as uniform:1"


def lengths(value: str, count: int, longest: int) -> list[int]:
    """`count` lengths from 1 to `longest`, or 0 where `gaps` has one, by the value of a `Ragged` parameter. The first is the
    longest."""
    name, _, seed = value.partition(":")
    rng = random.Random(int(seed or 0))
    parts = [DISTRIBUTIONS[name](rng, i) for i in range(count)]
    drawn = [max(1, round(longest * part)) if part else 0 for part in parts]
    return [longest, *drawn[1:]] if count else []


def offsets(values: list[int]) -> list[int]:
    """The sums of lengths so far, from 0: `cu_seqlens`."""
    found = [0]
    for value in values:
        found.append(found[-1] + value)
    return found
