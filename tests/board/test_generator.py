"""The example that generates kernels: what it writes, proposes, remembers and records."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from minfer import ops
from minfer.bench.verify import verify
from minfer.board.adapt import find_support
from minfer.board.stage import find_kind
from minfer.build import toolchain
from tests.conftest import ROOT
from tests.emulator import Emulated, compiled
from tests.ops.test_foreign import Alone

RATIOS = {8: 0.5, 16: 0.8, 32: 1.0, 64: 1.5, 128: 1.2}
SEASON = {"op": "softmax", "device": "cpu", "closed": None, "name": "s1", "shown": {"dtype": "float16"}}


@pytest.fixture
def generate() -> ModuleType:
    return ops.load_file(ROOT / "examples" / "generate_kernels.py")


@pytest.fixture
def submitted(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that were submitted to a board that has one submission; each is better than those before."""
    found: list[str] = []
    known = {"season": "s1", "who": "ada", "score": {"value": 1.5}}
    known |= {"source": '// generated: {"kParts": 64, "kStrip": 1024, "kTask": 16384}\n'}

    def minfer(*words: str) -> Any:
        if words[0] != "submit":
            return {"seasons": [SEASON]} if words[0] == "board" else {"submissions": [known]}
        answers = []
        for file in words[2 : words.index("--each")]:
            found.append(Path(file).read_text())
            score = {"value": 1.0 + len(found), "low": 0.9 + len(found), "high": 1.1 + len(found)}
            answers.append({"score": score, "verdict": "ranked", "submission": f"{len(found)}", "device": "Some"})
        return answers

    monkeypatch.setattr(generate, "minfer", minfer)
    return found


def test_a_kernel_has_other_constants_another_name_and_its_memory(generate: ModuleType) -> None:
    for (op, device), file in generate.TEMPLATES.items():
        path = ROOT / file
        template = path.read_text()
        constants = generate.read_constants(template)
        assert constants, op
        changed = {name: 2 * value for name, value in constants.items()}
        source = generate.write_kernel(template, f"{op}_{path.stem}", f"{op}_try0", changed)
        assert generate.remember(source) == generate.read_constants(source) == changed
        kind = "cpp" if device == "cpu" else "cuda"
        assert find_kind(op, f"try0{path.suffix}", source.encode()) == kind and f"{op}_{path.stem}" not in source
    assert generate.remember("// mine\n") is None and generate.remember("// generated: [1]\n") is None


