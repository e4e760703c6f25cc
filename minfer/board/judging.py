"""Runs submissions on the problems of a season through the ordinary pipeline, here or on SLURM, as untrusted cases."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from minfer import ops
from minfer.bench.timing import Timing
from minfer.board.disassemble import disassemble, opcode_mix
from minfer.board.folder import Board, Entry, make_id
from minfer.board.season import Season
from minfer.board.stage import stage
from minfer.jobs import executors
from minfer.jobs.run import Run
from minfer.plan import extra
from minfer.plan.config import Cluster, Config, Draw, Profiler, Shape, UserError, written
from minfer.rows import store
from minfer.rows.select import is_judged
from minfer.run import start
from minfer.worker import sandboxed

SHOWN_LOG = 1 << 16  # bytes of a log that are kept
# A judged ratio that is higher than the hints allow: something may have slowed the baseline's blocks (`minfer.bench.judged`).
DOUBTED = "the judge measured a speed-up of"
FOREIGN = (
    "blas",
    "mkl",
    "dnnl",
    "cudnn",
    "cutlass",
)  # in names of libraries that do the work of a kernel that calls them


@dataclass(frozen=True)
class Judged:
    """The rows of one run by the kernel's name in rows and the problem's number; of each kernel whose library is here the
    shares of instructions (`opcode_mix`); and what the run printed."""

    rows: Mapping[str, Mapping[int, store.Row]]
    opcodes: Mapping[str, dict[str, float]]
    log: str

    def table(self, kernel: str) -> list[store.Row]:
        return [row for _, row in sorted(self.rows.get(kernel, {}).items())]


def run(board: Board, season: Season, entries: Sequence[Entry]) -> Judged:
    """Have submissions judged in one run, the kernels of a problem one after the other. Raises UserError."""
    folder = board.folder / "work" / make_id(*(entry.id for entry in entries))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    op = _load_op(season)
    try:
        register = stage(board, entries, folder / "sources")
        config = _compose(board, season, [entry.kernel for entry in entries], register, folder)
        queued = executors.choose(config.cluster, config.container).queued
        alone = contextlib.nullcontext() if queued else board.lock("machine")  # SLURM gives each job its own processors
        with alone, open(folder / "launch.txt", "w") as said, contextlib.redirect_stdout(said):
            start.run(config)
        return _gather(season, op, folder)
    finally:
        for entry in entries:
            op.kernels.pop(entry.kernel, None)
        _clear(board, folder)


def _clear(board: Board, folder: Path) -> None:
    """Remove a run's folder, with the rows that it left in the board's."""
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
    """The request of a run. Its results folder is the board's, because a sandbox hides that: the seasons and the archive lie
    in it."""
    settings = board.settings
    try:
        cluster: Any = OmegaConf.merge(
            OmegaConf.structured(Cluster), written("cluster", "auto"), {"time_min": 15}, settings.cluster
        )
        timing: Any = OmegaConf.merge(OmegaConf.structured(Timing), written("timing", settings.timing))
        config = Config(op=season.op, dtype=[], shape=Shape(name="custom"))
        config.cluster, config.timing = OmegaConf.to_object(cluster), OmegaConf.to_object(timing)  # type: ignore[assignment]
    except ValueError as error:  # OmegaConf's errors are these
        raise UserError(f"cannot read settings.json of {board.folder}: {str(error).splitlines()[0]}") from error
    config.kernel, config.untrusted, config.device = kernels, True, season.device
    config.draw = Draw(1 + season.problems, season.seed)
    config.profiler = Profiler()  # none looks into a sandbox
    config.extra = [*([season.extra] if season.extra else []), str(register)]
    config.results, config.runs = str(board.folder), str(folder / "runs")
    config.case_timeout_s, config.build_timeout_s = settings.case_timeout_s, settings.build_timeout_s
    return config


def _gather(season: Season, op: ops.Op, folder: Path) -> Judged:
    numbers = {
        op.case("any", problem.dtype, problem.shape, problem.params).problem: number
        for number, problem in enumerate(season.draw())
    }
    found: dict[str, dict[int, store.Row]] = {}
    log = []
    for path in sorted(folder.glob("runs/*/config.yaml")):
        for (_, case), row in Run(path.parent).rows(store.SCHEMA.names).items():
            number = numbers[case.split("/", 2)[2]]
            found.setdefault(row["kernel"], {})[number] = row
        for printed in sorted(path.parent.glob("logs/*.log")):
            log.append(printed.read_text("utf-8", errors="replace"))
    said = (folder / "launch.txt").read_text("utf-8", errors="replace")
    opcodes = {name: mix for name in found if (mix := _read_opcodes(op.kernels[name]))}
    return Judged(found, opcodes, "\n".join([*log, said])[-SHOWN_LOG:])


def _read_opcodes(kernel: ops.Kernel) -> dict[str, float]:
    """Of a C++ kernel that was built on this machine; empty for others."""
    built = sandboxed.find(kernel, "") if kernel.backend == "cpp" else None
    text = disassemble(Path(built.library)) if built else None
    return opcode_mix(text.splitlines()) if text else {}


def why_refused(row: store.Row, kind: str) -> str | None:
    """Why a row that was measured cannot count, in half a sentence; None where it counts."""
    if not is_judged(row):
        return "was not judged from another process"
    if DOUBTED in (row["message"] or ""):
        return "could not be judged: the judge's ratio is higher than the times inside allow; submit it again"
    for name in row["libraries"] or ():
        built = len(name.partition(".so")[0]) == 64  # how a sandbox's libraries are called: another submission's
        if built or (kind != "python" and any(word in name.lower() for word in FOREIGN)):
            return f"loads {name}, and a kernel does its own work"
    return None
