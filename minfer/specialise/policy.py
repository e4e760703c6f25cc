"""Which keys are worth a variant: pure bookkeeping, without clocks, threads or compilers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from minfer.specialise.buckets import Buckets, Key, Size

MOST_SEEN = 1 << 16  # calls between two looks that are kept; of more the last
LONGEST_S = 1e6


@dataclass(frozen=True)
class Policy:
    """When to look at what was monitored, and what to do about it.

    threshold: calls of a key from which it is worth a variant.
    every_calls: a look after so many calls of `execute`, at most MOST_SEEN; 0: none because of calls.
    every_s: a look each so many seconds, in a thread of its own; 0: none because of time.
    budget: the most variants that are in use or on their way at a time. The least used one makes room.
    most_compiles: the most that are asked for in a process. A library that was loaded stays mapped until the process ends, so
        this bounds their memory.
    build_s: seconds after which a background compile with its trial is given up.
    """

    threshold: int = 1000
    every_calls: int = 1024
    every_s: float = 0.0
    budget: int = 16
    most_compiles: int = 64
    build_s: float = 300.0

    def __post_init__(self) -> None:
        for name, least in (("threshold", 1), ("every_calls", 0), ("budget", 1), ("most_compiles", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least or (name == "every_calls" and value > MOST_SEEN):
                most = f" to {MOST_SEEN}" if name == "every_calls" else ""
                raise ValueError(f"a policy takes an int from {least}{most} as its {name}, got {value!r}")
        for name in ("every_s", "build_s"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= LONGEST_S or (name == "build_s" and not value):
                raise ValueError(f"a policy takes seconds up to {LONGEST_S:g} as its {name}, got {value!r}")


# A challenger must be used this many times as much as the variant that it displaces, or two would take turns.
CLEARLY = 2.0


@dataclass
class Ledger:
    """Counts calls by key, and decides. `use` halves with each look, so that it follows a drift; `calls` is the sum."""

    policy: Policy
    buckets: Buckets
    calls: Counter[Key] = field(default_factory=Counter)
    use: dict[Key, float] = field(default_factory=dict)
    asked: set[Key] = field(default_factory=set)  # once asked for, never again, unless the trial was undecided
    live: set[Key] = field(default_factory=set)  # in use or on their way
    pending: set[Key] = field(default_factory=set)  # of them those on their way
    parked: set[Key] = field(default_factory=set)  # compiled, and had to make room
    undecided: Counter[Key] = field(default_factory=Counter)  # trials on a machine too busy to tell

    def count(self, sizes: Iterable[Size] | Counter[Size]) -> None:
        """Add the calls since the last look: their sizes, or how many each size had."""
        new: Counter[Key] = Counter()
        for size, calls in Counter(sizes).items():
            new[self.buckets(size)] += calls
        self.calls.update(new)
        self.use = {key: left for key, use in self.use.items() if (left := use / 2) >= 0.5 or key in self.live}
        for key, calls in new.items():
            self.use[key] = self.use.get(key, 0.0) + calls

    def decide(self) -> tuple[list[Key], list[Key], list[Key]]:
        """The keys to compile, most used first; those to take into use again, which are compiled; and those to drop."""
        wanted: list[Key] = []
        again: list[Key] = []
        drop: list[Key] = []
        worthy = [key for key, calls in self.calls.items() if calls >= self._threshold(key) and key not in self.live]
        for key in sorted(worthy, key=self._use, reverse=True):
            new = key not in self.asked
            if (new and len(self.asked) >= self.policy.most_compiles) or not (new or key in self.parked):
                continue
            if len(self.live) >= self.policy.budget:
                least = min(self.live - self.pending - {*again}, key=self._use, default=None)
                if least is None or self._use(key) <= CLEARLY * self._use(least):
                    break
                self.live.discard(least)
                self.parked.add(least)
                drop.append(least)
            self.live.add(key)
            if new:
                self.asked.add(key)
                self.pending.add(key)
                wanted.append(key)
            else:
                self.parked.discard(key)
                again.append(key)
        return wanted, again, drop

    def _threshold(self, key: Key) -> int:
        """Calls from which a key is worth a variant: twice as many after each trial that was undecided."""
        return self.policy.threshold << self.undecided[key]

    def _use(self, key: Key) -> float:
        return self.use.get(key, 0.0)

    def settle(self, key: Key, made: bool) -> None:
        """A key is no longer on its way: its variant is in use, or there is none and its place is free."""
        self.pending.discard(key)
        if not made:
            self.live.discard(key)

    def postpone(self, key: Key) -> None:
        """A trial did not decide: the key is asked for again, after twice as many new calls as it took this time."""
        self.settle(key, made=False)
        self.undecided[key] += 1
        self.asked.discard(key)
        self.calls[key] = 0
