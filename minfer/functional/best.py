"""Which kernel of an op is called for a problem: the fastest of those that support it, at the nearest problem measured.

`best.json` holds, for each op that was timed, our kernels with their cold times, fastest first;
`analysis/make.py best` writes it from the rows in `results/`. Nothing is timed here.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minfer.functional import preferred
from minfer.ops import Case, Kernel, Op, get
from minfer.ops.case import Rule as Requirement

TABLE = Path(__file__).with_name("best.json")
NONE: Mapping[str, str] = MappingProxyType({})
# How far another device of the same architecture is, in doublings of one size. Devices of one architecture run the same code,
# and differ by less than a factor of two in bandwidth, clock and number of multiprocessors. So the size at which one kernel
# overtakes another moves by less than that: a measurement on another device says as much as one on this device at twice the
# size. It comes after the parameters, because another layout or format runs other code.
OTHER_DEVICE = 1.0
MOST_SETTINGS = 256  # most settings whose `Chooser` is kept
# arch ("sm_90a", or "cpu"), device, dtype, params and shape by name, and kernels: name -> cold microseconds
Entry = Mapping[str, Any]
Words = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Choice:
    """A kernel of an op by its name, and why it was chosen, as a phrase."""

    kernel: str
    why: str


@cache
def table() -> Mapping[str, list[Entry]]:
    """What was measured, by op."""
    found: Mapping[str, list[Entry]] = json.loads(TABLE.read_text())
    return found


def best(
    name: str,
    dtype: str,
    params: Mapping[str, str],
    shape: Mapping[str, int],
    capability: tuple[int, int] | None,
    device: str,
) -> Choice:
    """The kernel of the op `name` for a problem.

    `dtype` is a name of `minfer.ops.DTYPES`, `params` and `shape` have all of the op's parameters and axes, `capability` is
    the GPU's, None for the CPU; `device` is the GPU's name, empty where it is not known. Of the kernels that support the
    problem, it is the first that is preferred there (`rule_name`), else the fastest one at the nearest problem that was
    measured (`distance`). A kernel is not chosen if the axis `Kernel.least_measured` is shorter than in all of its
    measurements. If none of these kernels was measured, it is the last of the ladder that supports the problem. Raises
    ValueError if no kernel supports it."""
    of = chooser(name, dtype, tuple(params.items()), tuple(shape), capability, device)
    sized = tuple(shape.values())
    kernel, entry = of.find(sized)
    if kernel == of.preferred(sized):
        rule = rule_name(get(name).kernels[kernel], capability)
        return Choice(kernel, f"preferred at this shape, which was not measured, {preferred.why(rule, shape, params)}")
    if entry is None:
        return Choice(kernel, "the last of the ladder that supports this; no kernel that does was measured")
    measured = of.measured(entry, sized)
    why = f"the fastest of {len(measured)}" if measured[1:] else "alone"
    same = entry["shape"] == dict(shape)
    near = "this shape" if same else f"{sizes(entry['shape'])}, the nearest shape measured"
    rest = " ".join([entry["dtype"], *entry["params"].values()])
    return Choice(kernel, f"{why} at {near}: {entry['kernels'][kernel]:.4g} us cold, {rest} on {entry['device']}")


def chooser(
    name: str,
    dtype: str,
    params: Words,
    axes: tuple[str, ...],
    capability: tuple[int, int] | None,
    device: str,
) -> Chooser:
    """The chooser for problems that differ only in their sizes. `params` are those of `best`, as pairs. A chooser is made
    once, and again if the table or the op's kernels have changed."""
    key = (name, dtype, params, axes, capability, device)
    op, entries = get(name), table().get(name, [])
    found = _choosers.get(key)
    if found is None or found.entries is not entries or found.registered != op.kernels:
        if len(_choosers) >= MOST_SETTINGS:
            _choosers.clear()
        found = _choosers[key] = Chooser(op, entries, dtype, dict(params), axes, capability, device)
    return found


def rule_name(kernel: Kernel, capability: tuple[int, int] | None) -> str:
    """The name of the rule by which a kernel is preferred on a GPU of this capability, None for the CPU; empty if there is
    none."""
    if kernel.before_hopper and capability is not None and capability < (9, 0):
        return kernel.before_hopper
    return "" if kernel.preferred in preferred.HOPPER_ONLY and capability != (9, 0) else kernel.preferred


def rule_of(kernel: Kernel, capability: tuple[int, int] | None) -> preferred.Rule | None:
    """The rule that `rule_name` names, or None."""
    name = rule_name(kernel, capability)
    found: preferred.Rule | None = getattr(preferred, name) if name else None
    return found


