"""Two loops as LLVM's IR, y = alpha a and then y = y + b, fused by recognising the sequence; run and timed on the CPU.

python examples/llvm_fusion.py                # about a minute; needs llvmlite
python examples/llvm_fusion.py --write .      # and writes benchmarks/results/
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minfer.bench.stats import compare
from minfer.specialise import llvm

Function = Callable[..., None]
# None about as large as a last-level cache: there the ratio depends on what else runs.
ELEMENTS = tuple(1 << power for power in (10, 13, 16, 18, 20, 24))
ROUNDS, SAMPLE = 201, 1 << 16
# What each way calls. The second is the control: how far two timings of the same differ.
WAYS = {"two loops": ("scale", "add"), "two loops again": ("scale", "add"), "fused": ("fused",)}

LOOP = """define void @{name}(ptr noalias %y, ptr noalias %a, ptr noalias %b, float %alpha, i64 %n) {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
{body}
  %to = getelementptr float, ptr %y, i64 %i
  store float %result, ptr %to
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %n
  br i1 %more, label %loop, label %end
end:
  ret void
}}
"""
LOAD = "  %{of}.p = getelementptr float, ptr %{of}, i64 %i\n  %{of}.v = load float, ptr %{of}.p\n"
SCALE = LOAD.format(of="a") + "  %result = fmul float %alpha, %a.v"
ADD = LOAD.format(of="y") + LOAD.format(of="b") + "  %result = fadd float %y.v, %b.v"


def fused(first: str, second: str) -> str | None:
    """One body for two loops over the same elements, where the second reads what the first wrote at the same place: the value
    is passed on in a register. None where the second loop does not read it so."""
    written = re.search(r"%result = (.+)$", first)
    read = LOAD.format(of="y")
    if written is None or read not in second:
        return None
    return first.replace("%result", "%kept") + "\n" + second.replace(read, "").replace("%y.v", "%kept")


def functions() -> dict[str, Function]:
    """Both loops and the fused one, as machine code of this process: y, a, b, alpha, elements -> None."""
    body = fused(SCALE, ADD)
    assert body is not None and fused(SCALE, SCALE) is None
    print(LOOP.format(name="fused", body=body))
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_int64)
    found: dict[str, Function] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {"scale": SCALE, "add": ADD, "fused": body}.items():
            source = Path(folder) / f"{name}.ll"
            source.write_text(LOOP.format(name=name, body=text))
            found[name] = ctypes.CFUNCTYPE(None, *kinds)(llvm.load(source, name))
    return found


def measured(call: dict[str, Function], n: int, rounds: int) -> dict[str, Any]:
    """The row of n elements. Each round times every way, in shuffled order; a sample is the mean of as many calls as have
    SAMPLE elements together."""
    rng, repeats = np.random.default_rng(0), max(1, SAMPLE // n)
    a, b, y = torch.randn(n), torch.randn(n), torch.empty(n)
    words = y.data_ptr(), a.data_ptr(), b.data_ptr(), 0.75, n
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds + 1):  # the first one warms up, and is checked
        for way in rng.permutation(list(WAYS)):
            y.fill_(torch.nan)
            begin = time.perf_counter()
            for _ in range(repeats):
                for name in WAYS[way]:
                    call[name](*words)
            taken[way].append(1e6 * (time.perf_counter() - begin) / repeats)
            if len(taken[way]) == 1:
                torch.testing.assert_close(y, 0.75 * a + b)
    us = {way: np.array(each[1:]) for way, each in taken.items()}
    ratio = compare(us["fused"], us["two loops"], us["two loops again"])
    return {
        **{"elements": n, "rounds": rounds, "calls": repeats, "llvm": llvm.version()},
        **{"two_us": us["two loops"].tolist(), "again_us": us["two loops again"].tolist()},
        **{"fused_us": us["fused"].tolist(), "speedup": ratio.speedup, "low": ratio.low, "high": ratio.high},
        **{"aa_spread": ratio.aa_spread, "verdict": ratio.verdict},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"in which each way is timed (default: {ROUNDS})")
    parser.add_argument("--most", type=int, default=max(ELEMENTS), help="elements at most (default: all sizes)")
    parser.add_argument("--write", type=Path, metavar="ROOT", help="write rows to ROOT/benchmarks/results/")
    options = parser.parse_args(arguments)
    if options.rounds < 6 or options.most < min(ELEMENTS):
        sys.exit(
            f"llvm_fusion.py takes --rounds of at least 6, which an interval needs, and --most from {min(ELEMENTS)}"
        )
    call, rows = functions(), []
    print("| elements | two loops, us | fused, us | times as fast | A/A |\n| --: | --: | --: | :-- | --: |")
    for n in (each for each in ELEMENTS if each <= options.most):
        rows.append(row := measured(call, n, options.rounds))
        two, one = (f"{np.median(row[name]):.3g}" for name in ("two_us", "fused_us"))
        ratio = f"{row['speedup']:.2f} ({row['low']:.2f} to {row['high']:.2f}) {row['verdict']}"
        print(f"| {n} | {two} | {one} | {ratio} | {row['aa_spread']:.1%} |", flush=True)
    if options.write:
        from benchmarks.rows import write  # of the repository, not of an installed minfer

        write("llvm-fusion", [row | {"threads": 1} for row in rows], torch.device("cpu"), options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
