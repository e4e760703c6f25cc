"""The report as its reader has it: in a real browser, without a window."""

from __future__ import annotations

import datetime as dt
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.browser import Browser, chromium
from minfer.analysis import report
from minfer.analysis.tables.problem import percent
from minfer.analysis.web import columns, content, kernels
from minfer.rows import store
from minfer.rows.rules import ABOVE_ROOF
from tests.conftest import ROOT
from tests.tables import NOON, TN, other, row

EVIL = "<img src=x onerror=window.hacked=1>"
SCRIPT = "</script><script>window.hacked=1</script> & <b>bold</b>"
FACTORS = {"torch": 1.0, "v01_naive": 8.0, "v02_tiled": 0.8, "triton_tiled": 0.804}


def rows() -> list[store.Row]:
    """Two ops; a problem with a tie for the first place, one that was timed twice, failures, and names that are markup."""
    found = []
    for size in (512, 1024):
        problem = f"float16/{TN}/m={size},n={size},k={size}"
        for kernel, factor in FACTORS.items():
            us = 100 * factor * (size / 512) ** 3
            ratio = 100 / us * (size / 512) ** 3
            values: dict[str, Any] = {"flops": 2.0 * size**3, "bytes": 6.0 * size**2, "error_over_bound": 0.25}
            values |= {"backend": "cuda", "dtype": "float16", "shape": {"m": size, "n": size, "k": size}}
            values |= {"peaks": {"copy_gbps": 4000.0, "mma_float16_float32": 600.0}, "cold_percent_of_peak": 50.0}
            values |= {"roof": "mma_float16_float32"}
            for regime in ("cold", "steady"):
                values |= {f"{regime}_speedup": ratio, f"{regime}_speedup_low": 0.9903 * ratio}
                values |= {
                    f"{regime}_speedup_high": 1.0107 * ratio,
                    f"{regime}_verdict": "faster" if ratio > 1 else "tie",
                }
            found.append(row(kernel, us, problem, **values))
            if kernel == "v02_tiled":
                earlier = {"run": "r0", "finished": NOON - dt.timedelta(days=3), "commit": "0123456789ab"}
                found.append(row(kernel, 2 * us, problem, **(values | earlier | {"cold_speedup": 0.5})))
    found.append(other("rope", "tokens/s", "torch", 100.0, "bfloat16//tokens=64"))
    found.append(other("rope", "tokens/s", "v01_pairs", 50.0, "bfloat16//tokens=64", cold_speedup=2.0))
    wide: dict[str, Any] = {}
    for regime in ("cold", "steady"):
        wide |= {f"{regime}_speedup_low": 5.0, f"{regime}_speedup_high": 1740.0, f"{regime}_verdict": "faster"}
    flagged = {"status": "unconverged", "flags": "threads waited for a processor"}
    found.append(other("softmax", "GB/s", "torch", 100.0, "bfloat16//rows=64"))
    found.append(other("softmax", "GB/s", "v01_rows", 13.3, "bfloat16//rows=64", **wide, **flagged))
    found.append(row(EVIL, None, status="crashed", message=SCRIPT, run="r2"))
    found.append(row("v09_later", None, status="unsupported", message="needs sm_90a, this GPU is sm_80"))
    return found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    store.write(store.to_table(rows()), folder / "a.parquet")
    target = folder / "report.html"
    assert report.main([str(folder), "-o", str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if chromium() is None:
        pytest.skip("there is no Chromium here: install Debian's package chromium")
    with Browser(1700, 1000) as made:
        yield made


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Browser]:
    """The report's first view; whatever a test does there, the console stays clean and nothing else is asked for."""
    browser.send("Page.navigate", url="about:blank")
    browser.errors.clear()
    browser.requests.clear()
    browser.open(file)
    yield browser
    assert browser.errors == []
    assert set(browser.requests) <= {file.as_uri()}
    assert browser.js("window.hacked") is None


def texts(page: Browser, label: str) -> list[str]:
    """The cells in sight of the first grid, of the column with a label."""
    script = f"""(() => {{ const grid = document.querySelector('.grid');
        const place = [...grid.querySelectorAll('.head button')].findIndex((b) => b.textContent === {json.dumps(label)});
        return [...grid.querySelectorAll('.row')].map((line) => line.children[place].textContent); }})()"""
    return page.js(script)


def search(page: Browser, query: str) -> None:
    box = "document.querySelector('input[type=search]')"
    page.js(f"{box}.value = {json.dumps(query)}; {box}.dispatchEvent(new Event('input'))")


def header(label: str) -> str:
    return f"[...document.querySelectorAll('.grid .head button')].find((b) => b.textContent === {json.dumps(label)})"


def go(page: Browser, view: str) -> None:
    page.js(f"location.hash = {json.dumps(view)}")
    page.until(f"location.hash === {json.dumps(view)} && document.querySelector('h1')")


def test_the_leaderboard_says_what_the_tables_say(page: Browser):
    assert page.js("document.querySelectorAll('.card').length") == 3
    shares = dict(zip(texts(page, "Shape"), texts(page, "% of PyTorch, cold"), strict=True))
    fastest = dict(zip(texts(page, "Shape"), texts(page, "Fastest, cold"), strict=True))
    ties = dict(zip(texts(page, "Shape"), texts(page, "Cannot be told from"), strict=True))
    best = next(r for r in rows() if r["kernel"] == "v02_tiled" and r["run"] == "r1")
    assert shares["m=n=k=512"] == percent(best, "cold", None) == "125.0 % (123.8–126.3)"
    assert fastest["m=n=k=512"] == "v02_tiled" and ties["m=n=k=512"] == "triton_tiled"
    assert shares["tokens=64"] == "200.0 %"
    assert shares["rows=64"] == "faster" and fastest["rows=64"] == "v01_rows † ‡"  # its interval is too wide
    card = page.js("[...document.querySelectorAll('.card')].find((c) => c.textContent.includes('softmax')).textContent")
    assert "unconverged" in card and "flagged" in card and "%" not in card


def test_rows_can_be_filtered_and_sorted(page: Browser):
    go(page, "#/rows")
    every = len(texts(page, "Kernel"))
    assert every == 14  # the newest rows
    page.press("/")
    page.write("kernel:v0 m=1024")
    page.until("document.querySelector('.controls .count').textContent.startsWith('2 ')")
    assert texts(page, "Kernel") == ["v01_naive", "v02_tiled"]
    page.press("Escape")
    for query, count in (
        ("-status:ok", 3),
        ("cold_us<60", 2),
        ("FLOAT16 naive", 2),
        ("status=crash", 0),
        ('"needs sm_90a"', 1),
    ):
        search(page, query)
        assert len(texts(page, "Kernel")) == count, query
    search(page, "op=hgemm status=ok m=512")
    page.js(f"{header('Cold')}.click()")  # numbers begin with the largest
    assert texts(page, "Kernel") == ["v01_naive", "torch", "triton_tiled", "v02_tiled"]
    page.js(f"{header('Cold')}.click()")
    assert texts(page, "Kernel")[0] == "v02_tiled"
    page.js(f"{header('Kernel')}.click()")
    assert texts(page, "Kernel") == ["torch", "triton_tiled", "v01_naive", "v02_tiled"]


def test_at_1280_pixels_the_ratio_is_in_sight_and_cards_hold_their_text(page: Browser):
    page.send("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    wide = "[...document.querySelectorAll('.card')].every((c) => c.scrollWidth <= c.clientWidth)"
    assert page.js(wide)
    go(page, "#/rows")
    labels = page.js("[...document.querySelectorAll('.grid .head button')].map((b) => b.textContent)")
    assert labels[:5] == ["Op", "Kernel", "Status", "Shape", "% of baseline, cold"]
    assert page.js(f"{header('% of baseline, cold')}.getBoundingClientRect().right") < 1280


def test_a_mistaken_filter_says_so(page: Browser):
    go(page, "#/rows")
    page.press("/")
    page.write("colour:red")
    assert page.js("document.querySelector('.controls .count').textContent") == "There is no column colour."


@pytest.mark.slow
def test_everything_works_by_keyboard(page: Browser):
    page.press("3")
    page.until("document.querySelector('h1').textContent === 'All rows'")
    page.press("/")
    page.write("v02_tiled")
    page.press("Enter")  # from the filter to the table
    page.press("ArrowDown")
    page.press("End")
    assert page.js("document.querySelector('.row.active').ariaRowIndex") == "3"
    page.press("Enter")
    page.until("document.querySelector('h1').textContent === 'v02_tiled'")
    page.press("3")
    page.until("document.querySelector('h1').textContent === 'All rows'")
    page.js(f"{header('Cold')}.focus()")
    assert page.js("document.activeElement.tabIndex") == 0  # Tab gets there
    page.press("Enter")
    page.until(f"{header('Cold')}.parentElement.ariaSort === 'descending'")
    page.press("?")
    assert page.js("document.querySelector('#help').open")
    page.press("Escape")
    page.press("5")
    page.until("document.querySelector('h1').textContent === 'Failures'")


def test_a_kernels_page_has_source_history_and_errors(page: Browser):
    go(page, "#/kernel/hgemm/v02_tiled")
    page.until("document.querySelectorAll('.plot .main-svg').length >= 2")
    headings = page.js("[...document.querySelectorAll('main h2')].map((h) => h.textContent)")
    assert headings == ["Cases", "Error against its bound", "History", "Source"]
    source = (ROOT / "minfer" / "ops" / "hgemm" / "v02_tiled.cu").read_text()
    shown = page.js("[...document.querySelectorAll('pre .line')].map((l) => l.textContent).join('\\n')")
    assert shown == source


def test_foreign_text_is_never_markup(page: Browser):
    go(page, "#/failures")
    assert texts(page, "Kernel") == [EVIL] and texts(page, "Message") == [SCRIPT]
    page.js("document.querySelector('.grid').focus()")
    page.press("Enter")
    page.until(f"document.querySelector('h1').textContent === {json.dumps(EVIL)}")
    assert page.js("document.querySelectorAll('main img, main b:not(.facts b), main script').length") == 0
    go(page, "#/plots")
    page.until("document.querySelectorAll('.plot .main-svg').length >= 3")


def test_plots_have_every_kernel_and_the_roofs(page: Browser):
    go(page, "#/plots")
    page.until("document.querySelectorAll('.plot .annotation-text').length >= 2")
    notes = page.js("[...document.querySelectorAll('.plot .annotation-text')].map((t) => t.textContent)")
    assert any("mma 600.0 TFLOP/s" in note for note in notes) and any("copy 4.00 TB/s" in note for note in notes)
    assert page.js("document.querySelectorAll('.plot')[2].data.filter((t) => t.mode === 'markers').length") == len(
        FACTORS
    )
    page.js(
        "(() => { const s = document.querySelector('select'); s.selectedIndex = 1; s.dispatchEvent(new Event('change')) })()"
    )
    page.until(
        "document.querySelector('.plot').data && document.querySelector('.plot').data[0].y.includes('v01_pairs')"
    )


def test_axes_that_grow_together_are_one(browser: Browser, tmp_path: Path):
    """Lengths of queries and of keys are equal in all rows, heads vary on their own, and head_dim never does."""
    shapes = [f"seq_q={n},seq_kv={n},heads={h},head_dim=64" for n in (128, 256, 512) for h in (8, 16)]
    found = [
        other("attention", "tokens/s", kernel, 50.0, f"bfloat16//{shape}")
        for shape in shapes
        for kernel in ("torch", "v01_naive")
    ]
    store.write(store.to_table(found), tmp_path / "a.parquet")
    assert report.main([str(tmp_path), "-o", str(tmp_path / "r.html")]) == 0
    browser.errors.clear()
    browser.send("Page.navigate", url="about:blank")
    browser.open(tmp_path / "r.html", "#/plots")
    browser.until("document.querySelector('select[aria-label=Over]')")
    over = browser.js("[...document.querySelector('select[aria-label=Over]').options].map((o) => o.textContent)")
    assert over[0].startswith("sequence length (") and len(over) == 2 + 3
    assert all(each.startswith(("sequence length (heads=", "heads (seq")) for each in over)
    assert browser.errors == []


@pytest.mark.slow
def test_light_and_dark(page: Browser, file: Path):
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    found = {}
    for theme in ("light", "dark"):
        page.prefers(theme)
        page.send("Page.navigate", url="about:blank")
        page.open(file)
        found[theme] = page.js(ground)
    assert found == {"light": "rgb(255, 255, 255)", "dark": "rgb(14, 17, 22)"}
    page.press("t")
    assert page.js(ground) == found["light"]
    page.js("localStorage.clear()")
    page.prefers("light")


def test_rows_that_say_hardly_anything_are_shown(browser: Browser, tmp_path: Path):
    bare: list[store.Row] = [
        {"case": "op/k", "op": "op", "kernel": "k", "status": "ok"},
        {"case": "hgemm/v01_naive/float16//m=1", "op": "hgemm", "kernel": "v01_naive", "status": "ok", "cold_us": 5.0},
        {"case": "hgemm/x@0123456/float16//m=1", "op": "hgemm", "kernel": "x@0123456", "status": "error"},
    ]
    store.write(store.to_table(bare), tmp_path / "a.parquet")
    assert report.main([str(tmp_path), "-o", str(tmp_path / "r.html")]) == 0
    browser.errors.clear()
    browser.send("Page.navigate", url="about:blank")
    browser.open(tmp_path / "r.html", "#/kernel/op/k")
    views = ["#/", "#/plots", "#/rows", "#/kernels", "#/failures", "#/kernel/op/k", "#/kernel/hgemm/%", "#/nowhere"]
    for view in views:
        browser.js("document.querySelector('h1').remove()")  # each view has its own
        go(browser, view)
        assert browser.js("document.querySelector('h1').textContent"), view
    assert browser.errors == []


def test_mistakes_are_one_sentence(tmp_path, capsys, monkeypatch):
    for words, said in (
        (["nowhere"], "there is no file, folder or run nowhere; there are no runs below results"),
        ([str(tmp_path)], f"{tmp_path} has no parquet files; name a results folder, a file or a run"),
    ):
        monkeypatch.chdir(tmp_path)
        assert report.main(words) == 2
        assert capsys.readouterr().err == f"minfer report: {said}\n"
    (tmp_path / "torn.parquet").write_text("torn")
    assert report.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert (
        said[0].startswith(f"{tmp_path}/torn.parquet: ") and "there are no rows to show" in said[1] and len(said) == 2
    )
    (tmp_path / "torn.parquet").unlink()
    store.write(store.to_table(rows()), tmp_path / "a.parquet")
    assert report.main([str(tmp_path), "-o", str(tmp_path / "no" / "r.html")]) == 2
    assert "cannot write" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert report.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"minfer report: {report.NO_PLOTLY}\n"


def test_columns_keep_whole_numbers_and_order_texts_naturally():
    big = 2.0**40 + 1
    made = columns.encode(
        {"n": np.array([1.0, big, np.nan]), "x": np.array([0.1, 2.5, np.nan]), "t": ["m=512", None, "m=64"]},
        compact=True,
    )
    assert made["columns"]["n"]["type"] == "f8" and made["columns"]["x"]["type"] == "f4"
    assert made["columns"]["t"]["texts"] == ["", "m=64", "m=512"]
    codes = made["bytes"][made["columns"]["t"]["offset"] :][:3]
    assert list(codes) == [2, 0, 1]


@pytest.mark.parametrize(
    ("counted", "word"),
    [
        ({"dram_percent": 92.0, "tensor_percent": 10.0}, "memory bandwidth is the limit"),
        ({"dram_percent": 20.0, "tensor_percent": 95.0}, "arithmetic is the limit"),
        ({"dram_percent": 20.0, "tensor_percent": 25.0, "sm_percent": 30.0}, "waits for latency"),
        ({"dram_bytes": 3e6}, "3.0 times the least bytes"),
        ({"shared_load_instructions": 100.0, "shared_load_conflicts": 700.0}, "7.0 bank conflicts"),
        ({"stall_barrier": 3.0, "stall_long_scoreboard": 9.0, "stall_selected": 10.0}, "long scoreboard (9.0"),
    ],
)
def test_what_counters_say(counted: dict[str, float], word: str):
    said = kernels.says(counted, 1e6)
    assert len(said) == 1 and word in said[0]


def test_a_source_is_the_rows_and_no_other_file():
    sources = kernels.Sources()
    found = sources.of("rmsnorm", "v02_vectors", None)
    assert found and found["path"] == "minfer/ops/rmsnorm/v02_vectors.cu" and "cuda/norm_row.cuh" in found["headers"]
    assert (
        sources.of("hgemm", "v07_tuned_acc16", None) is None
        or "v07_tuned" in sources.of("hgemm", "v07_tuned_acc16", None)["path"]
    )  # type: ignore[index]
    torch = sources.of("hgemm", "torch", None)
    assert torch and torch["path"] == "minfer/ops/hgemm/__init__.py"
    assert sources.of("../..", "x", None) is None and sources.of("hgemm", "../../x", None) is None
    assert sources.of("hgemm", "v01_naive", "ffffffffffff")["commit"] == ""  # type: ignore[index]


@pytest.mark.parametrize(("us", "flags"), [(100.0, f"busy; {ABOVE_ROOF}"), (104.0, "busy"), (200.0, "busy")])
def test_a_row_above_its_roof_is_flagged_and_not_hidden(us: float, flags: str) -> None:
    """Its bytes take 104 µs at the measured peak."""
    values = {
        "bytes": 104e6,
        "metric": "GB/s",
        "peaks": {"copy_gbps": 1000.0},
        "roof": "copy_gbps",
        "cold_percent_of_peak": 1.0,
    }
    (found,) = content.add_shares([row("v01_rows", us, "float16//m=1", **values, flags="busy")])
    assert found["cold_percent_of_peak"] == pytest.approx(100 * 104 / us) and found["flags"] == flags