def with_entries(name: str, arch: str) -> list[Kernel]:
    """The kernels of the op `name` that have entries, or are called early, and build for `arch`. If `arch` is empty, those for
    the CPU."""
    kernels = [kernel for kernel in get(name).kernels.values() if kernel.entries or kernel.early]
    return [x for x in kernels if (x.backend == "cuda" and x.builds_for(arch) if arch else x.backend == "cpp")]


def ladder(op: Op, case: Case, capability: tuple[int, int] | None) -> list[Kernel]:
    """Our kernels that support everything about a case but perhaps its shape."""
    backends = ("cpp",) if capability is None else ("cuda", "triton")
    return [
        kernel
        for kernel in op.kernels.values()
        if kernel.backend in backends and replace(kernel, requires=None).unsupported(case, capability) is None
    ]


class Chooser:
    """Finds the kernel for a shape. All that does not depend on the shape is decided when it is made."""

    def __init__(
        self,
        op: Op,
        entries: Sequence[Entry],
        dtype: str,
        params: Mapping[str, str],
        axes: tuple[str, ...],
        capability: tuple[int, int] | None,
        device: str,
    ) -> None:
        self.entries, self.registered = entries, dict(op.kernels)
        self.axes, self.capability = axes, capability
        self.case = op.case("", dtype, dict.fromkeys(op.axes, 1), params)
        self.ladder = ladder(op, self.case, capability)
        self.with_preference = [(x, rule) for x in self.ladder if (rule := rule_of(x, capability))]
        here = [
            entry
            for entry in entries
            if entry["shape"].keys() == set(axes) and (entry["arch"] == "cpu") == (capability is None)
        ]
        # The kernels by what a problem must have: a rule, and an axis of at least some size.
        self.conditions: dict[tuple[Requirement | None, str, int], list[str]] = {}
        for x in self.ladder:
            sizes_of = [
                entry["shape"][x.least_measured] for entry in here if x.least_measured and x.name in entry["kernels"]
            ]
            condition = x.requires, x.least_measured, min(sizes_of, default=0)
            self.conditions.setdefault(condition, []).append(x.name)
        self._able_if: dict[tuple[bool, ...], frozenset[str]] = {}
        able, groups = {kernel.name: kernel for kernel in self.ladder}, dict[tuple[float, ...], list[Measured]]()
        for place, entry in enumerate(here):
            if kernels := [able[kernel] for kernel in entry["kernels"] if kernel in able]:
                *first, _, other = distance(entry, dtype, params, dict.fromkeys(axes, 1), capability, device)
                logs = tuple(_log(entry["shape"][axis]) for axis in axes)
                away = OTHER_DEVICE * (entry["device"] != device)
                names = frozenset(kernel.name for kernel in kernels)
                measured = Measured(entry, kernels, logs, away, bool(other), place, names)
                groups.setdefault(tuple(first), []).append(measured)
        self.groups = [Group(groups[first]) for first in sorted(groups)]
        nearest = self.groups[0].measured if self.groups else []
        self.measured_here = {each.logs for each in nearest if not each.away and not each.other}

    def find(self, shape: tuple[int, ...]) -> tuple[str, Entry | None]:
        """The kernel for a shape, in the order of `axes`, and the measurement that decided; None if none did. Raises
        ValueError if no kernel supports it."""
        logs, case = tuple(map(_log, shape)), self._sized(shape)
        if first := self._preferred(logs, case):
            return first, None
        able = self._able(case)
        for group in self.groups:
            if of_able := group.of(able):
                nearest = of_able.nearest(logs)
                return next(kernel.name for kernel in nearest.kernels if kernel.name in able), nearest.entry
        for kernel in reversed(self.ladder):
            if kernel.requires is None or kernel.requires(case) is None:
                return kernel.name, None
        where = "a CPU" if self.capability is None else f"sm_{self.capability[0]}{self.capability[1]}"
        raise ValueError(f"no kernel of {case.op} supports {sizes(case.shape)} in {case.dtype} on {where}")

    def preferred(self, shape: tuple[int, ...]) -> str | None:
        """The kernel that is taken for a shape because its rule holds there, if the shape itself was not measured on this
        device. Of several, the first in the op's order."""
        return self._preferred(tuple(map(_log, shape)), self._sized(shape))

    def _preferred(self, logs: tuple[float, ...], case: Case) -> str | None:
        if not self.with_preference or logs in self.measured_here:
            return None
        for kernel, holds in self.with_preference:
            if holds(case.shape, case.params) and self._supports(kernel, case):
                return kernel.name
        return None

    def measured(self, entry: Entry, shape: tuple[int, ...]) -> list[str]:
        """The kernels of a measurement that can be chosen for a shape, fastest first."""
        case = self._sized(shape)
        able = self._able(case)
        return [kernel for kernel in entry["kernels"] if kernel in able]

    def _sized(self, shape: tuple[int, ...]) -> Case:
        """A case without a kernel: what a kernel requires depends on the problem alone."""
        of = self.case
        return Case(of.op, of.kernel, of.dtype, of.params, dict(zip(self.axes, shape, strict=True)))

    def _able(self, case: Case) -> frozenset[str]:
        """The kernels that support a case, and whose axis `least_measured` is not shorter than in all of their measurements."""
        passed = tuple(
            [
                (requires is None or requires(case) is None) and (not axis or case.shape[axis] >= least)
                for requires, axis, least in self.conditions
            ]
        )
        if passed not in self._able_if:
            if len(self._able_if) >= MOST_SETTINGS:
                self._able_if.clear()
            names = [names for names, passes in zip(self.conditions.values(), passed, strict=True) if passes]
            self._able_if[passed] = frozenset(itertools.chain(*names))
        return self._able_if[passed]

    @staticmethod
    def _supports(kernel: Kernel, case: Case) -> bool:
        return kernel.requires is None or kernel.requires(case) is None


