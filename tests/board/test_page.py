"""The pages of a board."""

from __future__ import annotations

import datetime
import html.parser
import json
import urllib.parse
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.browser import Browser, chromium
from minfer.board import page
from minfer.board.folder import Board, write_json
from minfer.board.score import FASTER
from minfer.board.season import list_seasons
from tests.board.making import EPYC, SEED, make_board, make_entry, make_race

SCRIPT = "<script>alert(1)</script>\n"


@pytest.fixture
def board(tmp_path: Path) -> Board:
    board = make_board(tmp_path / "board")
    first = make_entry(board, "first", 1.0, text=SCRIPT)
    second = make_entry(board, "second", 2.0, who="bob", keep=False)
    make_race(board, second, first, FASTER)
    make_entry(board, "third", 1.01, who="eve", licence="<b>MIT</b>")
    return board


def test_every_link_leads_to_a_page(board: Board, tmp_path: Path) -> None:
    site = tmp_path / "site"
    page.build(board, site)

    class Links(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            target = dict(attrs).get("href") or ""
            if tag == "a" and not target.startswith("#"):
                found.append(target)

    pages = list(site.rglob("*.html"))
    assert len(pages) == 5
    for file in pages:
        found: list[str] = []
        Links().feed(file.read_text())
        assert found and all((file.parent / target).is_file() for target in found), file


def test_pages_tell_no_seed_and_no_source_that_is_not_allowed(board: Board, tmp_path: Path) -> None:
    page.build(board, tmp_path / "site")
    files = [path for path in (tmp_path / "site").rglob("*") if path.is_file()]
    text = "".join(path.read_text() for path in files)
    assert str(SEED) not in text and "// second" not in text and SCRIPT not in text and "<b>MIT" not in text
    assert "&lt;script&gt;alert" in text


def test_a_lead_within_noise_is_no_number_and_a_kernels_page_has_its_instructions(board: Board, tmp_path: Path) -> None:
    counted = make_entry(board, "close", 2.01, opcodes={"fma": 31.4}, static={"registers": 64.0})
    site = tmp_path / "site"
    page.build(board, site)
    assert "within noise of the next" in (site / "index.html").read_text()
    said = (site / "kernels" / f"{counted.id}.html").read_text()
    assert "registers of a thread" in said and "31.4" in said


def test_shapes_are_shown_when_the_season_has_ended(board: Board, tmp_path: Path) -> None:
    (season,) = list_seasons(board)
    season.closed, season.shapes = 5000.0, [{"dtype": "float16", "shape": {"rows": 4711, "n": 3}, "params": {}}]
    write_json(board.folder / "seasons" / f"{season.name}.json", vars(season))
    page.build(board, tmp_path / "site")
    (file,) = (tmp_path / "site").glob("softmax*.html")
    assert "rows=4711" in file.read_text() and "closed on" in file.read_text()


def test_programs_read_the_same_board(board: Board, tmp_path: Path) -> None:
    page.build(board, tmp_path / "site", "https://board.example/x")
    (found,) = json.loads((tmp_path / "site" / "board.json").read_text())["boards"]
    assert (found["device"], found["lead"]["value"]) == (EPYC, pytest.approx(2.0 / 1.01))
    assert [each["name"] for each in found["standings"]] == ["second", "third", "first"] and len(found["record"]) == 2
    feed = ElementTree.parse(tmp_path / "site" / "feed.xml").getroot()
    assert [e.tag.rpartition("}")[2] for e in feed] == ["title", "id", "updated", "link", "link", "entry", "entry"]
    newest = feed.find(f"{{{page.ATOM}}}entry/{{{page.ATOM}}}link")
    assert newest is not None and newest.get("href", "").startswith("https://board.example/x/kernels/")


@pytest.mark.parametrize("url", ["", "https://board.example/x"])
def test_the_feed_is_valid_and_the_same_when_it_is_built_again(url: str, board: Board, tmp_path: Path) -> None:
    """What RFC 4287 requires. A reader shows an entry again if its id changes, and mixes up two feeds of the same id."""
    other = make_board(tmp_path / "other", opened=1001.0)
    builds = ((other, "other"), (board, "site"), (board, "site"))
    texts = [page.build(of, tmp_path / to, url).with_name("feed.xml").read_text() for of, to in builds]
    assert texts[1] == texts[2]
    of_other, found, _ = map(ElementTree.fromstring, texts)
    one = lambda element, name: "".join(element.find(f"{{{page.ATOM}}}{name}").itertext())  # fails if there is none
    entries = found.findall(f"{{{page.ATOM}}}entry")
    for element in (found, *entries):
        assert one(element, "title") and datetime.datetime.fromisoformat(one(element, "updated")).tzinfo
    assert all(one(entry, "author") and one(entry, "summary") for entry in entries)
    ids = [one(element, "id") for element in (found, *entries)]
    assert len(set(ids)) == 3 and all(urllib.parse.urlsplit(each).scheme in ("urn", "https") for each in ids)
    assert url or one(of_other, "id") != ids[0]
    for link in found.iter(f"{{{page.ATOM}}}link"):
        target = link.get("href") or ""
        assert target.startswith(url and f"{url}/") and (tmp_path / "site" / target.removeprefix(f"{url}/")).is_file()


def test_a_page_of_what_was_removed_goes(board: Board, tmp_path: Path) -> None:
    page.build(board, tmp_path / "site")
    entry = board.entries()[0]
    board.drop(entry)
    page.build(board, tmp_path / "site")
    assert not (tmp_path / "site" / "kernels" / f"{entry.id}.html").exists()


def test_an_empty_board_has_a_page(tmp_path: Path) -> None:
    page.build(make_board(tmp_path / "board"), tmp_path / "site")
    text = (tmp_path / "site" / "index.html").read_text()
    assert "No kernel has a rank yet." in text and "softmax-cpu-1" in text


@pytest.mark.slow  # starts Chromium
@pytest.mark.skipif(chromium() is None, reason="no Chromium here")
def test_pages_work_in_a_browser_by_keyboard(board: Board, tmp_path: Path) -> None:
    index = page.build(board, tmp_path / "site")
    with Browser(1000, 800) as browser:
        browser.open(index)
        said = []
        for _ in range(8):
            browser.press("Tab")
            said.append(browser.js("document.activeElement.textContent.trim()"))
        assert said[0] == "Skip to the content" and "softmax, softmax-cpu-1" in said and "Light or dark" in said
        before = browser.js("document.documentElement.dataset.theme")
        browser.click("#theme")
        assert browser.js("document.documentElement.dataset.theme") != before
        for file in (tmp_path / "site").rglob("*.html"):
            browser.open(file)
            assert browser.js("document.documentElement.scrollWidth <= innerWidth"), file
        assert not browser.errors and all(url.startswith("file:") for url in browser.requests)


def test_a_kernel_takes_the_record_when_its_race_is_run(tmp_path: Path) -> None:
    """The second was submitted before the third, and took the record from it later."""
    board = make_board(tmp_path / "board")
    first, second, third = (
        make_entry(board, name, who=name, when=when) for name, when in (("a", 1e9), ("b", 1e9 + 60), ("c", 1e9 + 120))
    )
    make_race(board, third, first, "faster", when=1e9 + 130)
    make_race(board, second, third, "faster", when=1e9 + 7200)
    page.build(board, tmp_path / "site")
    (place,) = json.loads((tmp_path / "site" / "board.json").read_text())["boards"]
    assert [(each["submission"], each["when"] - 1e9) for each in place["record"]] == [
        (first.id, 0),
        (third.id, 130),
        (second.id, 7200),
    ]
    feed = (tmp_path / "site" / "feed.xml").read_text()
    assert feed.index(second.id) < feed.index(third.id) < feed.index(first.id)
