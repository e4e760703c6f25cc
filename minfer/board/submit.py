"""One submission, from its files to its answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from minfer.bench import RULES, rules_of
from minfer.board import answer as answers
from minfer.board import judging, page
from minfer.board.folder import HOUR_S, JUDGED, PENDING, REFUSED, Board, Entry, hash_files, make_id, write_bytes
from minfer.board.score import TIE, Ratio, geometric_mean, holders, may_beat
from minfer.board.season import Season, find_open, list_seasons
from minfer.board.stage import Refusal, check_name, find_kind
from minfer.ops import python_source
from minfer.plan.config import UserError
from minfer.process.text import make_printable
from minfer.rows import store

DEVICES = {"cpp": ("cpu",), "cuda": ("cuda",), "triton": ("cuda",), "python": ("cpu", "cuda")}  # by kind of kernel
STATIC = ("registers", "shared_bytes", "local_bytes", "workspace_bytes", "launches")


def submit(
    board: Board, op: str, files: Mapping[str, bytes], who: str, name: str = "", device: str = "", licence: str = "",
    keep: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Have a submission judged and return its answer (`minfer.board.answer`). `files`: the source first. Raises UserError for
    what cannot be judged at all; this does not count towards the limit."""
    source = next(iter(files))
    check_name("a person", who)
    name = check_name("a kernel", name or Path(source).stem)
    kind = find_kind(op, source, files[source])
    season = find_open(board, op, device, DEVICES[kind])
    if kind in ("cuda", "triton") and season.device == "cpu":
        raise UserError(f"{source} is for a GPU, and the season {season.name} is on the CPU; submit a .cpp or .py file")
    if kind == "cpp" and season.device == "cuda":
        raise UserError(f"{source} is for a CPU, and the season {season.name} is on a GPU; submit a .cu or .py file")
    if broken := _find_broken(season, files, who, name, kind):
        return broken
    entry = _record(board, season, files, who, name, kind, licence, keep)
    try:
        judged = judging.run(board, season, [entry])
        _note(board, season, entry, judged)
    except BaseException as error:
        entry.state = REFUSED
        entry.result = answers.begin(entry) | {"message": _say(error), "next": "submit it again"}
        with contextlib.suppress(UserError):  # of a full disk; the first error says more
            board.update(entry)
        raise
    answer = _finish_raced(board, season, entry)
    if not keep and season.name in {each.name for each in list_seasons(board) if not each.is_open}:
        board.forget_files(entry)  # the season ended meanwhile
    return answer


def _begin(season: Season, who: str, name: str, kind: str) -> dict[str, Any]:
    """An answer about files that are not put into the archive."""
    return answers.begin(Entry("", season.op, name, who, time.time(), kind, {}, "", season.name))


def _find_broken(season: Season, files: Mapping[str, bytes], who: str, name: str, kind: str) -> dict[str, Any] | None:
    """The answer to a submission if one of its files is no Python. It is not recorded and not run, so it costs nothing."""
    for file, content in files.items():
        if file.endswith(".py") and (found := python_source.find_mistake(content)):
            answer = _begin(season, who, name, kind)
            answers.describe_syntax(answer, file, found[0], make_printable(found[1]))
            return answer
    return None


