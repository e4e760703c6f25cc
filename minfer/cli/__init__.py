"""What a user types: `minfer +sweep=hgemm` launches a run; `minfer status RUN`, `wait`, `cancel`, `resubmit` and `logs` look
after one that was launched earlier, from any shell, and `minfer runs` lists them; `minfer report`, `minfer compare` and
`minfer race` look at what kernels do; `minfer build` compiles kernels ahead, and `minfer warm TRACE` variants for the sizes in
a trace; `minfer submit`, `minfer archive` and `minfer board` are for kernels that others wrote."""

from __future__ import annotations

import sys

try:
    import contextlib
    from pathlib import Path

    from minfer import launch
    from minfer.jobs.run import Run
    from minfer.plan.config import UserError, groups, nearest
except KeyboardInterrupt:
    sys.exit(130)

RUN = " (RUN: a run's name or folder, or the word last for the newest run)"
ACTIONS = {  # to a run, and how each is used
    "status": f"usage: minfer status RUN [--json] [--junit=FILE]{RUN}",
    "wait": f"usage: minfer wait RUN [--junit=FILE]{RUN}; follows its jobs to their end, and Ctrl-C leaves them alone",
    "cancel": f"usage: minfer cancel RUN{RUN}",
    "resubmit": "usage: minfer resubmit RUN [cluster.KEY=VALUE ...] [container.KEY=VALUE ...] [status=timeout,oom|failed]"
    f" [wait=false]{RUN}; KEY is as in minfer --help",
    "logs": f"usage: minfer logs RUN [SHARD]{RUN}; without SHARD it names the files",
}
RUNS, RACE, BUILD, WARM = "runs", "race", "build", "warm"
BOARD = ("submit", "archive", "board")  # which have a --help of their own
READERS = ("report", "compare")  # of rows; they need neither torch nor a run's folder, and have a --help of their own
USAGE = {
    RUNS: "usage: minfer runs [--json]",
    RACE: "usage: minfer race REV_A REV_B +sweep=... [KEY=VALUE ...], where a revision is one of git's, or . for the files"
    " as they are",
} | ACTIONS
HELP = {"--help", "-h"}


def main() -> int:
    """The command `minfer`; returns its exit status."""
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first in USAGE and HELP & set(sys.argv[2:]):
        return launch.exit_status(lambda: print(USAGE[first]) or 0)
    if first in ACTIONS:
        return act(first, sys.argv[2:])
    if first == RUNS:
        return launch.exit_status(lambda: runs(sys.argv[2:]))
    if first in READERS:
        return read(first, sys.argv[2:])
    if first == RACE:
        return race(sys.argv[2:])
    if first == BUILD:
        return launch.exit_status(lambda: compile_ahead(sys.argv[2:]))
    if first == WARM:
        return warm(sys.argv[2:])
    if first in BOARD:
        from minfer.cli import board  # what a launch need not import

        return board.main(first, sys.argv[2:])
    if first.isidentifier():  # a launch begins with +sweep=..., key=value or a flag
        return launch.exit_status(lambda: _refuse(first))
    return launch.main()


def act(action: str, words: list[str]) -> int:
    """Do one of ACTIONS to the run that the words begin with. The exit status is the action's, or 2 (and one line) for a
    mistake."""

    def run_action() -> int:
        if not words or words[0].startswith("-"):
            raise UserError(ACTIONS[action])
        run = Run.find(words[0])
        launch.say_first(f"looking at {run.name}")
        from minfer.run import control, terminal  # imports torch, which a typo need not wait for

        actions = {
            "status": control.status,
            "wait": control.wait,
            "cancel": control.cancel,
            "resubmit": control.resubmit,
            "logs": control.logs,
        }
        return actions[action](terminal.console(), run, words[1:])

    return launch.exit_status(run_action)


def runs(words: list[str]) -> int:
    """List the newest runs; the exit status is 0."""
    launch.say_first("looking at all runs")
    from minfer.run import control, terminal  # imports torch, which a typo need not wait for

    return control.runs(terminal.console(), words)


def read(reader: str, words: list[str]) -> int:
    """Do one of READERS; the exit status is its own. `last` is the name of the newest run with rows."""

    def call_reader() -> int:
        import minfer.analysis.compare  # and Matplotlib, which no other command waits for
        import minfer.analysis.report

        named = [
            _find_newest().name if word == "last" and not Path(word).exists() and not before.startswith("-") else word
            for before, word in zip(["", *words], words, strict=False)
        ]
        return {"report": minfer.analysis.report.main, "compare": minfer.analysis.compare.main}[reader](named)

    return launch.exit_status(call_reader)


def _find_newest() -> Run:
    """The newest run with rows of its own: one under SLURM may have found all of them in the results (resume=true)."""
    for run in reversed(Run.list_all()):
        with contextlib.suppress(UserError):  # a run whose request is broken
            if run.row_files:
                return run
    return Run.find("last")


def race(words: list[str]) -> int:
    """Time the kernels of two revisions against each other, over a sweep; the exit status is the launch's."""

    def start_race() -> int:
        if len(words) < 2 or any("=" in word or word.startswith("-") for word in words[:2]):
            raise UserError(USAGE[RACE])
        from minfer.run import race as racing  # imports torch, which a typo need not wait for

        for revision in words[:2]:
            racing.check(revision)
        sys.argv[1:] = [
            *([] if any(word.lstrip("+~").startswith("profiler") for word in words) else ["profiler=none"]),
            *words[2:],
        ]
        if not (requests := launch.compose()):
            return 0
        if len(requests) > 1 or requests[0].sweeps:
            raise UserError("a race is of one sweep; choose one: +sweep=...")
        return racing.race(requests[0], words[0], words[1])

    return launch.exit_status(start_race)


def compile_ahead(words: list[str]) -> int:
    """Compile kernels ahead of time; the exit status is 1 where one failed."""
    launch.say_first("looking at what there is to compile")
    from minfer.cli import build as building  # imports torch, which a typo need not wait for

    return building.main(words)


def warm(words: list[str]) -> int:
    """Compile variants ahead of time; the exit status is 1 where one failed."""

    def compile_variants() -> int:
        from minfer.specialise import warm as warming  # imports torch, which a typo need not wait for

        if HELP & set(words):
            print(f"{warming.USAGE}, where a line of TRACE is like {warming.EXAMPLE}")
            return 0
        try:
            return warming.main(words)
        except warming.TraceError as error:
            raise UserError(str(error)) from error

    return launch.exit_status(compile_variants)


def _refuse(word: str) -> int:
    raise UserError(
        f"unknown command {word!r}; "
        f"{nearest(word, [*ACTIONS, RUNS, *READERS, RACE, BUILD, WARM, *BOARD, *(f'+sweep={s}' for s in groups()['sweep'])])}"
    )
