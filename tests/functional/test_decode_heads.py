"""`minfer.decode_attention` with heads of 96, and with keys of 192 and values of 128: on a CPU, emulated and in the op."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch

from minfer import build, decode_attention, ops
from minfer.build import toolchain
from minfer.functional.best import best
from minfer.functional.decode_attention import DIMS as TAKEN
from minfer.functional.decode_attention import v_dim_of
from tests.emulator import Emulated, KernelError, compiled
from tests.functional.test_decode_attention import case_of, paged
from tests.functional.test_scored_decode import hide
from tests.functional.test_wide_decode import check, definition, draw_tree

pytestmark = pytest.mark.usefixtures("one_thread")
OP = ops.get("decode_attention")
DIMS = [(96, 96), (192, 128)]
COUNTS = [0, 1, 15, 16, 17, 64, 129, 2]
LATENT = {"head_dim": 192, "v_dim": 128}


def int32(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.int32)


@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
@pytest.mark.parametrize(("new", "heads", "kv_heads", "page"), [(1, 6, 1, 16), (4, 3, 3, 64), (16, 4, 2, 4)])
@pytest.mark.parametrize(
    "options", [{}, {"window": 7}, {"window": 40, "softcap": 2.0}, {"softcap": 2.0}, {"scale": 0.3}]
)
def test_pages(options: dict[str, Any], new: int, heads: int, kv_heads: int, page: int, dim: int, v_dim: int) -> None:
    """With a sink for each head where there is a soft cap. Keys before the window are NaN."""
    q, rows, caches, table = paged(COUNTS, new, heads, kv_heads, dim, page)
    assert caches[0].shape[3] == dim and caches[1].shape[3] == v_dim
    if window := options.get("window"):
        hide(caches, table, COUNTS, new, window)
    if "softcap" in options:
        options = options | {"sinks": torch.linspace(-4, 9, heads)}
    out = decode_attention(q, *caches, int32(COUNTS), page_table=table, check_pages=not window, **options)
    assert out.shape == (len(COUNTS), new, heads, v_dim) and out.is_contiguous() and out.dtype == q.dtype
    scale = options.pop("scale", dim**-0.5) if "scale" in options else dim**-0.5
    check(out, q * (scale * dim**0.5), rows, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
def test_contiguous_caches_parts_of_wider_ones_fp8_and_trees(dim: int, v_dim: int, dtype: torch.dtype) -> None:
    counts, scales, tolerance = [50, 7], torch.tensor([0.5, 2.0]), 2e-3 if dtype == torch.float16 else 1.6e-2
    # Rows that lie between others, as in a projection of q, k and v.
    wide_q, wide_k, wide_v = (
        torch.randn(2, n, heads, 2 * of).to(dtype) for n, heads, of in ((5, 4, dim), (60, 2, dim), (60, 2, v_dim))
    )
    q, k, v = wide_q[..., 8 : 8 + dim], wide_k[:, :50, :, dim:], wide_v[:, 10:, :, :v_dim]
    k8, v8 = (x.float().to(torch.float8_e4m3fn) for x in (k, v))
    mask = draw_tree(2, 5)
    for given in (None, mask):
        found = decode_attention(q, k, v, int32(counts), mask=given)
        found8 = decode_attention(q, k8, v8, int32(counts), scales=scales, mask=given)
        assert torch.equal(found, decode_attention(*(x.contiguous() for x in (q, k, v)), int32(counts), mask=given))
        for i, count in enumerate(counts):
            tree = None if given is None else given[i]
            of8 = k8[i, :count].float() * 0.5, v8[i, :count].float() * 2
            for one, rows in ((found, (k[i, :count], v[i, :count])), (found8, of8)):
                torch.testing.assert_close(
                    one[i].double(), definition(q[i], *rows, tree), rtol=tolerance, atol=tolerance
                )


@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
def test_it_is_an_op_like_pytorchs_own(dim: int, v_dim: int) -> None:
    q, _rows, caches, table = paged([30, 9], 1, 2, 1, dim, 16)
    arguments = (q, *caches, int32([30, 9]), table, None, torch.zeros(2), None, 0.0, 7, 3.0)
    torch.library.opcheck(torch.ops.minfer.decode_attention.default, arguments)


def test_values_of_another_length_are_refused() -> None:
    lengths = int32([20])
    for dim, v_dim, wanted in ((192, 192, 128), (96, 64, 96), (128, 192, 128), (64, 128, 64)):
        q, k, v = (torch.zeros(1, n, 2, of).half() for n, of in ((1, dim), (20, dim), (20, v_dim)))
        said = rf"^minfer.decode_attention takes v_cache of \(1, 20, 2, {wanted}\), got \(1, 20, 2, {v_dim}\)$"
        with pytest.raises(ValueError, match=said):
            decode_attention(q, k, v, lengths)
        with pytest.raises(ValueError, match=said):
            decode_attention(q, k, v, lengths, check_pages=True)
    q, k = torch.zeros(1, 1, 2, 192).half(), torch.zeros(1, 20, 2, 192).half()
    nothing = torch.empty(1, 0, dtype=torch.int32), torch.empty(0)
    naive = build.function(OP.kernels["cpu_naive"])
    with pytest.raises(RuntimeError, match="decode_attention: out must have size 128 in dimension 3, got 192"):
        naive(torch.empty_like(q), q, lengths, nothing[0], k, k, nothing[1])
    with pytest.raises(RuntimeError, match="decode_attention: v_cache must have size 128 in dimension 3, got 192"):
        naive(q[..., :128].contiguous(), q, lengths, nothing[0], k, k, nothing[1])
    with pytest.raises(RuntimeError, match="q must have a head_dim of 64, 96, 128, 192 or 256, got 160"):
        naive(
            *(x[..., :160].contiguous() for x in (q, q)),
            lengths,
            nothing[0],
            *(k[..., :160].contiguous(),) * 2,
            nothing[1],
        )


def test_a_case_names_the_length_of_values_only_beside_keys_of_192() -> None:
    case = case_of((2, 1, 20, 4, 2, 192, 128))
    assert case.shape_name.endswith("head_dim=192,v_dim=128") and OP.wrong_shape(case.shape) is None
    assert "v_dim" not in case_of((2, 1, 20, 4, 2, 96, 96)).shape
    assert [spec.shape[-1] for spec in OP.specs(case) if len(spec.shape) == 4] == [128, 192, 192, 128]
    assert OP.traffic_of(case) == (2 * 4 * 192 * 2 + 40 * 2 * (192 + 128) * 2 + 4 * 2, 2 * 4 * 128 * 2)
    assert OP.flops(case) == 2 * 40 * 4 * (192 + 128)
    for sizes, said in (
        ({"head_dim": 192}, "v_dim=192 must be 128 where head_dim=192"),
        ({"head_dim": 96, "v_dim": 128}, "v_dim=128 must be 96 where head_dim=96"),
    ):
        assert OP.wrong_shape({"batch": 1, "new": 1, "longest": 20, "heads": 2, "kv_heads": 1} | sizes) == said


def test_kernels_that_take_powers_of_two_say_so() -> None:
    refusing = {"v02_split", "v04_balanced", "triton_split", "flashinfer", "flashinfer_run"}
    for kernel in OP.kernels.values():
        page = kernel.params.get("page", ("none",))[0]
        said = [
            kernel.unsupported(case_of(of, kernel.name, page=page), None)
            for of in ((1, 1, 20, 4, 2, 96), (1, 1, 20, 4, 2, 192, 128))
        ]
        if kernel.name in refusing:
            takes = "takes heads of 64, 128 or 256, got"
            assert said == [f"{takes} 96", f"{takes} 192 with values of 128"]
        else:
            assert said[0] is None
            assert (said[1] is None) == (kernel.name not in ("torch_flash", "flash_attn_4"))
    assert (
        OP.kernels["torch_flash"].unsupported(case_of((1, 1, 20, 4, 2, 192, 128)), None)
        == "takes v with the head_dim of q"
    )


@pytest.mark.parametrize("capability", [(9, 0), (8, 9), (12, 0)])
@pytest.mark.parametrize("quant", ["none", "fp8"])
@pytest.mark.parametrize("page", ["none", "16"])
@pytest.mark.parametrize("heads", [{"head_dim": 96}, LATENT], ids=str)
def test_best_takes_the_packed_kernel_for_them(heads: dict[str, int], page: str, quant: str, capability: Any) -> None:
    shape = {"batch": 64, "new": 1, "longest": 8192, "heads": 32, "kv_heads": 8} | heads
    params = {"page": page, "lengths": "full", "quant": quant}
    assert best(OP.name, "bfloat16", params, shape, capability, "").kernel == "v03_packed"


def test_the_sizes_of_the_function_are_those_of_the_op() -> None:
    of_op = {dim: dim for dim in range(1, 513) if OP.axes["head_dim"].check(dim, {}) is None}
    of_op = {
        dim: next(v for v in range(1, 513) if OP.axes["v_dim"].check(v, {"head_dim": dim}) is None) for dim in of_op
    }
    assert of_op == {dim: v_dim_of(torch.empty(1, dim)) for dim in TAKEN}


@pytest.mark.slow
@pytest.mark.skipif(toolchain.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch")
@pytest.mark.parametrize("name", ["v02_split", "v04_balanced"])
def test_kernels_that_take_powers_of_two_refuse_others_themselves(name: str, tmp_path: Any) -> None:
    function = Emulated(OP.kernels[name], compiled(OP.kernels[name], tmp_path))
    for dim in (96, 192):
        q, _, caches, table = paged([30], 1, 4, 2, dim, 16)
        out = q.new_full((1, 1, 4, 128 if dim == 192 else dim), math.nan)
        with pytest.raises(KernelError, match=f"this kernel takes heads of 64, 128 or 256, got {dim}"):
            function(out, q, int32([30]), table, *caches, torch.empty(0))


@pytest.mark.parametrize(("dim", "named"), [(96, {"head_dim": 96}), (192, LATENT)])
def test_a_problem_names_the_length_of_values_only_beside_keys_of_192(dim: int, named: Any, monkeypatch: Any) -> None:
    noted: list[Any] = []
    own = sys.modules["minfer.functional.decode_attention"]
    monkeypatch.setattr(own.library, "call", lambda op, tensors, dtype, shape, params, **scalars: noted.append(shape))
    q, _, caches, table = paged([30, 9], 1, 4, 2, dim, 16)
    decode_attention(q, *caches, int32([30, 9]), page_table=table)
    assert noted == [{"batch": 2, "new": 1, "longest": 32, "heads": 4, "kv_heads": 2} | named]
