"""Judges an untrusted kernel from a process that the kernel cannot reach (`untrusted=true`).

The kernel runs in a process of its own (`minfer.worker.isolated`) and shares nothing with the judge but memory: the
judge writes its inputs, compares what it writes with the reference, and times it by the judge's own clock. Between two
blocks of calls that process is stopped while all its inputs get new values, so the kernel cannot prepare, remember or
patch anything.
A clock outside is too coarse to replace the one inside. It checks the one inside: times inside that are shorter
than what passed outside, or a baseline that was slower beside the kernel than by itself, are `dishonest`.
"""

from __future__ import annotations

import random
import secrets
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minfer import build, ops
from minfer.bench import device as devices
from minfer.bench.arena import Arena, guarded_bytes
from minfer.bench.clock import Hooks, clock_for
from minfer.bench.integrity import Dishonest
from minfer.bench.measure import MOST_ROTATIONS, rotations
from minfer.bench.operands import Operands
from minfer.bench.timed_results import matches_reference
from minfer.bench.verify import WrongResult, same_bits, synchronize, verify
from minfer.ops import Case, Op
from minfer.process.remote import Died, Process, adopt_orphans, children, orphans, serve
from minfer.rows.store import Row
from minfer.sandbox import Sandbox, keep_to_itself

# The clocks may differ by this factor: blocks are short, shared memory has small pages, and the machine may be busy.
BELIEVED = {"cuda": 1.25, "cpu": 1.6}
BLOCK_S = {"cuda": 0.05, "cpu": 0.25}  # a block has so many sets of operands that waking a process weighs little...
FEWEST_SETS, MOST_MEMORY = 8, 8 << 30  # ...but no more of a GPU's memory, and on a CPU no more than the cache needs
COLD_US = {"cuda": 4.0, "cpu": 0.0}  # what a cold window may have beside the call: starting it, and the first misses
BLOCKS, MOST_BLOCKS = 3, 12  # of each candidate; more where the clocks disagree, and all of them must
MOST_WAITED = 0.1  # of a block, for a CPU
BUSY = (
    "could not be judged: its process waited for a CPU {:.0%} of the time; run it again when the machine is less busy"
)
COLD_CALLS = 8  # of a baseline, where its cold time is in doubt
CHECKED = 16  # results of a block, chosen by chance when it is done
START_S = 120.0


class RunnerFailed(Exception):
    """The kernel raised an error, in words of its own."""


class Remote:
    """A kernel in a process of its own; called like any other."""

    def __init__(self, case: Case, request: Mapping[str, Any], arena: Arena, log: Path) -> None:
        self.arena, self.seconds = arena, request["timeout_s"]
        self.deterministic = True
        sandbox = Sandbox(**request["sandbox"]) if request["sandbox"] else None
        self.process = Process("minfer.worker.isolated", log, arena.fds, sandbox)
        about = {"device": request["device"], "extra": request["extra"], "arena": arena.handle}
        about["libraries"] = request["libraries"]
        self.process.send(what="hello", case=case.to_dict(), **about)

    def started(self) -> None:
        self.deterministic = bool(self._reply(START_S, "deterministic"))

    def unsupported(self, case: Case, capability: tuple[int, int] | None) -> str | None:
        return self.ask("unsupported", "why", case=case.to_dict())

    def __call__(self, *tensors: torch.Tensor, **arguments: Any) -> None:
        """Run the kernel on copies of these tensors, and copy the results back. Raises WrongResult, Dishonest,
        RunnerFailed and Died."""
        self.arena.clear()
        copies = [self.arena.copy(tensor) for tensor in tensors]
        described = [self.arena.describe(copy) for copy in copies]
        synchronize(tensors[0].device)
        returned = self.ask("call", "returned", tensors=described, arguments=arguments)
        if returned is not None:
            raise Dishonest(f"returned a {returned}; a kernel writes its output and returns nothing")
        if self.arena.breached():
            raise Dishonest("wrote outside its output")
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)

    def ask(self, what: str, answer: str, **about: Any) -> Any:
        """Send a request and receive the one value of its reply."""
        self.process.send(what=what, **about)
        return self._reply(self.seconds, answer)

    def _reply(self, seconds: float, answer: str) -> Any:
        reply = self.process.receive(seconds)
        if "error" in reply:
            raise RunnerFailed(" ".join(str(reply["error"]).split()))
        if answer not in reply:
            raise Dishonest("unexpected reply from the kernel's process")
        return reply[answer]

    def time(self, what: str) -> tuple[float, float]:
        """Seconds from waking the stopped process to its answer, and which part of them it waited for a CPU."""
        waited, begin = self._waited(), time.perf_counter()
        self.process.signal(signal.SIGCONT)
        self.ask(what, "done")
        seconds = time.perf_counter() - begin
        self.process.freeze()
        return seconds, (self._waited() - waited) / seconds

    def _waited(self) -> float:
        """Seconds that its main thread could have run and had no CPU, so far; 0 where the system does not say."""
        try:
            return int(Path(f"/proc/{self.process.process.pid}/schedstat").read_text().split()[1]) * 1e-9
        except (OSError, IndexError):
            return 0.0


