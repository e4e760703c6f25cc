"""Makes kernels of files: reads what a person submits, and registers it for one run, under a name of its own.

minfer writes the file that registers it, and every process of the run imports that file. The submission's own code is compiled
and imported only in the sandbox. A compiled kernel's torch op is renamed, so that one run can have two submissions of the same
name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from minfer.board.folder import MOST_BYTES, MOST_FILES, Board, Entry
from minfer.plan.config import UserError

SUFFIXES = {".cu": "cuda", ".cpp": "cpp", ".py": "python"}
PLAIN = re.compile(r"[\w+-][\w.+-]{0,60}", re.ASCII)  # a name of a file, a kernel or a person


class Refusal(UserError):
    """One submission cannot be judged; others of the same command can. advice: what its author should do next."""

    def __init__(self, message: str, advice: str = "correct it, and submit it again") -> None:
        super().__init__(message)
        self.advice = advice


def read_files(paths: Sequence[Path]) -> dict[str, bytes]:
    """The files of a submission, the source first. Raises UserError."""
    if len(paths) > MOST_FILES:
        raise UserError(f"a submission has at most {MOST_FILES} files, got {len(paths)}; put what it needs into fewer")
    found: dict[str, bytes] = {}
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is not a file; name the kernel's source, and then the files that it includes")
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path} has {path.stat().st_size:,} bytes; a file may have {MOST_BYTES:,}")
        check_name("a file", path.name)
        if path.name in found:
            raise UserError(f"two files are called {path.name}; rename one of them")
        found[path.name] = path.read_bytes()
    return found


def check_name(what: str, name: str) -> str:
    """The name. Raises Refusal if it cannot be part of a path, of a case's key and of a table."""
    if not PLAIN.fullmatch(name):
        raise Refusal(
            f"{what} cannot be called {name[:80]!r}; a name is at most 61 letters, digits and the signs _ - + ."
        )
    return name


def find_kind(op: str, name: str, content: bytes) -> str:
    """What a source is: cuda, cpp, triton or python. Raises Refusal where it cannot be a kernel of this op."""
    suffix, text = Path(name).suffix, content.decode("utf-8", errors="replace")
    if suffix not in SUFFIXES:
        raise Refusal(f"{name} is no kernel that minfer can build; a source ends in {', '.join(SUFFIXES)}")
    if suffix != ".py":
        find_symbol(op, name, text)
        return SUFFIXES[suffix]
    own = re.search(rf"^def {op}\b|^{op}\s*=|^(from|import)\b.*\b{op}\b", text, re.MULTILINE)
    if not own and not re.search(r"^class ModelNew\b|^def custom_kernel\b", text, re.MULTILINE):
        raise Refusal(f"{name} has no function {op}(...); a Python submission has one of the op's name")
    return "triton" if own and re.search(r"^[ \t]*(import triton|from triton)\b", text, re.MULTILINE) else "python"


def find_symbol(op: str, name: str, text: str) -> str:
    """The name of the torch op that a C++ or CUDA source defines. Raises Refusal where it defines none of this op."""
    by_file = re.sub(r"\W", "_", f"{op}_{Path(name).stem}")
    if re.search(rf"\b{by_file}\b", text):
        return by_file
    if found := re.findall(rf"^[ \t]*MINFER_\w+\(\s*({op}_\w+)", text, re.MULTILINE):
        return str(found[-1])
    raise Refusal(f"{name} defines no torch op {by_file}; end it with the op's macro, as docs/board.md shows")


def stage(board: Board, entries: Iterable[Entry], folder: Path) -> Path:
    """Write the sources of submissions below `folder`, and the file that registers them. Returns that file. Raises UserError
    where a source is not kept."""
    lines = ['"""Registers the submissions of one run."""', "", "from pathlib import Path", ""]
    lines += [
        "from minfer.board.adapt import adapt, find_support",
        "from minfer.ops import get",
        "",
        "here = Path(__file__).parent",
    ]
    for entry in entries:
        own = folder / entry.id
        own.mkdir(parents=True)
        for name, digest in entry.files.items():
            if (content := board.content(digest)) is None:
                raise UserError(f"the file {name} of submission {entry.id} is not kept; submit it again")
            (own / name).write_bytes(content)
        lines += _register(entry, own)
    file = folder / "register.py"
    file.write_text("\n".join([*lines, ""]), "utf-8")
    return file


def _register(entry: Entry, folder: Path) -> list[str]:
    """Lines that register a submission whose files are in the folder."""
    source = next(iter(entry.files))
    op, path = f"get({entry.op!r})", f"here / {entry.id!r} / {source!r}"
    if entry.kind in ("cpp", "cuda"):
        text = (folder / source).read_bytes().decode("utf-8", errors="surrogateescape")
        symbol = find_symbol(entry.op, source, text)
        renamed = re.sub(r"\W", "_", f"{entry.op}_{entry.kernel}")
        text = re.sub(rf"\b{symbol}\b", renamed, text)
        (folder / source).write_bytes(text.encode("utf-8", errors="surrogateescape"))
        return [f"{op}.{entry.kind}(str({path}), name={entry.kernel!r}, **find_support({entry.op!r}))"]
    if entry.kind == "triton":  # its name is that of its file
        (folder / source).rename(folder / f"{entry.kernel}.py")
        return [f"{op}.triton(str(here / {entry.id!r} / '{entry.kernel}.py'), **find_support({entry.op!r}))"]
    call = f"adapt({entry.op!r}, file)(*tensors, **call)"
    return [
        "",
        "",
        f"def _{entry.id}(*tensors, file=str({path}), **call):",
        f"    return {call}",
        "",
        "",
        f"{op}.torch({entry.kernel!r}, _{entry.id}, **find_support({entry.op!r}))",
    ]
