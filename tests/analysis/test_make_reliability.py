"""The table of faults is what the tests on a cluster noted."""

from __future__ import annotations

import json
from pathlib import Path

from minfer.analysis import make

MARKERS = "# x\n<!-- reliability:begin -->\n<!-- reliability:end -->\n"
PASSED = {"test": "test_a", "outcome": "passed", "seconds": 9, "cases": 3, "rows": 3, "lost": 0, "twice": 0,
          "finished_by": "minfer resubmit", "commit": "0123", "slurm": "22.05.8"}  # fmt: skip


def call(tmp_path: Path, *words: str) -> int:
    return make.main(["reliability", "--outcomes", str(tmp_path / "outcomes.json"), "--docs", str(tmp_path), *words])


def test_every_fault_has_its_line_and_check_says_when_one_is_out_of_date(tmp_path, capsys):
    page, outcomes = tmp_path / "evidence.md", tmp_path / "outcomes.json"
    page.write_text(MARKERS)
    assert call(tmp_path) == 0 and "Nothing was broken yet" in page.read_text()
    failed = {"test": "test_b", "outcome": "failed", "commit": "0123", "slurm": "22.05.8"}
    outcomes.write_text(json.dumps({"a | node": PASSED, "a disk": failed}))
    assert call(tmp_path, "--check") == 1 and "out of date" in capsys.readouterr().err
    assert call(tmp_path) == 0 and call(tmp_path, "--check") == 0
    text = page.read_text()
    assert "1 of 2 faults passed on SLURM 22.05.8; commit 0123." in text
    assert "| a &#124; node | 3 of 3 | 0 | 0 | minfer resubmit | passed |" in text
    assert "| a disk | — | — | — | — | **failed** |" in text
    assert text.index("a disk") < text.index("node |")


def test_a_file_that_no_test_wrote_is_one_sentence(tmp_path, capsys):
    (tmp_path / "evidence.md").write_text(MARKERS)
    (tmp_path / "outcomes.json").write_text('["no"]')
    assert call(tmp_path) == 1
    said = capsys.readouterr().err
    assert "is not what the tests write" in said and said.count("\n") == 1
    assert (tmp_path / "evidence.md").read_text() == MARKERS
