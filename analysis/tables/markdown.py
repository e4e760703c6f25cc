"""Text that goes into the README, and the markers that it goes between."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

README = Path("README.md")
MOST_PLAIN = 1e5  # from which on a number is scaled


def table_lines(header: list[str], rule: list[str], body: Iterable[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *body)]


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def has_markers(file: Path, name: str) -> bool:
    """Whether a file has the place of an optional text."""
    begin, _ = markers(name)
    return file.is_file() and begin.encode() in file.read_bytes()


def escape(text: str | None, most: int | None = None) -> str:
    """Text as markdown that shows it as it is, in one line, within one cell; cut to `most` characters."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text or "").split())
    if most and len(text) > most:
        text = text[: most - 1].rstrip() + "…"
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "&#124;")
    # an underscore after a letter opens no emphasis, so v01_naive stays as it is
    return re.sub(r"([\\`*\[\]~$]|(?<![^\W_])_)", r"\\\1", text) or "—"


def significant(value: float, digits: int = 4) -> str:
    """A positive number to that many significant digits; integer digits all stay."""
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # that of the rounded value: 9.9996 is 10.00
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def scale(value: float) -> tuple[float, str]:
    """A number and its prefix: a large one in thousands, millions and so on."""
    for power, prefix in ((12, " T"), (9, " G"), (6, " M"), (3, " k")):
        if value >= max(10.0**power, MOST_PLAIN):
            return value / 10.0**power, prefix
    return value, ""


def format_scaled(value: float) -> str:
    """A positive number to four significant digits and with a prefix where it is large: `6.179 G`."""
    number, prefix = scale(value)
    return significant(number) + prefix


def pluralise(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def replace_between(text: str, name: str, body: str) -> str:
    """The README's text with `body` between the markers of that name, in the README's own line endings.

    Raises ValueError."""
    begin, end = markers(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"it needs one line {begin} and, below it, one line {end}: add them where the {name} belong")
    newline = "\r\n" if "\r\n" in text else "\n"
    body = f"{begin}\n\n{body}\n{end}".replace("\n", newline)
    return text[: text.index(begin)] + body + text[text.index(end) + len(end) :]


def update(readme: Path, name: str, body: str, command: str, check: bool) -> str | None:
    """Bring the README up to date, or only check it; what is wrong, in a sentence."""
    try:
        old = readme.read_bytes().decode()
        new = replace_between(old, name, body)
        if check and new != old:
            return f"{readme} is out of date: run `{command}`"
        if new != old:
            readme.write_bytes(new.encode())
    except OSError as error:
        return f"{readme}: {error.strerror or error}"
    except ValueError as error:
        return f"{readme}: {error}"
    return None
