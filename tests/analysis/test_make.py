"""One command makes and checks all pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from minfer.analysis import make
from minfer.analysis.data import prepare
from minfer.analysis.makers import Maker, Options
from tests.conftest import ROOT
from tests.tables import MARKERS, Workspace, row


@pytest.fixture
def places(work: Workspace) -> list[str]:
    """Rows of two kernels, and options that keep what is read and written in the workspace."""
    work.write(
        row(), row("v01_naive", 50.0, backend="cuda", arch="sm_90a", dtype="float16", shape={"m": 512}, params={})
    )
    (work.results.parent / "ops" / "hgemm").mkdir(parents=True)
    files = {"--best": "best.json", "--fusion": "fusion.json", "--sources": "ops"}
    named = [word for option, name in files.items() for word in (option, str(work.results.parent / name))]
    return [*named, "--results", str(work.results), "--readme", str(work.readme)]


def test_several_makers_write_what_each_writes_alone_and_rows_are_read_once(
    work: Workspace, places: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["tables", "claims", "best", "fusion"]
    for name in names:
        assert make.main([name, *places]) == 0
    root = work.results.parent
    files = [path for path in root.rglob("*") if path.suffix in (".md", ".json")]
    alone = {path: path.read_text() for path in files}
    assert "v01_naive" in (root / "best.json").read_text() and len(alone) == 6
    work.readme.write_text(MARKERS)
    for path in files:
        if path != work.readme:
            path.unlink()
    assert make.main([*names, "--check", *places]) == 1
    said = capsys.readouterr().err
    assert all(f"run `python analysis/make.py {name}`" in said for name in names[1:])
    assert not (root / "best.json").exists()
    reads = []
    read = prepare.read_shown
    monkeypatch.setattr(prepare, "read_shown", lambda *of: (reads.append(of), read(*of))[1])
    assert make.main([*names[::-1], *places]) == 0  # in another order, with the words between options
    assert len(reads) == 1
    assert {path: path.read_text() for path in files} == alone


def test_makers_of_all_or_nothing_leave_their_pages_where_a_file_cannot_be_read(
    work: Workspace, places: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (work.results / "broken.parquet").write_text("no")
    assert make.main(["tables", "claims", "best", *places]) == 1
    said = capsys.readouterr().err.splitlines()
    assert "broken.parquet: " in said[0] and len(said) == 2
    assert said[1] == "nothing was written of claims, best: the rows that are left would not say the same"
    assert work.op_pages() and not (work.results.parent / "best.json").exists()


def test_a_word_that_names_nothing_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        make.main(["tabels"])
    assert "tabels is no parquet file, and none of tables, plots," in capsys.readouterr().err


def test_without_a_name_all_are_made_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []

    def maker(name: str) -> Maker:
        def write(_: object, options: Options) -> list[str]:
            made.append(name)
            return []

        return Maker(write)

    monkeypatch.setattr(make, "_maker", maker)
    assert make.main([]) == 0 and made == list(make.NAMES)
    assert make.main(["plots", "tables"]) == 0 and made[len(make.NAMES) :] == ["tables", "plots"]


def test_every_maker_works_without_torch_and_without_what_no_wheel_has() -> None:
    code = f"import sys; from minfer.analysis import make; [make._maker(name) for name in {make.NAMES}]\n"
    code += "assert not {'torch', 'benchmarks', 'tests'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_rows_with_more_columns_are_narrowed_to_what_would_have_been_read(work: Workspace) -> None:
    """A maker must not see another row of a case because others asked for more columns."""
    work.write(row(us=2.0), row(us=None, finished=None, status="wrong"), row("v01_naive", metric=None, cold_tflops=3.0))
    few = ["run", "finished", "case", "op", "kernel", "status", "device", "metric", "cold_rate"]
    wide, _ = prepare.load([], work.results, [*few, "cold_us", "steady_us", "metrics", "params"])
    narrow, _ = prepare.load([], work.results, few)
    assert prepare.select_columns(wide, few).equals(narrow)
    assert prepare.with_problem(prepare.select_columns(wide, few)).equals(prepare.with_problem(narrow))
