"""Times an untrusted kernel from a process that the kernel cannot reach (`untrusted=true`), and checks what it writes.

The kernel runs in a process of its own (`minfer.worker.isolated`) and shares nothing with the judge but memory: the
judge writes its inputs, compares what it writes with the reference, and times it by the judge's own clock. Between two
blocks of calls that process is stopped while all its inputs get new random values, so the kernel cannot prepare, remember
or patch anything. The baseline has a process of its own.

On a GPU the work of a stopped process goes on. So there the kernel's process is awake, and the clock runs, when new values
reach the shared memory; and the baseline is timed before the kernel's process exists and after its end.

The judge hands over samples (`minfer.bench.judged`). What follows from them is the supervisor's business.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from minfer import build, ops
from minfer.bench import device as devices
from minfer.bench.arena import Arena, copied, guarded_bytes, view
from minfer.bench.clock import clock_for
from minfer.bench.integrity import Dishonest
from minfer.bench.measure import MOST_ROTATIONS, Bench
from minfer.bench.operands import Operands
from minfer.bench.timed_results import SLACK, over_bound
from minfer.bench.timing import Timing
from minfer.bench.verify import Errors, WrongResult, same_bits, synchronize, verify
from minfer.build import cache
from minfer.ops import Case, Op, Tensors
from minfer.process.remote import Died, adopt_orphans, orphans, serve
from minfer.process.threads import run_delays
from minfer.sandbox import keep_to_itself
from minfer.worker.remote_kernel import Remote, RunnerFailed, Spent, Step

# Much longer than waking a process takes; on a CPU so short that not every block is interrupted.
BLOCK_S = {"cuda": 0.05, "cpu": 0.002}
LEAST_CALLS = {"cuda": 8, "cpu": 2}  # of a block, however long a call takes
MOST_FRESH = {"cuda": 8 << 30, "cpu": 32 << 20}  # bytes of operands that get new values for each round
CALIBRATIONS = 3  # that say how many calls make a block; the shortest counts
SLOW_S = 0.002  # if LEAST_CALLS take less on a GPU, waking the process is too much of it to tell how long a call takes
ROUNDS = 4  # of a block each of kernel, baseline and duplicate
RESTS = {"cuda": 12, "cpu": 3}  # empty requests, of which the shortest counts
STEADY_S = 0.1  # for the baseline's steady time, without any kernel
COLD = Timing(looks=[10], least_rounds=5, cold_cap_s=1.0)  # for cold times of the baseline, without any kernel
CHECK_S, LEAST_CHECKED = 0.2, 16  # of a block's results: as many as the time allows, and at least so many
GOES_ON = {"cuda": True, "cpu": False}  # whether the work that a process has begun goes on while the process is stopped
SNAPSHOT = 32  # results of a block that are copied when the process replies
TAKE_S = {"cuda": math.inf, "cpu": 0.001}  # within which they are copied

THREADS = torch.get_num_threads()  # that the baseline has elsewhere


class BaselineFailed(Exception):
    """The baseline died, or raised an error, while there was no kernel."""


class Trial:
    """Times kernel and baseline from outside; each runs in its own process, on the same sets of operands."""

    def __init__(self, case: Case, sets: int, baseline: Remote, arena: Arena, device: torch.device) -> None:
        """There is no kernel yet, only its baseline."""
        self.op, self.case, self.device, self.arena = ops.get(case.op), case, device, arena
        self.count, self.baseline = sets, baseline
        self.kernel: Remote | None = None
        self.of_baseline: set[int] = set()  # the processes that the baseline has left behind
        self.call = self.op.call(case)
        self.clock = clock_for(device)
        self.goes_on = GOES_ON[device.type]
        self.snapshot: dict[int, Tensors] = {}
        self.calls: dict[Remote, int] = {}
        self.originals: list[Operands] = []
        self.sets: list[dict[str, torch.Tensor]] = []  # the copies in the shared memory
        self.image: torch.Tensor | None = None  # of the shared memory, with the values of the next block
        self.imaged = self.sets
        self._lay_out()
        self._ready(baseline)
        self.rest = self._rest() if self.goes_on else None

    def admit(self, kernel: Remote) -> None:
        """Prepare the kernel's blocks. It has been verified, and the shared memory was used for that."""
        kernel.process.freeze()
        self.kernel = kernel
        self._lay_out()
        self._ready(kernel)
        if self.goes_on:
            self._take(self.count)  # what allocates memory the first time must not do so while the clock runs

    def dismiss(self, kernel: Remote) -> None:
        """End the kernel's process, and with it what it does on a GPU."""
        kernel.process.kill()
        self.kernel = None

    def free(self) -> None:
        """Free the memory of all operands until a kernel is admitted."""
        self.originals, self.sets, self.image, self.imaged, self.snapshot = [], [], None, [], {}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _lay_out(self) -> None:
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

    def _ready(self, remote: Remote) -> None:
        self._prepare(remote, min(LEAST_CALLS[self.device.type], self.count))
        self._prepare(remote, self._calls(remote))

    def _prepare(self, remote: Remote, calls: int) -> None:
        """Have a block of so many calls prepared, and stop the process."""
        self.calls[remote] = calls
        remote.process.thaw()
        remote.ask("prepare", "done", sets=self.described[:calls], arguments=self.call)
        remote.process.freeze()
        self._note_strays(remote)

    def _note_strays(self, remote: Remote) -> None:
        """Raise Dishonest if the kernel left a process running. If the baseline ran, new orphans are its own: the kernel was
        stopped then, or did not exist."""
        if remote is self.baseline:
            self.of_baseline |= orphans()
        elif strays := remote.process.strays() - self.of_baseline:
            raise Dishonest(f"left a process running: {min(strays)}")

    def _calls(self, remote: Remote) -> int:
        """How many calls a block of this process will have, estimated from a block of a few calls. If a call takes long, they
        are fewer than there are sets."""
        few = self.calls[remote]
        remote.time("run", calls=few)
        block_s = max(min(remote.time("run", calls=few).work for _ in range(CALIBRATIONS)), 1e-9)
        self._note_strays(remote)
        if self.device.type == "cuda" and block_s < SLOW_S:
            return self.count
        return min(self.count, max(few, math.ceil(BLOCK_S[self.device.type] * few / block_s)))

    def rounds(self, *names: str, count: int = ROUNDS) -> dict[str, list[float]]:
        """The samples of so many rounds of blocks: of the `kernel`, the `baseline` and its `duplicate`, in shuffled order.
        Raises Dishonest unless the kernel's results are right.

        On a GPU a short block is not believed, because of the noise of what the judge subtracts. A kernel that is slow only
        while its calls are counted gets a short block, and the noise could hide its time. If the count of the baseline's calls
        is disturbed, its block is short, and it looks slow. So the judge repeats such rounds, with a call on every set."""
        samples = self._rounds(*names, count=count)
        if self.device.type == "cuda":
            short = {self._remote(name) for name in names if self._is_short(self._remote(name), min(samples[name]))}
            for remote in short:
                self._prepare(remote, self.count)
            if short:
                samples = self._rounds(*names, count=count)
        return samples

    def _is_short(self, remote: Remote, call_s: float) -> bool:
        return self.calls[remote] < self.count and self.calls[remote] * call_s < BLOCK_S["cuda"] / 2

    def _remote(self, name: str) -> Remote:
        remote = self.kernel if name == "kernel" else self.baseline
        assert remote
        return remote

    def _rounds(self, *names: str, count: int) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = defaultdict(list)
        for _ in range(count):
            for original in self.originals:
                original.fill(secrets.randbits(31))
            for name in random.SystemRandom().sample(names, len(names)):
                spent = self._block(self._remote(name))
                samples[name].append(spent.wall)
                samples["lag" if name == "kernel" else "baseline_lag"].append(spent.lag)
                if name == "kernel":
                    samples["work"].append(spent.work)
        if self.kernel:
            self.kernel.process.stood_still()  # on a CPU, beside the last blocks of the baseline
        return dict(samples)

    def _block(self, remote: Remote) -> Spent:
        """Time a block, and return the time of one call. The kernel has not seen these values before the clock runs.

        On a CPU both processes are stopped until then. A GPU continues the work that a process started before it
        was stopped. So there the clock starts before the values are copied to the shared memory, in one copy. The process is
        awake by then: work that waits on the GPU for the values would gain the time that waking takes. The clock stops after
        some results, chosen at random, are copied out. On a CPU it stops before they are copied."""
        rest = self.rest or self._rest()
        for shared, original in zip(self.imaged, self.originals, strict=True):
            for name, tensor in shared.items():
                tensor.copy_(original.tensors[name])
        calls = self.calls[remote]
        late = {"then": lambda: self._take(calls)} if remote is self.kernel and not self.goes_on else {}
        spent = remote.time("run", **self._around(calls), **late, calls=calls)
        if remote is self.kernel:
            self._check(calls)
        self._note_strays(remote)
        return spent.per_call(rest, calls)

    def _rest(self) -> Spent:
        """What a block takes without its calls: an empty request, with the same copies. The baseline's process answers it; the
        kernel's could answer late, to have more subtracted. After a flush, a process that wakes has none of its code and data
        in the caches; that costs a third of a millisecond on a CPU.

        On a GPU it is measured once, before there is a kernel, whose work on the GPU could make it longer."""
        times = (self.baseline.time("rest", **self._around(self.count)) for _ in range(RESTS[self.device.type]))
        return min(times, key=lambda spent: spent.wall)

    def _around(self, calls: int) -> dict[str, Step]:
        """The steps that `Remote.time` takes around a block of so many calls. On a CPU it takes none while the clock runs."""
        if not self.goes_on:
            self._flush()
            return {}
        synchronize(self.device)
        return {"before": self._show, "after": lambda: self._take(calls)}

    def _flush(self) -> None:
        self.clock.flush()  # steady calls, too, read their operands from memory
        synchronize(self.device)

    def _show(self) -> None:
        """Put the new values into the memory that the other processes see."""
        assert self.image is not None
        self.arena.restore(self.image)
        self._flush()

    def _take(self, calls: int) -> None:
        """Copy some results of a block of so many calls, so that what the kernel writes later does not count. On a CPU TAKE_S
        limits the time of this, because the kernel may finish a result while others are copied. On a GPU the clock includes
        this. So it copies as many there as in `_rest`, even if the block has fewer calls."""
        deadline = time.perf_counter() + TAKE_S[self.device.type]
        written, self.snapshot = self.originals[0].named("out", "inout"), {}
        chosen = random.SystemRandom().sample(range(calls), min(calls, SNAPSHOT))
        if self.goes_on:
            chosen += list(range(calls, self.count))[: SNAPSHOT - len(chosen)]
        for index in chosen:
            results = {name: copied(self.sets[index][name]) for name in written}
            if index < calls:
                self.snapshot[index] = results
            if time.perf_counter() > deadline:
                break
        synchronize(self.device)

    def _check(self, calls: int) -> None:
        order = list(self.snapshot)
        if not self.goes_on:
            order += [
                index for index in random.SystemRandom().sample(range(calls), calls) if index not in self.snapshot
            ]
        deadline = time.perf_counter() + CHECK_S
        for number, index in enumerate(order):
            if number >= LEAST_CHECKED and time.perf_counter() > deadline:
                break
            shared, original = self.sets[index], self.originals[index]
            results = self.snapshot.get(index) or {name: shared[name] for name in original.named("out", "inout")}
            over = over_bound(self.op, self.case, original.named("in", "inout"), results)
            if not over <= SLACK:
                raise Dishonest("returned a wrong result in a process of its own, though it was right when verified")
            if over > 1:  # a bound of rounding errors holds for nearly all inputs, not for all
                raise WrongResult(f"a timed result is off by {over:.3g} times its error bound", Errors(over_bound=over))
            for name, kept in original.named("in").items():
                if not same_bits(shared[name], kept):
                    raise Dishonest(f"changed its input {name} while it was timed")
        if self.arena.breached():
            raise Dishonest("wrote outside its output while it was timed")


