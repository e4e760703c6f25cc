"""What `make_tables` reads and writes: files that cannot be read, the README's markers, `--check`, and the order of rows."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minfer.analysis import make_tables
from minfer.analysis.makers.tables import BEGIN, END
from minfer.rows import store
from tests.tables import EPYC, H200, MARKERS, TN, Workspace, row

ROOT = Path(__file__).resolve().parents[2]


def bad_files(work: Workspace) -> Iterator[Path]:
    whole = work.write(row("v01"), name="whole").read_bytes()
    contents = {"truncated": whole[: len(whole) // 2], "headless": whole[200:], "text": b"not parquet", "empty": b""}
    (work.results / "whole.parquet").unlink()
    for name, content in contents.items():
        path = work.results / f"{name}.parquet"
        path.write_bytes(content)
        yield path
    path = work.results / "foreign.parquet"
    pq.write_table(pa.table({"x": [1]}), path)
    yield path


def test_bad_files_are_named_and_skipped(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    bad = list(bad_files(work))
    work.write(row(us=5.0))
    assert work.run() == 1
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.partition(": ")[0] for line in lines) == sorted(map(str, bad))
    assert all(line.endswith("; skipped") and len(line) > len(f"{bad[0]}: ; skipped") for line in lines)
    assert work.tables()[0][1][1] == "**5.000 µs**"
    assert work.run("--check") == 1
    assert "out of date" not in capsys.readouterr().err


def test_only_bad_files_leave_the_readme_alone(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    work.readme.write_text(f"{BEGIN}\nprecious\n{END}\n")
    bad = len(list(bad_files(work)))
    assert work.run() == 1
    assert "precious" in work.readme.read_text()
    assert len(capsys.readouterr().err.splitlines()) == bad + 1


def test_no_results(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    assert work.run() == 0
    assert "No results yet" in work.readme.read_text()
    assert work.run("--results", work.results / "absent") == 1
    error = capsys.readouterr().err
    assert "absent is not a folder" in error and error.count("\n") == 1


def test_named_files_replace_the_search(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    work.write(row(us=1.0), name="a")
    path = work.write(row(us=5.0), name="b")
    assert work.run(path, path, "--results", "absent") == 0
    assert "1 case," in work.text() and work.tables()[0][1][1] == "**5.000 µs**"
    assert work.run(path, work.results / "absent.parquet") == 1
    assert "absent.parquet: " in capsys.readouterr().err


def test_in_a_clone_a_users_own_rows_do_not_make_the_readme_out_of_date(
    work: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(work.results.parent)
    work.write(row(us=5.0))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "rows"]):
        subprocess.run([*git, *words], check=True)
    assert make_tables.main([]) == 0 and make_tables.main(["--check"]) == 0
    assert capsys.readouterr().err == ""
    (work.results / "amd-epyc" / "r9").mkdir(parents=True)
    own = work.write(row(device=EPYC), name="amd-epyc/r9/0000-000")
    assert make_tables.main(["--check"]) == 0
    said = "1 file of results left out: git does not track it; run `git add results`, or pass `--results results`\n"
    assert capsys.readouterr().err == said
    assert make_tables.main(["--check", "--results", "results"]) == 1  # a folder that is named counts as it is
    subprocess.run([*git, "add", own], check=True)
    assert make_tables.main(["--check"]) == 1
    assert "AMD EPYC" not in work.readme.read_text()
    assert make_tables.main([]) == 0 and "AMD EPYC" in work.readme.read_text()


def test_where_there_is_no_clone_all_rows_of_the_folder_count(work: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work.results.parent)
    work.write(row(us=5.0))
    assert make_tables.main([]) == 0 and H200 in work.readme.read_text()


def test_check_writes_nothing_and_says_what_to_run(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    work.write(row())
    assert work.run("--check") == 1
    page = work.pages / "nvidia-h200" / "hgemm.md"
    why = "is out of date: run `python analysis/make_tables.py`\n"
    assert capsys.readouterr().err == f"{work.readme} {why}{page} {why}{page.with_name('README.md')} {why}"
    assert work.readme.read_text() == MARKERS and not page.exists()
    assert work.run() == 0
    assert work.run("--check") == 0
    assert capsys.readouterr().err == ""
    page.write_text(work.page().replace("100.0 µs", "99.0 µs"))
    assert work.run("--check") == 1
    assert work.run() == 0
    work.readme.write_text(work.readme.read_text().replace("hgemm.md)", "other.md)"))
    assert work.run("--check") == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no markers",
        BEGIN,
        f"{END}\n{BEGIN}\n",
        BEGIN + MARKERS,
        MARKERS + END,
    ],
)
def test_missing_or_doubled_markers(work: Workspace, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    work.write(row())
    work.readme.write_text(text)
    assert work.run() == 1
    assert work.readme.read_text() == text
    error = capsys.readouterr().err
    assert BEGIN in error and END in error and error.count("\n") == 1


def test_missing_or_unreadable_readme(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    work.write(row())
    work.readme.unlink()
    assert work.run() == 1
    assert capsys.readouterr().err == f"{work.readme}: No such file or directory\n"
    assert not work.readme.exists()
    work.readme.write_bytes(b"\xff" + MARKERS.encode())
    assert work.run() == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_text_outside_the_markers_is_untouched_and_a_second_run_changes_nothing(work: Workspace, newline: str) -> None:
    before, after = "# é | x\n\n \ttrailing  \n", "\n\nlast line without an end"
    old = f"{before}{BEGIN}\nold tables\n{END}{after}".replace("\n", newline)
    work.readme.write_bytes(old.encode())
    work.write(row(), row("v01", None, status="error", message=f"{END} {BEGIN}"))
    assert work.run() == 0
    new = work.readme.read_bytes()
    assert new.startswith((before.replace("\n", newline) + BEGIN).encode())
    assert new.endswith((END + after.replace("\n", newline)).encode())
    assert b"old tables" not in new
    assert new.count(b"\n") == new.count(newline.encode())
    assert work.run() == 0
    assert work.readme.read_bytes() == new


def test_output_does_not_depend_on_how_rows_are_spread_over_files(work: Workspace) -> None:
    rows = [
        row(kernel, 10.0 + i, f"{dtype}/{TN}/m={m}", run=run, device=device)
        for i, run in enumerate(("r1", "r2", None))  # all finished at once: the run's name decides
        for kernel in ("torch", "v01", "v02")
        for dtype in ("float16", "bfloat16")
        for m in (64, 512)
        for device in (H200, EPYC)
    ]
    texts = set()
    for seed in range(4):
        random.Random(seed).shuffle(rows)
        for i in range(3):
            work.write(*rows[i::3], name=str(i))
        assert work.run(*random.Random(seed).sample(store.files(work.results), 3)) == 0
        texts.add(work.readme.read_text() + work.page() + work.page(EPYC))
    assert len(texts) == 1
    assert "11.00 µs" in texts.pop()  # r2


def test_runs_as_a_script_from_anywhere_without_torch(work: Workspace) -> None:
    work.write(row())
    script = str(ROOT / "analysis" / "make_tables.py")
    where = ["--results", str(work.results), "--readme", str(work.readme), "--pages", str(work.pages)]
    code = f"import runpy, sys; sys.argv = {[script, *where]!r}\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "except SystemExit as end: assert end.code == 0, end.code\n"
    code += "assert 'torch' not in sys.modules"
    environment = {"PATH": "", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=work.results, env=environment, check=True, timeout=60)
    assert "# hgemm on NVIDIA H200" in work.page()
