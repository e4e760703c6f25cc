"""Timing one kernel against the baseline, in both regimes, and saying how sure the result is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch

from minfer.bench.clock import Arm, Hooks, clock_for
from minfer.bench.device import cache_bytes
from minfer.bench.integrity import Dishonest
from minfer.bench.operands import poison
from minfer.bench.stats import compare
from minfer.bench.timing import Timing
from minfer.bench.verify import Function, Trial, check_genuine, differs, synchronize, tolerance
from minfer.ops import DTYPES, Case, Op

MOST_ROTATIONS = {"cuda": 4096, "cpu": 512}  # a busy processor's threads may wait for each other milliseconds a call
REMEMBERS = 1.5  # slower by this factor on fresh inputs: it must have remembered the old ones...
CONFIRMED = 10  # ...if it is so every time: once may be the machine's doing


def rotations(op: Op, case: Case, device: torch.device) -> int:
    """Enough sets of operands that going round them leaves nothing of the first in the cache."""
    return min(MOST_ROTATIONS[device.type], 1 + math.ceil(2 * cache_bytes(device) / op.case_bytes(case)))


class Bench(Hooks):
    """A kernel and the baseline on the same operands, ready to be timed.

    Every timed call is watched, outside of its window: its output is poisoned before it; its inputs are changed, by one
    random element a round, so that a remembered result is a wrong one; and its output is compared with the baseline's
    of the same round, in stream order. A kernel that is right when it is verified and does less when it is timed is
    found out.
    """

    def __init__(
        self, op: Op, case: Case, kernel: Function, baseline: Function, device: torch.device, seed: int
    ) -> None:
        self.device, self.clock = device, clock_for(device)
        self.rng = np.random.default_rng(seed)
        call = op.calls[0]
        trial = Trial(case, call, "normal", seed)
        operands, first_out, first_inputs = trial.operands(op, device)
        self.tolerance = tolerance(op, trial, first_out, first_inputs)

        self.rotations = rotations(op, case, device)
        self.sets = [first_inputs, *(op.inputs(case, operands.rand) for _ in range(self.rotations - 1))]
        self.twins = [tuple(tensor.clone() for tensor in inputs) for inputs in self.sets]  # what they must still be
        shape = op.out_shape(case)
        # All arms write the same memory: on an H200 the place of a small output alone decides 5 % of the time.
        self.outs = [operands.poisoned(*shape) for _ in self.sets]
        self.addresses = [out.data_ptr() for out in self.outs]
        self.results = [torch.empty(shape, dtype=DTYPES[case.dtype], device=device) for _ in range(3)]  # of each arm
        self.wrong_rounds = torch.zeros((), dtype=torch.int64, device=device)
        self.operands = operands

        def arm(function: Function) -> Arm:
            return lambda index: function(self.outs[index], *self.sets[index], **call)

        # The duplicate is the same function in an arm of its own, and gets its own samples.
        self.arms = [arm(kernel), arm(baseline), arm(baseline)]

    def warm_up(self, seconds: float) -> None:
        """Run everything for a while: lazy initialisation, and the device's climb from its idle clock."""
        end = time.perf_counter() + seconds
        while True:
            for arm in self.arms[:2]:
                arm(0)
            synchronize(self.device)
            if time.perf_counter() > end:
                return

    def cold(self, timing: Timing) -> np.ndarray:
        """Rounds in shuffled order until the ratio is known to `timing.precision`, looked at only at `timing.looks`, or
        until the cap on rounds or on time.

        Returns seconds, (rounds, 3): of the kernel, the baseline and the baseline's duplicate. Raises Dishonest."""
        deadline = time.perf_counter() + timing.cold_cap_s
        taken = np.empty((0, len(self.arms)))
        for look in timing.looks:
            while len(taken) < look:
                # A look's rounds go to the GPU together, where they fit before the cap; else one by one.
                rounds = look - len(taken) if len(taken) >= timing.least_rounds else 1
                if len(taken) and (left := deadline - time.perf_counter()) < rounds * taken.sum(axis=1).mean():
                    rounds = 1
                    if left < 0 and len(taken) >= timing.least_rounds:
                        return self._right(taken)
                order = np.array([self.rng.permutation(len(self.arms)) for _ in range(rounds)])
                taken = np.concatenate([taken, self.clock.cold(self.arms, order, self)])
            if compare(*self._right(taken).T).half_width <= timing.precision:
                break
        return taken

    def _right(self, taken: np.ndarray) -> np.ndarray:
        if wrong := int(self.wrong_rounds):
            raise Dishonest(
                f"{wrong} of {len(taken)} timed calls returned a wrong result, though it was right when verified"
            )
        return taken

    def before_round(self) -> None:
        self._change(0)

    def before_call(self, arm: int, index: int) -> None:
        poison(self.outs[index])

    def after_call(self, arm: int, index: int) -> None:
        check_genuine(self.outs[index], self.addresses[index])
        self.results[arm].copy_(self.outs[index])

    def after_round(self) -> None:
        self.wrong_rounds += differs(self.results[0], self.results[1], self.tolerance)

    def _change(self, index: int) -> None:
        """Give one random element of a set's inputs another value, also in the twin."""
        which = int(self.rng.integers(len(self.sets[index])))
        place = tuple(int(self.rng.integers(size)) for size in self.sets[index][which].shape)
        value = float(self.rng.normal())
        for inputs in (self.sets[index], self.twins[index]):
            inputs[which][place].fill_(value)

    def steady(self, timing: Timing, during: Callable[[], None]) -> list[np.ndarray]:
        """Blocks of kernel, baseline, duplicate, kernel (ABBA), each long enough to settle at its own clock.

        Returns seconds of one call, an array a block. `during` is called in the kernel's. Raises Dishonest."""
        nothing = lambda: None
        self.clock.steady(self.arms[1], self.rotations, timing.steady_block_s, nothing)  # from idle to this power
        plan = [(0, during), (1, nothing), (2, nothing), (0, during)]
        blocks = [self.clock.steady(self.arms[arm], self.rotations, timing.steady_block_s, hook) for arm, hook in plan]
        self._check_steady(float(np.median(blocks[3])))
        return blocks

    def _check_steady(self, settled_s: float) -> None:
        """Run the steady loop on changed inputs: is it right, and does it take as long as it did on the old ones?"""
        fresh_s = self._rerun(fresh=True)
        for index in range(self.rotations):
            self.results[0].copy_(self.outs[index])
            self.arms[1](index)
            if bool(differs(self.results[0], self.outs[index], self.tolerance)):
                raise Dishonest("a steady call returned a wrong result, though it was right when verified")
        if fresh_s <= REMEMBERS * settled_s:
            return
        # Perhaps the machine was busy, or a short block saw few of the sets. Only a kernel that remembers is slower on
        # fresh inputs again and again.
        least = math.inf
        for _ in range(CONFIRMED):
            least = min(least, self._rerun(fresh=True) / self._rerun(fresh=False))
            if least <= REMEMBERS:
                return
        raise Dishonest(f"takes {least:.1f} times as long on inputs that it has not seen before")

    def _rerun(self, fresh: bool) -> float:
        """The time of one call in the steady loop, on changed or on the same inputs."""
        for index in range(self.rotations):
            if fresh:
                self._change(index)
            poison(self.outs[index])
        return self.clock.again(self.arms[0], self.rotations)

    def check_operands(self) -> None:
        """Raises Dishonest when a timed call changed its inputs or wrote beside its output."""
        for inputs, twins in zip(self.sets, self.twins, strict=True):
            for number, (tensor, twin) in enumerate(zip(inputs, twins, strict=True)):
                if not torch.equal(tensor, twin):
                    raise Dishonest(f"changed its input {number} while it was timed")
        if self.operands.breached():
            raise Dishonest("wrote outside its output while it was timed")
