"""Builds a kernel in a process of its own, a fork of the fork server: several can compile at once, and a crash is only a failed
build."""

from __future__ import annotations

import json
import re
import signal
import subprocess

from minfer.build.cache import Built
from minfer.process import forked
from minfer.process.text import make_printable

WARNING = re.compile(r"[DIW]\d{4} ")  # the beginning of a line of PyTorch's log that is not an error


def build_apart(op: str, name: str, arch: str, timeout_s: float) -> Built | str:
    """Build one of this project's kernels, or find it in the cache. Returns a str that says why it failed."""
    done = run("minfer.build", op, name, arch, timeout_s=timeout_s)
    if isinstance(done, str):
        return done
    return read_reply(done.stdout) if done.returncode == 0 else explain(done.returncode, done.stderr)


def run(module: str, *words: str, timeout_s: float) -> subprocess.CompletedProcess[str] | str:
    """Run one compiler to its end. Returns a str that says why it could not end."""
    try:
        return forked.run(module, *words, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"the compiler was killed after {timeout_s:g} s"
    except OSError as error:
        return f"the compiler could not be started: {error}"


def read_reply(text: str) -> Built | str:
    """What `python -m minfer.build` printed."""
    try:
        return Built(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return "its build gave no reply: code that was loaded with it ended the process, or wrote into the reply"


def explain(status: int, err: str) -> str:
    """Why a compiler failed, by its exit status and its errors."""
    lines = [line for line in map(make_printable, err.splitlines()) if line and not WARNING.match(line)]
    if status < 0:
        died = f"the process that compiles and loads it died by {signal.Signals(-status).name}"
        return ": ".join([died, *(_thrown(err) or lines[-1:])])
    return lines[-1] if lines else f"the build died with status {status}"


def _thrown(err: str) -> list[str]:
    """What a C++ exception said that nobody caught, if there was one: PyTorch throws one for a schema that it cannot parse.
    Without the line of tildes that points to the place, and what PyTorch adds."""
    said = [make_printable(line) for line in err.rpartition("what():")[2].splitlines()] if "what():" in err else []
    end = next((i for i, line in enumerate(said) if line.startswith(("~", "(originally from"))), len(said))
    return [text] if (text := " ".join(filter(None, said[:end]))) else []
