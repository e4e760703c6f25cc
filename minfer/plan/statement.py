"""Whether what an op states of itself holds together, tried before anything is submitted: its tensors are made and its
reference is computed once, on the CPU and on a small shape. Whoever wrote the op gets a sentence, and no failed jobs."""

from __future__ import annotations

import contextlib
import random
import traceback
from collections.abc import Iterable, Iterator

import torch

from minfer.bench.errors import compare_output, run_reference
from minfer.bench.operands import Operands, change
from minfer.bench.trivial import refuse_trivial
from minfer.ops import Case, Op
from minfer.plan.config import UserError

DRAWN = 15  # shapes, of which the middle one by size serves: neither degenerate nor slow


def check_axes(op: Op) -> None:
    """Raises UserError where no shape can be drawn."""
    with _stated(op, "drawing a shape by its axes, each from those before it,"):
        next(op.drawn_shapes(random.Random(0)))


def rehearse(op: Op, cases: Iterable[Case]) -> None:
    """Raises UserError for an op that cannot be verified and timed under the dtype and the parameters of these cases."""
    if not op.baselines:
        raise UserError(f"{op.name} has nothing to compare with; register one of its kernels with baseline=True")
    for case in {(case.dtype, *case.params.items()): case for case in cases}.values():
        drawn = (
            case.with_shape(shape) for _, shape in zip(range(DRAWN), op.drawn_shapes(random.Random(0)), strict=False)
        )
        with _stated(op, f"its tensors for {case.problem}"):
            names = [spec.name for spec in op.specs(case)]
            small = sorted(drawn, key=op.operand_bytes)[DRAWN // 2]
            roles = [spec.role for spec in op.specs(small)]
        if len(set(names)) < len(names) or set(roles) == {"in"}:
            raise UserError(
                f"{op.name}: give each tensor a name of its own, and make at least one an output: {', '.join(names)}"
            )
        _rehearse(op, small)


def _rehearse(op: Op, case: Case) -> None:
    """All that the harness asks an op for, on one set of tensors, with outputs that nobody has written."""
    with _stated(op, f"its tensors for {case.shape_name}"):
        operands = Operands(op, case, 0, "uniform", torch.device("cpu"))
    with _stated(op, "its reference"):
        expected = run_reference(op, case, operands.tensors)
    for name in operands.named("out", "inout"):
        with _stated(op, f"its check of {name}, of an output that nobody has written,"):
            compare_output(op, case, name, operands.tensors, expected)
    with _stated(op, "a search for kernels that compute nothing and are right"):
        refuse_trivial(op, case, operands.tensors, {}, expected)
    with _stated(op, "its cost"):
        figures = [op.flops(case), op.bytes(case), op.metric.work(op, case)]
        op.arithmetic(case)
        if not all(figure >= 0 for figure in figures):
            raise ValueError(f"FLOPs, bytes and work of {figures}")
    with _stated(op, "a change of its tensors"):
        change(op, case, operands.named("in", "inout"), 0, "normal")()


@contextlib.contextmanager
def _stated(op: Op, what: str) -> Iterator[None]:
    """Turn an error of the op's own functions into a sentence that names the line."""
    try:
        yield
    except Exception as error:  # they may raise anything
        at = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(op.source)]
        where = f"{op.source}, line {at[-1]}" if at else f"{op.source}"
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{op.name} cannot be run: {what} failed with {why}; correct {where}") from error
