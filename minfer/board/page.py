"""The pages of a board, without a server: an index, a page for each season on each device, a page for each kernel, `board.json`
for programs, and an Atom feed of the records. Of an open season they show no shape but that of problem 0."""

from __future__ import annotations

import datetime
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from minfer import analysis
from minfer.board.answer import SCHEMA, describe_code
from minfer.board.chart import draw_record
from minfer.board.folder import Board, Entry, make_id, write_bytes
from minfer.board.score import FASTER, Ratio, Standing, holders, holding_since, rank
from minfer.board.season import Season, list_seasons
from minfer.plan.config import UserError
from minfer.rows.store import slug

STYLE = Path(analysis.__file__).with_name("web") / "report.css"
OWN_STYLE = """
h1 { margin-bottom: 8px; }
table { margin: 10px 0 22px; }
caption { text-align: left; color: var(--soft); font-size: 13px; padding-bottom: 6px; }
tbody th { font-size: 14px; color: var(--ink); }
svg.record { max-width: 100%; height: auto; display: block; margin: 10px 0; }
svg.record text { fill: var(--soft); font: 12px var(--sans); }
svg.record .axis { stroke: var(--line); }
svg.record .step { stroke: var(--accent); fill: none; stroke-width: 2; }
svg.record .dot { fill: var(--faint); }
svg.record .holder { fill: var(--accent); }
"""
THEME = """
let kept = null;
try { kept = localStorage.getItem("minfer-theme"); } catch { /* a file's page may have no storage */ }
const dark = kept ? kept === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme = dark ? "dark" : "light";
"""
SWITCH = """
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("minfer-theme", root.dataset.theme); } catch { /* not kept then */ }
});
document.documentElement.dataset.ready = "yes";
"""
ATOM = "http://www.w3.org/2005/Atom"


class Place:
    """One season on one device, with all that its pages need."""

    def __init__(self, season: str, device: str, entries: Sequence[Entry], races: Sequence[Mapping[str, Any]]) -> None:
        self.season, self.device, self.entries = season, device, entries
        self.standings: list[Standing] = rank(entries, races)
        self.records = holders(entries, races)
        self.since = holding_since(self.records, races)
        self.file = f"{season}-{slug(device)}.html"

    @property
    def op(self) -> str:
        return self.entries[0].op

    @property
    def leader(self) -> Entry:
        return self.standings[0].entry

    @property
    def lead(self) -> Ratio | None:
        """The leader's score over that of the next one; None for a leader without followers."""
        if len(self.standings) < 2:
            return None
        return self.standings[0].score.over(self.standings[1].score)


def build(board: Board, folder: Path, url: str = "") -> Path:
    """Write all pages to a folder, and return that of the index. Raises UserError where it cannot be written."""
    seasons = {season.name: season for season in list_seasons(board)}
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in board.entries():
        if entry.ranks:
            groups.setdefault((entry.season, entry.device), []).append(entry)
    races = board.races()
    places = [Place(season, device, entries, races) for (season, device), entries in groups.items()]
    pages = {"index.html": _index(places, list(seasons.values()))}
    for place in places:
        pages[place.file] = _board(place, seasons.get(place.season))
        for entry in place.entries:
            pages[f"kernels/{entry.id}.html"] = _kernel(board, place, entry)
    pages["board.json"] = json.dumps(_data(places), indent=1) + "\n"
    pages["feed.xml"] = _feed(places, list(seasons.values()), url)
    try:
        (folder / "kernels").mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            write_bytes(folder / name, text.encode())
        for stale in {path.name for path in folder.glob("kernels/*.html")} - {Path(name).name for name in pages}:
            (folder / "kernels" / stale).unlink(missing_ok=True)  # pages of removed submissions
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}; choose another folder with -o") from error
    return folder / "index.html"


