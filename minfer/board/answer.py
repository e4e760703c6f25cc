"""The answer to a submitter: one dictionary, which `--json` prints, and the same as text.

The keys, which every answer has all:

    schema         1; raised when a key changes its meaning
    submission     its id; "" if it is not in the archive (a syntax error, or refused)
    op, name, who, season, device
    verdict        ranked (it has a score); or a row's status (wrong, compile_error, crashed, ...); refused: it was timed, and
                   does not count; not_judged: it was not run, the run did not end, or it was removed
    message        why there is no rank, or why it cannot take the record yet, in a sentence; else ""
    compiler       {file, line, message} of the compiler's first error, or null
    failing        {problem, index, got, expected, bound} of the first wrong element, or null
    shown          {dtype, params, shape, status, ratio, us, baseline_us, gbps, copy_gbps} of the problem that everybody may
                   see; gbps: the op's least bytes over the kernel's time; copy_gbps: a long copy on this machine, in this run
    problems       [{number, status, ratio: {value, low, high} or null, roof_percent}] of the hidden ones
    score          {value, low, high}: the geometric mean of the hidden problems' ratios to the baseline, or null
    rank, of       the rank, and the number of kernels that are ranked, or null; the rank is null, too, if another submission
                   of the same name keeps the place
    tied           titles of the kernels that share the rank
    leader         {submission, title, score, ahead: {value, low, high}}, or null; `ahead` is the leader's score over this one's
    race           {holder, verdict, value, low, high} of a run beside the record's holder, or null without one
    code           {what: value} of the submission's machine code, where known
    differences    [{what, mine, best, factor}]: the two numbers that differ most from the leader's
    next           what to do next, in a sentence

Of a hidden problem an answer has the number, but no size, no time, and nothing that a kernel's process wrote.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minfer.board.folder import Board, Entry
from minfer.board.score import FASTER, Ratio, Standing, is_unproven, may_beat, rank
from minfer.rows.rules import is_too_wide

if TYPE_CHECKING:
    from minfer.rows import store

SCHEMA = 1
COMPILER = re.compile(r"^(?P<file>[^\s:()]+)[:(](?P<line>\d+)[:)][^A-Za-z]*(?P<message>.*)$")
ELEMENT = re.compile(
    r"at (?P<index>\[[\d, ]*\]): got (?P<got>\S+?)(?:, expected (?P<expected>\S+?))?(?:, bound (?P<bound>\S+?))?(?=[\s,;)]|$)"
)
# How the messages begin that a judge writes if the failure is not the kernel's (`minfer.bench.judged`, `minfer.worker`).
NOT_ITS_FAULT = ("could not be judged", "the judge failed", "the baseline failed")
LEAST_SHARE = 1.0  # percent; a smaller share counts as this much when two are compared
NAMES = {
    "vector": "vector instructions, of those that compute (%)",
    "wide": "instructions on vectors of 256 bits or more, of those that compute (%)",
    "fma": "fused multiply-adds, of the instructions that compute (%)",
    "calls": "calls, of all instructions (%)",
    "tensor": "instructions of the tensor cores, of those that compute (%)",
    "moves16": "loads and stores of 16 bytes, of those of global memory (%)",
    "registers": "registers of a thread",
    "shared_bytes": "static shared memory of a block (bytes)",
    "local_bytes": "stack and spills of a thread (bytes)",
    "workspace_bytes": "memory beyond the operands (bytes)",
    "launches": "kernels launched by a call",
}
PROVE = "minfer board prove {op}, which times it in the same rounds as the record's holder"
ADVICE = {
    "vector": "write its inner loops so that the compiler can make vectors of them",
    "wide": "give its inner loops independent iterations, so that wider vectors fit",
    "fma": "let products and sums be fused",
    "calls": "let the compiler inline what its inner loops call",
    "tensor": "let the tensor cores multiply",
    "moves16": "load and store 16 bytes at a time",
    "registers": "look at its registers: they decide how many warps an SM holds",
    "shared_bytes": "look at its shared memory: it decides how many blocks an SM holds",
    "local_bytes": "spilled registers go through memory; use fewer in its inner loop",
    "workspace_bytes": "keep intermediate results on the chip",
    "launches": "fuse its kernels",
}


def begin(entry: Entry) -> dict[str, Any]:
    """An answer in which nothing is decided yet."""
    found: dict[str, Any] = {"schema": SCHEMA, "submission": entry.id, "op": entry.op, "name": entry.name}
    found |= {"who": entry.who, "season": entry.season, "device": entry.device, "verdict": "not_judged", "message": ""}
    found |= dict.fromkeys(("compiler", "failing", "shown", "score", "rank", "of", "leader", "race"))
    return found | {"problems": [], "tied": [], "code": {}, "differences": [], "next": ""}


def describe_rows(
    answer: dict[str, Any], rows: Mapping[int, store.Row], refused: Mapping[int, str], count: int
) -> None:
    """Fill in what the rows of a submission say. `refused`: why a measured row does not count, by the number of its problem.
    `count`: the number of hidden problems."""
    from minfer.rows.store import MEASURED  # imports pyarrow, which a list of submissions need not wait for

    for number, row in sorted(rows.items()):
        answer["device"] = answer["device"] or row["device"] or ""
        if number == 0:
            answer["shown"] = _describe_shown(row)
        else:
            answer["problems"].append(_describe_hidden(number, row, number in refused))
    missing = [number for number in range(count + 1) if number not in rows]
    bad = [number for number in sorted(rows) if rows[number]["status"] not in MEASURED]
    if bad:
        _describe_failure(answer, bad[0], rows[bad[0]])
    elif missing:
        answer |= {"verdict": "not_judged", "message": f"the run ended before problem {missing[0]} was judged"}
        answer["next"] = "submit it again; if it ends early again, ask the board's owner for the log"
    elif refused:
        number, why = next(iter(sorted(refused.items())))
        answer |= {"verdict": "refused", "message": f"on problem {number} it {why}"}
        answer["next"] = "submit it again" if "again" in why else "compute the result in the kernel's own code"
    else:
        answer["verdict"] = "ranked"


def _describe_shown(row: store.Row) -> dict[str, Any]:
    ratio = _ratio(row)
    return {
        "dtype": row["dtype"],
        "params": row["params"],
        "shape": row["shape"],
        "status": row["status"],
        "ratio": ratio and ratio.as_dict(),
        "us": row["judged_us"],
        "baseline_us": row["judged_baseline_us"],
        "gbps": row["judged_gbps"],
        "copy_gbps": dict(row["peaks"] or ()).get("copy_gbps"),
    }


def _describe_hidden(number: int, row: store.Row, refused: bool) -> dict[str, Any]:
    ratio, roof = _ratio(row), row["judged_percent_of_peak"]
    about = {"number": number, "status": "refused" if refused else row["status"], "ratio": ratio and ratio.as_dict()}
    return about | {"roof_percent": None if roof is None else round(roof, 1)}


def _describe_failure(answer: dict[str, Any], number: int, row: store.Row) -> None:
    """Fill in why a problem got no time."""
    status, message = row["status"], row["message"] or ""
    if status == "error" and message.startswith(NOT_ITS_FAULT):
        answer |= {
            "verdict": "not_judged",
            "message": f"problem {number} could not be judged in several runs: the machine may be too busy",
        }
        answer["next"] = "submit it again when the machine is less busy"
        return
    answer["verdict"] = status
    if status == "compile_error":
        found = COMPILER.match(message)
        about = (found["file"], int(found["line"]), found["message"]) if found else ("", 0, message)
        answer |= {"message": f"it does not compile: {message}", "compiler": _describe_error(*about)}
        answer["next"] = "correct the compiler's first error, and submit it again"
        return
    if status == "wrong" and (element := ELEMENT.search(message)):
        answer["failing"] = {"problem": number} | _describe_element(element, number > 0)
    if number == 0:
        answer["message"] = message
        answer["next"] = "repeat problem 0 on your machine, where its shape is shown, and correct the kernel"
    else:
        from minfer.rows.store import STATUSES

        what = STATUSES[status]
        answer["message"] = f"problem {number}, which is hidden: {status}: {what}"
    if status == "timeout":
        answer["next"] = "make it faster; if it is fast elsewhere, submit it again when the machine is less busy"
    elif number:
        answer["next"] = (
            "try shapes of the op's distribution that differ from problem 0: other sizes, odd ones, the other dtypes and"
            " parameters"
        )


def describe_syntax(answer: dict[str, Any], file: str, line: int, message: str) -> None:
    """Fill in the syntax error of a Python file. line: 0 if that is not known."""
    answer |= {"verdict": "compile_error", "compiler": _describe_error(file, line, message)}
    where = f"line {line} of {file}" if line else f"the file {file}"
    answer |= {
        "message": f"{where}: {message}; it was not run, and does not count towards the hourly limit",
        "next": f"correct {where}, and submit it again",
    }


def _describe_error(file: str, line: int, message: str) -> dict[str, Any]:
    return {"file": file, "line": line, "message": message}


def _describe_element(found: re.Match[str], hidden: bool) -> dict[str, Any]:
    """The element that failed. On a hidden problem its values have three digits, and there is no index, because an index would
    tell something about a size."""
    number = lambda text: None if text is None else _number(text, 3 if hidden else 7)
    index = None if hidden else [int(word) for word in re.findall(r"\d+", found["index"])]
    return {"index": index} | {name: number(found[name]) for name in ("got", "expected", "bound")}


def _number(text: str, digits: int) -> float | str | None:
    """A number. If JSON has none like it, a word such as nan."""
    try:
        value = float(text)
    except ValueError:
        return None
    return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)


def _ratio(row: store.Row) -> Ratio | None:
    values = [row[f"judged_speedup{end}"] for end in ("", "_low", "_high")]
    if not all(value and 0 < value < math.inf for value in values):
        return None
    return Ratio(*values)


def ratios(rows: Mapping[int, store.Row]) -> dict[int, Ratio]:
    """The ratios of the hidden problems that have one, by their numbers."""
    return {number: ratio for number, row in sorted(rows.items()) if number and (ratio := _ratio(row))}


def describe_now(board: Board, entry: Entry, why: str = "") -> dict[str, Any]:
    """The answer to a submission that has a score, with the place that it has now. why: why it could not be run beside the
    record's holder."""
    rivals = {e.id: e for e in board.entries() if (e.season, e.device) == (entry.season, entry.device)}
    if entry.id not in rivals:
        return describe_removed(entry)
    if not rivals[entry.id].ranks:  # it has just failed as the record's holder in the run of another submission
        return rivals[entry.id].result
    answer = begin(entry) | entry.result
    races = [race for race in board.races() if {race["challenger"], race["holder"]} <= rivals.keys()]
    for race in races:
        if race["challenger"] == entry.id and not race.get("joined"):
            about = {key: race[key] for key in ("verdict", "value", "low", "high")}
            answer["race"] = {"holder": rivals[race["holder"]].title} | about
    describe_place(answer, entry, rank([*rivals.values()], races), races, why)
    return answer


