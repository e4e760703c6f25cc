"""`python -m tests.interpreted OP KERNEL all|few`: verifies a Triton kernel in all cases of a small
shape, or in a few with small shapes only, and prints how many inputs were tried."""

from __future__ import annotations

import os
import sys

import torch

from minfer import build, ops
from minfer.bench import verify
from tests.tiers import few_of


def patch_language_once() -> None:
    """Make the interpreter replace Triton's functions once per launch. Otherwise it replaces them for each call of a device
    function, such as `tl.sum`, which takes half of its time."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(function):
        languages = {
            id(value) for value in function.__globals__.values() if value in (interpreter.tl, interpreter.tl.core)
        }
        if languages <= patched:
            return interpreter._LangPatchScope()  # of what was replaced already
        scope = patch(function)
        patched.update(languages)
        restore = scope.restore

        def restore_all():
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_once


def main(op_name: str, name: str, which: str) -> int:
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"  # is read when Triton is imported
    patch_language_once()
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
