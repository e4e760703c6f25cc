"""`tools/sanitize.py`: what it says of what compute-sanitizer says, with a script in the sanitizer's place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minfer import build, ops
from minfer.build import toolchain
from tools import sanitize

HEADER = "========= COMPUTE-SANITIZER\n"
CLEAN = f"{HEADER}right in 56 runs\n========= ERROR SUMMARY: 0 errors"
NO_RACE = f"{HEADER}right in 56 runs\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
READ = f"""{HEADER}========= Invalid __global__ read of size 16 bytes
=========     at void minfer::multiply<__half>(minfer::Gemm<T1>)+0x3a0 in v04_mma.cu:51
RuntimeError: CUDA error: unspecified launch failure
========= Target application returned an error
========= ERROR SUMMARY: 2 errors"""
RACE = f"""{HEADER}========= Error: Race reported between Write access at multiply()+0x1b0 and Read access at multiply()+0x2c0
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"""
WRONG = f"{HEADER}Traceback:\nAssertionError: the result is wrong (m=1)\n========= ERROR SUMMARY: 0 errors"
UNSUPPORTED = f'{HEADER}========= Error: Device not supported. Please refer to the "Supported Devices" section'
NOT_RUN = f"{HEADER}========= Error: Target application terminated before first instrumented API call"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a compute-sanitizer on the PATH that says `log`, on a machine with a GPU where all is compiled."""
    monkeypatch.setattr(sanitize, "FOLDER", tmp_path / "runs")
    monkeypatch.setattr(sanitize, "gpu", lambda: "sm_89")
    monkeypatch.setattr(sanitize, "compile_error", lambda kernel, arch: "")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def write(log: str, status: int = 0, racecheck: str = NO_RACE) -> None:
        (tmp_path / "memcheck").write_text(log + "\n")
        (tmp_path / "racecheck").write_text(racecheck + "\n")
        script = tmp_path / "compute-sanitizer"
        arguments = tmp_path / "arguments"
        script.write_text(
            f'#!/bin/sh\necho "$@" >> {arguments}\ncat "{tmp_path}/$2"\n[ $2 = racecheck ] || exit {status}\n'
        )
        script.chmod(0o755)

    return write