def describe_removed(entry: Entry) -> dict[str, Any]:
    """The answer to a submission that was removed from the archive while it was judged."""
    return begin(entry) | {
        "message": "it was removed from the board while it was judged",
        "next": "do nothing if you removed it; else ask the board's owner why",
    }


def describe_place(
    answer: dict[str, Any],
    entry: Entry,
    standings: Sequence[Standing],
    races: Iterable[Mapping[str, Any]],
    why: str = "",
) -> None:
    """Fill in rank, leader, differences and what to do next, of a submission that has a score."""
    leader = standings[0].entry
    own = next(s for s in standings if (s.entry.who, s.entry.name) == (entry.who, entry.name))
    has_place, leads = own.entry.id == entry.id, leader.id == entry.id
    answer |= {"score": entry.score, "of": len(standings), "code": describe_code(entry)}
    answer["rank"] = own.rank if has_place else None
    answer["tied"] = [s.entry.title for s in standings if s.rank == own.rank and s is not own] if has_place else []
    ahead = Ratio(1.0, 1.0, 1.0) if leads else Ratio.of(leader.score).over(Ratio.of(entry.score))
    answer["leader"] = {"submission": leader.id, "title": leader.title, "score": leader.score, "ahead": ahead.as_dict()}
    answer["differences"] = [] if leads else differences(entry, leader)[:2]
    unproven = is_unproven(entry, leader, races)
    answer["message"] = _say_who_stays(entry, own, leader, len(standings), unproven, why)
    answer["next"] = f"run {PROVE.format(op=entry.op)}" if unproven else _advise(answer)


