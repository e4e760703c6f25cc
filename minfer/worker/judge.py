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
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minfer import build, ops
from minfer.bench import device as devices
from minfer.bench.arena import Arena, guarded_bytes
from minfer.bench.integrity import Dishonest
from minfer.bench.judged import BELIEVED
from minfer.bench.measure import MOST_ROTATIONS, Bench
from minfer.bench.operands import STRUCTURES, Operands
from minfer.bench.stats import compare
from minfer.bench.timing import Timing
from minfer.bench.verify import WrongResult, synchronize, verify
from minfer.build import cache
from minfer.ops import Case, Op
from minfer.process import libraries
from minfer.process.death import Died
from minfer.process.orphans import adopt_orphans
from minfer.process.remote import serve
from minfer.process.threads import run_delays
from minfer.sandbox import keep_to_itself
from minfer.worker.judged_rounds import BESIDE, BLOCK_S, LEAST_CALLS, LINKED, ROUNDS, JudgedRounds
from minfer.worker.remote_kernel import RemoteKernel, RunnerFailed
from minfer.worker.shared_operands import SharedOperands

MOST_FRESH = {"cuda": 8 << 30, "cpu": 32 << 20}  # bytes of operands that get new values for each round
# On a CPU the judge takes further rounds, ROUNDS at a time, because on a busy machine four blocks often differ by more than a
# factor of two. Each entry is (factor, rounds, seconds): the judge takes further rounds while an end of the ratio's interval
# differs from its middle by more than the factor, and there are fewer rounds and fewer seconds than these. If the interval is
# wider than the factor of the second entry, the row is not `ok`.
FURTHER = ((1.25, 16, 10.0), (BELIEVED["cpu"], 48, 40.0))
STEADY_S = 0.1  # for the baseline's steady time, without any kernel
COLD = Timing(looks=[10], least_rounds=5, cold_cap_s=1.0)  # for cold times of the baseline, without any kernel

THREADS = torch.get_num_threads()  # that the baseline has elsewhere


class BaselineFailed(Exception):
    """The baseline died, or raised an error, while there was no kernel."""


def time_baseline_alone(case: Case, device: torch.device) -> dict[str, list[float]]:
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
    with contextlib.ExitStack() as ended:
        try:
            samples, loaded = take_samples(request, log, ended)
            return {"samples": samples, "loaded": sorted(loaded)}
        except WrongResult as error:
            return describe_failure("wrong", f"seen from another process: {error}")
        except Dishonest as error:
            return describe_failure("dishonest", str(error))
        except RunnerFailed as error:
            return describe_failure("error", f"in a process of its own: {error}")
        except BaselineFailed as error:
            return describe_failure("error", f"the baseline failed in a process of its own: {error}")
        except Died as death:
            return describe_failure(death.status, f"in a process of its own: {death}")
        except (MemoryError, torch.OutOfMemoryError) as error:
            return describe_failure("oom", f"in the judge: {' '.join(str(error).split())}")


def start_other(request: dict[str, Any], arena: Arena, log: Path, ended: contextlib.ExitStack) -> RemoteKernel:
    """Start the process of the other kernel that is to be timed in the same rounds (`request["beside"]`). It was verified when
    it was judged itself. Its results are checked in each block."""
    about = request["beside"]
    other = RemoteKernel(Case(**about["case"]), request | {"stated": about["stated"]}, arena, log)
    ended.callback(other.process.kill)
    other.wait_until_started()
    return other


