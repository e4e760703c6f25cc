"""The syntax tree of a Python source, as text, without comments and without the registration of kernels.

Python's parser is recursive, and a source can crash the process that parses it. So this file is also a program, which reads a
source from its standard input and writes the tree to its standard output; `meaning_apart` runs it.
"""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from pathlib import Path

# Methods of an op that register a kernel, a function or the op's drawn problems, none of which changes its other kernels.
REGISTERING = ("torch", "cuda", "triton", "cpp", "function", "draws")
MOST_S = 20  # of CPU time, and of waiting
MOST_MEMORY = 2 << 30
MOST_BYTES = 64 << 20  # of a tree


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


def meaning_apart(text: str) -> str | None:
    """The same, in a separate process; None if Python cannot parse the text within the limits of time and memory."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).resolve())]
    source = text.encode("utf-8", "surrogateescape")
    try:
        done = subprocess.run(command, input=source, capture_output=True, timeout=2 * MOST_S)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.decode() if done.returncode == 0 else None


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_S, MOST_S))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tree = meaning(sys.stdin.buffer.read().decode()).encode()
    if len(tree) > MOST_BYTES:
        sys.exit(f"the tree has more than {MOST_BYTES:,} bytes")
    sys.stdout.buffer.write(tree)


if __name__ == "__main__":
    _main()
