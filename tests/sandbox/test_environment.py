"""What a process in a sandbox finds in its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from minfer.process.remote import Process
from minfer.sandbox import Sandbox
from minfer.sandbox.environment import allowed

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "s1", "HF_TOKEN": "s2", "SSH_AUTH_SOCK": "/run/s3", "NVIDIA_API_KEY": "s4", "WANDB_API_KEY": "s5",
    "MINFER_TOKEN": "s6", "GITHUB_TOKEN": "s7", "SLURM_JWT": "s8", "https_proxy": "http://me:s9@proxy", "TORCH_AUTH": "s10",
    "PIP_INDEX_URL": "https://me:s11@host", "MY_SERVICE": "s12", "DBUS_SESSION_BUS_ADDRESS": "s13",
}  # fmt: skip
NEEDED = {"PATH": "/bin", "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0", "LD_LIBRARY_PATH": "/lib", "TRITON_DEBUG": "1",
          "PYTORCH_CUDA_ALLOC_CONF": "a:b", "LC_ALL": "C", "CXX": "g++", "PYTHONPATH": "/x",
          "MINFER_IMAGE_DIGEST": "d"}  # fmt: skip


def test_only_what_is_listed_is_allowed() -> None:
    assert allowed(SECRETS | NEEDED) == NEEDED


@pytest.mark.slow  # it needs a fork server of its own
@pytest.mark.parametrize("confined", [True, False])
def test_a_process_in_a_sandbox_has_no_secrets(confined: bool, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a sandbox a process gets all variables that its user has set, even if they are longer than a message."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LONG", "x" * 100_000)
    process = Process("tests.answering.tells", log, sandbox=Sandbox("limits") if confined else None)
    try:
        said = process.ask(60)
    finally:
        process.kill()
    assert not any(name in said["linux"] for name in SECRETS)
    assert "PATH=" in said["linux"] and said["python"]["PATH"]
    found = {name: said["python"].get(name) for name in SECRETS}
    assert found == (dict.fromkeys(SECRETS) if confined else SECRETS) and ("LONG" in said["python"]) != confined
