"""Two sets of rows against each other: the ratio, what it is worth, and what a nightly job fails on."""

from __future__ import annotations

import datetime as dt
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from minfer.analysis import compare
from minfer.analysis.data import verdicts
from minfer.rows import store
from tests.tables import NOON, row
from tools import merge_rows

CASE = "hgemm/v02_tiled/float16/layout=TN,accumulate=float32/m=512,n=512,k=512"


def kernel(speedup: float, width: float = 0.002, **values: Any) -> store.Row:
    """A kernel with that paired speed-up over torch, known to ± `width`, relative."""
    ends = {"cold_speedup_low": speedup * (1 - width), "cold_speedup_high": speedup * (1 + width)}
    return row("v02_tiled", 100 / speedup, **({"cold_speedup": speedup, "cold_aa_spread": 0.001} | ends | values))


def torch(us: float, rounds: int = 60) -> store.Row:
    samples = us * (1 + 0.001 * np.sin(np.arange(rounds)))
    return row("torch", us, cold_samples_us=samples.tolist())


def sets(folder: Path, a: list[store.Row], b: list[store.Row]) -> list[str]:
    for name, rows in (("a", a), ("b", b)):
        store.write(store.to_table(rows), folder / f"{name}.parquet")
    return [str(folder / "a.parquet"), str(folder / "b.parquet")]


def found(folder: Path, a: list[store.Row], b: list[store.Row]) -> dict[str, verdicts.Compared]:
    files = [[Path(name)] for name in sets(folder, a, b)]
    return {case.case.split("/")[1]: case for case in verdicts.compare(files[0], files[1], "cold").cases}


@pytest.mark.parametrize(("second", "verdict"), [(1.30, "faster"), (1.25, "tie"), (1.2562, "tie"), (1.20, "slower")])
def test_speed_ups_over_a_common_baseline_decide(tmp_path: Path, second: float, verdict: str):
    # The card ran at half its clock in B: the times double, and say nothing.
    slow = kernel(second) | {"cold_us": 200 / second}
    case = found(tmp_path, [kernel(1.25)], [slow])["v02_tiled"]
    assert case.verdict == verdict and case.how == "through torch"
    assert case.ratio == pytest.approx(second / 1.25)
    assert case.low and case.high
    assert np.log(case.high / case.low) == pytest.approx(np.sqrt(2) * np.log(1.002 / 0.998), rel=0.02)


def test_without_a_common_baseline_times_are_compared_and_it_is_said(tmp_path: Path):
    other = kernel(1.25, baseline="other", cold_samples_us=[80.0] * 40)
    cases = found(tmp_path, [kernel(1.25, cold_samples_us=[100.0] * 40), torch(100)], [other, torch(105)])
    assert cases["v02_tiled"].how == verdicts.UNPAIRED and cases["v02_tiled"].ratio == pytest.approx(1.25)
    assert cases["torch"].how == verdicts.OWN and cases["torch"].verdict == "slower"
    assert not cases["torch"].fails(0.03)  # a slower baseline is no kernel's fault


def test_a_difference_below_what_the_control_shows_is_a_tie(tmp_path: Path):
    case = found(tmp_path, [kernel(1.25)], [kernel(1.30, cold_aa_spread=0.06)])["v02_tiled"]
    assert case.verdict == "tie"


def test_a_judged_time_is_not_compared_with_one_from_inside(tmp_path: Path):
    """Blocks of calls are no single cold calls. Of two judged rows the judge's figures are compared."""
    hints = {"guarantee": "judged, landlock", "judged_us": 50.0, "judged_baseline_us": 100.0, "judged_aa_spread": 0.0}
    ends = lambda speedup: {
        f"judged_speedup{end}": speedup * part for end, part in (("", 1), ("_low", 0.99), ("_high", 1.01))
    }
    (unlike,) = found(tmp_path, [kernel(1.0)], [kernel(1.0, **hints, **ends(2.0))]).values()
    assert (unlike.verdict, unlike.how) == ("unknown", verdicts.UNLIKE)
    (folder := tmp_path / "both").mkdir()
    (like,) = found(folder, [kernel(3.0, **hints, **ends(2.0))], [kernel(1.0, **hints, **ends(3.0))]).values()
    assert like.verdict == "faster" and like.ratio == pytest.approx(1.5)


def test_the_newest_row_of_a_case_counts(tmp_path: Path):
    old = kernel(2.0, run="r0", finished=NOON - dt.timedelta(days=1))
    assert found(tmp_path, [kernel(1.25), old], [kernel(1.25)])["v02_tiled"].verdict == "tie"


def test_a_newer_cold_run_does_not_hide_the_steady_row_that_is_compared(tmp_path: Path):
    steady = {f"steady_{name}": value for name, value in {"us": 80.0, "speedup": 1.25}.items()}
    steady |= {"steady_speedup_low": 1.24, "steady_speedup_high": 1.26, "steady_aa_spread": 0.001}
    newer = kernel(1.25, run="r2", finished=NOON + dt.timedelta(days=1), steady_us=None, steady_speedup=None)
    a, b = sets(tmp_path, [kernel(1.25, **steady), newer], [kernel(1.25, **steady)])
    (case,) = verdicts.compare([Path(a)], [Path(b)], "steady").cases
    assert case.us == (80.0, 80.0) and case.verdict == "tie"