def baseline_alone(case: Case, device: torch.device) -> dict[str, list[float]]:
    """Cold and steady times of the baseline in this process, taken as the kernel's process takes them, before there is one. A
    cold round calls the baseline three times, because a flush evicts code as well as data, and a baseline of many small
    operations runs much code. `waited`: for which share of the time one thread waited for a CPU; infinite where the system does
    not say, because the machine may be busy then."""
    op = ops.get(case.op)
    function = build.function(op.kernels[case.kernel], devices.arch(device))
    torch.set_num_threads(THREADS)
    begin, delays = time.perf_counter(), run_delays(os.getpid())
    try:
        cold = Bench(op, case, function, function, device, secrets.randbits(31), sets=1)
        cold.warm_up(0)
        times = {"cold_baseline": cold.cold(COLD).flatten()}
        steady = Bench(op, case, function, function, device, secrets.randbits(31))
        times["steady_baseline"] = steady.block(1, STEADY_S)
        after, took = run_delays(os.getpid()), time.perf_counter() - begin
        waited = max((after[thread] - delays.get(thread, 0) for thread in after), default=math.inf) * 1e-9 / took
        return {name: [float(seconds) for seconds in found] for name, found in times.items()} | {"waited": [waited]}
    finally:
        torch.set_num_threads(1)


