"""What was matched becomes a call of minfer's op, or stays as it is for a reason that is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from minfer import build
from minfer.build import toolchain
from minfer.build.errors import BuildError
from minfer.functional.best import best
from minfer.fusion import worth
from minfer.fusion.match import TARGETS, Found, Pattern, first
from minfer.ops import get
from minfer.ops.tensors import NAMES

# Why an op that asks for the value of a size is refused.
GUARD = "it holds for some sizes only, and these are not known before it runs"

# One place where a pattern was found: its last node, and what was matched.
Place = tuple[Node, Found]


class Refused(Exception):
    """Why a match is not replaced, as a sentence without its end."""


@dataclass(frozen=True)
class Problem:
    """What a kernel of `op` is asked for: as `minfer.functional.library.call` has it."""

    op: str
    dtype: torch.dtype
    shape: Mapping[str, Any]
    params: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """A pattern and what becomes of it.

    `write` emits the nodes that replace the places that `groups` puts together (each alone unless given) and returns the
    problem that they solve, and the nodes to replace with the new ones. It raises Refused where the form alone does not
    decide. `cheap`: all is one pass over memory, which inductor joins with what is pointwise before and after it; a call of
    an op ends that."""

    name: str
    ends: tuple[str, ...]  # words of `match.TARGETS`: what the last node calls
    pattern: Pattern
    write: Callable[[Writer, Sequence[Place]], tuple[Problem, dict[Node, Node]]]
    groups: Callable[[list[Place]], list[list[Place]]] = lambda places: [[place] for place in places]
    cheap: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a match: replaced by `new`, or `refused`."""

    rule: str
    at: Node
    nodes: tuple[str, ...]  # what was matched, by name
    why: str
    new: tuple[str, ...] = ()  # what replaced it

    @property
    def fused(self) -> bool:
        return bool(self.new)

    def sentence(self) -> str:
        return f"{self.rule} at {place(self.at)}: {'fused' if self.fused else 'not fused'}, {self.why}"


def place(node: Node) -> str:
    """A node by its name, its module and its line in the model's source, as far as they are known."""
    stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    lines = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File ")
    ]
    about = [stack[-1].removeprefix("L['self'].")] if stack else []
    if lines:
        path, number = lines[-1].split('"')[1], lines[-1].split("line ")[1].split(",")[0]
        about.append(f"{path.rpartition('/')[2]}:{number}")
    return f"{node.name} ({', '.join(about)})" if about else node.name


class Writer:
    """Adds nodes to a graph behind all of the nodes that they take, with the fake values that inductor needs."""

    def __init__(self, graph: Graph, places: Sequence[Place], shared: Mapping[Any, Node]) -> None:
        self.graph, self.root = graph, places[-1][0]
        self.made: list[Node] = []
        self.before, self.shared = shared, dict(shared)
        taken: list[Node] = []
        for _, found in places:
            torch.fx.map_arg(dict(found.names), taken.append)
        inner = {node for _, found in places for node in found.inner}
        self.taken = [node for node in dict.fromkeys(taken) if node not in inner]
        call = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
        self.last = max([call.prev, *self.taken])
        self.mode = self.root.meta["val"].fake_mode

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call of `target`. Raises Refused with the sentence of an op that does not take these arguments."""
        value_of = lambda node: node.meta["val"]
        given, options = torch.fx.map_arg((args, kwargs), value_of)
        try:
            with self.mode, no_guards(self.mode.shape_env):
                value = target(*given, **options)
        except ValueError as error:
            raise Refused(str(error)) from error
        with self.graph.inserting_after(self.last):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {
            name: self.root.meta[name] for name in ("stack_trace", "nn_module_stack") if name in self.root.meta
        }
        node.meta["val"] = value
        self.made.append(node)
        self.last = node
        return node

    def once(self, target: Any, *args: Any) -> Node:
        """A call that others of this graph may have made before: the one node for all of them."""
        key = (target, *args)
        if key not in self.shared:
            self.shared[key] = self(target, *args)
        self.last = max(self.last, self.shared[key])
        return self.shared[key]

    def undo(self) -> None:
        for node in reversed(self.made):
            self.graph.erase_node(node)


def _guards_raise(shapes: Any) -> AbstractContextManager[None]:
    """Within it, a new guard of this ShapeEnv raises an exception. PyTorch 2.11 has no public function for that."""
    return shapes.error_on_new_guards() if hasattr(shapes, "error_on_new_guards") else _old_guards_raise(shapes)


@contextmanager
def _old_guards_raise(shapes: Any) -> Iterator[None]:
    def refuse(expression: Any, value: Any) -> None:
        raise Refused(GUARD)

    shapes._check_frozen = refuse  # PyTorch calls it before it adds a guard
    try:
        yield
    finally:
        del shapes._check_frozen


@contextmanager
def no_guards(shapes: Any) -> Iterator[None]:
    """Within it, tracing an op must not add a guard, that is, fix a symbolic size to a value: where an op does, `Refused` is
    raised. A ValueError is the op's own."""
    try:
        with _guards_raise(shapes) if shapes is not None else nullcontext():
            yield
    except (ValueError, Refused):
        raise
    except Exception as error:
        if not type(error).__module__.startswith("torch"):
            raise
        raise Refused(GUARD) from error


