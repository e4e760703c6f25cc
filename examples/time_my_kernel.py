"""A kernel of your own, verified and timed beside the other kernels of its op:

    uv run python -m minfer.launch +sweep=rmsnorm extra=examples/time_my_kernel.py kernel=[torch,mine] timing=quick

It is a Python function here; `op.cuda("/path/mine.cu")`, `op.triton("/path/mine.py")` and `op.cpp("/path/mine.cpp")` take files
(docs/adding.md)."""

import torch

from minfer import ops


def mine(y, x, weight, eps=1e-6):
    """Writes x / rms(x) * weight to y; x and y are (tokens, hidden), weight is (hidden). Returns nothing."""
    wide = x.float()
    y.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float())


op = ops.get("rmsnorm")
op.torch("mine", mine)