def test_clean_kernels_are_a_line_for_each_tool(fake, tmp_path, capsys):
    fake(CLEAN)
    assert sanitize.main(["hgemm/v04_mma", "hgemm/v04_mma_acc16", "--jobs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "[1/4] hgemm/v04_mma memcheck: clean",
        "[2/4] hgemm/v04_mma racecheck: clean",
        "[3/4] hgemm/v04_mma_acc16 memcheck: clean",
        "[4/4] hgemm/v04_mma_acc16 racecheck: clean",
    ]
    assert (tmp_path / "runs" / "hgemm-v04_mma-memcheck.log").read_text() == CLEAN + "\n"
    calls = (tmp_path / "arguments").read_text().splitlines()
    assert calls[0].endswith("tools/sanitize.py --child hgemm v04_mma")
    assert ["--report-api-errors" in call for call in calls] == [True, False] * 2  # the others do not know it


def test_every_kernel_of_the_gpu_is_the_default(fake, capsys):
    fake(CLEAN)
    assert sanitize.main(["--tool", "memcheck"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    names = {sanitize.title(k) for k in ops.every_kernel(["cuda"]) if k.builds_for("sm_89")}
    assert {line.split()[1] for line in lines} == names and "hgemm/v10_wgmma" not in names


def test_an_op_is_all_of_its_kernels(fake, tmp_path, capsys):
    """Kernels of two ops may have one name; each has its log."""
    fake(CLEAN)
    assert sanitize.main(["rmsnorm", "hgemm/v01_naive", "--tool", "memcheck"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    of_rmsnorm = [name for name, kernel in ops.get("rmsnorm").kernels.items() if kernel.backend == "cuda"]
    names = {"hgemm/v01_naive", *(f"rmsnorm/{name}" for name in of_rmsnorm)}
    assert len(names) > 3
    assert {line.split()[1] for line in lines} == names
    logs = {path.name for path in (tmp_path / "runs").iterdir()}
    assert logs == {f"{name.replace('/', '-')}-memcheck.log" for name in names}


def test_errors_are_counted_and_the_first_is_shown(fake, capsys):
    fake(READ, 1, RACE)
    assert sanitize.main(["hgemm/v04_mma"]) == 1
    out = capsys.readouterr().out
    assert "hgemm/v04_mma memcheck: 2 errors: Invalid __global__ read of size 16 bytes\n" in out
    assert "hgemm/v04_mma racecheck: 1 error: Error: Race reported between Write access" in out


@pytest.mark.parametrize(
    ("log", "status", "said"),
    [
        (WRONG, 1, "failed: AssertionError: the result is wrong (m=1)"),
        (HEADER + "ImportError: no torch\n" + NOT_RUN, 1, "did not run: ImportError: no torch"),
        (NOT_RUN, 255, "did not run: Error: Target application terminated before first instrumented API call"),
        (CLEAN, 86, "failed: right in 56 runs"),
    ],
)
def test_a_run_that_failed_is_not_clean(fake, capsys, log, status, said):
    fake(log, status)
    assert sanitize.main(["hgemm/v04_mma", "--tool", "memcheck"]) == 1
    assert capsys.readouterr().out.endswith(f"hgemm/v04_mma memcheck: {said}\n")


def test_a_device_that_it_does_not_support_is_one_sentence(fake, capsys):
    fake(UNSUPPORTED, 1)
    assert sanitize.main(["--tool", "memcheck"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("compute-sanitizer does not support this GPU") and captured.err.count("\n") == 1
    assert "[" not in captured.out


def test_a_kernel_that_does_not_compile_is_not_run(fake, capsys, monkeypatch):
    fake(CLEAN)
    monkeypatch.setattr(sanitize, "compile_error", lambda kernel, arch: "error: no" if "acc16" in kernel.name else "")
    assert sanitize.main(["hgemm/v04_mma", "hgemm/v04_mma_acc16", "--tool", "memcheck"]) == 1
    out = capsys.readouterr().out
    assert "hgemm/v04_mma_acc16 does not compile: error: no\n" in out and "[1/1] hgemm/v04_mma memcheck: clean" in out


def test_what_cannot_be_run_is_one_sentence(fake, capsys, monkeypatch):
    fake(CLEAN)
    assert sanitize.main(["v04_mma", "--tool", "memcheck"]) == 2
    with_kernels = dict.fromkeys(kernel.op for kernel in ops.every_kernel(["cuda"]))
    there_are = f"no CUDA kernel or op v04_mma; there are {', '.join(with_kernels)}, "
    assert capsys.readouterr().err.startswith(there_are)
    assert sanitize.main(["hgemm/v10_wgmma"]) == 2
    assert capsys.readouterr().err == "hgemm/v10_wgmma: not for this GPU, which is sm_89\n"
    monkeypatch.setattr(toolchain, "tool", lambda name: None)
    assert sanitize.main([]) == 2
    assert capsys.readouterr().err.startswith("no compute-sanitizer here: ")
    monkeypatch.setattr(sanitize, "gpu", lambda: "")
    assert sanitize.main([]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_the_child_runs_every_case_and_compares_it(monkeypatch):
    kernel = ops.get("hgemm").kernels["torch"]
    op = ops.get("hgemm")
    shapes = len(op.odd_shapes) + len(op.sizes["small"])
    assert sanitize.check(kernel, torch.device("cpu")) == shapes * 2 * 2 * 2 > 56  # shapes, dtypes, layouts, calls
    function = build.function(kernel)

    def wrong(out, *inputs, **call):
        function(out, *inputs, **call)
        out[-1, -1] += 1

    monkeypatch.setattr(build, "function", lambda kernel, arch: wrong)
    with pytest.raises(AssertionError, match=r"^the result is wrong \(float16/layout=TN,.*m=33,n=65,k=17"):
        sanitize.check(kernel, torch.device("cpu"))
