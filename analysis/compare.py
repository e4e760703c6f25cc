"""Two sets of rows, case by case: `python analysis/compare.py A B`, or `minfer compare`.

A and B are runs, folders, parquet files or git revisions of `results`. What is compared was not timed side by side. Where
both rows of a case have the same baseline, its paired speed-ups are compared, because the baseline saw the same clock as the
kernel in either run; else the two times, which is said. With `--fail-over 3%` the exit status is 1 where a case is surely
slower by more than that, or no longer works. It is 2 if a file cannot be read and no case failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from minfer.analysis.data import limits, sources, verdicts
from minfer.analysis.data.limits import Limits
from minfer.analysis.data.verdicts import BETTER, FAILED, OWN, WORSE, Compared
from minfer.analysis.tables.markdown import escape, pluralise, significant, table_lines
from minfer.rows.problems import natural
from minfer.rows.rules import REGIMES

MOST_SHOWN = 60  # cases on a terminal; the files have all
HEADER = ["Case", "Device", "A", "B", "B against A", "95 % interval", "Verdict", "How"]
RULE = [":--", ":--", "--:", "--:", "--:", ":--", ":--", ":--"]


class Mistake(Exception):
    """Nothing can be compared; one sentence that says why and what to do."""


def main(arguments: Iterable[str] | None = None) -> int:
    """Returns the exit status: 1 where `--fail-over` found something; 2 for a mistake or a file that cannot be read; else 0."""
    parser = argparse.ArgumentParser(prog="minfer compare", description=(__doc__ or "").splitlines()[0])
    for name in "AB":
        parser.add_argument(name, help="a run, a folder, a parquet file, or a git revision of the results")
    parser.add_argument("--results", type=Path, default=sources.RESULTS, help="where runs are looked for")
    parser.add_argument("--regime", choices=REGIMES, default="cold")
    parser.add_argument("--fail-over", metavar="3%", help="exit with 1 where a case is slower by more; or a YAML file")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the cases as JUnit XML")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the whole table as Markdown")
    options = parser.parse_args(list(arguments) if arguments is not None else None)
    try:
        return run(options)
    except (Mistake, sources.Unknown, limits.Unreadable) as error:
        print(f"minfer compare: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """Compare what the options name. Raises Mistake, Unknown and Unreadable."""
    allowed = limits.parse(options.fail_over) if options.fail_over is not None else None
    with tempfile.TemporaryDirectory() as kept:
        first, second = (
            sources.find_files(word, options.results, Path(kept), revisions=True) for word in (options.A, options.B)
        )
        found = verdicts.compare(first, second, options.regime)
    sources.print_skipped(found.bad)
    if not found.cases:
        raise Mistake(
            f"no case is in both {options.A} and {options.B} on the same device, among {found.only_a} and {found.only_b} rows;"
            " compare runs of the same sweep"
        )
    cases = sorted(found.cases, key=lambda case: (case.rank, natural(case.case)))
    failed = [case for case in cases if allowed and case.fails(allowed.find(case.device, case.case))]
    said = summary(cases, found.only_a, found.only_b, failed, allowed)
    lines = [cells(case) for case in cases]
    shown = [line for case, line in zip(cases, lines, strict=True) if case.changed][:MOST_SHOWN]
    if shown:
        print("\n".join(align([HEADER, *shown])))
    elif all(case.verdict == "tie" for case in cases):
        print("Every case is a tie.")
    print(said)
    title = f"# {escape(options.A)} (A) and {escape(options.B)} (B), {options.regime}"
    if options.markdown:
        body = table_lines(HEADER, RULE, [[escape(cell) for cell in line] for line in lines])
        _write(options.markdown, "\n".join([title, "", said, "", *body, ""]))
    if options.junit:
        _write(options.junit, verdicts.junit(f"{options.A} {options.B}", cases, failed if allowed else None))
    return 1 if failed else 2 if found.bad else 0


def summary(cases: list[Compared], only_a: int, only_b: int, failed: list[Compared], allowed: Limits | None) -> str:
    """How many cases there are of each verdict, and what was not compared."""
    counts = Counter(case.verdict for case in cases)
    parts = [
        f"{counts[verdict]} {verdict}" for verdict in (*WORSE, FAILED, "tie", *BETTER, "unknown") if counts[verdict]
    ]
    text = f"{pluralise(len(cases), 'case')}: {', '.join(parts)}."
    for count, side in ((only_a, "A"), (only_b, "B")):
        if count:
            text += f" {pluralise(count, 'row')} of {side} are of cases that only {side} has."
    if allowed:
        text += f" Slower by {allowed.said}, or broken: {len(failed)}.{_explain_spared(cases, failed)}"
    return (
        text + " A and B were timed at different moments: a ratio is B's speed-up over A's against the same baseline."
    )


def _explain_spared(cases: list[Compared], failed: list[Compared]) -> str:
    """Says why some slower cases are not among those that are slower by more than is allowed; empty if there are no such
    cases."""
    spared = [case for case in cases if case.verdict == "slower" and case not in failed]
    own = sum(case.how == OWN for case in spared)
    near = len(spared) - own
    reasons = [f"for {near} the interval ends within what is allowed"] if near else []
    reasons += [f"{own} {'is' if own == 1 else 'are'} the baseline's own time"] if own else []
    counted = "is slower and does" if len(spared) == 1 else "are slower and do"
    return f" {pluralise(len(spared), 'more case')} {counted} not count: {', '.join(reasons)}." if spared else ""


def cells(case: Compared) -> list[str]:
    """A case's line. The ratio is A's time over B's: above 1, B is faster."""
    ratio = f"{case.ratio:.4f}×" if case.ratio else "—"
    interval = f"{case.low:.4f}–{case.high:.4f}" if case.low and case.high else "—"
    sides = [f"{significant(us)} µs" if us else status for us, status in zip(case.us, case.statuses, strict=True)]
    return [case.case, case.device, *sides, ratio, interval, case.verdict, case.how]


def align(lines: list[list[str]]) -> list[str]:
    """Cells in columns, for a terminal."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise Mistake(f"cannot write {path}: {error.strerror or error}; choose another file") from error


if __name__ == "__main__":
    sys.exit(main())
