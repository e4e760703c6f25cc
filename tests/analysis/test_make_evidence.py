"""The evidence from real parquet: what the benchmarks wrote is what docs/evidence.md and methodology say, misses included."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks import cost, report_at_scale, sensitivity, tables_at_scale
from minfer.analysis import make
from minfer.analysis.demonstrations.trap import clock_trap
from minfer.analysis.makers import evidence as make_evidence
from minfer.rows.rules import CASE_OVERHEAD_S, SWEEP_OVER_WINDOWS
from minfer.rows.store import Row

ROOT = Path(__file__).resolve().parents[2]
H200 = "NVIDIA H200"
ABOUT = {"device": H200, "driver": "580.95.05", "torch": "2.11.0", "commit": "6738d94f00aa"}
ORIGIN = "Measured on NVIDIA H200; driver 580.95.05; PyTorch version 2.11.0; commit 6738d94f00aa."
EVIDENCE = ("sensitivity", "scale")
METHODOLOGY = ("clock-trap", "cost", "verdicts", "two-processes", "nvbench")


def check(name: str = "A/A", value: float = 0.01, target: float | None = 0.02, **values: Any) -> Row:
    met = None if target is None else value <= target
    made = {"check": name, "what": f"of {name}", "value": value, "target": target, "unit": "share", "met": met}
    return made | ABOUT | values


CHECKS = [
    check("A/A: the same kernel", 0.005),
    check("slowed by 2 %", 0.0, 0.0),
    check("steady, 512x512x512", 0.0097512, 0.01, unit="relative"),
    check("cold, 512x512x512", 0.12865, 0.02, unit="relative"),
    check("cold, 64x64x64", 0.019, 0.02, unit="relative"),
]


def candidates(**values: Any) -> list[Row]:
    """Two methods, of which the second was measured by the better bench, and two repetitions of four candidates."""
    naive = [[800.0, 790.0, 720.0, 710.0], [700.0, 690.0, 685.0, 680.0]]
    paired = [[700.0, 701.0, 702.0, 703.5], [701.0] * 4]
    return [
        {"method": method, "repetition": i, "arm": n, "tflops": rate, "sm_mhz": 1980.0 - 10 * n * (method == "naive")}
        | ABOUT
        | values
        for i in range(2)
        for method, rates in (("naive", naive), ("a, paired", paired))
        for n, rate in enumerate(rates[i])
    ]


def spent(folder: Path, **values: Any) -> Row:
    """The row that cost.py makes of a sweep of two cases."""
    shard = folder / "runs" / "r" / "shards" / "0000.json"
    shard.parent.mkdir(parents=True)
    shard.write_text(json.dumps({"timing": {"warmup_s": 0.02, "steady_block_s": 0.1}}))
    samples = {f"cold_{of}samples_us": [1000.0] * 50 for of in ("", "baseline_", "duplicate_")}
    times: Row = {"status": "ok", "backend": "cuda", "build_s": 9.0, "verify_s": 0.1, "time_s": 0.7}
    rows = [samples | times | {"case": name} for name in ("a", "b")]
    events: list[Row] = [{"event": "building", "time": 1.0}, {"event": "built", "time": 4.0}]
    for name, begin in (("a", 5.0), ("b", 6.5), ("c", 8.0)):  # the last is of a kernel that does not take the case
        events += [
            {"event": event, "case": name, "time": begin + after} for event, after in (("case", 0), ("done", 0.9))
        ]
    rows.append(dict.fromkeys(samples | times) | {"case": "c", "status": "unsupported"})
    return cost.split(8.0, rows, events, folder) | ABOUT | values


def scaled(seconds: float = 80.0) -> list[Row]:
    """The rows of tables_at_scale.py for ten million rows."""
    return [row | ABOUT for row in tables_at_scale.checks(10_000_000, 2000, seconds, 3.5, 0)]


REPORT = [row | ABOUT for row in report_at_scale.checks(100_000, 1.5, 1.75, 0.25, 0)]


class Workspace:
    """Results, evidence, methodology and plots in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.results, self.plots = folder, folder / "results", folder / "docs" / "plots"
        self.page, self.methodology = folder / "docs" / "evidence.md", folder / "docs" / "methodology.md"
        self.results.mkdir()
        self.plots.mkdir(parents=True)
        for path, names in ((self.page, EVIDENCE), (self.methodology, METHODOLOGY)):
            path.write_text("before\n" + "".join(f"<!-- {n}:begin -->\n<!-- {n}:end -->\n" for n in names) + "after\n")

    def write(self, kind: str, rows: list[Row], device: str = "nvidia-h200") -> Path:
        path = self.results / f"{kind}-{device}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path

    def write_all(self) -> None:
        self.write("sensitivity", CHECKS)
        self.write("clock-trap", candidates())
        self.write("cost", [spent(self.folder)])
        self.write("tables-at-scale", scaled())
        self.write("report-at-scale", REPORT)

    def run(self, *arguments: object) -> int:
        files, words = ([a for a in arguments if isinstance(a, Path) == is_file] for is_file in (True, False))
        where = ["--benchmarks", self.results, "--docs", self.page.parent, *(["--measured", *files] if files else [])]
        return make.main(["evidence", *map(str, [*words, *where])])

    def part(self, name: str) -> str:
        """What stands between the markers of that name."""
        text = (self.page if name in EVIDENCE else self.methodology).read_text()
        return text[text.index(f"<!-- {name}:begin -->") : text.index(f"<!-- {name}:end -->")]

    def cells(self, name: str) -> list[list[str]]:
        """The tables' cells, without headers."""
        lines = [line.strip("| ").split(" | ") for line in self.part(name).splitlines() if line.startswith("|")]
        rules = [i for i, line in enumerate(lines) if line[0] == ":--"]
        return [line for i, line in enumerate(lines) if i not in rules and i + 1 not in rules]


