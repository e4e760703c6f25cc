"""Runs submissions on the problems of a season, on this machine or on SLURM: as untrusted cases of an ordinary run."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from minfer import ops
from minfer.bench.judged import BELIEVED, BESIDE, FASTER, HELD_UP, LONGER
from minfer.bench.timing import Timing
from minfer.board.answer import NOT_ITS_FAULT
from minfer.board.folder import Board, Entry, make_id
from minfer.board.opcodes import read_mix
from minfer.board.score import Ratio
from minfer.board.season import Season
from minfer.board.stage import stage
from minfer.jobs import executors
from minfer.jobs.run import Run
from minfer.plan import extra
from minfer.plan.config import Cluster, Config, Draw, Profiler, Shape, UserError, written
from minfer.rows import store
from minfer.rows.rules import REGIMES
from minfer.rows.select import is_judged
from minfer.run import start
from minfer.worker import sandboxed

SHOWN_LOG = 1 << 16  # bytes of a log that are kept
MOST_RUNS = 3  # of a problem that could not be judged, if that is not the kernel's fault
# How the message of a row begins (`minfer.bench.judged`) if something may have slowed the baseline's blocks...
DOUBTED = tuple(words.partition("{")[0] for words in (FASTER, HELD_UP))
SAYS_LESS = LONGER.partition("{")[0]  # ... or if the kernel's blocks took longer than its own process says
FOREIGN = (
    "blas",
    "mkl",
    "dnnl",
    "cudnn",
    "cutlass",
)  # in names of libraries that could do a kernel's work for it


class Interrupted(UserError):
    """Ctrl-C, or a signal, ended a run."""

    status = 130


@dataclass(frozen=True)
class Judged:
    """What one run gave. rows: by the kernel's name in rows, then by the problem's number. opcodes: the shares of instructions
    (`opcode_mix`) of each kernel whose library is on this machine. log: what the run printed."""

    rows: Mapping[str, Mapping[int, store.Row]]
    opcodes: Mapping[str, dict[str, float]]
    log: str

    def table(self, kernel: str) -> list[store.Row]:
        return [row for _, row in sorted(self.rows.get(kernel, {}).items())]


def run(board: Board, season: Season, entries: Sequence[Entry], beside: Entry | None = None) -> Judged:
    """Have submissions judged. On each problem their kernels run one after the other; if `beside` is one of them, the judge
    times it in the same rounds as each of the others, too (`ratio_beside`). If a problem could not be judged, and that is
    not the kernel's fault, it is judged again, in MOST_RUNS runs in all. Raises UserError, also where Ctrl-C ended it."""
    # A new folder each time, also for the same submissions: `ops.load_file` imports a path once.
    folder = board.folder / "work" / make_id(*(entry.id for entry in entries), str(time.time_ns()))
    folder.mkdir(parents=True)
    op = _load_op(season)
    about = f"beside the record's holder, {beside.title}: " if beside else ""
    try:
        numbers = _number(season, op)
        register = stage(board, entries, folder / "sources")
        config = _compose(board, season, [entry.kernel for entry in entries], register, folder)
        if beside:
            config.beside = beside.kernel
            config.draw.only = [number for number in numbers.values() if number > 0]  # problem 0 counts in no score
        queued = executors.choose(config.cluster, config.container).queued
        alone = contextlib.nullcontext() if queued else board.lock("machine")  # SLURM gives each job its own processors
        board.steps.say("waiting until no other submission is judged", about)
        with alone, open(folder / "launch.txt", "w") as said, contextlib.redirect_stdout(said):
            board.steps.say("waiting for SLURM" if queued else "starting", about)
            board.steps.follow(folder, _name_cases(entries, numbers, len(entries) > 1 and not beside))
            for _ in range(MOST_RUNS):
                if start.run(config) == Interrupted.status:
                    lost = "" if beside else ", so nothing got a rank; submit it again"
                    raise Interrupted(f"the run was interrupted{lost}")
                judged = _gather(numbers, op, folder)
                if not (again := _find_unjudged(judged)):
                    break
                config.draw.only = again
        return judged
    finally:
        for entry in entries:
            op.kernels.pop(entry.kernel, None)
        _clear(board, folder)


def _find_unjudged(judged: Judged) -> list[int]:
    """The numbers of the problems that are to be judged again. A kernel that failed on a problem by its own fault has no rank
    anyway, so it has none judged again."""
    again = set()
    for rows in judged.rows.values():
        unjudged = {number for number, row in rows.items() if may_succeed(row)}
        again |= set() if any(map(has_failed, rows.values())) else unjudged
    return sorted(again)


def ratio_beside(row: store.Row) -> Ratio | None:
    """How many times as fast a kernel was as the one beside it, in the same rounds; None if the judge did not time both."""
    metrics = dict(row["metrics"] or ())
    if BESIDE not in metrics:
        return None
    return Ratio(metrics[BESIDE], metrics[f"{BESIDE}_low"], metrics[f"{BESIDE}_high"])


def may_succeed(row: store.Row) -> bool:
    """Whether a problem could not be judged, and another run may succeed: the machine was busy, or other work may have slowed
    down the baseline, or the times that the kernel's process reports are too short."""
    message = row["message"] or ""
    if row["status"] in store.MEASURED:
        return message.startswith(DOUBTED) or (message.startswith(SAYS_LESS) and _reports_too_little(row))
    return row["status"] == "error" and message.startswith(NOT_ITS_FAULT)


