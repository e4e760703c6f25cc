"""`dequant` and `quant_gemm`: values against the `gguf` package, what the ops state, and functions like PyTorch's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from minfer import build, dequant, ops, quant_gemm
from minfer.bench.errors import compare_output, run_reference
from minfer.bench.operands import Operands
from minfer.bench.verify import WrongResult, verify
from minfer.functional import quantised
from minfer.ops.quantised import FORMATS, FP8, GGUF, INT4, dequantised

pytestmark = pytest.mark.usefixtures("one_thread")
GEMM = ops.get("quant_gemm")
CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
NOTHING = torch.empty(0)


def random_bytes(name: str, n: int, k: int) -> torch.Tensor:
    """Whatever bytes: scales among them are infinite, NaN, negative and subnormal."""
    form = FORMATS[name]
    return torch.randint(0, 256, (n, k // form.block * form.nbytes), dtype=torch.uint8)


def same(found: torch.Tensor, wanted: np.ndarray) -> None:
    """The same bits, and NaN where NaN is."""
    nan = np.isnan(wanted)
    assert np.array_equal(nan, np.isnan(found.numpy()))
    assert np.array_equal(found.numpy().view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])


@pytest.mark.parametrize("name", GGUF)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_values_are_the_bits_of_the_gguf_package(name):
    gguf = pytest.importorskip("gguf")
    w = random_bytes(name, 67, 1024)
    wanted = gguf.dequantize(w.numpy(), gguf.GGMLQuantizationType[name.upper()])
    assert np.isnan(wanted).any() and np.isfinite(wanted).any()
    same(dequant(w, name, dtype=torch.float32), wanted)
    form = FORMATS[name]
    same(dequantised(name, w.view(67, -1, form.nbytes), NOTHING, NOTHING), wanted)
    for dtype in (torch.float16, torch.bfloat16):
        torch.testing.assert_close(
            dequant(w, name, dtype=dtype), torch.from_numpy(wanted).to(dtype), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("name", GGUF)
def test_a_file_that_the_gguf_package_wrote_is_read_as_it_lies(name, tmp_path):
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name.upper()]
    if name in ("q8_0", "q4_0"):
        data = gguf.quantize(np.random.default_rng(1).standard_normal((5, 512)).astype(np.float32), kind)
    else:  # the package reads these and does not make them
        case = GEMM.case("torch", "float16", {"m": 1, "n": 5, "k": 512}, {"format": name})
        data = Operands(GEMM, case, 1, "normal", CPU).tensors["w"].flatten(1).numpy().copy()
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "llama")
    writer.add_tensor("w", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = gguf.GGUFReader(tmp_path / "w.gguf").tensors
    w = torch.from_numpy(np.array(tensor.data))
    assert np.array_equal(w.numpy(), data)
    wanted = gguf.dequantize(data, kind)
    same(dequant(w, name, dtype=torch.float32), wanted)
    x = torch.randn(3, 512).half()
    torch.testing.assert_close(
        quant_gemm(x, w, name).double(), x.double() @ torch.from_numpy(wanted).double().T, rtol=1e-3, atol=1e-2
    )


def int4(
    n: int, k: int, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, zeros = torch.randint(0, 16, (n, k)), torch.randint(0, 16, (n, k // group))
    scales = (torch.randn(n, k // group) * 0.1).to(dtype)
    w = (q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8)
    value = (q - zeros.repeat_interleave(group, 1)) * scales.float().repeat_interleave(group, 1)
    return w, scales, zeros.to(dtype), value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [64, 128])
def test_int4_is_its_definition(group, dtype):
    w, scales, zeros, value = int4(7, 384, group, dtype)
    assert torch.equal(dequant(w, f"int4_g{group}", scales, zeros, dtype=dtype), value.to(dtype))
    eight = dequant(w, f"int4_g{group}", scales, dtype=dtype)
    assert torch.equal(eight, dequant(w, f"int4_g{group}", scales, torch.full_like(zeros, 8), dtype=dtype))


def test_all_bytes_of_e4m3_are_numbers_or_nan():
    w = torch.arange(256, dtype=torch.uint8).view(8, 32).view(E4M3)
    scales = torch.tensor([1.0, -2.0, 2.0**-130, math.inf, math.nan, 0.0, 3.0, 0.5])
    torch.testing.assert_close(
        dequant(w, "fp8", scales, dtype=torch.float32), w.float() * scales[:, None], rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("scale", [0.0, -0.0, 2.0**-24, -65504.0, math.inf, math.nan])
@pytest.mark.parametrize("name", GGUF)
def test_extreme_scales_of_a_block_stay_in_their_row(name, scale):
    case = GEMM.case("torch", "float16", {"m": 2, "n": 4, "k": 512}, {"format": name})
    tensors = Operands(GEMM, case, 1, "normal", CPU).tensors
    w = tensors["w"].clone()
    for place in FORMATS[name].places:
        w[1, 0, place : place + 2] = torch.tensor([scale]).half().view(torch.uint8)
    weight = dequantised(name, w, NOTHING, NOTHING, torch.float64)
    found = quant_gemm(tensors["x"].bfloat16(), w.flatten(1), name)
    wanted = tensors["x"].bfloat16().double() @ weight.T
    torch.testing.assert_close(
        found.double(), wanted, rtol=2e-2, atol=2e-2 * float(abs(wanted).nan_to_num(0).max()), equal_nan=True
    )
    assert bool(found[:, [0, 2, 3]].isfinite().all())


@pytest.mark.parametrize("kernel", ["a scale too far", "halves swapped", "no zeros"])
def test_a_wrong_kernel_is_seen(kernel):
    case = GEMM.case("torch", "bfloat16", {"m": 4, "n": 32, "k": 512}, {"format": "int4_g128"})
    eager = GEMM.kernels["torch"].function

    def wrong(y, x, w, scales, zeros, *rest):
        if kernel == "a scale too far":
            scales = scales.roll(1, 1)
        elif kernel == "halves swapped":
            w = w << 4 | w >> 4
        elif kernel == "no zeros":
            zeros = torch.zeros_like(zeros)
        y.copy_(eager(y, x, w, scales, zeros, *rest))

    stated = ops.Kernel(
        GEMM.name,
        "wrong",
        "torch",
        GEMM.source,
        params=dict.fromkeys(()),
        requires=lambda c: None if c.shape == case.shape else "no",
    )
    with pytest.raises(WrongResult):
        verify(GEMM, case, stated, wrong, CPU, None, seed=1)


@pytest.mark.parametrize("shape", [(5, 512), (2, 3, 512), (512,), (0, 512)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_those_of_the_weights(shape, dtype):
    x = torch.randn(shape).to(dtype)
    w, scales, zeros, value = int4(33, 512, 64, dtype)
    eps = torch.finfo(dtype).eps
    for found, weight in (
        (quant_gemm(x, w, "int4_g64", scales, zeros), value),
        (quant_gemm(x, (w8 := torch.randn(33, 512).to(E4M3)), "fp8", torch.full((33,), 0.5)), w8.float() * 0.5),
    ):
        assert found.dtype == dtype and found.shape == (*shape[:-1], 33)
        torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=eps, atol=64 * eps)
    x8, x_scales = x.to(E4M3), torch.rand(shape[:-1])
    found = quant_gemm(x8, w8, "fp8", torch.full((33,), 0.5), x_scales=x_scales, dtype=dtype)
    wanted = (x8.double() * x_scales[..., None]) @ (w8.double() * 0.5).T
    torch.testing.assert_close(found.double(), wanted, rtol=eps, atol=64 * eps)


def summed_by_tensor_cores(x: torch.Tensor, w: torch.Tensor, length: int) -> torch.Tensor:
    """x @ w.T where each sum of `length` products keeps 13 bits behind the leading one, and these sums are added exactly; with
    a length of 0 in fp32."""
    if not length:
        return (x.float() @ w.float().T).double()
    total = torch.zeros(len(x), len(w), dtype=torch.float64)
    for start in range(0, x.shape[1], length):
        part = torch.zeros_like(total)
        for i in range(start, min(start + length, x.shape[1])):
            product = x[:, i, None] * w[None, :, i]
            leading = torch.frexp(torch.maximum(part.abs(), product.abs())).exponent - 1
            unit = torch.ldexp(torch.ones_like(part), leading - 13)
            part = (part / unit).trunc() * unit + (product / unit).trunc() * unit
        total += part
    return total


@pytest.mark.parametrize(
    ("accumulate", "k", "within", "beyond"), [("promoted", 4096, 128, 4096), ("float32", 512, 0, 128)]
)
def test_the_bound_of_fp8_sums_tells_how_long_they_are(accumulate, k, within, beyond):
    params = {"format": "fp8_fp8", "accumulate": accumulate}
    case = GEMM.case("torch", "bfloat16", {"m": 16, "n": 48, "k": k}, params)
    for distribution in ("normal", "uniform"):
        given = Operands(GEMM, case, 1, distribution, CPU).tensors
        expected = run_reference(GEMM, case, given)["y"]
        scale = given["x_scales"].double()[:, None] * given["scales"].double()
        x, w = given["x"].double(), given["w"].double()
        over = [
            ((summed_by_tensor_cores(x, w, length) * scale - expected.value).abs() / expected.bound).max().item()
            for length in (within, beyond)
        ]
        assert over[0] <= 1 < over[1], (distribution, over)


def test_tensors_that_lie_badly_and_nothing_to_do():
    w, scales, zeros, value = int4(9, 256, 128, torch.float16)
    x = torch.randn(256, 6).half().t()
    wide = torch.stack((w, w), 1)[:, 1]
    found = quant_gemm(x, wide, "int4_g128", scales.t().contiguous().t(), zeros)
    torch.testing.assert_close(found.double(), x.double() @ value.double().T, rtol=1e-3, atol=1e-1)
    assert quant_gemm(x[:, :0], w[:, :0], "int4_g128", scales[:, :0]).abs().sum() == 0
    assert dequant(w[:0], "int4_g128", scales[:0]).shape == (0, 256)


def test_they_are_ops_like_pytorchs_own():
    w, scales, zeros, _ = int4(8, 256, 128, torch.float16)
    x = torch.randn(3, 256).half()
    torch.library.opcheck(torch.ops.minfer.dequant.default, (w, "int4_g128", scales, zeros, torch.float16))
    torch.library.opcheck(torch.ops.minfer.quant_gemm.default, (x, w, "int4_g128", scales, zeros, None, None))
    compiled = torch.compile(
        lambda x: quant_gemm(x, w, "int4_g128", scales, zeros) + 1, backend="aot_eager", fullgraph=True, dynamic=True
    )
    for rows in (3, 4):
        x = torch.randn(rows, 256).half()
        assert torch.equal(compiled(x), quant_gemm(x, w, "int4_g128", scales, zeros) + 1)


def test_mistakes_are_a_sentence_each():
    w, scales, zeros, _ = int4(8, 256, 128, torch.float16)
    x, w8 = torch.randn(3, 256).half(), torch.zeros(8, 256).to(E4M3)
    form = "int4_g128"
    for arguments, keywords, said in (
        ((x.float(), w, form, scales), {}, "x of float16, bfloat16 or float8_e4m3fn, got torch.float32"),
        ((x, w, "q5_0"), {}, "a format of q8_0, .*, fp8, got 'q5_0'"),
        ((x, w.int(), form, scales), {}, r"w of uint8 and the shape \(n, 64\*blocks\), got torch.int32, \(8, 128\)"),
        ((x, w, "q6_k"), {}, r"w of uint8 and the shape \(n, 210\*blocks\), got torch.uint8, \(8, 128\)"),
        ((x, w, form), {}, "scales with the format int4_g128, got None"),
        ((x, w, "int4_g64", scales), {}, r"scales of float16 and the shape \(8, 4\), got torch.float16, \(8, 2\)"),
        ((x, w, form, scales, zeros.float()), {}, r"zeros of float16 and the shape .*, got torch.float32, \(8, 2\)"),
        ((x, w8, "fp8", torch.ones(8), zeros), {}, "no zeros with the format fp8, got a tensor"),
        ((x[:, :128], w, form, scales), {}, r"x of \(\.\.\., 256\), got \(3, 128\)"),
        ((x, w.to("meta"), form, scales.to("meta")), {}, "x on the device of w, meta, got cpu"),
        ((x.to(E4M3), w, form, scales), {}, "x of float8_e4m3fn with the format fp8 only, got int4_g128"),
        ((x.to(E4M3), w8, "fp8", torch.ones(8)), {}, "x_scales with x of float8_e4m3fn, and only then, got None"),
        ((x, w, form, scales), {"dtype": torch.float32}, "a dtype of that of x, torch.float16, got torch.float32"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^minfer.quant_gemm takes {said}$"):
            quant_gemm(*arguments, **keywords)
    with pytest.raises(
        ValueError, match=r"^minfer.dequant takes a dtype of float32, float16 or bfloat16, got torch.int8$"
    ):
        dequant(w, form, scales, dtype=torch.int8)
    with pytest.raises(RuntimeError, match=r"^minfer.quant_gemm has no backward"):
        quant_gemm(x.requires_grad_(), w, form, scales)


def test_a_kernel_names_the_tensor_that_does_not_fit():
    kernel = build.function(GEMM.kernels["cpu_naive"])
    case = GEMM.case("cpu_naive", "float16", {"m": 2, "n": 3, "k": 256}, {"format": "int4_g64"})
    y, x, w, scales, zeros, *rest = Operands(GEMM, case, 1, "normal", CPU).arguments
    for arguments, said in (
        ((y, x[:, :128], w, scales, zeros), "quant_gemm: x must have size 256 in dimension 1, got 128"),
        ((y, x, w, scales[:, :2], zeros), "quant_gemm: scales must have size 4 in dimension 1, got 2"),
        ((y, x, w, scales, zeros.float()), "quant_gemm: zeros must be float16, got float32"),
        (
            (y, x, w[..., :20], scales, zeros),
            "quant_gemm: w must have blocks of 18, 32, 34, 64, 144 or 210 bytes, got 20",
        ),
    ):
        with pytest.raises(RuntimeError, match=said):
            kernel(*arguments, *rest)


def test_every_format_has_kernels():
    for name in FORMATS:
        assert name in (*GGUF, *INT4, *FP8)
        able = [
            k
            for k in GEMM.kernels.values()
            if k.takes(GEMM.case(k.name, "bfloat16", {"m": 1, "n": 1, "k": 256}, {"format": name})) is None
        ]
        assert {"torch", "cuda", "cpp"} <= {k.backend for k in able}


@pytest.mark.parametrize(
    ("name", "m", "steps"), [("q8_0", 65, 2), ("fp8", 65, 2), ("q8_0", 64, 1), ("int4_g128", 65, 1)]
)
def test_many_rows_are_multiplied_with_dequantised_weights_on_hopper(
    name: str, m: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    call = quantised.library.call
    monkeypatch.setattr(
        quantised.library, "call", lambda op, *rest, **more: (called.append(op), call(op, *rest, **more))
    )
    monkeypatch.setattr(quantised.library, "capability_of", lambda tensor: (9, 0))
    case = GEMM.case("torch", "bfloat16", {"m": m, "n": 24, "k": 256}, {"format": name})
    t = Operands(GEMM, case, 1, "normal", CPU).tensors
    scales = {key: t[key] for key in ("scales", "zeros") if t[key].numel()}
    y = quantised._quant_gemm(t["x"], t["w"].flatten(1), name, scales.get("scales"), scales.get("zeros"), None, None)
    assert called == (["dequant", "hgemm"] if steps == 2 else ["quant_gemm"])
    assert compare_output(GEMM, case, "y", {"y": y}, run_reference(GEMM, case, t)).over_bound <= 1


def test_one_kernel_multiplies_many_rows_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    call = quantised.library.call
    monkeypatch.setattr(
        quantised.library, "call", lambda op, *rest, **more: (called.append(op), call(op, *rest, **more))
    )
    monkeypatch.setattr(quantised.library, "capability_of", lambda tensor: (9, 0))
    empty = torch.Tensor.new_empty

    def scarce(tensor: torch.Tensor, *sizes: int, **how: object) -> torch.Tensor:
        if sizes == (24, 256):
            raise torch.OutOfMemoryError("no memory")
        return empty(tensor, *sizes, **how)

    monkeypatch.setattr(torch.Tensor, "new_empty", scarce)
    case = GEMM.case("torch", "bfloat16", {"m": 65, "n": 24, "k": 256}, {"format": "q8_0"})
    t = Operands(GEMM, case, 1, "normal", CPU).tensors
    y = quantised._quant_gemm(t["x"], t["w"].flatten(1), "q8_0", None, None, None, None)
    assert called == ["quant_gemm"]
    assert compare_output(GEMM, case, "y", {"y": y}, run_reference(GEMM, case, t)).over_bound <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*GGUF, "fp8"])
def test_many_rows_on_a_gpu(name: str) -> None:
    case = GEMM.case("torch", "bfloat16", {"m": 300, "n": 1032, "k": 2048}, {"format": name})
    t = Operands(GEMM, case, 1, "normal", torch.device("cuda")).tensors
    scales = t["scales"] if t["scales"].numel() else None
    for _ in range(3):  # prepared from the second call on
        y = quant_gemm(t["x"], t["w"].flatten(1), name, scales)
        assert compare_output(GEMM, case, "y", {"y": y}, run_reference(GEMM, case, t)).over_bound <= 1
