"""Values of several structures, on which the judge verifies submissions: kernels that are right only on normal values fail."""

from __future__ import annotations

import pytest
import torch

from minfer import build, ops
from minfer.bench.operands import CLUSTERED, COLUMNS, STRUCTURES, TAILED
from minfer.bench.verify import Function, Inputs, WrongResult, verify
from minfer.ops import Case, Kernel, Op
from tests.honest import ANY, CPU

pytestmark = pytest.mark.usefixtures("one_thread")

SOFTMAX, ROUTE, DECODE = (ops.get(name) for name in ("softmax", "moe_route", "decode_attention"))
DECODING = {"batch": 3, "new": 1, "longest": 200, "heads": 4, "kv_heads": 2, "head_dim": 64}
PAGES = DECODE.case("any", "float16", DECODING, {"page": "16", "lengths": "full", "quant": "none"})
ROWS = SOFTMAX.case("any", "bfloat16", {"rows": 64, "n": 1000}, {"mask": "none"})
TOKENS = ROUTE.case("any", "float32", {"tokens": 64, "experts": 128, "k": 8})
KINDS = ("normal", *STRUCTURES)
Tensor = torch.Tensor


def check(op: Op, case: Case, function: Function, structures: tuple[str, ...]) -> None:
    verify(op, case, Kernel(op.name, "any", "torch", ANY.source), function, CPU, None, 1, structures=structures)


def overflows(y: Tensor, x: Tensor, mask: Tensor) -> None:
    """Subtracts no maximum. Normal values are too small to show it."""
    z = x.float() + (mask.float() if mask.numel() and mask.is_floating_point() else 0.0)
    exponentials = z.exp()
    if mask.dtype == torch.int32:
        exponentials = exponentials.masked_fill(torch.arange(x.shape[1]) >= mask[:, None], 0.0)
    y.copy_(exponentials / exponentials.sum(1, keepdim=True))


def test_a_softmax_that_subtracts_no_maximum_is_wrong_on_long_tails() -> None:
    check(SOFTMAX, ROWS, overflows, ())
    with pytest.raises(WrongResult, match=f"NaN.*{TAILED} inputs"):
        check(SOFTMAX, ROWS, overflows, (TAILED,))


def test_a_router_with_room_for_even_routing_is_wrong_where_all_tokens_choose_the_same_experts() -> None:
    right = build.function(ROUTE.kernels["torch"], "")

    def drops(*tensors: Tensor, normalize: bool) -> None:
        """Gives each expert room for four times the mean number of tokens, and for eight more."""
        right(*tensors, normalize=normalize)
        indices, counts = tensors[1], tensors[2]
        counts.clamp_(max=8 + 4 * indices.numel() // len(counts))

    check(ROUTE, TOKENS, drops, ())
    with pytest.raises(WrongResult, match=f"output counts.*{CLUSTERED} inputs"):
        check(ROUTE, TOKENS, drops, STRUCTURES)


def test_a_kernel_that_gives_a_page_to_one_sequence_is_wrong_where_sequences_share_pages() -> None:
    right = build.function(DECODE.kernels["torch_eager"], "")

    def owns(out: Tensor, q: Tensor, lengths: Tensor, table: Tensor, k: Tensor, v: Tensor, scales: Tensor) -> None:
        """Reads a page only for the last sequence that names it."""
        if not table.numel():
            right(out, q, lengths, table, k, v, scales)
            return
        used = [table[row, : -(-int(count) // k.shape[1])].long() for row, count in enumerate(lengths)]
        owner = torch.full((len(k),), -1)
        for row, pages in enumerate(used):
            owner[pages] = row
        for row in range(len(used)):
            others = (owner != row)[:, None, None, None]
            result = torch.empty_like(out)
            right(result, q, lengths, table, k.masked_fill(others, 0), v.masked_fill(others, 0), scales)
            out[row] = result[row]

    check(DECODE, PAGES, owns, (TAILED,))
    with pytest.raises(WrongResult, match=f"{CLUSTERED} inputs"):
        check(DECODE, PAGES, owns, STRUCTURES)


@pytest.mark.parametrize(
    ("case", "kernel"), [(ROWS, "torch"), (TOKENS, "torch"), (PAGES, "torch_eager")], ids=["softmax", "route", "decode"]
)
def test_right_kernels_are_right_on_all_of_them(case: Case, kernel: str) -> None:
    op = ops.get(case.op)
    check(op, case, build.function(op.kernels[kernel], ""), STRUCTURES)


def test_what_the_structures_are() -> None:
    long, short = (SOFTMAX.case("any", "float32", {"rows": 40, "n": n}, {"mask": "none"}) for n in (1000, 6))
    normal, tailed, clustered = (Inputs(long, kind, 3).operands(SOFTMAX, CPU).tensors["x"] for kind in KINDS)
    outliers = tailed / normal
    assert set(outliers.unique().tolist()) == {1.0, 16.0}
    assert all(
        (piece.sum(1) == 1).all() for piece in (outliers == 16).split(64, 1)
    )  # one in each 64, also in the last piece, which is shorter
    columns = (clustered.std(0) / normal.std(0) > 4).nonzero().flatten()
    assert columns.tolist() == [*range(int(columns[0]), int(columns[0]) + COLUMNS)]
    for kind in STRUCTURES:  # a row that is shorter than a cluster
        assert Inputs(short, kind, 3).operands(SOFTMAX, CPU).tensors["x"].isfinite().all()
