"""`python -m tests.interpreted OP KERNEL`, with TRITON_INTERPRET=1: verifies a Triton kernel, and prints how many inputs were
tried."""

from __future__ import annotations

import sys

import torch

from minfer import build, ops
from minfer.bench import verify


def main(op_name: str, name: str) -> int:
    op = ops.get(op_name)
    kernel, tried = op.kernels[name], 0
    verify.REPEATS = 0  # they are for races, and the interpreter runs one program after another
    for case in op.cases(kernel, op.sizes.get("nan", op.sizes["small"])[:1]):
        if case.dtype != "bfloat16":  # the interpreter keeps bfloat16 as integers and multiplies those
            found = verify.verify(op, case, kernel, build.function(kernel), torch.device("cpu"), None, seed=tried)
            tried += found.tried
    return tried


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
