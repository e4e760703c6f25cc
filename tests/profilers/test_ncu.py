"""Reading what Nsight Compute says, and living with what it does. Its output is that of 2025.3.1 on an H200; the tool
itself is played by a script, which takes the same arguments."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from minfer import ops
from minfer.build import toolchain
from minfer.ops import Case
from minfer.profilers import Finding, Job, ncu
from minfer.rows import store
from minfer.run import terminal

HGEMM = ops.get("hgemm")
PROBES = Path(__file__).resolve().parents[1] / "probes" / "kernels.py"
RAW = (Path(__file__).resolve().parents[1] / "data" / "ncu-2025.3.1-raw.csv").read_text()

PLAYED = """#!{python}
import json, os, sys, time
words, act = sys.argv[1:], {act!r}
if "--import" in words:
    lines, cases = open({raw!r}).read().splitlines(), int(open(words[1]).read())
    print("==ERROR== no report" if act == "garbage" else "\\n".join(lines[:2] + lines[2:4] * cases))
    sys.exit()
request = json.load(open(words[-1]))
cases = request["cases"]
print("==PROF== Connected to process 1")
if request["flush"]:
    assert words[words.index("--cache-control") + 1] == "none"
    print("==PROF== Profiling 'f': 100% -", "2 passes" if act == "passes" else "1 pass")
if act.startswith("=="):
    sys.exit(act)
for index, case in enumerate(cases):
    print(f"\\nminfer: case {{index}}", flush=True)
    if case["shape"]["m"] == 16 and act == "crash":
        os.abort()
    if case["shape"]["m"] == 16 and act == "hang":
        time.sleep(60)
    print("\\nminfer: done", flush=True)
