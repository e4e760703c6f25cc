"""Times that a page says in prose, beside those of the tables that it links to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

SECTION = re.compile(r"^## Measured on .*?$(?P<text>.*?)(?=^## |\Z)", re.M | re.S)
PAGE = re.compile(r"\]\((?P<page>results/[^)]+\.md)\)")
TIME = re.compile(r"(?P<value>[0-9]+(?:\.[0-9]+)?) (?P<unit>µs|ms)\b")
SECONDS = {"µs": 1e-6, "ms": 1e-3}
ELSEWHERE = re.compile(
    r"tuning|aims? (of|were)|in a run", re.I
)  # such sentences have figures that no published row has
NAMES = {"torch": "PyTorch", "torch_compile": "torch.compile", "liger": "Liger", "torch_cublaslt": "cuBLASLt"}


def said_in_prose(page: Path, times: Mapping[str, list[float]]) -> Iterator[str]:
    """The times in the page's sections "Measured on …" that no kernel has that the sentence names, or none at all where it
    names none; `times` has all seconds of each kernel in the tables."""
    for section in SECTION.finditer(page.read_text()):
        for paragraph in section["text"].split("\n\n"):
            if not paragraph.lstrip().startswith(("|", "<")):
                yield from _of_paragraph(" ".join(paragraph.split()), times)


def _of_paragraph(text: str, times: Mapping[str, list[float]]) -> Iterator[str]:
    for sentence in re.split(r"(?<=[.:;]) (?=[A-Z(`v0-9])", text):
        if ELSEWHERE.search(sentence):
            continue
        named = [kernel for kernel in times if kernel in sentence or NAMES.get(kernel, "\n") in sentence]
        shown = [time for kernel in named or times for time in times[kernel]]
        for found in TIME.finditer(sentence):
            value = float(found["value"]) * SECONDS[found["unit"]]
            digit = 10.0 ** -len(found["value"].partition(".")[2]) * SECONDS[found["unit"]]
            if not any(abs(time - value) <= 0.51 * digit for time in shown):
                yield f"no table has the {found[0]} of “{sentence}”"


def linked(page: Path) -> list[Path]:
    """The pages of tables that a page links to."""
    return [page.parent / found["page"] for found in PAGE.finditer(page.read_text())]
