"""Text from foreign code, before anybody sees it."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Any

MOST = 2000  # characters of one text
SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
)


def make_printable(text: str, most: int = MOST) -> str:
    """The text in one line, without what would do more than be read: escape sequences of terminals, control characters,
    and marks that change the direction of writing. Half a character becomes a question mark."""
    if text.isprintable():
        return text[:most].strip()
    text = SEQUENCES.sub("", text[: 4 * most])
    return "".join(_make_printable(character) for character in text)[:most].strip()


@lru_cache(1 << 10)
def _make_printable(character: str) -> str:
    if character.isspace():
        return " "
    category = unicodedata.category(character)
    return "?" if category == "Cs" else "" if category in ("Cc", "Cf") else character


def make_all_printable(value: Any) -> Any:
    """A JSON value in which each string and each key is printable."""
    if isinstance(value, str):
        return make_printable(value)
    if isinstance(value, dict):
        return {make_printable(name): make_all_printable(each) for name, each in value.items()}
    return [make_all_printable(each) for each in value] if isinstance(value, list) and not _numbers(value) else value


def _numbers(values: list[Any]) -> bool:
    return all(isinstance(value, float) for value in values)  # a million samples are not looked at one by one
