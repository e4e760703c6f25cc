"""Two loops as LLVM's IR, y = alpha a and then y = y + b, fused by recognising the sequence; run and timed on the CPU.

python examples/llvm_fusion.py       # some seconds; needs llvmlite
"""

from __future__ import annotations

import ctypes
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from minfer.specialise import llvm

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


def main() -> int:
    body = fused(SCALE, ADD)
    assert body is not None and fused(SCALE, SCALE) is None
    texts = {"scale": SCALE, "add": ADD, "fused": body}
    functions = {}
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_int64)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            source = Path(folder) / f"{name}.ll"
            source.write_text(LOOP.format(name=name, body=text))
            functions[name] = ctypes.CFUNCTYPE(None, *kinds)(llvm.load(source, name))
    print(LOOP.format(name="fused", body=body))
    print("| elements | two loops, us | fused, us | ratio |\n| --: | --: | --: | --: |")
    for n in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
        a, b, y = torch.randn(n), torch.randn(n), torch.empty(n)
        words = y.data_ptr(), a.data_ptr(), b.data_ptr(), 0.75, n
        taken: list[list[float]] = [[], []]
        for round_ in range(31):
            for which, names in sorted(enumerate((("scale", "add"), ("fused",))), reverse=round_ % 2 == 1):
                begin = time.perf_counter()
                for name in names:
                    functions[name](*words)
                taken[which].append(1e6 * (time.perf_counter() - begin))
                torch.testing.assert_close(y, 0.75 * a + b)
        two, one = map(statistics.median, taken)
        print(f"| {n} | {two:.1f} | {one:.1f} | {two / one:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
