"""The compilers and tools that builds find: toolkits, a compiler of several words, blanks in paths, architectures."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minfer import build
from minfer.build import toolchain
from minfer.build.toolchain import arch_of
from minfer.ops import PACKAGE
from tests.workshop import DEVICE, Workshop, needs_nvcc


def test_a_toolkit_of_another_major_version_is_passed_over(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, release in (("old", "release 9.2"), ("broken", "")):
        for name, text in (("bin/nvcc", f"#!/bin/sh\necho {release}\n"), ("include/cuda_runtime.h", "")):
            path = workshop.folder / folder / name
            path.parent.mkdir(parents=True)
            path.write_text(text)
            path.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(workshop.folder / folder))
        assert toolchain.toolkit.__wrapped__() == toolchain.toolkit()
    if home := toolchain.toolkit():
        shutil.copytree(workshop.folder / "old", workshop.folder / "fits")
        nvcc = workshop.folder / "fits" / "bin" / "nvcc"
        nvcc.write_text(f"#!/bin/sh\nexec {home}/bin/nvcc --version\n")
        monkeypatch.setenv("CUDA_HOME", str(workshop.folder / "fits"))
        assert toolchain.toolkit.__wrapped__() == workshop.folder / "fits"  # and one that fits wins


def test_a_tool_is_found_on_the_path_then_in_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert toolchain.tool("minfer-sight") is None
    for folder in (tmp_path / "home" / "bin", tmp_path / "path"):
        folder.mkdir(parents=True)
        (folder / "minfer-sight").touch(mode=0o755)
        assert toolchain.tool("minfer-sight") == folder / "minfer-sight"


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((7, 5), "sm_75"), ((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"),
     ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((12, 0), "sm_120a")],
)  # fmt: skip
def test_arch_of(capability: tuple[int, int], arch: str) -> None:
    assert arch_of(capability) == arch


def test_ninja_is_found_beside_python_where_the_environment_is_not_active(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = Path(sys.executable).with_name("ninja")
    if not beside.exists():
        pytest.skip("this Python has no ninja beside it")
    monkeypatch.setenv("PATH", str(tmp_path))
    toolchain.put_ninja_on_path()
    assert shutil.which("ninja") == str(beside)
    toolchain.put_ninja_on_path()
    assert os.environ["PATH"] == f"{tmp_path}{os.pathsep}{beside.parent}"


def test_a_compiler_of_several_words(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `ccache g++`."""
    monkeypatch.setenv("CXX", f"env CCACHE=1 {toolchain.compiler()}")
    kernel = workshop.kernel()
    assert Path(build.build(kernel).library).is_file()
    assert toolchain.compiler_version(toolchain.compiler())
    assert toolchain.link_flags(toolchain.compiler()) == toolchain.link_flags("c++")


@pytest.mark.slow
def test_a_blank_in_every_path(workshop: Workshop, tmp_path: Path) -> None:
    """Of the cache, of HOME, of the kernel, and of PyTorch, as where the clone with its environment has one."""
    blank = tmp_path / "a b"
    blank.mkdir()
    (blank / "site").symlink_to(Path(torch.__file__).parents[1])
    shutil.copytree(PACKAGE, blank / "minfer", ignore=shutil.ignore_patterns("__pycache__", "analysis", "jobs"))
    text = (
        "import torch, minfer\nfrom minfer import build, ops\nassert ' ' in torch.__file__ and ' ' in minfer.__file__\n"
        "print(build.build(ops.get('hgemm').kernels['cpu_naive']).library)\n"
        "a = torch.ones(2, 3).half()\nprint(float(minfer.matmul(a, a.t()).sum()))"
    )
    path = os.pathsep.join([str(blank), str(blank / "site")])
    env = {name: value for name, value in os.environ.items() if name != "TORCH_EXTENSIONS_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, cwd=blank,
        env=env | {"PYTHONPATH": path, "HOME": str(blank)}, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    library, total = done.stdout.splitlines()
    assert library.startswith(str(blank)) and total == "12.0"


@needs_nvcc
def test_a_blank_in_the_path_of_the_cuda_toolkit(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    home = workshop.folder / "cuda 13"
    home.symlink_to(str(toolchain.toolkit()))
    monkeypatch.setattr(toolchain, "toolkit", lambda: home)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(workshop.folder / "a cache"))
    assert Path(build.build(workshop.kernel("device.cu", DEVICE), "sm_90a").library).is_file()
