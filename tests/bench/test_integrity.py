"""What a kernel may not do beside computing is noticed, and what it may do is not."""

from __future__ import annotations

import io

import pytest
import torch

from minfer.bench.integrity import Dishonest, Watch, check_delegation

A = torch.ones(4, 4)


@pytest.mark.parametrize("work", [lambda: A @ A, lambda: torch.einsum("ij,jk->ik", A, A), lambda: A.softmax(0)])
def test_work_handed_to_pytorch_is_noticed(work):
    with pytest.raises(Dishonest, match="hands the work to PyTorch: it calls aten::"):
        check_delegation(work)


@pytest.mark.parametrize(
    "work", [lambda: None, lambda: A.clone(), lambda: (A * A).sum(), lambda: A.contiguous().zero_()]
)
def test_what_a_kernel_may_ask_of_pytorch_is_not(work):
    check_delegation(work)


def test_a_progress_bar_of_torch_compile_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's compiler shows some while it tries configurations, as for FlexAttention."""
    import tqdm

    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 10)
    monkeypatch.setattr(tqdm.tqdm, "monitor", None)
    watch = Watch()
    assert list(tqdm.tqdm(range(3), file=io.StringIO())) == [0, 1, 2]
    watch.check()
