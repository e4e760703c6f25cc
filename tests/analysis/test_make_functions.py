"""docs/functions.md is what the sources of the functions say, and each of its examples runs."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import minfer
from minfer.analysis import make
from minfer.analysis.makers import functions
from tests.conftest import ROOT
from tests.tiers import mostly_slow


def test_every_public_function_is_found_with_its_signature_and_docstring() -> None:
    found = functions.functions(ROOT / "minfer")
    assert found.keys() == {name for name, where in minfer._WHERE.items() if where.startswith("minfer.functional.")}
    for name, function in found.items():
        assert ast.get_docstring(function) == inspect.getdoc(getattr(minfer, name))
        assert [*inspect.signature(getattr(minfer, name)).parameters] == [
            argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)
        ]


def parse(text: str) -> ast.FunctionDef:
    (found,) = ast.parse(text).body
    assert isinstance(found, ast.FunctionDef)
    return found


def test_a_signature_is_broken_where_it_is_long() -> None:
    short = parse("def f(a: int, *, b: str = 'x, y') -> Tensor: ...")
    assert functions.signature(short) == "minfer.f(a: int, *, b: str = 'x, y') -> Tensor"
    long = parse(f"def f({'a' * 60}: tuple[Tensor, Tensor], *, {'b' * 60}: int = 3) -> Tensor: ...")
    assert functions.signature(long).splitlines() == [
        "minfer.f(",
        f"    {'a' * 60}: tuple[Tensor, Tensor],",
        "    *,",
        f"    {'b' * 60}: int = 3,",
        ") -> Tensor",
    ]


def test_arguments_become_a_list() -> None:
    text = "What it does: all.\n\n    x, y: the one\n        and other.\n    z: a third.\n\n    Raises: nothing."
    assert functions.prose(parse(f'def f(x, y, *, z=1):\n    """{text}"""')) == [
        "What it does: all.", "", "- `x`, `y`: the one", "  and other.", "- `z`: a third.", "", "Raises: nothing.",
    ]  # fmt: skip


@pytest.mark.parametrize("name", mostly_slow(functions.EXAMPLES, lambda name: name in ("matmul", "rms_norm", "sample")))
def test_an_example_runs(name: str) -> None:
    import torch

    torch.manual_seed(0)
    exec(functions.EXAMPLES[name], {"minfer": minfer, "torch": torch})


def test_check_says_when_the_page_is_out_of_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "functions.md"
    page.write_text("<!-- functions:begin -->\n<!-- functions:end -->\n")
    words = ["functions", "--docs", str(tmp_path), "--sources", str(ROOT / "minfer" / "ops")]
    assert make.main([*words, "--check"]) == 1 and "out of date" in capsys.readouterr().err
    assert make.main(words) == 0 and make.main([*words, "--check"]) == 0
    assert "## silu_mul" in page.read_text()


def test_what_a_call_costs_the_host_is_in_the_table(tmp_path: Path) -> None:
    row = {"device": "GPU", "ratio": 1.25}
    rows = [
        row | {"function": "rms_norm", "case": "rms_norm", "host_us": 29.7},
        row | {"function": "rms_norm", "case": "rms_norm, residual", "host_us": 33.2},
    ]
    found = {
        name: each for name, each in functions.functions(ROOT / "minfer").items() if name in ("matmul", "rms_norm")
    }
    assert functions.lines(found, functions.load_costs(tmp_path))[2].startswith(
        "| [`matmul`](#matmul) | no row yet | — |"
    )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "host-cost-gpu.parquet")
    header, _, matmul, norm, *_ = functions.lines(found, functions.load_costs(tmp_path))
    assert header.startswith("| minfer | host µs on GPU | FlashInfer |")
    assert matmul.startswith("| [`matmul`](#matmul) | no row yet |")
    assert norm.startswith("| [`rms_norm`](#rms_norm) | 30 (1.2 ×); residual 33 (1.2 ×) |")
