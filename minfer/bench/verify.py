"""Is a kernel right? It is run on inputs made from a seed and compared, element by element, with the op's fp64 reference.

The bound of an element is one ulp of the output's dtype plus what the op's reference allows for the arithmetic before that
rounding. The errors of all elements of an output together have a limit of their own, `whole_limit`, which is far below the
bounds of long sums (`minfer.ops.bounds`). Integers, and values that are only copied, must be exact. `minfer.bench.trivial`
refuses an op whose bounds would accept a kernel that computes nothing.

The reference is computed after the kernel ran, from inputs made anew from their seed: nothing that a kernel can reach
while it runs decides whether it is right.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from minfer.bench.errors import Errors, compare_output, describe_wrong, run_reference
from minfer.bench.integrity import Dishonest
from minfer.bench.operands import Operands, bits
from minfer.bench.trivial import refuse_trivial
from minfer.ops import Case, Expected, Op, Tensors

Function = Callable[..., object]
MOST_DRAWN = 8 << 20  # bytes of the operands of a shape that is drawn
SLOW_S = 0.2  # of a call; a kernel that takes longer is slow
REPEATS, REPEATS_S = 5, 0.2  # more runs on the same inputs, to see a race; fewer where they take long


class Stated(Protocol):
    """What a `minfer.ops.Kernel` says of itself and verification must know."""

    @property
    def deterministic(self) -> bool: ...

    def unsupported(self, case: Case, capability: tuple[int, int] | None) -> str | None: ...


class WrongResult(Exception):
    """The kernel's result is wrong; the message says how and on which input."""

    def __init__(self, message: str, errors: Errors) -> None:
        super().__init__(message)
        self.errors = errors


@dataclass(frozen=True)
class Inputs:
    """One set of inputs that a kernel is verified on."""

    case: Case
    distribution: str  # of `minfer.bench.operands.Operands`
    seed: int

    def describe(self, op: Op) -> str:
        call = "".join(f", {name}={value}" for name, value in op.call(self.case).items())
        return f"{self.distribution} inputs, {self.case.shape_name}{call}, seed {self.seed}"

    def operands(self, op: Op, device: torch.device) -> Operands:
        """Its tensors; the same values every time. On a CPU a kernel that reads far beyond a tensor crashes."""
        return Operands(op, self.case, self.seed, self.distribution, device, fenced=True)


@dataclass(frozen=True)
class Checked:
    """What a kernel did on one set of inputs."""

    errors: Errors
    wrong: str = ""  # how its result is wrong; empty if it is right
    seconds: float = math.inf  # of the shortest call


Known = dict[tuple[str, str], Checked]  # by the key of the inputs' case, and their distribution


def choose_inputs(op: Op, case: Case, kernel: Stated, capability: tuple[int, int] | None, seed: int) -> list[Inputs]:
    """What a case is verified on: its own shape under two distributions and every call; small odd shapes, of which one is
    drawn at random, so that no kernel can prepare for it; and its own shape with uneven rows."""
    first, *others = [c for c in op.under_each_call(case) if c is case or kernel.unsupported(c, capability) is None]
    chosen = [Inputs(first, "uniform", seed), Inputs(first, "normal", seed + 1)]
    chosen += [Inputs(other, "uniform", seed + 2) for other in others]
    drawn = map(case.with_shape, op.drawn_shapes(random.Random(seed)))
    small = (odd for odd in drawn if op.operand_bytes(odd) <= MOST_DRAWN)
    surprise = next((odd for odd in small if kernel.unsupported(odd, capability) is None), None)
    for shape in (*map(case.with_shape, op.odd_shapes), *([surprise] if surprise else [])):
        for odd in op.under_each_call(shape):
            if kernel.unsupported(odd, capability) is None:
                chosen.append(Inputs(odd, "normal", seed + 3))
    return [*chosen, Inputs(first, "uneven", seed + 4)]


def verify(
    op: Op,
    case: Case,
    kernel: Stated,
    function: Function,
    device: torch.device,
    capability: tuple[int, int] | None,
    seed: int,
    sparing: bool = False,
    structures: Sequence[str] = (),
    known: Known | None = None,
) -> Errors:
    """Compare a kernel with the reference on all inputs of a case, and on its own shape with values of these `structures`
    (`minfer.bench.operands.STRUCTURES`). With `sparing`, a kernel that is slow (SLOW_S) on the first inputs of the case's shape
    is not run on the others of that shape. `known` is a cache of earlier results of the same kernels on the same device. For
    other shapes than the case's own, this takes a result from it and does not run the kernel again, even if that had other
    seeds; new results are added to it. Raises WrongResult or Dishonest at the first that fails, and ValueError for an op whose
    bounds would accept a kernel that computes nothing."""
    worst, is_slow, known = Errors(), False, {} if known is None else known
    chosen = choose_inputs(op, case, kernel, capability, seed)
    chosen += [replace(chosen[0], distribution=structure, seed=seed + 5) for structure in structures]
    for inputs in chosen:
        is_own_shape, key = inputs.case.shape == case.shape, (inputs.case.key, inputs.distribution)
        if is_slow and is_own_shape:
            worst = worst.worst(Errors(left_out=1))
            continue
        checked = None if is_own_shape else known.get(key)
        if checked is None:
            is_own = inputs.case == case and inputs.distribution not in structures
            checked = known[key] = _verify_on(op, inputs, kernel, function, device, is_own)
        worst = worst.worst(checked.errors)
        if checked.wrong:
            raise WrongResult(checked.wrong, worst)
        is_slow |= sparing and checked.seconds > SLOW_S
    return worst