def _say_who_stays(entry: Entry, own: Standing, leader: Entry, count: int, unproven: bool, why: str) -> str:
    """Why a submission has no place of its own, or no record yet; empty if it has all that it can have."""
    keeps = f"your submission {own.entry.id} of this name keeps its place, rank {own.rank} of {count}"
    if unproven:
        cannot = "it cannot take the record yet" if own.entry.id == entry.id else keeps
        return f"it was not run beside the record's holder{f' ({why})' if why else ''}, so {cannot}"
    if own.entry.id == entry.id:
        return ""
    if own.entry.id == leader.id and may_beat(entry, leader):
        return f"in the same rounds it was not surely faster than the record's holder, so {keeps}"
    return f"{keeps}, because it has the higher score"


def differences(mine: Entry, best: Entry) -> list[dict[str, Any]]:
    """The numbers that both submissions have; those that differ most come first. A ratio that is not shown is left out."""
    found = []
    for problem in mine.result.get("problems", []):
        other = next((p for p in best.result.get("problems", []) if p["number"] == problem["number"]), None)
        ratios = [each["ratio"] for each in (problem, other) if each and each.get("ratio")]
        if len(ratios) == 2 and not any(is_too_wide(ratio["low"], ratio["high"]) for ratio in ratios):
            what = f"ratio to the baseline on problem {problem['number']}"
            found.append(_difference(what, ratios[0]["value"], ratios[1]["value"], 0.0))
    for name in mine.opcodes.keys() & best.opcodes.keys():
        found.append(_difference(NAMES[name], mine.opcodes[name], best.opcodes[name], LEAST_SHARE))
    for name in mine.static.keys() & best.static.keys():
        found.append(_difference(NAMES[name], mine.static[name], best.static[name], 1.0))
    problems = sorted((each for each in found if "problem" in each["what"]), key=_how_much, reverse=True)
    others = sorted((each for each in found if "problem" not in each["what"]), key=_how_much, reverse=True)
    return [
        *others[:1],
        *problems[:1],
        *others[1:],
        *problems[1:],
    ]  # a problem's ratio says where it loses time, the other number may say why


