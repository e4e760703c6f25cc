"""What the sandbox of a shard shows: the cache of compiled kernels, and which of a GPU's device files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minfer.plan.shard import Shard, Unfit
from minfer.worker import confinement
from tests.conftest import FAST


@pytest.mark.parametrize(
    ("starts_with", "found"),
    [
        ("its own", ("landlock", ["nvidia1", "nvidiactl"])),
        ("all", ("landlock", ["nvidia0", "nvidia1", "nvidiactl"])),
        ("none", ("limits", ["nvidia0", "nvidia1", "nvidiactl"])),
    ],
)
def test_of_several_gpus_one_is_visible_where_cuda_starts_with_that(
    starts_with: str, found: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [str(tmp_path / name) for name in ("nvidia0", "nvidia1", "nvidiactl")]
    works = {"its own": [tuple(every[1:]), tuple(every)], "all": [tuple(every)], "none": []}[starts_with]
    monkeypatch.setattr("minfer.sandbox.available", lambda level, devices: devices in works)
    monkeypatch.setattr(confinement, "available", lambda level, devices: devices in works)
    monkeypatch.setattr(confinement, "gpu_files", lambda: (every[1:], every, "GPU-1"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    shard = Shard(
        "0000", "run", str(tmp_path / "run"), str(tmp_path / "results"), "cuda", [], FAST, 60.0, 60.0, untrusted=True
    )
    sandbox = confinement.make_sandbox(shard)
    assert (sandbox.level, [Path(name).name for name in sandbox.devices]) == found
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1"


def test_the_driver_says_which_device_file_is_which_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["nvidia-caps", "nvidia-uvm", "nvidia0", "nvidia1", "nvidia10", "nvidiactl"]
    for name in names:
        (tmp_path / name).touch()
    about = tmp_path / "driver" / "gpus" / "0000:1b:00.0" / "information"
    about.parent.mkdir(parents=True)
    about.write_text("Model: \t\t NVIDIA H100\nDevice Minor: \t 1\n")
    monkeypatch.setattr(confinement, "FIRST_GPU", "print('0000:1b:00.0', 'GPU-1')")
    *files, uuid = confinement.gpu_files(tmp_path, tmp_path / "driver")
    own, every = ([Path(name).name for name in each] for each in files)
    assert every == names and uuid == "GPU-1"
    assert own == ["nvidia-caps", "nvidia-uvm", "nvidia1", "nvidiactl"]
    monkeypatch.setattr(confinement, "STARTS_S", 1.0)
    for unknown in ("print('0000:2c:00.0', 'GPU-2')", "print()", "raise SystemExit(1)", "import time; time.sleep(60)"):
        monkeypatch.setattr(confinement, "FIRST_GPU", unknown)
        own, every, _ = confinement.gpu_files(tmp_path, tmp_path / "driver")
        assert own == every and len(every) == len(names)


def test_without_a_cache_of_compiled_kernels_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "a file"))
    folders = str(tmp_path / "run"), str(tmp_path / "results")
    shard = Shard("0000", "run", *folders, "cpu", [], FAST, 60.0, 60.0, untrusted=True)
    with pytest.raises(Unfit, match=r"cannot keep compiled kernels in .*; set TORCH_EXTENSIONS_DIR to a folder that"):
        confinement.make_sandbox(shard)
