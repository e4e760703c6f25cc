"""No file says a word that the glossary rules out ("Not: …") for what it means there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"
FOLDERS = ("analysis", "benchmarks", "conf", "docs", "examples", "jobs", "minfer", "tests", "tools")
SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h", ".md", ".yaml", ".js"}
# The same words for other things: numbers, buckets on a command line, a column of rows, a call stack, functions of Python.
OTHER_MEANINGS = re.compile(
    r"powers[\s_]of[\s_](?:two|ten|2)|exact, powers|[\"'`]powers[\"'`]|\"arm\"|walks up|\b(?:ast|os)\.walk\(",
    re.IGNORECASE,
)


def forms_of(word: str) -> str:
    """`walk` also as walks, walked and walking; a plural (`powers`) only as it is."""
    return word if word.endswith("s") else rf"{word}(?:s|ed|ing)?"


def ruled_out() -> re.Pattern[str]:
    words = [word for words in re.findall(r"\(Not: ([^)]*)\.\)", GLOSSARY.read_text()) for word in words.split(", ")]
    assert {"arm", "powers", "walk"} <= set(words)
    return re.compile(rf"(?<![a-zA-Z])(?:{'|'.join(map(forms_of, words))})(?![a-zA-Z])", re.IGNORECASE)


def find(text: str) -> list[str]:
    return ruled_out().findall(OTHER_MEANINGS.sub("", text))


def texts() -> list[Path]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    generated = ROOT / "docs" / "results"
    return [path for path in files if path not in (GLOSSARY, Path(__file__)) and generated not in path.parents]


def test_a_word_that_is_ruled_out_is_found_in_any_form_and_only_in_its_meaning() -> None:
    assert find("each arm\nadd_powers(x); Walking over tiles") == ["arm", "powers", "Walking"]
    assert find('powers of two, buckets="powers", row["arm"], walks up the stack, charm, power') == []


def test_no_file_says_a_word_that_the_glossary_rules_out() -> None:
    found = {
        str(path.relative_to(ROOT)): words for path in texts() if (words := find(path.read_text(errors="replace")))
    }
    assert not found
