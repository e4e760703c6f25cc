"""A check that fails in a kernel's host code raises its whole sentence, on every PyTorch and with every compiler.

Each case runs in a process of its own, because what it looks for ends one. On the oldest PyTorch that is supported:

    python3 -m venv old && old/bin/pip install "torch==2.11.*" pytest pytest-timeout pytest-xdist ninja numpy pyarrow pandas \\
        hydra-core rich submitit && PYTHONPATH=$PWD old/bin/pytest -n0 tests/build/test_failing_checks.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minfer import build, ops
from minfer.build import cache, toolchain
from minfer.process import forked


def message(op: str, name: str, call: str, arch: str = "", **env: str) -> tuple[Path, str]:
    """The library of a kernel, and what its call raises in a new process."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in env.items():
            patch.setenv(variable, value)
        done = forked.run("tests.answering.calls", op, name, arch, call, timeout=500)
    assert done.returncode == 0, f"it ended with {done.returncode}: {done.stderr[-2000:]}"
    library, *said = done.stdout.splitlines()[-2:]
    return Path(library), " ".join(said)


HALF = "torch.zeros({}, dtype=torch.float16, device={!r})"


def halves(device: str, *shapes: tuple[int, ...]) -> str:
    return ", ".join(HALF.format(shape, device) for shape in shapes)


@pytest.fixture
def compiler_of_archives(tmp_path: Path) -> str:
    """A compiler that finds libstdc++.a alone, as one does whose folder was copied without what its links point to."""
    path = tmp_path / "g++"
    path.write_text(f'#!/bin/sh\nexec {toolchain.compiler()} -static-libstdc++ "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("complete", (pytest.param(True, marks=pytest.mark.slow), False), ids=("complete", "archives"))
def test_a_failing_check_on_a_cpu(complete: bool, tmp_path: Path, compiler_of_archives: str) -> None:
    env = {} if complete else {"CXX": compiler_of_archives, "TORCH_EXTENSIONS_DIR": str(tmp_path / "cache")}
    library, said = message("hgemm", "cpu_naive", halves("cpu", (3, 5), (4, 8), (8, 5)), **env)
    assert said.endswith("hgemm: out must have size 4 in dimension 0, got 3")
    assert b"libstdc++.so.6\0" in library.read_bytes()  # linked, and not a second copy


def test_how_the_standard_library_is_linked_is_part_of_a_builds_place(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = ops.get("hgemm").kernels["cpu_naive"]
    before = cache.directory(kernel, "")
    monkeypatch.setattr(cache, "link_flags", lambda command: ())
    assert cache.directory(kernel, "") != before


def test_a_compiler_that_has_no_shared_library_gets_no_flag() -> None:
    assert toolchain.link_flags("/nonexistent") == toolchain.link_flags("echo") == ()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "op, name, shapes, sentence",
    (
        ("hgemm", "v13_cooperative", ((64, 256), (128, 128), (128, 256)), "hgemm: out must have size 128"),
        ("hgemm", "v15_gemv", ((100, 256), (100, 128), (128, 256)), "hgemm: this kernel takes m up to"),
        ("rmsnorm", "v02_vectors", ((4, 64), (5, 64), (64,)), "rmsnorm: y must have size 5 in dimension 0, got 4"),
    ),
)
def test_a_failing_check_on_a_gpu(op: str, name: str, shapes: tuple[tuple[int, ...], ...], sentence: str) -> None:
    arch = toolchain.arch_of(torch.cuda.get_device_capability())
    assert build.build(ops.get(op).kernels[name], arch)
    assert sentence in message(op, name, halves("cuda", *shapes), arch)[1]
