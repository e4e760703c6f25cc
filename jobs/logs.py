"""Finds in a job's log why the job ended."""

from __future__ import annotations

import re
from pathlib import Path

PREFIX = "minfer: "  # how minfer's own sentences begin in the log of a job
NODE = "minfer: on node "  # how the output of a job begins
MEMORY = "it ran out of memory; raise cluster.memory_gb"
TIME = "it reached its time limit; raise cluster.time_min"
MEMORY_LINE = r"oom[-_ ]?kill|exceeded (job |step )?memory limit|OUT_OF_MEMORY"
# Patterns of log lines that say why a job ended, each with the remedy to add.
CAUSES = (
    (rf"{MEMORY_LINE}|out of memory", MEMORY),
    (
        r"^(ImportError|ModuleNotFoundError): .*",
        "the environment of the job lacks a package; uv sync, or correct cluster.setup",
    ),
    (
        r"command not found|No such file or directory",
        "correct cluster.setup, or put the file on a file system that the nodes see",
    ),
    (r"^\w*(Error|Exception)\b.*", ""),
)


def find_sentence(log: Path) -> str | None:
    """The sentence that a job ended with."""
    return next((line.removeprefix(PREFIX) for line in reversed(_read(log)) if line.startswith(PREFIX)), None)


def find_node(log: Path) -> str | None:
    """The node that a job's script ran on, from the job's output."""
    return next((line.removeprefix(NODE) for line in reversed(_read(log)) if line.startswith(NODE)), None)


def find_cause(log: Path, end: str = "") -> str | None:
    """The line that says why a job ended, with the remedy; `end` is the state in which SLURM says it ended."""
    if end == "OUT_OF_MEMORY":
        return MEMORY
    if find_limit(log, end) == "time_min":
        return TIME
    lines = _read(log)[-200:]
    for pattern, remedy in CAUSES:
        for line in reversed(lines):
            if re.search(pattern, line, re.IGNORECASE):
                shown = "".join(c for c in line.strip() if c.isprintable())[:200]
                return f"{shown}; {remedy}" if remedy and remedy != MEMORY else remedy or shown
    return None


def find_limit(log: Path, end: str = "") -> str | None:
    """The key of `cluster` whose limit ended a job, from SLURM's state or from what SLURM wrote to the job's log."""
    if word := {"OUT_OF_MEMORY": "memory_gb", "TIMEOUT": "time_min"}.get(end):
        return word
    for line in reversed([line for line in _read(log)[-200:] if line.startswith(("slurmstepd", "srun", "submitit"))]):
        if re.search(MEMORY_LINE, line, re.IGNORECASE):
            return "memory_gb"
        # SLURM may send SIGUSR2 a minute early. It kills a process that has no handler yet; a process that still imports has
        # submitit's handler, which writes the last of these lines.
        if re.search("DUE TO TIME LIMIT|User defined signal 2|Caught signal SIGUSR2 .* timed-out", line):
            return "time_min"
    return None


def _read(log: Path) -> list[str]:
    try:
        return log.read_text(errors="replace").splitlines()
    except OSError:
        return []
