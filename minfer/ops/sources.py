"""Reads the source files of kernels. Anybody may have written them, so each file has a size limit, and every scan takes linear
time."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

MOST_BYTES = 4 << 20  # of one source file
MOST_FILES = 1000  # of one kernel
MOST_TOTAL = 32 << 20  # bytes of a kernel's source files

# Comments and literals of C++ and CUDA. Once an alternative has begun, it matches; if it is not closed, up to the end of the
# text. If it failed at the end instead, the search would start again at the next character and take quadratic time. A name in
# angle brackets may contain //.
TOKENS = re.compile(
    r"""
    (?P<line>  /(?:\\[ \t]*\n)*/ [^\n\\]* (?:\\[ \t]*\n?[^\n\\]*)* )
  | (?P<block> /(?:\\[ \t]*\n)*\* (?:.*?\*/|.*) )
  | (?P<literal>
        (?<!\w)(?:u8|[uUL])?R"(?P<mark>[^ ()\\\t\v\f\n"]{0,16})\( (?:.*?\)(?P=mark)"|.*)
      | " [^"\\\n]* (?:\\.[^"\\\n]*)* "?
      | (?<!\w)(?:u8|[uUL])?' [^'\\\n]* (?:\\.[^'\\\n]*)* '?
      | \#[ \t]*(?:include|include_next|import|embed)[ \t]*<[^>\n]*>?
    )
    """,
    re.DOTALL | re.VERBOSE,
)
INCLUDE = re.compile(r'^[ \t]*(?:#|%:)[ \t]*(?:include|include_next|import)[ \t]*"([^"\n]+)"', re.MULTILINE)

_included: dict[bytes, tuple[str, ...]] = {}  # by the digest of a text


class SourceError(ValueError):
    """A source file that minfer refuses to read. The message is one sentence."""


def read_source_bytes(path: Path) -> bytes:
    """The content of a source file. Raises SourceError if it has more than MOST_BYTES or is no ordinary file, and OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb", buffering=0) as file:
        status = os.fstat(fd)
        if (size := status.st_size) > MOST_BYTES:
            limit = f"and a source file may have at most {MOST_BYTES:,}; make it smaller"
            raise SourceError(f"{path.name} has {size:,} bytes, {limit}")
        content = file.read(size + 1) if stat.S_ISREG(status.st_mode) else None
    if content is None or len(content) != size:  # a file of /proc says that it has 0 bytes, and may block
        raise SourceError(f"{path.name} is no ordinary file of {size:,} bytes; a source must be one")
    return content


def read_source(path: Path) -> str:
    """The text of a source file. A comment may be in any encoding: bytes that are not UTF-8 become surrogates
    (`surrogateescape`). Raises SourceError and OSError."""
    text = read_source_bytes(path).decode("utf-8", "surrogateescape")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def split(text: str) -> Iterator[tuple[str, str]]:
    """The parts of a C++ source in their order, each with its kind: `code`, `line` or `block` (comments), or `literal`."""
    end = 0
    for found in TOKENS.finditer(text):
        if found.start() > end:
            yield "code", text[end : found.start()]
        kind = next(kind for kind in ("line", "block", "literal") if found[kind] is not None)
        yield kind, found[0]
        end = found.end()
    if end < len(text):
        yield "code", text[end:]


def strip_comments(text: str) -> str:
    """A C++ source with each comment replaced by a blank."""
    return "".join(part if kind in ("code", "literal") else " " for kind, part in split(text))


def quoted_includes(text: str) -> tuple[str, ...]:
    """The names between quotation marks that a C++ source includes."""
    key = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).digest()
    if key not in _included:
        _included[key] = tuple(INCLUDE.findall(strip_comments(text)))
    return _included[key]