def test_the_interval_holds_the_truth_as_often_as_it_says():
    random = np.random.default_rng(1)
    inside = 0
    for _ in range(400):
        ends = []
        for _ in range(2):
            gain = random.lognormal(0, 0.5, 61) * 0.01 - 0.01  # skewed, as times are; the median is 0
            ends.append(verdicts.median_interval(gain))
        middle = ends[1][0] - ends[0][0]
        inside += middle - np.hypot(ends[1][1], ends[0][2]) <= 0 <= middle + np.hypot(ends[1][2], ends[0][1])
    assert inside / 400 >= 0.95


def test_the_median_interval_is_that_of_the_bench():
    from minfer.bench import stats

    for n in (1, 5, 30, 61, 240):
        samples = np.random.default_rng(n).normal(size=n)
        middle, down, up = verdicts.median_interval(samples)
        assert (middle - down, middle + up) == pytest.approx(stats.median_interval(samples))


def test_a_nightly_job(tmp_path: Path, capsys):
    crash = row("v01_naive", None, status="crashed", message="illegal <access> \x07 at 3")
    words = sets(tmp_path, [kernel(1.25), row("v01_naive", 100)], [kernel(1.19), crash, row("v03_new", 5)])
    files = [tmp_path / "r.xml", tmp_path / "r.md"]
    words += ["--junit", str(files[0]), "--markdown", str(files[1])]
    assert compare.main(words) == 0
    assert compare.main([*words, "--fail-over", "6%"]) == 1  # what is broken always fails
    assert compare.main([*words, "--fail-over", "3%"]) == 1
    said = capsys.readouterr().out
    assert "2 cases: 1 broken, 1 slower. 1 row of B are of cases that only B has" in said
    suite = ElementTree.parse(files[0]).getroot()
    assert suite.get("tests") == "2" and suite.get("failures") == "2"
    messages = [failure.get("message") for failure in suite.iter("failure")]
    assert messages[0] == "broken: crashed: illegal <access>   at 3"
    assert messages[1] and messages[1].startswith("slower: 0.9520 (")
    text = files[1].read_text()
    assert "illegal" not in text and f"| {CASE} |" in text and "0.9520×" in text
    words[1] = words[0]
    assert compare.main([*words, "--fail-over", "0"]) == 0


def test_a_file_that_cannot_be_read_is_named_and_fails(tmp_path: Path, capsys):
    words = sets(tmp_path, [kernel(1.25)], [kernel(1.25)])
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "night").mkdir()
    (tmp_path / "night" / "0000-000.parquet").write_bytes(whole)
    torn = tmp_path / "night" / "0000-001.parquet"
    torn.write_bytes(whole[:-100])
    for more in ([], ["--fail-over", "3%"]):
        assert compare.main([words[0], str(tmp_path / "night"), *more]) == 2
        said = capsys.readouterr()
        assert said.err.startswith(f"{torn}: ") and said.err.endswith("; skipped\n") and said.err.count("\n") == 1
        assert "Every case is a tie." in said.out
    assert compare.main([words[0], str(torn)]) == 2
    assert capsys.readouterr().err.startswith(f"{torn}: ")


