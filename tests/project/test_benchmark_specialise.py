"""`benchmarks/specialise.py`: all kinds of rows, on a CPU and as on a GPU, in seconds."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from benchmarks import specialise
from minfer import build
from minfer.analysis.demonstrations import adapting
from minfer.analysis.makers import demonstrations as make_demonstrations
from minfer.specialise import trial
from minfer.specialise.background import Background
from minfer.specialise.recipes import SEQ_SUM_LLVM
from tests.specialise.adapting import QUIET_FASTER, steady

QUICK: dict[str, Any] = {
    "gains": [(SEQ_SUM_LLVM, (20, 48))],
    "policy": replace(specialise.SETUPS["cpu"].policy, threshold=100, every_s=0.1),
}
# Like the GPU's setup except for the device: few lengths, and a build cache that is kept from part to part.
AS_ON_A_GPU = replace(
    specialise.SETUPS["cuda"], serves=SEQ_SUM_LLVM, lengths=(20, 33, 7, 48, 64, 12, 31, 9, 100, 16), **QUICK
)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("setup", [replace(specialise.SETUPS["cpu"], **QUICK), AS_ON_A_GPU], ids=["cpu", "as on a gpu"])
def test_a_short_run_writes_each_kind_of_row_and_they_can_be_drawn(
    setup: specialise.Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llvmlite")
    build.function(SEQ_SUM_LLVM.generic())  # now, so that no part has to build it
    steady(monkeypatch, QUIET_FASTER)  # trials take no time, and no process of their own
    monkeypatch.setattr(Background, "outcome", lambda self, key: trial.tried(self.recipe, key))
    monkeypatch.setitem(specialise.SETUPS, "cpu", setup)
    assert specialise.main(["--minutes=0.4", "--rounds=5", f"--root={tmp_path}"]) == 0
    (path,) = (tmp_path / "benchmarks" / "results").iterdir()
    rows = pq.read_table(path).to_pylist()
    assert capsys.readouterr().out.count("written: ") == len(rows)  # each as soon as it is measured
    assert [row["kind"] for row in rows] == ["cost"] * 4 + ["gain"] * 2 + ["trace"] * 3
    (found,), problems = make_demonstrations.load_rows(path.parent, "specialise")
    assert not problems
    for row in adapting.select_kind(rows, "trace"):
        assert row["batch"] == 256 and row["seconds"] >= 1 and row["faster"] > 0
        assert len(row["at"]) == len(row["adaptive_s"]) > 10
        assert row["known"] == 0 if setup.fresh else row["known"] >= 2  # of the gains
        assert row["variants"][-1] > 0 and row["loaded"] >= row["variants"][-1]
    picture = adapting.adapting(found, found[0]["device"])
    assert "last quarter: " in picture.about
    text = "\n".join(adapting.adapting_lines(found))
    assert re.search(r"\| seq_sum_llvm \| batch 256, longest 20 \| faster \|", text)


def test_what_it_cannot_do_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["--minutes=0"], ["--minutes=nan"], ["--rounds=0"]):
        with pytest.raises(SystemExit, match=r"^specialise.py takes --minutes above 0 and --rounds of at least 1$"):
            specialise.main(words)
    monkeypatch.setattr("minfer.bench.device.no_gpu", lambda: "this machine has none")
    with pytest.raises(SystemExit, match=r"^specialise.py --device cuda needs a GPU: this machine has none$"):
        specialise.main(["--device=cuda"])


def test_the_setups_fit_their_recipes_and_traces() -> None:
    for kind, setup in specialise.SETUPS.items():
        assert {recipe.device for recipe, _ in setup.gains} | {setup.serves.device} == {kind}
        assert set(setup.traces) == set(adapting.LENGTHS)
        for weights in setup.traces.values():
            assert [len(half) for half in weights] == [len(setup.lengths)] * 2
    assert all(sorted(ranks) == list(range(1, 11)) for ranks in (specialise.FIRST, specialise.SECOND))
