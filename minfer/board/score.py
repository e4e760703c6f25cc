"""Ranks, from paired ratios: what a score is, when one kernel is faster than another, and who holds the record.

A problem's ratio is the baseline's time divided by the kernel's, by the judge's clock, paired by rounds. A score is the
geometric mean of the ratios of all hidden problems. The problems are independent, so the squares of the half-widths are added,
for the intervals of the ratios' logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minfer.board.folder import Entry
from minfer.rows.rules import LEAST_GAIN, is_too_wide

FASTER, TIE, SLOWER = "faster", "tie", "slower"


@dataclass(frozen=True)
class Ratio:
    """A ratio and its interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """`faster` or `slower` if the whole interval is beyond 1 by more than `LEAST_GAIN`, else `tie`."""
        needed = 1 + LEAST_GAIN
        return FASTER if self.low > needed else SLOWER if self.high < 1 / needed else TIE

    @property
    def shown(self) -> str:
        """The value as text; a word instead of it if the interval is too wide (`minfer.rows.rules`)."""
        return "unsure" if is_too_wide(self.low, self.high) else f"{self.value:.3g}"

    @property
    def interval(self) -> str:
        return f"{self.low:.3g} to {self.high:.3g}"

    def __str__(self) -> str:
        return f"{self.shown} ({self.interval})"

    @property
    def times(self) -> str:
        """The ratio as text before a noun: "1.2 (1.1 to 1.3) times"."""
        wide = is_too_wide(self.low, self.high)
        return f"between {self.low:.3g} and {self.high:.3g} times" if wide else f"{self} times"

    def over(self, other: Ratio) -> Ratio:
        """The quotient of two independent ratios."""
        middle = math.log(self.value / other.value)
        down = math.hypot(math.log(self.value / self.low), math.log(other.high / other.value))
        up = math.hypot(math.log(self.high / self.value), math.log(other.value / other.low))
        return Ratio(math.exp(middle), math.exp(middle - down), math.exp(middle + up))

    def as_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}

    @classmethod
    def of(cls, found: Mapping[str, float]) -> Ratio:
        return cls(found["value"], found["low"], found["high"])


def geometric_mean(ratios: Sequence[Ratio]) -> Ratio:
    """The geometric mean of independent ratios, at least one."""
    count = len(ratios)
    middle = sum(math.log(ratio.value) for ratio in ratios) / count
    down = math.hypot(*(math.log(ratio.value / ratio.low) for ratio in ratios)) / count
    up = math.hypot(*(math.log(ratio.high / ratio.value) for ratio in ratios)) / count
    return Ratio(math.exp(middle), math.exp(middle - down), math.exp(middle + up))


def _logarithms(ratio: Ratio) -> tuple[float, float, float]:
    """The logarithm of the value, and how far the logarithms of the interval's ends are below and above it."""
    return math.log(ratio.value), math.log(ratio.value / ratio.low), math.log(ratio.high / ratio.value)


@dataclass(frozen=True)
class Standing:
    """A submission's place. `tied` says that others share the rank."""

    entry: Entry
    rank: int
    tied: bool

    @property
    def score(self) -> Ratio:
        return Ratio.of(self.entry.score)


def best_of_each(entries: Iterable[Entry]) -> list[Entry]:
    """The submissions of one season and device that are ranked, the oldest first. If a person has several kernels of one name,
    that is the best of them."""
    best: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        if entry.ranks:
            key = entry.who, entry.name
            if key not in best or entry.score["value"] > best[key].score["value"]:
                best[key] = entry
    return sorted(best.values(), key=Entry.order)


def may_beat(entry: Entry, holder: Entry) -> bool:
    """Whether a run in the same rounds may show that a kernel is faster than the record's holder: unless its score is surely
    lower. The two scores are from different runs, and without the run a holder would keep the record by one lucky run."""
    return Ratio.of(entry.score).over(Ratio.of(holder.score)).verdict != SLOWER


def is_unproven(entry: Entry, holder: Entry, races: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a kernel might be faster than the record's holder, and no run in the same rounds has shown whether it is."""
    pair = {entry.id, holder.id}
    return len(pair) == 2 and may_beat(entry, holder) and all({r["challenger"], r["holder"]} != pair for r in races)


def holders(entries: Sequence[Entry], races: Iterable[Mapping[str, Any]]) -> list[Entry]:
    """The submissions that held the record of a season on a device, one after the other. The first submission holds it until
    another one is faster in a race: in the same rounds. Of several that were, the one whose race was first takes the record,
    and the others have to race with it. races: the oldest first."""
    won = [(race["holder"], race["challenger"]) for race in races if race["verdict"] == FASTER]
    left = {entry.id: entry for entry in sorted(entries, key=Entry.order) if entry.ranks}
    found: list[Entry] = []
    following: str | None = next(iter(left), None)
    while following:
        found.append(left.pop(following))
        following = next((winner for loser, winner in won if loser == found[-1].id and winner in left), None)
    return found


def holding_since(records: Sequence[Entry], races: Iterable[Mapping[str, Any]]) -> list[float]:
    """When each of the `holders` took the record: the first one when it was submitted, each other one in its race."""
    when = {(race["challenger"], race["holder"]): float(race["when"]) for race in races if "when" in race}
    later = zip(records[1:], records, strict=False)
    return [entry.when for entry in records[:1]] + [when.get((new.id, old.id), new.when) for new, old in later]


def rank(entries: Sequence[Entry], races: Sequence[Mapping[str, Any]]) -> list[Standing]:
    """The standings of one season on one device, the best first. A rank is one more than the number of kernels that are proven
    to be faster; a kernel whose score is higher than that of the record's holder shares the holder's rank until a race proves
    that it is faster."""
    chain = holders(entries, races)
    best = best_of_each(entries)
    if not chain:
        return []
    holder = chain[-1]
    best = [entry for entry in best if (entry.who, entry.name) != (holder.who, holder.name)] + [holder]
    verdicts: dict[tuple[str, str], str] = {}
    for race in races:
        verdicts[race["challenger"], race["holder"]] = race["verdict"]
        opposite = {FASTER: SLOWER, SLOWER: FASTER, TIE: TIE}
        verdicts[race["holder"], race["challenger"]] = opposite[race["verdict"]]

    needed, of = math.log1p(LEAST_GAIN), {each.id: _logarithms(Ratio.of(each.score)) for each in best}

    def beats(one: Entry, other: Entry) -> bool:
        if (one.id, other.id) in verdicts:
            return verdicts[one.id, other.id] == FASTER
        if other is holder:
            return False
        (mine, down, _), (theirs, _, up) = of[one.id], of[other.id]
        return mine - theirs - math.hypot(down, up) > needed  # as Ratio.over; a season may have a million pairs

    places = {each.id: 1 + sum(beats(other, each) for other in best if other is not each) for each in best}
    order = sorted(best, key=lambda entry: (places[entry.id], entry is not holder, -entry.score["value"]))
    counts = [places[entry.id] for entry in order]
    return [Standing(entry, places[entry.id], counts.count(places[entry.id]) > 1) for entry in order]
