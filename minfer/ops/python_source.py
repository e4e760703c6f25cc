"""The syntax tree of a Python source, as text, without comments and without the registration of kernels; and where a source has
a syntax error.

Python's parser is recursive, and a source can crash the process that parses it. So this file is also a program, which reads a
source from its standard input and writes to its standard output; `meaning_apart` and `find_mistake` run it.
"""

from __future__ import annotations

import ast
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

# Methods of an op that register a kernel, a function or the op's drawn problems, none of which changes its other kernels.
REGISTERING = ("torch", "cuda", "triton", "cpp", "function", "draws")
MOST_S = 20  # of CPU time; twice as long in all
MOST_MEMORY = 2 << 30
MOST_BYTES = 64 << 20  # of a tree
MISTAKE = "mistake"  # the argument that makes the program report the first syntax error
MISTAKE_S = 5  # of CPU time for that
TOO_DEEP = "Python's parser gives up, because the file is nested too deeply or too large"


def meaning(text: str) -> str:
    """The tree. If Python cannot parse the text, raises SyntaxError, ValueError, RecursionError or MemoryError, or crashes."""
    module = ast.parse(text)
    module.body = [statement for statement in module.body if not _registers(statement)]
    return ast.dump(module)


def _registers(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.For):
        return all(_registers(inner) for inner in statement.body)
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and getattr(call.func, "attr", "") in REGISTERING


def used(text: str, names: Iterable[str]) -> list[ast.stmt]:
    """The top-level statements of a module that define these names, and all that they use, directly or not; without the
    docstrings of top-level functions and classes. An import has one statement for each name."""
    defined: dict[str, list[ast.stmt]] = {}
    for statement in ast.parse(text).body:
        for name, part in _definitions(statement):
            defined.setdefault(name, []).append(part)
    found, queue = dict[ast.stmt, None](), [*names]
    while queue:
        for statement in defined.pop(queue.pop(), []):
            found[statement] = None
            queue += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return list(found)


def _definitions(statement: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    """The names that a statement of a module defines, each with the part of the statement that does."""
    if isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name, ast.ImportFrom(statement.module, [alias], statement.level)
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0], ast.Import([alias])
    elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
        if ast.get_docstring(statement) is not None:
            del statement.body[0]
        yield statement.name, statement
    else:
        stored = (
            node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        yield from ((node.id, statement) for node in stored)


def meaning_apart(text: str) -> str | None:
    """The same, in a separate process; None if Python cannot parse the text within the limits of time and memory."""
    done = _run(text.encode("utf-8", "surrogateescape"), MOST_S)
    return done.stdout.decode() if done and done.returncode == 0 else None


def find_mistake(source: bytes) -> tuple[int, str] | None:
    """The line and the message of the first syntax error, found in a separate process; the line is 0 if Python's parser crashes
    or gives up. None if there is no error, or if Python needs too much time to find one."""
    done = _run(source, MISTAKE_S, MISTAKE)
    if done is None or -done.returncode in (signal.SIGXCPU, signal.SIGKILL):
        return None
    if done.returncode:
        return 0, TOO_DEEP
    line, message = json.loads(done.stdout)
    return (line, message) if message else None


def _run(source: bytes, limit_s: int, *words: str) -> subprocess.CompletedProcess[bytes] | None:
    """What this file prints about a source as a program; None if it takes longer than twice the limit."""
    command = [sys.executable, "-I", "-S", "-W", "ignore", str(Path(__file__).resolve()), str(limit_s), *words]
    try:
        return subprocess.run(command, input=source, capture_output=True, timeout=2 * limit_s)
    except subprocess.TimeoutExpired:
        return None


def _find_mistake(source: bytes) -> tuple[int, str]:
    """The line and the message of the first syntax error; an empty message if there is none."""
    try:
        compile(source, "source", "exec", dont_inherit=True)
    except SyntaxError as error:
        return error.lineno or 0, f"{type(error).__name__}: {error.msg}"
    except (RecursionError, MemoryError):
        return 0, TOO_DEEP
    return 0, ""


def _main(limit: str, *words: str) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit)))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if words == (MISTAKE,):
        print(json.dumps(_find_mistake(sys.stdin.buffer.read())))
        return
    tree = meaning(sys.stdin.buffer.read().decode()).encode()
    if len(tree) > MOST_BYTES:
        sys.exit(f"the tree has more than {MOST_BYTES:,} bytes")
    sys.stdout.buffer.write(tree)


if __name__ == "__main__":
    _main(*sys.argv[1:])