def _page(title: str, body: str, up: str = "") -> str:
    """A whole page. `up`: the relative path to the index's folder."""
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    style = STYLE.read_text("utf-8") + OWN_STYLE
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{_text(title)}</title>
<link rel="icon" href="data:,">
<link rel="alternate" type="application/atom+xml" href="{up}feed.xml" title="Records">
<script>{THEME}</script>
<style>
{style}</style>
</head>
<body>
<a class="skip" href="#view">Skip to the content</a>
<header class="top">
<a class="brand" href="{up}index.html">minfer<span>board</span></a>
<nav aria-label="Pages">
<a href="{up}index.html">Boards</a><a href="{up}feed.xml">Feed</a><a href="{up}board.json">JSON</a>
</nav>
<div class="tools"><button type="button" id="theme">Light or dark</button></div>
</header>
<main id="view" tabindex="-1">
{body}
</main>
<script>{SWITCH}</script>
</body>
</html>
"""


def _index(places: Sequence[Place], seasons: Sequence[Season]) -> str:
    rows = []
    for place in places:
        lead = f"{_times(place.lead)} the next one's score" if place.lead else "alone"
        if place.standings[0].tied:
            lead = "within noise of the next"
        rows.append(
            [
                _link(place.file, f"{place.op}, {place.season}"),
                _text(place.device),
                _link(f"kernels/{place.leader.id}.html", place.leader.title),
                _ratio(Ratio.of(place.leader.score)),
                lead,
                str(len(place.standings)),
            ]
        )
    head = ["Board", "Device", "Record", "Times the baseline's speed", "Lead", "Kernels"]
    body = "<h1>Boards</h1>\n<p class='lead'>Each kernel was judged from another process, on problems that its author did not"
    body += (
        " know. A ratio is the baseline's time over the kernel's, the geometric mean of all hidden problems, with its"
    )
    body += " interval.</p>\n"
    body += (
        _table("One line for each season on each device.", head, rows) if rows else "<p>No kernel has a rank yet.</p>"
    )
    empty = [season for season in seasons if season.is_open and season.name not in {place.season for place in places}]
    if empty:
        body += f"<p>Open, and without a kernel: {_text(', '.join(season.name for season in empty))}.</p>"
    return _page("minfer: boards", body)


def _board(place: Place, season: Season | None) -> str:
    rows = []
    for standing in place.standings:
        entry = standing.entry
        mark = " <span class='badge'>within noise</span>" if standing.tied else ""
        rows.append(
            [
                f"{standing.rank}{mark}",
                _link(f"kernels/{entry.id}.html", entry.name),
                _text(entry.who),
                entry.kind,
                _ratio(standing.score),
                _day(entry.when),
            ]
        )
    body = f"<h1>{_text(place.op)} on {_text(place.device)}</h1>\n"
    body += f"<p class='lead'>{_describe_season(place.season, season)}</p>\n"
    head = ["Rank", "Kernel", "By", "Kind", "Times the baseline's speed", "Submitted (UTC)"]
    note = (
        "Kernels that share a rank differ by no more than the intervals, or no run with both has shown which is faster."
    )
    body += _table(note, head, rows)
    body += "<h2>The record over time</h2>\n"
    body += draw_record(place.entries, place.records, place.since)
    history = [
        [_day(when), _link(f"kernels/{e.id}.html", e.title), _ratio(Ratio.of(e.score))]
        for when, e in zip(place.since, place.records, strict=True)
    ]
    body += _table("Who held the record from when on.", ["From (UTC)", "Kernel", "Times the baseline's speed"], history)
    body += "<h2>Problem by problem</h2>\n" + _problems(place)
    if season and season.shapes:
        shapes = [[str(number), _text(_problem(about))] for number, about in enumerate(season.shapes)]
        body += "<h2>The problems, now that the season has ended</h2>\n" + _table("", ["Problem", "Shape"], shapes)
    return _page(f"minfer: {place.op} on {place.device}", body)


def _describe_season(name: str, season: Season | None) -> str:
    if season is None:
        return f"Season {_text(name)}."
    state = "open; its hidden problems have numbers only" if season.is_open else f"closed on {_day(season.closed or 0)}"
    return (
        f"Season {_text(name)}, {state}. Hidden problems: {season.problems}. Problem 0, which everybody may see and which does "
        f"not count: {_text(_problem(season.shown))}."
    )


def _problem(about: Mapping[str, Any]) -> str:
    words = [about["dtype"], *(f"{axis}={size}" for axis, size in about["shape"].items())]
    return ", ".join([*words, *(f"{name}={value}" for name, value in about["params"].items())])


def _problems(place: Place) -> str:
    """The ratio of each ranked kernel on each hidden problem."""
    found = {s.entry.id: {p["number"]: p for p in s.entry.result.get("problems", [])} for s in place.standings}
    numbers = sorted({number for of in found.values() for number in of})
    rows = []
    for standing in place.standings:
        cells = [_link(f"kernels/{standing.entry.id}.html", standing.entry.title)]
        for number in numbers:
            ratio = (found[standing.entry.id].get(number) or {}).get("ratio")
            cells.append(_ratio(Ratio.of(ratio) if ratio else None))
        rows.append(cells)
    return _table("Times the baseline's speed.", ["Kernel", *(f"Problem {number}" for number in numbers)], rows)


def _kernel(board: Board, place: Place, entry: Entry) -> str:
    result = entry.result
    standing = next((s for s in place.standings if s.entry.id == entry.id), None)
    link = _link(f"../{place.file}", f"{place.op} on {place.device}")
    about = f"submission <code>{entry.id}</code> of {_day(entry.when)} UTC"
    body = f"<h1>{_text(entry.title)}</h1>\n<p class='lead'>{link}, season {_text(entry.season)}; {about}.</p>\n"
    body += "<ul class='says'>\n"
    score = Ratio.of(entry.score)
    says = [f"{_times(score)} the baseline's speed."]
    if standing:
        says.append(f"Rank {standing.rank} of {len(place.standings)}{', shared' if standing.tied else ''}.")
    else:
        says.append(_say_who_has_its_place(place, entry))
    if place.leader.id != entry.id:
        ahead = Ratio.of(place.leader.score).over(score)
        link = _link(f"{place.leader.id}.html", place.leader.title)
        if ahead.verdict == FASTER:
            says.append(f"The leader, {link}, is {_times(ahead)} as fast.")
        else:
            says.append(f"The leader is {link}, with {_times(ahead)} this kernel's score.")
    if race := result.get("race"):
        says.append(
            f"In the same rounds as {_text(race['holder'])} it was {_times(Ratio.of(race))} as fast: {race['verdict']}."
        )
    says.append(
        f"Licence: {_text(entry.licence or 'not stated')}. Fingerprint: <code>{_text(entry.fingerprint)}</code>."
    )
    body += "".join(f"<li>{said[0].upper()}{said[1:]}</li>\n" for said in says) + "</ul>\n"
    rows = []
    for problem in result.get("problems", []):
        ratio = problem["ratio"]
        roof = "–" if problem["roof_percent"] is None else f"{problem['roof_percent']:g} %"
        rows.append([str(problem["number"]), _ratio(Ratio.of(ratio)) if ratio else "–", roof])
    body += _table("The hidden problems.", ["Problem", "Times the baseline's speed", "Of the roof"], rows)
    if found := result.get("differences"):
        cells = [[_text(d["what"]), f"{d['mine']:.3g}", f"{d['best']:.3g}"] for d in found]
        body += "<h2>What differed most from the leader when it was judged</h2>\n"
        body += _table("", ["", "This one", "The leader"], cells)
    if counted := [[_text(what), f"{value:.3g}"] for what, value in describe_code(entry).items()]:
        body += "<h2>What the compiler made of it</h2>\n" + _table("", ["", "Counted"], counted)
    body += "<h2>Source</h2>\n"
    if entry.keep and (content := board.content(next(iter(entry.files.values())))) is not None:
        lines = content.decode("utf-8", errors="replace").splitlines()
        code = "".join(f"<span class='line' data-line='{n}'>{_text(line)}</span>" for n, line in enumerate(lines, 1))
        body += f"<pre tabindex='0' aria-label='Source'>{code}</pre>"
    else:
        body += "<p>Its author did not allow the source to be shown.</p>"
    return _page(f"minfer: {entry.title}", body, "../")


def _say_who_has_its_place(place: Place, entry: Entry) -> str:
    other = next(s.entry for s in place.standings if (s.entry.who, s.entry.name) == (entry.who, entry.name))
    why = "holds the record" if other is place.leader else "has the higher score"
    return f"Submission {_link(f'{other.id}.html', other.id)} of this name has its place, because it {why}."


def _data(places: Sequence[Place]) -> dict[str, Any]:
    """What `board.json` has."""
    return {
        "schema": SCHEMA,
        "boards": [
            {
                "op": place.op,
                "season": place.season,
                "device": place.device,
                "page": place.file,
                "lead": place.lead and place.lead.as_dict(),
                "standings": [
                    {"rank": s.rank, "tied": s.tied, "submission": s.entry.id, "name": s.entry.name, "who": s.entry.who}
                    | {"kind": s.entry.kind, "when": s.entry.when, "score": s.entry.score}
                    | {"problems": s.entry.result.get("problems", [])}
                    for s in place.standings
                ],
                "record": [
                    {"submission": e.id, "when": when, "score": e.score}
                    for when, e in zip(place.since, place.records, strict=True)
                ],
            }
            for place in places
        ],
    }


def _feed(places: Sequence[Place], seasons: Sequence[Season], url: str) -> str:
    """An Atom feed (RFC 4287) with an entry for each record, the newest first. If no address is known, links are relative to
    the feed's, and its id is made from the first season, so that no two boards share one."""
    base = url.rstrip("/") + "/" if url else ""
    records = sorted(
        ((when, e, place) for place in places for when, e in zip(place.since, place.records, strict=True)),
        key=itemgetter(0),
        reverse=True,
    )
    ElementTree.register_namespace("", ATOM)
    feed = ElementTree.Element(f"{{{ATOM}}}feed")
    _add(feed, "title", "minfer board: records")
    _add(feed, "id", base or ":".join(["urn:minfer:board", *(make_id(s.name, str(s.opened)) for s in seasons[:1])]))
    _add(feed, "updated", _iso(records[0][0] if records else 0.0))
    ElementTree.SubElement(feed, f"{{{ATOM}}}link", href=f"{base}feed.xml", rel="self")
    ElementTree.SubElement(feed, f"{{{ATOM}}}link", href=f"{base}index.html", rel="alternate")
    for when, entry, place in records:
        item = ElementTree.SubElement(feed, f"{{{ATOM}}}entry")
        score = Ratio.of(entry.score)
        said = f"{score.times} the baseline's speed"
        _add(item, "title", f"{place.op} on {place.device}: {entry.title}, {said}")
        _add(item, "id", f"urn:minfer:submission:{entry.id}")
        _add(item, "updated", _iso(when))
        _add(ElementTree.SubElement(item, f"{{{ATOM}}}author"), "name", entry.who)
        ElementTree.SubElement(item, f"{{{ATOM}}}link", href=f"{base}kernels/{entry.id}.html")
        _add(item, "summary", f"{said}; season {place.season}")
    return ElementTree.tostring(feed, encoding="unicode", xml_declaration=True) + "\n"


def _add(parent: ElementTree.Element, name: str, text: str) -> None:
    ElementTree.SubElement(parent, f"{{{ATOM}}}{name}").text = text


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column names its lines. The cells are HTML."""
    titles = "".join(f"<th scope='col'>{_text(title)}</th>" for title in head)
    lines = "".join(
        f"<tr><th scope='row'>{row[0]}</th>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>\n" for row in rows
    )
    said = f"<caption>{_text(caption)}</caption>" if caption else ""
    return (
        f"<div class='scroll'><table>{said}<thead><tr>{titles}</tr></thead>\n<tbody>\n{lines}</tbody></table></div>\n"
    )


def _link(target: str, said: str) -> str:
    return f"<a href='{_text(target)}'>{_text(said)}</a>"


def _text(said: object) -> str:
    return html.escape(str(said))


def _ratio(ratio: Ratio | None) -> str:
    """A ratio with its interval."""
    return "–" if ratio is None else f"{ratio.shown} <span class='soft'>({ratio.interval})</span>"


def _times(ratio: Ratio) -> str:
    """A ratio as text before a noun."""
    return _ratio(ratio) + " times" if ratio.shown != "unsure" else ratio.times


def _day(seconds: float) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M}"


def _iso(seconds: float) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"
