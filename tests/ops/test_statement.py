"""The op of "Adding an op", as a new user pastes and mistakes it: it runs, and each mistake comes out as one sentence."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minfer import build, ops
from minfer.bench.verify import WrongResult, verify
from minfer.ops.op import REGISTERED
from minfer.plan import cases
from minfer.plan.config import Config, Shape, UserError
from minfer.plan.extra import load
from minfer.rows import store
from tests.conftest import ROOT, launch

PAGE = (ROOT / "docs" / "adding.md").read_text()
SECTION = PAGE[PAGE.index("## Adding an op") : PAGE.index("## An op with state")].strip()


def pasted() -> str:
    found = re.search(r"```python\n(.*?)```", SECTION, re.DOTALL)
    assert found
    return found[1]


@pytest.mark.slow  # the next one runs it with a kernel more
def test_the_section_works_when_it_is_pasted(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(pasted())
    found = re.search(r"^    uv run minfer (op=.*)$", SECTION, re.MULTILINE)
    assert found
    words = shlex.split(found[1].replace("[rows.py]", f"[{tmp_path / 'rows.py'}]").replace("[512, 1024]", "512"))
    done = launch(*words, "cluster=local", f"results={tmp_path / 'results'}", f"runs={tmp_path / 'runs'}")
    assert done.returncode == 0, done.stderr
    (row,) = store.rows(store.files(tmp_path / "results"))
    assert row["status"] in store.MEASURED and row["cold_rate"] > 0 and row["metric"] == "GB/s", row["message"]


MINE = """#include "ops/op.h"
static void scale_rows_mine(minfer::Tensor y, const minfer::Tensor x, const minfer::Tensor scale) {
  const float *from = minfer::input<float>(x, "x"), *by = minfer::input<float>(scale, "scale");
  float* to = minfer::output<float>(y, "y");
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = from[i] * by[i / x.size(1)];
}
MINFER_OP(scale_rows_mine, "(Tensor(a!) y, Tensor x, Tensor scale) -> ()")
"""


@pytest.mark.slow
def test_its_line_for_a_kernel_in_cpp_is_run_by_its_command(tmp_path: Path) -> None:
    line = re.search(r'`(op\.cpp\("mine\.cpp".*?\))`', SECTION)
    command = re.search(r"^    uv run minfer (op=.*)$", SECTION, re.MULTILINE)
    assert line and command
    assert len(SECTION.splitlines()) <= 25
    (tmp_path / "rows.py").write_text(f"{pasted()}\n{line[1]}\n")
    (tmp_path / "mine.cpp").write_text(MINE)
    words = shlex.split(command[1].replace("[rows.py]", f"[{tmp_path / 'rows.py'}]").replace("[512, 1024]", "512"))
    done = launch(*words, "cluster=local", f"results={tmp_path / 'results'}", f"runs={tmp_path / 'runs'}")
    assert done.returncode == 0, done.stderr
    rows = {row["kernel"]: row for row in store.rows(store.files(tmp_path / "results"))}
    assert rows.keys() == {"torch", "mine"} and rows["mine"]["status"] in store.MEASURED, rows["mine"]["message"]


def test_a_kernel_that_states_no_dtypes_is_told_how(plan: Callable[..., cases.Plan], tmp_path: Path) -> None:
    (tmp_path / "mine.cpp").write_text(MINE)
    plan()
    ops.get("scale_rows").cpp("mine.cpp")
    case = ops.get("scale_rows").case("mine", "float32", {"rows": 4, "n": 8})
    why = "is registered for float16 and bfloat16, not float32; if it supports float32, add it to dtypes= where you register it"
    assert ops.get("scale_rows").kernels["mine"].unsupported(case, None) == why


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[Callable[..., cases.Plan]]:
    """The plan of a request for the section's op, with a piece of it replaced; all is forgotten after the test."""
    ops.every_kernel()  # loads all ops: a module that is loaded does not register its op again
    before = dict(REGISTERED)

    def planned(old: str = "", new: str = "", op: str = "scale_rows", **changes: Any) -> cases.Plan:
        path = tmp_path / "theirs.py"
        assert old in pasted()
        path.write_text(pasted().replace(old, new))
        load(str(path))
        shape = changes.pop("shape", {"rows": 64, "n": 512})
        settings: dict[str, Any] = {"op": op, "dtype": "float32", "shape": Shape(name="custom", cpu=[shape])}
        return cases.plan(Config(**settings | changes), "cpu")

    yield planned
    REGISTERED.clear()
    REGISTERED.update(before)
    ops.load_file.cache_clear()


def test_the_section_as_it_is_can_be_planned(plan: Callable[..., cases.Plan]) -> None:
    assert [case.key for case in plan().cases] == ["scale_rows/torch/float32//rows=64,n=512"]


