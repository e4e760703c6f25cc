"""How much slower a case may become before `minfer compare --fail-over` fails: one limit for all cases, or a file with a limit
for each device and case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import yaml


class Unreadable(Exception):
    """A limit that cannot be read. The message is one sentence."""


@dataclass(frozen=True)
class Limits:
    """Rules: a pattern of devices, a pattern of cases, and the fraction by which such a case may be slower. The first rule that
    matches a case counts. A case that no rule matches fails only if it no longer works."""

    said: str  # as the user wrote it
    rules: Sequence[tuple[str, str, float]]

    def find(self, device: str, case: str) -> float:
        fitting = (part for of, which, part in self.rules if fnmatchcase(device, of) and fnmatchcase(case, which))
        return next(fitting, math.inf)


def parse(text: str) -> Limits:
    """Read `3%`, `0.03`, or a YAML file that maps patterns of devices to patterns of cases to such values. Raises
    Unreadable."""
    if not text.endswith((".yaml", ".yml")):
        part = _parse_part(text, "--fail-over")
        return Limits(f"more than {100 * part:g} %", [("*", "*", part)])
    try:
        found = yaml.safe_load(Path(text).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"cannot read {text}: {getattr(error, 'strerror', None) or 'it is no text'}") from error
    except yaml.YAMLError as error:
        raise Unreadable(f"cannot read {text}: it is no YAML") from error
    if not isinstance(found, dict) or not all(isinstance(of, dict) for of in found.values()):
        raise Unreadable(f"{text} has to map devices to cases to parts, as in 'NVIDIA H200': {{'hgemm/*': 3%}}")
    rules = [
        (str(device), str(case), _parse_part(str(part), f"{text}, {device}, {case}"))
        for device, cases in found.items()
        for case, part in cases.items()
    ]
    return Limits(f"more than {text} allows", rules)


def _parse_part(text: str, where: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise Unreadable(f"{where} is {text!r}; it takes a part below 1 or below 100 %, such as 3%")
    return value