def sets_for(case: Case, device: torch.device) -> int:
    """How many sets of operands there are: as many as the baseline makes calls in a block."""
    op = ops.get(case.op)
    function = build.function(op.kernels[case.kernel], devices.arch(device))
    operands, call = Operands(op, case, secrets.randbits(31), "normal", device), op.call(case)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        function(*operands.arguments, **call)
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    wanted = math.ceil(BLOCK_S[device.type] / min(seconds))
    return min(most_sets(op, case, device), max(LEAST_CALLS[device.type], wanted))


def most_sets(op: Op, case: Case, device: torch.device) -> int:
    """How many sets of operands a block may have."""
    memory = MOST_FRESH[device.type]
    if device.type == "cuda":
        memory = min(memory, torch.cuda.get_device_properties(device).total_memory // 8)
    least = LEAST_CALLS[device.type]
    return min(MOST_ROTATIONS[device.type], max(least, memory // op.operand_bytes(case)))


def judge(request: dict[str, Any], log: Path) -> dict[str, Any]:
    """The reply: `samples`, or `row` with the status and the message of a kernel that failed. Of the extra files it loads
    only `op_files`, the file of the case's op. That file is trusted, because its reference defines what is right."""
    cache.use_libraries(request["libraries"])
    for path in request["op_files"]:
        ops.load_file(Path(path))
    case = Case(**request["case"])
    op, device = ops.get(case.op), devices.pick(request["device"])
    other = op.case(op.baseline(case), case.dtype, case.shape, case.params)
    per_set = guarded_bytes(op.operand_bytes(case), len(op.specs(case)))
    with contextlib.ExitStack() as ended:
        try:
            alone = baseline_alone(other, device)
            sets = sets_for(other, device)
            arena = Arena(max(sets, 2) * per_set + (16 << 20), device)
            ended.callback(arena.close)
            with of_baseline():
                baseline = Remote(other, request | {"extra": request["op_files"]}, arena, log)
                ended.callback(baseline.process.kill)
                baseline.started()
                trial = Trial(case, sets, baseline, arena, device)
                # Stopping a process does not stop its work on a GPU, so there the baseline is timed while there is no kernel.
                before = trial.rounds("baseline", "duplicate", count=ROUNDS // 2) if trial.goes_on else {}
                calls = trial.calls[baseline]
                trial.free()
            kernel = Remote(case, request, arena, log)
            ended.callback(kernel.process.kill)
            kernel.started()
            verify(op, case, kernel, kernel, device, devices.capability(device), secrets.randbits(31))
            trial.admit(kernel)
            if not trial.goes_on:
                samples = trial.rounds("kernel", "baseline", "duplicate")
            else:
                samples = trial.rounds("kernel")
                trial.dismiss(kernel)
                with of_baseline():
                    after = trial.rounds("baseline", "duplicate", count=ROUNDS - ROUNDS // 2)
                samples |= {name: before[name] + after[name] for name in before}
            calls = min(calls, trial.calls[baseline])  # they may be more since the first rounds
            return {"samples": samples | alone | {"calls": [float(trial.calls[kernel]), float(calls)]}}
        except WrongResult as error:
            return failed("wrong", f"seen from another process: {error}")
        except Dishonest as error:
            return failed("dishonest", str(error))
        except RunnerFailed as error:
            return failed("error", f"in a process of its own: {error}")
        except BaselineFailed as error:
            return failed("error", f"the baseline failed in a process of its own: {error}")
        except Died as death:
            return failed(death.status, f"in a process of its own: {death}")
        except (MemoryError, torch.OutOfMemoryError) as error:
            return failed("oom", f"in the judge: {' '.join(str(error).split())}")


@contextlib.contextmanager
def of_baseline() -> Iterator[None]:
    """What fails in this block is the baseline. Raises BaselineFailed."""
    try:
        yield
    except (Died, Dishonest, RunnerFailed) as error:
        raise BaselineFailed(str(error)) from error


def failed(status: str, message: str) -> dict[str, Any]:
    return {"row": {"status": status, "message": message}}


def main() -> None:
    keep_to_itself()
    adopt_orphans()
    torch.set_num_threads(1)  # on a busy machine, several threads wait for each other
    serve(lambda request, _: judge(request, Path(request["log"])))


if __name__ == "__main__":
    main()