@pytest.fixture
def work(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def test_the_page_says_what_was_checked_found_and_allowed(work: Workspace) -> None:
    work.write("sensitivity", CHECKS)
    assert work.run() == 0
    assert [line for name in make_evidence.WORDS for line in work.cells(name)] == [
        ["A/A: the same kernel", "of A/A: the same kernel", "0.500 %", "2 %", "met"],
        ["slowed by 2 %", "of slowed by 2 %", "0 %", "0 %", "met"],
        ["steady, 512x512x512", "of steady, 512x512x512", "0.975 %", "1 %", "met"],
        ["cold, 512x512x512", "of cold, 512x512x512", "12.9 %", "2 %", "**missed**"],
        ["cold, 64x64x64", "of cold, 64x64x64", "1.90 %", "2 %", "met"],
    ]
    assert f"{ORIGIN} Met: 4 of 5 targets. **Missed: 1** (1 of the 2 against nvbench)." in work.part("sensitivity")
    assert work.page.read_text().startswith("before\n") and work.page.read_text().endswith("after\n")


def test_what_many_rows_cost_has_targets_that_grow_with_the_rows(work: Workspace) -> None:
    work.write("report-at-scale", REPORT)
    assert work.run() == 0
    assert "`uv run python benchmarks/tables_at_scale.py` does it" in work.part("scale")
    work.write("tables-at-scale", scaled())
    assert work.run() == 0
    tables, report = "tables of 10,000,000 rows in 2,000 files", "report of 100,000 rows, in Chromium"
    assert work.cells("scale") == [
        [tables, "seconds on two cores", "80.0 s", "90 s", "met"],
        [tables, "peak memory", "3.50 GB", "4 GB", "met"],
        [report, "first paint", "1.50 s", "2 s", "met"],
        [report, "until the table of all rows can be used", "1.75 s", "—", "shown only"],
        [report, "the slowest of 7 filters", "0.250 s", "0.2 s", "**missed**"],
        [report, "errors in the browser's console", "0 errors", "0 errors", "met"],
    ]
    assert [tables_at_scale.target(rows)[0] for rows in (1_000_000, 1_000_001)] == [10, 90]
    assert not any(row["met"] for row in tables_at_scale.checks(1_000_000, 1, 1.0, 1.0, status=1))
    with pytest.raises(ValueError, match="up to 10000000 rows, and none for 10000001"):
        tables_at_scale.target(10_000_001)


def test_each_check_is_beside_its_rule_and_none_is_lost(work: Workspace) -> None:
    work.write("sensitivity", [*CHECKS, check("something new")])
    assert work.run() == 0
    shown = {name: [line[0] for line in work.cells(name)] for name in make_evidence.WORDS}
    assert shown == {
        "verdicts": ["A/A: the same kernel", "slowed by 2 %", "something new"],
        "two-processes": ["steady, 512x512x512"],
        "nvbench": ["cold, 512x512x512", "cold, 64x64x64"],
    }
    assert all(ORIGIN in work.part(name) for name in shown)


def test_the_checks_of_sensitivity_are_sorted_as_they_are_named_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"reading": [9.0, 11.0], "writing": [10.0, 10.0], "nvbench": 10.5}
    answers = {"--steady-medians": {"64x64x64": 5.0}, "--nvbench": {"64x64x64": ours}}
    monkeypatch.setattr(sensitivity, "in_process", lambda flag: json.dumps(answers[flag]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    found = {"two-processes": list(sensitivity.two_processes()), "nvbench": list(sensitivity.against_nvbench())}
    for group, rows in found.items():
        assert rows and {make_evidence.group(row) for row in rows} == {group}
        assert all(set(row) == set(make_evidence.KINDS["sensitivity"][1]) for row in rows)


def test_what_sensitivity_writes_says_which_sources_measured_it(
    work: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "FOLDER", work.results)
    monkeypatch.setattr(sensitivity.devices, "pick", lambda name: torch.device("cpu"))
    monkeypatch.setattr(sensitivity, "commit_of_sources", lambda: "6738d94f00aa+")
    for name in ("slowed", "two_processes", "against_nvbench"):
        monkeypatch.setattr(sensitivity, name, lambda: iter(()))
    found = sensitivity.row("A/A", "of 2", 0.5, 0.02, "share")
    monkeypatch.setattr(sensitivity, "same_against_itself", lambda: iter([found]))
    sensitivity.measure(Console(quiet=True))
    assert work.run() == 0
    assert work.cells("verdicts") == [["A/A", "of 2", "50.0 %", "2 %", "**missed**"]]
    assert f"PyTorch version {torch.__version__}; commit 6738d94f00aa+. Met: 0 of 1" in work.part("sensitivity")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([check(), check()], "Met: 2 of 2 targets."),
        ([check(), check(target=None)], "Met: 1 of 1 target."),
        ([check(value=0.03)], "Met: 0 of 1 target. **Missed: 1** (1 of the 1 about verdicts)."),
        (
            [
                check(value=1.0),
                check("steady, 1", 1.0),
                check("steady, 2"),
                check("cold, 1", 1.0),
                check("cold, 2", 1.0),
            ],
            "Met: 1 of 5 targets. **Missed: 4** (1 of the 1 about verdicts, 1 of the 2 between two processes, "
            "2 of the 2 against nvbench).",
        ),
    ],
)
def test_summary_counts_what_was_met_and_missed(work: Workspace, rows: list[Row], said: str) -> None:
    work.write("sensitivity", rows)
    assert work.run() == 0
    assert f"{ORIGIN} {said}\n" in work.part("sensitivity")


