"""What is said where PyTorch finds no GPU that it can use: one sentence, with the remedy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT, has_gpu, launch

# A driver of CUDA 12.4, as far as the CUDA runtime asks before it gives up.
OLD_DRIVER = "int cuInit(unsigned flags) { return 0; } int cuDriverGetVersion(int *v) { *v = 12040; return 0; }"


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_a_driver_that_predates_this_cuda_is_named_with_both_versions_and_the_switch(tmp_path):
    import torch

    if torch.version.cuda is None or torch.version.cuda.startswith("12."):
        pytest.skip("this PyTorch does not need CUDA 13")
    (tmp_path / "driver.c").write_text(OLD_DRIVER)
    driver = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(driver, cwd=tmp_path, check=True)
    command = [sys.executable, "-c", "from minfer.bench.device import no_gpu; print(no_gpu())"]
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment).stdout
    assert said.startswith(f"the NVIDIA driver supports CUDA 12.4, and this PyTorch needs CUDA {torch.version.cuda};")
    assert "UV_PROJECT=cuda12" in said and said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_an_image_without_a_gpu_says_how_to_pass_one(tmp_path, monkeypatch):
    monkeypatch.setenv("MINFER_IMAGE_DIGEST", "sha256:0123")
    where = [f"results={tmp_path / 'results'}", f"runs={tmp_path / 'runs'}"]
    done = launch("+sweep=hgemm", "cluster=local", "device=cuda", *where)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "no GPU was passed to this container; add --gpus all to docker run" in done.stderr
    done = launch("+sweep=hgemm", "cluster=local", "dry_run=true", *where)
    assert done.stdout.startswith("No CUDA GPU here (no GPU was passed to this container;")


@pytest.mark.slow
@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_a_job_without_its_gpu_says_so(run_shard):
    from minfer.process.death import Died

    with pytest.raises(Died, match="device=cuda, and this machine has no CUDA GPU that PyTorch can use"):
        run_shard(["v01_naive"], device="cuda")
