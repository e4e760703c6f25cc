"""Tables over the shapes of a set."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from minfer.analysis.tables import overview
from minfer.analysis.tables.overview import shape_sets
from minfer.plan.config import groups
from minfer.rows import store
from tests.tables import NOON, TN, Workspace, other, row


def squares(*sizes: int, kernels: dict[str, float]) -> list[store.Row]:
    """Rows of kernels that take so much of 100 µs at each size."""
    shapes = [f"float16/{TN}/m={size},n={size},k={size}" for size in sizes]
    return [row(kernel, 100.0 * part, shape) for shape in shapes for kernel, part in kernels.items()]


def test_a_set_of_few_shapes_is_a_line_a_kernel(work: Workspace) -> None:
    work.write(*squares(512, 4096, kernels={"torch": 1, "v02": 2, "v10": 0.8}), *squares(2048, kernels={"torch": 1}))
    assert work.run() == 0
    assert "**squares · float16 · layout=TN, accumulate=float32 · cold, TFLOP/s**" in work.text()
    assert work.tables()[-1] == [
        ["Kernel", "512", "2048", "4096", "Speed-up over torch, geometric mean"],
        ["torch", "10.00", "**10.00**", "10.00", "1.00×"],
        ["v02", "5.000", "—", "5.000", "—"],  # not of every shape: a mean of the others would flatter somebody
        ["v10", "**12.50**", "—", "**12.50**", "—"],
    ]


def test_a_set_of_many_shapes_is_a_line_a_shape(work: Workspace) -> None:
    times = {"torch": 100.0, "v01": 500.0, "v15": 50.0, "v16": 80.0}
    shapes = [f"m={m},n={n},k={k}" for n, k in ((4096, 4096), (14336, 4096), (4096, 14336)) for m in (1, 16, 128)]
    rows = [row(name, us, f"float16/{TN}/{shape}") for shape in shapes for name, us in times.items()]
    slow = row("v15", 90.0, f"float16/{TN}/{shapes[0]}", finished=NOON + dt.timedelta(hours=1))
    work.write(*rows, slow)
    assert work.run() == 0
    table = work.tables()[-1]
    assert table[0] == ["M × N × K", "torch", "v15", "v16", "Speed-up over torch, fastest of ours"]  # v01 never is
    assert table[1] == ["1 × 4096 × 4096", "100.0 µs", "90.00 µs", "**80.00 µs**", "1.25×"]
    assert table[2] == ["16 × 4096 × 4096", "100.0 µs", "**50.00 µs**", "80.00 µs", "2.00×"]
    assert len(table) == 1 + 9 + 1
    assert table[-1] == ["Speed-up over torch, geometric mean", "1.00×", "1.87×", "1.25×", "1.90×"]


def test_a_baseline_that_wins_hides_nobody(work: Workspace) -> None:
    shapes = [f"float16/{TN}/m={m},n={n},k=4096" for n in (4096, 14336, 6144) for m in (1, 16, 128, 2048)]
    work.write(*(row(name, us, shape) for shape in shapes for name, us in {"torch": 100.0, "v01": 125.0}.items()))
    assert work.run() == 0
    assert work.tables()[-1][:2] == [
        ["M × N", "torch", "v01", "Speed-up over torch, fastest of ours"],
        ["1 × 4096", "**100.0 µs**", "125.0 µs", "0.800×"],
    ]
    assert "**llama · float16 · layout=TN, accumulate=float32 · k=4096 · cold, time**" in work.text()


def test_the_sets_are_those_that_can_be_asked_for_of_that_op() -> None:
    sets = shape_sets("hgemm")
    assert sets["squares"][0] == {"m=512", "n=512", "k=512"} and {"m=16", "n=14336", "k=4096"} in sets["llama"]
    assert set(groups()["shape"]) >= sets.keys() and not shape_sets("another")


def with_sets(folder: Path, monkeypatch: pytest.MonkeyPatch, **sets: str) -> None:
    """Puts these in the place of conf/shape and of the ops' own sets."""
    for name, text in sets.items():
        (folder / f"{name}.yaml").write_text(f"name: {name}\n{text}")
    monkeypatch.setattr(overview.shape_sets, "__defaults__", (folder, folder))


def test_shapes_of_one_varying_axis_are_called_by_it(
    work: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_sets(tmp_path, monkeypatch, rows="op: norm\ngpu:\n  - {hidden: 4096, tokens: [1, 16, 128]}\n")
    shapes = [f"bfloat16/residual=add/tokens={tokens},hidden=4096" for tokens in (1, 16, 128)]
    work.write(*(other("norm", "GB/s", name, us, s) for s in shapes for name, us in {"torch": 100, "v01": 50}.items()))
    assert work.run() == 0
    assert "**rows · bfloat16 · residual=add · hidden=4096 · cold, GB/s**" in work.text()
    assert work.tables()[-1] == [
        ["Kernel / tokens", "1", "16", "128", "Speed-up over torch, geometric mean"],
        ["torch", "10000", "10000", "10000", "1.00×"],
        ["v01", "**20000**", "**20000**", "**20000**", "2.00×"],
    ]


@pytest.mark.parametrize("shapes", [("dim=96", "dim=192,of_v=128"), ("dim=192,of_v=128", "dim=96")])
def test_an_axis_that_some_shapes_leave_out_varies(shapes: tuple[str, ...]) -> None:
    axes = overview.Axes.of([f"heads=4,{shape}" for shape in shapes])
    assert (axes.names, axes.constant) == (["dim", "of_v"], "heads=4")
    assert sorted(axes.labels.values()) == ["192 × 128", "96 × –"]


def test_many_shapes_of_several_axes_are_called_by_those_that_vary(
    work: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = "op: attend\ngpu:\n  - {batch: [1, 8, 64], length: [128, 1024, 8192], heads: 32, head_dim: 128}\n"
    with_sets(tmp_path, monkeypatch, decode=sizes, mine=sizes.replace("attend", "hgemm"))
    shapes = [f"batch={b},length={n},heads=32,head_dim=128" for b in (1, 8, 64) for n in (128, 1024, 8192)]
    work.write(*(other("attend", "GB/s", name, 9.0, f"float16//{s}") for s in shapes for name in ("torch", "v01")))
    assert work.run() == 0
    text = work.text()
    assert "**decode · float16 · heads=32, head_dim=128 · cold, time**" in text and "mine" not in text
    assert work.tables()[-1][0][0] == "batch × length" and work.tables()[-1][2][0] == "1 × 1024"


def test_many_square_shapes_have_a_line_a_size(
    work: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [2**i for i in range(9)]
    with_sets(
        tmp_path, monkeypatch, many="op: hgemm\ngpu:\n" + "".join(f"  - {{m: {n}, n: {n}, k: {n}}}\n" for n in sizes)
    )
    work.write(*squares(*sizes, kernels={"torch": 1, "v02": 2}))
    assert work.run() == 0
    assert [line[0] for line in work.tables()[-1]] == ["Size", *map(str, sizes), "Speed-up over torch, geometric mean"]
