"""Times, rates and shares that a page says in prose, beside those of the tables that it links to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

SECTION = re.compile(r"^## Measured on .*?$(?P<text>.*?)(?=^## |\Z)", re.M | re.S)
PAGE = re.compile(r"\]\((?P<page>results/[^)]+\.md)\)")
SECONDS = {"µs": 1e-6, "ms": 1e-3}
RATES = {"TFLOP/s": 1.0, "GB/s": 1.0, "TB/s": 1000.0}  # as tables have them: TB/s in GB/s
FIGURES = {  # what is looked for; a share is one of PyTorch's throughput
    "time": re.compile(r"(?P<value>[0-9]+(?:\.[0-9]+)?) (?P<unit>µs|ms)\b"),
    "rate": re.compile(r"(?P<value>[0-9]+(?:\.[0-9]+)?) (?P<unit>TFLOP/s|GB/s|TB/s)"),
    "share": re.compile(r"(?P<value>[0-9]+(?:\.[0-9]+)?) (?P<unit>%) of (?:PyTorch|`?torch`?)(?:'s throughput)?\b"),
}
EXACT = 4  # digits from which on a rate is one of a table's: rounder ones are aims, peaks and other people's
ELSEWHERE = re.compile(
    r"tuning|aims? (of|were)|in a run", re.I
)  # such sentences have figures that no published row has
NAMES = {"torch": "PyTorch", "torch_compile": "torch.compile", "liger": "Liger", "torch_cublaslt": "cuBLASLt"}


Shown = Mapping[str, list[float]]  # all figures of each kernel in the tables: seconds, rates, or percent


def check_sections(page: Path, shown: Mapping[str, Shown]) -> Iterator[str]:
    """The figures in the page's sections "Measured on …" that the tables do not have. Where a sentence names kernels, a figure
    must be one of theirs, else one of any kernel. A rate is checked only if it has `EXACT` digits and the sentence names a
    kernel. `shown` has the figures of the tables for each of `FIGURES`."""
    for section in SECTION.finditer(page.read_text()):
        for paragraph in section["text"].split("\n\n"):
            if not paragraph.lstrip().startswith(("|", "<")):
                yield from _check_paragraph(" ".join(paragraph.split()), shown)


def _check_paragraph(text: str, shown: Mapping[str, Shown]) -> Iterator[str]:
    for sentence in re.split(r"(?<=[.:;]) (?=[A-Z(`v0-9])", text):
        if ELSEWHERE.search(sentence):
            continue
        for what, pattern in FIGURES.items():
            of = shown[what]
            named = [kernel for kernel in of if kernel in sentence or NAMES.get(kernel, "\n") in sentence]
            figures = [figure for kernel in named or of for figure in of[kernel]]
            for found in pattern.finditer(sentence):
                if what == "rate" and not (named and len(found["value"].replace(".", "")) >= EXACT):
                    continue
                scale = (SECONDS | RATES).get(found["unit"], 1.0)
                value, digit = float(found["value"]) * scale, 10.0 ** -len(found["value"].partition(".")[2]) * scale
                if not any(abs(figure - value) <= 0.51 * digit for figure in figures):
                    yield f"no table has the {found[0]} of “{sentence}”"


def find_links(page: Path) -> list[Path]:
    """The pages of tables that a page links to."""
    return [page.parent / found["page"] for found in PAGE.finditer(page.read_text())]