def test_limits_of_each_system_are_in_one_file(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = sets(tmp_path, [kernel(1.25)], [kernel(1.19)])  # 4.8 % slower
    device = kernel(1.25)["device"]
    for text, status in (
        (f"{device}: {{hgemm/*: 3%}}\n'*': {{'*': 50%}}", 1),
        ("NVIDIA*: {'*/nothing/*': 1%, 'hgemm/*': 50%}\n'*': {'*': 1%}", 0),
        ("another: {'*': 0%}", 0),
    ):
        Path("limits.yaml").write_text(text)
        assert compare.main([*words, "--fail-over", "limits.yaml"]) == status, text
    assert "Slower by more than limits.yaml allows, or broken: 0." in capsys.readouterr().out
    for text, said in (
        ("- 3%", "limits.yaml has to map devices to cases to parts"),
        ("x: {y: z}", "limits.yaml, x, y is 'z'; it"),
    ):
        Path("limits.yaml").write_text(text)
        assert compare.main([*words, "--fail-over", "limits.yaml"]) == 2 and said in capsys.readouterr().err
    assert compare.main([*words, "--fail-over", "none.yaml"]) == 2
    assert "cannot read none.yaml: No such file or directory" in capsys.readouterr().err


def test_slower_cases_that_do_not_fail_are_explained(tmp_path: Path, capsys):
    """It said "1 slower" and "slower by more than 3 %: 0" below a ratio of 0.87, whose interval reached to 0.98."""

    def timed(speedup: float, low: float, high: float) -> store.Row:
        ends = {"cold_speedup": speedup, "cold_speedup_low": low, "cold_speedup_high": high, "cold_aa_spread": 0.0}
        return row("v02_tiled", 100 / speedup, baseline="torch", **ends)

    words = sets(tmp_path, [timed(1.0, 1.0, 1.0)], [timed(0.87, 0.77, 0.98)])
    assert compare.main([*words, "--fail-over", "3%"]) == 0
    shown = capsys.readouterr().out
    assert "1 case: 1 slower." in shown and "Slower by more than 3 %, or broken: 0." in shown
    assert " 1 more case is slower and does not count: for 1 the interval ends within what is allowed." in shown
    words = sets(tmp_path, [timed(1.0, 1.0, 1.0)], [timed(0.87, 0.86, 0.88)])
    assert compare.main([*words, "--fail-over", "3%"]) == 1 and "more case" not in capsys.readouterr().out


def test_what_failed_in_both_is_no_tie(tmp_path: Path, capsys):
    def failed(kernel: str, status: str) -> store.Row:
        return row(kernel, None, status=status, message="no nvcc" if status == "compile_error" else "off by 3")

    before = [failed(f"v0{n}", "compile_error") for n in (1, 2, 3)]
    after = [failed("v01", "compile_error"), failed("v02", "wrong"), row("v03", 80)]
    report = tmp_path / "r.xml"
    words = sets(tmp_path, before, after)
    assert compare.main([*words, "--fail-over", "0", "--junit", str(report)]) == 0  # B is no worse than A
    table, _, said = capsys.readouterr().out.partition("3 cases: ")
    assert said.startswith("2 failed in both, 1 fixed.")
    lines = [line.split() for line in table.splitlines()]
    assert ["/v02/" in line[0] for line in lines].count(True) == 1 and not any("/v01/" in line[0] for line in lines)
    (moved,) = [line for line in lines if "/v02/" in line[0]]
    assert " ".join(moved[3:]).startswith("compile_error wrong") and "failed in both" in " ".join(moved)
    noted = [out.text or "" for out in ElementTree.parse(report).getroot().iter("system-out")]
    assert "failed in both: compile_error, then wrong: off by 3" in noted
    assert "failed in both: compile_error: no nvcc" in noted
    same = sets(tmp_path, before[:1], after[:1])
    assert compare.main(same) == 0
    assert capsys.readouterr().out.startswith("1 case: 1 failed in both.")


def test_revisions_of_committed_results(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    folder = tmp_path / "results" / "nvidia-h200" / "r1"
    folder.mkdir(parents=True)
    for speedup in (1.25, 1.5):
        store.write(store.to_table([kernel(speedup)]), folder / "0000-000.parquet")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", "rows"], check=True)
    assert compare.main(["HEAD~1", "HEAD"]) == 0
    assert "1.2000×" in capsys.readouterr().out
    assert compare.main(["HEAD", "r1"]) == 0  # a run by its name
    assert "Every case is a tie." in capsys.readouterr().out


def test_a_run_is_found_by_its_name_when_its_rows_have_been_merged(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results" / "nvidia-h200"
    for run, speedup in (("r1", 1.25), ("r2", 1.5)):
        (folder / run).mkdir(parents=True)
        store.write(store.to_table([kernel(speedup, run=run)]), folder / run / "0000-000.parquet")
    assert merge_rows.main([str(folder / "r1"), str(folder / "r2")]) == 0 and not (folder / "r1").exists()
    (folder / "scopes").mkdir()  # no run
    capsys.readouterr()
    assert compare.main(["r1", "results/nvidia-h200/r2"]) == 0
    assert "1.2000×" in capsys.readouterr().out
    assert compare.main(["r1", "r3"]) == 2
    assert "run r3; the newest run below results is r2" in capsys.readouterr().err


def test_a_run_is_found_where_its_request_wrote_the_rows(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for run in ("r1", "r2"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "config.yaml").write_text(f"results: {tmp_path}/else where\n")
    folder = tmp_path / "else where" / "nvidia-h200" / "r1"
    folder.mkdir(parents=True)
    store.write(store.to_table([kernel(1.25)]), folder / "0000-000.parquet")
    assert compare.main(["r1", "runs/r1"]) == 0
    assert "Every case is a tie." in capsys.readouterr().out
    assert compare.main(["r1", "r2"]) == 2
    said = f"the run r2 has no rows below {tmp_path}/else where; minfer status r2 says what became of it"
    assert capsys.readouterr().err == f"minfer compare: {said}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["a.parquet", "nowhere"],
            "there is no file, folder, git revision or run nowhere; there are no runs below results",
        ),
        (["a.parquet", "b.parquet", "--fail-over", "lots"], "--fail-over is 'lots'; it takes a part below 1"),
        (
            ["a.parquet", "c.parquet"],
            "no case is in both a.parquet and c.parquet on the same device, among 1 and 1 rows;",
        ),
        (["a.parquet", "b.parquet", "--junit", "no/j.xml"], "cannot write no/j.xml: No such file or directory"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], said: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sets(tmp_path, [kernel(1.25)], [kernel(1.25)])
    store.write(store.to_table([kernel(1.25, device="another")]), tmp_path / "c.parquet")
    assert compare.main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
