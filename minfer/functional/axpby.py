"""`axpby`: the kernels of axpby as one function of PyTorch, `torch.ops.minfer.axpby`."""

from __future__ import annotations

import torch

from minfer.functional import library


@library.public
def axpby(a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0, beta: float = 1.0) -> torch.Tensor:
    """alpha a + beta b, a new contiguous tensor, of two float32 tensors of one shape and device.

    Operands that are not contiguous, or do not start at multiples of 16 bytes, are copied first. `best` picks the kernel,
    which is compiled at its first call. Works under `torch.compile`. It has no backward: raises RuntimeError where one would
    be recorded. Raises ValueError for operands that do not fit each other."""
    library.refuse_gradients("axpby", a, b)
    return _axpby_op(a, b, alpha, beta)


def _combine(a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0, beta: float = 1.0) -> torch.Tensor:
    y = _fake(a, b)
    if count := y.numel():
        flat = [library.readable(tensor.reshape(count)) for tensor in (a, b)]
        library.call("axpby", (y.view(count), *flat), y.dtype, {"n": count}, alpha=alpha, beta=beta)
    return y


def _fake(a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0, beta: float = 1.0) -> torch.Tensor:
    if a.shape != b.shape:
        raise ValueError(f"minfer.axpby takes a and b of one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype != torch.float32 or b.dtype != torch.float32:
        raise ValueError(f"minfer.axpby takes float32 for both operands, got {a.dtype} and {b.dtype}")
    if a.device != b.device:
        raise ValueError(f"minfer.axpby takes operands on one device, got {a.device} and {b.device}")
    return torch.empty_like(a, memory_format=torch.contiguous_format)


_axpby_op = library.define("axpby(Tensor a, Tensor b, float alpha=1.0, float beta=1.0) -> Tensor", _combine, _fake)