def _say(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    return " ".join(str(error).split()) or type(error).__name__


def _record(
    board: Board, season: Season, files: Mapping[str, bytes], who: str, name: str, kind: str, licence: str, keep: bool
) -> Entry:
    """Put a submission into the archive before it is judged. Raises Refusal if the person has reached the limit, or if the
    same files are there already."""
    with board.lock("entries"):
        earlier = board.entries()
        now, most = time.time(), board.settings.per_hour
        # If SLURM or a full disk ended a run before it had a row, the submission does not count towards the limit.
        counted = [each for each in earlier if each.fingerprint or each.state == PENDING]
        recent = [each.when for each in counted if each.who == who and abs(now - each.when) < HOUR_S]
        if len(recent) >= most:
            wait = max(1, round((sorted(recent)[-most] + HOUR_S - now) / 60))
            raise Refusal(
                f"{who} has submitted {len(recent)} kernels within an hour, and the limit is {most}; wait {wait} min",
                f"wait {wait} min, and submit it again",
            )
        digests = {file: board.keep(content) for file, content in files.items()}
        content = hash_files(digests)
        same = [e for e in earlier if e.content == content and e.season == season.name and e.ranks]
        if same:
            raise Refusal(
                f"the same files are submission {same[0].id}, {same[0].title}; change something, or look at it",
                f"change the source, or run minfer archive show {same[0].id}",
            )
        entry = Entry(
            make_id(season.name, who, str(time.time_ns()), content), season.op, name, who, now, kind, digests, content,
            season.name, licence, keep, rules=RULES, task=season.shown,
            number=1 + max((each.number for each in earlier), default=0),
        )  # fmt: skip
        board.save(entry)
    return entry


def _note(board: Board, season: Season, entry: Entry, judged: judging.Judged) -> None:
    """Fill in an entry from its rows, and store the rows."""
    if not board.has(entry):
        entry.state, entry.result = REFUSED, answers.describe_removed(entry)
        return
    rows = judged.rows.get(entry.kernel, {})
    write_bytes(board.folder / "logs" / f"{entry.id}.log", judged.log.encode("utf-8", errors="replace"))
    if rows:
        store.write(store.to_table(judged.table(entry.kernel)), board.folder / "rows" / f"{entry.id}.parquet")
        (board.folder / "rows" / f"{entry.id}.parquet").chmod(0o600)
    first: store.Row = next(iter(rows.values()), {})
    entry.device = first.get("device") or ""
    entry.fingerprint = first.get("source") or ""
    entry.static = {name: float(first[name]) for name in STATIC if first.get(name) is not None}
    measured = {number: row for number, row in rows.items() if number and row["status"] in store.MEASURED}
    refused = {n: why for n, row in measured.items() if (why := judging.why_refused(row, entry.kind))}
    entry.result = answers.begin(entry)
    answers.describe_rows(entry.result, rows, refused, season.problems)
    entry.result["message"] = make_printable(entry.result["message"])
    entry.state = JUDGED if entry.result["verdict"] == "ranked" else REFUSED
    if entry.state == JUDGED:
        entry.score = geometric_mean(list(answers.ratios(rows).values())).as_dict()
        entry.opcodes = judged.opcodes.get(entry.kernel, {})
    board.update(entry)


def _others(board: Board, entry: Entry) -> list[Entry]:
    """The other submissions of the same season and device."""
    rivals = [each for each in board.entries() if (each.season, each.device) == (entry.season, entry.device)]
    return [each for each in rivals if each.id != entry.id]


def _race(board: Board, season: Season, entry: Entry) -> None:
    """Run a submission beside the record's holder, if there is one, unless its score is surely lower."""
    while entry.ranks and (chain := holders(_others(board, entry), board.races())) and may_beat(entry, chain[-1]):
        if run_race(board, season, entry, chain[-1]):
            return


def _finish_raced(board: Board, season: Season, entry: Entry) -> dict[str, Any]:
    """The answer to a judged submission, after a run beside the record's holder if it needs one. If that run ends early, the
    answer says why."""
    why = ""
    try:
        _race(board, season, entry)
    except (UserError, OSError, KeyboardInterrupt) as error:
        why = _say(error)
    return finish(board, entry, why)


def run_race(board: Board, season: Season, challenger: Entry, holder: Entry) -> dict[str, Any] | None:
    """Have two submissions judged in the same rounds, problem by problem, and write down which is faster. Returns None if the
    holder failed: then it has no rank any longer, because a kernel that once fails cannot keep others from the record; or if
    the holder was removed meanwhile. Raises UserError."""
    for _ in range(2):  # if it ran out of time or memory once, that may not be its own fault
        judged = judging.run(board, season, [holder, challenger], beside=holder)
        failed = next((row for row in judged.table(holder.kernel) if judging.has_failed(row)), None)
        if failed is None or failed["status"] not in ("timeout", "oom"):
            break
    if not board.has(challenger):
        raise UserError(f"submission {challenger.id} was removed meanwhile")
    if not board.has(holder):
        return None
    if failed:
        holder.state = REFUSED
        why = f"when it was run again beside {challenger.title}, a problem ended with: {failed['status']}"
        holder.result |= {"verdict": failed["status"], "message": why, "next": "correct it, and submit it again"}
        holder.result |= {"rank": None, "of": None, "tied": [], "leader": None, "differences": []}
        board.update(holder)
        return None
    for row in judged.table(challenger.kernel)[:1]:
        if row["device"] != challenger.device:
            raise UserError(
                f"that run was on {row['device']} and not on {challenger.device}; let cluster in settings.json choose the nodes"
            )
    rows = [judged.rows.get(challenger.kernel, {}).get(number) for number in range(1, 1 + season.problems)]
    counted = [row for row in rows if row and not judging.why_refused(row, challenger.kind)]
    pairs = [ratio for row in counted if (ratio := judging.ratio_beside(row))]
    race: dict[str, Any] = {"challenger": challenger.id, "holder": holder.id, "season": season.name}
    race |= {"when": time.time(), "rules": rules_of("judged")}
    if len(pairs) == season.problems:
        ratio = geometric_mean(pairs)
        race |= {"verdict": ratio.verdict} | ratio.as_dict()
    else:
        race |= {"verdict": TIE} | Ratio(1.0, 1.0, 1.0).as_dict() | {"note": "not all problems could be judged"}
    board.save_race(race)
    return race


def finish(board: Board, entry: Entry, why: str = "") -> dict[str, Any]:
    """The answer to a judged submission, with its place among those that the board has now. why: why it could not be run beside
    the record's holder."""
    if entry.ranks:
        entry.result = answers.describe_now(board, entry, why)
        if entry.result["verdict"] == "ranked":
            board.update(entry)
        if site := board.settings.site:
            with contextlib.suppress(UserError):  # the answer does not depend on the pages
                page.build(board, Path(site))
    return entry.result


def prove(board: Board, op: str, device: str = "") -> str:
    """On each device of an open season, have one submission that might be faster than the record's holder timed in the same
    rounds: of those that have not been, the one with the best score. Returns the results, in sentences. Raises
    UserError."""
    season = find_open(board, op, device)
    said = []
    for name in dict.fromkeys(entry.device for entry in board.entries() if entry.season == season.name and entry.ranks):
        entries = [e for e in board.entries() if (e.season, e.device) == (season.name, name) and e.ranks]
        races = board.races()
        holder = holders(entries, races)[-1]
        met = {
            frozenset((race["challenger"], race["holder"]))
            for race in races
            if race.get("rules") == rules_of("judged") and not race.get("joined")
        }
        rivals = [e for e in entries if e.id != holder.id and may_beat(e, holder)]
        better = [e for e in rivals if frozenset((e.id, holder.id)) not in met]
        if not better:
            timed = "each kernel that might be faster has been timed beside it"
            why = timed if rivals else "each other kernel has a surely lower score"
            said.append(f"{name}: {holder.title} holds the record, and {why}.")
            continue
        best = max(better, key=lambda entry: entry.score["value"])
        if not (race := run_race(board, season, best, holder)):
            said.append(
                f"{name}: {holder.title} has no rank any longer, because it failed in this run or was removed; run"
                f" minfer board prove {season.op} again."
            )
            continue
        said.append(f"{name}: {best.title} beside {holder.title}: {race['verdict']}, {Ratio.of(race).times} as fast.")
    return "\n".join(said) or f"{season.name} has no kernel with a score."


def submit_each(
    board: Board, op: str, sources: Sequence[Mapping[str, bytes]], who: str, device: str = "", licence: str = "",
    keep: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Have several sources judged in one run, which compiles them side by side; for programs that write kernels. Each is a
    submission with the name of its file. Only the one with the best score is run beside the record's holder. Returns the
    answers, in the order of `sources`; a source that is refused has one, too, which says why, and the others still run.
    Raises UserError if the whole batch cannot run (no open season, SLURM does not answer) and if all are refused."""
    check_name("a person", who)
    files = [next(iter(each)) for each in sources]
    if len({*map(_name, files)}) < len(files):
        raise UserError("two of the files have the same name, which is that of the submission; rename one of them")
    kinds: dict[str, str] = {}
    refused: dict[str, Refusal] = {}
    for file, each in zip(files, sources, strict=True):
        with _noting(refused, file):
            check_name("a kernel", _name(file))
            kinds[file] = find_kind(op, file, each[file])
    if not kinds:
        raise refused[files[0]]
    season = find_open(board, op, device, set.intersection(*(set(DEVICES[kind]) for kind in kinds.values())))
    for file in (file for file, kind in kinds.items() if season.device not in DEVICES[kind]):
        refused[file] = Refusal(f"{file} is not for the device of the season {season.name}")
    found: dict[str, dict[str, Any]] = {}
    entries: dict[str, Entry] = {}
    try:
        for file, each in zip(files, sources, strict=True):
            if file in refused:
                continue
            if broken := _find_broken(season, each, who, _name(file), kinds[file]):
                found[file] = broken
                continue
            with _noting(refused, file):
                entries[file] = _record(board, season, each, who, _name(file), kinds[file], licence, keep)
        if len(refused) == len(files):
            raise refused[files[0]]
        if entries:
            judged = judging.run(board, season, list(entries.values()))
        for entry in entries.values():
            _note(board, season, entry, judged)
    except BaseException as error:
        for entry in entries.values():
            if entry.state == PENDING:
                entry.state = REFUSED
                entry.result = answers.begin(entry) | {"message": _say(error), "next": "submit it again"}
                with contextlib.suppress(UserError):  # of a full disk; the first error says more
                    board.update(entry)
        raise
    for file, why in refused.items():
        about = {"message": _say(why), "next": why.advice}
        found[file] = _begin(season, who, _name(file), kinds.get(file, "")) | about
    ranked = [file for file, entry in entries.items() if entry.ranks]
    if best := max(ranked, key=lambda file: entries[file].score["value"], default=None):
        found[best] = _finish_raced(board, season, entries[best])
    return [found.get(file) or finish(board, entries[file]) for file in files]


def _name(file: str) -> str:
    """What a submission of a file is called."""
    return Path(file).stem


@contextlib.contextmanager
def _noting(refused: dict[str, Refusal], file: str) -> Iterator[None]:
    """Note why a file is refused, and go on."""
    try:
        yield
    except Refusal as error:
        refused[file] = error
