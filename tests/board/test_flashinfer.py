"""Tasks in the form of flashinfer-bench: what becomes an op, what is refused in which sentence, and ours in that form."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minfer import build, ops
from minfer.bench.verify import WrongResult, verify
from minfer.board.adapt import adapt
from minfer.board.flashinfer import read_definition, read_json, read_task, read_workloads, register
from minfer.board.flashinfer_form import REFERENCES, convert_solution, write_definition
from minfer.board.foreign import Refused
from minfer.board.importing import check_apart, describe_folder, write_extra
from minfer.board.stage import find_kind
from minfer.ops import Op
from minfer.ops.kernel import PACKAGE
from minfer.ops.op import REGISTERED
from minfer.plan.config import UserError

TASKS = Path(__file__).parent / "tasks" / "flashinfer"
FILE, WORKLOADS = TASKS / "scaled_norm.json", TASKS / "scaled_norm.jsonl"
SOLUTION = {
    "name": "mine",
    "definition": "scaled_norm",
    "author": "ada",
    "spec": {"language": "python", "target_hardware": ["cpu"], "entry_point": "main.py::run"},
    "sources": [
        {
            "path": "main.py",
            "content": "import torch\n\ndef run(x, weight, eps, y):\n    wide = x.float()\n"
            "    y.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float())\n",
        }
    ],
}


@pytest.fixture(autouse=True)
def registered(one_thread: None) -> Iterator[None]:
    """Ops of a test are forgotten after it; minfer's own stay."""
    before = set(REGISTERED)
    yield
    for name in REGISTERED.keys() - before:
        if not (PACKAGE / "ops" / name).is_dir():
            del REGISTERED[name]


def make(tmp_path: Path, name: str = "their_norm") -> Op:
    path, _ = write_extra(FILE, name, tmp_path)
    return register(path.with_name(f"{name}_task.json"), name, path)


def check(op: Op, kernel: Callable[..., Any], number: int = 3) -> float:
    """The largest error over its bound of a kernel at a workload."""
    case = op.case("torch", "float32", {"workload": number, "trial": 1})
    return verify(op, case, op.kernels["torch"], kernel, torch.device("cpu"), None, 0).over_bound


def test_a_definition_and_its_workloads_become_an_op(tmp_path: Path) -> None:
    op = make(tmp_path)
    specs = op.specs(op.case("torch", "float32", {"workload": 2, "trial": 1}))
    assert [(s.name, s.shape, s.dtype) for s in specs] == [
        ("y", (5, 48), "bfloat16"), ("x", (5, 48), "bfloat16"), ("weight", (48,), "bfloat16"),
    ]  # fmt: skip
    assert op.calls == {"call": {"eps": 1e-6}, "scalars1": {"eps": 1e-3}}
    assert check(op, build.function(op.kernels["torch"], "")) < 1


def test_the_bound_allows_the_roundings_that_the_reference_makes_and_no_more(tmp_path: Path) -> None:
    op = make(tmp_path)

    def rounds_once(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        wide = x.float()
        y.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float())

    def rounds_coarsely(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        rounds_once(y, x, weight, eps)
        y.copy_(y.to(torch.float8_e4m3fn).float())

    assert check(op, rounds_once) < 1
    with pytest.raises(WrongResult):
        check(op, rounds_coarsely)


def test_a_solution_is_a_submission(tmp_path: Path) -> None:
    op, definition = make(tmp_path), read_definition(read_json(FILE), "its file")
    for into in (True, False):
        about = copy.deepcopy(SOLUTION)
        about["spec"]["destination_passing_style"] = into  # type: ignore[index]
        if not into:
            text = about["sources"][0]["content"].replace(", y):", "):").replace("y.copy_(", "return (")  # type: ignore[index]
            about["sources"][0]["content"] = text  # type: ignore[index]
        file = tmp_path / f"solution{into}.py"
        file.write_text(convert_solution(about, definition, op.name))
        assert find_kind(op.name, file.name, file.read_bytes()) == "python"
        assert check(op, adapt(op.name, str(file))) < 1


def change(**values: Any) -> dict[str, Any]:
    return copy.deepcopy(read_json(FILE)) | values


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ([], "is no definition"),
        (change(reference=""), "has no reference"),
        (change(axes={"batch": {"type": "expr"}, "width": {"type": "const", "value": 48}}), "axis batch .* of the type 'expr'"),
        (change(axes={"batch": {"type": "var"}, "width": {"type": "const", "value": -1}}), "has the value -1; a size"),
        (change(inputs={"x": {"shape": ["batch", "depth"], "dtype": "float16"}}), "there is no axis 'depth'"),
        (change(inputs={"x": {"shape": ["batch"], "dtype": "float4_e2m1"}}), "is float4_e2m1, which minfer lacks"),
        (change(outputs={"y": {"shape": ["batch"], "dtype": "int64"}}), "y of .* is int64; an op's outputs"),
        (change(outputs={"x": {"shape": ["batch"], "dtype": "float16"}}), "x is an input and an output"),
        (change(inputs=["x"]), "inputs of .* is no object of objects"),
    ],
)  # fmt: skip
def test_a_definition_that_is_no_task_is_refused_in_a_sentence(about: Any, words: str) -> None:
    with pytest.raises(Refused, match=words) as caught:
        read_definition(about, "theirs.json")
    assert "\n" not in str(caught.value)