open(words[words.index("--export") + 1], "w").write(str(len(cases)))
"""


def job(tmp_path: Path, act: str, sizes: tuple[int, ...], sets: list[str], monkeypatch: pytest.MonkeyPatch) -> Job:
    """Cases for an ncu that behaves in some way."""
    (tmp_path / "raw.csv").write_text(RAW)
    tool = tmp_path / "ncu"
    tool.write_text(PLAYED.format(python=sys.executable, act=act, raw=str(tmp_path / "raw.csv")))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    cases = [HGEMM.case("torch", "float16", {"m": m, "n": 64, "k": 64}) for m in sizes]
    return Job(cases, {"sets": sets, "clock_control": "none"}, "cuda", tmp_path / "reports", 60)


def test_kernels_are_grouped_by_the_marker() -> None:
    groups = ncu.read(RAW)
    names = [[kernel["Kernel Name"] for kernel in group] for group in groups]
    assert [len(group) for group in names] == [1, 2, 1]
    assert "splitKreduce_kernel" in names[1][1]
    assert all("nvjet" in group[0] for group in names)


def test_counts_add_up_and_shares_are_averaged() -> None:
    _, split, _ = ncu.read(RAW)
    names = {"dram_read_bytes": "dram__bytes_read.sum", "dram_write_bytes": "dram__bytes_write.sum"}
    names |= {
        "sm_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
        "sm_mhz": ncu.SETS["roofline"]["sm_mhz"],
    }
    names |= {"registers": "launch__registers_per_thread"}
    for kernel, cycles in zip(split, ("3,000", "1,000"), strict=True):
        kernel[ncu.CYCLES] = cycles
    found = ncu.finding(split, names, "ncu/000.ncu-rep")
    first, second = ({name: ncu.number(kernel, metric) or 0.0 for name, metric in names.items()} for kernel in split)
    assert found.why == "ok" and found.functions == {"kernel": split[0]["Kernel Name"], "report": "ncu/000.ncu-rep"}
    assert found.metrics["kernels"] == 2 and found.metrics["cycles"] == 4000
    assert found.metrics["dram_read_bytes"] == first["dram_read_bytes"] + second["dram_read_bytes"]
    assert found.metrics["dram_bytes"] == sum(first[n] + second[n] for n in ("dram_read_bytes", "dram_write_bytes"))
    assert found.metrics["sm_percent"] == pytest.approx(0.75 * first["sm_percent"] + 0.25 * second["sm_percent"])
    assert 1000 < found.metrics["sm_mhz"] < 2000
    assert found.metrics["registers"] == first["registers"] == 168


def test_a_square_reads_its_operands_from_memory_once() -> None:
    square, *_ = ncu.read(RAW)  # 1024^3 in bfloat16
    assert ncu.number(square[0], "dram__bytes_read.sum") == pytest.approx(2 * 2 * 1024**2, rel=0.01)


def test_the_summary_shows_what_was_counted() -> None:
    square, *_ = ncu.read(RAW)
    found = ncu.finding(square, ncu.SETS["roofline"], "")
    case = HGEMM.case("torch", "bfloat16", {"m": 1024, "n": 1024, "k": 1024})
    row = dict.fromkeys(store.SCHEMA.names) | case.to_dict() | {"bytes": HGEMM.bytes(case), "status": "ok"}
    counted = row | {"metrics": {f"ncu.{name}": value for name, value in found.metrics.items()}}
    assert terminal._tabulate_counters([row]) is None
    table = terminal._tabulate_counters([counted, row])
    assert table is not None and table.row_count == 1
    shown = {str(column.header): next(iter(column.cells)) for column in table.columns}
    assert shown["shape"] == "1024x1024x1024" and shown["kernels"] == "1"
    assert shown["DRAM MB"] == "4.2" and shown["of least"] == "0.67×"  # the product was still in the cache
    assert shown["tensor %"] == "44.5" and shown["SM MHz"] == "1,778"


@pytest.mark.parametrize("value", ["", "n/a", "nan", "inf"])
def test_a_counter_that_is_not_there_is_left_out(value: str) -> None:
    found = ncu.finding([{"Kernel Name": "f", "a.sum": "1,234", "b.sum": value}], {"a": "a.sum", "b": "b.sum"}, "")
    assert found.metrics["a"] == 1234 and "b" not in found.metrics
    assert found.why == "this GPU does not count b"


def test_all_cases_are_counted_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(ncu.profile(job(tmp_path, "", tuple(range(20, 20 + ncu.BATCH + 3)), ["roofline"], monkeypatch)))
    assert len(found) == ncu.BATCH + 3 and all(f.metrics["kernels"] == 1 for f in found)
    assert found[0].metrics["dram_bytes"] > 4e6
    assert [f.functions["report"] for f in found] == ["reports/000.ncu-rep"] * ncu.BATCH + ["reports/001.ncu-rep"] * 3
    assert (tmp_path / "reports" / "001.ncu-rep").exists()


@pytest.mark.parametrize(("act", "how"), [("crash", "ended with status -?"), ("hang", "was killed after")])
def test_a_case_that_ends_the_process_costs_only_itself(
    act: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ncu, "START_S", 2.0)
    monkeypatch.setattr(ncu, "CASE_S", 0.1)
    first, second, third = ncu.profile(job(tmp_path, act, (8, 16, 24), ["roofline"], monkeypatch))
    assert first.why == third.why and first.metrics == third.metrics and first.metrics["kernels"] == 1
    assert second.metrics == {} and second.why.startswith(how.rstrip("-?")) and "under ncu" in second.why


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters",
            "NVreg_RestrictProfilingToAdminUsers=0",
        ),
        (
            "==ERROR== Driver resource was unavailable. Ensure that no other tool (like DCGM) is concurrently collecting",
            "dcgmi profiling --pause",
        ),
        ("==ERROR== Profiling is not supported on device 0 as it uses the unsupported architecture", "install a newer"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "sandboxes"),
        ("==ERROR== Something new.", "Something new."),
        ("garbage", "ncu counted 0 of 2 cases"),
    ],
)
def test_what_keeps_ncu_from_counting_is_said_once_and_to_every_case(
    act: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(ncu.profile(job(tmp_path, act, (8, 24), ["roofline"], monkeypatch)))
    assert len(found) == 2 and found[0] == found[1]
    assert found[0].metrics == {} and words in found[0].why and "\n" not in found[0].why


def test_an_audit_asks_whether_cold_was_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The played tool always counts the 4.2 MB that a product of 1024 reads."""
    work = replace(job(tmp_path, "", (64, 40_000), ["roofline"], monkeypatch), audit=True)
    small, large = ncu.profile(work)
    assert small.why == "ok" and small.metrics["window_dram_read_bytes"] > 4e6 and "cycles" in small.metrics
    assert large.why.startswith("its cold calls were not cold: memory supplied 4.2 of 5.1 MB")
    assert large.metrics == small.metrics
    assert {path.name for path in work.folder.iterdir()} == {"000.ncu-rep", "000-audit.ncu-rep"}


