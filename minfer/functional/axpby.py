"""`axpby`: the kernels of axpby as one function of PyTorch, `torch.ops.minfer.axpby`."""

from __future__ import annotations

import torch

from minfer.functional import library


@library.public
def axpby(
    a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0, beta: float = 1.0, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """alpha a + beta b, a new contiguous tensor, of two float32 tensors of one shape and device.

    Operands that are not contiguous, or do not start at multiples of 16 bytes, are copied first. With `out`, of their
    shape and dtype, the result is written to `out`, which is returned; if `out` is not contiguous, or shares memory
    with an operand, the result is computed elsewhere and copied to it. `best` picks the kernel, which is compiled at
    its first call. Works under `torch.compile`. It has no backward: raises RuntimeError where one would be recorded.
    Raises ValueError for operands that do not fit each other."""
    library.refuse_gradients("axpby", a, b, out)
    if out is None:
        return _axpby_op(a, b, alpha, beta)
    _axpby_out_op(a, b, alpha, beta, out)
    return out


def _combine(a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0, beta: float = 1.0) -> torch.Tensor:
    y = _fake(a, b)
    _write(a, b, alpha, beta, y)
    return y


def _combine_into(a: torch.Tensor, b: torch.Tensor, alpha: float, beta: float, out: torch.Tensor) -> None:
    _fake_into(a, b, alpha, beta, out)
    if library.is_writable(out, a, b):
        _write(a, b, alpha, beta, out)
    else:
        out.copy_(_combine(a, b, alpha, beta))


def _write(a: torch.Tensor, b: torch.Tensor, alpha: float, beta: float, y: torch.Tensor) -> None:
    if count := y.numel():
        flat = [library.readable(tensor.reshape(count)) for tensor in (a, b)]
        library.call("axpby", (y.view(count), *flat), y.dtype, {"n": count}, alpha=alpha, beta=beta)


def _fake(a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0, beta: float = 1.0) -> torch.Tensor:
    if a.shape != b.shape:
        raise ValueError(f"minfer.axpby takes a and b of one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype != torch.float32 or b.dtype != torch.float32:
        raise ValueError(f"minfer.axpby takes float32 for both operands, got {a.dtype} and {b.dtype}")
    if a.device != b.device:
        raise ValueError(f"minfer.axpby takes operands on one device, got {a.device} and {b.device}")
    return torch.empty_like(a, memory_format=torch.contiguous_format)


def _fake_into(a: torch.Tensor, b: torch.Tensor, alpha: float, beta: float, out: torch.Tensor) -> None:
    _fake(a, b, alpha, beta)
    library.check_out("axpby", out, a.shape, a)


_axpby_op = library.define("axpby(Tensor a, Tensor b, float alpha=1.0, float beta=1.0) -> Tensor", _combine, _fake)
_axpby_out_op = library.define(
    "axpby_out(Tensor a, Tensor b, float alpha, float beta, Tensor(a!) out) -> ()", _combine_into, _fake_into
)
