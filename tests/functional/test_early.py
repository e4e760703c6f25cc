"""`minfer.functional.early` with packed weights: what the functions of the same names compute, and within a graph, too."""

from __future__ import annotations

import pytest
import torch

from minfer.functional import early, library
from minfer.functional.quantised import quant_gemm
from minfer.functional.silu_mul import silu_mul
from minfer.ops import get
from minfer.ops.quantised import dequantised

Packed = tuple[torch.Tensor, torch.Tensor]
SHAPES = [(1, 6144, 4096), (16, 4096, 4096), (3, 4096, 14336), (8, 2048, 2048), (5, 1042, 1536)]


def packed(n: int, k: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Packed:
    """Weights in int4_g128, and their scales."""
    w = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    return w, (torch.rand(n, k // 128, device=device) * 0.02 + 0.01).to(dtype)


def unpacked(w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> torch.Tensor:
    """The weights in fp64; without zeros, 8 is zero."""
    zeros = torch.full_like(scales, 8.0) if zeros is None else zeros
    return dequantised("int4_g128", w.view(len(w), -1, 64), scales, zeros, torch.float64)


def check(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor) -> None:
    """y is x times the weights; an error is at most a few roundings of a weight and of y."""
    weight = unpacked(w, scales)
    wanted, apart = x.double() @ weight.t(), 6 * 2.0**-8 * (x.double().square() @ weight.t().square()).sqrt()
    assert ((y.double() - wanted).abs() <= apart + 2.0**-8 * wanted.abs()).all()


@pytest.mark.parametrize("eights", (True, False))
def test_without_a_kernel_the_other_functions_are_called(eights: bool) -> None:
    torch.manual_seed(0)
    x, (w, scales) = torch.randn(3, 256).bfloat16(), packed(32, 256, "cpu")
    given = torch.full_like(scales, 8.0) if eights else None
    y = early.quant_gemm(x, w, "int4_g128", scales, given)
    assert torch.equal(y, quant_gemm(x, w, "int4_g128", scales))
    assert torch.equal(early.quant_swiglu(x, w, "int4_g128", scales, given), silu_mul(*y.chunk(2, -1)))


def test_each_kernel_is_the_only_one_of_its_op() -> None:
    for op in ("hgemm", "gated_unit", "quant_gemm", "add_rmsnorm", "decode_attention"):
        assert sum(kernel.early for kernel in get(op).kernels.values()) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_products_of_packed_weights(
    m: int, n: int, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "any_quant_gemm", None)  # the kernel is called
    torch.manual_seed(0)
    x, (w, scales) = torch.randn(m, k, device="cuda", dtype=dtype), packed(n, k, "cuda", dtype)
    check(early.quant_gemm(x, w, "int4_g128", scales), x, w, scales)
    gate, up = (x.double() @ unpacked(w, scales).t()).chunk(2, -1)
    wanted = gate * gate.sigmoid() * up
    found = early.quant_swiglu(x, w, "int4_g128", scales)
    assert found.shape == wanted.shape and (found.double() - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.gpu
def test_zeros_of_packed_weights_are_read() -> None:
    torch.manual_seed(0)
    x, (w, scales) = torch.randn(4, 4096, device="cuda").bfloat16(), packed(2048, 4096, "cuda")
    zeros = torch.randint(0, 16, scales.shape, device="cuda").bfloat16()
    (kernel,) = (each for each in get("quant_gemm").kernels.values() if each.early)
    y = x.new_empty(4, 2048)
    library.registered(kernel, x.device, "constant")(y, x, w.view(2048, -1, 64), scales, zeros)
    wanted = x.double() @ unpacked(w, scales, zeros).t()
    assert (y.double() - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("m", (1, 16))
def test_launches_that_overlap_give_the_same_bits(m: int) -> None:
    """A chain in which each product reads what the one before has just written, replayed many times."""
    torch.manual_seed(0)
    layers = [(packed(4096, 4096, "cuda"), packed(8192, 4096, "cuda")) for _ in range(4)]
    x = torch.randn(m, 4096, device="cuda").bfloat16()

    def chain() -> list[torch.Tensor]:
        found = [x]
        for plain, gated in layers:
            h = early.quant_gemm(found[-1], plain[0], "int4_g128", plain[1])
            found.append(early.quant_swiglu(h, gated[0], "int4_g128", gated[1]))
        return found[1:]

    wanted = [each.clone() for each in chain()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = [chain() for _ in range(8)]
    for _ in range(20):
        for each in made:
            for y in each:
                y.zero_()
        graph.replay()
        assert all(torch.equal(y, right) for each in made for y, right in zip(each, wanted, strict=True))
