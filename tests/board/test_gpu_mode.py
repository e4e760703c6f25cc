"""Problems in the form of GPU MODE."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minfer import build
from minfer.bench.verify import WrongResult, verify
from minfer.board.adapt import adapt
from minfer.board.foreign import Refused
from minfer.board.gpu_mode import find_sources, read_sizes, register
from minfer.board.importing import check_apart, check_folder, count, describe_folder, write_extra
from minfer.board.stage import find_kind
from minfer.ops import Op
from minfer.ops.kernel import PACKAGE
from minfer.ops.op import REGISTERED

TASKS = Path(__file__).parent / "tasks"
PROBLEM = TASKS / "gpu_mode" / "scaled_rows"


@pytest.fixture(autouse=True)
def registered(one_thread: None) -> Iterator[None]:
    """Ops of a test are forgotten after it; minfer's own stay."""
    before = set(REGISTERED)
    yield
    for name in REGISTERED.keys() - before:
        if not (PACKAGE / "ops" / name).is_dir():
            del REGISTERED[name]


def make(tmp_path: Path) -> Op:
    path, _ = write_extra(PROBLEM, "their_rows", tmp_path)
    return register(path.with_name("their_rows_task"), "their_rows", path)


def test_a_problem_becomes_an_op(tmp_path: Path) -> None:
    op = make(tmp_path)
    case = op.case("torch", "float32", {"workload": 3, "trial": 1}, {"call": "scalars1"})
    assert [(s.name, s.shape) for s in op.specs(case)] == [("y0", (16, 100)), ("input0", (16, 100))]
    assert op.calls == {"call": {"input1": 0.5}, "scalars1": {"input1": 2.0}}
    errors = verify(
        op, case, op.kernels["torch"], build.function(op.kernels["torch"], ""), torch.device("cpu"), None, 0
    )
    assert errors.over_bound < 1 and not {"task", "utils", "reference"} & sys.modules.keys()


def test_a_custom_kernel_is_a_submission(tmp_path: Path) -> None:
    op = make(tmp_path)
    case = op.case("torch", "float32", {"workload": 2, "trial": 1})
    file = tmp_path / "submission.py"
    text = "import torch\nfrom task import input_t\n\ndef custom_kernel(data: input_t):\n    x, scale, output = data\n"
    for number, result in enumerate(
        ("x.cumsum(1) * scale", "output.copy_(x.cumsum(1) * scale)", "x.half().cumsum(1) * scale")
    ):
        file = tmp_path / f"submission{number}.py"
        file.write_text(f"{text}    return {result}\n")
        assert find_kind(op.name, file.name, file.read_bytes()) == "python"
        kernel = adapt(op.name, str(file))
        if "half" in result:
            with pytest.raises(WrongResult):
                verify(op, case, op.kernels["torch"], kernel, torch.device("cpu"), None, 0)
        else:
            verify(op, case, op.kernels["torch"], kernel, torch.device("cpu"), None, 0)


def test_values_are_those_that_the_task_generates(tmp_path: Path) -> None:
    problem = tmp_path / "sorted_rows"
    shutil.copytree(PROBLEM, problem)
    shutil.copy(PROBLEM.parent / "utils.py", tmp_path)
    file = problem / "reference.py"
    file.write_text(file.read_text().replace(".contiguous()", ".sort(1).values"))
    path, _ = write_extra(problem, "sorted_rows", tmp_path / "made")
    op = register(path.with_name("sorted_rows_task"), "sorted_rows", path)
    seen: list[torch.Tensor] = []

    def kernel(y: torch.Tensor, x: torch.Tensor, input1: float) -> None:
        seen.append(x.clone())
        y.copy_(x.cumsum(1) * input1)

    case = op.case("torch", "float32", {"workload": 2, "trial": 1})
    verify(op, case, op.kernels["torch"], kernel, torch.device("cpu"), None, 0)
    assert all(torch.equal(x, x.sort(1).values) for x in seen) and not torch.equal(seen[0], seen[-1])