def test_a_check_without_a_target_is_neither_met_nor_missed(work: Workspace) -> None:
    work.write("sensitivity", [check("new", 12.5, None, unit="µs")])
    assert work.run() == 0
    assert work.cells("verdicts") == [["new", "of new", "12.5 µs", "—", "shown only"]]


def test_another_way_of_flushing_than_nvbenchs_is_shown_and_no_target(work: Workspace) -> None:
    like, unlike = (
        check("cold, 64x64x64", 0.05, 0.02) | {"what": f"nvbench 9.0 µs; minfer, {how} flush: 9.5"}
        for how in ("writing", "reading")
    )
    work.write("sensitivity", [like, unlike])
    assert work.run() == 0
    assert [line[3:] for line in work.cells("nvbench")] == [["2 %", "**missed**"], ["—", "shown only"]]
    assert "Met: 0 of 1 target" in work.part("sensitivity")


@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0) | st.floats(-1e-4, 1e-4), st.sampled_from(["share", "s"]))
def test_what_is_shown_is_on_the_side_of_the_target_that_it_is_on(target: float, off: float, unit: str) -> None:
    value = target * (1 + off)
    percent = 100 if unit == "share" else 1
    shown = float(make_evidence.format_found(check(value=value, target=target, unit=unit)).split()[0])
    assert (shown <= percent * target) == (percent * value <= percent * target)
    assert shown == pytest.approx(percent * value, rel=0.006)


