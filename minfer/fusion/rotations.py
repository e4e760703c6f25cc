"""RoPE on queries and keys: `x cos + rotate_half(x) sin` for each of them, together one call of `minfer.rope`.

A model's tables are as wide as a head, and their halves are equal; minfer's have one half, in float32. So a match is replaced
only where the graph shows that the halves are equal, as `cat((f, f), -1)`, and a table of a narrower dtype is widened, which
changes no value.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

import minfer.functional.rope  # noqa: F401 (it defines the op)
from minfer.fusion.match import TARGETS, Found, rotation, tensor
from minfer.fusion.rewrite import Place, Problem, Refused, Rule, Writer

aten, prims = torch.ops.aten, torch.ops.prims
BATCH, HEADS = 0, 2  # of minfer's (batch, seq, heads, head_dim)


def pairs(places: list[Place]) -> list[list[Place]]:
    """Two that follow each other and have the same tables are a query and its key."""
    found: list[list[Place]] = []
    for place in places:
        last = found[-1] if found else []
        if len(last) == 1 and all(last[0][1][name] is place[1][name] for name in ("cos", "sin")):
            last.append(place)
        else:
            found.append([place])
    return found


def write_rope(write: Writer, places: Sequence[Place]) -> tuple[Problem, dict[Node, Node]]:
    for _, found in places:
        _is_rotation(found)
    ordered = sorted(places, key=lambda place: -_heads_of(place[1]))
    (_, first), shapes = ordered[0], [_value(found["x"]).shape for _, found in ordered]
    dim = _heads_at(first)
    cos, sin = (_table(write, first[name], dim) for name in ("cos", "sin"))
    turned = [_turn(write, found["x"], dim) for _, found in ordered]
    if len(turned) == 1:  # a key without heads
        turned.append(write(aten.slice.Tensor, turned[0], HEADS, 0, 0))
    batch, seq = (_value(turned[0]).shape[place] for place in (0, 1))
    positions = _positions(write, turned[0]) if _own_rows(first) else None
    both = write(torch.ops.minfer.rope.default, *turned, cos, sin, positions, False)
    new = {}
    for place, (root, _) in enumerate(ordered):
        new[root] = _turn(write, write(operator.getitem, both, place), dim)
    heads = [shape[dim] for shape in shapes] + [0] * (2 - len(shapes))
    sizes: dict[str, Any] = {"batch": batch, "seq": seq, "heads": heads[0], "kv_heads": heads[1]}
    width = shapes[0][3]
    params = {"positions": "given" if positions is not None else "counted", "place": "out"}
    return Problem("rope", _value(first["x"]).dtype, sizes | {"head_dim": width, "rotary_dim": width}, params), new


def _value(node: Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _equal(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def _is_rotation(found: Found) -> None:
    """Refuse what has the form of a rotation and cuts a head elsewhere than in its middle."""
    x = _value(found["x"])
    if x.dim() != 4:
        raise Refused(f"{found['x'].name} has {x.dim()} dimensions, and not the four of a batch of heads")
    width, last = x.shape[3], (-1, 3)
    if not isinstance(width, int):
        raise Refused("the width of a head is not known")
    if "pieces" in found.names:
        pieces = found["pieces"]
        middle = pieces in (width // 2, [width // 2] * 2)
    else:
        cuts = [found[name] for name in ("start0", "stop0", "start1")]
        middle = cuts == [0, width // 2, width // 2] and found["stop1"] >= width
    if width % 2 or not middle or found["dim"] not in last or found["last"] not in last:
        raise Refused("what is swapped is not the halves of a head")
    for name in ("cos", "sin"):
        table = _value(found[name])
        if table.shape != _value(found["cos"]).shape or not _equal(table.shape[-1], width):
            raise Refused(f"{name} has the shape {tuple(table.shape)} for heads of {width}")
        if not _doubled(found[name]):
            raise Refused(f"the graph does not show that the two halves of {found[name].name} are equal")


def _doubled(node: Node) -> bool:
    """Whether the graph shows that the halves of the last dimension are equal: it is `cat((f, f), -1)`, or made of such tensors
    element by element, or a view or a choice of rows of one."""
    if node.op != "call_function":
        return False
    if node.target in TARGETS["cat"]:
        parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
        twice = isinstance(parts, list | tuple) and len(parts) == 2 and parts[0] is parts[1]
        return twice and dim in (-1, _value(node).dim() - 1)
    takes = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]
    if node.target in TARGETS["view"]:
        return _repeated(takes[0], node)
    if node.target in (aten.unsqueeze.default, aten.select.int, aten.slice.Tensor):
        dim = node.args[1] if len(node.args) > 1 else 0
        behind = _value(takes[0]).dim() - (
            node.target is not aten.unsqueeze.default
        )  # where the last dimension changes
        kept = isinstance(dim, int) and dim not in (-1, behind)
        return kept and _value(node).shape[-1] == _value(takes[0]).shape[-1] and _doubled(takes[0])
    if node.target in (aten.index.Tensor, aten.expand.default, aten.clone.default):
        return _value(node).shape[-1] == _value(takes[0]).shape[-1] and _doubled(takes[0])
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in TARGETS["cast"]:
        return bool(takes) and all(
            _doubled(each) or not _value(each).dim() or _value(each).shape[-1] == 1 for each in takes
        )
    return False


def _repeated(source: Node, view: Node) -> bool:
    """Whether a view joins the last two dimensions of (..., 2, n), where both rows are one, repeated by `expand`: inductor's
    form of `cat((f, f), -1)`."""
    shape, joined = _value(source).shape, _value(view).shape
    if len(shape) != len(joined) + 1 or shape[-2] != 2 or joined[-1] != 2 * shape[-1]:
        return False
    while source.target is aten.clone.default:
        source = source.all_input_nodes[0]
    return source.target is aten.expand.default and _value(source.all_input_nodes[0]).shape[-2] == 1


def _shape(node: Node) -> list[Any]:
    """Of a table, with leading ones."""
    shape = list(_value(node).shape)
    return [1] * (4 - len(shape)) + shape


def _heads_at(found: Found) -> int:
    """Which dimension of x is that of the heads, for which tables have one row: 1 or 2."""
    x, table = _value(found["x"]).shape, _shape(found["cos"])
    fits = [
        heads
        for heads, seq in ((1, 2), (2, 1))
        if _equal(table[heads], 1) and _equal(table[seq], x[seq]) and (_equal(table[0], 1) or _equal(table[0], x[0]))
    ]
    if not fits:
        raise Refused(f"tables of {tuple(table)} have no row for each token of {tuple(x)}")
    return fits[0]


def _heads_of(found: Found) -> int:
    heads = _value(found["x"]).shape[_heads_at(found)]
    if not isinstance(heads, int):
        raise Refused("the number of heads is not known")
    return heads


def _own_rows(found: Found) -> bool:
    """Whether each sequence of the batch has rows of its own."""
    return not _equal(_shape(found["cos"])[0], 1)


def _turn(write: Writer, x: Node, dim: int) -> Node:
    """From (batch, heads, seq, head_dim) to minfer's order, or back."""
    return write(aten.permute.default, x, [0, 2, 1, 3]) if dim == 1 else x


