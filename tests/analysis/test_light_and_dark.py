"""One file of a picture is light or dark as its reader prefers: what is in it, and what a real browser shows of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.browser import Browser, chromium
from minfer.analysis.plots import style
from minfer.analysis.plots.every_op import Picture
from tests.analysis.test_make_plots import rows
from tests.conftest import ROOT
from tests.pictures import drawn

COMMITTED = sorted((ROOT / "docs" / "plots").glob("*/*.svg"))
KINDS = {
    (file.parent, file.stem.rpartition("-")[2]): file for file in COMMITTED
}  # one of each device's ladders, and so on
DARK_RULES = re.compile(r"@media \(prefers-color-scheme: dark\) \{\n.*?\n\}\n", re.DOTALL)
LIGHT_COLOR = re.compile("|".join(style.COUNTERPARTS))


def test_each_colour_of_the_light_theme_has_one_counterpart() -> None:
    """Else two colours that are apart on one page were the same on the other."""
    assert len(style.COUNTERPARTS) == len(set(style.COUNTERPARTS.values())) == len(style.LIGHT.colors)


def test_every_text_and_line_changes_with_the_page() -> None:
    for picture in drawn(*rows()).values():
        assert isinstance(picture, Picture)
        svg = style.encoded(picture.figure, picture.about).decode()
        (rules,) = DARK_RULES.findall(svg)
        drawing = svg.replace(rules, "")
        colors = set(re.findall(r"(?:fill|stroke): (#\w+)", drawing))
        assert {style.LIGHT.paper, style.LIGHT.ink, style.LIGHT.ours} <= colors <= set(style.COUNTERPARTS)
        assert all(f"{color} !important" in rules for color in map(style.COUNTERPARTS.get, colors))
        texts = re.findall(r"<text [^>]+>", drawing)
        assert texts and all(re.search(r"fill: #\w+", text) for text in texts)  # one in black has no colour in the file
        ground = re.search(r"<path [^>]+>", drawing)
        assert ground and f"fill: {style.LIGHT.paper}" in ground[0]  # a page of the other kind does not shine through


def test_a_colour_without_a_counterpart_is_refused() -> None:
    figure, (axes,) = style.figure([1.0])
    axes.plot([1, 2], [1, 2], color="#123456")
    with pytest.raises(ValueError, match="#123456 has no counterpart on dark pages"):
        style.encoded(figure, "")


@pytest.mark.slow
def test_readers_see_the_committed_pictures_in_the_colours_they_prefer(tmp_path: Path) -> None:
    """Through <img>, as code forges show it: each pixel is that of a file without rules and with the colours of the theme."""
    if chromium() is None:
        pytest.skip("there is no Chromium here: install Debian's package chromium")
    plain = {"light": dict[Path, str](), "dark": dict[Path, str]()}
    for file in KINDS.values():
        plain["light"][file] = DARK_RULES.sub("", file.read_text())
        plain["dark"][file] = LIGHT_COLOR.sub(lambda color: style.COUNTERPARTS[color[0]], plain["light"][file])
    ours = page(tmp_path / "ours.html", sorted(KINDS.values()))
    seen = []
    with Browser() as browser:
        for theme, of in plain.items():
            folder = tmp_path / theme
            for file, text in of.items():
                (folder / file.parent.name).mkdir(parents=True, exist_ok=True)
                (folder / file.parent.name / file.name).write_text(text)
            browser.prefers(theme)
            expected = page(tmp_path / f"{theme}.html", sorted(folder.glob("*/*.svg")))
            seen.append(screenshot(browser, ours, tmp_path))
            assert seen[-1] == screenshot(browser, expected, tmp_path), theme
        assert seen[0] != seen[1] and not browser.errors


def page(file: Path, pictures: list[Path]) -> Path:
    """A page that shows pictures, small, so that one screenshot has all."""
    images = "".join(f'<img width="280" src="{picture.as_uri()}">' for picture in pictures)
    file.write_text(f'<!doctype html><html data-ready="yes"><meta charset="utf-8"><body>{images}</body></html>')
    return file


def screenshot(browser: Browser, file: Path, folder: Path) -> bytes:
    """All of a page, its pictures loaded, as a PNG."""
    browser.open(file)
    browser.js("Promise.all([...document.images].map((image) => image.decode()))")
    browser.screenshot(folder / "page.png", whole=True)
    return (folder / "page.png").read_bytes()
