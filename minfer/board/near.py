"""How near a submission is to a task, for a person or a program that looks for kernels to learn from.

The distance is a sum of
    3     if the op is of another family (FAMILIES), 1 if it is another op of the same family
    1     if the dtype is of another width, 0.25 if it is another one of the same width
    1/4   of the absolute difference of the binary logarithms of each axis's size, averaged over the axes; if it is another op,
          of the absolute difference of the binary logarithms of the products of all sizes
    1     minus the cosine of the two mixes of instructions, if both are known
What is not known of the task or of the submission adds nothing. Of two submissions at the same distance, the faster one comes
first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from minfer.board.folder import Entry

FAMILIES = {
    "products": ("hgemm", "sgemm", "quant_gemm", "gemm_bias_gelu", "gemm_bias_relu", "gated_unit", "moe_ffn"),
    "rows": ("softmax", "rmsnorm", "rmsnorm_backward", "add_rmsnorm", "layernorm", "seq_sum", "sample", "moe_route"),
    "attention": ("decode_attention", "prefill_attention", "mla_decode"),
    "elements": ("axpby", "silu_mul", "rope", "embedding", "dequant", "kv_append", "transfer"),
}
OTHER_FAMILY, OTHER_OP, OTHER_WIDTH, OTHER_DTYPE, OCTAVE = 3.0, 1.0, 1.0, 0.25, 0.25
WIDTHS = {"float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Task:
    """What is looked for. Empty fields are not known."""

    op: str
    dtype: str = ""
    shape: Mapping[str, int] = field(default_factory=dict)
    opcodes: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, op: str, dtype: str, shape: Mapping[str, int], like: Entry | None) -> Task:
        """A task. What is not given is that of the submission `like`."""
        if like is None:
            return cls(op, dtype, shape)
        return cls(op, dtype or like.task.get("dtype", ""), shape or like.task.get("shape", {}), like.opcodes)


def family(op: str) -> str:
    """The family of an op, or the op's own name if it is in none."""
    return next((name for name, members in FAMILIES.items() if op in members), op)


def distance(task: Task, entry: Entry) -> float:
    """How far a submission is from a task; 0: they are the same in all that is known."""
    far = 0.0
    if entry.op != task.op:
        far += OTHER_OP if family(entry.op) == family(task.op) else OTHER_FAMILY
    other = entry.task.get("dtype", "")
    if task.dtype and other and task.dtype != other:
        far += OTHER_DTYPE if WIDTHS.get(task.dtype, 1) == WIDTHS.get(other, 1) else OTHER_WIDTH
    far += OCTAVE * _octaves(task.shape, entry.task.get("shape", {}), entry.op == task.op)
    if task.opcodes and entry.opcodes:
        far += 1.0 - _cosine(task.opcodes, entry.opcodes)
    return far


def _octaves(one: Mapping[str, int], other: Mapping[str, int], same_op: bool) -> float:
    if not one or not other:
        return 0.0
    log = lambda size: math.log2(max(size, 1))
    if same_op and (axes := one.keys() & other.keys()):
        return sum(abs(log(one[axis]) - log(other[axis])) for axis in axes) / len(axes)
    return abs(sum(map(log, one.values())) - sum(map(log, other.values())))


def _cosine(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    length = math.hypot(*one.values()) * math.hypot(*other.values())
    return sum(one[name] * other[name] for name in one.keys() & other.keys()) / length if length else 0.0


def find(task: Task, entries: Iterable[Entry], count: int) -> list[tuple[float, Entry]]:
    """The nearest submissions that have a score, with their distances."""
    found = [(distance(task, entry), entry) for entry in entries if entry.ranks]
    found.sort(key=lambda pair: (round(pair[0], 6), -pair[1].score["value"], pair[1].when))
    return found[:count]