def describe_code(entry: Entry) -> dict[str, float]:
    """What is known of a submission's machine code, by its name in sentences."""
    return {NAMES[name]: value for name, value in (entry.static | entry.opcodes).items() if name in NAMES}


def _difference(what: str, mine: float, best: float, least: float) -> dict[str, Any]:
    factor = max(mine, least) / max(best, least)
    return {"what": what, "mine": mine, "best": best, "factor": round(factor, 3)}


def _how_much(difference: Mapping[str, Any]) -> tuple[float, str]:
    return abs(math.log(max(difference["factor"], 1e-9))), difference["what"]


def _advise(answer: Mapping[str, Any]) -> str:
    if answer["leader"]["submission"] == answer["submission"]:
        if slow := _find_slowest(answer):
            return (
                f"it holds the record, but on problem {slow['number']} the baseline is {1 / slow['ratio']['value']:.3g} times"
                " as fast; make it faster there, and submit it under the same name"
            )
        return "it holds the record; each new kernel that might be faster is timed in the same rounds"
    if answer["rank"] == 1:
        return (
            "neither it nor the record's holder is surely faster, though both were timed in the same rounds; make it faster,"
            " and submit it under the same name"
        )
    names = {text: name for name, text in NAMES.items()}
    for difference in answer["differences"]:
        name = names.get(difference["what"])
        if name and not 0.8 < difference["factor"] < 1.25:
            return f"{ADVICE[name]}; then submit it under the same name, and the better one keeps the place"
    return "look at the problem where it loses most, and submit it again under the same name"


