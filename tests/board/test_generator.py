"""The example that generates kernels: what it writes, proposes and remembers."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minfer import ops
from minfer.board.stage import find_kind
from tests.conftest import ROOT

RATIOS = {"kParts": {8: 0.5, 16: 0.8, 32: 1.0, 64: 1.5, 128: 1.2}}


@pytest.fixture
def generate() -> ModuleType:
    return ops.load_file(ROOT / "examples" / "generate_kernels.py")


def test_a_kernel_has_other_constants_another_name_and_its_memory(generate: ModuleType) -> None:
    for op, file in generate.TEMPLATES.items():
        template = (ROOT / "minfer" / "ops" / op / file).read_text()
        constants = generate.read_constants(template)
        assert constants, op
        changed = {name: 2 * value for name, value in constants.items()}
        source = generate.write_kernel(template, f"{op}_{Path(file).stem}", f"{op}_generated", changed)
        assert generate.remember(source) == generate.read_constants(source) == changed
        assert find_kind(op, "generated.cpp", source.encode()) == "cpp" and f"{op}_{Path(file).stem}" not in source
    assert generate.remember("// mine\n") is None and generate.remember("// generated: [1]\n") is None


def test_it_climbs_to_the_best_that_its_steps_reach(generate: ModuleType) -> None:
    generator = generate.Generator({"kParts": 16}, random.Random(1), at_random=False)
    found = []
    while len(found) < 5 and (constants := generator.propose()):
        found.append(constants["kParts"])
        generator.note(constants, RATIOS["kParts"].get(constants["kParts"]))
    assert found[0] == 16 and generator.best == {"kParts": 64} and len(set(found)) == len(found)


def test_the_archive_is_its_memory_and_a_hook_may_write_the_kernels(
    generate: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    submitted: list[str] = []
    season = {"op": "softmax", "closed": None, "name": "s1", "shown": {"dtype": "float16"}}
    known = {"season": "s1", "score": {"value": 1.5}, "source": '// generated: {"kParts": 64}\n'}

    def minfer(*words: str) -> Any:
        if words[0] == "submit":
            submitted.append(Path(words[2]).read_text())
            return {"score": {"value": 1.0 + len(submitted)}, "verdict": "ranked"}
        return [season] if words[0] == "board" else [known]

    monkeypatch.setattr(generate, "minfer", minfer)
    monkeypatch.setattr(sys, "argv", ["x", "softmax", "--budget", "2"])
    assert generate.main() == 0
    assert generate.remember(submitted[0]) == {"kParts": 32} and len(submitted) == 2
    hook = tmp_path / "hook.py"
    hook.write_text(
        "import json, sys\ntask = json.load(sys.stdin)\nprint('//', task['op'], len(task['near']), task['last'] is None)\n"
    )
    monkeypatch.setattr(sys, "argv", ["x", "softmax", "--budget", "2", "--hook", f"{sys.executable} {hook}"])
    assert generate.main() == 0 and submitted[2:] == ["// softmax 1 True\n", "// softmax 1 False\n"]
    assert "best 5.000" in capsys.readouterr().out
