"""`minfer warm TRACE`: compile ahead of time what a trace asks for, so that the next process finds it in the build cache.

A trace has a JSON object a line: `{"recipe": "seq_sum_cpp", "size": 128, "calls": 1000}`; `size` is a number, or a list of them
where a recipe has several axes; `calls` is 1 where it is missing. Empty lines, and those that begin with #, say nothing.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from minfer.ops import load_file
from minfer.specialise import recipes  # noqa: F401  registers ours
from minfer.specialise.background import Background
from minfer.specialise.buckets import Buckets, Size, named, numbers
from minfer.specialise.policy import Ledger, Policy
from minfer.specialise.recipe import REGISTERED, Recipe
from minfer.specialise.trial import Outcome

USAGE = "usage: minfer warm TRACE [buckets=exact] [threshold=1] [budget=64] [extra=FILE]"


class TraceError(Exception):
    """A trace or an option that cannot be used; the message says which and why."""


def sizes(trace: Path) -> dict[str, Counter[Size]]:
    """The calls of each size, by recipe. Raises TraceError."""
    found: dict[str, Counter[Size]] = {}
    try:
        lines = trace.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read the trace {trace}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            entry = json.loads(line)
            size, calls = entry["size"], entry.get("calls", 1)
            size = tuple(size) if isinstance(size, list) else size
            if not all(type(each) is int and each > 0 for each in (*numbers(size), calls)):
                raise ValueError("sizes and calls must be whole numbers from 1")
            recipe = REGISTERED[entry["recipe"]]
            if len(numbers(size)) != len(recipe.axes):
                raise ValueError(f"a size of {recipe.name} is of {' and '.join(recipe.axes)}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = f"no recipe {error}" if isinstance(error, KeyError) and "recipe" in line else error
            raise TraceError(f"{trace}:{number}: {why}; a line is like {EXAMPLE}") from error
        found.setdefault(recipe.name, Counter())[size] += calls
    return found


EXAMPLE = '{"recipe": "seq_sum_cpp", "size": 128, "calls": 1000}'


def warm(trace: Path, policy: Policy, buckets: Buckets, say: Callable[[str], None]) -> list[Outcome]:
    """Compile and try what a trace asks for, most called first, and say a line for each. Raises TraceError."""
    outcomes = []
    for name, calls in sizes(trace).items():
        recipe = REGISTERED[name]
        ledger = Ledger(policy, buckets)
        ledger.count(calls)
        background = Background(recipe, policy.build_s)
        try:
            for key in ledger.decide()[0]:
                outcomes.append(background.outcome(key))
                say(told(recipe, recipe.named(key), outcomes[-1]))
                if outcomes[-1].status == "full":
                    return outcomes
        finally:
            background.close()
    return outcomes


def told(recipe: Recipe, named: str, outcome: Outcome) -> str:
    """A line on a variant."""
    if outcome.why:
        return f"{named}: {outcome.status}: {outcome.why}"
    how = f"{outcome.speedup:.2f} times as fast as {recipe.fallback}"
    seconds = f"compiled in {outcome.compile_s:.1f} s" if outcome.trial_s else "found in the build cache"
    return f"{named}: {outcome.status}, {how}, {seconds}"


def main(words: Iterable[str]) -> int:
    """Returns the exit status: 0, 1 where a compile failed or a trial was undecided. Raises TraceError for a mistake."""
    traces = [word for word in words if "=" not in word]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    if len(traces) != 1 or not options.keys() <= {"buckets", "threshold", "budget", "extra"}:
        raise TraceError(USAGE)
    try:
        if extra := options.get("extra"):
            load_file(Path(extra).absolute())
        budget = int(options.get("budget", "64"))
        policy = Policy(threshold=int(options.get("threshold", "1")), budget=budget, most_compiles=budget)
        buckets = named(options.get("buckets", "exact"))
    except (ValueError, ImportError, OSError) as error:
        raise TraceError(f"{error}; {USAGE}") from error
    outcomes = warm(Path(traces[0]), policy, buckets, lambda line: print(line, flush=True))
    if not outcomes:
        print("the trace asks for nothing", file=sys.stderr)
    return int(any(outcome.status in ("failed", "full", "undecided") for outcome in outcomes))