def test_the_clock_trap_has_every_candidate_the_spread_and_the_clock(work: Workspace) -> None:
    work.write("clock-trap", candidates()[::-1] + candidates(tflops=float("nan")))
    assert work.run() == 0
    assert work.cells("clock-trap") == [
        ["a, paired", "1", "700.0", "701.0", "702.0", "703.5", "0.50 %", "1980"],
        ["a, paired", "2", "701.0", "701.0", "701.0", "701.0", "0.00 %", "1980"],
        ["naive", "1", "800.0", "790.0", "720.0", "710.0", "12.68 %", "1980, 1970, 1960, 1950"],
        ["naive", "2", "700.0", "690.0", "685.0", "680.0", "2.94 %", "1980, 1970, 1960, 1950"],
    ]
    assert f"{ORIGIN} How far apart the same kernel seems, at most: a, paired: 0.50 %; naive: 12.68 %." in work.part(
        "clock-trap"
    )
    (link,) = re.findall(r"!\[.+\]\((.+)\)", work.part("clock-trap"))
    assert link == "plots/nvidia-h200/clock-trap.svg" and (work.methodology.parent / link).is_file()


def test_the_picture_has_a_point_for_each_candidate() -> None:
    (ax,) = clock_trap(H200, candidates()).figure.axes
    points = [line for line in ax.lines if len(line.get_xdata()) == 1]
    drawn = [(float(line.get_xdata()[0]), int(line.get_ydata()[0])) for line in points]
    assert sorted(drawn) == sorted(
        (row["tflops"], 2 * (row["method"] != "naive") + row["repetition"]) for row in candidates()
    )
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "naive, 1",
        "naive, 2",
        "a, paired, 1",
        "a, paired, 2",
    ]
    said = [text.get_text() for text in ax.texts]
    assert {"12.68 %", "2.94 %", "0.50 %", "0.00 %"} <= set(said) and said.count("1950–1980") == 2
    assert len({(line.get_color(), line.get_marker()) for line in points}) == 4


def test_the_time_of_a_case_is_split_into_parts_that_add_up(work: Workspace) -> None:
    row = spent(work.folder)
    assert sum(row[column] for column in make_evidence.PARTS) == pytest.approx(row["case_s"])
    work.write("cost", [row])
    assert work.run() == 0
    parts, checks = work.cells("cost")[:-2], work.cells("cost")[-2:]
    assert [[time, share] for _, time, share in parts] == [
        ["0.550 s", "61.1 %"],
        ["0.100 s", "11.1 %"],
        ["0.020 s", "2.2 %"],
        ["0.130 s", "14.4 %"],
        ["0.100 s", "11.1 %"],
        ["0.900 s", "100.0 %"],
    ]
    assert checks[0][2:] == ["0.350 s", f"{CASE_OVERHEAD_S:g} s", "**missed**"]
    assert checks[1][0] == "A sweep of 2 cases, 8.0 s"
    assert checks[1][2:] == ["1.95 times", f"{SWEEP_OVER_WINDOWS:g} times", "**missed**"]
    work.write("cost", [row | {"case_overhead_s": CASE_OVERHEAD_S, "ratio": SWEEP_OVER_WINDOWS}])
    assert work.run() == 0
    assert [line[-1] for line in work.cells("cost")[-2:]] == ["met", "met"]


