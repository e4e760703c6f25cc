"""Writes plots as SVG files or only checks the files, and makes the Markdown that shows them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from matplotlib import __version__ as VERSION

from minfer.analysis.plots.every_op import Picture
from minfer.analysis.plots.style import encoded
from minfer.analysis.tables.markdown import escape


def bring_up_to_date(drawn: Mapping[Path, Picture], folder: Path, ours: str, command: str, check: bool) -> list[str]:
    """Write or only check pictures and their tables, named without a suffix; what is wrong, in sentences.

    Below `folder`, a picture whose name matches `ours`, a regular expression, and that was not drawn, is removed."""
    files = {named(path, "svg"): encoded(p.figure, p.about) for path, p in drawn.items()}
    files |= {named(path, "csv"): p.csv.encode() for path, p in drawn.items() if p.csv}
    expression = re.compile(rf"{ours}\.(svg|csv)")
    try:
        if check:
            return [
                f"{file} is out of date, or of another Matplotlib than {VERSION}: run `{command}`"
                for file in differences(files, folder, expression)
            ]
        write(files, folder, expression)
    except OSError as error:
        return [f"{error.filename or folder}: {error.strerror or error}"]
    return []


def pattern(names: Iterable[str]) -> str:
    """A regular expression for the file names of these plots, without the suffix."""
    return f".+-({'|'.join(names)})"


def shown(path: str, about: str) -> str:
    """Markdown that shows the picture at `path`, which has no suffix."""
    return f"![{escape(about)}]({path}.svg)"


def named(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


def differences(files: dict[Path, bytes], folder: Path, ours: re.Pattern[str]) -> Iterator[Path]:
    """The files that are missing or differ, and those of ours that no plot is for."""
    for file, content in files.items():
        if not file.is_file() or file.read_bytes() != content:
            yield file
    yield from sorted(f for f in folder.glob("*/*") if ours.fullmatch(f.name) and f not in files)


def write(files: dict[Path, bytes], folder: Path, ours: re.Pattern[str]) -> None:
    """Write the files and remove pictures that nothing stands behind any more. Raises OSError."""
    for stale in set(differences(files, folder, ours)) - set(files):
        stale.unlink()
    for file, content in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.is_file() or file.read_bytes() != content:
            file.write_bytes(content)
