"""Kernels that compute nothing or only a part of their result, and the sizes at which verification must find them. These are
the sizes of every preset, with fewer rows and heads, because a bound depends on the number of terms of a sum and not on
the number of sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from minfer.bench.errors import run_reference
from minfer.ops import DTYPES, Case, Expected, Op
from minfer.shapes import named_sets

CPU = torch.device("cpu")
Tensor = torch.Tensor
Results = dict[str, Tensor]

# The largest sizes of axes along which results do not depend on each other. Axes along which terms are summed keep their size,
# except where a reference would take minutes: there sums are in fp32, which are far from any limit.
FEW = {"m": 4, "tokens": 4, "rows": 2, "batch": 2, "seq": 8, "seq_q": 4, "heads": 4, "kv_heads": 2, "new": 2}
COLUMNS, ELEMENTS = {"n": 64}, {"n": 2048}
CAPS: dict[str, dict[str, int]] = {
    **dict.fromkeys(("hgemm", "sgemm", "gemm_bias_relu", "gemm_bias_gelu", "gated_unit"), COLUMNS),
    **dict.fromkeys(("axpby", "divergence", "ilp", "producer_consumer"), ELEMENTS),
    "dequant": {"n": 4},
    "quant_gemm": {"n": 16},
    "sample": {"vocab": 32768},
    "sample_rows": {"vocab": 32768},
    "softmax": {"n": 32768},
    "embedding": {"vocab": 64},
    "decode_attention": {"longest": 512},
    "decoder": {"layers": 2, "hidden": 256, "ffn": 256, "vocab": 1024, "context": 128},
    "mla_decode": {"longest": 512},
    "prefill_attention": {"seq_kv": 512},
    "kv_append": {"longest": 64, "new": 16},
    "moe_ffn": {"experts": 4, "k": 2, "hidden": 256, "ffn": 256},
    "rmsnorm_backward": {},
}


def preset_shapes(op: Op) -> list[dict[str, int]]:
    """The sizes of an op's presets, for CPUs and GPUs, shrunk."""
    caps, found = FEW | CAPS.get(op.name, {}), []
    for content in named_sets().values():
        for entry in (*content["cpu"], *content["gpu"]) if content["op"] == op.name else ():
            axes = [axis for axis in op.axes if axis in entry]  # all but those with a default
            sizes = [value if isinstance(value, list) else [value] for value in (entry[axis] for axis in axes)]
            for each in itertools.product(*sizes):
                shape = {axis: min(value, caps.get(axis, value)) for axis, value in zip(axes, each, strict=True)}
                if shape not in found:
                    found.append(shape)
    return found


def few_problems(op: Op) -> list[Case]:
    """One case of each dtype and each accumulator, of the preset with the most terms."""
    most = max(preset_shapes(op), key=lambda shape: math.prod(shape.values()))
    found = {(case.dtype, case.params.get("accumulate")): case for case in reversed(list(problems(op, [most])))}
    return list(found.values())


def problems(op: Op, shapes: list[dict[str, int]]) -> Iterator[Case]:
    """Every case of these shapes, over dtypes, parameters and calls, once for all kernels; of page sizes the first two, because
    a page says only where keys lie."""
    seen = set()
    pages = op.params.get("page", ())
    left_out = set(pages[2:]) if isinstance(pages, tuple) else set()
    for kernel in op.kernels.values():
        for first in op.cases(kernel, shapes):
            for case in op.under_each_call(first):
                if case.params.get("page") in left_out:
                    continue
                if kernel.unsupported(case, None) is None and case.problem not in seen:
                    seen.add(case.problem)
                    yield case


def right_results(op: Op, case: Case, tensors: Mapping[str, Tensor], expected: Mapping[str, Expected]) -> Results:
    """What a right kernel writes: the reference, rounded; for an op with checks, what its baseline computes."""
    specs = {spec.name: spec for spec in op.specs(case) if spec.role != "in"}
    results = {name: right.value.to(DTYPES[specs[name].dtype]) for name, right in expected.items()}
    if op.checks:
        baseline = op.kernels[op.baseline(replace(case, kernel=op.baselines[0]))]
        assert baseline.function is not None
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        returned = baseline.function(*copies.values(), **op.call(case))
        several = returned if isinstance(returned, tuple) else (returned,)
        for place, value in zip(baseline.returns or (), several, strict=True):
            name = list(copies)[place]
            copies[name] = value.to(copies[name].dtype).view(copies[name].shape)
        results = {name: results.get(name, copies[name]) for name in specs}
    return results


def trivial_results(
    op: Op, case: Case, tensors: Mapping[str, Tensor], right: Results
) -> Iterator[tuple[str, str, Tensor]]:
    """Output, name of a trivial kernel, and what that kernel writes, where it is not what a right kernel writes."""
    for name, result in right.items():
        if not result.numel():
            continue
        made = {"zeros": torch.zeros_like(result)}
        if result.is_floating_point():
            finite = result.double()[result.double().isfinite()]
            mean = finite.mean() if finite.numel() else torch.tensor(0.0)
            made["the mean"] = torch.full_like(result, float(mean))
        if result.dim() > 1 and result.shape[0] > 1:
            made["the last row repeated"] = result[-1:].expand_as(result)
            made["rows shifted"] = result.roll(1, 0)
        elif result.shape[-1] > 1:
            made["elements shifted"] = result.roll(1, -1)
        for other, tensor in tensors.items():
            if tensor.shape == result.shape and tensor.dtype == result.dtype:
                made[f"a copy of {other}"] = tensor
        for kind, written in made.items():
            yield name, kind, written.contiguous()
    for kind, part in partial_results(op, case, tensors).items():
        for name, value in part.items():
            if value.numel():
                yield name, kind, value.to(right[name].dtype)


