"""The one command, end to end, and the README's own claims."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys

import numpy as np
import pytest

import minfer.launch
from minfer import ops
from minfer.rows import store
from tests.conftest import ROOT, has_gpu, launch


def tiny(folder, *words: str) -> list[str]:
    where = [f"results={folder / 'results'}", f"runs={folder / 'runs'}"]
    return [
        "+sweep=hgemm",
        "cluster=local",
        "device=cpu",
        "shape=tiny",
        "timing=quick",
        "timing.cold_cap_s=0.2",
        "dtype=float16",
        *where,
        *words,
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of the smallest sweep: its folder and what the launcher printed."""
    folder = tmp_path_factory.mktemp("pipeline")
    told = f"echo $MINFER_RUN,$MINFER_ROWS,$MINFER_CASES,$MINFER_SHARDS >> {folder}/told; ls $MINFER_FOLDER; exit 3"
    done = launch(*tiny(folder, f"notify={told}"))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_a_command_is_told_of_the_run_at_its_end(finished):
    folder, printed = finished
    (run,) = (folder / "runs").iterdir()
    assert (folder / "told").read_text() == f"{run.name},4,4,1 done\n" and "config.yaml" in printed
    assert "Note: the command of notify ended with exit status 3." in printed


def test_a_kernels_log_has_what_kernels_print_and_no_noise_of_pytorch(finished):
    folder, _ = finished
    (log,) = folder.glob("runs/*/logs/0000.log")
    lines = log.read_text().splitlines()
    assert lines and all(line.startswith("--- hgemm/") for line in lines), lines


def test_run_leaves_a_row_for_every_case_with_everything_in_it(finished):
    folder, printed = finished
    rows = {row["kernel"]: row for row in store.rows(store.files(folder / "results"))}
    skinny = rows.pop("cpu_skinny")
    assert skinny["status"] == "unsupported" and skinny["message"] == "needs m to be at most 16, got 64", skinny[
        "message"
    ]
    assert set(rows) == {"torch", "cpu_naive", "cpu_blocked"}
    for row in rows.values():
        assert row["status"] in store.MEASURED
        assert row["op"] == "hgemm" and row["baseline"] == "torch" and row["device_kind"] == "cpu"
        assert row["params"] == {"layout": "TN", "accumulate": "float32"} and row["shape"] == {
            "m": 64,
            "n": 64,
            "k": 64,
        }
        assert 0 < row["error_over_bound"] < 1 and 0 < row["error_over_limit"] < 1 and row["verified"] >= 3
        assert row["flops"] == 2 * 64**3 and row["bytes"] == 2 * 3 * 64**2
        for regime in ("cold", "steady"):
            samples = np.array(row[f"{regime}_samples_us"])
            if regime == "cold":
                assert row["cold_us"] == pytest.approx(np.median(samples))
            assert samples.min() <= row[f"{regime}_us"] <= samples.max()
            assert row[f"{regime}_tflops"] == pytest.approx(row["flops"] / row[f"{regime}_us"] / 1e6)
            assert row[f"{regime}_speedup_low"] <= row[f"{regime}_speedup"] <= row[f"{regime}_speedup_high"]
        assert row["cold_rounds"] == len(row["cold_samples_us"]) == len(row["cold_duplicate_samples_us"])
        assert row["peaks"]["read_gbps"] > 0 and row["guarantee"] == "in-process"
        assert row["torch"] and row["python"] and row["device"] and row["source"] and row["node"]
        assert abs(row["finished"] - datetime.datetime.now(datetime.UTC)) < datetime.timedelta(hours=1)
        assert row["kernel"] in printed
    assert "4 of 4 cases" in printed and ".parquet" in printed and "minfer report" in printed
    assert re.search(r"^\d\d:\d\d:\d\d shards: 1 \w+; [0-4] of 4 rows", printed, re.MULTILINE)  # in a log, while it ran
    config = next((folder / "runs").glob("*/config.yaml")).read_text()
    assert "shape:" in config and "name: tiny" in config


def test_table_is_made_from_the_rows(finished, tmp_path):
    folder, _ = finished
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results:begin -->\n<!-- results:end -->\nafter\n")
    command = [sys.executable, "analysis/make_tables.py", "--results", str(folder / "results"), "--readme", str(readme)]
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    for row in store.rows(store.files(folder / "results")):
        page = next((tmp_path / "docs" / "results").glob("*/hgemm.md")).read_text()
        measured = row["status"] in store.MEASURED
        assert re.search(rf"\| *\**{row['kernel']}\b" if measured else f"unsupported: {row['kernel']}", page)
    assert subprocess.run([*command, "--check"], cwd=ROOT).returncode == 0