def time_other(
    rounds: JudgedRounds, request: dict[str, Any], arena: Arena, log: Path, ended: contextlib.ExitStack
) -> list[float]:
    """On a GPU: half of the other kernel's blocks. Called once before the kernel's blocks and once after them. The other
    kernel's process exists only meanwhile, because its work would go on while it is stopped."""
    rounds.operands.free()
    other = start_other(request, arena, log, ended)
    rounds.admit(other)
    times = rounds.run("kernel", count=ROUNDS // 2)["kernel"]
    rounds.dismiss(other)
    return times


def take_samples(
    request: dict[str, Any], log: Path, ended: contextlib.ExitStack
) -> tuple[dict[str, list[float]], set[str]]:
    """Verify the kernel of a case and time it beside its baseline. Returns the samples and the shared objects that the kernel's
    process had loaded. `ended` ends the processes and frees the shared memory. Raises WrongResult, Dishonest,
    RunnerFailed, BaselineFailed and Died."""
    case = Case(**request["case"])
    op, device = ops.get(case.op), devices.pick(request["device"])
    other = op.case(op.baseline(case), case.dtype, case.shape, case.params)
    per_set = guarded_bytes(op.operand_bytes(case), len(op.specs(case)))
    alone = time_baseline_alone(other, device)
    sets = sets_for(other, device)
    arena = Arena(max(sets, 2) * per_set + (16 << 20), device)
    ended.callback(arena.close)
    with blame_baseline():
        baseline = RemoteKernel(other, request | {"extra": request["op_files"]}, arena, log)
        ended.callback(baseline.process.kill)
        baseline.wait_until_started()
        operands = SharedOperands(case, sets, arena, device)
        rounds = JudgedRounds(baseline, operands)
        linked = LINKED if operands.link else ()
        # Stopping a process does not stop its work on a GPU, so there the baseline is only timed while there is no kernel. On a
        # CPU these blocks show whether the kernel's process slows those beside it.
        before = (
            rounds.run("baseline", "duplicate", *linked[1:], count=ROUNDS // 2)
            if operands.goes_on
            else rounds.run("baseline", "duplicate")
        )
        calls = rounds.calls[baseline]
    beside = time_other(rounds, request, arena, log, ended) if "beside" in request and operands.goes_on else []
    operands.free()
    kernel = RemoteKernel(case, request, arena, log)
    ended.callback(kernel.process.kill)
    kernel.wait_until_started()
    capability, seed = devices.capability(device), request["stated"]["seed"]
    verify(op, case, kernel, kernel, device, capability, seed, structures=STRUCTURES)
    rounds.admit(kernel)
    if "beside" in request and not operands.goes_on:
        rounds.admit_other(start_other(request, arena, log, ended))
        linked = (*linked, BESIDE)
    if not operands.goes_on:
        begin = time.perf_counter()
        samples = rounds.run("kernel", "baseline", "duplicate", *linked)
        while needs_more(samples, time.perf_counter() - begin):
            more = rounds.run("kernel", "baseline", "duplicate", *linked)
            samples = {name: values + more[name] for name, values in samples.items()}
        loaded = libraries.loaded(kernel.process.process.pid)
        samples["before"] = before["baseline"] + before["duplicate"]
    else:
        samples = rounds.run("kernel", *linked[:1])
        loaded = libraries.loaded(kernel.process.process.pid)
        rounds.dismiss(kernel)
        if beside:
            samples[BESIDE] = beside + time_other(rounds, request, arena, log, ended)
        with blame_baseline():
            after = rounds.run("baseline", "duplicate", *linked[1:], count=ROUNDS - ROUNDS // 2)
        samples |= {name: before[name] + after[name] for name in before}
    calls = min(calls, rounds.calls[baseline])  # they may be more since the first rounds
    return samples | alone | {"calls": [float(rounds.calls[kernel]), float(calls)]}, loaded


def needs_more(samples: Mapping[str, list[float]], seconds: float) -> bool:
    """Whether the judge takes further rounds (FURTHER), some seconds after it has begun with the first ones."""
    kernel, baseline, duplicate = (np.maximum(samples[name], 1e-9) for name in ("kernel", "baseline", "duplicate"))
    factor = math.exp(compare(kernel, baseline, duplicate).half_width)
    return any(factor > precise and len(kernel) < most and seconds < most_s for precise, most, most_s in FURTHER)


@contextlib.contextmanager
def blame_baseline() -> Iterator[None]:
    """What fails in this block is the baseline. Raises BaselineFailed."""
    try:
        yield
    except (Died, Dishonest, RunnerFailed) as error:
        raise BaselineFailed(str(error)) from error


def describe_failure(status: str, message: str) -> dict[str, Any]:
    return {"row": {"status": status, "message": message}}


def main() -> None:
    keep_to_itself()
    adopt_orphans()
    torch.set_num_threads(1)  # on a busy machine, several threads wait for each other
    serve(lambda request, _: judge(request, Path(request["log"])))


if __name__ == "__main__":
    main()
