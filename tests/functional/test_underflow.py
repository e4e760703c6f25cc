"""Attention over fp8 where nearly all of a softmax lies on a key whose value is exactly 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minfer import ops
from minfer.build import toolchain
from tests.emulator import Emulated, compiled

LN2 = 0.6931471805599453


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(toolchain.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch")
def test_small_weights_outlast_a_base_that_grows_by_more_than_an_exponent(tmp_path: Path) -> None:
    """v16_fp8_gathered takes the last block of keys first. A row's base becomes 0 there, a score of 30 leaves it as it is, and
    one of 128 then multiplies out by 2^-128, which is 0 in fp32. But the key with this score has a value of 0 in the first
    column, so that 2^30 2^-128 is the result there. 768 keys make two parts. The two keys lie in one part, or one in each."""
    kernel = ops.get("prefill_attention").kernels["v16_fp8_gathered"]
    compiled_to = compiled(
        kernel, tmp_path, {1: {"root": ("0.5f", "1.0f")}, 2: {"halves": ("0.5f * exponent", "exponent")}}
    )
    found = [
        [first_columns(Emulated(kernel, compiled_to, mistake), keys, small) for mistake in (0, 1, 2)]
        for keys, small in ((384, 130), (768, 130), (768, 500))
    ]
    right, lost = [2.0**-98, 1.0], [0.0, 1.0]
    assert found == [[right, lost, right], [right, lost, right], [right, right, lost]]


def first_columns(function: Emulated, count: int, small: int) -> list[float]:
    """Of out, with a score of 128 at key 5 and one of 30 at key `small`. The other columns must be 0."""
    keys, values = torch.zeros(1, count, 1, 64), torch.zeros(1, count, 1, 64)
    keys[0, small, 0, 0], keys[0, 5, 0, 0] = 30, 128
    values[0, small, 0, 0], values[0, 5, 0, 1] = 1, 1
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    q[..., 0] = 1
    empty = torch.empty(0, dtype=torch.int32)
    out = torch.full((1, 1, 1, 64), torch.nan, dtype=torch.bfloat16)
    function.run_on(2)
    table, lse = torch.empty(1, 0, dtype=torch.int32), torch.empty(0)
    stored = [x.to(torch.float8_e4m3fn) for x in (keys, values)]
    function(out, lse, q, table, *stored, empty, empty, torch.ones(2), causal=True, window=0, softcap=0.0, scale=LN2)
    assert not out[..., 2:].any()
    return out[0, 0, 0, :2].tolist()
