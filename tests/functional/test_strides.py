"""A dimension of size 1 may have any stride in PyTorch: whatever it is, every public function gives what it gives else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.functional.calls import FUNCTIONS, Call, calls

STRIDES = (0, 1, 3, 1 << 40)


def test_every_function_is_called() -> None:
    assert {call.function for call in calls().values()} == set(FUNCTIONS)


def restrided(call: Call, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor with each of the strides in each of its dimensions of size 1, by its name."""
    for name, tensor in call.tensors().items():
        for dim in (dim for dim, size in enumerate(tensor.shape) if size == 1):
            for stride in STRIDES:
                changed = tensor.to(device).clone()
                strides = [stride if i == dim else old for i, old in enumerate(tensor.stride())]
                yield name, changed.as_strided(tensor.shape, strides)


def check(name: str, device: str) -> None:
    call = calls()[name]
    wanted = call(device)
    for which, tensor in restrided(call, device):
        about = f"{which} with strides {tensor.stride()}"
        try:
            found = call(device, **{which: tensor})
        except Exception as error:
            raise AssertionError(f"{about}: {error}") from error
        for one, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(other.float(), one.float(), atol=2e-3, rtol=2e-3, equal_nan=True, msg=about)


@pytest.mark.parametrize("name", calls())
def test_a_dimension_of_size_1_may_have_any_stride(name: str) -> None:
    check(name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", calls())
def test_a_dimension_of_size_1_may_have_any_stride_on_a_gpu(name: str) -> None:
    check(name, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("function", ("matmul", "gemm_bias_gelu"))
def test_one_row_and_one_column_by_the_copy_engine(function: str) -> None:
    """Sizes at which kernels with TMA are chosen: its encoder takes strides of multiples of 16 bytes alone."""
    x, w = torch.randn(4096, 1, device="cuda").half(), torch.randn(4096, 4096, device="cuda").half()
    import minfer

    bias = [] if function == "matmul" else [torch.zeros(4096, device="cuda").half()]
    torch.testing.assert_close(
        getattr(minfer, function)(x.t(), w.t(), *bias),
        getattr(minfer, function)(x.t().contiguous().clone(), w.t(), *bias),
        atol=2e-2, rtol=2e-2,
    )  # fmt: skip
    if function == "matmul":
        column = torch.randn(1, 4096, device="cuda").half().t()  # (4096, 1)
        for stride in STRIDES:
            b = column.as_strided((4096, 1), (1, stride))
            torch.testing.assert_close(minfer.matmul(w, b), w @ column, atol=0.5, rtol=2e-2)
