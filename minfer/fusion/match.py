"""Patterns over an ATen graph: what a few nodes compute, whichever way it was spelt.

PyTorch has two matchers. `torch.fx.subgraph_rewriter` compares two graphs literally. `torch._inductor.pattern_matcher` has
no operands in either order and no alternatives, so RMSNorm alone would be dozens of patterns; it does not say why something
that has the form was not replaced; and it is private. Here a pattern is a function that yields every way to match a node.

Graphs are functional (`aot_autograd`) and decomposed by inductor's table, so that an in-place variant, a method and a module
are one form, and silu is x / (1 + exp(-x)).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

aten, prims = torch.ops.aten, torch.ops.prims

# A word of the patterns -> what it is called in a graph.
TARGETS: Mapping[str, frozenset[Any]] = {
    name: frozenset(targets)
    for name, targets in {
        "add": (aten.add.Tensor, aten.add.Scalar),
        "addmm": (aten.addmm.default,),
        "cast": (prims.convert_element_type.default, aten._to_copy.default),
        "cat": (aten.cat.default,),
        "div": (aten.div.Tensor,),
        "erf": (aten.erf.default,),
        "exp": (aten.exp.default,),
        "getitem": (operator.getitem,),
        "index": (
            aten.permute.default,
            aten.unsqueeze.default,
            aten.slice.Tensor,
            aten.expand.default,
            aten.select.int,
        ),
        "mean": (aten.mean.dim,),
        "mm": (aten.mm.default,),
        "mul": (aten.mul.Tensor, aten.mul.Scalar),
        "neg": (aten.neg.default,),
        "pow": (aten.pow.Tensor_Scalar,),
        "reciprocal": (aten.reciprocal.default,),
        "relu": (aten.relu.default,),
        "rsqrt": (aten.rsqrt.default,),
        "sigmoid": (aten.sigmoid.default,),
        "slice": (aten.slice.Tensor,),
        "split": (aten.split.Tensor, aten.split_with_sizes.default),
        "sqrt": (aten.sqrt.default,),
        "sub": (aten.sub.Tensor,),
        "tanh": (aten.tanh.default,),
        "view": (aten.view.default, aten.reshape.default, aten._unsafe_view.default),
    }.items()
}
COMMUTATIVE = ("add", "mul")


@dataclass(frozen=True)
class Found:
    """What was matched: `names` has the nodes and numbers that a pattern named, `inner` the nodes that it consists of."""

    names: Mapping[str, Any] = field(default_factory=dict)
    inner: tuple[Node, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.names[name]

    def name(self, name: str, value: Any) -> Iterator[Found]:
        """With one name more; nothing where the name is of something else already."""
        if name not in self.names:
            yield Found({**self.names, name: value}, self.inner)
        elif self.names[name] is value or (not isinstance(value, Node) and self.names[name] == value):
            yield self


# A value of a graph (a node, a number, a list of them) and what was found so far -> every way to match it.
Pattern = Callable[[Any, Found], Iterator[Found]]


def first(pattern: Pattern, node: Node) -> Found | None:
    """The first way to match a node, or None."""
    return next(pattern(node, Found()), None)


def tensor(name: str) -> Pattern:
    """Any tensor, which the match consumes: the same at each place with this name."""

    def match(value: Any, found: Found) -> Iterator[Found]:
        if isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor):
            yield from found.name(name, value)

    return match


def number(name: str) -> Pattern:
    """A number that is known when the graph is compiled."""

    def match(value: Any, found: Found) -> Iterator[Found]:
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield from found.name(name, value)

    return match


def scalar(name: str) -> Pattern:
    """A number, or a node with one value, such as an input of the graph that `dynamic=True` makes of a Python float. It is for
    a match that is refused, and said to be: where `number` matches, that comes first."""
    known = number(name)

    def match(value: Any, found: Found) -> Iterator[Found]:
        yield from known(value, found)
        of = value.meta.get("val") if isinstance(value, Node) else None
        if isinstance(of, torch.SymFloat | torch.SymInt) or (isinstance(of, torch.Tensor) and of.dim() == 0):
            yield from found.name(name, value)

    return match


def anything(name: str) -> Pattern:
    """A list of numbers, a node, whatever is there."""
    return lambda value, found: found.name(name, value)


def named(name: str, pattern: Pattern) -> Pattern:
    """What the pattern matches, by a name."""

    def match(value: Any, found: Found) -> Iterator[Found]:
        for more in pattern(value, found):
            yield from more.name(name, value)

    return match


def noting(name: str, value: float, pattern: Pattern) -> Pattern:
    """What the pattern matches, and that it was this one."""

    def match(node: Any, found: Found) -> Iterator[Found]:
        for more in pattern(node, found):
            yield from more.name(name, value)

    return match


def one_of(*patterns: Pattern) -> Pattern:
    def match(value: Any, found: Found) -> Iterator[Found]:
        for pattern in patterns:
            yield from pattern(value, found)

    return match


def call(word: str, *arguments: Any, **options: Any) -> Pattern:
    """A call of one of the functions of `word` with exactly these arguments: patterns, lists of them, or equal values. Sums and
    products match with their operands in either order."""
    either = word in COMMUTATIVE and not options
    orders = [arguments, arguments[::-1]] if either else [arguments]

    def match(value: Any, found: Found) -> Iterator[Found]:
        if not isinstance(value, Node) or value.op != "call_function" or value.target not in TARGETS[word]:
            return
        if value.kwargs.keys() != options.keys():
            return
        given = [list(value.args), *([value.kwargs[name]] for name in options)]
        for order in orders:
            wanted = [list(order), *([pattern] for pattern in options.values())]
            for more in _all(wanted, given, found):
                yield Found(more.names, (*more.inner, value))

    return match


def _all(wanted: Any, value: Any, found: Found) -> Iterator[Found]:
    """Ways to match a value with a pattern, a list with a list of patterns, or an equal value."""
    if callable(wanted):
        yield from wanted(value, found)
    elif not isinstance(wanted, list):
        if isinstance(value, int | float) and value == wanted and isinstance(value, bool) == isinstance(wanted, bool):
            yield found
    elif isinstance(value, list | tuple) and len(value) == len(wanted):
        if not wanted:
            yield found
            return
        for more in _all(wanted[0], value[0], found):
            yield from _all(wanted[1:], value[1:], more)


def view(pattern: Pattern) -> Pattern:
    """What the pattern matches, or a view of it, whose sizes get the name `shape`."""
    return _through("view", pattern, lambda node: False)


def cast(pattern: Pattern) -> Pattern:
    """What the pattern matches, or a cast of it. A cast that only widens is looked through first: kernels widen too."""
    return _through("cast", pattern, _widens)


def _widens(node: Node) -> bool:
    before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    return before.is_floating_point and after.is_floating_point and before.itemsize < after.itemsize


def _through(word: str, pattern: Pattern, sooner: Callable[[Node], bool]) -> Pattern:
    """A cast or view of a tensor that the match only consumes is not part of the match: others may use it too."""

    def match(value: Any, found: Found) -> Iterator[Found]:
        if not isinstance(value, Node) or value.op != "call_function" or value.target not in TARGETS[word]:
            yield from pattern(value, found)
            return
        early = sooner(value)
        if not early:
            yield from pattern(value, found)
        for more in pattern(value.args[0], found):
            inner = (value,) if more.inner[len(found.inner) :] else ()
            grown = Found(more.names, (*more.inner, *inner))
            yield from grown.name("shape", list(value.args[1])) if word == "view" else (grown,)  # type: ignore[arg-type]
        if early:
            yield from pattern(value, found)

    return match


def silu(x: Pattern) -> Pattern:
    """x / (1 + exp(-x)), which inductor computes in float32, and x sigmoid(x) as people write it."""
    wide = cast(x)
    quotient = call("div", wide, call("add", call("exp", call("neg", wide)), 1))
    return cast(one_of(quotient, call("mul", wide, call("sigmoid", wide))))


def gelu(x: Pattern) -> Pattern:
    """Its two forms: by the error function, and by tanh."""
    wide = cast(x)
    half = call("mul", wide, 0.5)
    exact = call("mul", half, call("add", call("erf", call("mul", wide, 0.7071067811865476)), 1))
    cube = call("mul", call("mul", wide, wide), wide)
    inside = call("mul", call("add", wide, call("mul", cube, 0.044715)), number("root"))
    return cast(one_of(exact, call("mul", half, call("add", call("tanh", inside), 1))))


def rms_norm(x: Pattern, number: Callable[[str], Pattern] = number) -> Pattern:
    """x / sqrt(mean(x^2) + eps) weight (Zhang and Sennrich, 2019), with the cast back before the weight, as in transformers,
    or behind it, as in `F.rms_norm`; `scale` is the node of the root, and `dims` what the mean is over."""
    wide = cast(x)
    square = one_of(call("pow", wide, 2), call("mul", wide, wide))
    padded = call("add", call("mean", square, anything("dims"), True), number("eps"))
    root = named("scale", call("sqrt", padded))
    over = call("reciprocal", root)
    inverse = one_of(named("scale", call("rsqrt", padded)), over, call("mul", over, 1))
    upright = one_of(call("mul", wide, inverse), call("div", wide, root))
    return cast(call("mul", cast(upright), cast(tensor("weight"))))


def half(of: Pattern, which: int) -> Pattern:
    """One half of the last dimension; where it is cut has the names `start0`, `stop0`, `start1` and `stop1`, or `pieces`."""
    at = (anything("dim"), number(f"start{which}"), number(f"stop{which}"))
    return one_of(
        call("slice", of, *at),
        call("getitem", call("split", of, anything("pieces"), anything("dim")), which),
    )


def rotation(x: Pattern) -> Pattern:
    """x cos + rotate_half(x) sin (Su et al., RoFormer, 2021), with tables of x's width, as in transformers."""
    turned = call("cat", [call("neg", half(x, 1)), half(x, 0)], anything("last"))
    return call("add", call("mul", x, tensor("cos")), call("mul", turned, tensor("sin")))