# Half, and a sixteenth, of the terms of each sum.


def partial_results(op: Op, case: Case, tensors: Mapping[str, Tensor]) -> dict[str, Results]:
    make = PARTS.get(op.name)
    if make is None:
        return {}
    found = {}
    for kind, share in (
        ("half of the terms", 0.5),
        ("all but a sixteenth", 15 / 16),
        ("a sixteenth of the terms", 1 / 16),
    ):
        if part := make(op, case, tensors, share):
            found[kind] = part
    return found


def _reference(op: Op, case: Case, tensors: Mapping[str, Tensor]) -> Results:
    return {name: right.value for name, right in run_reference(op, case, tensors).items()}


def _product(name: str) -> Callable[[Op, Case, Mapping[str, Tensor], float], Results]:
    """The product with the last columns of an input left out."""

    def make(op: Op, case: Case, tensors: Mapping[str, Tensor], share: float) -> Results:
        x = tensors[name].clone()
        kept = int(x.shape[1] * share)
        (x.view(torch.uint8) if x.element_size() == 1 else x)[:, kept:] = 0
        return _reference(op, case, {**tensors, name: x})

    return make


def _norm(op: Op, case: Case, tensors: Mapping[str, Tensor], share: float) -> Results:
    """A row's statistics from its first elements."""
    x = tensors["x"].double() + (tensors["residual"].double() if "residual" in tensors else 0.0)
    some, eps = x[:, : max(1, int(x.shape[1] * share))], op.call(case)["eps"]
    mean = some.mean(1, keepdim=True) if op.name == "layernorm" else 0.0
    scale = torch.rsqrt((some - mean).square().mean(1, keepdim=True) + eps)
    y = (x - mean) * scale * tensors["weight"].double()
    return {"y": y + tensors["bias"].double() if op.name == "layernorm" else y}


def _norm_backward(op: Op, case: Case, tensors: Mapping[str, Tensor], share: float) -> Results:
    """dweight from the first tokens; dx without the projection from its last elements."""
    t = {name: tensor.double() for name, tensor in tensors.items()}
    r = torch.rsqrt(t["x"].square().mean(1, keepdim=True) + op.call(case)["eps"])
    tokens, hidden = (max(1, int(case[axis] * share)) for axis in ("tokens", "hidden"))
    found = {}
    if tokens < case["tokens"]:
        found["dweight"] = (t["dy"] * t["x"] * r)[:tokens].sum(0)
    if case.params["rstd"] == "recomputed":
        part = torch.rsqrt(t["x"][:, :hidden].square().mean(1, keepdim=True) + op.call(case)["eps"])
        found["dx"] = _reference(op, case, tensors)["dx"] * part / r
    return found


def _softmax(op: Op, case: Case, tensors: Mapping[str, Tensor], share: float) -> Results:
    y = _reference(op, case, tensors)["y"]
    return {"y": y / y[:, : max(1, int(y.shape[1] * share))].sum(1, keepdim=True).clamp_min(1e-30)}


def _seq_sum(op: Op, case: Case, tensors: Mapping[str, Tensor], share: float) -> Results:
    if case.params["layout"] != "padded":
        return {}
    x = tensors["x"].clone()
    x[:, int(x.shape[1] * share) :] = 0
    y = _reference(op, case, {**tensors, "x": x})["y"]
    return {"y": y}


def _attention(op: Op, case: Case, tensors: Mapping[str, Tensor], share: float) -> Results:
    """The first keys alone."""
    axis = "seq_kv" if op.name == "prefill_attention" else "longest"
    if case.params.get("page", "none") != "none" or case.params.get("lengths", "full") != "full":
        return {}
    if case.params.get("layout", "padded") != "padded" or op.call(case).get("causal"):
        return {}
    keys = max(case.shape.get("new", 1), int(case[axis] * share))
    part = dict(tensors)
    for name in ("k", "v", "k_cache", "v_cache", "cache"):
        if name in part:
            part[name] = part[name][:, :keys]
    return _reference(op, case.with_shape({**case.shape, axis: keys}), part)


def _experts(op: Op, case: Case, tensors: Mapping[str, Tensor], share: float) -> Results:
    """The second product with its last terms left out, each slot's first."""
    down = tensors["down"].clone()
    down[:, :, int(down.shape[2] * share) :] *= 0
    return _reference(op, case, {**tensors, "down": down})


PARTS: dict[str, Callable[[Op, Case, Mapping[str, Tensor], float], Results]] = {
    **dict.fromkeys(("hgemm", "sgemm", "gemm_bias_relu", "gemm_bias_gelu"), _product("a")),
    **dict.fromkeys(("gated_unit", "quant_gemm"), _product("x")),
    **dict.fromkeys(("rmsnorm", "add_rmsnorm", "layernorm"), _norm),
    **dict.fromkeys(("prefill_attention", "decode_attention", "mla_decode"), _attention),
    "rmsnorm_backward": _norm_backward,
    "softmax": _softmax,
    "seq_sum": _seq_sum,
    "moe_ffn": _experts,
}
