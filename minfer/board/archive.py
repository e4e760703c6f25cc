"""The commands of `minfer archive`, and the tables of `minfer board`: what was submitted, and what became of it."""

from __future__ import annotations

import datetime
import difflib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minfer.board import near
from minfer.board.answer import describe_now, differences, text
from minfer.board.folder import Board, Entry, write_json
from minfer.board.score import FASTER, Ratio, Standing, rank
from minfer.board.season import list_seasons
from minfer.plan.config import UserError


def day(seconds: float) -> str:
    """A date and a time, in UTC."""
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M}"


def standings(board: Board) -> dict[tuple[str, str], list[Standing]]:
    """The standings of each season on each device, by the names of both, the oldest season first."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in board.entries():
        if entry.ranks:
            groups.setdefault((entry.season, entry.device), []).append(entry)
    races = board.races()
    return {key: rank(entries, races) for key, entries in groups.items()}


def print_list(board: Board, op: str, who: str, as_json: bool) -> None:
    """A line for each submission."""
    entries = [entry for entry in board.entries() if op in ("", entry.op) and who in ("", entry.who)]
    if as_json:
        _print_json("submissions", [_public(entry) for entry in entries], board.unreadable)
        return
    rows = [("submission", "when (UTC)", "op", "name", "who", "kind", "season", "score", "state")]
    for entry in entries:
        score = Ratio.of(entry.score).shown if entry.score else ""
        verdict = entry.result.get("verdict", "") if entry.state == "refused" else entry.state
        rows.append(
            (entry.id, day(entry.when), entry.op, entry.name, entry.who, entry.kind, entry.season, score, verdict)
        )
    print(align(rows))
    print(f"{_count(len(entries))}.")
    _name_unreadable(board.unreadable, f"more submission{'s' * (len(board.unreadable) != 1)}")


def _print_json(name: str, found: Sequence[Mapping[str, Any]], unreadable: Sequence[Path]) -> None:
    """What `--json` prints of a list: what was found, and the files that cannot be read."""
    print(json.dumps({name: found, "unreadable": [str(path) for path in unreadable]}, indent=1))


def _name_unreadable(files: Sequence[Path], what: str) -> None:
    """Say which files this user or this version of minfer cannot read, if there are any: without them a list looks empty."""
    if files:
        print(
            f"{len(files)} {what} cannot be read, the first {files[0]}: if a newer minfer wrote the board, use that one; if the"
            " file was cut off, copy the board's folder again; if it is another user's, ask its owner."
        )


def _public(entry: Entry) -> dict[str, Any]:
    """What `--json` prints of a submission in a list."""
    return {name: value for name, value in asdict(entry).items() if name not in ("result", "rules")} | {
        "verdict": entry.result.get("verdict", "pending")
    }


def _count(submissions: int) -> str:
    return f"{submissions} submission{'s' * (submissions != 1)}"


def align(rows: Iterable[tuple[str, ...]]) -> str:
    """Lines whose columns begin below each other."""
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def print_entry(board: Board, entry: Entry, as_json: bool) -> None:
    """A submission's answer, with the place that it has now, and its source if its author allows it."""
    source = board.source(entry) if entry.keep else None
    result = describe_now(board, entry) if entry.ranks else entry.result
    if as_json:
        print(json.dumps(asdict(entry) | {"result": result, "source": source}, indent=1))
        return
    print(text(result) if result else f"{entry.id} is being judged.")
    print(
        f"Submitted {day(entry.when)} UTC; licence: {entry.licence or 'not stated'}; fingerprint: {entry.fingerprint or '-'}"
    )
    print(f"\n{source}" if source else "Its author did not allow the source to be shown.")


def print_difference(board: Board, a: Entry, b: Entry, as_json: bool) -> None:
    """Two submissions: the numbers that differ most, and the difference of their sources where both may be shown."""
    numbers = differences(a, b)[:8]
    lines: list[str] = []
    if a.keep and b.keep:
        one, other = (board.source(each).splitlines(keepends=True) for each in (a, b))
        lines = list(difflib.unified_diff(one, other, a.kernel, b.kernel))
    if as_json:
        print(json.dumps({"a": a.id, "b": b.id, "differences": numbers, "source": "".join(lines)}, indent=1))
        return
    print(align([("", a.kernel, b.kernel), *((d["what"], f"{d['mine']:.4g}", f"{d['best']:.4g}") for d in numbers)]))
    print(
        "".join(lines)
        if lines
        else "No difference of sources can be shown: they are the same, or not both may be read."
    )