def _reports_too_little(row: store.Row) -> bool:
    """Whether the judge's blocks of the kernel are longer than the times that its process reports, and by more than those of
    the baseline are. Other work may have disturbed the blocks, or the kernel hides a part of its time."""

    def longer(judged: str, reported: str) -> float:
        return float(row[judged]) / min(row[f"{regime}_{reported}"] or math.inf for regime in REGIMES)

    usual = max(1.0, longer("judged_baseline_us", "baseline_us"))
    return longer("judged_us", "us") > BELIEVED[row["device_kind"]] * usual


def has_failed(row: store.Row) -> bool:
    """Whether a kernel failed on a problem by its own fault."""
    return row["status"] not in store.MEASURED and not may_succeed(row)


def _clear(board: Board, folder: Path) -> None:
    """Remove a run's folder, and the rows that the run left in the board's folder."""
    for run in folder.glob("runs/*"):
        for rows in board.folder.glob(f"*/{run.name}"):
            shutil.rmtree(rows, ignore_errors=True)
            with contextlib.suppress(OSError):
                rows.parent.rmdir()  # if no other run has rows there
    shutil.rmtree(folder, ignore_errors=True)


def _load_op(season: Season) -> ops.Op:
    if season.extra:
        extra.load(season.extra)
    return ops.get(season.op)


def _compose(board: Board, season: Season, kernels: list[str], register: Path, folder: Path) -> Config:
    """The configuration of a run. Its results folder is the board's folder, because a sandbox hides the results folder, and the
    seasons and the archive lie in the board's."""
    settings = board.settings
    try:
        cluster: Any = OmegaConf.merge(
            OmegaConf.structured(Cluster), written("cluster", "auto"), {"time_min": 15}, settings.cluster
        )
        timing: Any = OmegaConf.merge(OmegaConf.structured(Timing), written("timing", settings.timing))
        config = Config(op=season.op, dtype=[], shape=Shape(name="custom"))
        config.cluster, config.timing = OmegaConf.to_object(cluster), OmegaConf.to_object(timing)  # type: ignore[assignment]
    except (ValueError, OmegaConfBaseException) as error:
        said = str(error).splitlines()[0]
        raise UserError(f"{board.folder}/settings.json: {said}; correct this value, or delete its key") from error
    config.kernel, config.untrusted, config.device = kernels, True, season.device
    config.cluster.max_jobs = 1  # on one node, because all problems of a score are judged on the same device
    config.draw = Draw(1 + season.problems, season.seed)
    config.profiler = Profiler()  # no profiler sees into a sandbox
    config.extra = [*([season.extra] if season.extra else []), str(register)]
    config.results, config.runs = str(board.folder), str(folder / "runs")
    config.case_timeout_s, config.build_timeout_s = settings.case_timeout_s, settings.build_timeout_s
    return config


def _number(season: Season, op: ops.Op) -> dict[str, int]:
    """The number of each problem of a season, by what the keys of its cases have after the kernel."""
    drawn = enumerate(season.draw())
    return {op.case("any", each.dtype, each.shape, each.params).problem: number for number, each in drawn}


def _name_cases(entries: Sequence[Entry], numbers: Mapping[str, int], names_kernels: bool) -> dict[str, str]:
    """What the cases of a run are called, by their keys: without a size, because the problems are hidden."""
    return {
        f"{entry.op}/{entry.kernel}/{problem}": f"problem {number} (the last is {max(numbers.values())})"
        + (f" of {entry.name}" if names_kernels else "")
        for entry in entries
        for problem, number in numbers.items()
    }


def _gather(numbers: Mapping[str, int], op: ops.Op, folder: Path) -> Judged:
    found: dict[str, dict[int, store.Row]] = {}
    log = []
    for path in sorted(folder.glob("runs/*/config.yaml")):
        for (_, case), row in Run(path.parent).rows(store.SCHEMA.names).items():
            rows = found.setdefault(row["kernel"], {})
            if row["device"] == next(iter(rows.values()), row)["device"]:  # a later run may be on another node
                rows[numbers[case.split("/", 2)[2]]] = row
        for printed in sorted(path.parent.glob("logs/*.log")):
            log.append(printed.read_text("utf-8", errors="replace"))
    said = (folder / "launch.txt").read_text("utf-8", errors="replace")
    opcodes = {name: _read_opcodes(op.kernels[name], next(iter(rows.values()))) for name, rows in found.items()}
    return Judged(found, opcodes, "\n".join([*log, said])[-SHOWN_LOG:])


def _read_opcodes(kernel: ops.Kernel, row: store.Row) -> dict[str, float]:
    """The shares of instructions of a kernel that was built on this machine for the device of a row; else empty."""
    arch = (row["arch"] or "") if kernel.backend == "cuda" else ""
    built = sandboxed.find(kernel, arch) if kernel.needs_build else None
    return read_mix(Path(built.library), kernel.backend) if built else {}


def why_refused(row: store.Row, kind: str) -> str | None:
    """Why a measured row does not count, as the end of a sentence; None if it counts."""
    if not is_judged(row):
        return "was not judged from another process"
    if may_succeed(row):
        return f"could not be judged in {MOST_RUNS} runs, because other work may have disturbed them; submit it again"
    for name in row["libraries"] or ():
        # Libraries in a sandbox have names of this length, so it is that of another submission.
        built = len(name.partition(".so")[0]) == 64
        if built or (kind != "python" and any(word in name.lower() for word in FOREIGN)):
            return f"loads {name}, and a kernel does its own work"
    return None
