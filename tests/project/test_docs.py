"""The README stays short, its pictures have alternative texts of one sentence, and every link of the docs leads somewhere."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tests.conftest import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
MOST_LINES = 170


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short_and_begins_with_the_result() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    order = ["headline:begin", "plots:begin", "+sweep=hgemm", "uv run pytest\n", "results:begin"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere_and_pictures_have_one_sentence(page: Path) -> None:
    text = re.sub(
        r"```.*?```|`[^`\n]*`|^    [^\n]*$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )  # without code
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
    for about in re.findall(r"!\[((?:[^\]\\]|\\.)*)\]\(", text):
        assert re.fullmatch(r"[^.]+(?:\.\d[^.]*)*\.", about), about


def test_python_code_can_be_parsed() -> None:
    """In the README: the indented blocks that call minfer. On all pages: the blocks that are marked as Python."""
    blocks = re.findall(r"(?<=\n\n)(?: {4}[^\n]*\n)+", README.read_text())
    blocks = [block for block in blocks if re.search(r"\b(?:minfer|batching)\.\w+\(", block)]
    for page in PAGES:
        blocks += re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 6
    for block in blocks:
        compile(textwrap.dedent(block), "a page", "exec")
