"""The plots of ops that are no GEMM: their metric, their axes, and what bounds them."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes

from minfer.analysis.data.prepare import choose_problems
from minfer.analysis.plots.every_op import Picture, keep_apart
from minfer.analysis.plots.series import over_tokens, representative, series, squares
from minfer.rows.problems import representative_problem
from minfer.rows.store import Row
from tests.pictures import drawn, panels, points, texts
from tests.tables import other, row

PEAKS = {"copy_gbps": 4000.0, "read_gbps": 4300.0, "fma_float32": 60.0, "wgmma_bfloat16_float32": 800.0}
KERNELS = {"torch": 100.0, "v01": 50.0}


def grid(op: str, metric: str, tokens: tuple[int, ...], hidden: tuple[int, ...], **values: Any) -> list[Row]:
    """Each kernel at all sizes; the bytes and the time grow with the number of elements, and the rate with the tokens."""
    return [
        other(op, metric, kernel, us * t * h / 4096, f"bfloat16/residual=add/tokens={t},hidden={h}")
        | {"bytes": 4.0 * t * h, "peaks": PEAKS, "cold_rate": 1000.0 * t / us, "steady_rate": 900.0 * t / us}
        | values
        for kernel, us in KERNELS.items()
        for t in tokens
        for h in hidden
    ]


def test_throughput_is_over_the_axis_with_most_sizes_beside_what_copying_reaches() -> None:
    made = grid("norm", "GB/s", (1, 16, 128), (2048, 4096))
    (ax,) = panels("throughput", *made)
    assert points(ax, "v01") == [(1, 20.0), (16, 320.0), (128, 2560.0)]
    assert ax.get_yscale() == "linear" and ax.get_ylabel() == "throughput, GB/s" and ax.get_xlabel() == "tokens"
    assert ax.get_title(loc="left") == "norm on NVIDIA H200: throughput over tokens"
    assert any(text.startswith("bfloat16 · residual=add · hidden=4096 · cold") for text in texts(ax))
    picture = drawn(*made)["throughput"]
    assert isinstance(picture, Picture) and picture.about.endswith(
        "of norm on NVIDIA H200 over tokens; at the largest, v01 is the fastest."
    )


def test_axes_that_are_equal_in_all_rows_are_one_size() -> None:
    made = [
        other("attention", "TFLOP/s", kernel, us * n, f"bfloat16/lse=no/batch=1,seq_q={n},seq_kv={n},heads=8")
        | {"flops": 1e9 * n, "cold_rate": 1000.0 * n / us, "peaks": PEAKS}
        for kernel, us in KERNELS.items()
        for n in (512, 1024, 2048)
    ]
    (ax,) = panels("throughput", *made)
    assert points(ax, "v01") == [(512, 10240.0), (1024, 20480.0), (2048, 40960.0)]
    assert ax.get_xlabel() == "sequence length"
    assert any(text.startswith("bfloat16 · lse=no · batch=1, heads=8 · cold") for text in texts(ax))


def both_ways(forward: tuple[int, ...], backward: tuple[int, ...]) -> list[Row]:
    """A kernel and PyTorch at some sequence lengths, forward and at half the rate backward."""
    return [
        other("rope", "GB/s", kernel, us * seq, f"float32/place=out{call}/batch=32,seq={seq}")
        | {"cold_rate": 1000.0 / us / (2 if call else 1), "bytes": 1e6 * seq, "peaks": PEAKS}
        for kernel, us in KERNELS.items()
        for call, lengths in (("", forward), (",call=backward", backward))
        for seq in lengths
    ]


def test_forward_and_backward_stand_below_each_other_with_their_points_as_csv() -> None:
    made = both_ways((32, 128, 2048), (32, 2048))
    above, below = panels("directions", *made)
    assert points(above, "v01") == [(32, 20.0), (128, 20.0), (2048, 20.0)]
    assert points(below, "v01") == [(32, 10.0), (2048, 10.0)]
    assert above.get_title(loc="left") == "rope on NVIDIA H200: forward"
    assert any(text.startswith("float32 · place=out · batch=32 · cold") for text in texts(below))
    picture = drawn(*made)["directions"]
    assert isinstance(picture, Picture)
    lines = picture.csv.splitlines()
    assert lines[0] == "direction,kernel,seq,cold_us,cold_GB/s,run" and len(lines) == 1 + 2 * 3 + 2 * 2
    assert lines[1].startswith("forward,torch,32,3200.000,10.0,") and lines[-1].startswith("backward,v01,2048,")


def test_an_op_without_a_backward_has_no_such_plot() -> None:
    assert "directions" not in drawn(*both_ways((32, 128), ()))


@pytest.mark.parametrize("lengths", [((32, 128), (32,)), ((), (32, 128))])
def test_without_both_directions_there_is_no_plot_of_them(lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    assert "a backward and its forward" in str(drawn(*both_ways(*lengths))["directions"])


def test_large_rates_have_ticks_with_a_prefix() -> None:
    (ax,) = panels("throughput", *grid("decode", "tokens/s", (1, 1000, 2_000_000), (4096,)))
    assert "_peak" not in [line.get_label() for line in ax.lines]
    assert ax.get_ylabel() == "throughput, tokens/s"
    ax.figure.canvas.draw()
    assert "40 M" in [tick.get_text() for tick in ax.get_yticklabels()]


def test_the_ladder_is_in_the_metric_at_the_most_bytes() -> None:
    made = grid("route", "tokens/s", (1, 16, 128), (8, 64), cold_percent_of_peak=12.5)
    (ax,) = panels("ladder", *made)
    assert {"2560", "tokens/s", "2304"} <= set(texts(ax))  # v01, cold and steady
    assert ax.get_xlabel() == "throughput, tokens/s" and any("tokens=128, hidden=64" in text for text in texts(ax))


def test_large_rates_have_a_prefix() -> None:
    (ax,) = panels("ladder", *grid("route", "tokens/s", (4096,), (8,), cold_rate=6.1794e9))
    assert "6.179 G" in texts(ax)


def test_an_op_that_memory_bounds_has_no_roofline() -> None:
    made = drawn(*grid("norm", "GB/s", (1, 16, 64), (8,), flops=1e3, cold_tflops=1.0, roof="copy_gbps"))
    assert str(made["roofline"]).endswith(
        "memory bounds all of its problems, and its throughput over size shows what memory allows"
    )


@pytest.mark.parametrize("flops", [0.0, None])
def test_an_op_without_flops_has_no_roofline(flops: float | None) -> None:
    made = drawn(*grid("route", "tokens/s", (1, 16, 64), (8,), flops=flops))
    assert made.pop("roofline") == (
        "the roofline plot of route on NVIDIA H200 is left out: it does no floating-point operations"
    )
    assert all(isinstance(picture, Picture) for picture in made.values())


def rooflines(*made: Row) -> list[Axes]:
    """The panels of a roofline, which is not made a file: that takes most of the time."""
    picture = drawn(*made)["roofline"]
    assert isinstance(picture, Picture), picture
    return picture.figure.axes


def roofs(*made: Row) -> dict[str, float]:
    (ax,) = rooflines(*made)
    return {
        str(line.get_label())[1:]: float(line.get_ydata()[0])
        for line in ax.lines
        if str(line.get_label()).startswith("_") and len(set(line.get_ydata())) == 1 and line.get_linestyle() == "-"
    }


def products(params: str, roof: str | None, most: float = 1000.0, **values: Any) -> list[Row]:
    """Rows of products with one byte each and 1, 10 and `most` times 10^3 FLOPs, by two kernels."""
    made = [
        other("product", "TFLOP/s", kernel, us, f"bfloat16/{params}/n={n}")
        | {"flops": 1e6 * n, "bytes": 1e6, "cold_tflops": n / us, "peaks": FLAT, "roof": roof, "dtype": "bfloat16"}
        | {"cold_percent_of_peak": 1.0}
        | values
        for kernel, us in KERNELS.items()
        for n in (1, 10, int(most))
    ]
    return made


FLAT = PEAKS | {"mma_bfloat16_float32": 640.0, "wgmma_bfloat16_float16": 860.0, "wgmma_float8_e4m3fn_float32": 1600.0}
FLAT |= {"wgmma_bfloat16_float32_mhz": 1500.0, "max_sm_mhz": 1980.0}


def flat(*made: Row) -> list[dict[str, float]]:
    """The flat roofs of each panel."""
    return [
        {
            str(line.get_label())[1:]: float(line.get_ydata()[0])
            for line in ax.lines
            if str(line.get_label()).startswith("_")
        }
        for ax in rooflines(*made)
    ]


def test_the_roofs_are_those_of_the_products_that_the_rows_name() -> None:
    """Of all classes of instructions with these inputs and sums; not of other sums, nor of CUDA cores."""
    assert flat(*products("", "wgmma_bfloat16_float32")) == [{"wgmma": 800.0, "mma": 640.0}]
    assert flat(*products("", "wgmma_bfloat16_float16")) == [{"wgmma": 860.0}]
    assert flat(*products("", "wgmma_float8_e4m3fn_float32")) == [{"wgmma": 1600.0}]
    assert flat(*products("", "fma_float32")) == [{"CUDA cores": 60.0}]
    (ax,) = panels("roofline", *products("", "wgmma_bfloat16_float32"))
    assert {"wgmma 800.0", "mma 640.0"} <= set(texts(ax))


def test_each_kind_of_products_has_a_panel() -> None:
    sums = products("accumulate=float32", "wgmma_bfloat16_float32"), products("accumulate=fast", "fma_float32")
    assert flat(*sums[0], *sums[1]) == [{"CUDA cores": 60.0}, {"wgmma": 800.0, "mma": 640.0}]
    above, below = panels("roofline", *sums[0], *sums[1])
    assert texts(above)[0].startswith("bfloat16 · accumulate=fast · cold")
    assert texts(below)[0].startswith("bfloat16 · accumulate=float32 · cold")


def test_what_memory_bounds_stands_beside_its_dtype_but_not_beyond_the_reach_of_its_products() -> None:
    """fp8 products of bf16 rows, of whose peak nothing is known, are under no roof of bf16."""
    named = products("format=none", "wgmma_bfloat16_float32")
    assert flat(*named, *products("format=few", "copy_gbps", most=100)) == [{"wgmma": 800.0, "mma": 640.0}]
    both = [*named, *products("format=fp8", "copy_gbps")]
    assert flat(*both) == [{}, {"wgmma": 800.0, "mma": 640.0}]
    said = [" ".join(texts(ax)) for ax in panels("roofline", *both)]
    assert ["is not measured" in " ".join(text.split()) for text in said] == [True, False]


def test_a_roofline_takes_two_kernels_at_three_intensities() -> None:
    made = products("", "wgmma_bfloat16_float32")
    for few in (made[:3], [each for each in made if each["shape"]["n"] > 1]):
        assert "at least 3 different intensities" in str(drawn(*few)["roofline"])


def test_old_and_new_rows_of_one_metric_are_drawn_together_and_others_left_out() -> None:
    shape = dict.fromkeys("mnk", 64)
    old, new = row("torch", 100.0, shape=shape), row("v01", 50.0, shape=shape, metric="TFLOP/s", cold_rate=20.0)
    assert "20.00" in texts(panels("ladder", old, new)[0])
    assert "10.00" in texts(panels("ladder", old, new)[0])
    mixed = [old, new, row("v02", 10.0, shape=shape, metric="GB/s", cold_rate=5.0, finished=None)]
    assert not any("GB/s" in text for text in texts(panels("ladder", *mixed)[0]))


def sized(**shape: int) -> Row:
    problem = f"float32//{','.join(f'{axis}={size}' for axis, size in shape.items())}"
    return {"shape": shape, "problem": problem, "flops": None, "bytes": float(sum(shape.values()))}


def test_squares_are_a_series_but_the_diagonal_of_a_grid_is_none() -> None:
    gemm = [sized(m=n, n=n, k=n) for n in (512, 1024, 4096)]
    skinny = [sized(m=m, n=4096, k=4096) for m in (1, 2, 4, 8, 1024, 4096)]
    assert [row["shape"]["m"] for row in squares([*gemm, *skinny])] == [512, 1024, 4096, 4096]
    found = series([*gemm, *skinny])
    assert found and found.square and found.label == "m = n = k" and found.sizes == [512, 1024, 4096]
    tokens = [sized(tokens=t, hidden=h) for t in (1, 1024, 4096) for h in (1024, 4096)]
    assert squares(tokens) == [] == squares([sized(n=1), sized(n=2)])
    found = series(tokens)
    assert found and (found.label, found.fixed, found.sizes) == ("tokens", "hidden=4096", [1, 1024, 4096])


def test_axes_of_one_name_that_are_equal_in_some_rows_are_one_size_there() -> None:
    prompts = [sized(batch=1, seq_q=n, seq_kv=n, heads=32) for n in (2048, 8192, 16384)]
    chunk, many = sized(batch=1, seq_q=2048, seq_kv=16384, heads=32), sized(batch=4, seq_q=2048, seq_kv=2048, heads=32)
    found = series([*prompts, chunk, many])
    assert found and (found.label, found.fixed, found.sizes) == (
        "sequence length",
        "batch=1, heads=32",
        [2048, 8192, 16384],
    )
    assert all(row["shape"]["seq_q"] == row["shape"]["seq_kv"] for row in found.rows)


@pytest.mark.parametrize("turn", [1, -1])
def test_an_axis_that_some_rows_leave_out_makes_a_line_of_its_own(turn: int) -> None:
    rows = [sized(tokens=t, dim=96) for t in (1, 2, 4)] + [sized(tokens=t, dim=192, of_v=128) for t in (1, 2)]
    found = series(rows[::turn])
    assert found and (found.label, found.fixed, found.sizes) == ("tokens", "dim=96", [1, 2, 4])


def test_of_lines_with_as_many_sizes_that_with_more_rows_is_shown() -> None:
    small = [sized(tokens=t, hidden=64) for t in (1, 2)]
    found = series([*small, *small, sized(tokens=1, hidden=4096), sized(tokens=2, hidden=4096)])
    assert found and found.fixed == "hidden=64"
    assert series([sized(tokens=1, hidden=2)]) is None and series([{**sized(), "shape": None}]) is None


def test_a_size_of_the_model_is_an_axis_only_where_no_other_has_three_sizes() -> None:
    heads = [sized(batch=64, longest=4096, heads=h) for h in (16, 32, 64, 128)]
    found = series([*heads, sized(batch=64, longest=8192, heads=16)])
    assert found and found.label == "heads"
    found = series([*heads, *(sized(batch=64, longest=n, heads=16) for n in (8192, 16384))])
    assert found and (found.label, found.fixed) == ("sequence length", "batch=64, heads=16")


def test_where_bytes_are_in_proportion_to_tokens_these_are_the_axis() -> None:
    def append(batch: int, new: int, longest: int) -> Row:
        return sized(batch=batch, longest=longest, new=new, heads=8) | {"bytes": 8200.0 * batch * new}

    made = [append(1, 1, 512), append(64, 1, 512), append(8, 2048, 2048)]
    found = over_tokens(made)
    assert found and (found.label, found.fixed, found.sizes) == ("tokens", "heads=8", [1, 64, 16384])
    assert over_tokens([*made, made[0] | {"bytes": 9000.0}]) is None
    assert over_tokens([*made, append(1, 64, 512)]) is None  # one size, two problems
    assert over_tokens([append(1, 1, 512), append(2, 1, 512)]) is None  # the batch alone
    assert over_tokens([sized(tokens=1)]) is None


@given(st.lists(st.integers(1, 2**40), min_size=2, max_size=60, unique=True).map(sorted))
def test_labels_of_sizes_are_apart(sizes: list[int]) -> None:
    kept = keep_apart(sizes)
    assert kept[-1] == sizes[-1] and set(kept) <= set(sizes)
    assert all(b / a >= (sizes[-1] / sizes[0]) ** 0.05 for a, b in itertools.pairwise(kept))


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        ({"m=64,n=64": 5.0, "m=128,n=128": 6.0, "m=512,n=64": 9.0}, "m=128,n=128"),  # a square goes first
        ({"m=64,n=64": 5.0, "m=128,n=128": 6.0, "m=512,n=64": 90.0}, "m=512,n=64"),  # but not before ten times its work
        ({"m=128,n=128": 6.0, "m=512,n=64": 9.0}, "m=512,n=64"),  # one square is no series
        ({"m=512,n=64": 9.0, "m=64,n=512": 9.0}, "m=64,n=512"),
    ],
)
def test_one_problem_represents_all_in_tables_and_plots(work: dict[str, float], expected: str) -> None:
    names = {f"float16//{shape}": flops for shape, flops in work.items()}
    groups = [{"problem": name, "measured": 2, "flops": flops, "bytes": 1.0} for name, flops in names.items()]
    few = {"problem": "float16//m=4096,n=1", "measured": 1, "flops": 1e9, "bytes": 1.0}
    assert representative_problem([*groups, few]) == f"float16//{expected}"
    cases = [{"problem": name, "status": "ok", "flops": flops, "bytes": 1.0} for name, flops in names.items()] * 2
    assert choose_problems(pa.Table.from_pylist(cases))[1] == f"float16//{expected}"
    rows = [case | {"shape": {"m": 1, "n": 2}} for case in cases]
    assert {row["problem"] for row in representative(rows)} == {f"float16//{expected}"}
