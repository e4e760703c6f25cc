"""Checks that the figures of pages agree, and those of rows with their device: `python analysis/make.py figures`.

It writes nothing. The modules of `analysis/checks/` say what they compare.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from minfer.analysis.checks import claims, hgemm, results, roofs
from minfer.analysis.makers import Maker, Options


def check_pages(pages: Iterable[Path]) -> tuple[list[str], int]:
    """A sentence for each disagreement, and the number of table rows on the pages."""
    texts = {page: page.read_text() for page in pages}
    shares = {page: results.read_shares(text) for page, text in texts.items()}
    found, counted = list[str](), 0
    for page, text in texts.items():
        said = [
            *results.check_prose(page),
            *results.check_tables(text),
            *results.check_ops_table(page),
            *results.check_readme(page),
            *results.check_counts(text),
        ]
        found += [
            f"{page}: {sentence}" for sentence in (*said, *hgemm.check_hgemm(text), *claims.check_claims(page, shares))
        ]
        counted += sum(len(cells) - 1 for _, cells in results.find_problem_tables(text))
    return found, counted


def write(table: pa.Table, options: Options) -> list[str]:
    pages = [options.readme, *sorted(options.docs.glob("*.md")), *sorted(options.pages.glob("*/*.md"))]
    found, counted = check_pages(pages)
    impossible, held = roofs.check_roofs(table)
    found += impossible
    if not found and counted:
        print(f"{counted} rows of tables agree; {held} measured rows are within their roofs")
    return found or ([] if counted else [f"{options.readme} and the pages in {options.docs} have no table to check"])


MAKER = Maker(write, roofs.COLUMNS, all_or_nothing=False)
