"""Pictures as files: each as SVG and PNG, written or only checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from matplotlib import __version__ as VERSION

from analysis.plots import Picture
from analysis.style import encoded

SUFFIXES = ("svg", "png")


def bring_up_to_date(drawn: Mapping[Path, Picture], folder: Path, ours: str, command: str, check: bool) -> list[str]:
    """Write or only check pictures, named without a suffix; what is wrong, in sentences.

    Below `folder`, a picture whose name matches `ours`, a regular expression, and that nobody drew, is removed."""
    suffixes = SUFFIXES[:1] if check else SUFFIXES
    files = {named(path, s): encoded(p.figure, s, p.about) for path, p in drawn.items() for s in suffixes}
    pattern = re.compile(rf"{ours}\.({'|'.join(SUFFIXES)})")
    try:
        if check:
            expected = files | {file.with_suffix(".png"): b"" for file in files}
            return [
                f"{file} is out of date, or of another Matplotlib than {VERSION}: run `{command}`"
                for file in differences(expected, folder, pattern)
            ]
        write(files, folder, pattern)
    except OSError as error:
        return [f"{error.filename or folder}: {error.strerror or error}"]
    return []


def named(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


def differences(files: dict[Path, bytes], folder: Path, ours: re.Pattern[str]) -> Iterator[Path]:
    """The files that are not as they should be, those that should not be there included.

    A PNG is as it should be when it is there: its SVG shows whether it is old, and its bytes depend on zlib's version."""
    for file, content in files.items():
        if not file.is_file() or (file.suffix == ".svg" and file.read_bytes() != content):
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