def print_near(board: Board, task: near.Task, count: int, as_json: bool) -> None:
    """The nearest submissions, each with its source's place in the archive and with what made it faster than the next."""
    found = near.find(task, board.entries(), count)
    if as_json:
        of = [
            _public(entry) | {"distance": round(far, 4), "source": _find_source(board, entry)} for far, entry in found
        ]
        _print_json("submissions", of, board.unreadable)
        return
    rows = [("distance", "submission", "op", "name", "who", "score", "differs most from the fastest of these in")]
    fastest = max((entry for _, entry in found), key=lambda entry: entry.score["value"], default=None)
    for far, entry in found:
        why = ""
        if fastest and fastest is not entry and (numbers := differences(entry, fastest)):
            why = f"{numbers[0]['what']}: {numbers[0]['mine']:.3g} against {numbers[0]['best']:.3g}"
        score = Ratio.of(entry.score).shown
        rows.append((f"{far:.2f}", entry.id, entry.op, entry.name, entry.who, score, why))
    print(align(rows))
    _name_unreadable(board.unreadable, f"submission{'s' * (len(board.unreadable) != 1)}")


def _find_source(board: Board, entry: Entry) -> str | None:
    """The source of a submission; None if its author does not allow it to be shown, or if its file cannot be read."""
    try:
        return board.source(entry) if entry.keep else None
    except UserError:
        return None


def remove(board: Board, entry: Entry, who: str) -> None:
    """Remove a submission; `who` must be its author. Raises UserError."""
    if entry.who != who:
        raise UserError(
            f"{entry.id} is {entry.who}'s, not {who}'s, and only its author may remove it; if it is yours, add --as {entry.who}"
        )
    _drop(board, entry)
    print(f"Removed {entry.id}, {entry.title}, with its rows, its log and its files.")
    _write_pages(board, entry)


def _drop(board: Board, entry: Entry) -> None:
    """Remove a submission from the board. Raises UserError."""
    denied = UserError(f"only the owner of {board.folder} can remove files there; ask them")
    if not all(
        os.access(board.folder / each, os.W_OK) for each in ("entries", "races") if (board.folder / each).exists()
    ):
        raise denied
    try:
        _join_races(board, entry)
        board.drop(entry)
    except PermissionError as error:
        raise denied from error


def _write_pages(board: Board, entry: Entry) -> None:
    """Write the pages again that are written after each judged submission, without one that is gone. Raises UserError."""
    if site := board.settings.site:
        from minfer.board import page

        try:
            page.build(board, Path(site))
        except UserError as error:
            raise UserError(f"the page of {entry.id} is still in {site}, because {error}") from error


def _join_races(board: Board, entry: Entry) -> None:
    """Before a submission is removed, record that each kernel that beat it also beats those that it beat, unless the two have
    been run beside each other."""
    met = {(race["challenger"], race["holder"]) for race in board.races()}
    races = [race for race in board.races() if race["verdict"] == FASTER]
    for before in (race for race in races if race["challenger"] == entry.id):
        for after in (race for race in races if race["holder"] == entry.id):
            slower = Ratio.of(before)
            ratio = Ratio.of(after).over(Ratio(1 / slower.value, 1 / slower.high, 1 / slower.low))
            if (after["challenger"], before["holder"]) not in met:
                board.save_race(after | {"holder": before["holder"], "joined": True} | ratio.as_dict())


def quarantine(board: Board, entry: Entry, why: str) -> None:
    """Set a harmful submission aside: its entry, files and log go to a folder that only the owner may read. Raises
    UserError."""
    if os.geteuid() not in (0, board.folder.stat().st_uid):
        raise UserError(f"only the owner of {board.folder} may set a submission aside; ask them")
    folder = board.folder / "quarantine" / entry.id
    folder.mkdir(parents=True, exist_ok=True)
    for name, digest in entry.files.items():
        if content := board.content(digest):
            (folder / f"{name}.txt").write_bytes(content)  # so that no program takes it for a source
    log = board.folder / "logs" / f"{entry.id}.log"
    if log.is_file():
        shutil.copy(log, folder / "log.txt")
    write_json(folder / "entry.json", asdict(entry) | {"why": why}, 0o600)
    _drop(board, entry)
    print(f"{entry.id} is in {folder}, with its files and its log, and has no rank any longer.")
    _write_pages(board, entry)


