"""CUDA kernels on the emulator: those of the registry are right, and a planted mistake is seen."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from minfer import ops
from minfer.bench.errors import compare_output, run_reference
from minfer.bench.operands import Operands
from minfer.build import toolchain
from minfer.ops import Case, Kernel
from minfer.ops.quantised import dequantised
from tests import sizes
from tests.emulator import Emulated, KernelError, compiled
from tests.emulator.mistakes import BROKEN, GATED, WHOLE, WIDER, mistakes_of, number_of
from tests.spaced import spaced
from tests.tiers import ALWAYS, few_of, mostly_slow, pairs_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(toolchain.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch"),
]

HGEMM = ops.get("hgemm")
CPU = torch.device("cpu")
LEAST = 6  # cases of a kernel


def cases(kernel: Kernel) -> list[Case]:
    """The cases of a kernel: all of a dtype of each width; of one with the same width, whose code differs in conversions
    only, those of the op's odd shapes. All of all dtypes where that leaves too few."""
    op = ops.get(kernel.op)
    first = {getattr(torch, dtype).itemsize: dtype for dtype in reversed(kernel.dtypes)}
    every = list(op.cases(kernel, sizes.emulated(kernel)))
    fewer = [case for case in every if case.dtype in first.values() or dict(case.shape) in op.odd_shapes]
    return fewer if len(fewer) >= LEAST else every


def worst(function: Callable[..., None], case: Case, seed: int = 1) -> float:
    """The largest error over its bound, of all calls that the kernel supports, each under its own schedule; NaN if a
    result has one."""
    op, found = ops.get(case.op), []
    # Normal scores are too near each other for the base of these ops' sums to move.
    values = "uniform" if case.op in ("prefill_attention", "decode_attention", "mla_decode") else "normal"
    for called in op.under_each_call(case):
        if op.kernels[case.kernel].unsupported(called, None):
            continue
        operands, fresh = (Operands(op, called, seed, values, CPU) for _ in range(2))
        tensors = spaced(op, operands)
        function(*tensors.values(), **op.call(called))
        written = {name: tensors[name] for name in operands.named("out", "inout")}
        expected = run_reference(op, called, fresh.tensors)
        found += [compare_output(op, called, name, fresh.tensors | written, expected).over_bound for name in written]
    return float(torch.tensor(found).max())


def emulated(kernel: Kernel) -> bool:
    """Whether the emulator has a version of its own of everything that the sources ask of the hardware."""
    known = {path.name for path in (Path(__file__).resolve().parents[1] / "emulator" / "include" / "cuda").iterdir()}
    sources = [path.read_text() for path in kernel.sources() if path.name not in known]
    foreign = (
        r"<mma\.h>|\basm\b(?! volatile\(\"\")|\batomic(?!Inc|Add)[A-Z]|cooperative_groups"  # g++ knows the empty asm
    )
    return not any(re.search(foreign, text) for text in sources)