REFERENCE = '{"y": rounded(t["x"] * t["scale"][:, None], 2)}'
MISTAKES: dict[str, tuple[tuple[str, str], str]] = {
    "a reference that forgets an output": ((REFERENCE, "{}"), "its reference failed with .* lacks its output y"),
    "a reference without a bound": ((REFERENCE, '{"y": t["x"]}'), "gives its output y as a Tensor"),
    "a reference of another shape": (("[:, None], 2)", "[:, None], 2), 'z': rounded(t['x'], 1)"), "z, which is not an output"),
    "a reference that takes one argument": (("lambda case, t:", "lambda t:"), "its reference failed with TypeError"),
    "tensors that raise": (('out("y", case["rows"]', 'out("y", case["m"]'), r"KeyError: 'm'; correct .*py, line 7$"),
    "a dtype that is none": (('"float32"),', '"fp32"),'), "scale has the dtype fp32; there are float16"),
    "a name of an op of ours": (('"scale_rows"', '"hgemm"'), "line 3, cannot be imported: .* there is an op hgemm already"),
    "a name that is none": (('"scale_rows"', '"scale rows"'), "its name must be a Python identifier"),
    "no baseline": (("baseline=True, ", ""), "nothing to compare with; register one of its kernels with baseline=True"),
    "an axis that is a number": (('"n": size()', '"n": 5'), "drawing a shape by its axes"),
    "one tensor twice": (('given("x"', 'given("y"'), "each tensor a name of its own"),
    "no output": (('out("y"', 'given("y"'), "make at least one an output"),
    "a metric that is text": (('"scale_rows",', '"scale_rows", metric="GB/s",'), "its cost failed with AttributeError"),
    "a fill that is a number": (('"float32"),', '"float32", fill=1),'), "its tensors for .* failed"),
    "a reference that divides by zero": ((REFERENCE, '{"y": 1 / 0}'), "its reference failed with ZeroDivisionError"),
    "no op of that name": (("op.torch(", "__import__('minfer').ops.get('scale_row').torch("), "op scale_row; there are"),
    "a function without a source": (("lambda y, x, scale: x * scale[:, None]", "print"), "register a def that calls it"),
}  # fmt: skip


# Of a kernel's registration: what it says that it supports, and what is said of that.
SUPPORTS = {
    'dtypes=("float32")': r"dtypes= of kernel torch is 'float32'; it takes a tuple of names, such as \('float32',\)",
    'dtypes=(__import__("torch").float32,)': r"dtypes= of kernel torch is \(torch.float32,\); it takes a tuple of names",
    'dtypes=("fp32",)': r"dtypes= of kernel torch is \('fp32',\); it takes a tuple of names",
    "dtypes=()": r"dtypes= of kernel torch is \(\); it takes a tuple of names",
    "returns=0": r"returns= of kernel torch is 0; it takes a tuple of places",
    'requires="n % 8"': "requires= of kernel torch is 'n % 8'; it takes a function of a case",
    'requires=lambda case: case["z"]': "requires= of kernel torch fails at .*n=512: KeyError: 'z'",
    'requires=lambda case: case["n"] > 1': "TypeError: it returned True; return None if the kernel runs the case, else",
    'archs="sm80"': r"archs= of kernel torch is 'sm80'; it takes 'sm_80\+'",
    'params={"layout": ("TN",)}': "params= of kernel torch is .*; it takes only the parameters of scale_rows: call",
    'params={"call": "call"}': r"params= of kernel torch is .*; it takes a tuple of values .*, such as \('call',\)",
    'params={"call": ("no",)}': r"params\['call'\]= of kernel torch is .*; it takes only values of call: call",
}  # fmt: skip


@pytest.mark.parametrize("supports", SUPPORTS)
def test_a_mistake_in_what_a_kernel_supports_is_one_sentence(supports: str, plan: Callable[..., cases.Plan]) -> None:
    stated = 'returns=(0,), dtypes=("float32",)'
    key = supports.partition("=")[0]
    rest = {"returns": 'dtypes=("float32",)', "dtypes": "returns=(0,)"}.get(key, stated)
    with pytest.raises(UserError, match=SUPPORTS[supports]) as caught:
        plan(stated, f"{supports}, {rest}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_an_ops_file_is_one_sentence(mistake: str, plan: Callable[..., cases.Plan]) -> None:
    (old, new), words = MISTAKES[mistake]
    with pytest.raises(UserError, match=words) as caught:
        plan(old, new)
    assert "\n" not in str(caught.value)


REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "an axis that is none": ({"shape": {"rows": 64, "m": 512}}, "its axes are rows, n, not rows, m"),
    "a size that is none": ({"shape": {"rows": 0, "n": 512}}, "^shape.cpu: rows=0 is not a size"),
    "a dtype that is none": ({"dtype": "float33"}, "did you mean float32"),
    "a dtype of no kernel": ({"dtype": "float16"}, "is registered for float32, not float16"),
    "a parameter that is none": ({"params": {"lengths": "full"}}, "unknown parameter of scale_rows 'lengths'"),
    "an op that is none": ({"op": "scale_row"}, "did you mean scale_rows"),
}


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_mistake_in_the_request_is_one_sentence(request_: str, plan: Callable[..., cases.Plan]) -> None:
    changes, words = REQUESTS[request_]
    with pytest.raises(UserError, match=words):
        plan(**changes)


