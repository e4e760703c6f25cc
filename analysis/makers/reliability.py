"""The table of faults in docs/evidence.md, from what the tests on a real SLURM noted: `python analysis/make.py reliability`.

`MINFER_OUTCOMES=tests/cluster/outcomes.json pytest tests/cluster` records the outcome of each fault. No line of the
table is typed; --check proves that it is up to date.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from minfer.analysis.makers import Maker, Options
from minfer.analysis.tables.markdown import escape, update

COMMAND = "python analysis/make.py reliability"


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
        share = f"{found['rows']} of {found['cases']}" if found.get("cases") else "—"  # some tests look at no rows
        by = found.get("finished_by", "—") if passed and found.get("cases") else "—"
        if passed and found["rows"] < found["cases"]:
            by = "nobody: it is reported, with its reason"
        counts = [str(found.get(key, "—")) for key in ("lost", "twice")]
        verdict = "passed" if passed else f"**{found['outcome']}**"
        told.append(f"| {' | '.join([escape(name), share, *counts, by, verdict])} |")
    passed = sum(found["outcome"] == "passed" for found in outcomes.values())
    versions = sorted({found["slurm"] for found in outcomes.values()})
    commits = sorted({str(found["commit"]) for found in outcomes.values()})
    where = f"SLURM {', '.join(versions)}; commit {', '.join(commits)}"
    head = f"{passed} of {len(outcomes)} faults passed on {where}."
    return [f"{head} *Lost*: finished rows that were missing or other later.", "", *told]


def write(_: pa.Table, options: Options) -> list[str]:
    try:
        outcomes = json.loads(options.outcomes.read_text()) if options.outcomes.exists() else {}
        body = "\n".join(lines(outcomes)) + "\n"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return [f"{options.outcomes} is not what the tests write: {error!r}"]
    problem = update(options.docs / "evidence.md", "reliability", body, COMMAND, options.check)
    return [problem] if problem else []


MAKER = Maker(write)