@dataclass(frozen=True)
class Measured:
    """A measurement, with those of its kernels that support everything but perhaps the shape, fastest first."""

    entry: Entry
    kernels: list[Kernel]
    logs: tuple[float, ...]  # of the sizes
    away: float  # added to the distance
    other: bool  # another dtype
    place: int  # in the table
    names: frozenset[str]  # of the kernels


class Group:
    """Measurements that are equally far from the problem in architecture and parameters."""

    def __init__(self, measured: Iterable[Measured]) -> None:
        # In this order, the first of several equally near measurements is the one to take.
        found = dict[tuple[float, ...], list[Measured]]()
        for each in sorted(measured, key=lambda each: (each.away, each.other)):
            at = found.setdefault(each.logs, [])
            if not any(each.names <= nearer.names for nearer in at):  # else one of these is always taken instead
                at.append(each)
        self.measured = sorted(itertools.chain(*found.values()), key=lambda each: (each.other, each.place))
        self.parts: list[tuple[float, list[Measured], list[tuple[float, ...]]]] = []  # by what is added to the distance
        for away in sorted({each.away for each in self.measured}):
            part = [each for each in self.measured if each.away == away]
            self.parts.append((away, part, [each.logs for each in part]))
        self._of: dict[frozenset[str], Group | None] = {}

    def nearest(self, logs: tuple[float, ...]) -> Measured:
        """The nearest measurement, as `distance` has it."""
        least, found = math.inf, self.measured[0]
        for away, part, logs_of_part in self.parts:
            if least < away:
                break
            apart = list(map(math.dist, itertools.repeat(logs), logs_of_part))
            if away:
                apart = list(map(operator.add, apart, itertools.repeat(away)))
            nearest = min(apart)
            first = part[apart.index(nearest)]
            if nearest < least or (nearest == least and (first.other, first.place) < (found.other, found.place)):
                least, found = nearest, first
        return found

    def of(self, able: frozenset[str]) -> Group | None:
        """The measurements of some of these kernels, if there are any."""
        if able not in self._of:
            if len(self._of) >= MOST_SETTINGS:
                self._of.clear()
            some = [replace(each, names=each.names & able) for each in self.measured if each.names & able]
            self._of[able] = Group(some) if some else None
        return self._of[able]


_choosers: dict[tuple[Any, ...], Chooser] = {}


def _log(size: int) -> float:
    return math.log2(size or 0.5)


def sizes(shape: Mapping[str, int]) -> str:
    return "x".join(map(str, shape.values()))


def distance(
    entry: Entry,
    dtype: str,
    params: Mapping[str, str],
    shape: Mapping[str, int],
    capability: tuple[int, int] | None,
    device: str,
) -> tuple[float, ...]:
    """How far a measurement is from a problem: first by architecture, then parameters, then shape and device, then dtype.

    Between shapes it is the Euclidean distance of the logarithms of their sizes, so that 1 to 2 is as far as 2048 to 4096:
    kernels differ by the factor between a size and a tile or a wave. A size of 0 is as far from 1 as 2 is. A measurement
    on another device than `device` is farther by `OTHER_DEVICE`."""
    number = 0 if capability is None else 10 * capability[0] + capability[1]
    arch = 0 if capability is None else abs(int(re.sub(r"\D", "", entry["arch"])) - number)
    other = sum(entry["params"].get(name) != params.get(name) for name in {*entry["params"], *params})
    ours, theirs = ([_log(each[axis]) for axis in shape] for each in (shape, entry["shape"]))
    apart = math.dist(ours, theirs) + OTHER_DEVICE * (entry["device"] != device)
    return arch, other, apart, entry["dtype"] != dtype
