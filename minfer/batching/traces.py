"""Traces of requests: drawn from a distribution of lengths, or read from a file."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

FIELDS = ("arrival", "length")


class TraceError(ValueError):
    """A trace that cannot be used: which line, and why, in a sentence."""


@dataclass(frozen=True)
class Request:
    """A request: its number in the trace, from 0, when it arrives, in seconds from 0, and its length in tokens, at least 1.
    Raises ValueError for others."""

    number: int
    arrival: float
    length: int

    def __post_init__(self) -> None:
        known = type(self.length) is int and isinstance(self.arrival, Real)
        if not known or self.length < 1 or not 0 <= self.arrival < math.inf:
            raise ValueError(
                f"request {self.number} must have an int from 1 as its length and arrive at a time from 0, got "
                f"{self.length!r} tokens at {self.arrival!r} s"
            )


def uniform(count: int, *, shortest: int = 1, longest: int, rate: float = math.inf, seed: int = 0) -> list[Request]:
    """`count` requests whose lengths are uniform from `shortest` to `longest`. In all three kinds of trace requests arrive at
    random, `rate` a second (a Poisson process), or all at once where it is infinite; a seed always gives the same trace, and
    its lengths do not depend on the rate. Raises ValueError for numbers that do not fit."""
    _check(count, shortest, longest, rate)
    rng = np.random.default_rng(seed)
    return _arriving(rng.integers(shortest, longest, count, endpoint=True), rate, rng)


def zipf(count: int, *, longest: int, exponent: float = 1.0, rate: float = math.inf, seed: int = 0) -> list[Request]:
    """As `uniform`, but the length n, from 1 to `longest`, has a probability proportional to n^-exponent (Zipf's law): most
    requests are short, and a few are as long as allowed."""
    _check(count, 1, longest, rate)
    if not 0 <= exponent <= 100:
        raise ValueError(f"a trace takes an exponent from 0 to 100, got {exponent}")
    rng = np.random.default_rng(seed)
    weights = np.arange(1, longest + 1, dtype=np.float64) ** -exponent
    return _arriving(1 + rng.choice(longest, count, p=weights / weights.sum()), rate, rng)


def lognormal(
    count: int, *, median: float, sigma: float = 1.0, longest: int, rate: float = math.inf, seed: int = 0
) -> list[Request]:
    """As `uniform`, but the logarithm of a length is normal around that of `median` with the standard deviation `sigma`, as it
    roughly is of prompts in serving; what falls outside is 1 or `longest`."""
    _check(count, 1, longest, rate)
    if not (0 < median < math.inf and 0 <= sigma <= 100):
        raise ValueError(f"a trace takes a median above 0 and a sigma from 0 to 100, got {median} and {sigma}")
    rng = np.random.default_rng(seed)
    drawn = np.exp(np.minimum(math.log(median) + sigma * rng.standard_normal(count), 64.0))
    return _arriving(np.clip(np.rint(drawn), 1, longest).astype(np.int64), rate, rng)


def _check(count: int, shortest: int, longest: int, rate: float) -> None:
    for name, number in (("count", count), ("shortest length", shortest), ("longest length", longest)):
        if type(number) is not int or not abs(number) < 1 << 62:
            raise ValueError(f"a trace takes an int below 2^62 as its {name}, got {number!r}")
    if count < 0:
        raise ValueError(f"a trace takes a count of at least 0, got {count}")
    if not 1 <= shortest <= longest:
        raise ValueError(f"a trace takes lengths with 1 <= shortest <= longest, got {shortest} and {longest}")
    if not rate > 0:
        raise ValueError(f"a trace takes a rate above 0 requests a second, got {rate}")


def _arriving(lengths: Any, rate: float, rng: np.random.Generator) -> list[Request]:
    gaps = rng.exponential(1.0, len(lengths)) / rate
    return [
        Request(number, float(arrival), int(length))
        for number, (arrival, length) in enumerate(zip(np.cumsum(gaps), lengths, strict=True))
    ]


def read(path: str | Path) -> list[Request]:
    """The trace in a file: JSON lines (`.jsonl`), each such as {"arrival": 0.25, "length": 181}, or CSV (`.csv`) whose header
    names `arrival` and `length` and perhaps others, which are not used. Arrivals are seconds from 0 and do not go back. Empty
    lines are skipped; an empty file is an empty trace. Raises TraceError, OSError where the file cannot be read."""
    path = Path(path)
    kinds = {".jsonl": _json_lines, ".csv": _csv_lines}
    if path.suffix.lower() not in kinds:
        raise TraceError(f"{path} is not a trace: its name must end in {' or '.join(kinds)}")
    found: list[Request] = []
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        for line, values in kinds[path.suffix.lower()](path, file):
            try:
                request = Request(len(found), _arrival(values["arrival"]), _length(values["length"]))
                if found and request.arrival < found[-1].arrival:
                    raise ValueError(f"arrival {request.arrival} is before that of the request above it")
            except KeyError as error:
                raise TraceError(f"{path}, line {line}: it has no {error.args[0]}") from None
            except ValueError as error:
                raise TraceError(f"{path}, line {line}: {error}") from None
            found.append(request)
    return found


def _json_lines(path: Path, file: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise TraceError(f'{path}, line {line}: it is no JSON object such as {{"arrival": 0.25, "length": 181}}')
        yield line, values


def _csv_lines(path: Path, file: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    rows = csv.reader(file)
    header: list[str] = []
    try:
        for row in rows:
            if not any(cell.strip() for cell in row):
                continue
            cells = [cell.strip() for cell in row]
            if header:
                yield rows.line_num, dict(zip(header, cells, strict=False))
            elif any(cells.count(name) != 1 for name in FIELDS):
                raise TraceError(f"{path}, line {rows.line_num}: the header must name arrival and length once each")
            else:
                header = cells
    except csv.Error as error:
        raise TraceError(f"{path}, line {rows.line_num}: {error}") from None


def _arrival(value: Any) -> float:
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"arrival must be seconds from 0, got {_short(value)}")
    return seconds


def _length(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch("[0-9]{1,18}", value):  # of CSV
        value = int(value)
    if type(value) is not int or value < 1:
        raise ValueError(f"length must be a whole number of tokens from 1, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**18 else "a number of more than 18 digits"
    return text if len(text) <= 60 else text[:57] + "..."
