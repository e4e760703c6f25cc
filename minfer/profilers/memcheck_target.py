"""The process that compute-sanitizer watches (`memcheck.py`): it calls a kernel once on each small and odd shape. Its
argument is a JSON file with a case and the extra files that register kernels."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from minfer import build, ops
from minfer.bench.device import arch, capability, pick
from minfer.bench.operands import Operands
from minfer.bench.timed_results import matches_reference
from minfer.ops import Case, Kernel


def run_all(kernel: Kernel, cases: Iterable[Case], device: torch.device) -> int:
    """Run a kernel once on each case that it supports, and compare with the reference. Returns the number of runs. Raises
    AssertionError.

    Inputs are made and results compared on the CPU, because the sanitizer would slow down PyTorch's kernels, too."""
    op, function, tried = ops.get(kernel.op), build.function(kernel, arch(device)), 0
    for case in cases:
        if kernel.unsupported(case, capability(device)):
            continue
        operands = Operands(op, case, tried, "normal", torch.device("cpu"))
        given = {name: tensor.to(device, copy=True) for name, tensor in operands.tensors.items()}
        function(*given.values(), **op.call(case))
        results = {name: given[name].cpu() for name in operands.named("out", "inout")}
        if not matches_reference(op, case, operands.named("in", "inout"), results):
            raise AssertionError(f"the result is wrong ({case.problem}, seed {tried})")
        tried += 1
    if not tried:
        raise AssertionError("it supports none of the shapes")
    return tried


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    for path in request["extra"]:
        ops.load_file(Path(path))
    case = Case(**request["case"])
    op = ops.get(case.op)
    shapes = (*op.odd_shapes, *op.sizes.get("small", ()))
    print(f"right in {run_all(op.kernels[case.kernel], map(case.with_shape, shapes), pick('cuda'))} runs")


if __name__ == "__main__":
    main()
