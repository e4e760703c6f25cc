"""Calls one kernel on one shape and does nothing else, for a profiler that you start yourself.

    uv run python tools/one_kernel.py rmsnorm v02_vectors tokens=2048,hidden=4096 --dtype bfloat16
    ncu --set full --nvtx --nvtx-include "calls/" python tools/one_kernel.py hgemm v04_mma m=4096,n=4096,k=4096
    nsys profile --trace cuda,nvtx python tools/one_kernel.py hgemm v04_mma m=4096,n=4096,k=4096

On a GPU, compilation and warm-up are in the NVTX range `warm-up`. The calls are in the range `calls`, and each is in a range of
its own: `call 0`, `call 1`, ... The first result is compared with the op's reference. This tool measures no time; `python -m
minfer.launch` does. `--params layout=TN,accumulate=float32` chooses an op's parameters."""

from __future__ import annotations

import argparse
import contextlib
import sys

import torch

from minfer import build, ops
from minfer.bench import device as devices
from minfer.bench.timed_results import matches_reference
from minfer.bench.verify import Inputs, synchronize
from minfer.ops import Case
from minfer.plan.config import UserError, choose


def parse_pairs(text: str) -> dict[str, str]:
    """`m=64,n=32` as a mapping. Raises UserError."""
    pairs = [word.partition("=") for word in text.split(",") if word]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise UserError(f"cannot read {text!r}; write it like m=64,n=32")
    return {name: value for name, _, value in pairs}


def parse_case(op: str, kernel: str, shape: str, dtype: str, params: str) -> Case:
    """The case that the command line names. Raises UserError."""
    problem = ops.get(choose("op", op, ops.names()))
    choose(f"{op} kernel", kernel, problem.kernels)
    sizes = parse_pairs(shape)
    if set(sizes) != set(problem.axes) or not all(size.isdecimal() for size in sizes.values()):
        form = ",".join(f"{axis}=64" for axis in problem.axes)
        raise UserError(
            f"{shape!r} is no shape of {op}; it has the axes {', '.join(problem.axes)}: write it like {form}"
        )
    chosen = {name: int(size) for name, size in sizes.items()}
    if why := problem.wrong_shape(chosen):
        raise UserError(f"{shape}: {why}")
    for name in (given := parse_pairs(params)):
        choose(f"parameter of {op}", name, {*problem.params, "call"})
    return problem.case(kernel, choose("dtype", dtype, ops.DTYPES), chosen, given)


def run(case: Case, place: torch.device, calls: int, warm_up: int) -> bool:
    """Call the kernel `warm_up` and then `calls` times. Returns whether its first result is right."""
    op = ops.get(case.op)
    name_range = torch.cuda.nvtx.range if place.type == "cuda" else lambda _: contextlib.nullcontext()
    operands = Inputs(case, "normal", seed=0).operands(op, place)
    inputs = {name: tensor.clone() for name, tensor in operands.named("in", "inout").items()}
    with name_range("warm-up"):
        function = build.function(op.kernels[case.kernel], devices.arch(place))
        function(*operands.arguments, **op.call(case))
        results = {name: tensor.clone() for name, tensor in operands.named("out", "inout").items()}
        for _ in range(warm_up - 1):
            function(*operands.arguments, **op.call(case))
        synchronize(place)
    with name_range("calls"):
        for index in range(calls):
            with name_range(f"call {index}"):
                function(*operands.arguments, **op.call(case))
        synchronize(place)
    return matches_reference(op, case, inputs, results)


def main(words: list[str] | None = None) -> int:
    """The exit status: 1 if the first result is wrong, 2 for a mistaken request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("op", "kernel", "shape"):
        parser.add_argument(name)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--params", default="")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=3)
    asked = parser.parse_args(words)
    try:
        if asked.calls < 1 or asked.warm_up < 1:
            raise UserError("--calls and --warm-up take numbers from 1")
        case = parse_case(asked.op, asked.kernel, asked.shape, asked.dtype, asked.params)
        place = devices.pick(asked.device)
        kernel = ops.get(case.op).kernels[case.kernel]
        if why := kernel.elsewhere(asked.device) or kernel.unsupported(case, devices.capability(place)):
            raise UserError(f"{case.key}: {why}")
        right = run(case, place, asked.calls, asked.warm_up)
    except UserError as error:
        print(f"one_kernel: {error}", file=sys.stderr)
        return 2
    print(f"{case.key} on {asked.device}: {asked.calls} calls after {asked.warm_up}; {'right' if right else 'WRONG'}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
