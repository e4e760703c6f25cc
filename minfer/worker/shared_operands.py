"""The operands that the judge shares with the processes of a kernel and of its baseline. Draws new values for each round, and
checks the results.

On a GPU the work of a stopped process goes on. So there the kernel's process is awake, and the clock runs, when new values
reach the shared memory.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from typing import Any

import numpy as np
import torch

from minfer import ops
from minfer.bench.arena import Arena, copy_bits, view
from minfer.bench.clock import clock_for
from minfer.bench.errors import Errors
from minfer.bench.integrity import Dishonest
from minfer.bench.operands import Operands
from minfer.bench.timed_results import SLACK, over_bound
from minfer.bench.verify import WrongResult, same_bits, synchronize
from minfer.ops import Case, Tensors
from minfer.worker.links import Link

GOES_ON = {"cuda": True, "cpu": False}  # whether the work that a process has begun goes on while the process is stopped
SNAPSHOT = 32  # results of a block that are copied when the process replies
TAKE_S = {"cuda": math.inf, "cpu": 0.001}  # time limit for these copies
# Bytes of all results of a block, and of each one, that are copied first of all on a CPU.
PIECES, PIECES_EACH = 512, 8
CHECK_S, LEAST_CHECKED = 0.2, 16  # time limit for checking a block's results, and how many to check in any case


class SharedOperands:
    """Sets of a case's operands: the judge's own, and copies in the shared memory on which kernel and baseline run."""

    def __init__(self, case: Case, count: int, arena: Arena, device: torch.device) -> None:
        self.op, self.case, self.device, self.arena, self.count = ops.get(case.op), case, device, arena, count
        self.clock = clock_for(device)
        self.goes_on = GOES_ON[device.type]
        self.link = Link.between(self.op, case)
        self.snapshot: dict[int, Tensors] = {}
        self.pieces = self.addresses = torch.empty(0, dtype=torch.int64)
        self.originals: list[Operands] = []
        self.sets: list[dict[str, torch.Tensor]] = []  # the copies in the shared memory
        self.described: list[list[dict[str, Any]]] = []  # for the other processes: where each copy is
        self.image: torch.Tensor | None = None  # of the shared memory, with the values of the next block
        self.imaged = self.sets
        self.lay_out()

    def lay_out(self) -> None:
        """Make the sets of operands, and put copies into the shared memory, at the same addresses each time."""
        self.originals = [
            Operands(self.op, self.case, secrets.randbits(31), "normal", self.device) for _ in range(self.count)
        ]
        self.arena.clear()
        self.sets = [{name: self.arena.copy(t) for name, t in original.tensors.items()} for original in self.originals]
        synchronize(self.device)
        self.described = [[self.arena.describe(tensor) for tensor in shared.values()] for shared in self.sets]
        self.imaged = self.sets
        if self.goes_on:
            self.image = image = self.arena.image()
            self.imaged = [
                {name: view(image, about) for name, about in zip(shared, descriptions, strict=True)}
                for shared, descriptions in zip(self.sets, self.described, strict=True)
            ]

    def free(self) -> None:
        """Free the memory of all operands until the next `lay_out`."""
        self.originals, self.sets, self.image, self.imaged, self.snapshot = [], [], None, [], {}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def draw(self) -> None:
        """Draw new values for all operands. No other process sees them yet."""
        for original in self.originals:
            original.fill(secrets.randbits(31))

    def write(self) -> None:
        """Write the values for the next block: to the shared memory on a CPU, and to its image on a GPU."""
        for shared, original in zip(self.imaged, self.originals, strict=True):
            for name, tensor in shared.items():
                tensor.copy_(original.tensors[name])

    def flush(self) -> None:
        self.clock.flush()  # steady calls, too, read their operands from memory
        synchronize(self.device)

    def show(self) -> None:
        """Put the new values into the memory that the other processes see."""
        assert self.image is not None
        self.arena.restore(self.image)
        self.flush()

    def choose_pieces(self, calls: int) -> None:
        """Choose bytes of each result of a block of `calls` calls, at random and in random order. `take_snapshot` copies them
        first, in one operation of about a tenth of a millisecond, and `check` finds bytes that the kernel writes later."""
        rng, each = np.random.default_rng(secrets.randbits(128)), max(PIECES_EACH, PIECES // calls)
        chosen = []
        for name in self.originals[0].named("out", "inout"):
            place = list(self.sets[0]).index(name)
            offsets = np.array([[about[place]["offset"]] for about in self.described[:calls]])
            tensor = self.sets[0][name]
            if not tensor.numel():
                continue
            elements = sum(
                rng.integers(size, size=(calls, each)) * stride
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            bytes_of = rng.integers(tensor.element_size(), size=(calls, each))
            chosen.append((offsets + elements * tensor.element_size() + bytes_of).reshape(-1))
        self.addresses = torch.from_numpy(rng.permutation(np.concatenate(chosen))) if chosen else self.addresses[:0]

    def take_snapshot(self, calls: int, linked: bool = False) -> None:
        """Copy some results of a block of `calls` calls, so that what the kernel writes later does not count. Of a `linked`
        block these are pairs of neighbours, because a result depends on the one before. On a CPU the
        pieces of `choose_pieces` come first, and TAKE_S limits the time for the rest, because the kernel could finish a result
        while others are copied. On a GPU the clock includes these copies. So there are as many as for an empty request, even
        if the block has fewer calls."""
        self.pieces = self.arena.take(self.addresses) if not self.goes_on else self.pieces
        deadline = time.perf_counter() + TAKE_S[self.device.type]
        written, self.snapshot = self.originals[0].named("out", "inout"), {}
        chosen = random.SystemRandom().sample(range(calls), min(calls, SNAPSHOT))
        if linked:
            chosen = list(dict.fromkeys(near for index in chosen for near in (index, max(index - 1, 0))))[:SNAPSHOT]
        if self.goes_on:
            chosen += list(range(calls, self.count))[: SNAPSHOT - len(chosen)]
        for index in chosen:
            results = {name: copy_bits(self.sets[index][name]) for name in written}
            if index < calls:
                self.snapshot[index] = results
            if time.perf_counter() > deadline:
                break
        synchronize(self.device)

    def check(self, calls: int, linked: bool = False) -> None:
        """Compare results of a block of `calls` calls with the reference, first those of the snapshot. Raises Dishonest, or
        WrongResult if a result is only slightly beyond its bound."""
        if not self.goes_on and not torch.equal(self.arena.take(self.addresses), self.pieces):
            raise Dishonest("went on writing its results after it had answered")
        order = list(self.snapshot)
        if linked and self.goes_on:  # the shared memory may have changed since the answer
            order = [index for index in order if index == 0 or index - 1 in self.snapshot]
        if not self.goes_on:
            order += [
                index for index in random.SystemRandom().sample(range(calls), calls) if index not in self.snapshot
            ]
        deadline = time.perf_counter() + CHECK_S
        for number, index in enumerate(order):
            if number >= LEAST_CHECKED and time.perf_counter() > deadline:
                break
            shared = self.sets[index]
            inputs: Tensors = self.originals[index].named("in", "inout")
            if linked and index:
                inputs = self._follow(inputs, self._results(index - 1))
            over = over_bound(self.op, self.case, inputs, self._results(index))
            if not over <= SLACK:
                where = "a process of its own" + ", in calls that depend on each other" * linked
                raise Dishonest(f"returned a wrong result in {where}, though it was right when verified")
            if over > 1:  # a bound of rounding errors holds for nearly all inputs, not for all
                raise WrongResult(f"a timed result is off by {over:.3g} times its error bound", Errors(over_bound=over))
            for name in self.originals[index].named("in"):
                if not same_bits(shared[name], inputs[name]):
                    raise Dishonest(f"changed its input {name} while it was timed")
        if self.arena.is_breached():
            raise Dishonest("wrote outside its output while it was timed")

    def _results(self, index: int) -> Tensors:
        """What a call has written: of the snapshot, where it has it."""
        written = self.originals[index].named("out", "inout")
        return self.snapshot.get(index) or {name: self.sets[index][name] for name in written}

    def _follow(self, inputs: Tensors, before: Tensors) -> Tensors:
        """The inputs of a call in a linked block, from the values that the judge has drawn for it and the results of the call
        before it."""
        assert self.link
        changed = {**inputs, self.link.input: copy_bits(inputs[self.link.input])}
        self.link.prepare(changed, before)()
        return changed
