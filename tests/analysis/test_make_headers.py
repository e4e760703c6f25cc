"""The measured line in kernels' headers: where it stands, what it says, and that nothing else of a file changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minfer import fingerprint
from minfer.analysis import make
from minfer.analysis.makers import headers as make_headers
from minfer.rows import store
from tests.tables import TN, row

CUDA = "// v01: one.\n// Expected: two. Measured: see docs/hgemm.md.\n// Why: three\n// four.\n#include <x>  // Measured (no\n"
PYTHON = '''"""triton: one.\n\nExpected: two.\n"""\n\nimport triton\n'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "v01.cu": CUDA,
        "triton.py": PYTHON,
        "v02.cu": "#include <y>\n",
        "hgemm.h": "// a header\n",
    }.items():
        path = tmp_path / "ops" / "hgemm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(folder: Path, *rows: store.Row, check: bool = False) -> int:
    store.write(store.to_table(rows), folder / "a.parquet")
    where = ["--results", str(folder), "--sources", str(folder / "ops")]
    return make.main(["headers", *where, *(["--check"] if check else [])])


def made(kernel: str, us: float, side: int = 8, **values: Any) -> store.Row:
    shape = {"m": side, "n": side, "k": side}
    return row(kernel, us, f"float16/{TN}/m={side},n={side},k={side}", shape=shape, dtype="float16", **values)


def test_the_line_is_behind_the_header_and_before_the_reason(folder: Path) -> None:
    rows = [made(k, us) for k, us in {"torch": 100.0, "v01": 200.0, "triton": 50.0, "v02": 1.0}.items()]
    rows.append(made("v01", 1.0, 16, flops=1.0))  # not the representative problem
    assert run(folder, *rows) == 0
    said = "Measured (H200, float16, m=n=k=8): {0} TFLOP/s cold, {0} steady; {1} % and {1} % of torch."
    lines = [said.format(rate, share) for rate, share in (("5.000", "50.0"), ("20.00", "200.0"))]
    texts = {path.name: path.read_text() for path in (folder / "ops" / "hgemm").iterdir()}
    assert texts["v01.cu"] == CUDA.replace(" Measured: see docs/hgemm.md.\n", f"\n// {lines[0]}\n")
    assert texts["triton.py"] == PYTHON.replace('"""\n\nimport', f'"""\n# {lines[1]}\n\nimport')
    assert texts["v02.cu"] == "#include <y>\n" and texts["hgemm.h"] == "// a header\n"
    assert run(folder, *rows, check=True) == 0


def test_a_line_without_a_row_goes_and_check_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, made("torch", 100.0), made("v01", 200.0)) == 0
    before = (folder / "ops" / "hgemm" / "v01.cu").read_text()
    assert run(folder, made("torch", 100.0), check=True) == 1
    assert "v01.cu is out of date" in capsys.readouterr().err
    assert (folder / "ops" / "hgemm" / "v01.cu").read_text() == before
    assert run(folder, made("torch", 100.0)) == 0
    assert (folder / "ops" / "hgemm" / "v01.cu").read_text() == CUDA.replace(" Measured: see docs/hgemm.md.", "")


def test_a_file_of_several_kernels_shows_the_fastest(folder: Path) -> None:
    path = folder / "ops" / "hgemm" / "v03.cu"
    path.write_text("// v03: many.\n")
    assert run(folder, made("torch", 100.0), made("v03_a", 200.0), made("v03_b", 50.0)) == 0
    assert (
        path.read_text().splitlines()[1].startswith("// Measured (H200, float16, m=n=k=8, v03_b): 20.00 TFLOP/s cold")
    )


def test_a_long_line_is_wrapped_and_replaced_whole(folder: Path) -> None:
    long = [made(kernel, 100.0, device="NVIDIA " + "word " * 40) for kernel in ("torch", "v01")]
    assert run(folder, *long) == 0
    text = (folder / "ops" / "hgemm" / "v01.cu").read_text()
    assert "\n//   " in text and all(len(line) <= make_headers.WIDTH for line in text.splitlines())
    assert run(folder, made("torch", 100.0)) == 0 and "word" not in (folder / "ops" / "hgemm" / "v01.cu").read_text()


def test_the_line_changes_nothing_of_what_a_rows_source_hashes(folder: Path) -> None:
    path = folder / "ops" / "hgemm" / "v01.cu"
    path.write_text(CUDA.replace("// Why: three\n// four.\n", ""))
    before = fingerprint._meaning.__wrapped__(path)
    assert run(folder, made("torch", 100.0), made("v01", 200.0, device="NVIDIA " + "word " * 40)) == 0
    assert "// Measured (" in path.read_text() and fingerprint._meaning.__wrapped__(path) == before