def change(tmp_path: Path, file: str, old: str, new: str) -> Path:
    problem = tmp_path / "odd"
    shutil.copytree(PROBLEM, problem)
    shutil.copy(PROBLEM.parent / "utils.py", tmp_path)
    text = (problem / file).read_text()
    assert old in text
    (problem / file).write_text(text.replace(old, new))
    return problem


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("task.yml", "tests:", "tests: [", "task.yml cannot be read"),
        ("task.yml", '"source": "../utils.py"', '"source": "/etc/utils.py"', "names the file '/etc/utils.py'"),
        ("task.yml", '"source": "../utils.py"', '"source": "../gone.py"', "names the file ../gone.py, which is not there"),
        ("task.yml", '"rows": 3', '"lines": 3', "cannot be run at lines=3, n=7, scale=0.5: TypeError"),
        ("reference.py", "def ref_kernel", "def kernel", "has no ref_kernel"),
        ("reference.py", "import torch\n", "import torch\nimport not_there\n", "cannot be imported: ModuleNotFoundError"),
        ("reference.py", "return output\n", "return output.long()\n", "returns torch.int64"),
        ("reference.py", "return output\n", "x.zero_()\n    return output\n", "the reference of odd changes input0"),
        ("reference.py", "return x, scale", "return x.bool(), scale", "is torch.bool, which minfer lacks"),
        ("reference.py", "return x, scale,", "return x, 'left',", "has 'left' in it; an op has tensors and finite numbers"),
        ("reference.py", "return x, scale,", "return x, float('nan'),", "has 'nan' in it"),
        ("reference.py", "torch.cumsum(x", "torch.cumsum(0 * x", "output 0 is zero"),
    ],
)  # fmt: skip
def test_a_problem_that_is_no_task_is_refused_in_a_sentence(
    file: str, old: str, new: str, words: str, tmp_path: Path
) -> None:
    problem = change(tmp_path, file, old, new)
    with pytest.raises(Refused, match=words) as caught:
        write_extra(problem, "odd", tmp_path / "made")
    assert "\n" not in str(caught.value)


def test_sizes_are_read_once_without_seeds() -> None:
    sizes, tests = read_sizes(PROBLEM / "task.yml")
    assert sizes[2] == {"rows": 16, "n": 100, "scale": 2.0} and (len(sizes), tests) == (3, 2)
    assert sorted(find_sources(PROBLEM)) == ["reference.py", "task.py", "utils.py"]


def test_tasks_of_a_folder_are_counted(tmp_path: Path) -> None:
    change(tmp_path, "reference.py", "torch.cumsum(x", "torch.cumsum(0 * x")
    for name in ("matmul.py", "norm.py"):
        shutil.copy(TASKS / name, tmp_path)
    (tmp_path / "hangs.py").write_text("class Model: pass\nraise SystemExit(7)\n")
    found = check_folder(tmp_path)
    assert dict(count(found)) == {"import": 2, "are degenerate": 1, "are refused for another reason": 1}
    said = describe_folder(tmp_path, found).splitlines()
    assert said[-1] == "all: 4 tasks: 2 import, 1 are degenerate, 1 are refused for another reason"
    assert any(line.startswith("odd: task odd is degenerate: output 0 is zero") for line in said)


@pytest.mark.slow
@pytest.mark.skipif("MINFER_REFERENCE_KERNELS" not in os.environ, reason="MINFER_REFERENCE_KERNELS names no problems")
def test_the_real_problems_are_imported_or_refused_by_name() -> None:
    folder = Path(os.environ["MINFER_REFERENCE_KERNELS"])
    problems = sorted(path.parent for path in folder.rglob("task.yml"))
    found = [(path, check_apart(path)) for path in problems]
    print(describe_folder(folder, found))
    assert problems and all(path.name in why or "task.yml" in why for path, why in found if why)


@pytest.mark.slow
@pytest.mark.skipif("MINFER_KERNELBENCH" not in os.environ, reason="MINFER_KERNELBENCH names no folder with its levels")
def test_the_real_tasks_of_kernelbench_are_imported_or_refused_by_name() -> None:
    folder = Path(os.environ["MINFER_KERNELBENCH"])
    found = check_folder(folder)
    print(describe_folder(folder, found))
    assert count(found)["import"]