def _find_slowest(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The hidden problem with the lowest ratio, of those on which the baseline is surely faster."""
    slower = [
        problem
        for problem in answer["problems"]
        if (ratio := problem["ratio"]) and ratio["high"] < 1 and not is_too_wide(ratio["low"], ratio["high"])
    ]
    return min(slower, key=lambda problem: problem["ratio"]["value"], default=None)


def text(answer: Mapping[str, Any]) -> str:
    """An answer as people read it."""
    about = [f"submission {answer['submission']}"] if answer["submission"] else []
    about += [f"season {answer['season']}", *([f"on {answer['device']}"] if answer["device"] else [])]
    lines = [f"{answer['op']}/{answer['name']} by {answer['who']}: {', '.join(about)}"]
    if answer["verdict"] == "ranked":
        lines += _write_place(answer)
    else:
        lines.append(f"No rank: {answer['verdict']}.")
    if answer["message"]:
        lines.append(f"{answer['message'][0].upper()}{answer['message'][1:].rstrip('.')}.")
    if failing := answer["failing"]:
        where = f" at {failing['index']}" if failing["index"] is not None else ""
        right = f", expected {failing['expected']}" if failing["expected"] is not None else ""
        lines.append(f"The first wrong element of problem {failing['problem']}{where}: got {failing['got']}{right}.")
    if answer["code"] and not answer["differences"]:
        said = "; ".join(f"{what}: {value:.3g}" for what, value in answer["code"].items())
        lines.append(f"Its machine code: {said}.")
    for difference in answer["differences"]:
        lines.append(
            f"Differs from the leader: {difference['what']}: {difference['mine']:.3g} against {difference['best']:.3g}."
        )
    lines.append(f"Next: {answer['next']}.")
    return "\n".join(lines)


def _write_place(answer: Mapping[str, Any]) -> list[str]:
    """The lines about score, rank, problems and leader."""
    score, leader, count = answer["score"], answer["leader"], len(answer["problems"])
    place = f"Rank {answer['rank']} of {answer['of']}" if answer["rank"] else "No rank of its own"
    tied = f", shared with {', '.join(answer['tied'])}" if answer["tied"] else ""
    lines = [
        f"{place}{tied}: {Ratio.of(score).times} the baseline's speed over {count} hidden problem{'s' * (count != 1)}."
    ]
    shown = answer["shown"]
    if shown and shown["ratio"]:
        size = ", ".join(f"{axis}={length}" for axis, length in shown["shape"].items())
        lines.append(
            f"  problem 0 (shown: {shown['dtype']}, {size})  {Ratio.of(shown['ratio'])}  {shown['us']:,.1f} µs against"
            f" {shown['baseline_us']:,.1f} µs"
        )
        if shown.get("gbps") and shown.get("copy_gbps"):
            lines.append(f"    {shown['gbps']:.3g} GB/s; a long copy has {shown['copy_gbps']:.3g} GB/s here")
    for problem in answer["problems"]:
        roof = f"  {problem['roof_percent']:g} % of the roof" if problem["roof_percent"] is not None else ""
        lines.append(f"  problem {problem['number']}  {Ratio.of(problem['ratio'])}{roof}")
    if race := answer["race"]:
        lines.append(
            f"In the same rounds as the record's holder, {race['holder']}, it was {Ratio.of(race).times} as fast:"
            f" {race['verdict']}."
        )
    if leader["submission"] != answer["submission"]:
        ahead, is_own = Ratio.of(leader["ahead"]), leader["title"] == f"{answer['name']} by {answer['who']}"
        who = f"your submission {leader['submission']}" if is_own else leader["title"]
        if ahead.verdict == FASTER:
            lines.append(f"The leader, {who}, is {ahead.times} as fast.")
        else:
            lines.append(f"The leader is {who}, with {ahead.times} this kernel's score.")
    return lines
