"""What a kernel may not do beside computing is noticed, and what it may do is not."""

from __future__ import annotations

import pytest
import torch

from minfer.bench.integrity import Dishonest, check_delegation

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
