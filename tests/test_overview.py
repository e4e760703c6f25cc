"""Tables over the shapes of a set."""

from __future__ import annotations

import datetime as dt

from analysis.overview import SETS, shape_sets
from minfer.rows import store
from tests.tables import NOON, TN, Workspace, row


def squares(*sizes: int, kernels: dict[str, float]) -> list[store.Row]:
    """Rows of kernels that take so much of 100 µs at each size."""
    shapes = [f"float16/{TN}/m={size},n={size},k={size}" for size in sizes]
    return [row(kernel, 100.0 * part, shape) for shape in shapes for kernel, part in kernels.items()]


def test_a_set_of_few_shapes_is_a_line_a_kernel(work: Workspace) -> None:
    work.write(*squares(512, 4096, kernels={"torch": 1, "v02": 2, "v10": 0.8}), *squares(2048, kernels={"torch": 1}))
    assert work.run() == 0
    assert "**squares · float16 · layout=TN, accumulate=float32 · cold, TFLOP/s**" in work.readme.read_text()
    assert work.tables()[-1] == [
        ["Kernel", "512", "2048", "4096", "Speed-up, geometric mean"],
        ["torch", "10.00", "**10.00**", "10.00", "1.00×"],
        ["v02", "5.000", "—", "5.000", "—"],  # not of every shape: a mean of the others would flatter somebody
        ["v10", "**12.50**", "—", "**12.50**", "—"],
    ]
    assert "squares" in work.page()


def test_a_set_of_many_shapes_is_a_line_a_shape(work: Workspace) -> None:
    times = {"torch": 100.0, "v01": 500.0, "v15": 50.0, "v16": 80.0}
    shapes = [f"m={m},n={n},k={k}" for n, k in ((4096, 4096), (14336, 4096), (4096, 14336)) for m in (1, 16, 128)]
    rows = [row(name, us, f"float16/{TN}/{shape}") for shape in shapes for name, us in times.items()]
    slow = row("v15", 90.0, f"float16/{TN}/{shapes[0]}", finished=NOON + dt.timedelta(hours=1))
    work.write(*rows, slow)
    assert work.run() == 0
    table = work.tables()[-1]
    assert table[0] == ["M × N × K", "torch", "v15", "v16", "Speed-up of the fastest"]  # v01 never is
    assert table[1] == ["1 × 4096 × 4096", "100.0 µs", "90.00 µs", "**80.00 µs**", "1.25×"]
    assert table[2] == ["16 × 4096 × 4096", "100.0 µs", "**50.00 µs**", "80.00 µs", "2.00×"]
    assert len(table) == 1 + 9 + 1
    assert table[-1] == ["Speed-up, geometric mean", "1.00×", "1.87×", "1.25×", "1.90×"]


def test_a_baseline_that_wins_hides_nobody(work: Workspace) -> None:
    shapes = [f"float16/{TN}/m={m},n={n},k=4096" for n in (4096, 14336, 6144) for m in (1, 16, 128, 2048)]
    work.write(*(row(name, us, shape) for shape in shapes for name, us in {"torch": 100.0, "v01": 125.0}.items()))
    assert work.run() == 0
    assert work.tables()[-1][1] == ["1 × 4096 × 4096", "**100.0 µs**", "125.0 µs", "0.800×"]


def test_the_sets_are_those_that_can_be_asked_for() -> None:
    sets = shape_sets()
    assert sets["squares"][0] == "m=512,n=512,k=512" and "m=16,n=14336,k=4096" in sets["llama"]
    assert {file.stem for file in SETS.glob("*.yaml")} == sets.keys()
