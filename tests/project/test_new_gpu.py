"""`docs/new-gpu.md`: each command can be typed as it stands, on a card that minfer does not know."""

from __future__ import annotations

import re
import shlex

import pytest

from minfer.analysis import make
from minfer.plan import cases
from tests.cli.composing import one
from tests.conftest import ROOT

COMMANDS = re.findall(r"^    (?:uv run )?(\S.*)$", (ROOT / "docs" / "new-gpu.md").read_text(), re.MULTILINE)
LAUNCHES = [command for command in COMMANDS if command.startswith("python -m minfer.launch ")]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.slow if "decoder_ops" in command else ())  # it has every op
        for command in dict.fromkeys(command.removesuffix(" dry_run=true") for command in LAUNCHES)
    ],
)
def test_a_launch_is_planned_for_an_unknown_gpu(command: str) -> None:
    config = one(*shlex.split(command)[3:])
    plan = cases.plan(config, "cuda", (12, 0))
    timed = [case for case in plan.cases if case.key not in plan.unsupported]
    assert len(timed) > len(plan.cases) / 4


def test_every_other_command_names_what_there_is() -> None:
    others = [shlex.split(command) for command in COMMANDS if command not in LAUNCHES]
    assert len(LAUNCHES) >= 7 and len(others) >= 7
    for words in others:
        if words[0] == "python":
            assert (ROOT / words[1]).is_file(), words
        else:
            assert words[:2] in (["pytest", "-m"], ["git", "add"]), words
        if words[1] == "analysis/make.py":
            assert set(words[2:]) <= {"--check", *make.NAMES}
