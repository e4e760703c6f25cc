"""Each test of `minfer.fuse` compiles afresh, and hears what is fused."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh(one_thread, monkeypatch):
    monkeypatch.setenv("MINFER_EXPLAIN", "1")
    torch._dynamo.reset()
    torch.manual_seed(0)
