"""The plots from real parquet: what is drawn, where, what is left out, and that the same rows give the same bytes."""

from __future__ import annotations

import datetime as dt
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Annotation

from minfer.analysis import make
from minfer.analysis.makers import plots as make_plots
from minfer.analysis.plots import style
from minfer.analysis.plots.devices import devices
from minfer.analysis.plots.every_op import Picture
from minfer.rows import store
from tests.conftest import ROOT
from tests.pictures import drawn, panels, points, texts

H200 = "NVIDIA H200"
MARKERS = "<!-- plots:begin -->\n<!-- plots:end -->\n"
NOON = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
PEAKS = {"copy_gbps": 4000.0, "read_gbps": 4300.0, "wgmma_float16_float32": 800.0, "mma_float16_float32": 600.0}
KERNELS = {"torch": 700.0, "v01_naive": 0.5, "v02_tiled": 6.0}
LADDER = [f"v{i:02d}_step" for i in range(1, 21)]


def row(kernel: str = "torch", tflops: float = 700.0, m: int = 512, **values: Any) -> store.Row:
    """A row of a square fp16 problem on an H200, with all that a plot can use."""
    shape, params = values.pop("shape", {"m": m, "n": m, "k": m}), {"layout": "TN", "accumulate": "float32"}
    op, dtype = values.get("op", "hgemm"), values.get("dtype", "float16")
    names = "/".join(",".join(f"{k}={v}" for k, v in part.items()) for part in (params, shape))
    flops = 2.0 * shape["m"] * shape["n"] * shape["k"]
    us = flops / tflops / 1e6
    made: store.Row = {
        "run": "r1",
        "finished": NOON,
        "case": f"{op}/{kernel}/{dtype}/{names}",
        "op": op,
        "baseline": "torch",
    }
    made |= {"kernel": kernel, "dtype": dtype, "params": params, "shape": shape, "status": "ok", "device": H200}
    made |= {"device_kind": "cuda", "flops": flops, "bytes": 6.0 * m * m, "peaks": PEAKS, "sm_mhz": 1500.0}
    made |= {"cold_us": us, "cold_p10_us": us * 0.9, "cold_p90_us": us * 1.2, "cold_tflops": tflops}
    made |= {"steady_us": us * 1.1, "steady_tflops": tflops / 1.1, "cold_percent_of_peak": tflops / 8}
    return made | values


def rows(kernels: dict[str, float] = KERNELS, **values: Any) -> list[store.Row]:
    """Each kernel at three sizes, at the smaller ones at half its rate."""
    sizes = ((512, 0.5), (1024, 0.5), (4096, 1.0))
    return [row(k, t * share, m, **values) for k, t in kernels.items() for m, share in sizes]


