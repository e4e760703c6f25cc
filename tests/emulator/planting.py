"""Puts mistakes into a kernel's sources; a test switches each on by its number.

A marker says where: `//@ name` at the end of a line of the kernel, or alone on the line before. A mistake names markers, and
for each the change of its line, so that the rest of the kernel can be edited freely:

    {"loaded": ""}                          the line's statement is deleted, or replaced by these statements
    {"index": ("b[k][x]", "b[x][k]")}       this expression, or statement, of the line is replaced by another
    {"seq_end": IF_FALSE}                   the condition of the line's `if` is replaced
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

Edit = str | tuple[str, str]
CONDITION = "if (…)"
IF_TRUE, IF_FALSE = (CONDITION, "true"), (CONDITION, "false")
MARKER = re.compile(r"//@ (\w+)$", re.MULTILINE)


def plant(text: str, mistakes: Mapping[int, Mapping[str, Edit]]) -> str:
    """The source with the mistakes whose markers it has. Fails if an edit does not fit its line."""
    parts: dict[tuple[int, int], dict[int, str]] = {}
    for marker in MARKER.finditer(text):
        for number, edits in mistakes.items():
            if marker[1] in edits:
                start, end, new = find(text, marker, edits[marker[1]])
                parts.setdefault((start, end), {})[number] = new
    inserted: list[tuple[tuple[int, int, int], str]] = []  # the place, and the order at this place
    for (start, end), choices in parts.items():
        for other_start, other_end in parts:
            assert not start < other_start < end < other_end, f"mistakes overlap in {text[start:other_end]!r}"
        if text[start:end].endswith(";"):
            chosen = [f"if (emulator::mistake == {number}) {{ {new} }} else" for number, new in choices.items()]
            around = f"{{ {' '.join(chosen)} {{ ", " } }"
        else:
            chosen = [f"emulator::mistake == {number} ? ({new}) :" for number, new in choices.items()]
            around = f"({' '.join(chosen)} (", "))"
        inserted.append(((start, 1, -end), around[0]))  # of two that begin together, the longer one first
        inserted.append(((end, 0, -start), around[1]))  # of two that end together, the shorter one
    for (at, *_), added in sorted(inserted, reverse=True):
        text = text[:at] + added + text[at:]
    return text


def check_markers(texts: Iterable[str], wanted: Iterable[str], kernel: str) -> None:
    """Fails unless each wanted marker occurs exactly once in the sources of a kernel."""
    there = Counter(marker[1] for text in texts for marker in MARKER.finditer(text))
    for name in wanted:
        assert there[name] == 1, (
            f"a mistake of {kernel} is at the marker //@ {name}, which is {there[name]} times there"
        )


def find(text: str, marker: re.Match[str], edit: Edit) -> tuple[int, int, str]:
    """Where an edit starts and ends in the source, and the new text. `marker` is a match of MARKER in the source."""
    start = text.rfind("\n", 0, marker.start()) + 1
    if not text[start : marker.start()].strip():
        start = marker.end() + 1
    start, end = find_code(text, start)
    code = text[start:end]
    if isinstance(edit, str):
        while not text[start:end].endswith(";"):  # a statement of several lines
            end = find_code(text, text.index("\n", end) + 1)[1]
        found, new = (start, end), edit
    else:
        old, new = edit
        if old == CONDITION:
            opening = code.find("if (") + len("if ")
            assert opening >= len("if "), f"the line of the marker //@ {marker[1]} has no condition: {code}"
            found = start + opening + 1, start + find_closing(code, opening)
        else:
            assert code.count(old) == 1, f"the line of the marker //@ {marker[1]} must have {old!r} once: {code}"
            found = start + code.index(old), start + code.index(old) + len(old)
    assert text[slice(*found)] != new, f"the mistake at the marker //@ {marker[1]} changes nothing"
    return *found, new


def find_code(text: str, start: int) -> tuple[int, int]:
    """Where the code begins and ends in the line at `start`, without indentation and comment."""
    line = text[start : text.index("\n", start)]
    code = line.partition("//")[0].rstrip()
    return start + len(code) - len(code.lstrip()), start + len(code)


def find_closing(text: str, opening: int) -> int:
    """The place of the parenthesis that closes the one at `opening`."""
    depth, at = 0, opening
    while True:
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at
        at += 1
