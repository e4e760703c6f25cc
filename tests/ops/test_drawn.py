"""Drawn problems: valid ones, the same for a seed, spread over the models, and each function right at one."""

from __future__ import annotations

import math

import pytest
import torch

from minfer import build, ops
from minfer import fingerprint as fingerprints
from minfer.bench.device import pick
from minfer.bench.verify import WrongResult, verify
from minfer.fingerprint import fingerprint
from minfer.ops import PACKAGE, Op, drawn
from tests.tiers import mostly_slow

PREFERRED = PACKAGE / "functional" / "preferred.py"
FUNCTIONS = {"hgemm": "matmul", "quant_gemm": "quant_gemm", "prefill_attention": "attention", "softmax": "softmax"}
DRAWN = [name for name in ops.names() if ops.get(name).drawn]


def draw(op: Op, count: int, seed: int = 1, device: str = "cuda") -> list[drawn.Problem]:
    assert op.drawn is not None
    return drawn.problems(op.name, op.drawn, count, seed, device)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_problems_are_valid_different_and_those_of_their_seed(name: str, device: str) -> None:
    op = ops.get(name)
    found = draw(op, 200, 1, device)
    assert len({repr(problem) for problem in found}) == 200
    assert found == draw(op, 200, 1, device) and found[:50] == draw(op, 50, 1, device)
    assert found != draw(op, 200, 2, device)
    for problem in found:
        needed = {name for name, axis in op.axes.items() if not axis.default}
        assert needed <= problem.shape.keys() <= op.axes.keys() and op.wrong_shape(problem.shape) is None
        assert problem.params.keys() <= op.params.keys()
        baseline = op.baselines[0]
        case = op.case(baseline, problem.dtype, problem.shape, problem.params)
        assert op.kernels[op.baseline(case)].unsupported(case, None) is None, problem


def test_tokens_are_log_uniform_and_not_rounded() -> None:
    tokens = [problem.shape["m"] for problem in draw(ops.get("hgemm"), 2000)]
    assert min(tokens) == 1 and max(tokens) <= 8192 and sum(m % 8 == 0 for m in tokens) < 500
    least = sum(math.log2(m) < 6.5 for m in tokens)
    assert 900 < least < 1300  # the middle of the logarithm; logits have 512 tokens at most


def test_a_drawn_layer_is_one_of_a_model() -> None:
    sizes = {size for model in drawn.models() for size in (model.hidden, model.heads * model.head_dim, model.ffn)}
    assert len(drawn.models()) == 24
    assert all(problem.shape["k"] in sizes for problem in draw(ops.get("hgemm"), 500))


@pytest.mark.parametrize("name", mostly_slow(DRAWN, lambda name: name == "hgemm"))
def test_each_function_is_right_at_a_drawn_problem(name: str) -> None:
    op, device = ops.get(name), pick("cpu")
    function = next(kernel for kernel in op.kernels.values() if kernel.backend == "function")
    problem = min(draw(op, 40, 1, "cpu"), key=lambda problem: math.prod(problem.shape.values()))
    case = op.case(function.name, problem.dtype, problem.shape, problem.params)
    assert function.unsupported(case, None) is None
    errors = verify(op, case, function, build.function(function), device, None, 0)
    assert errors.tried >= 3


def test_a_function_has_the_fingerprint_of_what_it_chooses_among(monkeypatch: pytest.MonkeyPatch) -> None:
    op = ops.get("hgemm")
    matmul = op.kernels["matmul"]
    before = fingerprint(matmul, "", 1)
    assert before == fingerprint(matmul, "", 1) != fingerprint(matmul, "", 2)
    other = op.kernels["cpu_naive"]
    monkeypatch.setitem(op.kernels, "cpu_naive", op.kernels["cpu_blocked"])
    assert fingerprint(matmul, "", 1) != before
    monkeypatch.setitem(op.kernels, "cpu_naive", other)
    assert fingerprint(matmul, "", 1) == before


def functions() -> dict[str, str]:
    """The fingerprint of each op's function, and that of a kernel."""
    found = {op: fingerprint(ops.get(op).kernels[name], "", 1) for op, name in FUNCTIONS.items()}
    return found | {"kernel": fingerprint(ops.get("hgemm").kernels["cpu_naive"], "", 1)}


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("def short_rows(", "def short_rows(more: int, ", {"softmax"}),
        ("def _prompts(", "def _prompts(more: int, ", {"prefill_attention"}),  # which rules call
        ("def short_product_kernel(", "def short_product_kernel(more: int, ", {"hgemm"}),  # which their helper calls
        (
            "def mma_product_kernel(",
            "def mma_product_kernel(more: int, ",
            {"hgemm"},
        ),  # of a rule for GPUs before Hopper
        ("\nSHORT = ", "\nSHORT = 1 + ", {"hgemm", "quant_gemm"}),
        ("\nHOPPER_ONLY = {", '\nHOPPER_ONLY = {"compact", ', {"prefill_attention"}),
        ('"""Whether `softmax` takes', '"""Says whether `softmax` takes', set()),
        ("\nSHORT = ", "\n# Shorter than that:\nSHORT = ", set()),
        ("def why(", "def why(more: int, ", set()),
    ],
)
def test_a_rule_is_part_of_the_fingerprints_of_the_ops_whose_kernels_name_it(
    old: str, new: str, changed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, read = functions(), fingerprints.read_source
    assert old in read(PREFERRED)
    monkeypatch.setattr(
        fingerprints, "read_source", lambda path: read(path).replace(old, new) if path == PREFERRED else read(path)
    )
    fingerprints._choices.cache_clear()
    after = functions()
    fingerprints._choices.cache_clear()
    assert {name for name in before if after[name] != before[name]} == changed


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("functional/best.py", set(FUNCTIONS)),
        ("functional/product_times.py", {"hgemm"}),
        ("functional/product_times.cpp", {"hgemm"}),
        ("functional/attention_times.py", {"prefill_attention"}),
    ],
)
def test_the_code_of_the_choice_is_part_of_the_fingerprints_of_what_uses_it(
    file: str, changed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, meaning = functions(), fingerprints._meaning
    monkeypatch.setattr(fingerprints, "_meaning", lambda path: meaning(path) + "changed" * (path == PACKAGE / file))
    fingerprints._choices.cache_clear()
    after = functions()
    fingerprints._choices.cache_clear()
    assert {name for name in before if after[name] != before[name]} == changed


def test_a_function_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import minfer

    op = ops.get("hgemm")
    monkeypatch.setattr(
        minfer, "matmul", lambda a, b: torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype), raising=False
    )
    case = op.case("matmul", "float16", {"m": 8, "n": 16, "k": 32})
    with pytest.raises(WrongResult):
        verify(op, case, op.kernels["matmul"], build.function(op.kernels["matmul"]), pick("cpu"), None, 0)
