"""`python -m tests.interpreted OP KERNEL all|few`, with TRITON_INTERPRET=1: verifies a Triton kernel in all cases of a small
shape, or in a few with small shapes only, and prints how many inputs were tried."""

from __future__ import annotations

import sys

import torch

from minfer import build, ops
from minfer.bench import verify
from tests.tiers import few_of


def main(op_name: str, name: str, which: str) -> int:
    op = ops.get(op_name)
    kernel, tried = op.kernels[name], 0
    verify.REPEATS = 0  # they are for races, and the interpreter runs one program after another
    # The interpreter keeps bfloat16 as integers and multiplies those.
    small = op.cases(kernel, op.sizes.get("nan", op.sizes["small"])[:1])
    cases = [case for case in small if case.dtype != "bfloat16"]
    if which == "few":
        verify.MOST_DRAWN = 1 << 16
        cases = few_of(cases, 2)
    for case in cases:
        found = verify.verify(op, case, kernel, build.function(kernel), torch.device("cpu"), None, seed=tried)
        tried += found.tried
    return tried


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