class Workspace:
    """A results folder, a README and a folder of plots in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.results, self.readme, self.plots = folder / "results", folder / "README.md", folder / "docs" / "plots"
        self.results.mkdir()
        self.readme.write_text(MARKERS)

    def write(self, *made: store.Row) -> None:
        store.write(store.to_table(made), self.results / "a.parquet")

    def run(self, *arguments: object) -> int:
        where = ["--results", self.results, "--readme", self.readme, "--plots", self.plots]
        return make.main(["plots", *(str(argument) for argument in [*where, *arguments])])

    def files(self) -> dict[str, bytes]:
        return {f.relative_to(self.plots).as_posix(): f.read_bytes() for f in self.plots.rglob("*") if f.is_file()}


@pytest.fixture
def work(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def test_every_plot_of_every_op_and_device_has_its_files(work: Workspace) -> None:
    work.write(*rows(), *rows(device="AMD EPYC 9654", device_kind="cpu", op="Other Op"))
    assert work.run() == 0
    ops = ("nvidia-h200/hgemm", "amd-epyc-9654/other-op")
    expected = {f"{op}-{name}.svg" for op in ops for name in make_plots.PLOTS}
    files = work.files()
    galleries = {f"{device}/README.md" for device in ("nvidia-h200", "amd-epyc-9654")}
    assert set(files) == expected | galleries
    for name, content in files.items():
        if name not in galleries:
            ET.fromstring(content)
    readme, gallery = work.readme.read_text(), work.plots / "nvidia-h200" / "README.md"
    ((about, link),) = re.findall(r"!\[(.+)\]\((.+)\)", readme)
    assert about.endswith("m=n=k=4096: v02_tiled reaches 0.857 % cold and 0.857 % steady of PyTorch's throughput.")
    assert link == "docs/plots/nvidia-h200/hgemm-ladder.svg"
    assert len(re.findall(r"!\[.+[.]\]", gallery.read_text())) == len(make_plots.PLOTS)
    for file in (work.readme, gallery):
        links = re.findall(r"!\[.+\]\((.+)\)", file.read_text())
        assert links and all((file.parent / link).is_file() for link in links)
    assert "[NVIDIA H200](docs/plots/nvidia-h200/README.md)" in readme


H100 = "NVIDIA H100 80GB HBM3"


def test_several_gpus_stand_in_one_plot_and_the_one_with_most_rows_comes_first(
    work: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_plots, "PLOTS", {"ladder": make_plots.PLOTS["ladder"]})
    few = {"torch": 600.0, "v02_tiled": 5.0}
    work.write(*rows(), *rows(op="rope"), *rows(few, device=H100))
    assert work.run() == 0
    both = {file for file in work.files() if "-devices" in file}
    assert both == {"nvidia-h200/hgemm-devices.svg"}
    readme = work.readme.read_text()
    assert "](docs/plots/nvidia-h200/hgemm-ladder.svg)" in readme
    assert readme.index("nvidia-h200/README.md") < readme.index("nvidia-h100-80gb-hbm3/README.md")
    assert "Several GPUs in one plot: [hgemm](docs/plots/nvidia-h200/hgemm-devices.svg)." in readme
    assert "hgemm-devices.svg" in (work.plots / "nvidia-h200" / "README.md").read_text()
    assert work.run("--check") == 0
    work.write(*rows())
    assert work.run() == 0 and not any("-devices" in file for file in work.files())


def test_the_plot_of_several_gpus_has_our_fastest_and_pytorch_of_each_at_common_sizes() -> None:
    only_here = [row(kernel, 9.0, 8192) for kernel in KERNELS]
    made = {H200: [*rows(), *only_here], H100: rows({"torch": 600.0, "v02_tiled": 5.0}, device=H100)}
    empty = dict.fromkeys(store.SCHEMA.names)
    named = {
        device: [
            empty | each | {"problem": each["case"].split("/", 2)[2], "cold_rate": each["cold_tflops"]} for each in of
        ]
        for device, of in made.items()
    }
    (ax,) = devices("hgemm", named).figure.axes
    shown = {line.get_label(): [tuple(point) for point in line.get_xydata()] for line in ax.lines}
    assert shown == {
        "H200, ours": [(512, 3.0), (1024, 3.0), (4096, 6.0)],
        "H200, torch": [(512, 350.0), (1024, 350.0), (4096, 700.0)],
        "H100 80GB HBM3, ours": [(512, 2.5), (1024, 2.5), (4096, 5.0)],
        "H100 80GB HBM3, torch": [(512, 300.0), (1024, 300.0), (4096, 600.0)],
    }


@pytest.mark.slow
def test_same_rows_same_bytes_in_another_process_and_order(work: Workspace) -> None:
    work.write(*rows())
    assert work.run() == 0
    before = work.files()
    work.write(*rows()[::-1])
    script = str(ROOT / "analysis" / "make.py")
    where = ["plots", "--results", str(work.results), "--readme", str(work.readme), "--plots", str(work.plots)]
    (work.results / "matplotlibrc").write_text("lines.linewidth: 7\nsvg.fonttype: none\n")
    code = f"import runpy, sys; sys.argv = {[script, *where]!r}\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "except SystemExit as end: assert end.code == 0, end.code\n"
    code += "assert 'torch' not in sys.modules"
    for file in work.plots.rglob("*.*"):
        file.unlink()
    subprocess.run([sys.executable, "-c", code], cwd=work.results, check=True, timeout=120)
    assert work.files() == before


def test_check_notices_a_changed_row_a_lost_file_and_a_stale_one(
    work: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_plots, "PLOTS", {name: make_plots.PLOTS[name] for name in ("ladder", "roofline")})
    work.write(*rows())
    assert work.run("--check") == 1
    assert not work.plots.exists() and work.readme.read_text() == MARKERS
    assert work.run() == 0
    assert work.run("--check") == 0
    capsys.readouterr()
    work.write(*rows(KERNELS | {"v01_naive": 0.501}))
    assert work.run("--check") == 1
    complaints = capsys.readouterr().err
    assert all(f"hgemm-{name}.svg is out of date" in complaints for name in make_plots.PLOTS)

    work.write(*rows())
    (work.plots / "nvidia-h200" / "hgemm-ladder.svg").unlink()
    assert work.run("--check") == 1
    assert "hgemm-ladder.svg is out of date" in capsys.readouterr().err
    assert work.run() == 0
    work.write(*rows(peaks=None))
    assert work.run("--check") == 1
    assert "hgemm-roofline.svg is out of date" in capsys.readouterr().err
    kept = work.plots / "nvidia-h200" / "notes.svg"
    kept.write_text("mine")
    assert work.run() == 0
    assert "nvidia-h200/hgemm-roofline.svg" not in work.files() and kept.read_text() == "mine"
    assert "roofline" not in (work.plots / "nvidia-h200" / "README.md").read_text() and work.run("--check") == 0


def test_throughput_has_each_rows_value_under_what_the_peaks_allow() -> None:
    (ax,) = panels("throughput", *rows())
    for kernel, tflops in KERNELS.items():
        assert points(ax, kernel) == [(512, tflops / 2), (1024, tflops / 2), (4096, tflops)]
    reading = 4300.0 * (2 * 512 / 6) / 1e3  # the bytes of the smallest; the rows do not say what is written
    assert points(ax, "_peak") == [(512, pytest.approx(reading)), *((m, pytest.approx(800.0)) for m in (1024, 4096))]
    assert ax.get_title(loc="left") == f"hgemm on {H200}: throughput over size"
    assert any(text.startswith("float16 · layout=TN, accumulate=float32 · cold") for text in texts(ax))
    low, high = ax.get_ylim()
    assert low == 0 and all(low <= tick for tick in ax.get_yticks()) and high > 800


def test_a_line_is_broken_at_a_size_that_was_not_measured() -> None:
    """A line drawn through 1024, where nothing was measured, once showed a library faster than any of its rows."""
    (ax,) = panels(
        "throughput", *(each for each in rows() if (each["kernel"], each["shape"]["m"]) != ("v02_tiled", 1024))
    )
    (small, missing, large) = points(ax, "v02_tiled")
    assert small[0] == 512 and math.isnan(missing[1]) and large[0] == 4096
    assert all(rate > 0 for _, rate in points(ax, "torch"))


def test_the_panel_is_of_the_dtype_with_most_rows_and_few_lines_have_a_colour() -> None:
    """Coloured are the fastest at the largest size and at the others, then the largest steps; the rest is grey."""
    kernels = {kernel: 10.0 * i for i, kernel in enumerate(LADDER, 1)} | {"torch": 150.0}
    kernels["v07_step"] = 170.0  # a large step
    small = [row("v03_step", 500.0, 512, dtype="bfloat16", finished=NOON + dt.timedelta(days=1), backend="cuda")]
    made = [*rows(dtype="float16"), *rows(kernels, dtype="bfloat16", baseline="torch", backend="cuda"), *small]
    (ax,) = panels("throughput", *made)
    assert len([line for line in ax.lines if len(line.get_xdata()) == 3 and line.get_label() != "_peak"]) == 21
    grey = style.LIGHT.others
    named = {line.get_label() for line in ax.lines if line.get_color() != grey and not line.get_label().startswith("_")}
    assert named == {"torch", "v20_step", "v03_step", "v07_step", "v02_step"}
    assert named <= set(texts(ax)) and "grey: 16 other kernels" in texts(ax)


def test_the_library_to_beat_has_a_name() -> None:
    """It is the fastest by the ratio to PyTorch, as in the tables, at the second largest size. It was not timed at the largest.
    Another library has the higher rate, because the card's clock was higher."""
    kernels = {f"v0{i}_step": 20.0 * i for i in range(1, 8)} | {"torch": 100.0}
    made = rows(kernels, dtype="bfloat16", baseline="torch", backend="cuda")
    sizes = sorted({each["shape"]["m"] for each in made})
    for library, rate, ratio in (("library", 130.0, 1.3), ("slow_library", 135.0, 1.1)):
        of = {"dtype": "bfloat16", "baseline": "torch", "backend": "torch", "cold_speedup": ratio}
        made += [row(library, rate, size, **of) for size in sizes[:-1]]
    (ax,) = panels("throughput", *made)
    assert {"v07_step", "library"} <= set(texts(ax)) and "slow_library" not in texts(ax)


