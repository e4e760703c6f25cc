"""A board's folder: its settings, its seasons, and the archive of submissions. This module does not import PyTorch, so that
listing is quick.

settings.json      limits and where submissions run; written with the defaults when the first season is opened
seasons/*.json     each with the seed of its problems; only the owner may read one until it is closed (mode 600)
entries/*.json     one submission each: who, when, what, and the answer
objects/ab/abc…    the files of submissions, by the SHA-256 of their content
rows/*.parquet     the rows of each submission; they name shapes, so only the owner may read them
races/*.json       a run with two submissions each, and which of them was faster
logs/*.log         what a submission's processes printed
inbox/OP/          where people put files, and find the answers
quarantine/        submissions that were set aside, each with its files and its log
work/              runs in progress
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from minfer.board.steps import Steps
from minfer.plan.config import UserError, nearest

DEFAULT = "board"  # the folder, where none is named
HOUR_S = 3600.0
MOST_BYTES = 4 << 20  # of a file of a submission
MOST_FILES = 32  # of a submission
ID = re.compile("[0-9a-f]{10}")
PENDING, JUDGED, REFUSED = "pending", "judged", "refused"  # states of an entry


@dataclass
class Settings:
    """What the owner of a board chooses, in settings.json.

    per_hour: how many kernels a person may submit within an hour. problems: the number of hidden problems in a season. timing:
    a preset of conf/timing. cluster: values that replace those of conf/cluster/auto.yaml, such as {"partition": "course",
    "time_min": 10}. case_timeout_s, build_timeout_s: the time limits for one problem and for the compiler, as for a launch.
    site: the folder to which the pages are written again after each judged submission; if it is empty, no pages are written."""

    per_hour: int = 20
    problems: int = 5
    timing: str = "quick"
    cluster: dict[str, Any] = field(default_factory=dict)
    case_timeout_s: float = 60.0
    build_timeout_s: float = 300.0
    site: str = ""


@dataclass
class Entry:
    """A submission.

    files: name -> SHA-256 of its content, the source first. content: a hash of the files. kind: cpp, cuda, triton or python.
    season: the name of its season. device: the name of the processor or GPU that it was judged on. task: the problem that
    everybody may see. score: value, low, high. static: registers and the like, where known; opcodes: the share of each kind
    of instruction. result: the answer to the submitter."""

    id: str
    op: str
    name: str
    who: str
    when: float  # seconds since 1970
    kind: str
    files: dict[str, str]
    content: str
    season: str
    licence: str = ""
    keep: bool = False
    state: str = PENDING
    device: str = ""
    fingerprint: str = ""
    rules: int = 0
    task: dict[str, Any] = field(default_factory=dict)
    score: dict[str, float] = field(default_factory=dict)
    static: dict[str, float] = field(default_factory=dict)
    opcodes: dict[str, float] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    number: int = 0  # of the submissions to this board, from 1; a clock may step backwards

    @property
    def kernel(self) -> str:
        """The name of its kernel in rows."""
        return f"{self.name}@{self.id}"

    @property
    def title(self) -> str:
        return f"{self.name} by {self.who}"

    def order(self) -> tuple[int, float, str]:
        """What puts submissions in the order in which they came."""
        return self.number, self.when, self.id

    @property
    def ranks(self) -> bool:
        return self.state == JUDGED and bool(self.score)


class Board:
    """The files of a board."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.unreadable: list[Path] = []  # files of submissions, for example of a copy that is not complete
        self.steps = Steps()  # of the runs of this process

    @classmethod
    def find(cls, folder: Path) -> Board:
        """An existing board. Raises UserError."""
        try:
            there = (folder / "settings.json").is_file()
        except OSError as error:
            raise UserError(f"cannot look into {folder}: {error.strerror}; ask its owner for access") from error
        if not there:
            raise UserError(
                f"{folder} is no board; name one with --board, or make one: minfer board open-season OP --board {folder}"
            )
        return cls(folder)

    @classmethod
    def make(cls, folder: Path) -> Board:
        """A board, made if it does not exist. Raises UserError."""
        board = cls(folder)
        try:
            board._make_folders()
        except OSError as error:
            raise UserError(
                f"cannot make a board in {folder}: {error.strerror}; name another folder with --board"
            ) from error
        if not (file := board.folder / "settings.json").exists():
            write_json(file, asdict(Settings()))
        return board

    def _make_folders(self) -> None:
        for name in ("seasons", "entries", "objects", "rows", "races", "logs", "quarantine", "work", "inbox"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for name in ("rows", "logs", "quarantine", "work"):
            (self.folder / name).chmod(0o700)
        (self.folder / "inbox").chmod(0o1777)  # everybody may put files there, and delete their own only

    @property
    def settings(self) -> Settings:
        """Raises UserError where the file cannot be read."""
        file = self.folder / "settings.json"
        try:
            found = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {file}: {error}; correct it, or delete it and open a season") from error
        if not isinstance(found, dict):
            raise UserError(f"{file} is not a JSON object; correct it, or delete it and open a season")
        if unknown := sorted(found.keys() - {each.name for each in fields(Settings)}):
            raise UserError(
                f"{file} has {unknown[0]}, which this version of minfer does not know; correct it, or use a newer minfer"
            )
        for name, value in found.items():
            if wanted := _find_misfit(value, getattr(Settings(), name)):
                raise UserError(f"{name} is {json.dumps(value)[:80]} in {file}; write {wanted}")
        return Settings(**found)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """One process at a time holds a lock: `entries` to count and add submissions, `machine` to measure on this machine."""
        with open(self.folder / f"{name}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # Entries.

    def entries(self) -> list[Entry]:
        """All submissions, the oldest first. One that cannot be read is left out, and its file is in `unreadable`."""
        read = {path: _load(path) for path in self._files("entries")}
        self.unreadable = [path for path, entry in read.items() if entry is None]
        return sorted((entry for entry in read.values() if entry), key=Entry.order)

    def entry(self, word: str) -> Entry:
        """A submission by its id, or by the beginning of one. Raises UserError."""
        paths = [path for path in self._files("entries") if path.stem.startswith(word)] if word else []
        if len(paths) == 1 and (entry := _load(paths[0])):
            return entry
        if len(paths) > 1:
            raise UserError(f"{word} begins the ids of {len(paths)} submissions; give more digits")
        ids = [path.stem for path in self._files("entries")]
        raise UserError(
            f"there is no submission {word!r}; {nearest(word, ids[-20:]) if ids else 'the archive is empty'}"
        )

    def save(self, entry: Entry) -> None:
        write_json(self.folder / "entries" / f"{entry.id}.json", asdict(entry))

    def has(self, entry: Entry) -> bool:
        """Whether a submission is still in the archive; it may be removed while it is judged."""
        return (self.folder / "entries" / f"{entry.id}.json").exists()

    def update(self, entry: Entry) -> None:
        """Save a submission again, unless it was removed meanwhile."""
        if self.has(entry):
            self.save(entry)

    def drop(self, entry: Entry) -> None:
        """Remove a submission, with the rows, the log, the races and the files that are only its own."""
        for own in (f"entries/{entry.id}.json", f"rows/{entry.id}.parquet", f"logs/{entry.id}.log"):
            (self.folder / own).unlink(missing_ok=True)
        for race in self.folder.glob(f"races/*{entry.id}*.json"):
            race.unlink(missing_ok=True)
        self.forget_files(entry)

    def forget_files(self, entry: Entry) -> None:
        """Delete those files of a submission that no other submission has."""
        used = {digest for other in self.entries() if other.id != entry.id for digest in other.files.values()}
        for digest in {*entry.files.values()} - used:
            self._object(digest).unlink(missing_ok=True)

    # Files by their content.

    def keep(self, content: bytes) -> str:
        """Store a file. Returns the SHA-256 of its content."""
        digest = hashlib.sha256(content).hexdigest()
        path = self._object(digest)
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_bytes(path, content)
        return digest

    def content(self, digest: str) -> bytes | None:
        """The content of a stored file; None where it was removed."""
        try:
            found = self._object(digest).read_bytes()
        except OSError:
            return None
        return found if hashlib.sha256(found).hexdigest() == digest else None

    def source(self, entry: Entry) -> str:
        """The text of the first file of a submission. Raises UserError where it is not kept."""
        if (content := self.content(next(iter(entry.files.values()), ""))) is None:
            raise UserError(f"the source of {entry.id} is not kept; its author did not allow it, or it was removed")
        return content.decode("utf-8", errors="replace")

    def _object(self, digest: str) -> Path:
        return self.folder / "objects" / digest[:2] / digest

    # Races.

    def races(self) -> list[dict[str, Any]]:
        """Which submission was run beside which, the oldest first: `challenger` and `holder` are their ids, and `verdict` says
        whether the challenger is faster."""
        found = []
        for path in self._files("races"):
            try:
                found.append(json.loads(path.read_text("utf-8")))
            except (OSError, ValueError):
                continue
        return sorted(found, key=lambda race: float(race.get("when", 0)))

    def save_race(self, race: Mapping[str, Any]) -> None:
        write_json(self.folder / "races" / f"{race['challenger']}-{race['holder']}.json", race)

    def _files(self, folder: str) -> Iterator[Path]:
        yield from sorted(path for path in (self.folder / folder).glob("*.json") if not path.name.startswith("."))


def _find_misfit(value: Any, usual: Any) -> str:
    """What a setting must be, if a value is not; else empty."""
    if isinstance(usual, (str, dict)):
        return "" if isinstance(value, type(usual)) else "a string" if isinstance(usual, str) else "a JSON object"
    whole = isinstance(usual, int)
    fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool) and value > 0
    return "" if fits else f"a {'whole ' if whole else ''}number above 0"


def _load(path: Path) -> Entry | None:
    try:
        return Entry(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def make_id(*parts: str) -> str:
    """A name for a submission."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]


def hash_files(files: Mapping[str, str]) -> str:
    """One hash of the contents of several files; their names do not matter."""
    return hashlib.sha256("".join(sorted(files.values())).encode()).hexdigest()


def write_json(path: Path, content: Mapping[str, Any], mode: int = 0o644) -> None:
    """Write a file in one step: another process sees all of it or nothing. Raises UserError."""
    write_bytes(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode(), mode)


def write_bytes(path: Path, content: bytes, mode: int = 0o644) -> None:
    """The same for any content."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}; free space there, and repeat the command") from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
