"""How fast the report of 100,000 rows is in a browser: `python benchmarks/report_at_scale.py`.

Writes rows of the real schema to a temporary folder, makes their report, opens it in Chromium without a window, and prints
when the page first paints, when its table can be used, and what a filter and a sort take until the next frame. It writes what
it found to benchmarks/results/, from where analysis/make.py evidence takes it. Exits 1 when a target is missed. Linux only,
with Chromium installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.browser import Browser, BrowserError
from benchmarks.rows import write
from benchmarks.tables_at_scale import generate
from minfer.analysis import report
from minfer.bench.device import pick

FIRST_PAINT_S, FILTER_S = 2.0, 0.2  # the targets
QUERIES = ("v0", "kernel:v07", "cold_us<50", "float16 hgemm -torch", "m=4096", "no such row", "")
LOOKS = 5  # at each page, of which the median counts


def first_paint_s(browser: Browser, file: Path) -> tuple[float, float]:
    """Seconds from the start of loading to the first paint, and to a table that can be used."""
    browser.send("Page.navigate", url="about:blank")
    browser.open(file, "#/rows")
    painted = browser.js("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    usable = browser.js("performance.getEntriesByName('usable')[0].startTime")
    return painted / 1e3, usable / 1e3


def until_frame_s(browser: Browser, action: str) -> float:
    """Seconds from an action of the user to the frame that shows what came of it."""
    script = f"""new Promise((done) => {{ const begin = performance.now(); {action};
        requestAnimationFrame(() => setTimeout(() => done(performance.now() - begin))); }})"""
    return float(browser.js(script)) / 1e3


def filter_s(browser: Browser, query: str) -> float:
    action = f"""const box = document.querySelector('input[type=search]'); box.value = {json.dumps(query)};
        box.dispatchEvent(new Event('input'))"""
    return until_frame_s(browser, action)


def sort_s(browser: Browser, label: str) -> float:
    return until_frame_s(
        browser,
        f"[...document.querySelectorAll('.grid .head button')].find((b) => b.textContent === {json.dumps(label)}).click()",
    )


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def checks(rows: int, painted: float, usable: float, filtered: float, errors: int) -> list[dict[str, object]]:
    """What the report is judged by, as analysis/make.py evidence shows it."""
    found = (
        ("first paint", painted, FIRST_PAINT_S, "s"),
        ("until the table of all rows can be used", usable, None, "s"),
        (f"the slowest of {len(QUERIES)} filters", filtered, FILTER_S, "s"),
        ("errors in the browser's console", float(errors), 0.0, "errors"),
    )
    about: dict[str, object] = {"check": f"report of {rows:,} rows, in Chromium"}
    return [
        about
        | {"what": what, "value": value, "target": most, "unit": unit}
        | {"met": None if most is None else value <= most}
        for what, value, most, unit in found
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=2, help="how many times every case was run")
    options = parser.parse_args()
    if min(options.rows, options.runs) < 1:
        parser.error("--rows and --runs take numbers of at least 1")
    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name) / "results", Path(name) / "report.html"
        generate(folder, options.rows, options.runs, 5_000)
        begin = time.perf_counter()
        if report.main([str(folder), "-o", str(file)]):
            return 1
        print(f"made in {time.perf_counter() - begin:.1f} s")
        try:
            with Browser() as browser:
                paints = [first_paint_s(browser, file) for _ in range(LOOKS)]
                filters = {query: median([filter_s(browser, query) for _ in range(LOOKS)]) for query in QUERIES}
                sorts = {label: median([sort_s(browser, label) for _ in range(LOOKS)]) for label in ("Kernel", "Cold")}
                errors = browser.errors
        except BrowserError as error:
            print(error, file=sys.stderr)
            return 1
    painted, usable = (median([pair[index] for pair in paints]) for index in range(2))
    slowest = max(filters.values())
    found = checks(options.rows, painted, usable, slowest, len(errors))
    write("report-at-scale", found, pick("cpu"))
    print(f"first paint {painted:.2f} s (target {FIRST_PAINT_S:g} s), table usable after {usable:.2f} s")
    for query, seconds in filters.items():
        print(f"filter {query!r}: {1e3 * seconds:.0f} ms")
    for label, seconds in sorts.items():
        print(f"sort by {label}: {1e3 * seconds:.0f} ms")
    print(f"slowest filter {1e3 * slowest:.0f} ms (target {1e3 * FILTER_S:.0f} ms); console errors: {errors or 'none'}")
    return 0 if all(row["met"] is not False for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