def test_ladder_is_in_order_at_the_largest_square_that_most_kernels_have() -> None:
    oblong = {"m": 5000, "n": 9000, "k": 9000}
    more = [row("torch", 750.0, 8192), *(row(kernel, 1.0, shape=oblong) for kernel in ("triton_tiled", *KERNELS))]
    slower = row("v02_tiled", 6.5, 4096, finished=NOON - dt.timedelta(days=1))
    failed = row("v03_wmma", 50.0, 4096, status="wrong")
    (ax,) = panels("ladder", failed, *rows({"triton_tiled": 500.0} | KERNELS), *more, slower)
    order = ["torch", "v01_naive", "v02_tiled", "triton_tiled"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == order
    bars = [bar for bars in ax.containers for bar in bars]
    assert [bar.get_width() for bar in bars] == [(KERNELS | {"triton_tiled": 500.0})[kernel] for kernel in order]
    steady = [line.get_xdata()[0] for line in ax.lines if line.get_label() == "steady"]
    assert steady == pytest.approx([bar.get_width() / 1.1 for bar in bars])
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first rung is on top
    assert {"700.0", "100.0", "0.857"} <= set(texts(ax)) and any("measured peak, 800.0" in text for text in texts(ax))
    assert any("m=n=k=4096" in text for text in texts(ax))
    colors = [bar.get_facecolor() for bar in bars]
    assert len(set(colors)) == 3 and colors[1] == colors[2]  # PyTorch, the fastest, and one hue for the others


def test_ladder_without_a_share_of_the_peak_has_no_roof() -> None:
    (ax,) = panels("ladder", *rows(cold_percent_of_peak=None))
    assert "700.0" in texts(ax) and not any("peak" in text for text in texts(ax))


def test_a_ladders_percentages_are_the_paired_ratios_of_the_tables() -> None:
    paired = {"cold_speedup": 0.9, "steady_speedup": 1.2}
    (ax,) = panels("ladder", row("torch", 700.0), row("v01_naive", 0.5, baseline="torch", **paired))
    assert {"90.0", "120.0"} <= set(texts(ax))


def test_roofline_has_every_problem_and_the_measured_roofs() -> None:
    made = [*rows(baseline="torch"), row("v02_tiled", 1.0, 16, baseline="torch")]
    newer = row("v02_tiled", 3.5, 2048, finished=NOON + dt.timedelta(days=1), peaks=PEAKS | {"copy_gbps": 4100.0})
    (ax,) = panels("roofline", *made, newer)
    small, middle, large = (2 * m / 6 for m in (512, 1024, 4096))
    ours = {(2 * 16 / 6, 1.0), (small, 3.0), (middle, 3.0), (2 * 2048 / 6, 3.5), (large, 6.0)}
    assert set(points(ax, "fastest of ours")) == ours
    assert set(points(ax, "PyTorch")) == {(small, 350.0), (middle, 350.0), (large, 700.0)}
    assert set(points(ax, "other kernels")) == {(small, 0.25), (middle, 0.25), (large, 0.5)}
    copying = points(ax, "copy 4.10 TB/s")
    for x, y in copying:
        assert y == pytest.approx(4100 * x / 1e3)
    assert copying[1][1] == pytest.approx(800.0)  # the ridge
    assert {y for _, y in points(ax, "_wgmma")} == {800.0} and {y for _, y in points(ax, "_mma")} == {600.0}
    assert {"wgmma 800.0", "mma 600.0"} <= set(texts(ax))
    said = " ".join(" ".join(texts(ax)).split())
    assert "from m=n=k=16 (left) to m=n=k=4096 (right)" in said


def test_short_logarithmic_axes_have_plain_numbers() -> None:
    sizes = (256, 384, 512)
    (ax,) = panels("roofline", *[row(k, t, m, peaks={"copy_gbps": 21.0}) for k, t in KERNELS.items() for m in sizes])
    ax.figure.canvas.draw()
    for which, axis in (("major", ax.xaxis), ("minor", ax.xaxis), ("minor", ax.yaxis)):
        labels = [tick.get_text() for tick in axis.get_ticklabels(which=which)]  # type: ignore[arg-type]
        assert all(re.fullmatch("[0-9.]+" if which == "major" else "", label) for label in labels)
    assert len([tick for tick in ax.get_xticks() if ax.get_xlim()[0] < tick < ax.get_xlim()[1]]) >= 2
    assert ax.get_legend().get_texts()[-1].get_text() == "copy 0.0210 TB/s"


def test_kernels_are_compared_on_one_clock() -> None:
    """v01's clock was a fifth lower while it and its baseline were timed."""
    beside = {"baseline": "torch", "cold_speedup": 1.0}
    made = [row(m=m, cold_baseline_us=row(m=m)["cold_us"], **beside) for m in (512, 4096)]
    made += [row("v01_naive", 560.0, m, cold_baseline_us=row("x", 560.0, m)["cold_us"], **beside) for m in (512, 4096)]
    shown = [bar.get_width() for bars in panels("ladder", *made)[0].containers for bar in bars]
    assert shown[0] == pytest.approx(shown[1])


def luminance(color: str) -> float:
    """WCAG 2's relative luminance."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", [style.LIGHT, style.DARK])
def test_text_and_lines_can_be_seen_on_their_paper(theme: style.Theme) -> None:
    seen = [(theme.ink, 7.0), (theme.muted, 4.5), *((hue, 3.0) for hue in (theme.ours, theme.torch, *theme.rungs))]
    for color, least in seen:
        light, dark = sorted((luminance(color), luminance(theme.paper)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= least, color


def test_names_of_lines_that_end_together_do_not_overlap() -> None:
    kernels = {"torch": 610.0} | {kernel: 600.0 + i for i, kernel in enumerate(LADDER[:4])}
    picture = drawn(*rows(kernels))["throughput"]
    assert isinstance(picture, Picture)
    picture.figure.draw_without_rendering()
    (ax,) = picture.figure.axes
    labels = [text for text in ax.texts if isinstance(text, Annotation) and text.get_text() in kernels]
    assert {text.get_text() for text in labels} == set(kernels)
    boxes = [text.get_window_extent() for text in labels]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(box.x0 > ax.bbox.x1 and ax.bbox.y0 - 10 < box.y0 and box.y1 < ax.bbox.y1 + 10 for box in boxes)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12))
def test_spread_keeps_order_distance_and_bounds(wanted: list[float]) -> None:
    placed = style.spread(wanted, 5.0, 0.0, 100.0)
    order = np.argsort(wanted, kind="stable")
    assert all(b - a >= 5 - 1e-9 for a, b in zip(np.array(placed)[order], np.array(placed)[order][1:], strict=False))
    assert min(placed) >= 0 and max(placed) <= 100 + 1e-9
    gaps = np.diff(np.sort(wanted))
    if (gaps >= 5).all():
        inside = np.clip(wanted, 0, 100)
        assert placed == pytest.approx(inside, abs=1e-6)


SINGLE = [row("torch", 700.0, 4096), row("v01_naive", 0.5, 4096)]
OBLONG = [row(k, 9.0, shape={"m": m, "n": n, "k": 64}) for k in ("torch", "v01_naive") for m, n in ((1, 8), (2, 9))]


@pytest.mark.parametrize(
    ("made", "missing"),
    [
        (SINGLE, {"throughput", "roofline"}),
        (OBLONG, {"throughput", "roofline"}),
        (rows(peaks=None), {"roofline"}),
        (rows(peaks={}), {"roofline"}),
        (rows(peaks={"wgmma_float16_float32": 800.0}), {"roofline"}),
        (rows(peaks={"copy_gbps": 100.0}, device_kind="cpu"), set()),
        (rows(bytes=None), {"roofline"}),
        (rows({"torch": 700.0}), {"ladder", "roofline"}),
        (rows({"v01_naive": 0.5}), {"ladder", "roofline"}),
        (rows(steady_tflops=None), set()),
        (rows(cold_tflops=None), set(make_plots.PLOTS)),
        (rows(cold_tflops=float("nan")), set(make_plots.PLOTS)),
        (rows(status="wrong"), set(make_plots.PLOTS)),
        (rows(roof="copy_gbps"), {"roofline"}),
        ([made | {"shape": None, "params": None, "dtype": None} for made in rows()], {"throughput"}),
        (rows(finished=None), set()),
    ],
)
def test_what_the_rows_do_not_suffice_for_is_left_out_with_a_sentence(
    work: Workspace,
    made: list[store.Row],
    missing: set[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    work.write(*made)
    assert work.run() == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert {line.split()[1] for line in printed.out.splitlines()} == missing
    assert all(f"plot of hgemm on {H200} is left out: " in line for line in printed.out.splitlines())
    assert {name for name in work.files() if name.endswith(".svg")} == {
        f"nvidia-h200/hgemm-{name}.svg" for name in set(make_plots.PLOTS) - missing
    }


def test_columns_that_an_older_file_lacks_are_missing_data(work: Workspace) -> None:
    table = store.to_table(rows()).drop_columns(["peaks", "backend", "cold_percent_of_peak"])
    store.write(table, work.results / "a.parquet")
    assert work.run() == 0
    assert "nvidia-h200/hgemm-ladder.svg" in work.files()


def test_no_rows_and_no_folder(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    assert work.run() == 0
    assert "No plots yet" in work.readme.read_text() and not work.files()
    assert work.run("--results", "absent") == 1
    assert capsys.readouterr().err.count("\n") == 1
    before = work.readme.read_text()
    (work.results / "a.parquet").write_bytes(b"no parquet")
    assert work.run() == 1
    assert work.readme.read_text() == before


def test_no_text_of_a_row_breaks_a_picture_or_the_readme(work: Workspace) -> None:
    name = "v1 $x^{$ \\frac <b>&amp;--> ](x) \n\x00"
    work.write(*rows({"torch": 700.0, name: 3.0}, throttle=name, device=name))
    assert work.run() == 0
    svgs = {file: content for file, content in work.files().items() if file.endswith("svg")}
    assert len(svgs) == len(make_plots.PLOTS)
    for content in svgs.values():
        ET.fromstring(content)
    (image,) = [line for line in work.readme.read_text().splitlines() if line.startswith("![")]
    assert re.fullmatch(r"!\[(?:[^\[\]<>\\]|\\.)+\]\([\w/.-]+\)", image)