class Trial:
    """Kernel and baseline, each in its process, on the same sets of operands, timed from outside."""

    def __init__(self, case: Case, kernel: Remote, baseline: Remote, arena: Arena, device: torch.device) -> None:
        self.op, self.case, self.device, self.arena = ops.get(case.op), case, device, arena
        self.kernel, self.baseline = kernel, baseline
        self.call = self.op.call(case)
        self.here = build.function(self.op.kernels[self.op.baseline(case)], devices.arch(device))  # the baseline
        first = self._fresh()
        self.originals = [first, *(self._fresh() for _ in range(self._sets(first) - 1))]
        arena.clear()
        self.sets = [{name: arena.copy(t) for name, t in original.tensors.items()} for original in self.originals]
        synchronize(device)
        described = [[arena.describe(tensor) for tensor in shared.values()] for shared in self.sets]
        for remote in (kernel, baseline):
            remote.ask("prepare", "done", sets=described, arguments=self.call)
            remote.process.freeze()

    def _fresh(self) -> Operands:
        return Operands(self.op, self.case, secrets.randbits(31), "uniform", self.device)

    def _sets(self, first: Operands) -> int:
        """How many calls a block has."""
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            self.here(*first.arguments, **self.call)
            synchronize(self.device)
            seconds.append(time.perf_counter() - begin)
        wanted = max(FEWEST_SETS, round(BLOCK_S[self.device.type] / min(seconds)))
        return min(most_sets(self.op, self.case, self.device), wanted)

    def cold_baseline(self) -> float:
        """Seconds of a cold call of the baseline on a CPU, in this process: the longest of some. With the data a flush
        takes the code from the caches, and a baseline of many small operations has much of it."""
        operands = self._fresh()
        call = lambda index: self.here(*operands.arguments, **self.call)
        return float(clock_for(self.device).cold([call], np.zeros((COLD_CALLS, 1), dtype=int), Hooks()).max())

    def block(self, remote: Remote) -> tuple[float, float]:
        """Seconds of one call, from one call on each set, and which part of the block it waited for a CPU. Raises
        Dishonest unless the results are right."""
        # What a block costs beside its calls, by the process that has no reason to make it long.
        rest = min(self.baseline.time("rest")[0] for _ in range(3))
        for shared, original in zip(self.sets, self.originals, strict=True):
            if remote is self.kernel:  # no process has seen these values before the clock runs: both are stopped
                original.fill(secrets.randbits(31))
            for name, tensor in shared.items():
                tensor.copy_(original.tensors[name])
        synchronize(self.device)
        seconds, waited = remote.time("run")
        if remote is self.kernel:
            self._check()
        return max(seconds - rest, 0.0) / len(self.sets), waited

    def _check(self) -> None:
        chosen = random.SystemRandom().sample(range(len(self.sets)), min(CHECKED, len(self.sets)))
        for index in chosen:
            shared, original = self.sets[index], self.originals[index]
            results = {name: shared[name] for name in original.named("out", "inout")}
            if not matches_reference(self.op, self.case, original.named("in", "inout"), results):
                raise Dishonest("returned a wrong result in a process of its own, though it was right when verified")
            for name, kept in original.named("in").items():
                if not same_bits(shared[name], kept):
                    raise Dishonest(f"changed its input {name} while it was timed")
        if self.arena.breached():
            raise Dishonest("wrote outside its output while it was timed")
        if strays := children(self.kernel.process.process.pid) | orphans():
            raise Dishonest(f"left a process running: {min(strays)}")


