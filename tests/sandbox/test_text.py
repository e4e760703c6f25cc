"""Text from foreign code before anybody sees it."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer.process.text import make_all_printable, make_printable

FORBIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
pieces = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.text(st.characters(categories=("Cc", "Cf", "Cs"))),
    st.sampled_from(
        ["\x1b[31m", "\x1b]0;title\x07", "\x1b]8;;https://x\x1b\\", "\x1bP+q\x1b\\", "\x9b2J", "\r\n", "\u202e"]
    ),
)


def is_plain(text: str) -> bool:
    return not any(unicodedata.category(character) in FORBIDDEN for character in text)


@given(st.lists(pieces).map("".join))
def test_any_text_becomes_one_line_that_can_only_be_read(text: str) -> None:
    assert is_plain(make_printable(text)) and make_printable(make_printable(text)) == make_printable(text)
    make_printable(text).encode()  # no half characters


@given(
    st.recursive(pieces | st.none() | st.floats() | st.integers(), lambda v: st.lists(v) | st.dictionaries(pieces, v))
)
def test_so_does_all_text_in_a_reply(value: object) -> None:
    def texts(value: object) -> list[str]:
        if isinstance(value, dict):
            return [text for pair in value.items() for each in pair for text in texts(each)]
        if isinstance(value, list):
            return [text for each in value for text in texts(each)]
        return [value] if isinstance(value, str) else []

    assert all(is_plain(text) for text in texts(make_all_printable(value)))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b[31mred\x1b[0m", "red"),
        ("a\x1b]0;owned\x07b", "ab"),
        ("two\nlines\tand a tab", "two lines and a tab"),
        ("abc\u202egpj.exe", "abcgpj.exe"),
        ("half \ud800", "half ?"),
        ("µs, 中文, ±", "µs, 中文, ±"),
    ],
)
def test_what_can_be_read_stays(text: str, shown: str) -> None:
    assert make_printable(text) == shown


def test_a_text_has_an_end() -> None:
    assert len(make_printable("x" * 10**7)) == 2000
