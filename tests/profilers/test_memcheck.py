"""`verify.memcheck=true`, with a script in compute-sanitizer's place."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from minfer import build, ops
from minfer.build import toolchain
from minfer.profilers import Job, memcheck
from minfer.profilers.memcheck_target import run_all
from tests.project.test_sanitize import CLEAN, READ, UNSUPPORTED

HGEMM = ops.get("hgemm")
KERNELS = ("v04_mma", "torch", "triton_tiled")
CASES = [HGEMM.case(name, "float16", dict.fromkeys("mnk", size)) for size in (64, 32) for name in KERNELS]


def job(tmp_path: Path, device: str = "cuda") -> Job:
    return Job(CASES, {}, device, tmp_path / "memcheck", 60.0, frozenset(case.key for case in CASES))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a script as compute-sanitizer, which keeps the requests that it gets and prints `log`."""

    def write(log: str, status: int = 0) -> None:
        script, said = tmp_path / "compute-sanitizer", tmp_path / "said"
        said.write_text(log + "\n")
        asked = shlex.quote(str(tmp_path / "asked"))
        script.write_text(f'#!/bin/sh\nfor last; do :; done\ncat "$last" >> {asked}\ncat "{said}"\nexit {status}\n')
        script.chmod(0o755)
        monkeypatch.setattr(toolchain, "tool", lambda name: script)

    return write


@pytest.mark.parametrize(
    ("log", "status", "why"),
    [
        (CLEAN, 0, "ok"),
        (READ, 86, "2 errors: Invalid __global__ read of size 16 bytes in v04_mma.cu:51"),
        (
            UNSUPPORTED,
            1,
            "compute-sanitizer does not support this GPU, or the sandbox that it is in; try another machine",
        ),
    ],
)
def test_a_row_says_what_memcheck_found_and_where(fake: Any, tmp_path: Path, log: str, status: int, why: str) -> None:
    fake(log, status)
    found = [finding.why for finding in memcheck.profile(job(tmp_path))]
    assert found == 2 * [why, "not run: neither CUDA nor Triton", why]
    decoder, text, asked = json.JSONDecoder(), (tmp_path / "asked").read_text(), []
    while text:
        request, end = decoder.raw_decode(text)
        asked, text = [*asked, request["case"]["kernel"]], text[end:]
    assert sorted(asked) == ["triton_tiled", "v04_mma"]  # once each, whatever the number of shapes
    assert sorted(path.name for path in (tmp_path / "memcheck").iterdir()) == [
        "hgemm-triton_tiled-1.log", "hgemm-v04_mma-0.log"
    ]  # fmt: skip


def test_a_machine_that_cannot_gets_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "tool", lambda name: None)
    assert {finding.why for finding in memcheck.profile(job(tmp_path))} == {memcheck.MISSING}
    found = {finding.why for finding in memcheck.profile(job(tmp_path, "cpu"))}
    assert found == {"not run: it checks the memory of a CUDA GPU only"}


def test_the_target_runs_a_kernel_on_what_it_supports_and_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    op = ops.get("rmsnorm")
    kernel, device = op.kernels["torch"], torch.device("cpu")
    cases = [op.case("torch", "float32", shape) for shape in op.odd_shapes]
    assert run_all(kernel, cases, device) == len(cases)
    with pytest.raises(AssertionError, match="supports none"):
        run_all(kernel, [], device)
    monkeypatch.setattr(build, "function", lambda kernel, arch: lambda *given, **call: None)
    with pytest.raises(AssertionError, match="the result is wrong"):
        run_all(kernel, cases, device)
