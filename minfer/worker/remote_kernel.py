"""A kernel in a process of its own (`minfer.worker.isolated`): called like any other kernel, and timed from outside."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minfer.bench.arena import Arena
from minfer.bench.integrity import Dishonest
from minfer.bench.verify import synchronize
from minfer.ops import Case
from minfer.process.remote import Process
from minfer.process.threads import cpu_s, delay_s, my_run_delay_s, run_delays, waking_apart
from minfer.sandbox import Sandbox

START_S = 120.0

Step = Callable[[], None]


class RunnerFailed(Exception):
    """The kernel raised an error; the message is the kernel's."""


class RemoteKernel:
    """A kernel in a process of its own, which can be called like any other kernel."""

    def __init__(self, case: Case, request: Mapping[str, Any], arena: Arena, log: Path) -> None:
        self.arena, self.seconds, self.on_cpu = arena, request["timeout_s"], request["device"] == "cpu"
        self._deadline = time.monotonic() + request.get("left_s", math.inf)  # of all requests together
        self._stated = request["stated"]  # by the supervisor: the kernel's process is not asked what it supports
        self.deterministic = bool(self._stated["deterministic"])
        sandbox = Sandbox(**request["sandbox"]) if request["sandbox"] else None
        self.process = Process("minfer.worker.isolated", log, arena.fds, sandbox)
        about = {"device": request["device"], "extra": request["extra"], "arena": arena.handle}
        about["libraries"] = request["libraries"]
        self.process.send(what="hello", case=case.to_dict(), **about)

    def wait_until_started(self) -> None:
        self._reply(START_S, "ready")

    def unsupported(self, case: Case, capability: tuple[int, int] | None) -> str | None:
        return None if case.key in self._stated["supported"] else "is not among the cases that it supports"

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
        if self.arena.is_breached():
            raise Dishonest("wrote outside its output")
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)

    def ask(self, what: str, answer: str, **about: Any) -> Any:
        """Send a request and receive the one value of its reply."""
        self._send(what, **about)
        return self._reply(self.seconds, answer)

    def _send(self, what: str, **about: Any) -> None:
        self.process.phase = what
        self.process.send(what=what, **about)

    def _reply(self, seconds: float, answer: str) -> Any:
        reply = self.process.receive(max(0.1, min(seconds, self._deadline - time.monotonic())))
        if "error" in reply:
            raise RunnerFailed(" ".join(str(reply["error"]).split()))
        if answer not in reply:
            raise Dishonest("unexpected reply from the kernel's process")
        return reply[answer]

    def time(
        self,
        what: str,
        *,
        before: Step | None = None,
        after: Step | None = None,
        then: Step | None = None,
        **about: Any,
    ) -> Spent:
        """Wake the stopped process, send it a request, wait for its answer, and stop it again. The judge calls `before` before
        it sends the request, `after` when the answer has come, and `then` before it stops the process. The time includes
        `before` and `after`. It includes `then` only while the judge waits for a CPU there."""
        pid = self.process.process.pid
        used, waited = cpu_s(pid), run_delays(pid)
        with waking_apart(pid) if self.on_cpu else contextlib.nullcontext(lambda: None) as release:
            delayed, begin = my_run_delay_s(), self.process.freezer.thaw()
            if before:
                delayed, begin = my_run_delay_s(), time.perf_counter()
                before()
            self._send(what, **about)
            release()
            said = self._reply(self.seconds, "done")
            if after:
                after()
            answered = my_run_delay_s()
            # The clock ends at the answer, not when all threads stand still: stopping can take longer than a block, and its
            # noise hid kernels that lie.
            wall, delay = time.perf_counter() - begin, answered - delayed
            if then:
                then()
                held_up = my_run_delay_s() - answered  # while its results were copied, the kernel could go on
                wall, delay = wall + held_up, delay + held_up
            self.process.freezer.freeze()
        # The delays of all threads together: with only the longest one, honest kernels of two threads were accused on a busy
        # machine.
        delay += delay_s(waited, run_delays(pid))
        used = cpu_s(pid) - used
        own = float(said) if isinstance(said, float) and 0 <= said < math.inf else 0.0
        work = max(used, wall - delay) if waited else used or wall
        return Spent(wall, min(wall, work), own, waits_known=self.on_cpu and bool(waited))


@dataclass(frozen=True)
class Spent:
    """Seconds that a request took. `wall`: by the judge's clock. `work`: `wall` without the time for which the process or the
    judge waited for a busy CPU. `own`: by the clock in the kernel's process. `waits_known`: whether it ran on a CPU, and the
    system says how long threads wait for one."""

    wall: float
    work: float
    own: float
    waits_known: bool = False

    @property
    def counted(self) -> float:
        """What is judged: on a CPU without the waits. They are other programs' doing: `work` is no less than the CPU time of
        all threads, so that threads which wait for each other shorten nothing."""
        return self.work if self.waits_known else self.wall

    @property
    def lag(self) -> float:
        """The judge's time, less what process and judge waited for a busy CPU, over the time by the clock in the process."""
        return self.work / max(self.own, 1e-9)

    def per_call(self, rest: Spent, calls: int) -> Spent:
        """The same for one call, less the time of an empty request; no less than the process itself reports."""
        said = min(self.own, self.wall)
        wall, work = max(self.wall - rest.wall, said), max(self.work - rest.work, said)
        return Spent(wall / calls, work / calls, self.own / calls, self.waits_known)