@dataclass(frozen=True)
class Policy:
    """What may be replaced. `rest`: "inductor" or "eager", what runs all else. `unmeasured`: "refuse" or "fuse"."""

    rest: str = "inductor"
    unmeasured: str = "refuse"


def apply(graph: Graph, rules: Sequence[Rule], policy: Policy) -> list[Outcome]:
    """Replace what matches the rules, in their order, and say what became of each match."""
    _merge(graph)
    outcomes: list[Outcome] = []
    shared: dict[Any, Node] = {}
    for rule in rules:
        ends = {target for word in rule.ends for target in TARGETS[word]}
        order = {node: number for number, node in enumerate(graph.nodes)}
        called = [node for node in graph.nodes if node.op == "call_function" and node.target in ends]
        places = [(node, found) for node in called if (found := first(rule.pattern, node))]
        # With the cast behind it first, then without.
        outer = {node: root for root, found in places for node in found.inner}  # of two, the one further behind
        places.sort(key=lambda place: (order[outer[place[0]]], -order[place[0]]))
        waiting, gone = rule.groups(places)[::-1], set[Node]()
        while waiting:
            group = waiting.pop()
            # What was replaced meanwhile changes what the next ones take.
            again = [(root, first(rule.pattern, root)) for root, _ in group if root not in gone]
            now = [(root, found) for root, found in again if found]
            if not now:
                continue
            outcome, erased, shared = _replace(graph, rule, now, policy, shared)
            gone |= erased
            if len(now) > 1 and not outcome.fused:
                waiting += [[one] for one in now[::-1]]
            elif outcome.fused or not (waiting and waiting[-1][-1][0] in now[-1][1].inner):
                outcomes.append(outcome)
    return outcomes


