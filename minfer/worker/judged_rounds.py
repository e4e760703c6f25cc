"""The judge's rounds: it times blocks of a kernel, of its baseline, and of the baseline again as the duplicate.

Each runs in its own process, on the same sets of operands. Between two blocks that process is stopped while all its inputs
get new random values, so the kernel cannot prepare, remember or patch anything.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict

from minfer.bench.integrity import Dishonest
from minfer.bench.verify import synchronize
from minfer.process.orphans import orphans
from minfer.worker.remote_kernel import RemoteKernel, Spent, Step
from minfer.worker.shared_operands import SharedOperands

# Much longer than waking a process takes; on a CPU short enough that some blocks are not interrupted.
BLOCK_S = {"cuda": 0.05, "cpu": 0.002}
LEAST_CALLS = {"cuda": 8, "cpu": 2}  # of a block, however long a call takes
CALIBRATIONS = 3  # blocks that estimate the time of a call; the shortest counts
SLOW_S = 0.002  # if LEAST_CALLS take less on a GPU, waking the process is too large a part of it to estimate a call
# Each with a block of the kernel, of the baseline, of the duplicate and, if there is a link, of each of LINKED.
ROUNDS = 4
RESTS = {"cuda": 12, "cpu": 3}  # empty requests, of which the shortest counts
BESIDE = "beside"  # blocks of another kernel
LINKED = ("linked", "linked_baseline")  # blocks of kernel and baseline in which each call depends on the one before


class JudgedRounds:
    """The processes that are timed, and how many calls a block of each has."""

    def __init__(self, baseline: RemoteKernel, operands: SharedOperands) -> None:
        """Starts with the baseline only; `admit` adds the kernel."""
        self.operands, self.device, self.baseline = operands, operands.device, baseline
        self.kernel: RemoteKernel | None = None
        self.other: RemoteKernel | None = None  # another kernel, timed in the same rounds; on a CPU only
        self.of_baseline: set[int] = set()  # the orphans that the baseline has left
        self.call = operands.op.call(operands.case)
        self.calls: dict[RemoteKernel, int] = {}
        self._calibrate(baseline)
        self.rest = self._time_rest() if operands.goes_on else None

    def admit(self, kernel: RemoteKernel) -> None:
        """Prepare the kernel's blocks. It has been verified, and the shared memory was used for that."""
        kernel.process.freezer.freeze()
        self.kernel = kernel
        self.operands.lay_out()
        self._calibrate(kernel)
        if self.operands.goes_on:
            # The first snapshot allocates memory, which must not happen while the clock runs.
            self.operands.take_snapshot(self.operands.count)

    def admit_other(self, other: RemoteKernel) -> None:
        """Prepare blocks of another kernel, beside those of an admitted one."""
        other.process.freezer.freeze()
        self.other = other
        self._calibrate(other)

    def dismiss(self, kernel: RemoteKernel) -> None:
        """End the kernel's process, and with it what it does on a GPU."""
        kernel.process.kill()
        self.kernel = None

    def _calibrate(self, remote: RemoteKernel) -> None:
        """Prepare a block of a few calls, and then one of as many as make a block."""
        self._prepare(remote, min(LEAST_CALLS[self.device.type], self.operands.count))
        self._prepare(remote, self._count_calls(remote))

    def _prepare(self, remote: RemoteKernel, calls: int) -> None:
        """Let the process prepare a block of `calls` calls and, if there is a link, a linked block. Then stop the
        process."""
        self.calls[remote] = calls
        remote.process.freezer.thaw()
        for linked in (False, True) if self.operands.link else (False,):
            remote.ask("prepare", "done", sets=self.operands.described[:calls], arguments=self.call, linked=linked)
        remote.process.freezer.freeze()
        self._note_strays(remote)

    def _note_strays(self, remote: RemoteKernel) -> None:
        """Raise Dishonest if the kernel left a process running. If the baseline ran, new orphans are its own: the kernel was
        stopped then, or did not exist."""
        if remote is self.baseline:
            self.of_baseline |= orphans()
        elif strays := remote.process.freezer.strays() - self.of_baseline:
            raise Dishonest(f"left a process running: {min(strays)}")

    def _count_calls(self, remote: RemoteKernel) -> int:
        """The number of calls in a block of this process, estimated from a block of a few calls. It is the number of sets, or
        less if a call takes long."""
        few = self.calls[remote]
        remote.time("run", calls=few)
        block_s = max(min(remote.time("run", calls=few).work for _ in range(CALIBRATIONS)), 1e-9)
        self._note_strays(remote)
        if self.device.type == "cuda" and block_s < SLOW_S:
            return self.operands.count
        return min(self.operands.count, max(few, math.ceil(BLOCK_S[self.device.type] * few / block_s)))

    def run(self, *names: str, count: int = ROUNDS) -> dict[str, list[float]]:
        """The samples of `count` rounds. A round has one block for each of `names`, in shuffled order: `kernel`,
        `baseline`, its `duplicate`, BESIDE, and those in LINKED. Raises Dishonest unless the kernel's results are right.

        On a GPU the judge does not trust a short block, because the time that it subtracts is noisy. A kernel that is slow only
        while its calls are counted gets a short block, and the noise could hide its time. If the count of the baseline's calls
        is disturbed, its block is short, and it looks slow. So the judge repeats such rounds, with a call on every set."""
        samples = self._run_once(*names, count=count)
        if self.device.type == "cuda":
            short = {
                self._process_of(name) for name in names if self._is_short(self._process_of(name), min(samples[name]))
            }
            for remote in short:
                self._prepare(remote, self.operands.count)
            if short:
                samples = self._run_once(*names, count=count)
        return samples

    def _is_short(self, remote: RemoteKernel, call_s: float) -> bool:
        return self.calls[remote] < self.operands.count and self.calls[remote] * call_s < BLOCK_S["cuda"] / 2

    def _process_of(self, name: str) -> RemoteKernel:
        remote = self.kernel if name in ("kernel", "linked") else self.other if name == BESIDE else self.baseline
        assert remote
        return remote

    def _run_once(self, *names: str, count: int) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = defaultdict(list)
        for _ in range(count):
            self.operands.draw()
            for name in random.SystemRandom().sample(names, len(names)):
                spent = self._time_block(self._process_of(name), linked=name in LINKED)
                if name in LINKED:
                    samples[name].append(spent.work)
                    continue
                samples[name].append(spent.counted)
                if name == BESIDE:
                    continue
                samples["lag" if name == "kernel" else "baseline_lag"].append(spent.lag)
                if name == "kernel":
                    samples["work"].append(spent.work)
                elif name == "baseline" and self.operands.link:
                    samples["baseline_work"].append(spent.work)
        for remote in filter(None, (self.kernel, self.other)):
            remote.process.freezer.check_stands_still()  # on a CPU, beside the last blocks of the baseline
        return dict(samples)

    def _time_block(self, remote: RemoteKernel, linked: bool) -> Spent:
        """Time a block, and return the time of one call. The kernel has not seen these values before the clock runs.

        On a CPU both processes are stopped until then. A GPU continues the work that a process started before it
        was stopped. So there the clock starts before the values are copied to the shared memory, in one copy. The process is
        awake by then: work that waits on the GPU for the values would gain the time that waking takes. The clock stops after
        some results, chosen at random, are copied out. On a CPU it stops before they are copied."""
        rest = self.rest or self._time_rest()
        operands, calls = self.operands, self.calls[remote]
        operands.write()
        foreign = remote is not self.baseline
        if foreign and not operands.goes_on:
            operands.choose_pieces(calls)
        late = {"then": lambda: operands.take_snapshot(calls)} if foreign and not operands.goes_on else {}
        spent = remote.time("run", **self._steps_around(calls, linked), **late, calls=calls, linked=linked)
        if foreign:
            operands.check(calls, linked)
        self._note_strays(remote)
        return spent.per_call(rest, calls)

    def _time_rest(self) -> Spent:
        """The time of a block without its calls: an empty request with the same copies. The baseline's process answers it,
        because the kernel's could answer late, so that more is subtracted. After a flush, a process that wakes has none of its
        code and data in the caches; that costs a third of a millisecond on a CPU.

        On a GPU it is measured once, before there is a kernel, whose work on the GPU could make it longer."""
        times = (
            self.baseline.time("rest", **self._steps_around(self.operands.count))
            for _ in range(RESTS[self.device.type])
        )
        return min(times, key=lambda spent: spent.counted)

    def _steps_around(self, calls: int, linked: bool = False) -> dict[str, Step]:
        """The steps of `RemoteKernel.time` before and after a block of `calls` calls; none on a CPU, where it flushes now."""
        operands = self.operands
        if not operands.goes_on:
            operands.flush()
            return {}
        synchronize(self.device)
        return {"before": operands.show, "after": lambda: operands.take_snapshot(calls, linked)}