def line(**values: Any) -> str:
    about = json.loads(WORKLOADS.read_text().splitlines()[0])
    about["workload"] |= values
    return json.dumps(about)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no workload"),
        ("{", "line 1 of .* is no JSON"),
        ("[]", "line 1 of .* has no axes"),
        (line(axes={}), "line 1 .* gives the axis batch no size"),
        (line(axes={"batch": 2, "depth": 3}), "gives depth a size, which is no variable axis"),
        (line(axes={"batch": 0}), "batch is 0; a size is a whole number"),
        (line(inputs={"eps": {"type": "scalar", "value": float("nan")}}), "eps is nan; a scalar is a finite number"),
        (line(inputs={"eps": {"type": "random"}}), "eps is a scalar and has no value"),
        (line(inputs={"eps": {"type": "scalar", "value": 1e-6}, "x": {"type": "custom"}}), "x is of the type 'custom'"),
        (
            line(inputs={"eps": {"type": "scalar", "value": 1e-6}, "x": {"type": "safetensors", "path": "/etc/passwd"}}),
            "x is in '/etc/passwd'; write a path relative",
        ),
        (
            line(inputs={"eps": {"type": "scalar", "value": 1e-6}, "x": {"type": "safetensors", "path": "a/../../b"}}),
            "write a path relative",
        ),
        (
            line(inputs={"eps": {"type": "scalar", "value": 1e-6}, "x": {"type": "safetensors", "path": "gone.safetensors"}}),
            "there is no such file",
        ),
        (line().replace("scaled_norm", "other"), "line 1 .* is for other; this is scaled_norm"),
    ],
)  # fmt: skip
def test_a_workload_that_cannot_be_read_is_refused_with_its_line(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    file.write_text(text)
    with pytest.raises(Refused, match=words) as caught:
        read_workloads(file, read_definition(read_json(FILE), "its file"))
    assert "\n" not in str(caught.value)


def test_constraints_hold(tmp_path: Path) -> None:
    definition = read_definition(change(constraints=["batch % 2 == 0"]), "theirs.json")
    with pytest.raises(Refused, match=r"line 1 .* does not keep the constraint batch % 2 == 0"):
        read_workloads(WORKLOADS, definition)
    with pytest.raises(Refused, match=r"the constraint .* cannot be computed"):
        read_workloads(WORKLOADS, read_definition(change(constraints=["heads == 4"]), "theirs.json"))


def test_ten_thousand_lines_are_read_once_each(tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    file.write_text("\n".join(line(axes={"batch": 1 + number % 37}) for number in range(10_000)))
    assert len(read_workloads(file, read_definition(read_json(FILE), "its file"))) == 37


def test_integers_of_safetensors_stay_and_floats_are_drawn_like_them(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    about = change(
        inputs={
            "x": {"shape": ["batch", "width"], "dtype": "float32"},
            "rows": {"shape": ["batch"], "dtype": "int32"},
        },
        outputs={"y": {"shape": ["batch", "width"], "dtype": "float32"}},
        reference="def run(x, rows):\n    return x[rows.long()] * 2.5 + 1.0\n",
    )
    values = {"x": 3 + 0.5 * torch.randn(3, 48), "rows": torch.tensor([2, 0, 1], dtype=torch.int32)}
    save_file(values, tmp_path / "values.safetensors")
    of = lambda key: {"type": "safetensors", "path": "values.safetensors", "tensor_key": key}
    (tmp_path / "gather.json").write_text(json.dumps(about | {"name": "gather"}))
    (tmp_path / "gather.jsonl").write_text(
        json.dumps({"axes": {"batch": 3}, "inputs": {"x": of("x"), "rows": of("rows")}})
    )
    path, _ = write_extra(tmp_path / "gather.json", "gather", tmp_path / "made")
    op = register(path.with_name("gather_task.json"), "gather", path)
    assert check(op, build.function(op.kernels["torch"], ""), 1) < 1
    (workload,) = read_task(tmp_path / "gather.json", tmp_path / "gather.jsonl")["workloads"]
    assert workload["inputs"]["rows"] == {"values": [2, 0, 1]} and workload["inputs"]["x"]["mean"] == pytest.approx(
        3, abs=0.3
    )
    with pytest.raises(
        Refused, match=r"x is float32 \(3, 48\) in values.safetensors; its definition says float32 \(4, 48\)"
    ):
        (tmp_path / "gather.jsonl").write_text(
            json.dumps({"axes": {"batch": 4}, "inputs": {"x": of("x"), "rows": of("rows")}})
        )
        read_task(tmp_path / "gather.json", tmp_path / "gather.jsonl")


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("def run(x, weight, eps):\n    return x * 0\n", "output 0 is zero"),
        ("def run(x, weight, eps):\n    return x + 1\n", "weight does not matter"),
        ("def run(x, weight, eps):\n    return x / 0\n", "not finite"),
        ("import torch\ndef run(x, weight, eps):\n    return x * weight + torch.randn_like(x)\n", "its output is random"),
        ("def run(x, weight, eps):\n    return x[0] * weight\n", r"returns \(48,\); its outputs are \(1, 48\)"),
        ("def run(x):\n    return x\n", "cannot be run: TypeError"),
        ("raise SystemError('no')", "cannot be imported: SystemError: no"),
        ("import os\nos._exit(3)\n", "ended its process with status 3"),
        ("run = 1\n", "has no function run"),
        ("def run(x", "cannot be imported: SyntaxError"),
    ],
)  # fmt: skip
def test_a_degenerate_task_is_named_in_a_process_of_its_own(reference: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "scaled_norm.json").write_text(json.dumps(change(reference=reference)))
    (tmp_path / "scaled_norm.jsonl").write_text(WORKLOADS.read_text())
    found = check_apart(tmp_path / "scaled_norm.json")
    assert re.search(words, found) and "scaled_norm" in found and "\n" not in found


def test_a_solution_that_cannot_be_converted_is_refused() -> None:
    definition = read_definition(read_json(FILE), "its file")

    def refuse(words: str, **values: Any) -> None:
        about = copy.deepcopy(SOLUTION) | values
        with pytest.raises(Refused, match=words):
            convert_solution(about, definition, "their_norm")

    spec = SOLUTION["spec"]
    assert isinstance(spec, dict)
    refuse("is for other", definition="other")
    refuse("is in cuda; only those in python and triton", spec=spec | {"language": "cuda"})
    refuse("entry point 'main.py'", spec=spec | {"entry_point": "main.py"})
    refuse("defines no function start", spec=spec | {"entry_point": "main.py::start"})
    refuse("is no Python", sources=[{"path": "main.py", "content": "def run("}])
    refuse(
        "put all into one file",
        sources=[{"path": "main.py", "content": "def run(): 1"}, {"path": "b.py", "content": ""}],
    )
    with pytest.raises(Refused, match="this is no solution"):
        convert_solution([], definition, "their_norm")


@pytest.mark.parametrize("op", sorted(REFERENCES))
def test_ours_in_their_form_says_the_same(op: str, tmp_path: Path) -> None:
    """The written definition is imported again, and our kernel for PyTorch is right under its reference."""
    sizes = dict.fromkeys(list(ops.get(op).axes)[1:], 40)
    file, _ = write_definition(op, "bfloat16", sizes, tmp_path)
    path, _ = write_extra(file, f"again_{op}", tmp_path / "made")
    again = register(path.with_name(f"again_{op}_task.json"), f"again_{op}", path)
    ours = build.function(ops.get(op).kernels["torch"], "")

    def kernel(*tensors: torch.Tensor, **scalars: float) -> Any:
        empty = [torch.empty(0, dtype=tensors[0].dtype)] if op == "softmax" else []
        return ours(*tensors, *empty, **scalars)

    assert check(again, kernel, 3) < 1


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sample has no reference in plain PyTorch"):
        write_definition("sample", "float16", {}, tmp_path)
    with pytest.raises(UserError, match="rmsnorm needs the sizes of hidden; write --shape hidden=4096"):
        write_definition("rmsnorm", "float16", {"tokens": 3}, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif("MINFER_FLASHINFER_TRACE" not in os.environ, reason="MINFER_FLASHINFER_TRACE names no data set")
def test_the_real_definitions_are_imported_or_refused_by_name() -> None:
    folder = Path(os.environ["MINFER_FLASHINFER_TRACE"])
    files = sorted((folder / "definitions").rglob("*.json"))
    found = [(path, check_apart(path)) for path in files]
    print(describe_folder(folder, found))
    assert files and all(path.stem in why and "Error:" not in why for path, why in found if why)