def _merge(graph: Graph) -> None:
    """Make one of equal views and casts: two products of one x may have it by a view each."""
    seen: dict[tuple[Any, str], Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in TARGETS["view"] | TARGETS["cast"] | TARGETS["index"]:
            same = seen.setdefault((node.target, f"{node.args}{node.kwargs}"), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def _replace(
    graph: Graph, rule: Rule, group: Sequence[Place], policy: Policy, shared: dict[Any, Node]
) -> tuple[Outcome, set[Node], dict[Any, Node]]:
    """What became of a group, which nodes are gone, and which new ones others may share."""
    at = group[-1][0]
    matched = tuple(dict.fromkeys(node for _, found in group for node in found.inner))
    names = tuple(node.name for node in matched)
    writer = Writer(graph, group, shared)
    try:
        problem, new = rule.write(writer, group)
        _nobody_else(matched, new)
        _same(new)
        _in_time(writer, matched, new)
        why = _kernel(problem, at.meta["val"].device, policy)
        if rule.cheap and policy.rest == "inductor":
            _no_neighbours(writer.taken, new)
    except Refused as error:
        writer.undo()
        return Outcome(rule.name, at, names, str(error)), set(), shared
    for old, node in new.items():
        old.replace_all_uses_with(node)
    gone = _erase(graph, matched)
    return Outcome(rule.name, at, names, why, tuple(node.name for node in writer.made)), gone, writer.shared


def _erase(graph: Graph, matched: Sequence[Node]) -> set[Node]:
    """Erase what nothing uses any more, casts and views that only the match used included."""
    gone, waiting = set(), sorted(matched)
    while waiting:
        node = waiting.pop()
        if node in gone or node.users:
            continue
        waiting += [each for each in node.all_input_nodes if each.target in TARGETS["cast"] | TARGETS["view"]]
        graph.erase_node(node)
        gone.add(node)
    return gone


def _nobody_else(matched: Sequence[Node], new: Mapping[Node, Node]) -> None:
    """Refuse where something outside of the match uses what would not be computed any more."""
    for node in matched:
        others = [user for user in node.users if user not in matched]
        if node in new or not others:
            continue
        if any(user.op == "output" for user in others):
            raise Refused(f"{node.name} is an output of the graph too: the caller's, or saved for the backward pass")
        raise Refused(f"{node.name} is used by {others[0].name} too")


def _same(new: Mapping[Node, Node]) -> None:
    """Refuse where a tensor would have another shape, dtype or order in memory than before."""
    for old, node in new.items():
        before, after = old.meta["val"], node.meta["val"]
        if before.dtype != after.dtype:
            raise Refused(f"{old.name} is {before.dtype} and would be {after.dtype}")
        if len(before.shape) != len(after.shape) or not all(map(_equal, before.shape, after.shape)):
            raise Refused(f"{old.name} is {tuple(before.shape)} and would be {tuple(after.shape)}")
        strides = zip(before.shape, before.stride(), after.stride(), strict=True)
        if not all(_equal(mine, other) for size, mine, other in strides if not _equal(size, 1)):
            raise Refused(f"{old.name} lies in memory with strides {before.stride()} and would with {after.stride()}")


def _equal(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def _in_time(writer: Writer, matched: Sequence[Node], new: Mapping[Node, Node]) -> None:
    """Refuse where a result is used before all that the call takes is there."""
    for old in new:
        for user in old.users:
            if user <= writer.last and user not in matched and user not in writer.made:
                raise Refused(f"{user.name} uses {old.name} before {max(writer.taken).name} is there")


def _no_neighbours(taken: Sequence[Node], new: Mapping[Node, Node]) -> None:
    for node in taken:
        while node.op == "call_function" and node.target in TARGETS["view"]:
            node = node.args[0]  # type: ignore[assignment]
        if _pointwise(node):
            raise Refused(f"inductor computes {node.name}, which it takes, in the same kernel")
    for old in new:
        for user in old.users:
            if _pointwise(user):
                raise Refused(f"inductor computes {user.name}, which takes it, in the same kernel")


def _pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in TARGETS["cast"]


def _kernel(problem: Problem, device: torch.device, policy: Policy) -> str:
    """Which kernel will run, and why that is worth it. Raises Refused: nothing supports this, nothing was measured, PyTorch's
    was faster, or the kernel does not compile here."""
    if device.type not in ("cpu", "cuda"):
        raise Refused(f"minfer has kernels for a CPU and for CUDA, and this is on {device.type}")
    shape = {axis: hint(size) for axis, size in problem.shape.items()}
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    dtype = NAMES[problem.dtype]
    if 0 in shape.values():
        raise Refused("it has no elements")
    try:
        choice = best(problem.op, dtype, problem.params, shape, capability, name)
    except ValueError as error:
        raise Refused(str(error)) from error
    verdict = worth.compare(problem.op, choice.kernel, dtype, problem.params, shape, capability, name, policy.rest)
    if verdict.slower or (verdict.unknown and policy.unmeasured == "refuse"):
        raise Refused(f"{choice.kernel}: {verdict.why}")
    try:
        build.function(
            get(problem.op).kernels[choice.kernel], toolchain.arch_of(capability) if capability else "", from_wheel=True
        )
    except BuildError as error:
        raise Refused(f"{choice.kernel} does not compile here: {error}") from error
    return f"{choice.kernel}: {verdict.why}"


def hint(size: Any) -> int:
    """A size, for one that may change the one of this call. Raises Refused where it depends on data."""
    if isinstance(size, int):
        return size
    known = size.node.hint
    if known is None:
        raise Refused(f"the size {size} depends on data")
    return int(known)
