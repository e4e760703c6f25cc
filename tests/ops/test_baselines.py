"""What baselines say that they do not support."""

from __future__ import annotations

import pytest

from minfer import ops

LATENT, WIDE = (2, 40, 40, 4, 4, 192, 128), (2, 40, 40, 4, 4, 192)


@pytest.mark.parametrize("kernel", ["torch", "torch_cudnn"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_packed_values_have_the_length_of_keys(kernel: str, layout: str) -> None:
    def unsupported(sizes: tuple[int, ...]) -> str | None:
        shape, params = dict(zip(op.axes, sizes, strict=False)), {"layout": layout, "lengths": "full", "lse": "no"}
        return op.kernels[kernel].unsupported(op.case(kernel, "bfloat16", shape, params), None)

    op = ops.get("prefill_attention")
    needs = "takes packed v with the head_dim of q, as varlen_attn does"
    assert unsupported(LATENT) == (needs if layout == "packed" else None) and unsupported(WIDE) is None
