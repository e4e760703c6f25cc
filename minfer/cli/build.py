"""`minfer build`: compile kernels ahead, so that the first call of a function, or a sweep, finds them compiled."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minfer import launch, ops
from minfer.build import ahead, cache, host, packed, toolchain
from minfer.build.errors import BuildError
from minfer.functional.ahead import OPS, choosable
from minfer.functional.product_times import SOURCE
from minfer.ops import Kernel
from minfer.plan import cases
from minfer.plan.config import Config, UserError, choose
from minfer.run import terminal
from minfer.worker.compiler import needed_by

ABOUT = """Compile kernels into the cache, where functions and runs find them: all that the functions can choose, or those that
are named, or what a sweep needs (minfer build +sweep=...)."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see minfer build --help")


def main(words: list[str]) -> int:
    """Returns the exit status, 1 if a kernel could not be compiled. Raises UserError for a mistake."""
    parser = _Parser(prog="minfer build", description=ABOUT)
    parser.add_argument("names", nargs="*", metavar="OP[/KERNEL]", help="all of an op's kernels, or one; before --arch")
    about = "such as sm_80 sm_89 sm_90a, or cpu (default: that of the GPU here, or cpu where there is none)"
    parser.add_argument("--arch", nargs="+", default=[], metavar="ARCH", help=about)
    parser.add_argument("--wheel", type=Path, metavar="DIR", help="also pack them as the wheel minfer-kernels")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, metavar="N", help=f"compilers at once (default: {cores})")
    given = parser.parse_args(words)
    if given.jobs < 1:
        raise UserError(f"--jobs={given.jobs} starts no compiler; give a number from 1")
    archs = list(dict.fromkeys(map(_arch, given.arch))) or [_arch_here()]
    wanted = _wanted(given.names, archs)
    console, outcomes, start = terminal.console(), list[ahead.Outcome](), time.perf_counter()
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("building", total=len(wanted))
        for outcome in ahead.build_all(wanted, given.jobs, Config.build_timeout_s):
            outcomes.append(outcome)
            progress.advance(task)
            console.print(f"{len(outcomes)}/{len(wanted)} {_line(outcome)}", soft_wrap=True)
    _summarise(console, outcomes, time.perf_counter() - start)
    models = _build_models(wanted)
    if given.wheel:
        _pack(console, outcomes, models, given.wheel)
    return int(any(isinstance(outcome.built, str) for outcome in outcomes))


def _arch(word: str) -> str:
    """The name by which a function looks for a build: `sm_90` is built as sm_90a."""
    if word == "cpu":
        return ""
    if not (number := re.fullmatch(r"sm_(\d{2,3})[af]?", word)):
        raise UserError(
            f"{word!r} is no architecture; give names such as sm_80 or sm_90a, or cpu, and ops before --arch"
        )
    return toolchain.arch_of(divmod(int(number[1]), 10))


def _arch_here() -> str:
    return toolchain.arch_of(torch.cuda.get_device_capability()) if torch.cuda.is_available() else ""


def _wanted(names: list[str], archs: list[str]) -> list[ahead.Job]:
    if any("=" in name for name in names):
        wanted = [job for arch in archs for job in ahead.jobs(_of_sweep(names, arch), [arch])]
    elif names:
        wanted = [job for name in names for job in _named(name, archs)]
    else:
        wanted = [job for arch in archs for op in OPS for job in ahead.jobs(choosable(op, arch), [arch])]
    if not wanted:
        raise UserError(f"there is nothing to compile for {' or '.join(arch or 'the CPU' for arch in archs)}")
    return list({(job.kernel.source, job.arch): job for job in wanted}.values())


def _named(name: str, archs: list[str]) -> list[ahead.Job]:
    op = ops.get(choose("op", name.partition("/")[0], ops.names()))
    kernels = list(op.kernels.values())
    if kernel := name.partition("/")[2]:
        kernels = [op.kernels[choose(f"{op.name} kernel", kernel, op.kernels)]]
    if not (found := ahead.jobs(kernels, archs)):
        raise UserError(f"{name} cannot be compiled for {' or '.join(arch or 'the CPU' for arch in archs)}")
    return found


def _of_sweep(words: list[str], arch: str) -> Iterable[Kernel]:
    """The kernels that the cases of a request need on an architecture."""
    sys.argv[1:] = words
    capability = divmod(toolchain.arch_number(arch), 10) if arch else None
    for request in launch.compose():
        plan = cases.plan(request, "cuda" if arch else "cpu", capability)
        for case in plan.cases:
            if case.key not in plan.unsupported:
                yield from needed_by(ops.get(case.op).kernels[case.kernel], arch)


def _line(outcome: ahead.Outcome) -> str:
    if isinstance(outcome.built, str):
        return f"{outcome.job.name}: failed: {outcome.built}"
    how = f"{outcome.seconds:.1f} s" if outcome.seconds else "in the cache already"
    return f"{outcome.job.name}: {how}, {_mib(outcome.bytes)}"


def _summarise(console: Console, outcomes: list[ahead.Outcome], seconds: float) -> None:
    how = Counter(
        "failed" if isinstance(each.built, str) else "compiled" if each.seconds else "found" for each in outcomes
    )
    size = _mib(sum(each.bytes for each in outcomes))
    slowest = max(outcomes, key=lambda each: each.seconds)
    longest = f"; the longest took {slowest.seconds:.1f} s ({slowest.job.name})" if slowest.seconds else ""
    console.print(
        f"{how['compiled']} compiled, {how['found']} found, {how['failed']} failed in {seconds:.1f} s{longest}. {size} in "
        f"{cache.root()}.",
        soft_wrap=True,
    )
    for each in outcomes:
        if isinstance(each.built, str):
            console.print(f"failed: {_line(each).replace(': failed', '')}", soft_wrap=True)


def _build_models(wanted: list[ahead.Job]) -> list[packed.Library]:
    """The library by which `matmul` chooses among the kernels that only Hopper has, where one of these is wanted."""
    if not any(job.kernel.op == SOURCE.op and job.kernel.preferred for job in wanted):
        return []
    try:
        return [packed.Library(SOURCE, "", host.build(SOURCE))]
    except BuildError as error:
        raise UserError(f"cannot compile {SOURCE.source.name}: {error}") from error


def _pack(console: Console, outcomes: list[ahead.Outcome], models: list[packed.Library], folder: Path) -> None:
    libraries = [
        packed.Library(each.job.kernel, each.job.arch, each.built)
        for each in outcomes
        if not isinstance(each.built, str)
    ]
    libraries += models
    if not libraries:
        raise UserError("no kernel could be compiled, so there is no wheel")
    path = packed.write_wheel(folder, launch.find_version(), libraries)
    console.print(f"{path}: {len(libraries)} libraries, {_mib(path.stat().st_size)}", soft_wrap=True)


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
