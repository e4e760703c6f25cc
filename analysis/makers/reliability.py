"""The table of faults in docs/evidence.md, from what the tests on a real SLURM noted: `python analysis/make_reliability.py`.

`MINFER_OUTCOMES=tests/cluster/outcomes.json pytest tests/cluster` records the outcome of each fault. No line of the
table is typed; --check proves that it is up to date.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from minfer.analysis.tables.markdown import plain, update

COMMAND = "python analysis/make_reliability.py"
PAGE = Path("docs/evidence.md")
OUTCOMES = Path("tests/cluster/outcomes.json")


def lines(outcomes: dict[str, dict[str, Any]]) -> list[str]:
    """The table: a line a fault, those that failed first."""
    if not outcomes:
        return [
            "Nothing was broken yet: `MINFER_OUTCOMES=tests/cluster/outcomes.json uv run pytest tests/cluster` does it."
        ]
    told = [
        "| What breaks | Rows in the end | Lost | Twice | The rest was done by | Test |",
        "| :-- | --: | --: | --: | :-- | :-- |",
    ]
    for name, found in sorted(outcomes.items(), key=lambda item: (item[1]["outcome"] == "passed", item[0])):
        passed = found["outcome"] == "passed"
        share = f"{found['rows']} of {found['cases']}" if "rows" in found else "—"
        by = found.get("finished_by", "—") if passed else "—"
        if passed and found["rows"] < found["cases"]:
            by = "nobody: it is reported, with its reason"
        counts = [str(found.get(key, "—")) for key in ("lost", "twice")]
        verdict = "passed" if passed else f"**{found['outcome']}**"
        told.append(f"| {' | '.join([plain(name), share, *counts, by, verdict])} |")
    passed = sum(found["outcome"] == "passed" for found in outcomes.values())
    versions = sorted({found["slurm"] for found in outcomes.values()})
    commits = sorted({str(found["commit"]) for found in outcomes.values()})
    where = f"SLURM {', '.join(versions)}; commit {', '.join(commits)}"
    head = f"{passed} of {len(outcomes)} faults passed on {where}."
    return [f"{head} *Lost*: finished rows that were missing or other later.", "", *told]


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--outcomes", type=Path, default=OUTCOMES, help=f"what the tests noted (default: {OUTCOMES})")
    parser.add_argument("--page", type=Path, default=PAGE, help=f"file to rewrite (default: {PAGE})")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the table is out of date")
    options = parser.parse_args()
    try:
        outcomes = json.loads(options.outcomes.read_text()) if options.outcomes.exists() else {}
        body = "\n".join(lines(outcomes)) + "\n"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        print(f"{COMMAND}: {options.outcomes} is not what the tests write: {error!r}", file=sys.stderr)
        return 1
    if why := update(options.page, "reliability", body, COMMAND, options.check):
        print(f"{COMMAND}: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