FILES = {f"{kernel.op}-{kernel.source.stem}": kernel for kernel in ops.every_kernel(["cuda"])}  # any of a file's


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The library of a file, with its mistakes: one for all tests of it."""
    return cache(lambda file: compiled(FILES[file], tmp_path_factory.mktemp("emulated"), mistakes_of(file)))


@pytest.mark.parametrize("file", mostly_slow(FILES, ALWAYS.__contains__))
def test_kernels_agree_with_the_reference_when_emulated(file: str, library: Callable[[str], Path]) -> None:
    if not emulated(FILES[file]):
        pytest.skip("not emulated: WMMA, whose fragments are the compiler's secret, PTX of its own, or other atomics")
    for kernel in kernels_of(file):
        function = Emulated(kernel, library(file))
        chosen = (few_of if file in ALWAYS else pairs_of)(cases(kernel), LEAST)
        tried = [worst(function, case) for case in chosen]
        assert len(tried) >= LEAST and all(found < 1 for found in tried), tried  # max() would overlook NaN


@pytest.mark.slow
@pytest.mark.parametrize("file", [file for file in FILES if file in ALWAYS])
def test_kernels_agree_in_the_cases_left_when_emulated(file: str, library: Callable[[str], Path]) -> None:
    tried = []
    for kernel in kernels_of(file):
        function, few = Emulated(kernel, library(file)), few_of(cases(kernel), LEAST)
        tried += [worst(function, case) for case in cases(kernel) if case not in few]
    assert tried and all(found < 1 for found in tried), tried


def kernels_of(file: str) -> list[Kernel]:
    return [kernel for kernel in ops.get(FILES[file].op).kernels.values() if kernel.source == FILES[file].source]


@pytest.mark.slow
def test_few_long_items_of_decode_attention_take_a_whole_multiprocessor(tmp_path) -> None:
    file, edits = WHOLE
    kernel = FILES[file]
    library = compiled(kernel, tmp_path, {1: edits}, "-DMINFER_SM=90")
    function, without = Emulated(kernel, library), Emulated(kernel, library, 1)
    for each in (function, without):
        each.allow_shared(227 << 10)
    op = ops.get(kernel.op)
    long = sizes.named(
        op, [(1, 1, 1600, 4, 1, 128), (1, 8, 300, 5, 1, 64), (1, 1, 1600, 4, 1, 96), (1, 1, 900, 4, 1, 192, 128)]
    )
    for case in op.cases(kernel, long):
        if case.dtype == "bfloat16" and case.params["page"] == "16":
            assert worst(function, case) < 1
            assert not worst(without, case) < 1, "no block had a whole multiprocessor"


@pytest.mark.parametrize("file", mostly_slow(sizes.SHARED_SUMS, ALWAYS.__contains__))
def test_sums_of_several_blocks_have_the_same_bits_in_any_order_or_say_that_they_do_not(file, library) -> None:
    kernel = FILES[file]
    function = Emulated(kernel, library(file))
    shape = dict(zip(HGEMM.axes, sizes.SHARED_SUMS[file], strict=True))
    case = next(case for case in HGEMM.cases(kernel, [shape]) if case.dtype == "float16")
    out, *inputs = Operands(HGEMM, case, 1, "normal", CPU).arguments
    found = set()
    for _ in range(4):  # each in another order of blocks, and with as many clusters at once
        function.seed += 3
        function(out, *inputs)
        found.add(out.numpy().tobytes())
    assert (len(found) == 1) == kernel.deterministic


@pytest.mark.slow
@pytest.mark.parametrize(("file", "m"), [("hgemm-v18_fitted", 40), ("hgemm-v18_fitted", 150)])
def test_rows_of_b_that_are_padded_are_copied_by_tma(file: str, m: int, library: Callable[[str], Path]) -> None:
    kernel = FILES[file]
    params = {"layout": "NN", "accumulate": "float32"}
    case = HGEMM.case(kernel.name, "bfloat16", {"m": m, "n": 201, "k": 264}, params)
    operands = Operands(HGEMM, case, 1, "normal", CPU)
    out, a, b = operands.arguments
    wide = torch.full((264, 208), float("nan"), dtype=b.dtype)
    wide[:, :201] = b
    Emulated(kernel, library(file))(out, a, wide[:, :201], **HGEMM.call(case))
    expected = run_reference(HGEMM, case, Operands(HGEMM, case, 1, "normal", CPU).tensors)
    assert compare_output(HGEMM, case, "out", operands.tensors, expected).over_bound < 1


@pytest.mark.slow
@pytest.mark.parametrize("file", ["gemm_bias_relu-v06_anywhere"])
@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("first", [0, 1])
def test_rows_of_any_length_in_wider_tensors(
    file: str, layout: str, first: int, library: Callable[[str], Path], tmp_path: Path
) -> None:
    """Rows that start at multiples of 16 bytes and end anywhere, or start an element later, and NaN between them. A kernel
    that leaves out the last element of a row fails."""
    kernel, op = FILES[file], ops.get(FILES[file].op)
    case = op.case(kernel.name, "bfloat16", {"m": 67, "n": 69, "k": 77}, {"layout": layout})
    y, a, b, bias = Operands(op, case, 1, "normal", CPU).arguments
    expected = run_reference(op, case, Operands(op, case, 1, "normal", CPU).tensors)

    def wider(x: torch.Tensor) -> torch.Tensor:
        around = torch.full((first + x.shape[0] * 80,), float("nan"), dtype=x.dtype)
        return around[first:].view(-1, 80)[:, : x.shape[1]].copy_(x)

    def error(function: Callable[..., None]) -> float:
        function(y, wider(a), wider(b.t()).t() if layout == "TN" else wider(b), bias)
        return compare_output(op, case, "y", {"y": y, "a": a, "b": b, "bias": bias}, expected).over_bound

    assert error(Emulated(kernel, library(file))) < 1
    if first == 0:
        assert not error(Emulated(kernel, compiled(kernel, tmp_path, {1: WIDER[1]}), 1)) < 1


@pytest.mark.slow
@pytest.mark.parametrize("file", ["quant_gemm-v10_early"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 80, 4096), (11, 66, 2048), (16, 80, 1024)])
def test_entries_of_early_products_of_packed_weights(
    file: str, m: int, n: int, k: int, library: Callable[[str], Path], tmp_path: Path
) -> None:
    """With zeros and without, which means 8; and with the gate in the first half of the rows of W. A result without the gate
    is seen."""
    kernel = FILES[file]
    product, swiglu = (
        Emulated(replace(kernel, name=f"{kernel.name}_{entry}"), library(file)) for entry in kernel.entries
    )
    w = torch.randint(0, 256, (n, k // 128, 64), dtype=torch.uint8)
    x, scales = torch.randn(m, k).bfloat16(), (torch.rand(n, k // 128) * 0.02 + 0.01).bfloat16()
    y, gated = torch.empty(m, n, dtype=x.dtype), torch.empty(m, n // 2, dtype=x.dtype)
    for zeros in (torch.randint(0, 16, scales.shape).bfloat16(), scales[:0]):
        from_zero = zeros if len(zeros) else torch.full_like(scales, 8.0)
        wanted = x.double() @ dequantised("int4_g128", w, scales, from_zero).double().t()
        gate, up = wanted.chunk(2, -1)
        for function, found, right in ((product, y, wanted), (swiglu, gated, gate * gate.sigmoid() * up)):
            function(found, x, w, scales, zeros)
            assert (found.double() - right).norm() <= 1e-2 * right.norm()
    if m == 1:
        ungated = Emulated(replace(kernel, name=f"{kernel.name}_swiglu"), compiled(kernel, tmp_path, {1: GATED[1]}), 1)
        ungated(gated, x, w, scales, scales[:0])
        assert (gated.double() - right).norm() > 0.1 * right.norm()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    ("file", "pages", "shapes"),
    [
        ("prefill_attention-v09_paged", (2, 128), [(2, 70, 200, 2, 1, 64)]),
        ("prefill_attention-v12_fp8", (2, 128), [(2, 70, 200, 2, 1, 64)]),
        ("prefill_attention-v15_gathered", (2, 128), [(2, 70, 200, 2, 1, 64)]),
        ("prefill_attention-v16_fp8_gathered", (2, 128), [(2, 70, 200, 2, 1, 64)]),
        ("prefill_attention-v10_paged_boxes", (8, 32, 256), [(2, 140, 300, 2, 1, 64), (1, 70, 260, 2, 1, 192, 128)]),
        ("prefill_attention-v11_paged_short", (8, 32, 256), [(2, 37, 170, 6, 2, 64), (1, 20, 330, 16, 1, 128)]),
        ("prefill_attention-v18_paged_parts", (8, 32, 256), [(1, 3, 600, 6, 2, 64), (1, 20, 530, 16, 1, 128)]),
    ],
)
def test_pages_of_sizes_that_no_case_names(file, pages, shapes, layout, library) -> None:
    op, function = ops.get(FILES[file].op), Emulated(FILES[file], library(file))
    for page, shape in itertools.product(pages, sizes.named(op, shapes)):
        params = {"page": str(page), "layout": layout, "lengths": "gaps:1", "lse": "yes"}
        params["quant"] = "fp8" if "fp8" in file else "none"
        assert worst(function, op.case("torch_eager", "bfloat16", shape, params)) < 1


SCHEDULES = 4  # of each case: not every order of blocks and threads shows a mistake


@pytest.mark.parametrize(
    ("file", "how"),
    mostly_slow([(file, how) for how, (file, *_) in BROKEN.items()], lambda pair: pair[0] in ALWAYS),
    ids=[f"{file}, {how}" for how, (file, *_) in BROKEN.items()],
)
def test_a_broken_kernel_is_seen(file: str, how: str, library: Callable[[str], Path]) -> None:
    kernel, error = FILES[file], BROKEN[how][2]
    op, function = ops.get(kernel.op), Emulated(kernel, library(file), number_of(how))
    dtype = "float16" if "float16" in kernel.dtypes else kernel.dtypes[0]
    of_dtype = [case for case in op.cases(kernel, sizes.emulated(kernel)) if case.dtype == dtype]
    tried = (worst(function, case) for _ in range(SCHEDULES) for case in of_dtype)
    if error:
        with pytest.raises(KernelError, match=error):
            list(tried)
    else:
        assert not all(found < 1 for found in tried), "nothing was seen"


@pytest.mark.parametrize("file", ["rmsnorm-v02_vectors"])
def test_rmsnorm_says_what_it_does_not_take(file: str, library: Callable[[str], Path]) -> None:
    function, x = Emulated(FILES[file], library(file)), torch.zeros(4, 24)
    refused = {
        "rmsnorm: y must have size 4 in dimension 0, got 3": (x[:3].clone(), x, x[0]),
        "rmsnorm: weight must have 1 dimensions, got 2": (x.clone(), x, x),
        "rmsnorm: weight must be float32, got float16": (x.clone(), x, x[0].half()),
        "rmsnorm: x must be float32 or float16 or bfloat16, got int32": (x.int(), x.int(), x[0].int()),
        "rmsnorm: x must be contiguous in its last dimension, which has stride 4": (
            x.clone(),
            x.t().contiguous().t(),
            x[0],
        ),
        "rmsnorm: y must have a multiple of 4 elements in a row, got 22": (x[:, :22], x[:, :22], x[0, :22]),
        "rmsnorm: x must have rows that start at multiples of 16 bytes": (x[:, :8].clone(), x[:, 2:10], x[0, :8]),
    }
    for why, tensors in refused.items():
        with pytest.raises(KernelError, match=why):
            function(*tensors)
