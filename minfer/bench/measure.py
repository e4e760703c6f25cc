"""Times one kernel against the baseline, in both regimes, and checks what it computes meanwhile."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from minfer.bench.clock import Candidate, CudaClock, Hooks, clock_for
from minfer.bench.device import cache_bytes
from minfer.bench.integrity import Dishonest
from minfer.bench.operands import Operands, bits, change, poison
from minfer.bench.stats import compare
from minfer.bench.timed_results import TimedResults, Tolerance, matches_reference
from minfer.bench.timing import Timing
from minfer.bench.verify import Function, Inputs, check_genuine, synchronize
from minfer.ops import Case, Op, Returning
from minfer.ops.tensors import Undo

MOST_ROTATIONS = {"cuda": 4096, "cpu": 512}  # on a busy CPU a call may wait milliseconds for its threads
REPLAY_BYTES = 2 << 30  # of operands in a replay of an in-place kernel: an H200 reads them in half a millisecond
LEAST_CHECKED = 64  # sets of operands that are checked after steady calls, if there are that many
REMEMBERS = 1.5  # a kernel that is slower by this factor on fresh inputs has remembered results of the old ones...
CONFIRMED = 10  # ...if this many measurements all say so: a busy machine may cause one of them
# From idle to full power an H200's clock first overshoots, and half a second later it dips by a tenth. Without this wait the
# first block (kernel) ran at a higher clock than the second (baseline), and a kernel measured 2 % faster than itself.
SETTLE_S = 1.5
SHORTEST_S = 1e-9  # of a call
SMALL_BYTES = 1 << 20  # of a set of operands
REFERENCE_S = 1.0  # to compare steady results with the fp64 reference; later ones are compared with the baseline's


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch uses one thread. On a busy CPU several wait for each other, for milliseconds at each small tensor."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def rotations(op: Op, case: Case, device: torch.device) -> int:
    """How many sets of operands it takes so that after the last set nothing of the first is left in the cache. An in-place
    kernel gets more: a replay uses each set once, and then all sets get their contents back."""
    nbytes = op.operand_bytes(case)
    enough = 1 + math.ceil(2 * cache_bytes(device) / nbytes)
    if device.type == "cuda" and in_place(op, case):
        enough = max(enough, REPLAY_BYTES // nbytes)
    return min(MOST_ROTATIONS[device.type], enough)


def in_place(op: Op, case: Case) -> bool:
    """Whether kernels of the op change tensors that they read."""
    return any(spec.role == "inout" for spec in op.specs(case))


class Bench(Hooks):
    """A kernel and the baseline on the same operands, ready to be timed.

    Every timed call is checked, outside of its window. Before it, what it only writes is poisoned, and what it changes in
    place gets its contents back. Its inputs differ from the first ones in one place, which changes with each round, so that a
    remembered result is wrong. After it, its outputs are compared with the baseline's of the same round, in stream order.
    This finds a kernel that is right when it is verified and does less when it is timed.
    """

    def __init__(
        self, op: Op, case: Case, kernel: Function, baseline: Function, device: torch.device, seed: int, sets: int = 0
    ) -> None:
        """`sets`: the number of sets of operands; 0 for as many as steady calls need. Cold calls need one."""
        self.op, self.case, self.seed = op, case, seed
        self.device, self.clock = device, clock_for(device)
        self.rng = np.random.default_rng(seed)
        self.rotations = sets or rotations(op, case, device)
        # How many sets are checked after steady calls. On a CPU a block of slow calls does not use all sets. A kernel cannot
        # remember those that it has not used, and going through 512 sets repeatedly took minutes a case on a busy machine.
        self.reached = self.rotations
        self.in_place = in_place(op, case)
        first = Inputs(case, "normal", seed).operands(op, device)
        # Inputs differ from set to set. All candidates write to the same memory: on an H200 the address of a small output
        # alone changes the time by 5 %.
        with _one_thread() if op.operand_bytes(case) < SMALL_BYTES else contextlib.nullcontext():
            self.sets = [first, *(Operands(op, case, seed + i, "normal", device) for i in range(1, self.rotations))]
            self.kept = [{name: t.clone() for name, t in s.named("in", "inout").items()} for s in self.sets]
        self.written = [s.named("out", "inout") for s in self.sets]
        self.addresses = [{name: t.data_ptr() for name, t in written.items()} for written in self.written]
        self.undo: list[Undo | None] = [None] * self.rotations
        self.rounds = 0
        self.late: list[np.ndarray] = []  # of the last `cold` on a GPU, as `CudaClock.late`
        self.spans: list[tuple[float, float]] = []
        tolerance = Tolerance.of(op, case, first.tensors)
        self.timed_results = TimedResults(tolerance, self.written[0], self._inputs_of)
        self.results = [{name: torch.empty_like(t) for name, t in self.written[0].items()} for _ in range(3)]

        # The duplicate is the baseline's function as a candidate of its own, with samples of its own.
        self.functions = [kernel, baseline, baseline]
        self.returned: dict[int, tuple[torch.Tensor, ...]] = {}  # by candidate, until it is copied to the outputs
        self.candidates = [self._candidate(number) for number in range(3)]

    def _candidate(self, number: int) -> Candidate:
        function, call = self.functions[number], self.op.call(self.case)
        if not isinstance(function, Returning):
            return lambda index: function(*self.sets[index].arguments, **call)

        def candidate(index: int) -> None:
            self.returned[number] = function.compute(*self.sets[index].arguments, **call)

        return candidate

    def warm_up(self, seconds: float) -> None:
        """Run kernel and baseline for a while: for lazy initialisation, and until the device has left its idle clock."""
        end = time.perf_counter() + seconds
        while True:
            for candidate in self.candidates[:2]:
                self._make_ready(0)
                candidate(0)
            synchronize(self.device)
            if time.perf_counter() > end:
                return

    def cold(self, timing: Timing) -> np.ndarray:
        """Time rounds in shuffled order until the ratio is known to `timing.precision`, which is checked only at
        `timing.looks`, or until the cap on rounds or on time.

        Returns seconds, (rounds, 3): of the kernel, the baseline and the baseline's duplicate. Raises Dishonest."""
        deadline = time.perf_counter() + timing.cold_cap_s
        self.late = []
        taken = np.empty((0, len(self.candidates)))
        for look in timing.looks:
            while len(taken) < look:
                # The rounds of a look go to the GPU together if they fit before the cap, else one by one. This is estimated
                # without the flushes between calls. On a CPU flushes are most of a round, so rounds beyond the first look are
                # taken one by one.
                together = self.device.type == "cuda" or look == timing.looks[0]
                rounds = look - len(taken) if together and len(taken) >= timing.least_rounds else 1
                if len(taken) and (left := deadline - time.perf_counter()) < rounds * taken.sum(axis=1).mean():
                    rounds = 1
                    if left < 0 and len(taken) >= timing.least_rounds:
                        return self._check_results(taken)
                order = np.array([self.rng.permutation(len(self.candidates)) for _ in range(rounds)])
                taken = np.concatenate([taken, self.clock.cold(self.candidates, order, self)])
                self.late += [self.clock.late] if isinstance(self.clock, CudaClock) else []
            if compare(*self._check_results(taken).T).half_width <= timing.target:
                break
        return taken

    def _check_results(self, taken: np.ndarray) -> np.ndarray:
        if self.timed_results.wrong():
            raise Dishonest("a timed call returned a wrong result, though it was right when verified")
        return taken

    def before_round(self) -> None:
        self.rounds += 1
        self._change(0, self.rounds)

    def before_call(self, candidate: int, index: int) -> None:
        self._make_ready(index)

    def after_call(self, candidate: int, index: int) -> None:
        function = self.functions[candidate]
        if isinstance(function, Returning):
            function.write(self.returned.pop(candidate), self.sets[index].arguments)
        check_genuine(self.written[index], self.addresses[index])
        for name, result in self.results[candidate].items():
            result.copy_(self.written[index][name])

    def after_round(self) -> None:
        self.timed_results.compare(self.rounds, self.results[0], self.results[1], self._state(0))

    def _make_ready(self, index: int) -> None:
        """Poison what a call only writes, and restore what it changes."""
        for name, tensor in self.written[index].items():
            if name not in self.kept[index]:
                poison(tensor)
        self._give_back(index)

    def _give_back(self, index: int) -> None:
        """Restore what a call changes."""
        for name, tensor in self.written[index].items():
            if name in self.kept[index]:
                tensor.copy_(self.kept[index][name])

    def _state(self, index: int) -> dict[str, torch.Tensor]:
        """What a call reads: its inputs, and the earlier contents of what it changes."""
        kept, written = self.kept[index], self.written[index]
        return {
            name: kept[name] if name in written else t for name, t in self.sets[index].tensors.items() if name in kept
        }

    def _change(self, index: int, number: int) -> None:
        """Undo the last change of a set's inputs, and make change number `number`."""
        if undo := self.undo[index]:
            undo()
        self.undo[index] = change(self.op, self.case, self._state(index), self.seed + number, "normal")

    def _inputs_of(self, number: int) -> Operands:
        """The operands of the first set as they were in a round."""
        operands = Inputs(self.case, "normal", self.seed).operands(self.op, self.device)
        change(self.op, self.case, operands.named("in", "inout"), self.seed + number, "normal")
        return operands

    def steady(self, timing: Timing, during: Callable[[], None]) -> list[np.ndarray]:
        """Blocks of kernel, baseline, duplicate, kernel (ABBA), each long enough to settle at its own clock.

        Returns seconds of one call, an array for each block; `spans` says when each ran. `during` is called in the kernel's
        blocks. Raises Dishonest."""
        seconds = timing.block_s
        if self.device.type == "cuda":  # captured now, so that the card is not idle between blocks
            for candidate in range(len(self.candidates)):
                self.block(candidate, 0)
        self.block(1, max(seconds, SETTLE_S) if self.device.type == "cuda" else seconds)
        blocks = []
        for candidate in (0, 1, 2, 0):
            begin = time.perf_counter()
            blocks.append(self.block(candidate, seconds, during if candidate == 0 else lambda: None))
            self.spans.append((begin, time.perf_counter()))
        if self.device.type == "cpu":
            self.reached = min(self.rotations, max(LEAST_CHECKED, 2 * max(len(blocks[0]), len(blocks[3]))))
        self._check_steady(float(np.median(blocks[3])))
        return blocks

    def block(self, candidate: int, seconds: float, during: Callable[[], None] = lambda: None) -> np.ndarray:
        """Run steady calls of one candidate for `seconds`. Returns the times of one call in the settled second half."""
        return self.clock.steady(self.candidates[candidate], self.rotations, seconds, during, self._restore)

    @property
    def _restore(self) -> Callable[[int], None] | None:
        """The function that restores a set of operands, or None if calls change nothing."""
        return self._give_back if self.in_place else None

    def _check_steady(self, settled_s: float) -> None:
        """Run the steady loop on changed inputs. Raises Dishonest if results are wrong, or if it takes longer than on the old
        inputs."""
        fresh_s, _ = self._rerun(fresh=True)
        deadline = time.perf_counter() + REFERENCE_S
        for index in self.rng.permutation(self.reached):
            mine, state = self.results[0], self._state(index)
            if isinstance(self.functions[0], Returning):  # the loop's results are gone
                self._make_ready(index)
                self.candidates[0](index)
            self.after_call(0, index)
            if time.perf_counter() < deadline:
                right = matches_reference(self.op, self.case, state, mine)
            else:
                self._make_ready(index)
                self.candidates[1](index)
                self.after_call(1, index)
                right = self.timed_results.tolerance.loosely(mine, self.results[1], state)
            if not right:
                raise Dishonest("a steady call returned a wrong result, though it was right when verified")
        if fresh_s <= REMEMBERS * settled_s:
            return
        # Perhaps the machine was busy, or a short block used few of the sets. Only a kernel that remembers results is slower
        # on fresh inputs every time, and uses more CPU time. Without the latter, honest kernels were accused on a machine whose
        # scheduler interrupted every second measurement.
        least = math.inf
        for _ in range(CONFIRMED):
            fresh, same = self._rerun(fresh=True), self._rerun(fresh=False)
            least = min(least, *(new / max(old, SHORTEST_S) for new, old in zip(fresh, same, strict=True)))
            if least <= REMEMBERS:
                return
        raise Dishonest(f"takes {least:.1f} times as long on inputs that it has not seen before")

    def _rerun(self, fresh: bool) -> tuple[float, float]:
        """The time of one call in the steady loop, on changed or on the same inputs, and its CPU time. The same inputs are
        written again, too, so that the caches hold as much of both kinds."""
        first = self.rounds
        if fresh:
            self.rounds += self.reached
        else:
            first -= self.reached
        for index in range(self.reached):
            self._change(index, first + 1 + index)
            self._make_ready(index)
        return self.clock.again(self.candidates[0], self.reached, self._restore)

    def check_operands(self) -> None:
        """Raises Dishonest if a timed call has changed its inputs or written outside its outputs."""
        # All flags are read at once. To wait for a GPU at each of 4,096 sets took six seconds.
        whats, flags = zip(*self._find_changes(), strict=True)
        if what := next((what for what, flag in zip(whats, torch.stack(flags).tolist(), strict=True) if flag), None):
            raise Dishonest(f"{what} while it was timed")

    def _find_changes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What a timed call must not do, and whether it was done, for each set."""
        for operands, kept, undo in zip(self.sets, self.kept, self.undo, strict=True):
            if undo:
                undo()
            for name, tensor in operands.named("in").items():
                yield f"changed its input {name}", (bits(tensor) != bits(kept[name])).any()
            yield "wrote outside its output", operands.find_breach()
