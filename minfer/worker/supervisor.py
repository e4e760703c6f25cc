"""Runs cases in a child process (`minfer.worker.child`), goes on if the child dies, and never uses the device itself.

Whatever happens to the child (a crash, a hang, no memory), the supervisor records the status of the case and runs the next
one in a fresh child.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from minfer import ops
from minfer.bench import judged, peaks
from minfer.bench.derived import derive
from minfer.bench.timing import Timing
from minfer.bench.verify import choose_inputs
from minfer.build import cache, toolchain
from minfer.build.cache import Built
from minfer.ops import Case
from minfer.plan.shard import Shard
from minfer.process import libraries
from minfer.process.death import Died
from minfer.process.remote import Process
from minfer.process.text import make_printable
from minfer.rows import store
from minfer.rows.store import Row
from minfer.sandbox import keep_to_itself
from minfer.worker import confinement

TIMED = tuple(name for name in store.SCHEMA.names if name.startswith(("cold_", "steady_", "energy_", "judged_")))
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, pa.ArrowException)
NEVER_FROM_CHILD = ("guarantee", "libraries", "metrics", "functions", "profilers", "registers", "shared_bytes",
                    "local_bytes", "peaks", "roof", "floor_us")  # fmt: skip
# How many timeouts a judged case may take, over all attempts. Without this budget, a kernel that only waits would take forty.
BUDGET = 4
AGAIN_S = 60.0  # an `unconverged` judged case begins again within this time, or within one timeout if that is shorter
# Of the columns TIMED, those that are taken from the child as they are.
FROM_CHILD = ("cold_empty_us", "cold_launch_us", "cold_late", "cold_baseline_late", "cold_waited", "steady_rotations")
# Statuses that a process may reply. The supervisor decides what is unsupported itself, before it asks a process.
REPLIED = store.STATUSES.keys() - {"unsupported"}


@dataclass(frozen=True)
class Machine:
    """What a child reports of its device."""

    environment: Row  # the columns of a row
    capability: tuple[int, int] | None  # of a GPU
    gpu: str | None  # its UUID

    @property
    def arch(self) -> str:
        """What kernels are compiled for; empty for a CPU."""
        return toolchain.arch_of(self.capability) if self.capability else ""


class RuleFailed(Exception):
    """The rule of what a kernel supports raised an exception."""


class Supervisor:
    """Runs the cases of one device, one after the other."""

    def __init__(self, shard: Shard, log: Path) -> None:
        self.shard, self.log = shard, log
        self.child: Process | None = None
        self.last: Process | None = None  # the child that ran the last case, and may have died
        self.judge: Process | None = None
        self.machine = Machine({"device_kind": shard.device}, None, None)
        self.bare: set[str] = set()  # the shared objects that the child had loaded before any foreign code
        self.peaks: dict[str, float] | None = None  # measured by the first child
        self.libraries: dict[str, str] = {}  # of what was compiled, by `op/kernel`
        self.sandbox = confinement.make_sandbox(shard) if shard.untrusted else None
        if shard.untrusted:
            keep_to_itself()

    def start(self) -> Machine:
        """Start a child, and ask it for its device. Raises Died."""
        self.child = Process("minfer.worker.child", self.log, sandbox=self.sandbox)
        shard = self.shard
        hello = self.child.ask(shard.case_timeout_s, device=shard.device, timing=asdict(shard.timing))
        self.bare = libraries.loaded(self.child.process.pid)
        capability = tuple(hello["capability"]) if hello["capability"] else None
        self.machine = Machine(hello["environment"], capability, hello["gpu"])
        return self.machine

    def take(self, builds: Mapping[str, Built | str]) -> None:
        """Let cases use what was built, by `op/kernel`."""
        self.libraries = {name: done.library for name, done in builds.items() if isinstance(done, Built)}

    def prepare(self) -> Process:
        """Make the child ready for cases: the first child measures the peaks, and every child loads the extra files. Returns
        the child. Raises Died."""
        if self.child is None:
            self.start()
        assert self.child is not None
        request: dict[str, Any] = {"peaks": self.peaks, "extra": self.shard.extra, "libraries": {}}
        if self.peaks is None and (found := self._peaks_library()):
            # Names in the cache depend on the compiler's version. In a sandbox the child may not see the compiler, and
            # cannot write to the cache.
            request["libraries"] = {f"{peaks.KERNEL.op}/{peaks.KERNEL.name}": found[0]}
        self.peaks = self.child.ask(self.shard.case_timeout_s, **request)["peaks"]
        return self.child

    def end(self) -> None:
        """End the processes."""
        for process in (self.child, self.judge):
            if process:
                process.kill()
        self.child = self.judge = None

    def check_log(self) -> None:
        """Raises the OSError that kept what the last case printed from the log."""
        if self.last:
            self.last.check_log()

    def unsupported(self, case: Case) -> str | None:
        """Why a case cannot run on this device, as half a sentence, or None."""
        kernel = ops.get(case.op).kernels[case.kernel]
        try:
            return kernel.elsewhere(self.shard.device) or kernel.unsupported(case, self.machine.capability)
        except Exception as error:  # the rule is the kernel's author's
            return make_printable(f"its rule of what it supports fails: {type(error).__name__}: {error}")

    def run(self, case: Case, built: Built | str | None, timing: Timing | None = None) -> Row:
        """The columns of a case, even if the child dies. `built` is the result of compiling its kernel: a str says why that
        failed, None that there was nothing to compile. Without `timing`, and if a judge times the case,
        the shard's timing applies."""
        kernel = ops.get(case.op).kernels[case.kernel]
        if why := self.unsupported(case):
            return {"status": "unsupported", "message": why}
        try:
            kernel.sources()
        except ops.SourceError as error:
            return {"status": "compile_error", "message": make_printable(str(error))}
        op = ops.get(case.op)
        if self.shard.untrusted and kernel.returns and kernel.source != op.source and not _is_ours(kernel.source):
            return {
                "status": "unsupported",
                "message": "untrusted=true cannot judge a kernel with returns=; let it write its outputs",
            }
        if isinstance(built, str):
            return {"status": "compile_error", "message": built}
        row: Row = {}
        if built:
            row = {"build_s": built.seconds, "registers": built.registers}
            row |= {"shared_bytes": built.shared_bytes, "local_bytes": built.local_bytes}
        if not self.shard.untrusted or kernel.returns:
            row = self._run_child(case, row, self.shard.case_timeout_s, timing)
            return row | {"guarantee": "in-process"} if row["status"] in store.MEASURED else row
        return self._run_judged(case, row)

    def _run_child(self, case: Case, row: Row, seconds: float, timing: Timing | None = None) -> Row:
        """The columns of the build, `row`, and those that the child fills within some seconds."""
        timing = timing or self.shard.timing
        child = self.child or self.prepare()
        self.last, child.phase = child, "load"
        child.allow_output()
        try:
            reply = child.ask(seconds, case=case.to_dict(), libraries=self.libraries, timing=asdict(timing))
        except Died as death:
            self.child = None
            if any(name in str(death) for name in ("SIGTERM", "SIGKILL")):
                time.sleep(
                    1
                )  # when a job is ended, this process may be ended last; the child's death was then not the kernel's fault
            return row | {"status": death.status, "message": str(death)}
        roofs = self.peaks if self.shard.device == "cuda" else None
        row = derive_columns(case, reply, timing, roofs) | row
        if row["status"] in store.MEASURED:
            row["libraries"] = self._name_libraries(libraries.loaded(child.process.pid))
        if not reply.get("usable") or row["status"] in ("wrong", "dishonest") or self.shard.untrusted:
            child.kill()  # the next kernel must not run in a process that this one may have changed
            self.child = None
        return row

    def _name_libraries(self, paths: Iterable[str]) -> list[str]:
        """The column `libraries`, from the shared objects that a process has loaded."""
        built = {*self.libraries.values(), *self._peaks_library()}
        return libraries.names(paths, self.bare | built)

    def _peaks_library(self) -> list[str]:
        found = cache.find(peaks.KERNEL, self.machine.arch) if self.machine.arch else None
        return [found.library] if found else []

    def _run_judged(self, case: Case, built: Row) -> Row:
        """The columns that the child and the judge fill; the judge knows nothing of the child. Both measure again while they
        contradict each other, up to `judged.ATTEMPTS` times in all. They also measure again if the row is `unconverged`, but
        not after AGAIN_S."""
        found: list[judged.Contradiction] = []
        row, timeout_s, unconverged = built, self.shard.case_timeout_s, None
        begin = time.monotonic()
        deadline, again_until = begin + BUDGET * timeout_s, begin + min(AGAIN_S, timeout_s)
        for attempt in range(judged.ATTEMPTS):
            if unconverged and time.monotonic() > again_until:
                break
            if (left := deadline - time.monotonic()) <= 0:
                why = f"took more than {BUDGET} timeouts of {timeout_s:g} s, in {attempt} attempts"
                return row | dict.fromkeys(TIMED) | {"status": "timeout", "message": why}
            row = self._run_child(case, built, min(left, timeout_s))
            if row["status"] not in store.MEASURED:
                return row
            reply = self._ask_judge(case, max(deadline - time.monotonic(), 0.0))
            try:
                if "row" in reply:  # no time without a right result
                    status, message = reply["row"]["status"], str(reply["row"]["message"])
                    if status not in REPLIED or status in store.MEASURED:
                        raise ValueError(status)
                    return row | {"status": status, "message": message} | dict.fromkeys(TIMED)
                samples = judged.Samples.of(reply["samples"])
                doubt = judged.contradiction(row, samples, self.shard.device)
                if doubt is None:
                    level = self.sandbox.level if self.sandbox else "limits"
                    columns = judged.columns(case, row, samples, self.shard.device)
                    columns |= percent_of_peak(case, columns["judged_us"], self.peaks, self.shard.device)
                    columns["libraries"] = self._name_libraries(map(str, reply["loaded"]))
                    row |= columns | {"guarantee": f"judged, {level}"}
                    if row["status"] != "unconverged":
                        return row
                    unconverged = row
                else:
                    found.append(doubt)
            except MALFORMED as error:
                why = f"malformed reply from the judge: {make_printable(repr(error), 200)}"
                return row | {"status": "error", "message": why} | dict.fromkeys(TIMED)
        return unconverged or row | dict.fromkeys(TIMED) | judged.verdict(found)

    def _ask_judge(self, case: Case, left_s: float) -> dict[str, Any]:
        """The judge's reply. The kernel may use the seconds that are left; the judge has one more timeout for its own work."""
        about: dict[str, Any] = {"device": self.shard.device, "extra": self.shard.extra, "log": str(self.log)}
        about["libraries"] = self.libraries
        try:
            about["stated"] = state(case, self.machine.capability)
            if (beside := self.shard.beside) and beside != case.kernel:
                other = ops.get(case.op).case(beside, case.dtype, case.shape, case.params)
                about["beside"] = {"case": other.to_dict(), "stated": state(other, self.machine.capability)}
        except RuleFailed as error:
            return {"row": {"status": "error", "message": make_printable(str(error))}}
        about["sandbox"] = asdict(self.sandbox) if self.sandbox else None
        source = ops.get(case.op).source
        about["op_files"] = [str(source)] if source and not _is_ours(source) else []
        timeout_s = self.shard.case_timeout_s
        self.judge = self.judge or Process("minfer.worker.judge", self.log)
        try:
            return self.judge.ask(left_s + timeout_s, case=case.to_dict(), timeout_s=timeout_s, left_s=left_s, **about)
        except Died as death:
            self.judge = None
            return {"row": {"status": "error", "message": f"the judge failed: {death}"}}