@pytest.mark.slow
def test_resume_runs_what_the_results_do_not_hold_and_skips_what_they_do(finished):
    folder, _ = finished
    before = store.files(folder / "results")
    done = launch(*tiny(folder, "resume=true", "kernel=[torch]", "dtype=[float16,bfloat16]"))
    assert done.returncode == 0, done.stderr
    assert "1 of 2 cases were in the results already" in done.stdout
    added = [path for path in store.files(folder / "results") if path not in before]
    assert [row["dtype"] for row in store.rows(added)] == ["bfloat16"]


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """A launch in this process: its exit status, what it printed, and its errors."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # compose sets it; here it must not outlive the test

    def launched(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["minfer", *words])
        status = minfer.launch.main()
        return status, *capsys.readouterr()

    return launched


def test_dry_run_starts_nothing(here, tmp_path):
    status, out, _ = here(*tiny(tmp_path, "dry_run=true"))
    assert status == 0 and "4 cases" in out and "Nothing was started" in out
    assert re.search("Left out: v01_naive, .*: needs a CUDA GPU", " ".join(out.split()))  # lines are wrapped
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_refuses_gpu_kernels(here, tmp_path):
    words = [word for word in tiny(tmp_path) if word != "device=cpu"]
    _, out, _ = here(*words, "dry_run=true")
    assert out.startswith("No CUDA GPU here: running the CPU kernels over the CPU shapes.\n")
    status, _, err = here(*words, "kernel=[v01_naive]")
    assert status == 2 and err.startswith("minfer: kernel v01_naive needs a CUDA GPU")


def test_unknown_kernel_is_one_line_with_the_nearest_names(here, tmp_path):
    status, _, err = here(*tiny(tmp_path, "kernel=[cpu_naiv]"))
    assert status == 2
    assert err == "minfer: unknown hgemm kernel 'cpu_naiv'; did you mean cpu_naive or v01_naive or cpu_skinny?\n"


def test_a_registered_kernel_without_its_source_is_one_line(here, tmp_path, monkeypatch):
    monkeypatch.setattr(ops.get("hgemm"), "kernels", dict(ops.get("hgemm").kernels))
    (tmp_path / "mine.py").write_text('from minfer import ops\nops.get("hgemm").cpp("cpu_gone.cpp")\n')
    status, _, err = here(*tiny(tmp_path, "kernel=[torch,cpu_gone]", f"extra=[{tmp_path}/mine.py]"))
    assert status == 2 and err.startswith("minfer: the source of kernel cpu_gone") and err.count("\n") == 1
    assert not (tmp_path / "results").exists()
    ops.load_file.cache_clear()


FEW_ON_A_GPU = ("torch", "v13_cooperative", "v15_gemv", "triton_tiled")


@pytest.mark.timing
@pytest.mark.gpu
@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["few", "all"])
def test_gpu_run_times_every_gpu_kernel(tmp_path, few):
    words = [word for word in tiny(tmp_path) if word != "device=cpu"]
    done = launch(*words, *([f"kernel=[{','.join(FEW_ON_A_GPU)}]"] if few else []))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(store.rows(store.files(tmp_path / "results")))
    unsupported = {row["kernel"] for row in rows if row["status"] == "unsupported"}
    assert unsupported == {row["kernel"] for row in rows if takes_few_rows_only(row["kernel"])} and unsupported
    assert {*FEW_ON_A_GPU} == {row["kernel"] for row in rows} if few else {*FEW_ON_A_GPU} < {r["kernel"] for r in rows}
    for row in rows:
        if row["kernel"] in unsupported:
            assert row["message"].startswith("needs m to be at most")
            continue
        assert row["status"] in store.MEASURED, row["message"]
        assert row["device_kind"] == "cuda" and row["driver"] and row["sm_mhz"] > 0 and row["steady_rotations"] > 1
        assert (
            0 < row["floor_us"] < row["cold_us"]
            and 0 < row["cold_percent_of_peak"] < 105
            and row["peaks"]["mma_float16_float32"] > 0
        )


def takes_few_rows_only(kernel: str) -> bool:
    op = ops.get("hgemm")
    many, few = (op.case(kernel, "float16", {"m": m, "n": 256, "k": 256}) for m in (256, 1))
    requires = op.kernels[kernel].requires
    return requires is not None and requires(many) is not None and requires(few) is None