def test_what_nobody_measured_says_so(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    assert work.run() == 0
    for name in (*EVIDENCE, *METHODOLOGY):
        assert "Nothing was measured yet: `uv run python benchmarks/" in work.part(name)
    for script in re.findall(r"benchmarks/\w+\.py", work.methodology.read_text() + work.page.read_text()):
        assert (ROOT / script).is_file()
    assert work.run("--check") == 0
    assert work.run("--check", "--benchmarks", str(work.folder / "absent")) == 0
    work.write("sensitivity", [row for row in CHECKS if not row["check"].startswith("cold")])
    assert work.run() == 0
    assert "Nothing was measured yet" in work.part("nvbench") and work.cells("verdicts")
    assert capsys.readouterr().err == ""


def test_columns_that_say_where_it_was_measured_may_be_missing(work: Workspace) -> None:
    work.write("sensitivity", [{k: v for k, v in row.items() if k != "commit"} for row in CHECKS])
    work.write(
        "clock-trap", [{k: v for k, v in row.items() if k not in ABOUT and k != "sm_mhz"} for row in candidates()]
    )
    assert work.run() == 0
    assert "Measured on NVIDIA H200; driver 580.95.05; PyTorch version 2.11.0. Met" in work.part("sensitivity")
    assert "Measured on unknown device. How far" in work.part("clock-trap")
    assert {line[-1] for line in work.cells("clock-trap")} == {"—"}


def test_every_device_has_its_tables(work: Workspace) -> None:
    for name in ("NVIDIA H200", "NVIDIA L40S"):
        slug = name.lower().replace(" ", "-")
        work.write("sensitivity", [check(value=0.0, device=name)], slug)
        work.write("clock-trap", candidates(device=name), slug)
    assert work.run() == 0
    for name in ("sensitivity", "clock-trap", "verdicts"):
        assert re.findall(r"Measured on ([^;]+);", work.part(name)) == ["NVIDIA H200", "NVIDIA L40S"]
    assert len(list(work.plots.glob("*/clock-trap*.svg"))) == 2


CHANGED = {
    "sensitivity": ([check(value=0.0199)], ["evidence.md", "methodology.md"]),
    "clock-trap": (candidates(tflops=1.5), ["clock-trap.svg", "methodology.md"]),
    "tables-at-scale": (scaled(100.0), ["evidence.md"]),
    "cost": ([{"cases": 1, "sweep_s": 1.0, "ratio": 1.0, "case_s": 1.0, "case_overhead_s": 0.1}], ["methodology.md"]),
}


def test_check_notices_each_changed_file(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    work.write_all()
    assert work.run("--check") == 1
    assert "Nothing" not in work.page.read_text() and not list(work.plots.iterdir())
    assert work.run() == 0
    assert work.run("--check") == 0
    picture = work.plots / "nvidia-h200" / "clock-trap.svg"
    made = {path: path.read_bytes() for path in work.folder.rglob("*.parquet")}
    for kind in sorted(CHANGED, key=lambda kind: kind == "clock-trap"):  # the last stays deleted
        for file, content in made.items():
            file.write_bytes(content)
        rows, files = CHANGED[kind]
        path = work.write(kind, rows)
        before = work.page.read_text(), work.methodology.read_text()
        capsys.readouterr()
        assert work.run("--check") == 1
        complaints = capsys.readouterr().err.splitlines()
        assert [Path(line.partition(" is out of date")[0]).name for line in complaints] == sorted(
            files, key=lambda name: name.endswith(".md")
        )
        assert before == (work.page.read_text(), work.methodology.read_text())
        path.unlink()
        assert work.run("--check") == 1 and picture.exists()
    assert work.run() == 0
    assert work.run("--check") == 0
    assert not picture.exists()


def test_other_pictures_stay(work: Workspace) -> None:
    kept = work.plots / "nvidia-h200" / "hgemm-ladder.svg"
    kept.parent.mkdir()
    kept.write_text("another's")
    assert work.run() == 0
    assert work.run("--check") == 0 and kept.read_text() == "another's"


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("sensitivity-a.parquet", b"no parquet", ""),
        ("other.parquet", [check()], "its name begins with none of sensitivity, clock-trap, cost"),
        ("cost-a.parquet", [{"case_s": 1.0}], "it has no column cases, sweep_s, ratio, case_overhead_s"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence_and_changes_nothing(
    work: Workspace, name: str, content: Any, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    work.write_all()
    path = work.results / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        pq.write_table(pa.Table.from_pylist(content), path)
    before = work.page.read_text()
    assert work.run(path) == 1
    complaints = capsys.readouterr().err
    assert complaints.startswith(f"{path}: {why}") and complaints.count("\n") == 1
    assert work.page.read_text() == before
    assert work.run() == (0 if name == "other.parquet" else 1)  # others may keep files in that folder
    assert work.run(work.results / "sensitivity-nvidia-h200.parquet") == 0  # the others only where nobody names files
    assert work.cells("verdicts") and not work.cells("cost")


def test_text_without_markers_is_named(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    work.methodology.write_text("no markers")
    assert work.run() == 1
    complaints = capsys.readouterr().err.splitlines()
    assert len(complaints) == len(METHODOLOGY) and all(str(work.methodology) in line for line in complaints)
