"""`python -m tests.specialise.interpreted LENGTH ...`, with TRITON_INTERPRET=1: verifies the variants of `seq_sum_triton` for
these lengths, and prints how many inputs were tried."""

from __future__ import annotations

import sys

import torch

from minfer import build, ops
from minfer.bench import verify
from minfer.specialise import exact
from minfer.specialise.recipes import SEQ_SUM_TRITON


def main(*lengths: str) -> int:
    op, tried = ops.get("seq_sum"), 0
    verify.REPEATS = 0  # they are for races, and the interpreter runs one program after another
    for length in map(int, lengths):
        kernel = SEQ_SUM_TRITON.kernel(exact(length))
        (case,) = op.cases(kernel, [{"batch": 3, "longest": length}])
        found = verify.verify(op, case, kernel, build.function(kernel), torch.device("cpu"), None, seed=tried)
        tried += found.tried
    return tried


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