@pytest.mark.slow  # compiles
@pytest.mark.skipif(toolchain.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch")
@pytest.mark.parametrize("op", ["softmax", "silu_mul"])
def test_the_templates_for_a_gpu_take_rows_of_any_width(op: str, generate: ModuleType, tmp_path: Path) -> None:
    """With wide pieces, too, which do not divide an odd row."""
    file, stated = ROOT / generate.TEMPLATES[op, "cuda"], ops.get(op)
    constants = generate.read_constants(file.read_text()) | {"kWidth": 8}
    source = tmp_path / "wide.cu"
    source.write_text(generate.write_kernel(file.read_text(), f"{op}_{file.stem}", f"{op}_wide", constants))
    stated.cuda(str(source), **find_support(op) | {"dtypes": ("float32", "bfloat16")})
    try:
        kernel = stated.kernels["wide"]
        function = Emulated(kernel, compiled(kernel, tmp_path, None, f"-I{tmp_path / 'ops' / op}"))
        for shape in (*stated.odd_shapes[:2], dict(zip(stated.axes, (2, 1032), strict=True))):
            for case in stated.cases(kernel, [shape]):
                verify(stated, case, Alone(case), function, torch.device("cpu"), None, seed=1)
    finally:
        stated.kernels.pop("wide")


def test_it_climbs_to_the_best_that_its_steps_reach(generate: ModuleType) -> None:
    generator = generate.Generator({"kParts": 32}, random.Random(1), at_random=False)
    found = []
    while constants := generator.propose():
        found.append(constants["kParts"])
        generator.note(constants, RATIOS.get(constants["kParts"]))
    assert found[0] == 32 and generator.best == {"kParts": 64} and {16, 32, 64, 128} <= set(found)
    assert len(set(found)) == len(found)


def test_without_a_rank_it_draws_at_random(generate: ModuleType) -> None:
    generator = generate.Generator({"kA": 64, "kB": 64, "kC": 64}, random.Random(3), at_random=False)
    other = generate.Generator({"kA": 64, "kB": 64, "kC": 64}, random.Random(3), at_random=True)
    for _ in range(6):
        constants = generator.propose()
        assert constants == other.propose() and all(16 <= value <= 256 for value in constants.values())
        generator.note(constants, None)
        other.note(constants, None)


def test_the_archive_is_its_memory_and_a_hook_may_write_the_kernels(
    generate: ModuleType, submitted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["x", "softmax", "--budget", "3", "--at-once", "2"])
    assert generate.main() == 0
    template = generate.read_constants((ROOT / generate.TEMPLATES["softmax", "cpu"]).read_text())
    assert generate.remember(submitted[0]) == template and len(submitted) == 3
    hook = tmp_path / "hook.py"
    hook.write_text(
        "import json, sys\ntask = json.load(sys.stdin)\n"
        "print('//', task['op'], task['file'], len(task['near']), task['last'] is None, len(task['template']) > 100)\n"
    )
    words = ["x", "softmax", "--budget", "2", "--at-once", "1", "--hook", f"{sys.executable} {hook}"]
    monkeypatch.setattr(sys, "argv", words)
    assert generate.main() == 0
    assert submitted[3:] == ["// softmax try0.cpp 1 True True\n", "// softmax try1.cpp 1 False True\n"]
    assert "best 6.000" in capsys.readouterr().out


def test_both_ways_begin_at_the_same_place_and_leave_rows(
    generate: ModuleType, submitted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["x", "softmax", "--budget", "4", "--at-once", "2", "--compare", "--seed", "2", "--write", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert generate.main() == 0
    (file,) = (tmp_path / "benchmarks" / "results").glob("generate-*.parquet")
    rows = pq.read_table(file).to_pylist()
    assert [(row["way"], row["number"]) for row in rows] == [
        (way, number) for way in ("guided", "random") for number in (1, 2, 3, 4)
    ]
    assert rows[0]["constants"] == rows[4]["constants"] and rows[0]["ratio"] == 2.0
    assert len(set(submitted)) == 8  # a board refuses the same source twice


def test_an_op_without_a_season_is_refused(
    generate: ModuleType, submitted: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "hgemm"])
    assert generate.main() == 2
    said = capsys.readouterr().err
    assert "no open season of hgemm on cpu" in said and "minfer board open-season hgemm --device cpu" in said


@pytest.mark.parametrize(
    ("hook", "why"),
    [
        (f"{sys.executable} -c 'import sys; sys.exit(\"no model here\")'", "status 1 and no source (no model here)"),
        (f"{sys.executable} -c ''", "status 0 and no source (nothing on its standard error)"),
    ],
)
def test_a_hook_that_writes_no_kernel_is_told_in_a_sentence(
    hook: str, why: str, generate: ModuleType, submitted: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["x", "softmax", "--budget", "1", "--hook", hook])
    assert generate.main() == 1 and not submitted
    said = capsys.readouterr().err
    assert why in said and said.endswith("it must print a source and end with status 0\n")


def test_a_hook_that_prints_no_text_or_too_much_stops_nothing(
    generate: ModuleType, submitted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    hook = tmp_path / "hook.py"
    hook.write_text(
        "import json, sys\nlast = json.load(sys.stdin)['file'] == 'try1.cpp'\n"
        "sys.stdout.buffer.write(b'x' * 5_000_000 if last else b'// \\xff')\n"
    )
    words = ["x", "softmax", "--budget", "2", "--at-once", "2", "--hook", f"{sys.executable} {hook}"]
    monkeypatch.setattr(sys, "argv", words)
    assert generate.main() == 0 and submitted == ["// \ufffd"]
    assert "printed 5,000,000 characters; a source may have 1,048,576" in capsys.readouterr().err


def test_what_minfer_refuses_is_told_in_its_sentence(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "softmax", "--board", str(tmp_path)])
    assert generate.main() == 2
    assert capsys.readouterr().err.startswith(f"minfer: {tmp_path} is no board; name one with --board")


@pytest.mark.parametrize("words", [("--budget", "0"), ("--at-once", "0"), ("--at-once", "few")])
def test_a_search_without_submissions_is_refused(
    words: tuple[str, ...], generate: ModuleType, submitted: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["x", "softmax", *words])
    with pytest.raises(SystemExit, match="2"):
        generate.main()
    assert f"argument {words[0]}: invalid positive value: '{words[1]}'" in capsys.readouterr().err


def test_a_hook_that_fails_costs_no_kernel_that_it_has_printed(
    generate: ModuleType, submitted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    hook = tmp_path / "hook.py"
    hook.write_text(
        "import json, sys\nfile = json.load(sys.stdin)['file']\nprint('//', file)\nsys.exit(file == 'try2.cpp')\n"
    )
    words = ["x", "softmax", "--budget", "4", "--at-once", "4", "--hook", f"{sys.executable} {hook}"]
    monkeypatch.setattr(sys, "argv", words)
    assert generate.main() == 0 and submitted == ["// try0.cpp\n", "// try1.cpp\n"]
    said = capsys.readouterr()
    assert "status 1 and a source" in said.err and "hook 2: " in said.out


@pytest.fixture
def hook(tmp_path: Path) -> str:
    file = tmp_path / "hook.py"
    file.write_text("import json, sys\nprint('//', json.load(sys.stdin)['file'])\n")
    return f"{sys.executable} {file}"


def test_one_kernel_of_a_hook_that_is_refused_costs_no_other(
    generate: ModuleType, submitted: list[str], monkeypatch: pytest.MonkeyPatch, hook: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    judge = generate.minfer

    def minfer(*words: str) -> Any:
        found = judge(*words)
        if words[0] == "submit":
            found[1] |= {"submission": "", "verdict": "not_judged", "score": None, "message": "defines no torch op"}
        return found

    monkeypatch.setattr(generate, "minfer", minfer)
    monkeypatch.setattr(sys, "argv", ["x", "softmax", "--budget", "3", "--at-once", "3", "--hook", hook])
    assert generate.main() == 0
    said = capsys.readouterr()
    assert said.err == "softmax, hook: defines no torch op\n" and said.out.count("from the hook") == 2


def test_a_batch_that_failed_is_not_tried_again_kernel_by_kernel(
    generate: ModuleType, submitted: list[str], monkeypatch: pytest.MonkeyPatch, hook: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """As when a season has ended, or SLURM is down."""
    judge, tried = generate.minfer, []

    def minfer(*words: str) -> Any:
        if words[0] != "submit":
            return judge(*words)
        tried.append(words)
        raise RuntimeError("minfer: no season of softmax is open")

    monkeypatch.setattr(generate, "minfer", minfer)
    monkeypatch.setattr(sys, "argv", ["x", "softmax", "--budget", "3", "--at-once", "3", "--hook", hook])
    assert generate.main() == 1 and len(tried) == 1
    assert capsys.readouterr().err == "softmax, hook: minfer: no season of softmax is open\n"


@pytest.mark.parametrize(
    ("op", "on", "wanted", "here", "found"),
    [
        ("softmax", ["cpu", "cuda"], "", "cuda", "cuda"),
        ("softmax", ["cuda", "cpu"], "", "cpu", "cpu"),
        ("softmax", ["cpu", "cuda"], "cpu", "cuda", "cpu"),
        ("softmax", ["cuda"], "", "cpu", "cuda"),  # SLURM may have a GPU
        ("softmax", [], "", "cuda", "softmax on cuda; open one with minfer board open-season softmax --device cuda"),
        ("softmax", ["cpu"], "cuda", "cpu", "no open season of softmax on cuda; its open season is on cpu; open one with"),
        ("hgemm", ["cuda"], "", "cuda", "no open season of hgemm on cpu; its open season is on cuda; open one with"),
        ("hgemm", ["cuda"], "cuda", "cuda", "there is no template of hgemm on cuda"),
    ],
)  # fmt: skip
def test_the_season_is_that_of_this_device(
    op: str, on: list[str], wanted: str, here: str, found: str, generate: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "find_device", lambda: here)
    closed = SEASON | {"device": here, "op": op, "closed": 1.0}
    seasons = [closed, *(SEASON | {"device": device, "op": op} for device in on)]
    given = argparse.Namespace(device=wanted, board="course")
    if found in ("cpu", "cuda"):
        season = generate.choose_season(seasons, op, given)
        assert (season["device"], season["closed"]) == (found, None)
    else:
        with pytest.raises(RuntimeError, match=found):
            generate.choose_season(seasons, op, given)