def test_a_size_that_breaks_a_constraint_is_refused(plan: Callable[..., cases.Plan]) -> None:
    with pytest.raises(UserError, match="n=512 must be a multiple of 48"):
        plan("size()}", "__import__('minfer').ops.multiple_of(48)}")


def test_a_check_that_takes_every_index_for_valid_is_refused_before_anything_runs(
    plan: Callable[..., cases.Plan],
) -> None:
    """An output that nobody has written has indices out of all bounds."""
    new = 'checks={"at": lambda case, t: t["x"][0][t["at"]] > 0}, tensors=lambda case: [out("at", 4, dtype="int32"),'
    with pytest.raises(
        UserError, match="its check of at, of an output that nobody has written, failed with IndexError"
    ):
        plan("tensors=lambda case: [", new)


WORKED = PAGE[PAGE.index("## An op with state") : PAGE.index("## What comes by itself")].strip()


def paste_worked(folder: Path) -> None:
    """Write both files of the worked example to a folder."""
    for name, language in (("running.py", "python"), ("scan.cpp", "cpp")):
        (block,) = re.findall(rf"```{language}\n(.*?)```", WORKED, re.DOTALL)
        (folder / name).write_text(block)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[ops.Op]:
    """The op of the worked example; all is forgotten after the test."""
    ops.every_kernel()  # loads all ops: a module that is loaded does not register its op again
    before = dict(REGISTERED)
    paste_worked(tmp_path)
    load(str(tmp_path / "running.py"))
    yield ops.get("running_max")
    REGISTERED.clear()
    REGISTERED.update(before)
    ops.load_file.cache_clear()


def verify_by_hand(
    op: ops.Op, last: bool = False, state: bool = True, ragged: bool = True, none: int = -1, first: bool = False
) -> None:
    """Verify a kernel of the worked example; raises WrongResult. It names the last of equal elements if `last`, and is mistaken
    without `state` or `ragged`, with another `none`, and with `first`, where it names the first element of every row."""

    def theirs(best: torch.Tensor, at: torch.Tensor, lengths: torch.Tensor, x: torch.Tensor) -> None:
        behind = torch.arange(x.shape[1]) >= lengths[:, None]
        x = x.masked_fill(behind, -torch.inf) if ragged else x
        new = torch.maximum(best, x.amax(1)) if state else x.amax(1)
        same = x == new[:, None]
        chosen = torch.arange(x.shape[1]).expand_as(x).masked_fill(~same, -1).amax(1) if last else same.int().argmax(1)
        at.copy_(torch.where(same.any(1), 0 if first else chosen, none))
        best.copy_(new)

    op.torch("theirs", theirs, dtypes=("float32",))
    case = op.case("theirs", "float32", {"rows": 5, "longest": 33}, {"lengths": "uniform:1"})
    kernel = op.kernels["theirs"]
    verify(op, case, kernel, build.function(kernel), torch.device("cpu"), None, seed=1)


@pytest.mark.parametrize("last", [False, True])
def test_in_the_worked_example_any_of_equal_elements_is_right(running: ops.Op, last: bool) -> None:
    verify_by_hand(running, last)


@pytest.mark.parametrize("mistake", [{"state": False}, {"ragged": False}, {"none": 0}, {"first": True}], ids=str)
def test_in_the_worked_example_each_part_of_the_statement_matters(running: ops.Op, mistake: dict[str, Any]) -> None:
    with pytest.raises(WrongResult):
        verify_by_hand(running, **mistake)


@pytest.mark.slow
def test_the_worked_example_is_run_by_its_command(tmp_path: Path) -> None:
    paste_worked(tmp_path)
    command = re.search(r"^    uv run minfer (op=.*)$", WORKED, re.MULTILINE)
    assert command
    words = shlex.split(command[1].replace("[running.py]", f"[{tmp_path / 'running.py'}]"))
    done = launch(*words, "cluster=local", f"results={tmp_path / 'results'}", f"runs={tmp_path / 'runs'}")
    assert done.returncode == 0, done.stderr
    rows = store.rows(store.files(tmp_path / "results"))
    assert {(row["kernel"], row["params"]["lengths"]) for row in rows} == {
        (kernel, lengths) for kernel in ("torch", "scan") for lengths in ("full", "uniform:3")
    }
    assert all(row["status"] in store.MEASURED for row in rows), [row["message"] for row in rows]
