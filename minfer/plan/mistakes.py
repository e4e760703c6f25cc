"""What a mistake in a request sounds like: one sentence, with the nearest valid words."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import typing
from collections.abc import Sequence
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from minfer.plan.config import Config, UserError, groups, nearest
from minfer.plan.known import parameters

FLAGS = ("--help", "--version", "--cfg", "--config-dir", "--multirun")  # what we suggest for a mistyped flag

SEVERAL = ("kernel", "dtype", "profiler", "extra", "sweeps")  # keys that take a list of names


def explain(error: BaseException, words: Sequence[str] | None = None) -> str:
    """What Hydra or OmegaConf has to say of the words of a request, by default those of the command line: one line that names
    the key and the nearest valid ones."""
    words = sys.argv[1:] if words is None else words
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    text = "\n".join(str(link) for link in chain)

    if not isinstance(error, HydraException | OmegaConfBaseException) or "Config group override" in text:
        for word in words:
            group, _, option = word.lstrip("+~").partition("=")
            if group in groups() and option not in groups()[group]:
                return f"{group} has no option {option!r}; {nearest(option, groups()[group])}"
    for link in chain:
        if isinstance(link, OverrideParseException):
            if link.override in groups()["sweep"]:
                return f"cannot read {link.override!r}; did you mean +sweep={link.override}?"
            quote = "; quote it, or the shell splits it at its blanks" if "{" in link.override else ""
            return f"cannot read {link.override!r}: {str(link).splitlines()[0]}{quote}"
        if isinstance(link, MarkedYAMLError) and (mark := link.problem_mark):
            return f"{mark.name}, line {mark.line + 1}: {link.problem}; correct the file"
    if found := re.search(r"Additional config directory '(.*)' not found", text):
        return f"--config-dir is {found[1]}, and there is no such folder; correct it or make the folder"
    if found := re.search(r"Ambiguous value for argument '([^=]*)=(.*)'", text):
        key, values = found.groups()
        if key.lstrip("+") == "sweep":
            return several_sweeps(f"{key}={values}", values)
        if key in groups() and key != "profiler":
            return f"{key} takes one option, not several; choose one of {values}"
        return f"ambiguous {key}={values}; for several values write '{key}=[{values}]'"
    if "Multiple values for sweep" in text:
        names = [word.partition("=")[2] for word in words if word.lstrip("+").startswith("sweep=")]
        return several_sweeps(" ".join(f"+sweep={name}" for name in names), ",".join(names))
    if found := re.search(r"Could not (?:find|load) '(?:[\w/]*/)?(\w+)/([^']*)'", text):
        group, option = found.groups()
        if group in groups():
            return f"{group} has no option {option!r}; {nearest(option, groups()[group])}"
    if found := re.search(r"Could not override '\+?([\w.@/]+)'\. ?\n?No match in the defaults list", text):
        return f"nothing to override for {found[1]!r}; to choose one, write +{found[1]}=..."
    if "Unexpected type for root: NoneType" in text:
        for group, option in re.findall(r"(?m)^\+*(\w+)\.(\w+)\.", "\n".join(words)):
            if option in groups().get(group, []):
                return f"{group}.{option} is set, and not chosen; add {group}={option}"
    if found := re.search(r"full_key: ([\w.\[\]]+)", text):
        key = found[1]
        if "not in" in text:
            return unknown_key(key)
        if "is not a ListConfig" in text or "Cannot merge DictConfig with ListConfig" in text:
            given = next((word.partition("=")[2] for word in words if word.lstrip("+").startswith(f"{key}=")), "")
            return f"bad value for {key!r}: it takes a list; write '{key}=[{given}]'"
        problem = next(str(link) for link in chain if "full_key" in str(link)).splitlines()[0]
        return f"bad value for {key!r}: {problem[0].lower()}{problem[1:]}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def several_sweeps(word: str, names: str) -> str:
    """The complaint about a word that asks for several sweeps, `names` with commas between them."""
    return f"{word}: +sweep takes one sweep; to run several in one run, write 'sweeps=[{names}]'"


def check_command_line(words: Sequence[str]) -> None:
    """Raise UserError for a flag that is not one, and for words that Hydra would take for something else."""
    parser = get_args_parser()
    parser.exit_on_error = parser.allow_abbrev = False
    try:
        others = parser.parse_known_args(words)[1]
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: {error.message}") from error
    if flag := next((word for word in others if word.startswith("-")), None):
        name = flag.partition("=")[0]
        key = name.lstrip("-").replace("-", "_")
        hint = f"keys have no dashes: write {key}=..." if key in _keys("") else nearest(name, FLAGS)
        raise UserError(f"unknown flag {name!r}; {hint}")
    given: dict[str, str] = {}
    for word in words:
        if found := re.fullmatch(r"\+{1,2}sweep=\[(.*,.*)\]", word):
            raise UserError(several_sweeps(word, found[1]))
        key, _, value = word.lstrip("+").partition("=")
        if key != "sweep" and given.get(key, value) != value:  # Hydra refuses two sweeps itself
            print(f"Note: {_twice(key, given[key], value)}.", file=sys.stderr)
        given[key] = value


def _twice(key: str, first: str, last: str) -> str:
    """What is said of a key with two values. Hydra takes the last, so that a script may add words to its own."""
    said = f"{key} is there twice, and {key}={last} counts"
    if key in SEVERAL or key.startswith("params."):
        said += f"; for both write '{key}=[{first.strip('[]')},{last.strip('[]')}]'"
    return said


def unknown_key(key: str) -> str:
    """The complaint about a key that the config does not have."""
    parent, _, last = key.rpartition(".")
    return f"no such key {key!r}; {nearest(last, _keys(parent), f'{parent}.' if parent else '')}"


def check_keys(composed: Any, parent: str = "") -> None:
    """Raise UserError for a key that only a `+` on the command line could bring in."""
    valid = _keys(parent)
    for name in composed:
        key = f"{parent}.{name}" if parent else str(name)
        if valid and name not in valid:
            raise UserError(unknown_key(key))
        if key == "params" and composed.get("extra"):
            continue  # perhaps those of an op that these files bring: the plan will see
        if OmegaConf.is_dict(composed._get_node(name)) and OmegaConf.select(composed, name) is not None:
            check_keys(composed[name], key)


def _keys(parent: str) -> list[str]:
    """The valid keys below a dotted key of the config, at the top also the groups; empty where any key may stand."""
    if parent == "params":
        return parameters()
    kind: Any = Config
    for name in parent.split(".") if parent else []:
        hint = typing.get_type_hints(kind).get(name) if dataclasses.is_dataclass(kind) else None
        kind = next((part for part in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(part)), None)
    found = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    return found + ([] if parent else ["sweep"])