def most_sets(op: Op, case: Case, device: torch.device) -> int:
    """How many sets of operands a block may have."""
    if device.type == "cpu":
        return rotations(op, case, device)
    memory = min(MOST_MEMORY, torch.cuda.get_device_properties(device).total_memory // 8)
    return min(MOST_ROTATIONS[device.type], max(FEWEST_SETS, memory // op.operand_bytes(case)))


def judge(request: dict[str, Any], log: Path) -> Row:
    """The columns that judging a case fills: status and message only where they change. Of the extra files it loads only
    what is in `op_files`: that of the case's op, which is believed, because its reference says what is right."""
    build.give(request["libraries"])
    for path in request["op_files"]:
        ops.load_file(Path(path))
    case = Case(**request["case"])
    op, device = ops.get(case.op), devices.pick(request["device"])
    per_set = guarded_bytes(op.operand_bytes(case), len(op.specs(case)))
    arena = Arena(max(most_sets(op, case, device), 2) * per_set + (16 << 20), device)
    other = op.case(op.baseline(case), case.dtype, case.shape, case.params)
    kernel, baseline = (
        Remote(case, request, arena, log),
        Remote(other, request | {"extra": request["op_files"]}, arena, log),
    )
    try:
        kernel.started()
        baseline.started()
        verify(op, case, kernel, kernel, device, devices.capability(device), secrets.randbits(31))
        return _compare(Trial(case, kernel, baseline, arena, device), request["claims"])
    except WrongResult as error:
        return {"status": "wrong", "message": f"seen from another process: {error}"}
    except Dishonest as error:
        return {"status": "dishonest", "message": str(error)}
    except RunnerFailed as error:
        return {"status": "error", "message": f"in a process of its own: {error}"}
    except Died as death:
        return {"status": death.status, "message": f"in a process of its own: {death}"}
    finally:
        kernel.process.kill()
        baseline.process.kill()
        arena.close()


def _compare(trial: Trial, claims: Mapping[str, float]) -> Row:
    """Time both until the claims are believed, or for MOST_BLOCKS. The best time and the best ratio seen count: of a
    kernel's block and the baseline's beside it, and on a CPU of any two, where a busy machine may hold up a baseline of
    many threads by any factor, inside of the process as outside. Nothing counts where every block had to wait for a CPU.
    A busy machine never makes a row `dishonest`."""
    mine: list[float] = []
    theirs: list[float] = []
    least_waited, cold = 1.0, 0.0
    while True:
        seconds, waited = trial.block(trial.kernel)
        mine.append(seconds * 1e6)
        theirs.append(trial.block(trial.baseline)[0] * 1e6)
        least_waited = min(least_waited, waited)
        row = {"judged_us": min(mine), "judged_baseline_us": min(theirs)}
        alone = COLD_US[trial.device.type]
        pairs = list(zip(mine, theirs, strict=True))
        if trial.device.type == "cpu":
            pairs.append((min(mine), max(theirs)))
        speedup = max(max(b / max(a, 1e-3), (b + alone) / (a + alone)) for a, b in pairs)
        doubt = _doubt(claims, BELIEVED[trial.device.type], min(mine), {"cold": max(speedup, cold), "steady": speedup})
        if doubt and len(mine) == BLOCKS and trial.device.type == "cpu":
            cold = trial.cold_baseline() * 1e6 / claims["cold_us"]  # and the next blocks must not contradict this time
        if doubt and len(mine) == MOST_BLOCKS and least_waited > MOST_WAITED:
            return {"status": "error", "message": BUSY.format(least_waited)}
        if len(mine) >= BLOCKS and (not doubt or len(mine) == MOST_BLOCKS):
            return row | ({"status": "dishonest", "message": doubt} if doubt else {"guarantee": "judged"})


def _doubt(claims: Mapping[str, float], believed: float, us: float, speedups: Mapping[str, float]) -> str:
    """What cannot be believed of what was measured inside, or nothing."""
    for regime in ("cold", "steady"):
        if f"{regime}_us" not in claims:
            continue
        inside, gain = claims[f"{regime}_us"], claims[f"{regime}_speedup"]
        if inside * believed < us:
            return f"takes {inside:.4g} us by the clock inside of its process and {us:.4g} us by the clock outside"
        if gain > believed * speedups[regime]:
            outside = f"{speedups[regime]:.3g} times outside"
            return f"is {gain:.3g} times as fast as the baseline inside of its process and {outside}"
    return ""


def main() -> None:
    keep_to_itself()
    adopt_orphans()
    serve(lambda request, _: {"row": judge(request, Path(request["log"]))})


if __name__ == "__main__":
    main()
