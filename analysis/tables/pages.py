"""Pages of their own for what is too long for the README: written, or only checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

GENERATED = "<!-- Generated from parquet; changes will be lost. -->"  # the first line of every page


def update_pages(pages: Mapping[Path, str], folder: Path, command: str, check: bool) -> list[str]:
    """Write or only check the pages below `folder`, and remove those that nothing stands behind any more; what is wrong,
    in sentences."""
    try:
        stale = [page for page in sorted(folder.glob("*/*.md")) if page not in pages and _is_ours(page)]
        old = [page for page, text in pages.items() if not page.is_file() or page.read_text("utf-8") != _whole(text)]
        if check:
            return [f"{page} is out of date: run `{command}`" for page in (*old, *stale)]
        for page in stale:
            page.unlink()
        for page in old:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(_whole(pages[page]), "utf-8")
    except OSError as error:
        return [f"{error.filename or folder}: {error.strerror or error}"]
    return []


def update_page(page: Path, text: str, command: str, check: bool) -> list[str]:
    """Write or only check one page; what is wrong, in sentences."""
    try:
        if page.is_file() and page.read_text("utf-8") == _whole(text):
            return []
        if check:
            return [f"{page} is out of date: run `{command}`"]
        page.write_text(_whole(text), "utf-8")
    except OSError as error:
        return [f"{page}: {error.strerror or error}"]
    return []


def _whole(text: str) -> str:
    return f"{GENERATED}\n\n{text}"


def _is_ours(page: Path) -> bool:
    return page.read_text("utf-8", errors="replace").startswith(GENERATED)