def percent_of_peak(case: Case, us: float, roofs: Mapping[str, float] | None, device: str) -> Row:
    """The column `judged_percent_of_peak` on a GPU. A block calls on one set of operands after the other, so its calls are
    compared with a long copy and not with a single cold one."""
    if device != "cuda" or not roofs:
        return {}
    op = ops.get(case.op)
    share = peaks.percent(roofs, op.flops(case), op.traffic_of(case), op.arithmetic(case), us * 1e-6, cold=False)
    return {"judged_percent_of_peak": share}


def state(case: Case, capability: tuple[int, int] | None) -> dict[str, Any]:
    """What the judge must know of a kernel and must not ask the kernel's process, by the rules that are registered here: the
    seed of the verification; of the cases that this seed chooses, the keys of those that the kernel supports; and whether two
    runs give the same bits. Raises RuleFailed."""
    op, seed = ops.get(case.op), secrets.randbits(31)
    kernel = op.kernels[case.kernel]
    try:
        chosen = choose_inputs(op, case, kernel, capability, seed)
    except Exception as error:  # the rule is the kernel's author's
        raise RuleFailed(f"its rule of what it supports fails: {type(error).__name__}: {error}") from error
    return {"seed": seed, "supported": sorted({c.case.key for c in chosen}), "deterministic": kernel.deterministic}


def _is_ours(path: Path) -> bool:
    return path.is_relative_to(ops.PACKAGE)


def derive_columns(case: Case, reply: Mapping[str, Any], timing: Timing, roofs: Mapping[str, float] | None) -> Row:
    """The columns that follow from a child's reply. Its process ran code that may reply anything: of a correct case only the
    samples are believed, and everything else is computed from them here. `roofs`: the peaks of a GPU."""
    try:
        claims = {name: value for name, value in reply["row"].items() if name not in NEVER_FROM_CHILD}
        row = claims | dict.fromkeys(TIMED)
        if row["status"] in store.MEASURED:
            row |= {name: claims.get(name) for name in FROM_CHILD}
            row |= derive(
                case,
                reply["cold"],
                reply["steady"],
                reply["watts"],
                timing,
                roofs,
                str(claims.get("watch_throttle") or ""),
            )
        if row["status"] not in store.MEASURED:  # no time without a right result
            row |= dict.fromkeys(TIMED)
        if row["status"] not in REPLIED:
            raise ValueError(row["status"])
        store.to_table([row])
        return row
    except MALFORMED as error:
        return {
            "status": "dishonest",
            "message": f"malformed reply from the kernel's process: {make_printable(repr(error), 200)}",
        }