def export(board: Board, file: Path) -> None:
    """Write all that may be kept to one .tar.gz file: entries, files, races, closed seasons, and the rows of closed seasons.
    Raises UserError."""
    closed = {season.name for season in list_seasons(board) if not season.is_open}
    entries = [entry for entry in board.entries() if entry.keep]
    partial = file.with_name(f".{file.name}.{os.getpid()}.tmp")  # a half file must not look like a whole one
    try:
        with tarfile.open(partial, "w:gz") as packed:
            for entry in entries:
                _add(packed, f"entries/{entry.id}.json", json.dumps(asdict(entry), indent=1).encode())
                for name, digest in entry.files.items():
                    if content := board.content(digest):
                        _add(packed, f"sources/{entry.id}/{name}", content)
                rows = board.folder / "rows" / f"{entry.id}.parquet"
                if entry.season in closed and rows.is_file():  # rows name shapes
                    _add(packed, f"rows/{entry.id}.parquet", rows.read_bytes())
            ids = {entry.id for entry in entries}
            for race in board.races():
                if {race["challenger"], race["holder"]} <= ids:
                    _add(packed, f"races/{race['challenger']}-{race['holder']}.json", json.dumps(race).encode())
            for season in list_seasons(board):
                if season.name in closed:
                    _add(packed, f"seasons/{season.name}.json", json.dumps(asdict(season), indent=1).encode())
        os.replace(partial, file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"cannot write {file}: {error.strerror or error}; choose another file") from error
    print(f"{file}: {_count(len(entries))}, {file.stat().st_size / 1e6:.1f} MB.")


def _add(packed: tarfile.TarFile, name: str, content: bytes) -> None:
    about = tarfile.TarInfo(name)
    about.size, about.mode = len(content), 0o644
    packed.addfile(about, io.BytesIO(content))


def print_seasons(board: Board, as_json: bool) -> None:
    """The seasons, without what must stay hidden while they are open."""
    seasons = list_seasons(board)
    names = {season.name for season in seasons}
    others = [path for path in sorted((board.folder / "seasons").glob("*.json")) if path.stem not in names]
    if as_json:
        hidden = lambda season: ("seed",) if season.is_open else ()
        of = [{k: v for k, v in asdict(s).items() if k not in hidden(s)} for s in seasons]
        _print_json("seasons", of, others)
        return
    rows = [("season", "opened (UTC)", "closed (UTC)", "hidden problems", "problem 0")]
    for season in seasons:
        shape = ", ".join([season.shown["dtype"], *(f"{axis}={size}" for axis, size in season.shown["shape"].items())])
        closed = "" if season.closed is None else day(season.closed)
        rows.append((season.name, day(season.opened), closed, str(season.problems), shape))
    print(align(rows))
    _name_unreadable(others, f"season{'s' * (len(others) != 1)}")


def print_ranks(board: Board, as_json: bool) -> None:
    """The standings of each season and device."""
    found = standings(board)
    if as_json:
        _print_json("boards", [_write_board(*key, of) for key, of in found.items()], board.unreadable)
        return
    for (season, device), of in found.items():
        print(f"{season} on {device}")
        rows = [("rank", "score", "interval", "kernel", "submission")]
        for place in of:
            tie = "=" if place.tied else ""
            score = place.score
            rows.append((f"{place.rank}{tie}", score.shown, score.interval, place.entry.title, place.entry.id))
        print(align(rows))
    if not found:
        print("No submission has a rank yet.")
    _name_unreadable(board.unreadable, f"submission{'s' * (len(board.unreadable) != 1)}")


def _write_board(season: str, device: str, of: list[Standing]) -> dict[str, Any]:
    return {
        "season": season,
        "device": device,
        "standings": [
            {"rank": s.rank, "tied": s.tied, "submission": s.entry.id, "name": s.entry.name, "who": s.entry.who}
            | {"score": s.entry.score}
            for s in of
        ],
    }