def test_an_audit_in_several_passes_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = ncu.profile(replace(job(tmp_path, "passes", (64,), ["roofline"], monkeypatch), audit=True))
    assert "took 2 passes" in found.why and "cycles" in found.metrics and "window_dram_read_bytes" not in found.metrics


def test_without_ncu_or_a_gpu_there_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = job(tmp_path, "", (8,), ["roofline"], monkeypatch)
    monkeypatch.setattr(toolchain, "tool", lambda name: None)
    assert list(ncu.profile(work)) == [
        Finding(why="Nsight Compute is not installed; put its ncu on the PATH, or set CUDA_HOME")
    ]
    on_cpu = Job(work.cases, work.options, "cpu", work.folder, 60)
    assert list(ncu.profile(on_cpu)) == [Finding(why="counts on a CUDA GPU only")]


@pytest.fixture
def probes() -> Iterator[None]:
    """Kernels whose counters are known, registered for as long as a test takes."""
    before = dict(HGEMM.kernels)
    ops.load_file(PROBES)
    yield
    HGEMM.kernels.clear()
    HGEMM.kernels.update(before)


def measured(cases: list[Case], folder: Path, audit: bool = False) -> list[Finding]:
    options = {"sets": ["roofline", "bank_conflicts", "occupancy", "memory", "stalls"], "clock_control": "none"}
    return list(ncu.profile(Job(cases, options, "cuda", folder, 600, extra=[str(PROBES)], audit=audit)))


def product(kernel: str, **shape: int) -> Case:
    return HGEMM.case(kernel, "bfloat16", shape)


@pytest.mark.timing
@pytest.mark.gpu
def test_gpu_counters_tell_the_truth(probes: None, tmp_path: Path) -> None:
    """A copy moves what it copies; 32 loads in one bank conflict, and padded ones do not."""
    cases = [product("copies", m=32768, n=16384, k=16384)]  # much more than a cache keeps
    cases += [product(kernel, m=32, n=32, k=32) for kernel in ("conflicts", "padded")]
    found = measured(cases, tmp_path / "ncu")
    assert [f.why for f in found] == ["ok"] * 3
    copies, conflicts, padded = (f.metrics for f in found)

    size = 32768 * 16384 * 2
    assert copies["dram_bytes"] == pytest.approx(2 * size, rel=0.03)
    assert copies["dram_read_bytes"] == pytest.approx(size, rel=0.03)
    assert conflicts["shared_load_instructions"] == padded["shared_load_instructions"] == 32 * 32
    assert conflicts["shared_load_conflicts"] == pytest.approx(31 * 32 * 32, rel=0.02)
    assert padded["shared_load_conflicts"] < 0.01 * conflicts["shared_load_conflicts"]
    assert conflicts["shared_load_wavefronts"] == pytest.approx(32 * padded["shared_load_wavefronts"], rel=0.02)
    assert (tmp_path / "ncu" / "000.ncu-rep").stat().st_size > 1000


@pytest.mark.timing
@pytest.mark.gpu
@pytest.mark.slow
def test_gpu_counters_of_products(tmp_path: Path) -> None:
    """A product uses its tensor cores if its source says so; the window of an audit reads the inputs once."""
    cases = [product(kernel, m=1024, n=1024, k=1024) for kernel in ("v02_tiled", "v03_wmma")]
    found = measured(cases, tmp_path / "ncu")
    assert [f.why for f in found] == ["ok"] * 2
    tiled, wmma = (f.metrics for f in found)
    assert tiled["tensor_percent"] < 1 < wmma["tensor_percent"] <= 100
    assert all(
        0 < m["occupancy_percent"] <= 100 and m["kernels"] == 1 and 100 < m["sm_mhz"] < 4000 for m in (tiled, wmma)
    )

    (audited,) = measured(cases[-1:], tmp_path / "audit", audit=True)
    assert audited.why == "ok"
    assert audited.metrics["window_dram_read_bytes"] == pytest.approx(2 * 2 * 1024**2, rel=0.05)