def _verify_on(
    op: Op, inputs: Inputs, kernel: Stated, function: Function, device: torch.device, is_own: bool
) -> Checked:
    """What the kernel does on these inputs. Raises Dishonest, and ValueError as `verify` does."""
    operands, where = inputs.operands(op, device), inputs.describe(op)
    written = operands.named("out", "inout")
    addresses = {name: tensor.data_ptr() for name, tensor in written.items()}
    begin = _mark(device)
    returned = function(*operands.arguments, **op.call(inputs.case))
    end = _mark(device)
    check_genuine(written, addresses)
    # Copied in stream order, before any synchronisation: what runs elsewhere has not arrived yet.
    results = {name: tensor.detach().clone() for name, tensor in written.items()}
    synchronize(device)
    if returned is not None:
        if _only_of(returned, written):
            raise TypeError(
                "returned its output tensor; a kernel must return None (if it is a lambda, write a def without a return)"
            )
        raise Dishonest(f"returned a {type(returned).__name__}; a kernel writes its output and returns nothing")

    fresh = inputs.operands(op, device)
    for name, kept in fresh.named("in").items():
        if not same_bits(operands.tensors[name], kept):
            return Checked(Errors(), f"changed its input {name} ({where})")
    if operands.is_breached():
        return Checked(Errors(), f"wrote outside its output ({where})")
    expected = run_reference(op, inputs.case, fresh.tensors)
    errors = Errors(tried=1)
    fault = None
    for name, result in results.items():
        found = compare_output(op, inputs.case, name, fresh.tensors | results, expected)
        errors = errors.worst(found)
        if fault is None and (what := _fault(name, result, found)):
            fault = f"{what}; {describe_wrong(op, inputs.case, name, fresh.tensors | results, expected)}"
    if fault:
        return Checked(errors, f"{fault} ({where})")
    if is_own:
        refuse_trivial(op, inputs.case, fresh.tensors, results, expected)
    bits = results if kernel.deterministic else None
    again_s = _repeat(op, inputs, function, device, bits, expected)
    if again_s is None:
        return Checked(errors, f"gives another result when run again, which looks like a race ({where})")
    return Checked(errors, seconds=min(_seconds(begin, end), again_s))  # the first call of a kernel may compile it


def _only_of(returned: object, written: Tensors) -> bool:
    """Whether a kernel returned outputs that it was given, and nothing else: as `torch.mul(..., out=y)` does."""
    several = returned if isinstance(returned, tuple) else (returned,)
    places = {tensor.data_ptr() for tensor in written.values()}
    return len(several) > 0 and all(type(one) is torch.Tensor and one.data_ptr() in places for one in several)


def check_genuine(tensors: Tensors, addresses: Mapping[str, int]) -> None:
    """Raises Dishonest when an output is no longer the plain tensor at that address, which a kernel was to write."""
    for name, tensor in tensors.items():
        if type(tensor) is not torch.Tensor or tensor.data_ptr() != addresses[name]:
            raise Dishonest("put another tensor in the place of its output")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of the same layout hold the same; NaN, which is poison there, equals itself."""
    return torch.equal(bits(tensor), bits(other))


def _mark(device: torch.device) -> Any:
    """This moment, for `_seconds`: on a GPU in the order of the stream, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    """The seconds between two marks."""
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def _repeat(
    op: Op,
    inputs: Inputs,
    function: Function,
    device: torch.device,
    bits: Tensors | None,
    expected: Mapping[str, Expected],
) -> float | None:
    """The seconds of the shortest call, if the kernel gives the same bits again or, where it does not promise to, a right
    result; else None."""
    shortest = math.inf
    deadline = time.perf_counter() + REPEATS_S
    for _ in range(REPEATS):
        operands = inputs.operands(op, device)
        begin = _mark(device)
        function(*operands.arguments, **op.call(inputs.case))
        end = _mark(device)
        for name, tensor in operands.named("out", "inout").items():
            if bits is not None:
                if not same_bits(tensor, bits[name]):
                    return None
            elif not compare_output(op, inputs.case, name, operands.tensors, expected).over <= 1:
                return None
        shortest = min(shortest, _seconds(begin, end))
        if time.perf_counter() > deadline:
            break
    return shortest


def _fault(name: str, result: torch.Tensor, errors: Errors) -> str | None:
    """What is wrong with an output, in words that point at the likely mistake."""
    if errors.over <= 1:
        return None
    what = "the output" if name == "out" else f"the output {name}"
    result = result.float() if result.is_floating_point() else result
    if share := float(result.isnan().double().mean()):
        return f"{share:.1%} of {what} is NaN: not written, or computed so"
    if not bool((result != 0).any()):
        return f"{what} is all zeros"
    if result.numel() > 1 and bool((result == result.flatten()[0]).all()):
        return f"{what} is constant"
    if math.isinf(errors.over_bound) and bool(result.isfinite().all()):  # there is no bound: it must be exact
        return f"an element of {what} is not what it must be"
    if errors.over_bound <= 1:
        return (
            f"{what} as a whole is off by {errors.over_limit:.3g} times its limit, though no element exceeds its bound"
        )
    return f"an element of {what} is off by {errors.over_bound:.3g} times its error bound"
