"""What is recognised, and the op that each becomes. The larger ones come first: what these refuse others may take."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Node

import minfer.functional.axpby
import minfer.functional.gemm_bias
import minfer.functional.norms
import minfer.functional.rope
import minfer.functional.silu_mul  # noqa: F401 (they define the ops)
from minfer.functional import library
from minfer.fusion.match import (
    Found,
    Pattern,
    call,
    gelu,
    named,
    noting,
    number,
    one_of,
    rms_norm,
    scalar,
    silu,
    tensor,
    view,
)  # fmt: skip
from minfer.fusion.rewrite import Place, Problem, Refused, Rule, Writer
from minfer.fusion.rotations import ROPE

Sum = named("sum", call("add", tensor("a"), tensor("b")))
Written = tuple[Problem, dict[Node, Node]]
aten, ops = torch.ops.aten, torch.ops.minfer


def value(node: Node) -> torch.Tensor:
    found: torch.Tensor = node.meta["val"]
    return found


def rows(x: torch.Tensor) -> dict[str, Any]:
    count = 1
    for size in x.shape[:-1]:
        count *= size
    return {"tokens": count, "hidden": x.shape[-1]}


def _known(found: Found, name: str) -> float:
    """A number of the match. Refuse one that is a value of the graph: the op takes it when the graph is compiled."""
    number = found[name]
    if isinstance(number, Node):
        raise Refused(
            f"its {name} is {number.name}, whose value is not known when compiling, and minfer's op takes a number"
        )
    return float(number)


def _known_first(pattern: Callable[[Callable[[str], Pattern]], Pattern]) -> Pattern:
    """A pattern with numbers: first with known ones, then with any, which `_known` refuses."""
    return one_of(pattern(number), pattern(scalar))


# Norms


def _norm_form(found: Found, hidden: torch.Tensor) -> None:
    """Refuse a mean over anything but the last dimension, or one that is not float32."""
    if list(found["dims"]) not in ([-1], [hidden.dim() - 1]):
        raise Refused(f"its mean is over the dimensions {list(found['dims'])}, a kernel's is over the last")
    if (computed := value(found["scale"]).dtype) != torch.float32:
        raise Refused(f"its mean is of {computed}, a kernel's is of float32")


def _rms_norm(write: Writer, places: Sequence[Place]) -> Written:
    ((root, found),) = places
    x = value(found["x"])
    _norm_form(found, x)
    y = write(ops.rms_norm.default, found["x"], found["weight"], _known(found, "eps"))
    return Problem("rmsnorm", x.dtype, rows(x)), {root: y}


def _add_rms_norm(write: Writer, places: Sequence[Place]) -> Written:
    """The op changes the residual in place. `auto_functionalized` is PyTorch's form of such an op in a functional graph:
    inductor copies the residual where its old value is needed, and only there."""
    ((root, found),) = places
    x, residual = _residual_last(found["sum"], found["a"], found["b"])
    _norm_form(found, value(x))
    op = ops.add_rms_norm.default
    options = {"x": x, "residual": residual, "weight": found["weight"], "eps": _known(found, "eps")}
    both = write(torch.ops.higher_order.auto_functionalized, op, **options)
    y, total = (write(operator.getitem, both, place) for place in range(2))
    return Problem("add_rmsnorm", value(x).dtype, rows(value(x))), {root: y, found["sum"]: total}


def _residual_last(total: Node, a: Node, b: Node) -> tuple[Node, Node]:
    """The operand that nothing needs afterwards comes last, so that it can be overwritten: not an input of the graph."""
    spare = [node.op == "call_function" and all(user <= total for user in node.users) for node in (a, b)]
    return (b, a) if spare[0] and not spare[1] else (a, b)


# Products


def _product(x: Node, weight: Node) -> dict[str, Any]:
    (m, k), n = value(x).shape, value(weight).shape[1]
    return {"m": m, "n": n, "k": k}


def _shaped(write: Writer, y: Node, found: Found) -> Node:
    """The rows of a product as the view of it that was matched."""
    return write(aten.reshape.default, y, found["shape"]) if "shape" in found.names else y


def _swiglu(write: Writer, places: Sequence[Place]) -> Written:
    ((root, found),) = places
    x, gate = found["x"], found["w1"]
    y = _shaped(write, write(ops.swiglu.default, x, gate, found["w2"]), found)
    params = {"gate": "swiglu", "layout": library.layout(value(gate))}
    return Problem("gated_unit", value(x).dtype, _product(x, gate), params), {root: y}


def _gated_unit(write: Writer, places: Sequence[Place]) -> Written:
    ((root, found),) = places
    x, gate = found["x"], found["w1"]
    y = write(ops.gated_unit.default, x, gate, found["b1"], found["w2"], found["b2"])
    params = {"gate": "sigmoid", "layout": library.layout(value(gate))}
    problem = Problem("gated_unit", value(x).dtype, _product(x, gate), params)
    return problem, {root: _shaped(write, y, found)}


def _gemm_bias(op: str, write: Writer, places: Sequence[Place]) -> Written:
    """A product with a bias and ReLU, or GELU in the form that was matched."""
    ((root, found),) = places
    x, weight = found["x"], found["w"]
    form = ("tanh",) if "root" in found.names else ()
    if form and not math.isclose(found["root"], math.sqrt(2 / math.pi)):
        raise Refused(f"its tanh is of {found['root']} times its argument, a kernel's of the root of 2 / pi")
    y = write(getattr(ops, op).default, x, weight, found["b"], *form)
    params = {"layout": library.layout(value(weight))} | ({"call": "tanh"} if form else {})
    problem = Problem(op, value(x).dtype, _product(x, weight), params)
    return problem, {root: _shaped(write, y, found)}


def _multiply(which: str) -> Pattern:
    return view(call("mm", tensor("x"), tensor(f"w{which}")))


def _linear(which: str = "") -> Pattern:
    """A product and a bias, in one node or two."""
    bias, x, weight = tensor(f"b{which}"), tensor("x"), tensor(f"w{which}")
    return one_of(view(call("addmm", bias, x, weight)), call("add", view(call("mm", x, weight)), bias))


# One pass over memory


def _silu_mul(write: Writer, places: Sequence[Place]) -> Written:
    ((root, found),) = places
    gate = value(found["x"])
    y = write(ops.silu_mul.default, found["x"], found["up"])
    return Problem("silu_mul", gate.dtype, rows(gate)), {root: y}


def _axpby(write: Writer, places: Sequence[Place]) -> Written:
    ((root, found),) = places
    alpha, beta = (_known(found, name) * found.names.get(f"{name}_sign", 1) for name in ("alpha", "beta"))
    y = write(ops.axpby.default, found["a"], found["b"], alpha, beta)
    a = value(found["a"])
    return Problem("axpby", a.dtype, {"n": a.numel()}), {root: y}


def _combination(number: Callable[[str], Pattern]) -> Pattern:
    """alpha a + beta b in each way to write it."""
    a, b, alpha, beta = tensor("a"), tensor("b"), number("alpha"), number("beta")
    left, right = call("mul", a, alpha), call("mul", b, beta)
    alone = lambda pattern: noting("beta", 1.0, pattern)
    return one_of(
        call("add", left, right),
        alone(call("add", left, b)),
        alone(call("add", b, a, alpha=alpha)),
        noting("beta_sign", -1.0, one_of(call("sub", left, right), alone(call("sub", left, b)))),
        noting("alpha_sign", -1.0, alone(one_of(call("sub", b, left), call("sub", b, a, alpha=alpha)))),
    )


RULES = (
    ROPE,
    Rule("add_rms_norm", ("mul", "cast"), _known_first(partial(rms_norm, Sum)), _add_rms_norm),
    Rule("rms_norm", ("mul", "cast"), _known_first(partial(rms_norm, tensor("x"))), _rms_norm, cheap=True),
    Rule("swiglu", ("mul",), call("mul", silu(_multiply("1")), _multiply("2")), _swiglu),
    Rule("gated_unit", ("mul",), call("mul", call("sigmoid", _linear("1")), _linear("2")), _gated_unit),
    Rule("gemm_bias_relu", ("relu",), call("relu", _linear()), partial(_gemm_bias, "gemm_bias_relu")),
    Rule("gemm_bias_gelu", ("mul", "cast"), gelu(_linear()), partial(_gemm_bias, "gemm_bias_gelu")),
    Rule("silu_mul", ("mul",), call("mul", silu(tensor("x")), tensor("up")), _silu_mul, cheap=True),
    Rule("axpby", ("add", "sub"), _known_first(_combination), _axpby, cheap=True),
)