def _table(write: Writer, node: Node, dim: int) -> Node:
    """The first half of a table as (rows, head_dim / 2) in float32: made once, however many layers use it."""
    value = _value(node)
    extra = 4 - value.dim()  # dimensions of x that it does not have
    half = write.once(aten.slice.Tensor, node, value.dim() - 1, 0, value.shape[-1] // 2)
    if dim >= extra:
        half = write.once(aten.select.int, half, dim - extra, 0)
    if extra == 0 and _equal(value.shape[BATCH], 1):
        half = write.once(aten.select.int, half, 0, 0)
    elif extra == 0:
        half = write.once(aten.reshape.default, half, (-1, value.shape[-1] // 2))
    if value.dtype != torch.float32:
        half = write.once(prims.convert_element_type.default, half, torch.float32)
    return half


def _positions(write: Writer, q: Node) -> Node:
    """Row b S + s of the tables for token s of sequence b."""
    batch, seq = _value(q).shape[:2]
    if not isinstance(batch, int) or not isinstance(seq, int):
        raise Refused("each sequence has rows of its own, and their number is not known before it runs")
    device = _value(q).device
    options = {"dtype": torch.int32, "device": device, "pin_memory": False}
    count = write(aten.arange.default, batch * seq, **options)
    return write(aten.reshape.default, count, [batch, seq])


ROPE = Rule("rope", ("add",), rotation(tensor("x")), write_rope, pairs)
